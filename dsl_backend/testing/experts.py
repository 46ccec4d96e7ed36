# SPDX-License-Identifier: Apache-2.0
"""Test cases of experts: their tensors, their reference, random cases."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from dsl_backend.experts import api, reference
from dsl_backend.experts.args import ExpertsOperands, ExpertsScales
from dsl_backend.experts.scales import mma_scales
from dsl_backend.experts.spec import ACTIVATIONS_OF, ExpertsSpec, RouterWeights
from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.quant.format import (
    BLOCK_SCALED,
    E2M1_MAX,
    GROUP,
    MXFP4,
    MXFP4_TILED,
    MXFP8,
    NVFP4,
    ROW_SCALED,
    ScaledFormat,
)
from dsl_backend.quant.mxfp4_tiles import pack_experts
from dsl_backend.quant.reference import (
    Quantized,
    dequantized,
    mma_dequantized,
    mma_scales_of,
    mma_stored,
    quantized,
    scales_of,
    stored,
    swizzled,
)
from dsl_backend.testing.numerics import assert_errors_fit, assert_same_non_finite, error_budget, per_row

F16, BF16 = torch.float16, torch.bfloat16
SENTINEL = 77.0
ACTIVATIONS: tuple[Activation, ...] = (Swiglu(), SWIGLU_OAI, Geglu(), Geglu(tanh=True), Swiglu(limit=1.0))
# How tokens are routed: evenly, by Zipf's law, all to the same experts, to half of the experts.
ROUTINGS = ("uniform", "zipf", "one", "half")


@dataclass(frozen=True, kw_only=True)
class ExpertsCase:
    """A layer of experts, and what its tensors hold.

    Attributes:
        routing: one of ROUTINGS.
        padding: share of tokens' experts that are -1.
        mapped: there is an expert map: this rank has every other expert of twice as many.
        pad_x, pad_out: elements between rows.
        special: some tokens are NaN, infinite and zero.
        weight: format of the weights; None is `dtype`.
        x_given: x is given in the format of what such weights are multiplied with.
        shared, shared_weight: shared experts.
        deterministic: a token's experts are added in order.
    """

    tokens: int
    num_experts: int
    hidden: int
    width: int
    topk: int
    dtype: torch.dtype = BF16
    activation: Activation = field(default_factory=Swiglu)
    interleaved: bool = False
    biases: bool = False
    router_weights: RouterWeights = RouterWeights.OUTPUT
    mapped: bool = False
    ids_dtype: torch.dtype = torch.int32
    routing: str = "uniform"
    padding: float = 0.0
    pad_x: int = 0
    pad_out: int = 0
    gain: float = 1.0
    special: bool = False
    weight: ScaledFormat | None = None
    x_given: bool = False
    shared: int = 0
    shared_weight: float = 1.0
    deterministic: bool = True
    seed: int = 0

    @property
    def global_experts(self) -> int:
        return 2 * self.num_experts if self.mapped else self.num_experts

    @property
    def spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            num_experts=self.num_experts,
            hidden_size=self.hidden,
            intermediate_size=self.width,
            topk=self.topk,
            dtype=self.dtype,
            activation=self.activation,
            interleaved=self.interleaved,
            w13_bias=self.biases,
            w2_bias=self.biases,
            router_weights=self.router_weights,
            global_experts=self.global_experts if self.mapped else None,
            ids_dtype=self.ids_dtype,
            shared_experts=self.shared,
            shared_weight=self.shared_weight,
            weight=self.weight,
            x=ACTIVATIONS_OF[self.weight] if self.weight is not None and self.x_given else None,
            deterministic=self.deterministic,
        )


def routed(case: ExpertsCase, generator: torch.Generator) -> torch.Tensor:
    """Different experts for each token, int64 [tokens, topk], some of them -1."""
    known = case.global_experts
    share = torch.ones(known)
    if case.routing == "zipf":
        share = 1 / torch.arange(1, known + 1)
    elif case.routing == "one":
        share[case.topk :] = 0
    elif case.routing == "half":
        share[: max(0, known // 2 - case.topk)] = 0
    ids = torch.multinomial(share.expand(case.tokens, known), case.topk, generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < case.padding] = -1
    return ids


def strided(values: torch.Tensor, pad: int, device: str) -> torch.Tensor:
    """A matrix whose rows have sentinels between them."""
    rows, width = values.shape
    buffer = torch.full((rows, width + pad), SENTINEL, dtype=values.dtype, device=device)
    view = buffer[:, :width]
    view.copy_(values)
    return view


def tensors(case: ExpertsCase, device: str) -> ExpertsOperands:
    """The operands of a case on a device."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * gain).to(case.dtype)

    experts, hidden, width = case.num_experts, case.hidden, case.width
    x = normal(case.tokens, hidden, gain=case.gain)
    if case.special:
        for start, value in enumerate((torch.nan, torch.inf, 0.0, -torch.inf)):
            x[start::7] = 0.0
            x[start::7, -1] = value
    ids = routed(case, generator)
    expert_map = None
    if case.mapped:
        expert_map = torch.full((case.global_experts,), -1, dtype=torch.int32)
        expert_map[1::2] = torch.arange(experts, dtype=torch.int32)
        expert_map = expert_map.to(device)
    weighted = case.router_weights is not RouterWeights.NONE
    weights = (normal(experts, 2 * width, hidden, gain=hidden**-0.5), normal(experts, hidden, width, gain=width**-0.5))
    wholes: dict[str, torch.Tensor] = {}
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    if case.spec.mma_scaled:
        (w13, w13_scale, w13_global), (w2, w2_scale, w2_global) = (
            mma_weights(case, one, parts, device) for one, parts in zip(weights, (2, 1), strict=True)
        )
        if case.weight == NVFP4:
            of_x = torch.tensor([0.75 / E2M1_MAX]) * case.gain
            wholes = {"w13_global": w13_global, "w2_global": w2_global, "x_global": of_x, "hidden_global": of_x / 4}
            wholes = {name: one.to(device) for name, one in wholes.items()}
    else:
        (w13, w13_scale), (w2, w2_scale) = (
            stored_weights(one, case.weight, device, parts, parts == 2 and case.interleaved)
            for one, parts in zip(weights, (2, 1), strict=True)
        )
    x_scale = None
    if case.spec.x is not None:
        x, x_scale, _ = quantized(x, case.spec.x)
        x_scale = x_scale.contiguous().to(device)
    of_shared = case.shared * width
    return ExpertsOperands(
        x=strided(x, case.pad_x, device),
        w13=w13,
        w2=w2,
        topk_weights=torch.rand(case.tokens, case.topk, generator=generator).to(device) if weighted else None,
        topk_ids=ids.to(case.ids_dtype).to(device),
        w13_bias=normal(experts, 2 * width).to(device) if case.biases else None,
        w2_bias=normal(experts, hidden).to(device) if case.biases else None,
        expert_map=expert_map,
        out=strided(torch.full((case.tokens, hidden), SENTINEL, dtype=case.dtype), case.pad_out, device),
        scales=ExpertsScales(w13_scale, w2_scale, x_scale, **wholes),
        shared_w13=normal(2 * of_shared, hidden, gain=hidden**-0.5).to(device) if of_shared else None,
        shared_w2=normal(hidden, of_shared, gain=width**-0.5).to(device) if of_shared else None,
    )


