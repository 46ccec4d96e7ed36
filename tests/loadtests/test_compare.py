# SPDX-License-Identifier: Apache-2.0
"""The comparison around the loads: its options, its order, what it keeps when something fails."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_stand_in import serving

from integration.server import Reply
from loadtests import client, compare, offline, servers
from loadtests.figures import Figures, Window, summarize
from loadtests.records import Process, Tick
from loadtests.scenario import Level, ScenarioError, load
from loadtests.servers import BackendError, Served
from loadtests.stream import Sample
from loadtests.subjects import SubjectError, resolve

FACTS = {"served_by": {"X": 2}, "graphs": "NONE", "page_size": 16, "devices": 1, "max_model_len": 300}


def figures(failure: str = "") -> Figures:
    sample = Sample(1.0, 3, [50_000, 60_000, 70_000], [1, 2, 3], 5, failure, failure and "why")
    ticks = [Tick(at=1.0, cpu_s=0), Tick(at=5.0, cpu_s=0.1)]
    return summarize([Process(0.0, 6.0, 1, [sample], ticks)], Window(0.5, 5.5))


class FakeServer:
    """A server that is alive as long as nobody says otherwise."""

    def __init__(self) -> None:
        self.dead = False
        self.url = "http://127.0.0.1:9"
        self.log = "INFO fine\nValueError: out of memory\n"
        self.process = self

    def poll(self) -> int | None:
        return 7 if self.dead else None

    def ask(self, path: str) -> Any:
        assert path == "/metrics"
        names = [name for name in servers.COUNTERS.values() if "preemptions" not in name]
        return Reply(200, "".join(f'{name}{{engine="{i}"}} 2.0\n' for name in names for i in range(2)))


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Servers and loads that take no time; by backend: `refuse` to start, `die` under load, or `fail` requests."""
    behaviour: dict[str, Any] = {"started": []}

    @contextlib.contextmanager
    def serve(backend: str, *_: object) -> Iterator[Served]:
        behaviour["started"].append(backend)
        if behaviour.get(backend) == "refuse":
            raise BackendError("did not start: no such thing", "the log")
        server: Any = FakeServer()
        behaviour["now"] = (backend, server)
        yield Served(server, [], 1.0, FACTS, [])

    def run(load: client.Load, alive: Any, progress: Any) -> Figures:
        backend, server = behaviour["now"]
        progress(0.5, [Tick(at=1.0, cpu_s=0.0, sent=1)])
        if behaviour.get(backend) == "die":
            server.dead = True
            raise client.ServerGoneError
        return figures("HTTP status" if behaviour.get(backend) == "fail" else "")

    monkeypatch.setattr(servers, "serve", serve)
    monkeypatch.setattr(client, "run", run)
    monkeypatch.setattr(compare, "check_backends", lambda names: None)
    return behaviour


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    words = ["--model", "tiny", "--backends", "dsl", "A", "B", "--users", "1", "2", "--out", str(folder), *arguments]
    status = compare.main(words)
    return status, [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_all_is_well(tmp_path: Path, backends: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = run(tmp_path, "--rounds", "3", "--scenario", "128-128", "--", "--max-num-seqs", "7")
    assert status == 0
    assert backends["started"] == ["dsl", "A", "B", "A", "B", "dsl", "B", "dsl", "A"]
    runs = [line for line in lines if line["kind"] == "run"]
    assert len(runs) == 3 * 3 * 2
    assert runs[0]["server"] == dict.fromkeys(("queried", "hits", "generated", "tpot_s", "tpot_requests"), 0.0)
    assert lines[0]["flags"][-2:] == ["--max-num-seqs", "7"]
    assert lines[-1] == {"kind": "end", "status": 0, "reason": ""}
    shown = capsys.readouterr().out
    assert "128-128, 2 users: dsl over B: tokens/s 1.00x (1.00 to 1.00)" in shown
    assert "/18] B: round 3, 128-128, 2 users: " in shown
    assert "3 rounds, interleaved" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("what", "says"), [("refuse", "did not start"), ("die", "died under load: ended with status 7")]
)
def test_a_backend_that_fails(tmp_path: Path, backends: dict[str, Any], what: str, says: str) -> None:
    """It is named, it is not started again, and the others' figures are kept."""
    backends["A"] = what
    status, lines = run(tmp_path, "--rounds", "2")
    assert status == 1
    assert backends["started"] == ["dsl", "A", "B", "B", "dsl"]
    (failed,) = [line for line in lines if line["kind"] == "failed"]
    assert failed["backend"] == "A"
    assert says in failed["message"]
    assert what == "refuse" or "ValueError: out of memory" in failed["message"]
    assert {line["backend"] for line in lines if line["kind"] == "run"} == {"dsl", "B"}
    assert says in (tmp_path / "page.html").read_text()


def test_requests_that_fail(tmp_path: Path, backends: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    backends["B"] = "fail"
    status, lines = run(tmp_path, "--rounds", "1")
    assert status == 1
    assert [line["figures"]["errors"] for line in lines if line["kind"] == "run" and line["backend"] == "B"] == [
        {"HTTP status": 1}
    ] * 2
    assert "1 x HTTP status (why)" in capsys.readouterr().out


def test_a_window_without_an_answer(tmp_path: Path, backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = summarize([Process(0.0, 6.0, 0, [], [])], Window(0.5, 5.5))
    monkeypatch.setattr(client, "run", lambda *_: nothing)
    status, _ = run(tmp_path, "--rounds", "1")
    assert status == 1
    assert "no request that was sent in the window was answered" in (tmp_path / "page.html").read_text()


def test_a_scenario_that_does_not_fit(tmp_path: Path, backends: dict[str, Any]) -> None:
    """The server takes 300 tokens: the short scenario runs, the long one is refused with both numbers."""
    status, lines = run(tmp_path, "--rounds", "1", "--scenario", "128-128", "1k-1k")
    assert status == 1
    failed = [line for line in lines if line["kind"] == "failed"]
    assert {line["scenario"] for line in failed} == {"1k-1k"}
    assert "requests of 2048 tokens, the server accepts 300" in failed[0]["message"]
    assert {line["scenario"] for line in lines if line["kind"] == "run"} == {"128-128"}


def test_interrupted(tmp_path: Path, backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> Figures:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "run", interrupt)
    status, lines = run(tmp_path)
    assert status == compare.INTERRUPTED
    assert lines[-1] == {"kind": "end", "status": compare.INTERRUPTED, "reason": "interrupted"}
    assert "The run ended early: interrupted" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scenario", "nope"], "no scenario 'nope'"),
        (["--rates", "-2"], "rates.0 = -2.0"),
        (["--scale", "0"], "scale 0.0"),
        (["--model", "nowhere/none-such"], "no model 'nowhere/none-such'"),
        (["--backends", "dsl", "dsl"], "a name occurs twice"),
        (["--offline", "--scenario", "chat-shared-prefix"], "shared_prefix, which --offline does not support"),
        (["--offline", "--", "word"], "'word' is not a flag"),
        (["--", "--host", "0.0.0.0"], "VLLM_SERVER_DEV_MODE=1: vLLM's development mode lets every client"),
        (["--", "--host=::1"], "these servers listen on 127.0.0.1"),
        (["--", "--port", "8000"], "--port: these servers"),
    ],
)
def test_bad_input(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert compare.main(["--model", "tiny", *arguments]) == compare.WRONG_USE
    assert says in capsys.readouterr().err


def test_an_unknown_backend_is_refused_before_a_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm.v1.attention.backends.registry")
    assert compare.main(["--model", "tiny", "--backends", "dsl", "NOPE", "cpu_attn"]) == compare.WRONG_USE
    assert "--backends NOPE: vLLM has no such attention backend; choose from DSL, " in capsys.readouterr().err


def test_rounds_are_counted_from_one() -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--model", "tiny", "--rounds", "0"])


def test_levels_of_one_kind_replace_all(tmp_path: Path) -> None:
    options = compare.parse(["--model", "tiny", "--scenario", "sampled", "--rates", "3"])
    (scenario,) = compare.plan_of(options, tmp_path).scenarios
    assert scenario.levels == (Level(rate=3.0),)


def test_models(tmp_path: Path) -> None:
    shape = resolve("tiny", tmp_path, ["--max-model-len=64"])
    assert "--max-model-len" not in shape.flags
    assert (shape.vocabulary, shape.tokenizer, shape.backends[0]) == (2048, False, "dsl")
    demo = resolve("demo", tmp_path)
    assert (demo.vocabulary, demo.tokenizer, demo.flags) == (1024, True, ())
    own = resolve(demo.path, tmp_path)
    assert own.vocabulary == 1024
    (tmp_path / "empty").mkdir()
    with pytest.raises(SubjectError, match="is no model"):
        resolve(str(tmp_path / "empty"), tmp_path)
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(SubjectError, match="no vocab_size"):
        resolve(str(tmp_path / "empty"), tmp_path)
    assert resolve(str(tmp_path / "empty"), tmp_path, vocabulary=50).vocabulary == 50


def test_engine_arguments_from_flags() -> None:
    flags = [
        "--max-model-len",
        "64",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--dtype=half",
        "--x",
        '{"a": 1}',
    ]
    assert offline.engine_arguments(flags) == {
        "max_model_len": 64,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "dtype": "half",
        "x": {"a": 1},
    }


def test_batches() -> None:
    found = offline.batches(load("128-128").changed(users=(1, 8)))
    level, batch = found["128-128@8"]
    assert (level, batch.requests, batch.prompt, batch.output) == (Level(users=8), 8, 128, 128)
    with pytest.raises(ScenarioError, match="sampling"):
        offline.batches(load("sampled"))


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of the engines' benchmark become lines; an engine that fails is dropped like a server."""

    def events(backend: str, scenarios: list[Any], settings: Any, folder: Path) -> Iterator[dict[str, Any]]:
        yield {"event": "imported"}
        if backend == "B":
            yield {"event": "failed", "message": "no such backend", "log_tail": ""}
            return
        yield {"event": "ready", "at_s": 2.0, "facts": FACTS, "startup_lines": []}
        assert settings.arguments()["max_model_len"] == 64
        for scenario in scenarios:
            yield {"event": "result", "scenario": scenario.id, "rates": [90.0, 110.0]}

    monkeypatch.setattr(offline.children, "offline", events)
    monkeypatch.setattr(compare, "check_backends", lambda names: None)
    status, lines = run(tmp_path, "--offline", "--rounds", "2", "--", "--max-model-len", "64")
    assert status == 1
    runs = [line for line in lines if line["kind"] == "run"]
    assert [(line["backend"], line["level"]["users"]) for line in runs[:2]] == [("dsl", 1), ("dsl", 2)]
    assert len(runs) == 2 * 2 * 2
    assert runs[0]["figures"] == {"output_per_s": 100.0}
    assert [line["backend"] for line in lines if line["kind"] == "failed"] == ["B"]


def test_counters_are_summed_over_labels() -> None:
    server: Any = FakeServer()
    found = Served(server, [], 1.0, FACTS, []).counters()
    assert found == dict.fromkeys(("queried", "hits", "generated", "tpot_s", "tpot_requests"), 4.0)
    assert servers.server_tpot_ms({"tpot_s": 0.2, "tpot_requests": 4.0}) == 50
    assert servers.server_tpot_ms({"tpot_s": 0.0, "tpot_requests": 0.0}) is None


def test_secrets_are_written_nowhere(tmp_path: Path, backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the command's, nor those that a log has."""

    @contextlib.contextmanager
    def serve(*arguments: Any) -> Iterator[Served]:
        arguments[3].write_text("non-default args: {'api_key': ['open-sesame-1']}")
        raise BackendError("did not start: api_key open-sesame-1", "the log: open-sesame-1 hf_abcdefghijkl")
        yield

    monkeypatch.setattr(servers, "serve", serve)
    flags = ["--api-key", "open-sesame-1", "--hf-token=swordfish", "--max-num-batched-tokens", "512"]
    status, lines = run(tmp_path, "--rounds", "1", "--", *flags)
    assert status == 1
    assert lines[0]["flags"][-5:] == ["--api-key", "***", "--hf-token=***", "--max-num-batched-tokens", "512"]
    assert [line["message"] for line in lines if line["kind"] == "failed"] == ["did not start: api_key ***"] * 3
    for path in tmp_path.rglob("*.*"):
        for secret in ("open-sesame-1", "swordfish", "hf_abcdefghijkl"):
            assert secret not in path.read_text(), path


def test_the_stand_in_stands_in() -> None:
    """What the tests of the client rest on."""
    with serving("good", "status") as server:
        assert [server.take({}) for _ in range(3)] == ["good", "status", "good"]
