# SPDX-License-Identifier: Apache-2.0
"""Softmax's benchmark: rows, bytes, and a run at tiny scale."""

import json
import pathlib

import torch

import benchmarks
from benchmarks.case import TABLE
from benchmarks.softmax.problems import Problem, build, reference


def test_rows() -> None:
    cases = benchmarks.operators()["softmax"].cases()
    assert len({case.id for case in cases}) == len(cases)
    assert [case.id for case in cases if case.group == TABLE] == [
        "64x128256",
        "256x151936",
        "4096x8192",
        "32768x4096",
        "32768x32768",
    ]
    assert sum(case.group == "grid" for case in cases) == 28


def test_bytes_are_counted_once_each_way() -> None:
    assert Problem(rows=3, width=5).traffic_bytes == 3 * 5 * (2 + 2)
    assert Problem(rows=3, width=5, dtype=torch.float32).traffic_bytes == 3 * 5 * (4 + 2)


def test_the_oracle_has_the_first_and_the_last_row() -> None:
    problem = Problem(rows=500, width=7, log=True)
    inputs = build(problem, 2, torch.device("cpu"), 0)
    found = reference(problem, inputs, 1)
    assert {0, 499} <= set(found.rows.tolist())
    torch.testing.assert_close(found.values, inputs.layers[1].x[found.rows].double().log_softmax(-1))


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, device=device.type)
    assert benchmarks.main("softmax", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 2
    for row in rows:
        cells = {cell["provider"]: cell["status"] for cell in row["cells"]}
        assert cells["dsl"] == cells["torch"] == "ok", row