def tiled_weights(weights: torch.Tensor, parts: int, interleaved: bool) -> torch.Tensor:
    """Experts' weights [E, rows, columns] in MXFP4, packed for products with 16 bits."""
    scales = torch.stack([mma_scales_of(one, MXFP4).view(torch.uint8) for one in weights])
    values = torch.stack(
        [mma_stored(one, scale.view(MXFP4.scales), MXFP4) for one, scale in zip(weights, scales, strict=True)]
    )
    return pack_experts(values, scales, parts=parts, interleaved=interleaved)


def stored_weights(
    weights: torch.Tensor, kind: ScaledFormat | None, device: str, parts: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Experts' weights in a format, and their scales; None is the dtype that they have. See `pack_experts`."""
    if kind is None:
        return weights.to(device), None
    if kind.tiled:
        return tiled_weights(weights, parts, interleaved).to(device), None
    values, scales, _ = zip(*(quantized(one, kind) for one in weights), strict=True)
    return torch.stack(values).to(device), torch.stack(scales).contiguous().to(device)


def mma_weights(
    case: ExpertsCase, weights: torch.Tensor, parts: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts' weights [E, rows, columns] in MXFP8, MXFP4 or NVFP4: values, scales, scales of whole matrices [E].

    Packed rows have zeros behind them up to multiples of 64 bytes, as TMA wants to unpack MXFP4.
    """
    kind = case.weight
    assert kind is not None
    wholes = torch.linspace(0.5, 0.75, len(weights)) / E2M1_MAX / 16 if kind == NVFP4 else torch.ones(len(weights))
    scales = [mma_scales_of(one, kind, whole) for one, whole in zip(weights, wholes, strict=True)]
    given = zip(weights, scales, wholes, strict=True)
    values = torch.stack([mma_stored(one, scale, kind, whole) for one, scale, whole in given])
    row_bytes = values.shape[2]
    if kind.packed > 1:
        values = torch.nn.functional.pad(values, (0, -row_bytes % 64))
    stacked = torch.stack([scale.view(torch.uint8) for scale in scales]).view(kind.scales)
    found = mma_scales(stacked, parts=parts, interleaved=parts == 2 and case.interleaved)
    return values.to(device)[:, :, :row_bytes], found.to(device), wholes


# Errors of the activation's result before it is quantised: a rounding to 16 bits, and what 14 bits of a sum leave of
# the largest one of a row.
OF_ONE, OF_LARGEST = 2.0**-8, 2.0**-13


def of_neighbours(spec: ExpertsSpec, given: ExpertsOperands) -> torch.Tensor:
    """How far the output [M, H] may be off where the activation's result is rounded to a neighbour in 8 bits.

    Which neighbour it is depends on bits far behind those that are stored; a single one may be an eighth of its value.
    """
    off = torch.zeros(given.out.shape, dtype=torch.float64, device=given.out.device)
    if spec.activations is None:
        return off
    for part in reference.parts_of(spec, given, torch.float64):
        hidden = part.hidden.nan_to_num(0.0, 0.0, 0.0)
        wrong = OF_ONE * hidden.abs() + OF_LARGEST * hidden.abs().amax(1, keepdim=True)
        low, high = (mma_bounds if spec.mma_scaled else bounds)(spec, given, hidden, wrong)
        weight = reference.weight_of(spec, given, "w2", part.expert, torch.float64)
        made = (high - low) @ weight.abs().T
        off.index_add_(0, part.tokens, made if part.scale is None else made * part.scale.abs())
    return off


# Of a quotient in float32, relative: a division by a scale, or a product with its inverse.
OF_QUOTIENT = 2.0**-22


def of_neighbours_of_x(spec: ExpertsSpec, given: ExpertsOperands) -> torch.Tensor:
    """How far the output [M, H] may be off where the layer quantises x, and a number of it lies between two in 8 bits.

    The last bit of a quotient then decides; a row seldom has such a number.
    """
    off = torch.zeros(given.out.shape, dtype=torch.float64, device=given.out.device)
    kind = spec.activations
    if kind is None or spec.mma_scaled or spec.x is not None:
        return off
    values, scales, _ = quantized(given.x, kind)
    low, high = (
        stored(given.x.double() * (1 + part), scales.double(), kind).view(torch.uint8)
        for part in (-OF_QUOTIENT, OF_QUOTIENT)
    )
    quantised = replace(spec, x=kind)
    for row, column in (low != high).nonzero().tolist():
        mine = slice(row, row + 1)
        outs, further = [], []
        for one in (low, high):
            x = values[mine].clone()
            x.view(torch.uint8)[0, column] = one[row, column]
            alone = given._replace(
                x=x,
                topk_ids=given.topk_ids[mine],
                topk_weights=None if given.topk_weights is None else given.topk_weights[mine],
                out=given.out[mine],
                scales=given.scales._replace(x=scales[mine]),
            )
            outs.append(reference.exact(quantised, alone))
            further.append(per_row(of_neighbours(quantised, alone))[:, None])
        off[mine] += (outs[0] - outs[1]).abs().nan_to_num(0.0, 0.0, 0.0) + torch.maximum(*further)
    return off


def bounds(
    spec: ExpertsSpec, given: ExpertsOperands, hidden: torch.Tensor, wrong: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest that the quantised activation's result may be, where it is so far off before."""
    assert spec.activations is not None
    scales = scales_of(hidden, spec.activations)
    low, high = (
        dequantized(Quantized(stored(one, scales, spec.activations), scales, spec.activations))
        for one in (hidden - wrong, hidden + wrong)
    )
    return low, high


def mma_bounds(
    spec: ExpertsSpec, given: ExpertsOperands, hidden: torch.Tensor, wrong: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of MXFP8 and NVFP4, whose scales are rounded too."""
    kind = spec.activations
    assert kind is not None
    whole = 1.0 if given.scales.hidden_global is None else float(given.scales.hidden_global)
    scales = [mma_scales_of((hidden.abs() + one).clamp(min=0), kind, whole) for one in (-wrong, wrong)]
    found = torch.stack(
        [
            mma_dequantized(Quantized(mma_stored(one, scale, kind, whole), swizzled(scale), kind), whole)
            for one in (hidden - wrong, hidden + wrong)
            for scale in scales
        ]
    ).nan_to_num(0.0, 0.0, 0.0)
    return found.amin(0), found.amax(0)


def of_additions(spec: ExpertsSpec, given: ExpertsOperands) -> torch.Tensor:
    """How far the output [M, H] may be off where each addition to it rounds to its dtype.

    A token's n results are rounded, and n - 1 sums of them, each of which is at most the sum of their magnitudes.
    """
    off = torch.zeros(given.out.shape, dtype=torch.float64, device=given.out.device)
    if not spec.may_add:
        return off
    counts = off.new_zeros(len(off), 1)
    for tokens, made in reference.results_of(spec, given, torch.float64):
        off.index_add_(0, tokens, made.abs())
        counts.index_add_(0, tokens, counts.new_ones(len(tokens), 1))
    return off.nan_to_num(0.0, 0.0, 0.0) * counts * (torch.finfo(spec.dtype).eps / 2)


def judge(case: ExpertsCase, given: ExpertsOperands) -> None:
    """Check that the error of `given.out` is within budget, and that nothing between its rows was written."""
    exact = reference.exact(case.spec, given)
    naive = reference.exact(case.spec, given, dtype=case.dtype)
    rounded = exact.to(torch.float32).to(case.dtype).double()
    # Values that overflow the output's type become infinities.
    exact = torch.where(rounded.isinf(), rounded, exact)
    budget = error_budget(case.dtype, exact, naive) + per_row(of_neighbours(case.spec, given))
    budget = budget[:, None] + of_additions(case.spec, given) + of_neighbours_of_x(case.spec, given)
    assert_same_non_finite(given.out, exact, str(case))
    assert_errors_fit(given.out, exact, budget, str(case))
    stride = case.hidden + case.pad_out
    whole = given.out.as_strided((case.tokens, stride), (stride, 1))
    assert bool((whole[:, case.hidden :] == SENTINEL).all()), f"{case}: elements between rows were written"


def check_experts(case: ExpertsCase, kernel: str | None, device: str) -> None:
    """Raises AssertionError where the kernel's result is wrong."""
    given = tensors(case, device)
    plan = api.plan(case.spec, device, kernel=kernel)
    api.run(
        plan,
        given.x,
        given.w13,
        given.w2,
        given.topk_weights,
        given.topk_ids,
        w13_bias=given.w13_bias,
        w2_bias=given.w2_bias,
        expert_map=given.expert_map,
        out=given.out,
        scales=given.scales,
        shared_w13=given.shared_w13,
        shared_w2=given.shared_w2,
    )
    judge(case, given)


PLAIN = ExpertsCase(tokens=9, num_experts=6, hidden=72, width=40, topk=3)
CASES: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        "plain": PLAIN,
        "one": ExpertsCase(tokens=1, num_experts=1, hidden=8, width=8, topk=1, dtype=F16),
        "many-tokens": ExpertsCase(tokens=300, num_experts=5, hidden=136, width=72, topk=2, routing="zipf"),
        "all-to-one": ExpertsCase(tokens=70, num_experts=8, hidden=64, width=64, topk=1, routing="one"),
        "without-tokens": ExpertsCase(tokens=33, num_experts=16, hidden=64, width=48, topk=2, routing="half"),
        "many-experts": ExpertsCase(tokens=20, num_experts=200, hidden=32, width=16, topk=16),
        "padding": ExpertsCase(tokens=40, num_experts=6, hidden=72, width=40, topk=3, padding=0.4),
        "all-padding": ExpertsCase(tokens=7, num_experts=6, hidden=72, width=40, topk=3, padding=1.0),
        "mapped": ExpertsCase(tokens=40, num_experts=6, hidden=72, width=40, topk=4, mapped=True, padding=0.1),
        "int64": ExpertsCase(tokens=12, num_experts=6, hidden=72, width=40, topk=3, ids_dtype=torch.int64),
        "gpt-oss": ExpertsCase(
            tokens=25,
            num_experts=8,
            hidden=72,
            width=88,
            topk=4,
            activation=SWIGLU_OAI,
            interleaved=True,
            biases=True,
            gain=6,
        ),
        "input-weights": ExpertsCase(
            tokens=21, num_experts=4, hidden=40, width=72, topk=1, router_weights=RouterWeights.INPUT
        ),
        "no-weights": ExpertsCase(
            tokens=21, num_experts=4, hidden=40, width=72, topk=2, router_weights=RouterWeights.NONE, dtype=F16
        ),
        "special": ExpertsCase(tokens=30, num_experts=4, hidden=72, width=40, topk=2, special=True),
        "strides": ExpertsCase(tokens=30, num_experts=4, hidden=72, width=40, topk=2, pad_x=8, pad_out=24),
        **{
            f"activation-{i}": ExpertsCase(
                tokens=19, num_experts=4, hidden=72, width=40, topk=2, activation=one, gain=3, biases=i % 2 == 0
            )
            for i, one in enumerate(ACTIVATIONS)
        },
    }
)


SHARED = replace(PLAIN, shared=2, shared_weight=0.4)
# Experts that every token has.
SHARED_CASES: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        "shared": SHARED,
        "shared-one": ExpertsCase(tokens=1, num_experts=1, hidden=8, width=8, topk=1, dtype=F16, shared=1),
        "shared-mapped": replace(SHARED, tokens=40, mapped=True, padding=0.3, shared=1, ids_dtype=torch.int64),
        "shared-all-padding": replace(SHARED, padding=1.0, topk=1, router_weights=RouterWeights.NONE),
        "shared-special": replace(SHARED, tokens=30, topk=2, special=True, pad_x=8, pad_out=24),
    }
)

