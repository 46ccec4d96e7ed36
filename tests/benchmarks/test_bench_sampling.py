# SPDX-License-Identifier: Apache-2.0
"""The sampler's benchmark: rows, bytes, who is right, and a run at tiny scale."""

import json
import pathlib

import pytest
import torch

import benchmarks
from benchmarks.case import TABLE
from benchmarks.sampling.problems import FILTERS, Problem, build, only_exact, verdict
from dsl_backend.sampling import reference


def test_rows() -> None:
    cases = benchmarks.operators()["sampling"].cases()
    assert len({case.id for case in cases}) == len(cases)
    table = [case.id for case in cases if case.group == TABLE]
    assert table[:4] == ["none-1x151936", "none-16x151936", "none-64x151936", "none-256x151936"]
    assert len(table) == len(FILTERS) * 4
    assert sum(case.group == "vocab" for case in cases) == len(FILTERS) * 12
    assert "whole-p-512x201088" in {case.id for case in cases}
    assert "whole-none-32x201088-bfloat16" in {case.id for case in cases}
    assert {"logprobs-k+p-512x151936-bfloat16", "logprobs-k+p-512x151936-bfloat16-top20"} <= {case.id for case in cases}


def test_bytes_are_one_read() -> None:
    assert Problem(rows=3, vocab=5, filters="k").traffic_bytes == 3 * (5 * 4 + 8)
    assert Problem(rows=3, vocab=5, filters="k", dtype="bfloat16").traffic_bytes == 3 * (5 * 2 + 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("filters", FILTERS)
def test_wrong_tokens_are_seen(filters: str, dtype: str) -> None:
    inputs = build(Problem(rows=20, vocab=100, filters=filters, dtype=dtype), 2, torch.device("cpu"), 0)
    layer = inputs.layers[1]
    tokens, _ = reference.sample(layer.logits, layer.parameters)
    least = layer.logits.argmin(-1)
    assert verdict(inputs, 1, tokens).all()
    layer.tokens.copy_(tokens)
    assert torch.equal(only_exact(inputs, layer.tokens), tokens)
    # The tokens of another layer: -1, which no filter keeps.
    inputs.layers[0].tokens.copy_(tokens)
    marked = only_exact(inputs, inputs.layers[0].tokens)
    assert 0 < (marked == -1).sum() <= len(inputs.compared)
    assert verdict(inputs, 0, marked).sum() == 20 - (marked == -1).sum()
    allowed = 20 if filters == "none" else 20 - len(inputs.compared)
    assert verdict(inputs, 1, least).sum() == allowed
    assert verdict(inputs, 1, tokens + 100).sum() == 20 - len(inputs.compared)


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, device=device.type)
    assert benchmarks.main("sampling", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 2
    for row in rows:
        cells = {cell["provider"]: cell["status"] for cell in row["cells"]}
        assert cells["dsl"] == cells["Triton"] == "ok", row
        assert cells["torch"] == ("ok" if "k+p" in row["id"] else "skipped"), row
