# SPDX-License-Identifier: Apache-2.0
"""Scenario files: those that come with the repository, and what is refused, by name."""

from pathlib import Path

import pytest

from loadtests import client
from loadtests.prompts import Source
from loadtests.scenario import Level, Scenario, ScenarioError, load, load_all, names

GOOD = 'why = "a test"\nprompt = 64\noutput = 8\nusers = [1, 4]\n'


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", names())
def test_every_scenario_of_the_repository_loads(name: str) -> None:
    scenario = load(name)
    assert scenario.name == name
    assert scenario.why.endswith(".")
    assert scenario.levels


def test_the_usual_shapes_are_there() -> None:
    shapes = {name: (load(name).prompt, load(name).output) for name in ("128-128", "1k-1k", "8k-1k", "1k-8k")}
    assert shapes == {"128-128": (128, 128), "1k-1k": (1024, 1024), "8k-1k": (8192, 1024), "1k-8k": (1024, 8192)}
    assert load("chat-shared-prefix").shared_prefix > 0
    assert load("sampled").sampling.body() == {
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 50,
        "frequency_penalty": 0.3,
    }
    assert load("128-128").sampling.body() == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "promt = 3\n", ["mine.toml", "unknown key 'promt'", "prompt", "shared_prefix"]),
        (GOOD + "[sampling]\ntemp = 1\n", ["unknown key 'sampling.temp'", "temperature"]),
        (GOOD + 'name = "x"\n', ["unknown key 'name'"]),
        (GOOD + "rates = [2.0, -1.0]\n", ["rates.1 = -1.0", "greater than 0"]),
        (GOOD + "rates = [nan]\n", ["rates.0 = nan"]),
        (GOOD.replace("[1, 4]", "[0]"), ["users.0 = 0", "greater than or equal to 1"]),
        (GOOD.replace("[1, 4]", "[]"), ["at least one level"]),
        (GOOD.replace("prompt = 64", "prompt = 6.5"), ["prompt = 6.5", "integer"]),
        (GOOD.replace("prompt = 64\n", ""), ["'prompt' is missing"]),
        (GOOD + "shared_prefix = 64\n", ["shared_prefix = 64 leaves nothing of prompt = 64"]),
        (GOOD + "window_s = 0\n", ["window_s = 0", "greater than 0"]),
        (GOOD + "vary = 1.0\n", ["vary = 1.0", "less than 1"]),
        (GOOD + "[sampling]\ntop_p = 2\n", ["sampling.top_p = 2", "less than or equal to 1"]),
        ("why = ", ["mine.toml", "Invalid value"]),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, says: list[str]) -> None:
    with pytest.raises(ScenarioError) as caught:
        load(write(tmp_path, text))
    for words in says:
        assert words in str(caught.value)


def test_no_such_scenario() -> None:
    with pytest.raises(ScenarioError, match=r"no scenario '2k-2k': choose from .*1k-1k"):
        load("2k-2k")
    with pytest.raises(ScenarioError, match="128-128 is named twice"):
        load_all(["128-128", "128-128"])


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_is_positive(factor: float) -> None:
    with pytest.raises(ScenarioError, match="scale"):
        load("128-128").scaled(factor)


def test_scaled() -> None:
    scenario = load("chat-shared-prefix").scaled(0.125)
    assert (scenario.prompt, scenario.output, scenario.shared_prefix) == (288, 32, 256)
    tiny = load("chat-shared-prefix").scaled(1e-6)
    assert (tiny.prompt, tiny.output, tiny.shared_prefix) == (2, 2, 0)


def test_levels(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, GOOD + "rates = [0.5]\n"))
    assert scenario.levels == (Level(users=1), Level(users=4), Level(rate=0.5))
    assert [level.label for level in scenario.levels] == ["1 user", "4 users", "0.5 requests/s"]
    with pytest.raises(ScenarioError, match=r"users\.0 = -2"):
        scenario.changed(users=(-2,))


def test_a_scenario_survives_its_file(tmp_path: Path) -> None:
    scenario = load("sampled").scaled(0.1)
    path = tmp_path / "sampled.toml"
    path.write_text(client.to_toml(scenario))
    assert load(str(path)) == scenario


def source(scenario: Scenario, seed: str = "0") -> Source:
    return Source(scenario, 1000, seed)


def test_prompts_are_the_seed_s_and_no_two_alike() -> None:
    scenario = load("1k-1k").scaled(0.1)
    first = source(scenario)
    drawn = [first.request(process, user, turn) for process in (0, 1) for user in (0, 1) for turn in range(20)]
    assert len({tuple(request.prompt) for request in drawn}) == len(drawn)
    assert first.request(1, 0, 7) == source(scenario).request(1, 0, 7)
    assert first.request(1, 0, 7) != source(scenario, "1").request(1, 0, 7)
    ids = {token for request in drawn for token in request.prompt}
    assert min(ids) >= 16
    assert max(ids) < 1000


def test_lengths_vary_as_told() -> None:
    requests = [source(load("1k-1k")).request(0, 0, turn) for turn in range(200)]
    for lengths in ([len(r.prompt) for r in requests], [r.output for r in requests]):
        assert 819 <= min(lengths) < 840
        assert 1000 < max(lengths) <= 1024
    assert {len(source(load("128-128")).request(0, 0, turn).prompt) for turn in range(20)} == {128}


def test_prefixes_are_shared_in_groups() -> None:
    scenario = load("chat-shared-prefix").scaled(0.1)
    requests = [source(scenario).request(0, 0, turn) for turn in range(100)]
    heads = {tuple(request.prompt[: scenario.shared_prefix]) for request in requests}
    assert len(heads) == scenario.groups
    assert len({tuple(request.prompt) for request in requests}) == len(requests)
    other = source(scenario, "1").request(0, 0, 0).prompt
    assert tuple(other[: scenario.shared_prefix]) not in heads


def test_text_prompts() -> None:
    scenario = load("128-128").changed(text=True)
    request = source(scenario).request(0, 0, 0)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 128
    assert request.prompt_tokens is None


def test_body() -> None:
    made = source(load("sampled").scaled(0.01))
    body = made.body(made.request(0), "m", detokenize=True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["ignore_eos"] is True
    assert (body["temperature"], body["top_k"]) == (0.8, 50)
    assert "detokenize" not in body
    assert made.body(made.request(0), "m", detokenize=False)["detokenize"] is False