# Sums in any order: by the kernels for few tokens, which keep the order, and by grouped GEMMs.
ADDED_CASES: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        f"added-{tokens}": replace(
            CASES["many-tokens"], tokens=tokens, padding=0.2, biases=True, pad_out=24, deterministic=False
        )
        for tokens in (9, 300, 900)
    }
)

BLOCKS = ExpertsCase(tokens=20, num_experts=4, hidden=144, width=128, topk=2, weight=BLOCK_SCALED)
# Weights in 8 bits.
SCALED_CASES: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        "blocks": BLOCKS,
        "blocks-wide": replace(BLOCKS, tokens=9, num_experts=5, hidden=400, width=384, topk=3, routing="half"),
        "blocks-tall": replace(BLOCKS, tokens=150, num_experts=3, routing="zipf", x_given=True, pad_out=24),
        "blocks-one": replace(BLOCKS, tokens=1, hidden=16, ids_dtype=torch.int64, dtype=F16),
        "blocks-padding": replace(BLOCKS, padding=0.4, mapped=True, activation=Swiglu(limit=1.0), gain=3),
        "blocks-all-padding": replace(BLOCKS, padding=1.0),
        "blocks-special": replace(BLOCKS, special=True, pad_x=16),
        "blocks-no-weights": replace(BLOCKS, router_weights=RouterWeights.NONE, activation=Geglu()),
        "blocks-input": replace(BLOCKS, router_weights=RouterWeights.INPUT, topk=1),
        "channels": replace(BLOCKS, weight=ROW_SCALED, width=80, x_given=True, padding=0.2),
        "channels-x": replace(BLOCKS, weight=ROW_SCALED, tokens=70, hidden=272, width=208, pad_x=16),
        "channels-interleaved": replace(
            BLOCKS, weight=ROW_SCALED, width=48, interleaved=True, activation=SWIGLU_OAI, dtype=F16
        ),
    }
)


