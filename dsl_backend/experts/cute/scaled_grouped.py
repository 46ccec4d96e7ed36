# SPDX-License-Identifier: Apache-2.0
"""What the grouped GEMMs of e4m3 operands share on all architectures: their operands, and where scales come from."""

from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.grouped import GroupedParams, GroupedProduct
from dsl_backend.quant.format import ScaledFormat


@dataclass(frozen=True)
class ScaledGroupedParams(GroupedParams):
    """With scales.

    Attributes:
        mXScale: float32 [tokens or rows, groups] or [tokens or rows].
        mWeightScale: float32 [E, blocks of rows, blocks of k] or [E, parts * n]; of one expert without the first mode.
        mOutScale: float32 [rows, groups] of a quantised output; else missing.
    """

    mXScale: cute.Tensor
    mWeightScale: cute.Tensor
    mOutScale: cute.Tensor

    def of_expert(self, expert: cutlass.Int32) -> "ScaledGroupedParams":
        """The same with the weights' scales of an expert."""
        others = (None,) * (cute.rank(self.mWeightScale) - 1)
        return replace(self, mWeightScale=self.mWeightScale[(expert, *others)])


class ScaledProduct(GroupedProduct):
    """One of the two products; a class of an SM adds its arithmetic.

    Attributes:
        beside: the first product's output is in 16 bits, and another launch quantises it.
        out_format: of an output that the epilogue quantises.
    """

    beside: bool
    out_format: ScaledFormat | None

    @property
    def quantises(self) -> bool:
        """Whether the output is quantised in the epilogue."""
        return self.out_format is not None

    def matrices(self, args: Any) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """(x, weight, out) of the product."""
        operands, scratch = args.operands, args.scratch
        if not self.gathers:
            return scratch.hidden, operands.w2, scratch.made
        x = operands.x if scratch.x is None else scratch.x
        return x, operands.w13, scratch.wide if self.beside else scratch.hidden

    def extended(self, params: GroupedParams, args: Any) -> ScaledGroupedParams:
        """The parameters with scales."""
        operands, scratch = args.operands, args.scratch
        x_scale, weight_scale, out_scale = scratch.hidden_scale, operands.scales.w2, None
        if self.gathers:
            x_scale = operands.scales.x if scratch.x is None else scratch.x_scale
            weight_scale = operands.scales.w13
            out_scale = scratch.hidden_scale if self.quantises else None
        base = {field.name: getattr(params, field.name) for field in fields(params)}
        return ScaledGroupedParams(**base, mXScale=x_scale, mWeightScale=weight_scale, mOutScale=out_scale)
