# SPDX-License-Identifier: Apache-2.0
"""The chart of the README: what it draws of a run, and that it is of the figures in docs/performance/."""

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import example_rows
import pytest

from benchmarks import chart
from benchmarks.report import microseconds

ROOT = Path(__file__).resolve().parent.parent.parent
SVG = "{http://www.w3.org/2000/svg}"
# Of attention, with the rows of the page's tables; the others are of `bench dsls`, of one kernel's configurations, and
# of the kernels that the clock is compared with.
OTHERS = ("-dsls", "-configs", "-peers")
DATA = sorted(path for path in (ROOT / "docs/data").glob("*.jsonl") if not path.stem.endswith(OTHERS))


def run_of(folder: Path, *rows: tuple[str, dict[str, float]]) -> Path:
    records: list[chart.Record] = [example_rows.environment()]
    for id, times in rows:
        cells = [{"provider": name, "status": "ok", "median_us": time} for name, time in times.items()]
        records.append({"kind": "row", "operator": "decode", "id": id, "cells": cells})
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def drawn(path: Path, *arguments: str) -> ElementTree.Element:
    out = path.with_name("chart.svg")
    assert chart.main([str(path), "--out", str(out), *arguments]) == 0
    return ElementTree.parse(out).getroot()


def bars(picture: ElementTree.Element) -> list[float]:
    held = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("x") == str(chart.LEFT)]
    return [float(rect.get("width", "0")) for rect in held if rect.get("height") == str(chart.BAR)][-2:]


def texts(picture: ElementTree.Element) -> dict[str, str]:
    return {held.text or "": held.get("fill", "") for held in picture.iter(f"{SVG}text")}


def test_a_bar_is_as_long_as_its_time_over_ours(tmp_path: Path) -> None:
    ours, peer = bars(drawn(run_of(tmp_path, ("b1-k8k", {"FA3": 15.0, "dsl": 10.0}))))
    assert peer == pytest.approx(1.5 * ours, rel=1e-3)


def test_a_lost_row_is_marked(tmp_path: Path) -> None:
    path = run_of(tmp_path, ("won", {"dsl": 10.0, "FA3": 11.0}), ("lost", {"dsl": 10.0, "FA3": 9.0}))
    shown = texts(drawn(path))
    assert shown["lost"] == chart.LOSS != shown["won"]
    assert shown["9.00 us (0.90x)"] == chart.LOSS


def test_rows_are_selected_by_their_ids(tmp_path: Path) -> None:
    path = run_of(tmp_path, ("b1-k8k", {"dsl": 1.0, "FA3": 2.0}), ("b8-k8k", {"dsl": 3.0, "FA3": 4.0}))
    shown = texts(drawn(path, "--rows", "^b8"))
    assert "b8-k8k" in shown
    assert "b1-k8k" not in shown


def test_versions_of_all_runs_are_shown() -> None:
    runs = [
        {"kind": "environment", "device": "H200", "date": "2026-11-24", "versions": {"vllm": held}}
        for held in ("2", "1")
    ]
    assert chart.facts(runs) == "H200; vllm 1 and 2; 2026-11-24"


def test_nothing_to_draw_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_of(tmp_path, ("alone", {"dsl": 1.0}))
    with pytest.raises(SystemExit) as ended:
        chart.main([str(path), "--out", str(tmp_path / "chart.svg")])
    assert ended.value.code == 2
    assert "no row" in capsys.readouterr().err
    assert not (tmp_path / "chart.svg").exists()


def test_the_picture_is_what_its_command_draws(tmp_path: Path) -> None:
    """docs/performance.md has the command of the README's picture."""
    (line,) = re.findall(r"^python -m benchmarks\.chart (.*)$", (ROOT / "docs/performance.md").read_text(), re.M)
    words = shlex.split(line)
    out = words[words.index("--out") + 1]
    files = [str(ROOT / word) if word.endswith(".jsonl") else word for word in words]
    files[files.index("--out") + 1] = str(tmp_path / "chart.svg")
    assert chart.main(files) == 0
    assert (tmp_path / "chart.svg").read_text() == (ROOT / out).read_text()
    assert f"]({out})" in (ROOT / "README.md").read_text()


def test_the_picture_has_every_row_that_was_lost() -> None:
    shown = texts(ElementTree.parse(ROOT / "docs/images/attention.svg").getroot())
    rows = chart.rows_of(chart.read(path for path in DATA if path.stem.startswith("h200-")), "")
    lost = [row.label for row in rows if row.lost]
    assert lost
    assert [label for label in lost if shown.get(label) != chart.LOSS] == []


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_data_are_the_figures_of_the_pages(path: Path) -> None:
    pages = [ROOT / "docs/performance.md", *(ROOT / "docs/performance").glob("*.md")]
    table = [line for page in pages for line in page.read_text().splitlines() if line.startswith("|")]
    rows = [record for record in chart.read([path]) if record["kind"] == "row"]
    assert rows
    for row in rows:
        times = [cell["median_us"] for cell in row["cells"] if "median_us" in cell]
        lines = [line for line in table if line.split("|")[1].strip() == row["id"]]
        numbers = [{float(number) for number in re.findall(r"\d+\.?\d*", line)} for line in lines]
        assert any(held.issuperset(times) for held in numbers), (row["id"], [microseconds(time) for time in times])