MX = ExpertsCase(tokens=20, num_experts=4, hidden=160, width=160, topk=2, weight=MXFP8)
# Scales that SM100's matrix products apply.
BLOCK_SCALED_CASES: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        "mxfp8": MX,
        # Several tiles of columns, the last one of which ends within a 128; several tiles of k.
        "mxfp8-wide": replace(MX, tokens=9, num_experts=5, hidden=544, width=416, topk=3, routing="half"),
        "mxfp8-tall": replace(MX, tokens=150, num_experts=3, routing="zipf", pad_x=16, pad_out=24),
        "mxfp8-one": replace(MX, tokens=1, hidden=32, width=32, ids_dtype=torch.int64, dtype=F16),
        "mxfp8-padding": replace(MX, padding=0.4, mapped=True, activation=Swiglu(limit=1.0), gain=3),
        "mxfp8-all-padding": replace(MX, padding=1.0),
        "mxfp8-special": replace(MX, special=True),
        "mxfp8-no-weights": replace(MX, router_weights=RouterWeights.NONE, activation=Geglu()),
        "mxfp4": replace(MX, weight=MXFP4, hidden=288, width=96),
        "mxfp4-gpt-oss": replace(
            MX,
            tokens=140,
            num_experts=2,
            weight=MXFP4,
            hidden=192,
            width=320,
            activation=SWIGLU_OAI,
            interleaved=True,
            biases=True,
            gain=4,
        ),
        "nvfp4": replace(MX, weight=NVFP4),
        "nvfp4-wide": replace(
            MX, weight=NVFP4, tokens=140, num_experts=3, hidden=544, width=352, biases=True, padding=0.1
        ),
    }
)


