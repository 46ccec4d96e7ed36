# SPDX-License-Identifier: Apache-2.0
"""Softmax's benchmark: rows, bytes, and a run at tiny scale."""

import json
import math
import pathlib

import pytest
import torch

import benchmarks
from benchmarks.case import TABLE
from benchmarks.softmax.problems import Problem, build, reference
from dsl_backend.softmax.configs import default_config
from dsl_backend.softmax.spec import SoftmaxSpec


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 129, 1000, 4096, 8192, 16384, 32768, 128256])
def test_a_sweep_has_the_default_and_its_rivals(width: int, dtype: torch.dtype) -> None:
    sweep = pytest.importorskip("benchmarks.softmax.sweep", reason="CuTe DSL is not installed")
    spec = SoftmaxSpec(width=width, dtype=dtype, out_dtype=dtype, vector=math.gcd(8, width))
    configs = list(dict.fromkeys(sweep.candidates(spec, 227 * 1024)))
    assert configs[0] == default_config(spec)
    assert not any(config.objections(spec, 227 * 1024) for config in configs)
    assert {config.use_pdl for config in configs} == {False, True}
    if width == 32768 and dtype == torch.bfloat16:
        held = {(config.threads, config.cluster, config.ctas_per_sm, config.recompute) for config in configs}
        assert {(512, 2, 2, False), (256, 2, 3, False), (512, 1, 2, True)} < held
    assert len(configs) < 40


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, device=device.type)
    assert benchmarks.main("softmax", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 2
    for row in rows:
        cells = {cell["provider"]: cell["status"] for cell in row["cells"]}
        assert cells["dsl"] == cells["torch"] == "ok", row
