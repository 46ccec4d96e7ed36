# SPDX-License-Identifier: Apache-2.0
"""RMSNorm's benchmark: rows, bytes, its oracle, peers that overwrite their inputs, and a run at tiny scale."""

import json
import pathlib
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks.case import TABLE
from benchmarks.norm import providers
from benchmarks.norm.problems import EPS, Inputs, Problem, build, reference
from dsl_backend.norm.spec import NormTensors, Scaling
from dsl_backend.providers import Provider

CPU = torch.device("cpu")


def test_rows() -> None:
    cases = benchmarks.operators()["norm"].cases()
    assert len({case.id for case in cases}) == len(cases)
    assert [case.id for case in cases if case.group == TABLE] == [
        "1x4096",
        "16x8192",
        "256x4096",
        "4096x4096",
        "16384x8192",
    ]
    assert sum(case.group == "grid" for case in cases) == 28


def test_bytes_are_counted_once_each_way() -> None:
    assert Problem(rows=3, width=5).traffic_bytes == 3 * 5 * (2 + 2) + 5 * 2
    assert Problem(rows=3, width=5, residual=True).traffic_bytes == 3 * 5 * (3 * 2 + 2) + 5 * 2
    assert Problem(rows=3, width=5, scaling=Scaling.TOKEN).traffic_bytes == 3 * 5 * (2 + 1) + 5 * 2


def column(name: str) -> Provider:
    (found,) = (one for one in benchmarks.operators()["norm"].providers(["reference"]) if one.name == name)
    return found


def judge(operator: Any, inputs: Inputs, layer: int, result: torch.Tensor, problem: Problem) -> None:
    exact = reference(problem, inputs, layer)
    benchmarks.check.require_right(operator.compared(inputs, layer, result), exact, problem.limits)


@pytest.mark.parametrize("scaling", list(Scaling))
def test_torch_agrees_with_the_oracle(scaling: Scaling) -> None:
    """The eager peer and the reference kernel are two implementations of one definition."""
    problem = Problem(rows=200, width=256, residual=True, scaling=scaling)
    operator, inputs = benchmarks.operators()["norm"], build(problem, 2, CPU, 0)
    assert {0, 199} <= set(reference(problem, inputs, 1).rows.tolist())
    for name in ("torch", "dsl:reference"):
        launch = column(name).prepare(problem, inputs)
        judge(operator, inputs, 1, launch.view(launch.run(1)), problem)
        wrong = launch.view(launch.run(1)).float()
        wrong[199] *= 1.2
        with pytest.raises(benchmarks.check.WrongResultError):
            judge(operator, inputs, 1, wrong, problem)


def test_what_overwrites_its_inputs_is_checked_by_its_first_results() -> None:
    problem = Problem(rows=5, width=64, residual=True)
    operator, inputs = benchmarks.operators()["norm"], build(problem, 2, CPU, 0)
    before = [layer.x.clone() for layer in inputs.layers]

    def overwrite(layer: NormTensors) -> torch.Tensor:
        assert layer.residual is not None
        layer.residual.add_(layer.x)
        return layer.x.copy_(torch.nn.functional.rms_norm(layer.residual, (64,), layer.weight, EPS))

    launch = providers.in_place(overwrite, inputs)
    results = [launch.run(layer) for _ in range(3) for layer in range(2)][-2:]
    for layer, result in enumerate(results):
        judge(operator, inputs, layer, launch.view(result), problem)
        with pytest.raises(benchmarks.check.WrongResultError):
            judge(operator, inputs, layer, result, problem)
        assert torch.equal(inputs.layers[layer].x, before[layer]), "the other providers' inputs are as they were"


def test_peers_say_why_not() -> None:
    if torch.cuda.is_available():
        pytest.skip("is about a CPU")
    problem = Problem(rows=5, width=64, scaling=Scaling.TOKEN)
    for name in ("quack", "Liger", "vLLM", "FlashInfer", "torch.compile"):
        assert "needs a CUDA device" in column(name).objections(problem)
    for name in ("quack", "Liger"):
        assert "has no 8-bit output" in column(name).objections(problem)


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, device=device.type)
    assert benchmarks.main("norm", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 2
    for row in rows:
        cells = {cell["provider"]: cell["status"] for cell in row["cells"]}
        assert cells["dsl"] == cells["torch"] == "ok", row
