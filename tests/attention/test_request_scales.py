# SPDX-License-Identifier: Apache-2.0
"""Scales of fp8 keys and values for each (request, head): what is refused, and mistakes in the kernels' source.

That results are right is tested with the other cases, whose ids begin with `by-request`.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_backend.attention import api
from dsl_backend.errors import InvalidInput
from dsl_backend.testing.cases import Case, by_id, mla
from dsl_backend.testing.check import check_case

CASE = by_id("by-request-fp8")


def run(**changed: Any) -> None:
    problem = CASE.problem()
    plan = api.plan(problem.spec, problem.batch, kernel="reference")
    api.run(plan, problem.q, problem.keys, problem.values, **problem.extras | changed)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (lambda scale: scale[:, :1], "(3, 1)"),
        (lambda scale: scale[:2], "(2, 2)"),
        (lambda scale: scale[0], "(2,)"),
        (lambda scale: torch.ones(1), "(1,)"),
    ],
)
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_other_shapes_are_refused(name: str, change: Callable[[torch.Tensor], torch.Tensor], shape: str) -> None:
    message = f"{name} is float32 {shape} on cpu: float32 [requests, heads_kv] = (3, 2) on cpu is needed"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        run(**{name: change(CASE.problem().extras[name])})


@pytest.mark.parametrize(
    "case",
    [
        Case(scales_by_request=True),
        Case(scales_by_request=True, fp8=True, page=None),
        mla(16, scales_by_request=True, fp8=True),
    ],
    ids=["16 bits", "packed", "mla"],
)
def test_other_layers_have_none(case: Case) -> None:
    with pytest.raises(InvalidInput, match="scales of each request are those of a paged fp8 cache"):
        _ = case.spec


def test_writes_have_scales_of_heads() -> None:
    """A slot does not say which request it belongs to."""
    problem = CASE.problem()
    rows = problem.q.new_zeros(1, 2, 64)
    slots = torch.zeros(1, dtype=torch.int64)
    message = "k_scale is float32 (3, 2) on cpu: one float32, or [heads_kv = 2] of them,"
    scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
    with pytest.raises(InvalidInput, match=re.escape(message)):
        api.write_kv(problem.spec, rows, rows, problem.keys, problem.values, slots, **scales)


def test_a_scale_that_all_requests_share() -> None:
    """Expanded, as vLLM's FLASH_ATTN passes descale tensors, it gives the bits of a scale for the layer."""
    case = by_id("fp8-bf16")
    problem = case.problem()
    by_request = replace(problem.spec, scales_by_request=True)
    shape = (problem.batch.num_requests, problem.spec.heads_kv)
    expanded = {name: problem.extras[name].expand(shape) for name in ("k_scale", "v_scale")}
    results = []
    for spec, scales in ((problem.spec, {}), (by_request, expanded)):
        plan = api.plan(spec, problem.batch, kernel="reference")
        results.append(api.run(plan, problem.q, problem.keys, problem.values, **problem.extras | scales))
    assert results[0][: sum(case.q_lens)].equal(results[1][: sum(case.q_lens)])


def test_the_reference() -> None:
    check_case(CASE, "reference", "cpu")


# Where a kernel takes the scale of a request: (module, what it says once, what it would say).
MISTAKES = {
    "combine": ("combine", "request = request_of(self.requests, q_offset)", "request = cutlass.Int32(0)"),
    "scores": ("score_mod", "self.scaled(work.head_block, work.kv_source)", "self.scaled(work.head_block, 0)"),
    "search": (
        "scheduler.requests",
        "begins_before = requests.cu_seqlens_q[middle] <= q_offset",
        "begins_before = middle * 0 + requests.cu_seqlens_q[middle] < q_offset",
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the SM90 kernel that splits keys, and of its combine kernel."""
    pytest.importorskip("cutlass")
    import importlib

    from dsl_backend.attention.cute import combine, score_mod
    from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
    from dsl_backend.attention.cute.sm90.dense_host import SplitKV
    from dsl_backend.attention.cute.sm90.dense_kernel import DenseForward
    from dsl_backend.attention.plan import Planner
    from dsl_backend.attention.protocol import Kernel
    from tests.attention.emulated import compiled_anew, emulate, scratch
    from tests.mistakes import Mistake, spoilt

    name, said, wrong = MISTAKES[mistake]
    module = importlib.import_module(f"dsl_backend.attention.cute.{name}")
    found = spoilt(Mistake(mistake, module, said, wrong), tmp_path)
    if mistake == "combine":
        monkeypatch.setattr(combine.CombineThread, "store", found.CombineThread.store)
    elif mistake == "scores":
        monkeypatch.setattr(score_mod.SoftmaxScale, "load", found.SoftmaxScale.load)
    else:
        monkeypatch.setattr(combine, "request_of", found.request_of)

    fresh_class = compiled_anew(SplitKV, DenseForward)

    def make(planner: Planner, short: bool) -> Kernel:
        config = DenseConfig(groups=1, tile_n=64, stages=2, min_split_tiles=1, dequant_stages=2)
        return fresh_class(planner.spec, planner.target, scratch(), config)

    with pytest.raises(AssertionError):
        emulate(by_id("by-request-splits"), "sm_90a", make, 0)