def qwen3_30b(tokens: int, routing: str = "uniform") -> ExpertsCase:
    return ExpertsCase(tokens=tokens, num_experts=128, hidden=2048, width=768, topk=8, routing=routing)


REAL: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        **{f"real-qwen3-{tokens}": qwen3_30b(tokens) for tokens in (1, 3, 16, 64, 200, 1000, 4096)},
        **{f"real-qwen3-{routing}": qwen3_30b(500, routing) for routing in ROUTINGS[1:]},
        "real-deepseek-v2-lite": ExpertsCase(tokens=300, num_experts=64, hidden=2048, width=1408, topk=6),
        "real-gpt-oss": ExpertsCase(
            tokens=77,
            num_experts=32,
            hidden=2880,
            width=2880,
            topk=4,
            activation=SWIGLU_OAI,
            interleaved=True,
            biases=True,
        ),
    }
)


# Weights of so many experts are quantised in seconds.
SCALED_REAL: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        **{
            f"real-{kind}-{tokens}": replace(qwen3_30b(tokens), num_experts=32, weight=kind)
            for kind in (BLOCK_SCALED, ROW_SCALED)
            for tokens in (1, 64, 2000)
        },
        "real-deepseek-v3": ExpertsCase(
            tokens=100, num_experts=8, hidden=7168, width=2048, topk=4, weight=BLOCK_SCALED, routing="zipf"
        ),
    }
)
GPT_OSS_SIZE = replace(REAL["real-gpt-oss"], num_experts=8)
BLOCK_SCALED_REAL: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        f"real-{kind}-{tokens}": replace(GPT_OSS_SIZE, weight=kind, tokens=tokens)
        for kind in (MXFP8, MXFP4, NVFP4)
        for tokens in (1, 300)
    }
)
WEIGHT_ONLY_REAL: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        f"real-mxfp4-tiled-{tokens}": replace(GPT_OSS_SIZE, weight=MXFP4_TILED, tokens=tokens)
        for tokens in (1, 20, 64, 1000)
    }
)


