# SPDX-License-Identifier: Apache-2.0
"""Problems of quantised operands for SM90's CuTe DSL kernels, with tiles small enough for the emulator."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch

import emulator
from dsl_backend.gemm import scaled_host as host
from dsl_backend.gemm.activation import SWIGLU_OAI, Geglu, Swiglu
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.sm90 import scaled_configs
from dsl_backend.gemm.sm90.scaled_configs import ScaledConfig, ScaledGemmConfig, ScaledSmallMConfig
from dsl_backend.linear.scaled.cute.host import run_both
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.cute import host as quantising
from dsl_backend.quant.reference import column_major
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.linear import F16
from dsl_backend.testing.scaled import (
    CUT_BITS,
    GROUPS,
    ROW,
    TENSOR,
    Outputs,
    ScaledCase,
    blocked,
    budget_of,
    check_outputs,
    random_case,
    tensors,
)

ARCH = "sm_90a"
SMEM_BYTES = 227 * 1024
SMS = 4


@dataclass(frozen=True, kw_only=True)
class ScaledEmulated:
    """A case and the kernel that it runs with.

    Attributes:
        why: what this case alone would find.
        sms: CTAs at most.
        beside: the products are float32, and a launch of its own quantises them.
    """

    id: str
    why: str
    case: ScaledCase
    config: ScaledConfig
    sms: int = SMS
    beside: bool = False

    @property
    def products(self) -> ScaledLinearSpec:
        """What the GEMM computes."""
        return self.case.spec.in_float32 if self.beside else self.case.spec


def outputs(case: ScaledCase, given_scale: torch.Tensor | None) -> Outputs:
    """Where a kernel writes to: NaN, except for a scale that is given."""
    kind = case.out_kind
    out = torch.full((case.rows, case.n), torch.nan).to(case.dtype if kind is None else kind.values)
    if kind is None or given_scale is not None:
        return Outputs(out, given_scale)
    shape = kind.scale_shape(case.rows, case.n)
    if len(shape) == 1:
        return Outputs(out, torch.full(shape, torch.nan))
    return Outputs(out, column_major(*shape, kind.scales, out.device).fill_(torch.nan))


def run(one: ScaledEmulated, schedule: str, seed: int = 0, kernel: Any = None) -> Outputs:
    """Compile and run on the emulator; any finding or warning raises.

    Args:
        kernel: a class in place of the configuration's.
    """
    case, spec = one.case, one.products
    given = tensors(case, "cpu")
    found = outputs(case, given.out_scale)
    operands = ScaledOperands(
        given.x.values, given.x.scale, given.weight.values, given.weight.scale, given.bias, found.out, found.scale
    )
    workspace = Workspace(torch.device("cpu"))
    with emulator.device(arch=ARCH, sms=one.sms, schedule=schedule, seed=seed, strict=True):
        key = host.key_of(spec, one.config, spec.column_major)
        function = host.build(kernel or scaled_configs.kernel(key), key, from_arch(ARCH))
        if one.beside:
            assert case.out_kind is not None
            second = quantising.build(case.out_kind, from_arch(ARCH))
            run_both(function, second, one.config, one.sms, workspace, operands)
        else:
            host.run(function, one.config, operands, one.sms, workspace)
    assert not workspace.flags(0).any(), "a flag was left set"
    return found


def emulate(one: ScaledEmulated, schedule: str, seed: int = 0) -> None:
    """Run and judge; raises what is wrong."""
    assert one.config.objections(one.products, SMEM_BYTES) == []
    judge(one.case, run(one, schedule, seed), one.config.promotion)


def judge(case: ScaledCase, found: Outputs, promotion: int) -> None:
    """Raises AssertionError where an output is beyond the budget of sums of so many blocks of k in a wgmma."""
    check_outputs(case, found, budget_of(case, tensors(case, "cpu"), CUT_BITS, 128 * promotion))


SWIGLU = Swiglu()
PLAIN = ScaledCase(rows=150, n=80, k=656)
GATED = replace(PLAIN, activation=SWIGLU)
BLOCKS = blocked(150, 208, 656)
# n has whole blocks of up rows.
GATED_BLOCKS = blocked(150, 256, 400, activation=SWIGLU)
# Two stages and six blocks of k: every pipeline comes round three times a tile.
SMALL = ScaledGemmConfig(box_n=32, stages=2)
FEW = replace(PLAIN, rows=13, n=208)
SMALL_M = ScaledSmallMConfig(tokens=16, stages=2)

CASES = [
    # --- scales of rows ---
    ScaledEmulated(id="rows", why="consumers share a tile; all edges ragged", case=PLAIN, config=SMALL),
    ScaledEmulated(
        id="rows-gated",
        why="interleaved, a bias; sums of four blocks of k and two that are left",
        case=replace(GATED, interleaved=True, bias=True, pad_x=16, pad_weight=32),
        config=replace(SMALL, promotion=4, stages=3),
    ),
    ScaledEmulated(
        id="rows-cluster",
        why="weights are shared; sums of two blocks of k; tiles that are no power of two wide",
        case=replace(GATED, dtype=F16, activation=Geglu()),
        config=replace(SMALL, box_n=24, cluster=2, promotion=2),
    ),
    ScaledEmulated(
        id="rows-turns",
        why="each CTA has several tiles; a band ends in the middle",
        case=replace(PLAIN, rows=300, n=272, k=144, x=TENSOR),
        config=replace(SMALL, band=2),
        sms=2,
    ),
    ScaledEmulated(
        id="tensor",
        why="one scale each, no edge",
        case=replace(PLAIN, rows=128, n=64, k=256, x=TENSOR, weight=TENSOR),
        config=SMALL,
    ),
    ScaledEmulated(id="one", why="one element each is inside", case=replace(GATED, rows=1, n=16, k=16), config=SMALL),
    ScaledEmulated(
        id="special",
        why="NaN, scales that are infinite, NaN, 0, denormal",
        case=replace(PLAIN, rows=70, special=True),
        config=SMALL,
    ),
    # --- scales of blocks ---
    ScaledEmulated(id="blocks", why="boxes begin in the middle of a block", case=BLOCKS, config=SMALL),
    ScaledEmulated(
        id="blocks-across",
        why="boxes begin in one block and end in the next; row-major scales, a bias",
        case=replace(BLOCKS, n=400, k=400, row_major=True, bias=True),
        config=replace(SMALL, box_n=48, cluster=2),
    ),
    ScaledEmulated(
        id="blocks-gated",
        why="gate and up have blocks of their own",
        case=GATED_BLOCKS,
        config=replace(SMALL, box_n=64),
    ),
    ScaledEmulated(
        id="blocks-gated-across",
        why="the same with boxes of two blocks",
        case=replace(GATED_BLOCKS, activation=SWIGLU_OAI, bias=True, gain=9),
        config=replace(SMALL, box_n=48, stages=3),
    ),
    ScaledEmulated(
        id="blocks-special",
        why="NaN and denormal scales of both operands",
        case=replace(BLOCKS, rows=70, special=True, special_weights=True),
        config=SMALL,
    ),
    # --- boxes of weights in turns ---
    ScaledEmulated(
        id="turns",
        why="boxes are stored one after the other; a bias, all edges ragged",
        case=replace(PLAIN, bias=True),
        config=replace(SMALL, turns=2),
    ),
    ScaledEmulated(
        id="turns-blocks",
        why="each turn has its scales, boxes begin in one block and end in the next",
        case=replace(BLOCKS, n=400, k=400),
        config=replace(SMALL, box_n=48, cluster=2, turns=2),
    ),
    ScaledEmulated(
        id="turns-row-major",
        why="a stage is awaited beside products of the block before; an odd number of blocks, several tiles a CTA",
        case=replace(BLOCKS, n=400, k=336, row_major=True, bias=True),
        config=replace(SMALL, box_n=48, turns=2),
        sms=2,
    ),
    ScaledEmulated(
        id="turns-gated",
        why="gate and up in turns; a given scale; several tiles a CTA",
        case=replace(GATED_BLOCKS, to=TENSOR, bias=True),
        config=replace(SMALL, turns=2),
        sms=2,
    ),
    ScaledEmulated(
        id="turns-to-groups",
        why="a gated tile has whole groups",
        case=blocked(150, 384, 272, activation=SWIGLU, to=GROUPS),
        config=replace(SMALL, box_n=128, cluster=2, turns=2),
    ),
    ScaledEmulated(
        id="turns-deep",
        why="more blocks of k than a warp has lanes; two blocks of rows of weights",
        case=blocked(70, 128, 4240, activation=SWIGLU, to=TENSOR),
        config=replace(SMALL, box_n=48, stages=3, turns=2),
        sms=2,
    ),
    ScaledEmulated(
        id="turns-to-rows",
        why="float32 of both turns from registers",
        case=replace(FEW, rows=70, to=ROW, special=True),
        config=replace(SMALL, turns=2),
        beside=True,
    ),
    # --- one set of accumulators is added while the other one's products run ---
    ScaledEmulated(
        id="overlap",
        why="turns of a block overlap, an even number of blocks; a bias, all edges ragged",
        case=replace(PLAIN, bias=True),
        config=replace(SMALL, turns=2, overlap=True),
    ),
    ScaledEmulated(
        id="overlap-blocks",
        why="scales of turns, an odd number of blocks; boxes begin in one block and end in the next; a cluster",
        case=replace(BLOCKS, n=400, k=272),
        config=replace(SMALL, box_n=48, cluster=2, turns=2, overlap=True),
    ),
    ScaledEmulated(
        id="overlap-deep",
        why="blocks of k overlap, more of them than a warp has lanes; several tiles a CTA",
        case=blocked(70, 256, 4240, activation=SWIGLU, to=TENSOR),
        config=replace(SMALL, stages=3, overlap=True),
        sms=2,
    ),
    ScaledEmulated(
        id="overlap-to-groups",
        why="two tiles have a group",
        case=blocked(150, 384, 272, activation=SWIGLU, to=GROUPS),
        config=replace(SMALL, box_n=64, turns=2, overlap=True),
    ),
    ScaledEmulated(
        id="overlap-to-rows",
        why="an odd number of blocks of k in turns; float32 from registers",
        case=replace(FEW, rows=70, k=656 - 128, to=ROW, special=True),
        config=replace(SMALL, overlap=True),
        beside=True,
    ),
    ScaledEmulated(
        id="overlap-one",
        why="one block of k: nothing overlaps",
        case=replace(GATED, rows=1, n=16, k=16),
        config=replace(SMALL, turns=2, overlap=True),
    ),
    # --- halves of k ---
    ScaledEmulated(
        id="halves",
        why="uneven halves of k, all edges ragged; a tile without rows of the second consumer; a bias",
        case=replace(PLAIN, rows=190, bias=True),
        config=replace(SMALL, splits=2),
        sms=8,
    ),
    ScaledEmulated(
        id="halves-blocks",
        why="scales of the second half; overlapped turns; clusters that start when others are done",
        case=replace(BLOCKS, n=400, k=9 * 1024 + 16),
        config=replace(SMALL, box_n=48, turns=2, overlap=True, stages=3, splits=2),
        sms=4,
    ),
    ScaledEmulated(
        id="halves-to-tensor",
        why="gate and up; a block of k each",
        case=replace(GATED_BLOCKS, k=144, to=TENSOR, bias=True),
        config=replace(SMALL, splits=2),
        sms=8,
    ),
    ScaledEmulated(
        id="halves-to-rows",
        why="float32 of one consumer's rows",
        case=replace(FEW, rows=70, to=ROW, special=True),
        config=replace(SMALL, overlap=True, splits=2),
        sms=8,
        beside=True,
    ),
    # --- outputs in 8 bits ---
    ScaledEmulated(
        id="to-tensor", why="a given scale; rows of 32 bytes", case=replace(GATED, to=TENSOR, bias=True), config=SMALL
    ),
    ScaledEmulated(
        id="to-tensor-wide",
        why="values saturate; rows of 96 bytes have no swizzle",
        case=replace(PLAIN, n=208, x=TENSOR, to=TENSOR, gain=300),
        config=replace(SMALL, box_n=48, cluster=2),
    ),
    ScaledEmulated(
        id="to-groups",
        why="a tile has a group; columns past the last one have a bias",
        case=replace(PLAIN, n=208, k=400, to=GROUPS, bias=True),
        config=replace(SMALL, box_n=64),
    ),
    ScaledEmulated(
        id="to-groups-of-two",
        why="two tiles have a group, the last group has one",
        case=blocked(150, 384, 272, activation=SWIGLU, to=GROUPS),
        config=replace(SMALL, box_n=64, cluster=2),
    ),
    ScaledEmulated(
        id="to-groups-of-four",
        why="four tiles have a group; each CTA has several of them",
        case=replace(GATED, rows=200, n=304, k=144, to=GROUPS, bias=True),
        config=SMALL,
        sms=2,
    ),
    ScaledEmulated(
        id="to-groups-special",
        why="NaN is left out of a scale, infinity is not",
        case=replace(GATED, rows=70, n=144, k=144, to=GROUPS, special=True),
        config=replace(SMALL, box_n=64),
    ),
    # --- outputs that a launch of its own quantises ---
    ScaledEmulated(
        id="to-rows",
        why="float32 from registers with all edges ragged; NaN is left out of a scale, infinity is not",
        case=replace(GATED, rows=70, k=272, to=ROW, bias=True, special=True),
        config=SMALL,
        beside=True,
    ),
    ScaledEmulated(
        id="to-rows-few",
        why="rows longer than a turn of the threads that quantise; scratch behind partial sums",
        case=replace(FEW, rows=5, n=2064, k=272, activation=SWIGLU, to=ROW),
        config=SMALL_M,
        beside=True,
    ),
    ScaledEmulated(
        id="to-groups-few",
        why="a warp for each group; the last group is not whole; a zero row",
        case=replace(FEW, rows=9, n=208, to=GROUPS, special=True),
        config=SMALL_M,
        beside=True,
    ),
    ScaledEmulated(
        id="to-groups-blocks-few",
        why="scales of blocks through partial sums, an odd number of blocks",
        case=blocked(13, 384, 656, activation=SWIGLU, to=GROUPS),
        config=replace(SMALL_M, groups=2, stages=3),
        beside=True,
    ),
    # --- few rows ---
    ScaledEmulated(id="few", why="a tile of several shares; all edges ragged", case=FEW, config=SMALL_M),
    ScaledEmulated(
        id="few-gated",
        why="interleaved, a bias; sums of two blocks of k",
        case=replace(GATED, rows=13, interleaved=True, bias=True, pad_x=16, pad_weight=32),
        config=replace(SMALL_M, tokens=8, tile_k=256),
    ),
    ScaledEmulated(id="few-one", why="one item of work", case=replace(GATED, rows=1, n=16, k=16), config=SMALL_M),
    ScaledEmulated(
        id="few-early",
        why="sums of other CTAs are there before a CTA's last tile begins",
        case=replace(FEW, rows=27, n=880, k=640, x=TENSOR, bias=True),
        config=replace(SMALL_M, tokens=32),
        sms=3,
    ),
    ScaledEmulated(id="few-blocks", why="each box has its block", case=blocked(13, 208, 656), config=SMALL_M),
    ScaledEmulated(
        id="few-blocks-gated",
        why="consumers with tokens of their own; a given scale; row-major scales",
        case=blocked(40, 256, 656, activation=SWIGLU, row_major=True, to=TENSOR),
        config=ScaledSmallMConfig(tokens=24, groups=2, split_tokens=True, stages=2),
    ),
    ScaledEmulated(
        id="few-blocks-groups",
        why="consumers with rows of weights of their own",
        case=blocked(13, 384, 400, bias=True),
        config=replace(SMALL_M, groups=2, stages=3),
    ),
    ScaledEmulated(
        id="few-special",
        why="NaN, scales that are infinite, NaN, 0, denormal through partial sums",
        case=replace(FEW, special=True, special_weights=True),
        config=SMALL_M,
    ),
    # --- few rows, a cluster for each tile ---
    ScaledEmulated(
        id="few-split",
        why="four CTAs sum up scaled sums, parts of unequal length",
        case=blocked(13, 208, 656, bias=True),
        config=replace(SMALL_M, num_splits=4),
        sms=8,
    ),
    ScaledEmulated(
        id="few-split-rows",
        why="eight CTAs, of a gated layer",
        case=replace(GATED, rows=30, n=80, k=1040, dtype=F16, to=TENSOR),
        config=replace(SMALL_M, tokens=32, num_splits=8),
        sms=8,
    ),
]


def random_scaled(seed: int) -> ScaledEmulated:
    """A small problem of any kind for these kernels; the same for the same seed."""
    draw = random.Random(f"quantised linear kernels {seed}")
    while True:
        case = random_case(draw, 320)
        config = random_config(draw)
        if isinstance(config, ScaledSmallMConfig):
            case = replace(case, rows=draw.randint(1, 100))
        # Where the kernel does not quantise, and sometimes where it could, a launch of its own does.
        beside = case.spec.may_be_quantised_beside and bool(
            config.objections(case.spec, SMEM_BYTES) or draw.random() < 0.3
        )
        found = ScaledEmulated(
            id=f"fuzz-{seed}",
            why="unforeseen combinations",
            case=case,
            config=config,
            sms=draw.choice((8, 10)),
            beside=beside,
        )
        if not config.objections(found.products, SMEM_BYTES):
            return found


def random_config(draw: random.Random) -> ScaledConfig:
    """Small tiles of any kind."""
    if draw.random() < 0.5:
        return ScaledGemmConfig(
            box_n=draw.choice((16, 24, 32, 48, 64, 96, 128)),
            stages=draw.randint(2, 4),
            cluster=draw.choice((1, 2)),
            band=draw.randint(1, 4),
            promotion=draw.choice((1, 1, 2, 4)),
            turns=draw.choice((1, 1, 2)),
            overlap=draw.random() < 0.3,
            splits=draw.choice((1, 1, 2)),
        )
    groups = draw.choice((1, 2))
    split = groups == 2 and draw.random() < 0.5
    return ScaledSmallMConfig(
        tokens=draw.choice((8, 16, 24, 32) if split else (8, 16, 32, 48)),
        groups=groups,
        split_tokens=split,
        tile_k=draw.choice((128, 128, 256)),
        stages=draw.randint(2, 3),
        num_splits=draw.choice((1, 1, 2, 4)),
    )
