# SPDX-License-Identifier: Apache-2.0
"""The page of benchmarks: what it compares, what it warns of, and what a browser makes of it."""

import copy
import io
import json
import re
from pathlib import Path
from typing import Any

import example_rows
import pytest
from rich.console import Console

import benchmarks
from benchmarks import charts, command, measured, page
from benchmarks.case import TABLE, select
from benchmarks.measured import compare, panels, tally
from integration import browser

Record = dict[str, Any]
OPERATORS = ("decode", "prefill", "softmax")


def rendered(records: list[Record]) -> str:
    """The page without plotly's own script."""
    full = page.render(records)
    return full[full.index("<body>") :]


def report(*ops: str, path: Path, **options: object) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=80)
    chosen = benchmarks.Options(report_path=path, device="cpu", **options)  # type: ignore[arg-type]
    status = benchmarks.main(ops, None, chosen, console)
    assert isinstance(console.file, io.StringIO)
    return status, console.file.getvalue()


def files(folder: Path, **runs: list[Record]) -> list[Path]:
    paths = []
    for name, records in runs.items():
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps(record) + "\n" for record in records))
    return paths


def changed_cell(records: list[Record], id: str, provider: str, **changes: object) -> list[Record]:
    found = copy.deepcopy(records)
    for row in found:
        for cell in row.get("cells", ()):
            if (row["id"], cell["provider"]) == (id, provider):
                cell.update(changes)
    return found


def row_of(records: list[Record], id: str) -> Record:
    return next(record for record in records if record.get("id") == id)


