# SPDX-License-Identifier: Apache-2.0
"""Problems of quantised operands for SM100's kernels, with tiles small enough for the emulator."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import emulator
from dsl_backend.gemm import scaled_host
from dsl_backend.gemm.activation import SWIGLU_OAI, Geglu, Swiglu
from dsl_backend.gemm.scaled import QUANTISED_BESIDE, ScaledOperands
from dsl_backend.gemm.sm100 import scaled_configs
from dsl_backend.gemm.sm100.configs import (
    BlockScaledConfig,
    GemmConfig,
    PromotedConfig,
    PromotedSmallMConfig,
    ScaledSmallMConfig,
)
from dsl_backend.linear.scaled.cute.host import run_both
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.cute import host as quantising
from dsl_backend.quant.format import E2M1_MAX, MXFP8, NVFP4, TENSOR_SCALED, ScaledFormat, scaled_format
from dsl_backend.quant.reference import (
    LEAST_OF_GROUP,
    Quantized,
    column_major,
    dequantized,
    mma_dequantized,
    mma_quantized,
    swizzled,
    unpacked_e2m1,
    unswizzled,
)
from dsl_backend.runtime.compile import Function
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.scaled import (
    TENSOR,
    Budget,
    Outputs,
    ScaledCase,
    Tensors,
    budget_of,
    check_outputs,
    random_case,
    tensors,
)

ARCH = "sm_100a"
SMEM_BYTES = 227 * 1024
SMS = 4


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A case and the kernel that it runs with.

    Attributes:
        why: what this case alone would find.
        sms: CTAs at most.
    """

    id: str
    why: str
    case: ScaledCase
    config: GemmConfig | ScaledSmallMConfig
    sms: int = SMS

    @property
    def products(self) -> ScaledLinearSpec:
        """What the GEMM computes: in float32 where another launch quantises the output."""
        spec = self.case.spec
        return spec.in_float32 if spec.may_be_quantised_beside else spec


GLOBAL_SCALES = (0.007, 0.3)


