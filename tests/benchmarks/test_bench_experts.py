# SPDX-License-Identifier: Apache-2.0
"""The experts' benchmark: rows, bytes, operations, and a run at tiny scale."""

import json
import pathlib

import pytest
import torch

import benchmarks
from benchmarks.case import TABLE
from benchmarks.experts.problems import ROUTINGS, Problem, build, reference
from benchmarks.experts.rows import MODELS, TOKENS
from dsl_backend.quant.format import BLOCK_SCALED, ROW_SCALED

SMALL = {"experts": 4, "hidden": 16, "width": 24, "topk": 2}


def test_rows() -> None:
    cases = benchmarks.operators()["experts"].cases()
    assert len({case.id for case in cases}) == len(cases)
    assert sum(case.group == TABLE for case in cases) == len(MODELS) * len(TOKENS)


def test_bytes_and_operations() -> None:
    """One token reads the weights of its experts; many tokens those of all."""
    one, many = Problem(m=1, **SMALL), Problem(m=500, **SMALL)
    assert one.traffic_bytes == 2 * (2 * 3 * 24 * 16 + 2 * 16)
    assert many.traffic_bytes == pytest.approx(2 * (4 * 3 * 24 * 16 + 2 * 500 * 16), rel=1e-3)
    assert many.flops == 500 * 2 * (2 * 2 * 24 * 16 + 2 * 24 * 16)
    assert Problem(m=500, routing="one", **SMALL).chosen_experts == pytest.approx(2)


def test_bytes_of_weights_in_8_bits() -> None:
    sizes = {"experts": 4, "hidden": 256, "width": 128, "topk": 2}
    blocks, channels = (Problem(m=1, weight=kind, **sizes) for kind in (BLOCK_SCALED, ROW_SCALED))
    assert blocks.traffic_bytes == 2 * (3 * 256 * 128 + 4 * (4 + 2)) + 4 * 256
    assert channels.traffic_bytes == 2 * (3 * 256 * 128 + 4 * (256 + 256)) + 4 * 256


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_oracle(routing: str) -> None:
    problem = Problem(m=60, routing=routing, **SMALL)
    inputs = build(problem, 2, torch.device("cpu"), 0)
    layer = inputs.layers[1]
    if routing == "one":
        assert set(layer.topk_ids.flatten().tolist()) == {0, 1}
    found = reference(problem, inputs, 1)
    assert {0, 59} <= set(found.rows.tolist())
    assert found.values.isfinite().all()


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, peers="none", device=device.type)
    assert benchmarks.main("experts", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 4
    for row in rows:
        assert {cell["provider"]: cell["status"] for cell in row["cells"]}["dsl"] == "ok", row