def test_a_run_leaves_a_page(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "page.html"
    status, text = report("decode", "softmax", path=path, kernels="reference", rows="^tiny", seconds=0.01, peers="none")
    assert status == 0
    assert str(path) in text
    body = path.read_text()
    body = body[body.index("<body>") :]
    assert "This ran on a CPU" in body
    assert "tiny-hd64-h4x2" in body
    assert "tiny-3x40" in body
    assert "tiny-2x4099" in body, "every row, not the smallest alone"
    assert body.count('class="plotly-graph-div"') == 1


def test_a_page_is_made_from_earlier_runs_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = files(tmp_path, a=example_rows.records("decode"), b=example_rows.records("prefill", "softmax"))
    monkeypatch.setattr(command, "measure", None)
    path = tmp_path / "page.html"
    assert report(path=path, sources=sources)[0] == 0
    body = path.read_text()
    assert all(f"<h2>{operator}</h2>" in body for operator in OPERATORS)
    assert report("softmax", path=path, sources=sources)[0] == 0
    assert [operator for operator in OPERATORS if f"<h2>{operator}</h2>" in path.read_text()] == ["softmax"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "was not written by `bench OP --json`"),
        ("no JSON\n", "was not written by `bench OP --json`"),
        ("[1]\n", "was not written by `bench OP --json`"),
        ('{"kind": "row"}\n', "not of kind `environment`"),
        ('{"kind": "environment"}\n{"kind": "engine"}\n', "lines of kind engine"),
        (json.dumps(example_rows.environment()) + "\n", "no row was measured"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "file").write_text(content)
    status, text = report(path=tmp_path / "page.html", sources=[tmp_path / "file"])
    assert status == 2
    assert says in text
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    status, text = report(path=tmp_path / "page.html", sources=[tmp_path / "nothing"])
    assert status == 2
    assert "nothing" in text


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    (source,) = files(tmp_path, a=example_rows.records("softmax"))
    source.write_text(source.read_text()[:-20])
    assert len(measured.read(source)) == len(example_rows.records("softmax")) - 1


def test_operators_or_a_report_are_asked_for(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    assert benchmarks.main((), console=console) == 2
    assert benchmarks.main(("decode",), None, benchmarks.Options(sources=[tmp_path]), console) == 2
    assert report("decoed", path=tmp_path / "page.html")[0] == 2


def test_a_report_needs_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    status, text = report("softmax", path=tmp_path / "page.html")
    assert status == 2
    assert "pip install 'dsl-backend[bench]'" in text


def test_rows_of_a_report() -> None:
    """Every operator has usual shapes or a sweep, and a smallest row."""
    for operator in benchmarks.operators().values():
        rows = select(operator.cases(), None, with_sweeps=True)
        assert {TABLE, "tiny"} <= {case.group for case in rows}, operator.name
        for case in rows:
            assert case.axis is None or isinstance(case.parameters[case.axis], int | float), case.id


def test_rates_and_their_ceiling() -> None:
    records = example_rows.records("decode", "prefill")
    row = row_of(records, "hd128-h32x8-b64-k8k")
    cell = row["cells"][0]
    middle, low, high = charts.rates(cell)
    assert middle == pytest.approx(row["traffic_bytes"] / cell["median_us"] * 1e-6)
    assert low < middle < high
    assert charts.ceiling(row) == pytest.approx(4.4)
    assert charts.ceiling(row_of(records, "hd128-h32x8-1x16k")) == pytest.approx(790)
    assert charts.ceiling({**row, "floor_us": None}) is None


def test_ours_beside_the_best_peer() -> None:
    id = "hd128-h32x8-b64-k8k"
    records = example_rows.records("decode")
    one = compare(row_of(records, id))
    assert one is not None
    assert (one.peer, one.verdict) == ("FA3", "better")
    assert one.ratio == pytest.approx((2 + 488.3 / 0.85) / (2 + 488.3 / 0.9), rel=1e-3)
    for median, verdict in ((100.0, "worse"), (545.0, "open")):
        slower = changed_cell(records, id, "FA3", median_us=median, p10_us=0.99 * median, p90_us=1.01 * median)
        found = compare(row_of(slower, id))
        assert found is not None
        assert found.verdict == verdict
    alone = row_of(records, id)
    assert compare({**alone, "cells": alone["cells"][:1]}) is None
    assert compare({**alone, "cells": alone["cells"][1:]}) is None


def test_summary() -> None:
    records = example_rows.records("prefill")
    rows = [record for record in records if record.get("group") == TABLE]
    found = tally(rows)
    assert found is not None
    assert (found.rows, found.ahead, found.behind) == (9, 9, 0)
    assert found.lowest <= found.middle <= found.highest
    body = rendered(records)
    assert f'">9</td><td data-label="geometric mean">{found.middle:.2f}×</td>' in body
    assert '<td data-label="ahead" class="better">9</td>' in body


def test_a_sweep_has_a_panel_for_each_other_parameter() -> None:
    records = example_rows.records("prefill", "softmax")
    table = [record for record in records if record.get("operator") == "prefill" and record["group"] == TABLE]
    # The batch shrinks as the length grows, and the values are as wide as the keys: neither tells panels apart.
    assert [values for values, _ in panels(table, "max_q_len")] == [
        {"heads_q": 32, "heads_kv": 8, "head_dim": 128},
        {"heads_q": 64, "heads_kv": 8, "head_dim": 64},
        {"heads_q": 16, "heads_kv": 2, "head_dim": 256},
    ]
    grid = [record for record in records if record.get("group") == "grid"]
    found = {str(values): len(rows) for values, rows in panels(grid, "rows")}
    assert found == {f"{{'width': {width}}}": 7 for width in (4096, 8192, 16384, 32768)}


def test_labels_do_not_run_into_each_other() -> None:
    assert charts.tick_labels([8, 64, 512, 1000, 1024, 2048]) == ["8", "64", "512", "1000", "", "2k"]
    assert charts.tick_labels([0, 10, 100]) == ["0", "10", "100"]
    assert charts.tick_labels([4096]) == ["4k"]


def test_two_devices_have_sections_of_their_own() -> None:
    lines = [*example_rows.records("softmax"), *example_rows.records("softmax", device="NVIDIA Example")]
    body = rendered(lines)
    assert "<h2>softmax on NVIDIA H200</h2>" in body
    assert "<h2>softmax on NVIDIA Example</h2>" in body
    assert "NVIDIA Example: no ceiling, because the peak rates of this device are not known" in body


def test_a_row_that_was_measured_again_counts_once() -> None:
    records = example_rows.records("softmax")
    again = changed_cell(records, "64x128256", "dsl", median_us=12345.0)
    _, (section,) = measured.gather([*records, *again])
    assert section.rows["64x128256"]["cells"][0]["median_us"] == 12345.0
    assert len(section.rows) == len(records) - 1


WARNINGS = {
    "cpu": ({"device": "cpu"}, "This ran on a CPU"),
    "modified": ({"modified": True}, "with changes that are not committed"),
    "commit": ({"commit": None}, "commit unknown"),
    "flush": ({"flush": True}, "cache overwritten before each sample"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_it_was_measured_with(name: str) -> None:
    changes, says = WARNINGS[name]
    records = example_rows.records("softmax")
    assert says not in rendered(records)
    assert says in rendered([example_rows.environment(**changes), *records[1:]])


def test_wrong_results_are_said_first() -> None:
    records = example_rows.records("softmax")
    wrong = {"provider": "quack", "status": "wrong", "message": "error 1e+00 <b>"}
    for row in records[1:]:
        row["cells"] = [wrong if cell["provider"] == "quack" else cell for cell in row["cells"]]
    body = rendered(records)
    notes = body[: body.index("<h2>")]
    said = f"softmax: quack: wrong: error 1e+00 &lt;b&gt; (in {len(records) - 1}: {records[1]['id']}, "
    assert notes.count("quack: wrong") == notes.count(said) == 1
    assert "<b>&gt;" not in body


def test_markup_in_names_stays_text() -> None:
    evil = "</script><script>document.title='hit'</script>"
    records = example_rows.records("softmax", device=evil)
    for row in records[1:]:
        row["id"] += evil
        row["cells"][1]["provider"] = evil
    body = rendered(records)
    assert evil not in body


def test_nothing_is_loaded_from_elsewhere() -> None:
    full = page.render(example_rows.records("softmax"))
    tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", full[: full.index("<script>")])
    tags += re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", full[full.index("<body>") :])
    assert not [tag for tag in tags if "http" in tag or "//" in tag]


@browser.needs_chromium
def test_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    page.write(example_rows.records(*OPERATORS), path)
    # decode: bars and two sweeps over three kinds of heads; prefill: three, and lengths; softmax: bars, four widths,
    # three batches, narrow rows; launches.
    shown = browser.require_shown(path, tmp_path / "page.png", 7 + 4 + 9 + 1)
    assert shown.body.count(">ceiling</text>") >= 19


def test_the_page_has_each_columns_source_and_version() -> None:
    """Of the section's device; of all runs that are on the page."""
    case = benchmarks.operators()["softmax"].cases()[0]
    row = example_rows.row("softmax", case)
    names = [cell["provider"] for cell in row["cells"] if "median_us" in cell]
    ours, peer = names[0], names[1]
    old = example_rows.environment(providers={"softmax": {ours: "dsl-backend 0.1.0", peer: "peer 1"}})
    new = example_rows.environment(providers={"softmax": {ours: "dsl-backend 0.1.0", peer: "peer 2"}})
    other = example_rows.environment(device="another", providers={"softmax": {peer: "peer 3"}})
    body = page.render([other, old, row, new, row])
    assert f"Columns: {ours}: dsl-backend 0.1.0; {peer}: peer 1 or peer 2;" in body
    assert "version unknown" in body
