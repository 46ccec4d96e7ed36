# SPDX-License-Identifier: Apache-2.0
"""Linear layers' benchmark: rows, bytes, and a run at tiny scale."""

import json
import pathlib

import pytest
import torch

import benchmarks
from benchmarks import counted
from benchmarks.case import TABLE
from benchmarks.linear import model
from benchmarks.linear.problems import Problem, build, reference


def test_rows() -> None:
    cases = benchmarks.operators()["linear"].cases()
    assert len({case.id for case in cases}) == len(cases)
    table = [case.id for case in cases if case.group == TABLE]
    assert len(table) == 18
    assert {"llama-8b-1", "qwen3-32b-64", "seed-8192"} <= set(table)


def test_weights_are_counted_once() -> None:
    gated, plain = Problem(m=3, n=16, k=8), Problem(m=3, n=16, k=8, gated=False)
    assert gated.traffic_bytes == 2 * (32 * 8 + 3 * 8 + 3 * 16)
    assert plain.traffic_bytes == 2 * (16 * 8 + 3 * 8 + 3 * 16)
    assert gated.flops == 2 * plain.flops == 2 * 3 * 32 * 8


def test_the_oracle_has_the_first_and_the_last_row() -> None:
    problem = Problem(m=300, n=8, k=16)
    inputs = build(problem, 2, torch.device("cpu"), 0)
    found = reference(problem, inputs, 1)
    assert {0, 299} <= set(found.rows.tolist())
    layer = inputs.layers[1]
    gate, up = (layer.x[found.rows].double() @ layer.weight.double().T).chunk(2, -1)
    torch.testing.assert_close(found.values, torch.nn.functional.silu(gate) * up)


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, device=device.type)
    assert benchmarks.main("linear", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 2
    for row in rows:
        cells = {cell["provider"]: cell["status"] for cell in row["cells"]}
        assert cells["dsl"] == cells["cuBLAS + silu_and_mul"] == "ok", row


def test_work_that_the_emulator_counts() -> None:
    """An epilogue of two values an instruction: four for a pair's SwiGLU beside its special units."""
    pytest.importorskip("cutlass")
    found = model.amounts(counted.in_child(model.MODULE, "dsl"))
    pairs = model.ROWS * model.COLUMNS // 2 // 32 // 2
    assert found["FP32 instructions"] == found["of these packed"] == 4 * pairs
    assert found["MUFU instructions"] == 4 * pairs
    assert found["of these in the epilogue's warps"] < 13 * pairs
