# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison: what it says, what it warns of, and what a browser makes of it."""

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import example_results
import pytest

from benchmarks import document
from integration import browser
from loadtests import charts, page, results
from loadtests.results import PER_DEVICE, TTFT
from loadtests.scenario import Level

Record = dict[str, Any]
CHARTS = 9  # of a scenario


def rendered(records: list[Record]) -> str:
    """The page without plotly's own script, as one line."""
    full = page.render(records)
    cut = full.index("<body>")
    return " ".join(full[cut:].split())


def plain(markup: str) -> str:
    """The words that a reader sees."""

    class Words(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.words: list[str] = []
            self.hidden = False

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.hidden = tag == "script"

        def handle_endtag(self, tag: str) -> None:
            self.hidden = False

        def handle_data(self, data: str) -> None:
            self.words += [] if self.hidden else [data]

    parser = Words()
    parser.feed(markup)
    return " ".join(" ".join(parser.words).split())


def test_what_the_figures_were_taken_with() -> None:
    words = plain(rendered(example_results.records()))
    for fact in (
        "llama-8b on NVIDIA Example",
        "driver 580.1",
        "16 cores",
        "2026-01-02 03:04:05+00:00",
        "commit 0123456789ab",
        "3 rounds, interleaved",
        "client of up to 8 processes",
        "torch 2.11.0, vllm 0.26.0",
        "python -m loadtests.compare --model llama-8b",
        "--max-model-len 4096",
        "1024 tokens in, 1024 out (the last 20% drawn); all prompts differ; greedy",
        "2048 of them shared within 4 groups",
        "tokens/s/GPU",
    ):
        assert fact in words
    assert "quack-kernels" not in words
    assert "Warnings" not in words
    assert "not committed" not in words


def test_ratios_on_the_page() -> None:
    """Speeds are 1.1, 1.0 and 0.8, and a round's drift meets all alike."""
    gathered = results.gather(example_results.records())
    level = Level(users=32)
    over = {peer: gathered.ratio("1k-1k", level, peer, PER_DEVICE) for peer in gathered.peers}
    assert {peer: (round(one.median, 3), one.rounds) for peer, one in over.items() if one} == {
        "FLASH_ATTN": (1.1, 3),
        "TRITON_ATTN": (1.375, 3),
    }
    times = gathered.ratio("1k-1k", level, "TRITON_ATTN", TTFT)
    assert times is not None
    assert (round(times.median, 3), times.verdict) == (1.375, "better")
    markup = rendered(example_results.records())
    assert re.search(r'class="better">1\.10× <span class="range">1\.10–1\.10', markup)
    assert 'class="worse">1' not in markup


def test_a_ratio_that_rounds_disagree_on_has_no_colour() -> None:
    lines = example_results.records()
    for line in lines:
        if line["kind"] == "run" and line["backend"] == "dsl" and line["round"] == 1:
            line["figures"]["output_per_s"] /= 2
    one = results.gather(lines).ratio("1k-1k", Level(users=8), "FLASH_ATTN", PER_DEVICE)
    assert one is not None
    assert (round(one.low, 2), round(one.median, 2), round(one.high, 2)) == (0.55, 1.1, 1.1)
    assert 'class="open">1.10× <span class="range">0.55–1.10' in rendered(lines)


def test_values_are_per_device() -> None:
    lines = example_results.records()
    single = results.gather(lines).cells["1k-1k", Level(users=8), "dsl"].value(PER_DEVICE.of)
    for line in lines:
        if line["kind"] == "run":
            line["devices"] = 2
    double = results.gather(lines).cells["1k-1k", Level(users=8), "dsl"].value(PER_DEVICE.of)
    assert single is not None
    assert double is not None
    assert double.median == single.median / 2


def changed(kind: str, **changes: object) -> list[Record]:
    """The example with other values in every line of a kind."""
    lines = copy.deepcopy(example_results.records())
    for line in lines:
        if line["kind"] == kind:
            line.update(changes)
    return lines


def with_figures(**changes: object) -> list[Record]:
    """The example with other figures in one run: dsl, the first scenario, one user, the first round."""
    lines = copy.deepcopy(example_results.records())
    lines[1]["figures"] |= changes
    return lines


FAILED = {"kind": "failed", "backend": "dsl", "round": 1, "scenario": None, "message": "died under load: OOM"}
WARNINGS: dict[str, tuple[list[Record], str]] = {
    "cpu": (changed("environment", on_gpu=False), "This ran on a CPU"),
    "one round": (changed("environment", rounds=1), "One round: ratios have no spread"),
    "not committed": (changed("environment", modified=True), "changes that are not committed"),
    "unfinished": (example_results.records()[:-1], "The run has not ended"),
    "interrupted": (changed("end", reason="interrupted"), "The run ended early: interrupted"),
    "failed": ([*example_results.records(), FAILED], "dsl, round 2: died under load: OOM"),
    "errors": (
        with_figures(errors={"HTTP status": 3}, details={"HTTP status": "500: boom"}),
        "dsl, 1k-1k, 1 user: 3 requests: HTTP status (500: boom)",
    ),
    "client": (
        with_figures(client={"processes": 1, "busy": 1.0, "late_ms": 50.0, "limit": "100% of a core"}),
        "In 1 of 81 loads the client, not the server, was the limit: they have no TPOT, no tokens/s/user, no goodput "
        "and no ratio. Worst in dsl, 1k-1k, 1 user: 100% of a core",
    ),
    "few": (with_figures(sent=0), "1 user dsl"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_warnings(name: str) -> None:
    lines, says = WARNINGS[name]
    assert says in plain(rendered(lines))


LIMITED = {
    "client": {"processes": 1, "busy": 1.0, "late_ms": 50.0, "limit": "100% of a core"},
    "tpot": {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None},
    "per_user": None,
    "unresolved": {"tpot": "the client was the limit: 100% of a core"},
    "goodput": [
        {"name": name, "ttft_ms": 1, "tpot_ms": 1, "per_s": None, "share": None} for name in ("server", "interactive")
    ],
}


def limited(rounds: set[int]) -> list[Record]:
    """The example, where the client was the limit of dsl's runs with one user in some rounds."""
    lines = copy.deepcopy(example_results.records())
    for line in lines:
        if (
            line["kind"] == "run"
            and line["backend"] == "dsl"
            and line["level"]["users"] == 1
            and line["round"] in rounds
        ):
            line["figures"] |= LIMITED | {"output_per_s": 1e6}
    return lines


def test_a_limited_client_gives_no_ratio() -> None:
    """Where every round is: no ratio, no point in the picture of users, and the reason on the page and the terminal."""
    lines = limited({0, 1, 2})
    gathered = results.gather(lines)
    level = Level(users=1)
    assert all(gathered.ratio("1k-1k", level, "FLASH_ATTN", metric) is None for metric in results.COMPARED)
    cell = gathered.cells["1k-1k", level, "dsl"]
    assert (cell.value(results.PER_USER.of), cell.value(results.TPOT.of)) == (None, None)
    words = plain(rendered(lines))
    assert "client limited" in words
    assert "dsl†" in words
    assert "dsl†" not in plain(rendered(example_results.records()))
    assert "1k-1k, 1 user: dsl over FLASH_ATTN: no ratio, the client was the limit" in page.ratio_lines(lines)
    scenario = gathered.scenarios[0]
    drawn = charts.frontier_chart(gathered, scenario).data
    assert "1" not in [label for trace in drawn if trace.name == "dsl" for label in trace.text]
    assert max(value for trace in drawn for value in trace.y) < 1e6


def test_a_limited_round_is_left_out() -> None:
    """The others are compared, and the round's rate is in no median."""
    gathered = results.gather(limited({1}))
    one = gathered.ratio("1k-1k", Level(users=1), "FLASH_ATTN", PER_DEVICE)
    assert one is not None
    assert (round(one.median, 3), one.rounds) == (1.1, 2)
    value = gathered.cells["1k-1k", Level(users=1), "dsl"].value(PER_DEVICE.of)
    assert value is not None
    assert value.high < 1e6


def test_bursts_are_said() -> None:
    lines = limited(set())
    for line in lines:
        if line["kind"] == "run" and line["backend"] == "dsl" and line["level"]["users"] == 1:
            line["figures"] |= {"tpot": LIMITED["tpot"], "unresolved": {"tpot": "tokens came in bursts"}}
    assert "dsl, 1k-1k, 1 user: no TPOT: tokens came in bursts" in plain(rendered(lines))


def test_rates_and_distributions() -> None:
    """Requests/s and input tokens/s stand in the table; a distribution is of all rounds, and a menu has all levels."""
    lines = example_results.records()
    markup = rendered(lines)
    for head in ("requests/s", "input tokens/s", "tokens/s/user"):
        assert f"<th>{head}</th>" in markup
    gathered = results.gather(lines)
    cell = gathered.cells["1k-1k", Level(users=8), "dsl"]
    assert cell.histogram("ttft") == {20: 120, 21: 180, 25: 60}
    found = cell.value(results.REQUESTS.of)
    assert found is not None
    assert f'<td data-label="requests/s">{found.median:.1f}' in markup
    figure = charts.distribution_chart(gathered, gathered.scenarios[0], "ttft", "TTFT")
    assert [button.label for button in figure.layout.updatemenus[0].buttons] == [
        "1 user",
        "8 users",
        "32 users",
        "128 users",
        "256 users",
    ]
    assert sum(figure.data[0].y) == pytest.approx(100)
    assert sum(trace.visible for trace in figure.data) == len(example_results.BACKENDS)


def test_every_cell_knows_its_column() -> None:
    """What a narrow page shows beside a value, where there is no row of heads."""
    markup = rendered(example_results.records())
    assert len(re.findall("<td", markup)) == len(re.findall("<td data-label=", markup)) > 100
    assert 'data-label="TPOT p50 over FLASH_ATTN"' in markup
    assert not re.search(r"\b(Left|Right):", markup)


def test_few_requests_are_marked() -> None:
    lines = example_results.records()
    assert "360*" not in plain(rendered(lines))
    for line in lines:
        if line["kind"] == "run":
            line["figures"]["sent"] = 20
    assert "60*" in plain(rendered(lines))


def test_markup_in_what_others_wrote_stays_text() -> None:
    evil = "</script><script>document.title='hit'</script>"
    lines = changed("environment", model=evil, backends=[*example_results.BACKENDS, evil])
    lines += [{**copy.deepcopy(lines[1]), "backend": evil}, FAILED | {"message": evil}]
    markup = page.render(lines)
    assert evil not in markup
    assert "&lt;/script&gt;" in markup


def test_nothing_is_loaded_from_elsewhere() -> None:
    full = page.render(example_results.records())
    tags = re.findall(
        r"<(?:script|link|img|iframe|source)\b[^>]*>",
        full[: full.index("<script>")] + rendered(example_results.records()),
    )
    assert not [tag for tag in tags if "http" in tag or "//" in tag]
    assert "@import" not in document.STYLE


def test_offline_page() -> None:
    lines = [example_results.environment(offline=True, scenarios=example_results.environment()["scenarios"][:1])]
    for backend, rate in (("dsl", 300.0), ("FLASH_ATTN", 200.0)):
        lines += [
            {
                **example_results.run(backend, "1k-1k", 8, 0.0, number),
                "mode": "offline",
                "figures": {"output_per_s": rate + number},
            }
            for number in range(3)
        ]
    words = plain(rendered([*lines, {"kind": "end", "status": 0, "reason": ""}]))
    assert "301.0 300.0–302.0" in words
    assert "1.50× 1.50–1.50" in words
    assert page.ratio_lines(lines) == ["1k-1k, 8 users: dsl over FLASH_ATTN: tokens/s 1.50x (1.50 to 1.50)"]


def test_no_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did not write this file"):
        page.render([{"kind": "run"}])
    path = tmp_path / "results.jsonl"
    path.write_text('{"kind": "environment"}\n{"kind": "ru')
    assert results.read(path) == [{"kind": "environment"}]


@browser.needs_chromium
def test_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page.write(example_results.records(), path)
    shown = browser.require_shown(path, tmp_path / "page.png", 2 * CHARTS)
    assert shown.body.count("Throughput over speed for a user</text>") == 2


@browser.needs_chromium
def test_nothing_is_cut_where_the_page_is_narrow(tmp_path: Path) -> None:
    """480 pixels, in a frame since a browser's window has a least width: nothing is wider than the page."""
    page.write(example_results.records(), tmp_path / "page.html")
    outer = tmp_path / "outer.html"
    outer.write_text(
        '<!doctype html><html><body><iframe id="f" width="480" height="4000" src="page.html"></iframe><p id="told"></p>'
        "<script>onload = () => { const d = document.getElementById('f').contentDocument, e = d.documentElement;"
        "const cut = [...d.querySelectorAll('td,th,caption,.scroll,p')].filter(x => x.clientWidth && "
        "x.scrollWidth > x.clientWidth + 1).length; const beyond = [...d.querySelectorAll('td,caption')].filter(x => "
        "x.getBoundingClientRect().right > 480).length;"
        "document.getElementById('told').textContent = `width ${e.scrollWidth} cut ${cut} beyond ${beyond}`; }</script>"
    )
    shown = browser.show(outer, tmp_path / "outer.png", flags=("--allow-file-access-from-files",))
    told = re.search(r"width (\d+) cut (\d+) beyond (\d+)", shown.body)
    assert told is not None
    assert (int(told[1]) <= 480, told[2], told[3]) == (True, "0", "0"), told[0]


@browser.needs_chromium
def test_a_page_that_fails_in_a_browser(tmp_path: Path) -> None:
    """What is thrown, and a figure that is not drawn, are seen."""
    path = tmp_path / "page.html"
    path.write_text('<!doctype html><html><body><div id="a" class="plotly-graph-div"></div><script>no()</script>')
    shown = browser.show(path, tmp_path / "page.png")
    assert any("no is not defined" in line for line in shown.console)
    assert (shown.places, shown.drawn) == (1, 0)
