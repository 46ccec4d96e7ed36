# SPDX-License-Identifier: Apache-2.0
"""What a layer of experts is, as far as kernels and dispatch specialise on it."""

import enum
from dataclasses import dataclass, field

import torch

from dsl_backend import checks
from dsl_backend.checks import short
from dsl_backend.gemm.activation import Activation, Geglu, Swiglu
from dsl_backend.gemm.spec import DTYPES
from dsl_backend.quant.format import (
    BLOCK_SCALED,
    GROUP,
    GROUP_SCALED,
    MXFP4,
    MXFP4_TILED,
    MXFP8,
    NVFP4,
    ROW_SCALED,
    ScaledFormat,
)

MAX_EXPERTS, MAX_TOPK, MAX_TOKENS = 512, 16, 1 << 17
# Of a model, over all ranks: what an expert map has entries for.
MAX_GLOBAL_EXPERTS = 1 << 14
ID_DTYPES = (torch.int32, torch.int64)
# Of weights in 8 and 4 bits: the format of what they are multiplied with; None is 16 bits.
ACTIVATIONS_OF: dict[ScaledFormat, ScaledFormat | None] = {
    BLOCK_SCALED: GROUP_SCALED,
    ROW_SCALED: ROW_SCALED,
    # Scaled by SM100's matrix products themselves.
    MXFP8: MXFP8,
    MXFP4: MXFP8,
    NVFP4: NVFP4,
    MXFP4_TILED: None,
}
# Columns that sizes of such layers are multiples of: a scale's, and 16 bytes of rows.
MMA_MULTIPLE = 32


