# SPDX-License-Identifier: Apache-2.0
"""Run a kernel on a problem and judge what it wrote."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dsl_backend.attention import api
from dsl_backend.attention.plan import AttentionPlan, Planner
from dsl_backend.quant.format import NVFP4
from dsl_backend.quant.reference import unswizzled
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.cases import Case
from dsl_backend.testing.inputs import SENTINEL, SENTINEL_BYTE, Expected, Problem
from dsl_backend.testing.numerics import (
    assert_lse_within_budget,
    assert_within_budget,
    before_rounding,
    block_before_rounding,
)


@dataclass(frozen=True)
class Result:
    """out [rows, heads_q, head_dim_v] and lse [rows, heads_q]; SENTINEL where nothing was written.

    out_scale, out_block_scale: of quantised outputs.
    """

    out: torch.Tensor
    lse: torch.Tensor
    out_scale: torch.Tensor | None = None
    out_block_scale: torch.Tensor | None = None

    def out_near(self, exact: torch.Tensor) -> torch.Tensor:
        """Outputs to be judged by a budget of 16 bits: quantised ones as near to `exact` as rounding explains."""
        if self.out_scale is None:
            return self.out
        scale = self.out_scale.double()
        if self.out_block_scale is not None:
            return block_before_rounding(self.out, self.block_scales, exact * scale) / scale
        return before_rounding(self.out, exact / scale) * scale

    @property
    def stored(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`out` as `api.run` takes it."""
        return self.out if self.out_block_scale is None else (self.out, self.out_block_scale)

    @property
    def block_scales(self) -> torch.Tensor:
        """Those of NVFP4 outputs, [rows, heads_q, blocks]."""
        assert self.out_block_scale is not None
        rows, heads, width = self.out.shape
        scales = unswizzled(self.out_block_scale, len(self.out_block_scale), heads * width // 8)
        # Rows of `out` that are past the batch's have none.
        return (
            torch.nn.functional.pad(scales.view(torch.uint8), (0, 0, 0, rows), value=SENTINEL_BYTE)[:rows]
            .view(scales.dtype)
            .unflatten(1, (heads, -1))
        )


def empty_result(problem: Problem) -> Result:
    """Tensors full of SENTINEL for a problem's results; lse is stored heads first, as vLLM wants it."""
    spec, rows = problem.spec, problem.q.shape[0]
    fill = SENTINEL_BYTE if spec.is_nvfp4_out else SENTINEL
    out = torch.full((rows, spec.heads_q, spec.output_width), fill, dtype=spec.output_dtype, device=problem.device)
    scales = None
    if spec.is_nvfp4_out:
        shape = spec.block_scale_shape(problem.batch.num_tokens)
        scales = torch.full(shape, SENTINEL_BYTE, dtype=torch.uint8, device=problem.device).view(NVFP4.scales)
    lse = torch.full((spec.heads_q, rows), SENTINEL, dtype=torch.float32, device=problem.device).t()
    return Result(out, lse, problem.out_scale, scales)


def launch(
    plan: AttentionPlan, problem: Problem, result: Result, *, split_q: bool = False, with_lse: bool = True
) -> None:
    """One layer's attention of the problem, into result."""
    q, lse = problem.split_q if split_q else problem.q, result.lse if with_lse else None
    api.run(plan, q, problem.keys, problem.values, out=result.stored, lse=lse, **problem.extras)


def run(
    problem: Problem,
    kernel: str,
    *,
    workspace: Workspace | None = None,
    split_q: bool = False,
    adjust: Callable[[Planner], None] | None = None,
    target: Target | None = None,
    with_lse: bool = True,
) -> Result:
    """Plan and run a problem on one kernel.

    Args:
        workspace: scratch of earlier launches; a new one by default.
        split_q: give absorbed MLA's q in two parts.
        adjust: changes the planner's kernels before the first plan, such as their number of splits.
        target: what to take the device for; what it is by default.
        with_lse: ask for an LSE, as decode under context parallelism does; prefill serves without.
    """
    api.check_batch(problem.spec, problem.batch)
    scratch = workspace or Workspace(problem.device)
    planner = Planner(problem.spec, target or targets.detect(problem.device), scratch, kernel)
    if adjust is not None:
        adjust(planner)
    result = empty_result(problem)
    launch(planner.plan(problem.batch), problem, result, split_q=split_q, with_lse=with_lse)
    return result


def assert_others_kept(result: Result, mine: torch.Tensor) -> None:
    """Rows of no request hold what they did; mine: [rows] bool."""
    for name, tensor in (("out", result.out), ("lse", result.lse)):
        rest, sentinel = tensor[~mine], SENTINEL_BYTE if tensor.dtype == torch.uint8 else SENTINEL
        assert (rest.float() == sentinel).all(), f"{name}: rows of no request were written: {rest}"
    if result.out_block_scale is not None:
        rest = unswizzled(result.out_block_scale.view(torch.uint8), *result.out_block_scale.shape)
        owned = torch.nn.functional.pad(mine, (0, len(rest)))[: len(rest)]
        assert (rest[~owned] == SENTINEL_BYTE).all(), "out_block_scale: rows of no request were written"


def judge(result: Result, expected: Expected, magnitude: torch.Tensor, *, with_lse: bool = True) -> None:
    """Raises AssertionError where a result is wrong.

    Args:
        magnitude: [rows], of `Problem.score_magnitude`.
        with_lse: whether an LSE was asked for; none may have been written otherwise.
    """
    mine = expected.owned
    assert_others_kept(result, mine)
    out = result.out_near(expected.out).to(expected.naive.dtype)
    assert_within_budget(out[mine], expected.out[mine], expected.naive[mine])
    if not with_lse:
        assert (result.lse == SENTINEL).all(), "lse: written, and not asked for"
        return
    assert_lse_within_budget(result.lse[mine], expected.lse[mine], expected.lse_single[mine], magnitude[mine])


def check(
    problem: Problem,
    kernel: str,
    *,
    workspace: Workspace | None = None,
    split_q: bool = False,
    adjust: Callable[[Planner], None] | None = None,
) -> Result:
    """Run a problem and judge the result; arguments as in `run`."""
    result = run(problem, kernel, workspace=workspace, split_q=split_q, adjust=adjust)
    judge(result, problem.expected(), problem.score_magnitude())
    return result


def forced(case: Case) -> Callable[[Planner], None] | None:
    """An adjustment that gives the planner's kernels the tiles and the number of programs that a case asks for.

    Tiles are Triton's alone: those of the other kernels are compiled into them.
    """
    if case.programs is None and case.tile is None:
        return None

    def adjust(planner: Planner) -> None:
        if planner.short[1] == "reference":
            return  # has neither
        # Imported here: the rest of this module serves machines without Triton.
        from dsl_backend.attention.triton.configs import PrefillConfig, SplitKVConfig, TileConfig
        from dsl_backend.attention.triton.prefill import Prefill
        from dsl_backend.attention.triton.split_kv import SplitKV

        def changed(usual: TileConfig) -> dict[str, int]:
            if case.tile is None:
                return {}
            # One stage: a tile that is larger than the usual one must still fit.
            return {"block_m": case.tile[0], "block_n": case.tile[1], "num_stages": 1}

        operation, name, kernel = planner.short
        if name == "cute":
            from dsl_backend.attention.cute.host import LayerKernel

            assert isinstance(kernel, LayerKernel)
            if case.programs is not None:
                kernel.num_ctas = case.programs * getattr(kernel.config, "cluster", 1)
            return
        assert isinstance(kernel, SplitKV), f"{name} does not split keys"
        spec, target, scratch = planner.spec, planner.target, kernel.workspace
        split = SplitKVConfig.default(spec, target, kernel.max_query_len_served() or 8)
        split = replace(split, **changed(split))
        if case.programs is not None:
            split = replace(split, num_programs=case.programs, min_split_tiles=1)
        planner.short = (operation, name, SplitKV(spec, target, scratch, split))
        if planner.long[2] is kernel:
            planner.long = planner.short
        elif isinstance(planner.long[2], Prefill):
            prefill = PrefillConfig.default(spec, target)
            planner.long = (*planner.long[:2], Prefill(spec, target, scratch, replace(prefill, **changed(prefill))))

    return adjust


def check_case(case: Case, kernel: str, device: torch.device | str, *, workspace: Workspace | None = None) -> Result:
    """Build a case's problem, run it on a kernel and judge the result."""
    return check(case.problem(device), kernel, workspace=workspace, split_q=case.split_q, adjust=forced(case))
