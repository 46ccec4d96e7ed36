# SPDX-License-Identifier: Apache-2.0
"""The experts' benchmark: rows, bytes, operations, and a run at tiny scale."""

import contextlib
import json
import pathlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import benchmarks
from benchmarks.case import TABLE
from benchmarks.experts import providers
from benchmarks.experts.problems import ROUTINGS, Problem, build, reference
from benchmarks.experts.rows import MODELS, TOKENS
from dsl_backend.quant.format import BLOCK_SCALED, MXFP4_TILED, ROW_SCALED, ScaledFormat

SMALL = {"experts": 4, "hidden": 16, "width": 24, "topk": 2}


def test_rows() -> None:
    cases = benchmarks.operators()["experts"].cases()
    assert len({case.id for case in cases}) == len(cases)
    assert sum(case.group == TABLE for case in cases) == len(MODELS) * len(TOKENS)
    for group, routings in (("skewed", {"zipf", "one"}), ("without-tokens", {"half"})):
        sizes = {
            (one.spec.hidden_size, one.spec.topk) for case in cases if case.group == group for one in [case.problem]
        }
        assert len(sizes) == len(MODELS)
        assert {case.problem.routing for case in cases if case.group == group} == routings


@pytest.mark.parametrize(("experts", "topk"), [(4, 2), (8, 2), (9, 3), (4, 3), (5, 5), (128, 8)])
def test_half_of_the_experts_have_no_token(experts: int, topk: int) -> None:
    """As many as there may be, where a token's experts are more than half of them."""
    problem = Problem(m=500, routing="half", experts=experts, topk=topk, hidden=16, width=24)
    assert int((problem.chances > 0).sum()) == max(-(-experts // 2), topk)
    assert problem.chosen_experts == pytest.approx(max(-(-experts // 2), topk), rel=1e-3)
    ids = build(problem, 1, torch.device("cpu"), 0).layers[0].topk_ids
    assert len(ids.unique()) == max(-(-experts // 2), topk)


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


def test_bytes_of_weights_in_4_bits() -> None:
    """Whole tiles of 64 rows and 128 columns, 4.25 bits an element."""
    problem = Problem(m=1, weight=MXFP4_TILED, experts=4, hidden=288, width=96, topk=2)
    assert problem.traffic_bytes == 2 * 4 * 1088 * (2 * 2 * 3 + 5 * 1) + 4 * 288


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


@pytest.mark.parametrize("weight", [None, BLOCK_SCALED], ids=str)
def test_flashinfer_gets_up_rows_first(weight: ScaledFormat | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the scales of 128x128 blocks in the same order."""
    calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []
    fused_moe, autotuner = ModuleType("flashinfer.fused_moe"), ModuleType("flashinfer.autotuner")
    monkeypatch.setattr(
        fused_moe, "cutlass_fused_moe", lambda *given, **options: calls.append((given, options)), raising=False
    )
    monkeypatch.setattr(autotuner, "autotune", lambda tunes: contextlib.nullcontext(), raising=False)
    for module in (ModuleType("flashinfer"), fused_moe, autotuner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    problem = Problem(m=3, experts=4, hidden=128, width=128, topk=2, weight=weight)
    inputs = build(problem, 2, torch.device("cpu"), 0)
    assert providers.flashinfer_cutlass(problem, inputs)(1) is inputs.layers[1].out
    (_, _, _, w13, w2, _), options = calls[-1]
    layer = inputs.layers[1]
    assert torch.equal(w13.float(), layer.w13.float().roll(128, 1))
    assert w2 is layer.w2
    if weight is None:
        assert options["quant_scales"] == []
        assert "use_deepseek_fp8_block_scale" not in options
    else:
        first, second = options["quant_scales"]
        assert options["use_deepseek_fp8_block_scale"]
        assert torch.equal(first, layer.scales.w13.roll(1, 1))
        assert second is layer.scales.w2


def test_a_run(tmp_path: pathlib.Path, device: torch.device) -> None:
    file = tmp_path / "rows.jsonl"
    options = benchmarks.Options(rows="^tiny", seconds=0.01, peers="none", device=device.type)
    assert benchmarks.main("experts", file, options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()][1:]
    assert len(rows) == 5
    for row in rows:
        assert {cell["provider"]: cell["status"] for cell in row["cells"]}["dsl"] == "ok", row