class RouterWeights(enum.Enum):
    """Where the router's weight of a token and an expert is multiplied in."""

    OUTPUT = "output"  # into what the expert returns
    INPUT = "input"  # into what the expert is given; top-k of 1 (Llama 4)
    NONE = "none"  # nowhere: the caller did, or will


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """out [tokens, hidden]: the sum over a token's experts of weight * (activation(x @ w13^T + b13) @ w2^T + b2).

    Products, activation and sum are float32. The activation's result and each expert's result are rounded to `dtype`.
    With weights in 8 or 4 bits, x and the activation's result are quantised, with scales of their largest magnitudes,
    unless the weights are MXFP4_TILED.

    Attributes:
        num_experts: E, those whose weights this rank has.
        hidden_size: H, columns of x and of the output.
        intermediate_size: I, columns of the activation's output.
        topk: experts that a token is routed to.
        dtype: of x, weights, biases and the output.
        interleaved: gate and up rows of w13 alternate, instead of all gate rows first.
        w13_bias, w2_bias: whether there are any.
        router_weights: where the router's weights are multiplied in.
        global_experts: entries of the expert map, from the router's expert numbers to this rank's; None without a map.
        ids_dtype: of the router's expert numbers.
        shared_experts: experts of the same width that every token has beside its topk; in `dtype`, without biases.
        shared_weight: what these experts' results are multiplied with.
        weight: format of w13 and w2: BLOCK_SCALED, ROW_SCALED (a scale for each output channel), MXFP8, MXFP4, NVFP4,
            MXFP4_TILED (multiplied with 16 bits), or None in `dtype`.
        x: format of x as it is given: `activations`, or None in `dtype`; None with formats of fewer than 8 bits and
            MXFP8.
        deterministic: a token's experts are added in the order of its slots, with one rounding. Otherwise kernels may
            add them in any order by atomic operations, each of which rounds to `dtype`; those without such a form keep
            the order.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    topk: int
    dtype: torch.dtype
    activation: Activation = field(default_factory=Swiglu)
    interleaved: bool = False
    w13_bias: bool = False
    w2_bias: bool = False
    router_weights: RouterWeights = RouterWeights.OUTPUT
    global_experts: int | None = None
    ids_dtype: torch.dtype = torch.int32
    shared_experts: int = 0
    shared_weight: float = 1.0
    weight: ScaledFormat | None = None
    x: ScaledFormat | None = None
    deterministic: bool = True

    def __post_init__(self) -> None:
        checks.integer("num_experts", self.num_experts, 1, MAX_EXPERTS)
        checks.integer("hidden_size", self.hidden_size, 1)
        checks.integer("intermediate_size", self.intermediate_size, 1, checks.MOST // 2)
        checks.integer("topk", self.topk, 1, MAX_TOPK)
        checks.dtype("dtype", self.dtype, DTYPES)
        checks.dtype("ids_dtype", self.ids_dtype, ID_DTYPES)
        for name in ("interleaved", "w13_bias", "w2_bias", "deterministic"):
            checks.flag(name, getattr(self, name))
        checks.require(
            isinstance(self.activation, (Swiglu, Geglu)),
            f"activation is {self.activation!r}: Swiglu(...) or Geglu(...) is needed",
        )
        checks.member("router_weights", self.router_weights, RouterWeights)
        checks.require(
            self.router_weights is not RouterWeights.INPUT or self.topk == 1,
            f"topk {self.topk}: router weights on the input need a topk of 1",
        )
        if self.global_experts is not None:
            checks.integer("global_experts", self.global_experts, 1, MAX_GLOBAL_EXPERTS)
        self.check_formats()
        self.check_shared()

    def check_formats(self) -> None:
        """Raises InvalidInput where the formats of x and of the weights do not fit, or not the sizes."""
        weights = (None, *ACTIVATIONS_OF)
        checks.require(
            self.weight in weights, f"weight is {self.weight}: one of {', '.join(map(str, weights))} is needed"
        )
        given = None if self.mma_scaled else self.activations
        of_x = "None" if given is None else f"{given} or None"
        checks.require(
            self.x in (None, given),
            f"x is {self.x}: {of_x} is needed with weights in {self.weight or short(self.dtype)}",
        )
        if self.weight is None:
            return
        if self.weight_only:
            checks.require(
                self.dtype == torch.bfloat16,
                f"dtype {short(self.dtype)}: bfloat16 is needed with weights in {self.weight}, whose scales have its "
                f"exponents",
            )
        if self.mma_scaled or self.weight_only:
            for name in ("hidden_size", "intermediate_size"):
                size = getattr(self, name)
                checks.require(
                    size % MMA_MULTIPLE == 0,
                    f"{name} {size} is not a multiple of {MMA_MULTIPLE}, as weights in {self.weight} need",
                )
            return
        for name in ("w13_bias", "w2_bias"):
            checks.require(not getattr(self, name), f"{name}: experts of weights in {self.weight} have no biases")
        if self.weight == BLOCK_SCALED:
            checks.require(
                self.intermediate_size % GROUP == 0,
                f"intermediate_size {self.intermediate_size} is not a multiple of {GROUP}, as blocks of weights are",
            )
            checks.require(not self.interleaved, f"interleaved: weights in {self.weight} have all gate rows first")

    def check_shared(self) -> None:
        """Raises InvalidInput where shared experts do not fit the routed ones."""
        checks.integer("shared_experts", self.shared_experts, 0)
        checks.number("shared_weight", self.shared_weight)
        if not self.shared_experts:
            checks.require(
                self.shared_weight == 1, f"shared_weight is {self.shared_weight:g} without shared experts: 1 is needed"
            )
            return
        for name, have, most in (("topk", self.slots, MAX_TOPK), ("num_experts", self.all_experts, MAX_EXPERTS)):
            checks.require(
                have <= most, f"shared_experts {self.shared_experts} and {name} {getattr(self, name)} exceed {most}"
            )
        refused = (
            ("weights in 8 or 4 bits", self.weight is not None),
            ("biases", self.w13_bias or self.w2_bias),
            ("interleaved rows", self.interleaved),
            ("router weights on the input", self.router_weights is RouterWeights.INPUT),
        )
        for what, has in refused:
            checks.require(not has, f"shared_experts is {self.shared_experts}: with {what} 0 is needed")

    @property
    def slots(self) -> int:
        """Experts of a token."""
        return self.topk + self.shared_experts

    @property
    def all_experts(self) -> int:
        return self.num_experts + self.shared_experts

    @property
    def may_add(self) -> bool:
        """Whether grouped GEMMs add to the output by atomic operations, instead of a sum in order."""
        return not self.deterministic and self.weight is None and not self.shared_experts

    @property
    def mma_scaled(self) -> bool:
        """Whether scales are factors of SM100's matrix products."""
        return self.weight is not None and self.weight.swizzled

    @property
    def weight_only(self) -> bool:
        """Whether weights in 4 bits are multiplied with 16 bits."""
        return self.weight is not None and self.weight.tiled

    @property
    def activations(self) -> ScaledFormat | None:
        """The format of what weights in 8 or 4 bits are multiplied with; None is 16 bits."""
        return None if self.weight is None else ACTIVATIONS_OF[self.weight]

    def __str__(self) -> str:
        facts = (
            (f"{self.shared_experts} shared", self.shared_experts > 0),
            ("interleaved", self.interleaved),
            ("biases", self.w13_bias or self.w2_bias),
            ("an expert map", self.global_experts is not None),
            (f"weights in {self.weight}", self.weight is not None),
            (f"x in {self.x}", self.x is not None),
            ("sums in any order", not self.deterministic),
            (f"router weights on {self.router_weights.value}", self.router_weights is not RouterWeights.OUTPUT),
        )
        extras = [text for text, has in facts if has]
        sizes = f"{self.hidden_size} to {self.intermediate_size}, top {self.topk}, {short(self.dtype)}"
        return f"{' + '.join([f'{self.activation} of {self.num_experts} experts', *extras])} of {sizes}"