def random_case(draw: random.Random, most: int, *, facts: random.Random | None = None) -> ExpertsCase:
    """A random layer of experts whose sizes are multiples of 8.

    Args:
        most: tokens and sizes are up to about this number.
        facts: draws what kernels are compiled for, so that several cases can share a kernel; `draw` by default.
    """

    def size() -> int:
        value = int(2 ** draw.uniform(0, (most + 1).bit_length() - 1))
        if draw.random() < 0.3:
            value = max(1, round(value / 64) * 64 + draw.choice((-1, 0, 1)))
        return value

    facts = facts or draw
    topk = facts.choice((1, 1, 2, 3, 4, 8))
    choices = tuple(RouterWeights) if topk == 1 else (RouterWeights.OUTPUT, RouterWeights.OUTPUT, RouterWeights.NONE)
    return ExpertsCase(
        tokens=size(),
        num_experts=topk + draw.randrange(min(most, 130)),
        hidden=-(-size() // 8) * 8,
        width=-(-size() // 8) * 8,
        topk=topk,
        dtype=facts.choice((F16, BF16)),
        activation=facts.choice(ACTIVATIONS),
        interleaved=facts.random() < 0.3,
        biases=facts.random() < 0.25,
        router_weights=facts.choice(choices),
        mapped=facts.random() < 0.25,
        ids_dtype=facts.choice((torch.int32, torch.int64)),
        routing=draw.choice(ROUTINGS),
        padding=draw.choice((0.0, 0.0, 0.2, 0.9)),
        pad_x=draw.choice((0, 0, 8, 40)),
        pad_out=draw.choice((0, 0, 8, 40)),
        gain=draw.choice((1.0, 1.0, 0.1, 5.0)),
        special=draw.random() < 0.15,
        seed=draw.randrange(2**31),
    )


# Of random layers beside what `random_case` draws, by their share: sums in any order, and shared experts.
EXTRAS: tuple[Mapping[str, Any], ...] = (
    {},
    {},
    {"deterministic": False},
    {"shared": 1},
    {"shared": 2, "shared_weight": 0.4},
)


def random_layer(draw: random.Random, most: int, *, facts: random.Random | None = None) -> ExpertsCase:
    """As `random_case`, where sums may be in any order, or experts shared, if nothing else is in the way."""
    case = random_case(draw, most, facts=facts)
    extra = (facts or draw).choice(EXTRAS)
    alone = case.biases or case.interleaved or case.router_weights is RouterWeights.INPUT
    return case if "shared" in extra and alone else replace(case, **extra)


def few_experts(case: ExpertsCase, facts: random.Random) -> ExpertsCase:
    """The case with as many experts as `facts` draws, for which kernels are compiled: quantising many takes minutes."""
    return replace(case, num_experts=case.topk + facts.randrange(16))


def random_scaled_case(draw: random.Random, most: int, *, facts: random.Random | None = None) -> ExpertsCase:
    """A random layer of experts in e4m3; sizes are multiples of 16. Arguments as `random_case`'s."""
    case = random_case(draw, most, facts=facts)
    facts = facts or draw
    weight = facts.choice((BLOCK_SCALED, ROW_SCALED))
    multiple = GROUP if weight.blocked else 16
    return replace(
        case,
        hidden=-(-case.hidden // 16) * 16,
        width=-(-case.width // multiple) * multiple,
        biases=False,
        interleaved=case.interleaved and not weight.blocked,
        pad_x=-(-case.pad_x // 16) * 16,
        weight=weight,
        x_given=facts.random() < 0.5,
    )


def random_block_scaled_case(draw: random.Random, most: int, *, facts: random.Random | None = None) -> ExpertsCase:
    """A random layer of experts in MXFP8, MXFP4 or NVFP4; sizes are multiples of 32. Arguments as `random_case`'s."""
    case = random_case(draw, most, facts=facts)
    weight = (facts or draw).choice((MXFP8, MXFP4, NVFP4))
    return replace(
        case,
        hidden=-(-case.hidden // 32) * 32,
        width=-(-case.width // 32) * 32,
        weight=weight,
        # NVFP4 has no infinity, and its elements no NaN.
        special=case.special and weight != NVFP4,
    )


def random_weight_only_case(draw: random.Random, most: int, *, facts: random.Random | None = None) -> ExpertsCase:
    """A random layer of experts in MXFP4 under bfloat16; sizes are multiples of 32. Arguments as `random_case`'s."""
    case = random_case(draw, most, facts=facts)
    hidden, width = (-(-size // 32) * 32 for size in (case.hidden, case.width))
    return replace(case, hidden=hidden, width=width, dtype=BF16, weight=MXFP4_TILED)


# A token's experts are fewer than all.
WEIGHT_ONLY = ExpertsCase(tokens=5, num_experts=3, hidden=160, width=96, topk=2, weight=MXFP4_TILED)
WEIGHT_ONLY_CASES: Mapping[str, ExpertsCase] = MappingProxyType(
    {
        "mxfp4-tiled": WEIGHT_ONLY,
        "mxfp4-tiled-gpt-oss": replace(
            WEIGHT_ONLY, tokens=13, hidden=192, width=160, interleaved=True, biases=True, activation=SWIGLU_OAI
        ),
        # By the grouped GEMMs.
        "mxfp4-tiled-many": replace(WEIGHT_ONLY, tokens=150, hidden=288, mapped=True, padding=0.3, routing="zipf"),
        "mxfp4-tiled-all-padding": replace(WEIGHT_ONLY, padding=1.0, biases=True),
        "mxfp4-tiled-input": replace(
            WEIGHT_ONLY, topk=1, biases=True, router_weights=RouterWeights.INPUT, activation=Geglu()
        ),
        "mxfp4-tiled-special": replace(WEIGHT_ONLY, special=True),
    }
)