def mma_tensors(case: ScaledCase, kind: ScaledFormat) -> tuple[Tensors, Tensors, torch.Tensor | None]:
    """Tensors of MXFP8 or NVFP4, what they stand for in float64, and NVFP4's product of global scales."""
    plain = tensors(replace(case, x=TENSOR, weight=TENSOR), "cpu")
    global_scales = GLOBAL_SCALES if kind == NVFP4 else (1.0, 1.0)
    stored, meant = [], []
    for matrix, global_scale in zip(plain[:2], global_scales, strict=True):
        spread = dequantized(matrix) * 2.0 ** (torch.arange(matrix.values.shape[1]) // 16 % 7 - 3)
        quantized = mma_quantized(spread, kind, global_scale)
        if matrix is plain.x and case.special:
            quantized = planted(quantized)
        if matrix is plain.weight and case.special_weights:
            quantized = with_scales(quantized, lambda scale: scale[0, 0].fill_(torch.nan))
            quantized = with_scales(quantized, lambda scale: scale[-1, -1].fill_(LEAST[kind]))
        stored.append(quantized)
        meant.append(Quantized(mma_dequantized(quantized, global_scale), torch.ones(1), TENSOR_SCALED))
    alpha = torch.tensor([GLOBAL_SCALES[0] * GLOBAL_SCALES[1]]) if kind == NVFP4 else None
    rest = plain.bias, plain.out_scale
    return Tensors(*stored, *rest), Tensors(*meant, *rest), alpha


# The least scale of a block, which is denormal where its format has such.
LEAST = {MXFP8: 2.0**-127, NVFP4: 2.0**-9}


def with_scales(matrix: Quantized, change: Callable[[torch.Tensor], object]) -> Quantized:
    """The matrix with other scales of blocks; `change` writes them into [rows, blocks], float32."""
    values, scale, kind = matrix
    rows, columns = values.shape[0], values.shape[1] * kind.packed
    assert kind.block_columns is not None
    found = unswizzled(scale, rows, -(-columns // kind.block_columns)).float()
    change(found)
    return matrix._replace(scale=swizzled(found.to(kind.scales)))


def planted(x: Quantized) -> Quantized:
    """Rows of x with values of 0, and with scales that are NaN, the least, the largest and, where there is one, 0.

    A row's first block alone has the scale that is NaN: all of its sums are NaN.
    """
    x.values.view(torch.uint8)[1::7] = 0
    if x.kind == MXFP8:
        x.values[4::7, -1] = torch.nan

    def change(scale: torch.Tensor) -> None:
        scale[0::7, 0] = torch.nan
        scale[2::7] = LEAST[x.kind]
        scale[3::7] = 448.0 if x.kind == NVFP4 else 2.0**100
        scale[5::7] = 0.0 if x.kind == NVFP4 else 2.0**-126

    return with_scales(x, change)


def operands_of(case: ScaledCase) -> tuple[Tensors, Tensors, torch.Tensor | None]:
    """The tensors of a case, what they stand for, and NVFP4's product of global scales."""
    if case.spec.x.swizzled:
        return mma_tensors(case, case.spec.x)
    given = tensors(case, "cpu")
    return given, given, None


def whole_scale(budget: Budget) -> torch.Tensor:
    """NVFP4's scale of a whole matrix: its largest magnitude has the largest block scale."""
    largest = budget.exact.nan_to_num(0.0, 0.0, 0.0).abs().amax().clamp(min=2.0**-60)
    return (largest / (E2M1_MAX * 448)).float().view(1)


def outputs(
    case: ScaledCase, spec: ScaledLinearSpec, given: torch.Tensor | None, budget: Budget
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The output, its scales, and NVFP4's scale of the whole. Only padding of columns is 0 before."""
    if spec.out is None or not spec.out.swizzled:
        out = torch.zeros(case.rows, case.n, dtype=spec.dtypes.out)
        if spec.out in QUANTISED_BESIDE:
            shape = spec.out.scale_shape(case.rows, case.n)
            if len(shape) == 1:
                return out, torch.full(shape, torch.nan), None
            return out, column_major(*shape, spec.out.scales, out.device).fill_(torch.nan), None
        return out, given, None
    out = torch.full((case.rows, case.n // spec.out.packed), 77, dtype=torch.uint8).view(spec.out.values)
    assert spec.out.block_columns is not None
    blocks = -(-case.n // spec.out.block_columns)
    rows = spec.out.scale_shape(case.rows, case.n)[0]
    scale = swizzled(torch.full((rows, blocks), 77, dtype=torch.uint8)).view(spec.out.scales)
    return out, scale, whole_scale(budget) if spec.out == NVFP4 else None


def check_blocks(case: ScaledCase, found: Quantized, budget: Budget) -> None:
    """Raises AssertionError where a quantised output in MXFP8 or NVFP4 is wrong: values, scales, scales of padding.

    A NaN is one in MXFP8; in NVFP4 the scale of its block is. An infinity makes the scale of a block in MXFP8 NaN; in
    NVFP4 it is the largest number.
    """
    kind, (exact, error) = found.kind, budget
    assert kind.block_columns is not None
    infinite = exact.abs() > torch.finfo(torch.float32).max
    special = exact.isnan() if kind == NVFP4 else infinite
    lost = torch.nn.functional.pad(special, (0, -case.n % kind.block_columns))
    lost = lost.view(case.rows, -1, kind.block_columns).any(2)
    error = torch.where(exact.isfinite() & ~infinite, error, 0.0)
    width, whole = kind.block_columns, float(whole_scale(budget)) if kind == NVFP4 else 1.0
    blocks = -(-case.n // width)
    raw = unswizzled(found.scale, *found.scale.shape)
    for padding in (raw[:, blocks:], raw[case.rows :]):
        assert not padding.view(torch.uint8).any(), "scales of padding are not 0"
    scale = raw[: case.rows, :blocks].float().double()
    assert scale.isnan().equal(lost), f"{case}: {int((scale.isnan() != lost).sum())} scales are wrongly NaN or not"
    scale = torch.where(lost, 1.0, scale)
    of_lost = lost.repeat_interleave(width, 1)[:, : case.n]
    exact = torch.where(of_lost, 0.0, exact)
    largest = torch.nn.functional.pad(exact.nan_to_num(0.0, torch.inf).abs(), (0, -case.n % width))
    largest = largest.view(case.rows, blocks, width).amax(2)
    least = 0.0 if kind == NVFP4 else LEAST_OF_GROUP
    wanted = (largest.clamp(min=least) / (kind.largest * whole)).clamp(max=448.0 if kind == NVFP4 else torch.inf)
    wanted = torch.where(lost, 1.0, wanted)
    tolerance = torch.nn.functional.pad(error, (0, -case.n % width)).view(case.rows, blocks, width).amax(2) / whole
    if kind == NVFP4:
        # Half a step of e4m3, of denormal ones 2^-10.
        assert ((scale - wanted).abs() <= torch.maximum(wanted / 16, torch.tensor(2.0**-10)) + tolerance).all()
        half_steps = ((2.0, 0.25), (4.0, 0.5), (torch.inf, 1.0))
        values = unpacked_e2m1(found.values)
    else:
        assert ((scale >= wanted * (1 - 1e-6) - tolerance) & (scale < 2 * wanted + tolerance + 2.0**-120)).all()
        half_steps = tuple((2.0 ** (i + 1), 2.0 ** (i - 4)) for i in range(-6, 9))
        values = found.values.double()
    unit = scale.repeat_interleave(width, 1)[:, : case.n] * whole
    magnitude = (exact.abs() / unit).nan_to_num(0.0, 0.0)
    allowed = torch.zeros_like(exact)
    for limit, half_step in reversed(half_steps):
        allowed = torch.where(magnitude <= limit * (1 + 1e-6), half_step, allowed)
    nan = exact.isnan()
    assert kind == NVFP4 or nan.equal(values.isnan() & ~of_lost), f"{case}: values are wrongly NaN or not"
    # What is infinite in NVFP4 is saturated.
    reached = exact.clamp(-kind.largest * unit, kind.largest * unit) if kind == NVFP4 else exact
    wrong = (values * unit - reached).abs() > unit * allowed * (1 + 1e-5) + error + (unit == 0) * exact.abs()
    wrong &= ~(nan | of_lost)
    assert not wrong.any(), f"{case}: {int(wrong.sum())} of {wrong.numel()} values are wrong"


def prepared(one: Emulated) -> Callable[[], None]:
    """A call of a case's kernels on the device that is active, to be repeated.

    It compiles them once, and raises AssertionError where an output is wrong or a flag was left set.
    """
    case, spec = one.case, one.case.spec
    given, meant, alpha = operands_of(case)
    budget = budget_of(case, meant)
    assert one.config.objections(one.products, SMEM_BYTES) == []
    workspace = Workspace(torch.device("cpu"))
    target = from_arch(ARCH)
    built: list[Function] = []

    def run() -> None:
        if not built:
            key = scaled_host.key_of(one.products, one.config, spec.column_major)
            built.append(scaled_host.build(scaled_configs.kernel(key), key, target))
            if one.products.wide:
                assert spec.out is not None
                built.append(quantising.build(spec.out, target))
        # A launch that was stopped in the middle leaves flags as they were there.
        workspace.reset()
        out, out_scale, out_global = outputs(case, spec, given.out_scale, budget)
        matrices = given.x.values, given.x.scale, given.weight.values, given.weight.scale
        operands = ScaledOperands(*matrices, given.bias, out, out_scale, alpha, out_global)
        if one.products.wide:
            run_both(built[0], built[1], one.config, one.sms, workspace, operands)
        else:
            scaled_host.run(built[0], one.config, operands, one.sms, workspace)
        assert not workspace.flags(0).any(), "a flag was left set"
        if spec.out is not None and spec.out.swizzled:
            assert out_scale is not None
            check_blocks(case, Quantized(out, out_scale, spec.out), budget)
        else:
            check_outputs(case, Outputs(out, out_scale), budget)

    return run


def emulate(one: Emulated, schedule: str, seed: int = 0) -> emulator.Device:
    """Compile, run on the emulator, judge; any finding or warning raises."""
    run = prepared(one)
    with emulator.device(arch=ARCH, sms=one.sms, schedule=schedule, seed=seed, strict=True) as device:
        run()
    return device


PLAIN = ScaledCase(rows=150, n=80, k=656)
GATED = replace(PLAIN, activation=Swiglu())
TENSORS = {"x": "e4m3-tensor", "weight": "e4m3-tensor"}
# Two stages and six blocks of k; tiles are 128 rows high.
ONE_CTA = GemmConfig(box_n=32, stages=2)
TWO_CTA = GemmConfig(box_n=32, stages=2, two_cta=True)
BLOCKED = {"x": "e4m3-1x128", "weight": "e4m3-128x128"}
POWERS = {"x": "e4m3-1x128-e8m0", "weight": "e4m3-128x128-e8m0"}
PROMOTED = PromotedConfig(box_n=64, stages=2)
MX = replace(PLAIN, x="mxfp8", weight="mxfp8")
NV = replace(PLAIN, k=1184, x="nvfp4", weight="nvfp4")
SCALED_64 = BlockScaledConfig(box_n=64, stages=2)
SCALED_128 = BlockScaledConfig(box_n=128, stages=2)

FEW = ScaledSmallMConfig(tokens=16, stages=2)
FEW_32 = ScaledSmallMConfig(tokens=32, stages=2)
FEW_PROMOTED = PromotedSmallMConfig(tokens=16, stages=2)

CASES = [
    Emulated(id="rows", why="all edges ragged; scales of rows and channels", case=PLAIN, config=ONE_CTA),
    Emulated(
        id="gated", why="scales of gate and up; sums of tiles in turn", case=replace(GATED, rows=300), config=ONE_CTA
    ),
    Emulated(
        id="tensors",
        why="one scale each; no edge; float16",
        case=replace(GATED, rows=256, n=64, k=256, dtype=torch.float16, **TENSORS),
        config=ONE_CTA,
    ),
    Emulated(id="one", why="one row of each tile is inside", case=replace(GATED, rows=1, n=16, k=16), config=ONE_CTA),
    Emulated(
        id="interleaved",
        why="gate and up in turn, in scales and bias",
        case=replace(GATED, n=112, k=144, interleaved=True, bias=True, activation=SWIGLU_OAI, gain=5),
        config=GemmConfig(box_n=96, stages=2),
    ),
    Emulated(
        id="wide",
        why="all of tensor memory; three stages; rows apart",
        case=replace(PLAIN, rows=140, n=272, k=400, bias=True, pad_x=16, pad_weight=32, x="e4m3-tensor"),
        config=GemmConfig(box_n=128, stages=3),
        sms=1,
    ),
    Emulated(
        id="special",
        why="NaN, and scales that are NaN, infinite and denormal",
        case=replace(GATED, rows=70, special=True),
        config=ONE_CTA,
    ),
    Emulated(
        id="special-weights",
        why="the same of weights",
        case=replace(PLAIN, rows=20, special_weights=True),
        config=ONE_CTA,
    ),
    Emulated(
        id="two-cta",
        why="two blocks multiply as one; the second one's last rows are outside",
        case=replace(GATED, rows=300),
        config=TWO_CTA,
    ),
    Emulated(
        id="two-cta-plain",
        why="neighbouring boxes, one a block; the second block has no row",
        case=replace(PLAIN, rows=100, bias=True, weight="e4m3-tensor"),
        config=TWO_CTA,
    ),
    Emulated(
        id="two-cta-turns",
        why="more tiles than there are sums, for two blocks; three stages",
        case=replace(GATED, rows=700, n=144, k=272, interleaved=True, bias=True, activation=Geglu()),
        config=replace(TWO_CTA, stages=3, band=1),
        sms=2,
    ),
    Emulated(
        id="mxfp8",
        why="all edges ragged; accumulators side by side",
        case=replace(PLAIN, x="mxfp8", weight="mxfp8"),
        config=SCALED_64,
    ),
    Emulated(
        id="mxfp8-gated",
        why="scale factors of gate and up; accumulators overlap, of more tiles than two",
        case=replace(GATED, rows=300, n=256, k=272, x="mxfp8", weight="mxfp8", bias=True),
        config=SCALED_128,
        sms=2,
    ),
    Emulated(
        id="mxfp8-two-cta",
        why="each CTA has all weights' factors",
        case=replace(PLAIN, rows=300, n=272, k=400, x="mxfp8", weight="mxfp8"),
        config=replace(SCALED_128, two_cta=True),
        sms=2,
    ),
    Emulated(
        id="nvfp4",
        why="all edges ragged; four 16s of k a product",
        case=replace(PLAIN, k=1184, x="nvfp4", weight="nvfp4"),
        config=SCALED_64,
    ),
    Emulated(
        id="nvfp4-gated",
        why="scale factors of gate and up; accumulators overlap; alpha",
        case=replace(GATED, rows=300, n=256, k=544, x="nvfp4", weight="nvfp4", bias=True),
        config=SCALED_128,
        sms=2,
    ),
    Emulated(
        id="nvfp4-two-cta",
        why="each CTA has all weights' factors; the second CTA has no row",
        case=replace(GATED, rows=100, n=128, k=800, x="nvfp4", weight="nvfp4"),
        config=replace(SCALED_128, two_cta=True, stages=3),
        sms=2,
    ),
    Emulated(
        id="nvfp4-two-cta-64",
        why="half a box of 128 rows' factors for each CTA",
        case=replace(PLAIN, rows=400, n=272, k=544, x="nvfp4", weight="nvfp4"),
        config=replace(SCALED_64, two_cta=True, stages=3),
        sms=2,
    ),
    Emulated(
        id="blocks",
        why="all edges ragged; more groups than accumulators",
        case=replace(PLAIN, n=144, bias=True, **BLOCKED),
        config=PROMOTED,
    ),
    Emulated(
        id="blocks-gated",
        why="scales of gate and up, whose rows begin within a block; more tiles than one; row-major scales",
        case=replace(GATED, rows=300, n=192, k=272, row_major=True, **BLOCKED),
        config=PROMOTED,
        sms=2,
    ),
    Emulated(
        id="blocks-interleaved",
        why="a tile's gates and ups have one scale; powers of two",
        case=replace(GATED, n=144, k=400, interleaved=True, **POWERS),
        config=replace(PROMOTED, box_n=32),
    ),
    Emulated(
        id="blocks-two-cta",
        why="both CTAs' warps free an accumulator; scales that are NaN, infinite and denormal",
        case=replace(PLAIN, rows=300, n=272, k=400, special=True, **BLOCKED),
        config=replace(PROMOTED, two_cta=True, stages=3),
        sms=2,
    ),
    Emulated(
        id="powers-special",
        why="exponents 0 and 255",
        case=replace(PLAIN, rows=30, n=144, k=272, special=True, special_weights=True, **POWERS),
        config=replace(PROMOTED, two_cta=True),
    ),
    Emulated(
        id="to-tensor",
        why="e4m3 by a scale that is given, through rows of 64 bytes",
        case=replace(GATED, rows=300, n=144, to="e4m3-tensor"),
        config=GemmConfig(box_n=64, stages=2, two_cta=True),
    ),
    Emulated(
        id="blocks-to-tensor",
        why="the same of sums in registers, through rows of 32 bytes",
        case=replace(GATED, n=192, k=272, to="e4m3-tensor", **BLOCKED),
        config=replace(PROMOTED, box_n=32),
    ),
    Emulated(
        id="mxfp8-to-mxfp8",
        why="a power of two for 32 columns; two CTAs, padding of scales",
        case=replace(MX, activation=Swiglu(), rows=150, n=128, k=272, to="mxfp8"),
        config=replace(SCALED_128, two_cta=True, stages=3),
    ),
    Emulated(
        id="rows-to-mxfp8",
        why="the last four scales of a row are padding in part",
        case=replace(PLAIN, n=80, k=272, to="mxfp8"),
        config=GemmConfig(box_n=32, stages=2),
    ),
    Emulated(
        id="nvfp4-to-nvfp4",
        why="pairs of e2m1 through rows of 32 bytes, a scale for 16 columns",
        case=replace(NV, activation=Swiglu(), rows=300, n=256, k=544, to="nvfp4"),
        config=SCALED_128,
        sms=2,
    ),
    Emulated(
        id="nvfp4-plain-to-nvfp4",
        why="a row's last scales are padding; columns outside the output",
        case=replace(NV, rows=140, n=96, k=544, to="nvfp4", bias=True),
        config=SCALED_64,
    ),
    Emulated(
        id="rows-to-rows",
        why="float32 through rows of 128 bytes, quantised by another launch; two CTAs, edges ragged",
        case=replace(GATED, rows=300, n=80, k=272, bias=True, to="e4m3-row"),
        config=GemmConfig(box_n=64, stages=2, two_cta=True),
    ),
    Emulated(
        id="blocks-to-groups",
        why="the same of sums in registers; the last group is a part of one",
        case=replace(GATED, rows=150, n=192, k=272, to="e4m3-1x128", **BLOCKED),
        config=PROMOTED,
    ),
    Emulated(
        id="mxfp8-special",
        why="scale factors that are NaN, least and largest; a NaN in x; rows of zeros; all of it in MXFP8",
        case=replace(MX, activation=Swiglu(), rows=150, n=128, k=272, special=True, special_weights=True, to="mxfp8"),
        config=replace(SCALED_128, two_cta=True),
    ),
    Emulated(
        id="nvfp4-special",
        why="scale factors that are NaN, denormal, 0 and largest; a block with a NaN in NVFP4",
        case=replace(NV, rows=40, n=96, k=544, special=True, special_weights=True, to="nvfp4"),
        config=SCALED_64,
    ),
    Emulated(
        id="rows-special-to-mxfp8",
        why="sums that are NaN and infinite in MXFP8",
        case=replace(PLAIN, rows=20, n=80, k=272, special=True, to="mxfp8"),
        config=GemmConfig(box_n=32, stages=2),
    ),
    Emulated(
        id="rows-special-to-nvfp4",
        why="the same in NVFP4",
        case=replace(PLAIN, rows=20, n=96, k=272, special=True, to="nvfp4"),
        config=GemmConfig(box_n=32, stages=2),
    ),
    # --- few rows: weights are the products' M ---
    Emulated(
        id="few", why="ragged edges; CTAs share tiles", case=replace(PLAIN, rows=13, n=528, bias=True), config=FEW
    ),
    Emulated(
        id="few-gated",
        why="scales of gate and up, alternating rows; two rows of tiles, three stages",
        case=replace(GATED, rows=37, n=144, interleaved=True, bias=True),
        config=replace(FEW, tokens=32, stages=3),
        sms=3,
    ),
    Emulated(
        id="few-tensors",
        why="one scale each; 128 tokens, which two warpgroups store; float16, e4m3 by a given scale",
        case=replace(GATED, rows=130, n=80, k=272, to="e4m3-tensor", dtype=torch.float16, **TENSORS),
        config=replace(FEW, tokens=128),
        sms=2,
    ),
    Emulated(
        id="few-split",
        why="a cluster for each tile, each CTA with a part of k",
        case=replace(PLAIN, rows=13, n=272),
        config=replace(FEW, num_splits=2),
        sms=6,
    ),
    Emulated(
        id="few-special",
        why="NaN, and scales that are NaN, infinite and denormal",
        case=replace(PLAIN, rows=14, n=144, special=True, special_weights=True),
        config=FEW,
    ),
    Emulated(
        id="few-to-rows",
        why="float32, quantised by another launch",
        case=replace(GATED, rows=13, n=144, k=272, to="e4m3-row"),
        config=FEW,
        sms=3,
    ),
    Emulated(
        id="few-nvfp4-special",
        why="scale factors of x and of weights that are NaN, denormal, 0 and largest",
        case=replace(NV, rows=20, n=144, k=544, special=True, special_weights=True),
        config=FEW_32,
    ),
    Emulated(
        id="few-mxfp8",
        why="scale factors of both boxes; the second rows of tiles begins within 128 rows' factors; a bias",
        case=replace(PLAIN, rows=70, n=272, x="mxfp8", weight="mxfp8", bias=True),
        config=FEW_32,
        sms=3,
    ),
    Emulated(
        id="few-nvfp4",
        why="four 16s of k a product, alpha; CTAs share tiles",
        case=replace(PLAIN, rows=13, n=400, k=1184, x="nvfp4", weight="nvfp4"),
        config=FEW_32,
        sms=3,
    ),
    Emulated(
        id="few-nvfp4-gated",
        why="scale factors of gate and up, of tokens behind 128 rows",
        case=replace(GATED, rows=135, n=128, k=800, x="nvfp4", weight="nvfp4", bias=True),
        config=replace(FEW_32, tokens=64, stages=3),
        sms=2,
    ),
    Emulated(
        id="few-blocks",
        why="all edges ragged; more groups than accumulators; CTAs share tiles; a bias",
        case=replace(PLAIN, rows=13, n=528, bias=True, **BLOCKED),
        config=FEW_PROMOTED,
    ),
    Emulated(
        id="few-blocks-gated",
        why="scales of gate and up, whose rows begin within a block; two rows of tiles; row-major scales, e4m3",
        case=replace(GATED, rows=37, n=192, k=400, row_major=True, to="e4m3-tensor", **BLOCKED),
        config=replace(FEW_PROMOTED, tokens=32, stages=3),
        sms=3,
    ),
    Emulated(
        id="few-blocks-interleaved",
        why="a box of gate rows has two scales; powers of two; float32, quantised by another launch",
        case=replace(GATED, rows=60, n=144, k=272, interleaved=True, to="e4m3-1x128", **POWERS),
        config=replace(FEW_PROMOTED, tokens=32),
        sms=2,
    ),
    Emulated(
        id="few-blocks-64",
        why="two warpgroups, each with the scales of its tokens; all of tensor memory; float16",
        case=replace(PLAIN, rows=70, n=272, k=656, dtype=torch.float16, **BLOCKED),
        config=replace(FEW_PROMOTED, tokens=64),
        sms=3,
    ),
    Emulated(
        id="few-blocks-split",
        why="a cluster for each tile, each CTA with a part of k; one row",
        case=replace(PLAIN, rows=1, n=272, **BLOCKED),
        config=replace(FEW_PROMOTED, num_splits=2),
        sms=4,
    ),
    Emulated(
        id="few-blocks-special",
        why="scales that are NaN, infinite, 0 and denormal",
        case=replace(PLAIN, rows=14, n=144, special=True, special_weights=True, **BLOCKED),
        config=FEW_PROMOTED,
    ),
]


def random_mma(draw: random.Random, case: ScaledCase) -> ScaledCase:
    """A random layer in a format whose scale factors the matrix products apply."""
    kind = draw.choice(("mxfp8", "nvfp4"))
    multiple = 16 if kind == "mxfp8" else 32
    n = case.n if case.activation is None else -(-case.n // 128) * 128
    found = replace(case, x=kind, weight=kind, n=n, k=-(-case.k // multiple) * multiple)
    return replace(found, interleaved=False, pad_weight=0, row_major=False)


def random_output(draw: random.Random, case: ScaledCase, config: GemmConfig) -> ScaledCase:
    """The case with an output in a random format that its kernel has."""
    to = draw.choice(("", "", "e4m3-tensor", "mxfp8", "nvfp4", "e4m3-row", "e4m3-1x128"))
    found = replace(case, to=to, n=-(-case.n // 32) * 32 if to == "nvfp4" else case.n)
    one = Emulated(id="", why="", case=found, config=config)
    return found if not config.objections(one.products, SMEM_BYTES) else replace(case, to="")


def random_emulated(seed: int) -> Emulated:
    """A small problem; the same for the same seed."""
    draw = random.Random(f"quantised operands for SM100 {seed}")
    case = replace(random_case(draw, 320), to="")
    more = {"stages": draw.randint(2, 4), "two_cta": draw.random() < 0.5, "band": draw.randint(1, 4)}
    config: GemmConfig
    if draw.random() < 0.4:
        case, more["stages"] = random_mma(draw, case), draw.randint(2, 3)
        config = BlockScaledConfig(box_n=128 if case.activation is not None else draw.choice((64, 128)), **more)
    elif scaled_format(case.x).blocked:
        config = PromotedConfig(box_n=draw.choice((16, 32, 64)), **more)
        if case.activation is not None:
            case = replace(case, n=-(-case.n // 64) * 64)
    else:
        config = GemmConfig(box_n=draw.choice((16, 32, 64, 96)), **more)
    case = random_output(draw, case, config)
    return Emulated(
        id=f"fuzz-{seed}", why="unforeseen combinations", case=case, config=config, sms=draw.choice((2, 4, 6))
    )


def random_few(seed: int) -> Emulated:
    """A small problem of few rows; the same for the same seed."""
    draw = random.Random(f"few rows of quantised operands for SM100 {seed}")
    case = replace(random_case(draw, 320), to=draw.choice(("", "", "e4m3-tensor", "e4m3-row")))
    case = replace(case, rows=min(case.rows, draw.choice((1, 16, 40, 150))))
    tokens, num_splits = draw.choice((16, 32, 64, 128)), 1
    if draw.random() < 0.5:
        case = replace(random_mma(draw, case), to="" if case.to == "e4m3-row" else case.to)
        tokens = draw.choice((32, 64))
    if case.k > 256 and draw.random() < 0.3 and tokens < 128 and not case.spec.x.swizzled:
        num_splits = 2
    kind = PromotedSmallMConfig if case.spec.promoted else ScaledSmallMConfig
    tokens = min(tokens, 64) if case.spec.promoted else tokens
    config = kind(tokens=tokens, stages=draw.randint(2, 4), num_splits=num_splits)
    # Clusters run all at once.
    sms = 12 if num_splits > 1 else draw.choice((2, 3, 5))
    return Emulated(id=f"few-fuzz-{seed}", why="unforeseen combinations", case=case, config=config, sms=sms)
