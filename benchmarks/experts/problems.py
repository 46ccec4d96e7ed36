# SPDX-License-Identifier: Apache-2.0
"""A layer of routed experts, its tensors, and the exact results of some tokens."""

from dataclasses import dataclass

import torch
from dsl_backend.checks import short
from dsl_backend.experts import reference as eager
from dsl_backend.experts.args import ExpertsOperands, ExpertsScales
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.sizes import ceil_div
from dsl_backend.providers import Limits
from dsl_backend.quant.format import BLOCK_SCALED, ScaledFormat
from dsl_backend.quant.mxfp4_tiles import packed_shape
from dsl_backend.quant.reference import quantized
from dsl_backend.testing.experts import tiled_weights

from ..case import Reference, compared_rows
from ..check import BF16_LIMITS

COMPARED = 16  # number of compared tokens of a layer
ROUTINGS = ("uniform", "zipf", "one", "half")
# Of weights in 8 bits: a value of `hidden` that is next to a boundary is rounded to e4m3 the other way, up to 2^-4 off.
# On an H200, kernels of ours were 0.01 to 0.03 off the reference in float32.
FP8_LIMITS = Limits(total=0.05, row=0.15)
# With 128x128 blocks vLLM 0.33 rounds the scales of x up to powers of two, by default on Hopper too: up to a bit is
# lost. On an H200 its Triton kernel was 0.059 to 0.065 off, the worst row 0.070 (2026-11-28).
FP8_BLOCK_LIMITS = Limits(total=0.1, row=0.2)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tokens [m, hidden] through the top k of experts with SwiGLU.

    Attributes:
        routing: the chance of an expert: equal, by Zipf's law, all tokens to the same k experts, or equal for one half
            of the experts (k of them at least) and none for the others.
        weight: format of weights in 8 or 4 bits; x is in `dtype` all the same.
    """

    m: int
    experts: int
    hidden: int
    width: int
    topk: int
    routing: str = "uniform"
    dtype: torch.dtype = torch.bfloat16
    weight: ScaledFormat | None = None

    @property
    def spec(self) -> ExpertsSpec:
        return ExpertsSpec(
            num_experts=self.experts,
            hidden_size=self.hidden,
            intermediate_size=self.width,
            topk=self.topk,
            dtype=self.dtype,
            weight=self.weight,
        )

    @property
    def chances(self) -> torch.Tensor:
        """Of each expert, not normalised; float64 [experts]."""
        chances = torch.ones(self.experts, dtype=torch.float64)
        if self.routing == "zipf":
            chances /= torch.arange(1, self.experts + 1)
        elif self.routing == "one":
            chances[self.topk :] = 0
        elif self.routing == "half":
            # Every other one, so that those without a token lie between those that have some.
            chances[1 : 2 * (self.experts - max(ceil_div(self.experts, 2), self.topk)) : 2] = 0
        return chances

    @property
    def chosen_experts(self) -> float:
        """Experts with a token, on average; a token's choices count as independent."""
        share = (self.chances / self.chances.sum() * self.topk).clamp(max=1)
        return float((1 - (1 - share) ** self.m).sum())

    @property
    def traffic_bytes(self) -> int:
        """Weights of the chosen experts, their scales and x are read once; the output is written once."""
        bytes_of_expert = 3 * self.width * self.hidden * (self.dtype if self.weight is None else torch.uint8).itemsize
        if self.spec.weight_only:
            shapes = (*[(self.width, self.hidden)] * 2, (self.hidden, self.width))
            bytes_of_expert = 4 * sum(torch.Size(packed_shape(*shape)).numel() for shape in shapes)
        elif self.weight is not None:
            shapes = ((2 * self.width, self.hidden), (self.hidden, self.width))
            bytes_of_expert += 4 * sum(torch.Size(self.weight.scale_shape(*shape)).numel() for shape in shapes)
        return int(self.chosen_experts * bytes_of_expert + 2 * self.m * self.hidden * self.dtype.itemsize)

    @property
    def flops(self) -> int:
        return 6 * self.m * self.topk * self.hidden * self.width

    @property
    def limits(self) -> Limits:
        if self.weight is None or self.spec.weight_only:
            return BF16_LIMITS
        return FP8_BLOCK_LIMITS if self.weight == BLOCK_SCALED else FP8_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        weight = {} if self.weight is None else {"weight": str(self.weight)}
        return {
            "m": self.m,
            "experts": self.experts,
            "hidden": self.hidden,
            "width": self.width,
            "topk": self.topk,
            "routing": self.routing,
            "dtype": short(self.dtype),
            **weight,
        }


@dataclass(frozen=True)
class Layer:
    """See `ExpertsOperands`: x [m, hidden], w13 with gate rows first, topk_ids int32, out [m, hidden]."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    out: torch.Tensor
    scales: ExpertsScales


@dataclass(frozen=True)
class Inputs:
    layers: tuple[Layer, ...]


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    """Normal x, weights that preserve its variance, normalised router weights, and outputs of NaN.

    Weights in 8 and 4 bits are quantised one expert at a time.
    """
    generator = torch.Generator(device).manual_seed(seed)
    chances = problem.chances.to(device, torch.float32)

    def normal(*shape: int, deviation: float = 1.0) -> torch.Tensor:
        made = torch.empty(shape, dtype=problem.dtype, device=device)
        return made.normal_(0, deviation, generator=generator)

    def weights_of(*shape: int, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor | None]:
        deviation = shape[-1] ** -0.5
        if problem.weight is None:
            return normal(*shape, deviation=deviation), None
        if problem.spec.weight_only:
            one = (1, *shape[1:])
            tiles = [tiled_weights(normal(*one, deviation=deviation), parts, False) for _ in range(shape[0])]
            return torch.cat(tiles), None
        found = [quantized(normal(*shape[1:], deviation=deviation), problem.weight) for _ in range(shape[0])]
        return torch.stack([one.values for one in found]), torch.stack([one.scale for one in found])

    def layer() -> Layer:
        m, experts, hidden, width = problem.m, problem.experts, problem.hidden, problem.width
        ids = torch.multinomial(chances.expand(m, experts), problem.topk, generator=generator)
        weights = torch.rand(ids.shape, generator=generator, device=device) + 0.1
        x = normal(m, hidden)
        w13, w13_scale = weights_of(experts, 2 * width, hidden, parts=2)
        w2, w2_scale = weights_of(experts, hidden, width)
        return Layer(
            x=x,
            w13=w13,
            w2=w2,
            topk_weights=weights / weights.sum(-1, keepdim=True),
            topk_ids=ids.int(),
            out=torch.full((m, hidden), torch.nan, dtype=problem.dtype, device=device),
            scales=ExpertsScales(w13_scale, w2_scale),
        )

    return Inputs(tuple(layer() for _ in range(layers)))


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The first token, the last one and random ones in float64."""
    given = inputs.layers[layer]
    chosen = compared_rows(problem.m, COMPARED, seed, given.x.device)
    operands = ExpertsOperands(
        x=given.x[chosen],
        w13=given.w13,
        w2=given.w2,
        topk_weights=given.topk_weights[chosen],
        topk_ids=given.topk_ids[chosen],
        w13_bias=None,
        w2_bias=None,
        expert_map=None,
        out=given.out[chosen],
        scales=given.scales,
    )
    return Reference(chosen, eager.exact(problem.spec, operands))
