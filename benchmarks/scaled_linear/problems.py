# SPDX-License-Identifier: Apache-2.0
"""An e4m3 linear layer, its tensors, and the exact results of some rows."""

from dataclasses import dataclass

import torch
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.linear.scaled import reference as eager
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.providers import Limits
from dsl_backend.quant.format import BLOCK_SCALED, GROUP_SCALED, ROW_SCALED, TENSOR_SCALED, ScaledFormat
from dsl_backend.quant.reference import Quantized, column_major, quantized

from ..case import Reference, compared_rows
from ..check import BF16_LIMITS

COMPARED = 16  # number of compared rows of a layer
# Rounding to e4m3 costs up to 2^-4 an element.
FP8_LIMITS = Limits(total=0.05, row=0.1)
# Formats of x and the weight; x's is that of a quantised output.
SCHEMES: dict[str, tuple[ScaledFormat, ScaledFormat]] = {
    "channels": (ROW_SCALED, ROW_SCALED),
    "blocks": (GROUP_SCALED, BLOCK_SCALED),
    "tensor": (TENSOR_SCALED, TENSOR_SCALED),
}
# Of an output with a given scale: what a gated layer of unit inputs reaches / 448. With 0.01, values from 4.5 on
# saturated, and every provider was 0.08 off a reference that did not.
OUT_SCALE = 0.05


@dataclass(frozen=True, kw_only=True)
class Problem:
    """x [m, k] to [m, n]: SwiGLU with weights [2 n, k], quantised, or the plain product to bfloat16."""

    m: int
    n: int
    k: int
    scheme: str
    gated: bool = True
    eight_bit: bool = True

    @property
    def spec(self) -> ScaledLinearSpec:
        x, weight = SCHEMES[self.scheme]
        return ScaledLinearSpec(
            n=self.n,
            k=self.k,
            x=x,
            weight=weight,
            activation=Swiglu() if self.gated else None,
            out=x if self.gated else None,
            column_major=x.blocked,
        )

    @property
    def traffic_bytes(self) -> int:
        """Weights, x and their scales are read once; the output and its scales are written once."""
        spec = self.spec
        scales = [(spec.x, self.m, self.k), (spec.weight, spec.weight_rows, self.k)]
        scales += [] if spec.out is None else [(spec.out, self.m, self.n)]
        numbers = sum(torch.Size(kind.scale_shape(rows, columns)).numel() for kind, rows, columns in scales)
        return (spec.weight_rows + self.m) * self.k + self.m * self.n * spec.dtypes.out.itemsize + 4 * numbers

    @property
    def flops(self) -> int:
        return 2 * self.m * self.spec.weight_rows * self.k

    @property
    def limits(self) -> Limits:
        return FP8_LIMITS if self.gated else BF16_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {"m": self.m, "n": self.n, "k": self.k, "scheme": self.scheme, "gated": self.gated}


@dataclass(frozen=True)
class Layer:
    """x [m, k]; weight [n or 2 n, k] with gate rows first; out_scale of a quantised output, where it is given."""

    x: Quantized
    weight: Quantized
    out_scale: torch.Tensor | None


@dataclass(frozen=True)
class Inputs:
    layers: tuple[Layer, ...]


def drawn(rows: int, k: int, kind: ScaledFormat, deviation: float, generator: torch.Generator) -> Quantized:
    """Normal numbers in the format, quantised 4096 rows at a time."""
    device = generator.device
    values = torch.empty((rows, k), dtype=kind.values, device=device)
    shape = kind.scale_shape(rows, k)
    by_group = kind.blocked and kind.block_rows == 1
    scale = column_major(shape[0], shape[-1], kind.scales, device) if by_group else torch.empty(shape, device=device)
    for first in range(0, rows, 4096):
        some = torch.empty((min(4096, rows - first), k), device=device).normal_(0, deviation, generator=generator)
        # 6 deviations: what one scale for all of the matrix holds.
        given = torch.full((1,), 6 * deviation / kind.largest, device=device) if shape == (1,) else None
        part = quantized(some, kind, given)
        values[first : first + 4096] = part.values
        height = kind.block_rows or rows
        scale[first // height : first // height + len(part.scale)] = part.scale
    return Quantized(values, scale, kind)


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    """Normal x, and weights that preserve its variance."""
    generator = torch.Generator(device).manual_seed(seed)
    x, weight = SCHEMES[problem.scheme]
    given = problem.gated and x == TENSOR_SCALED
    return Inputs(
        tuple(
            Layer(
                drawn(problem.m, problem.k, x, 1, generator),
                drawn(problem.spec.weight_rows, problem.k, weight, problem.k**-0.5, generator),
                torch.full((1,), OUT_SCALE, device=device) if given else None,
            )
            for _ in range(layers)
        )
    )


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The first row, the last one and random ones in float64."""
    given = inputs.layers[layer]
    values, scale, kind = given.x
    chosen = compared_rows(problem.m, COMPARED, seed, values.device)
    part = Quantized(values[chosen], scale if kind == TENSOR_SCALED else scale[chosen], kind)
    values = eager.exact(part, given.weight, activation=problem.spec.activation)
    if given.out_scale is not None:
        # What a given scale cannot hold saturates.
        largest = TENSOR_SCALED.largest * float(given.out_scale)
        values = values.clamp(-largest, largest)
    return Reference(chosen, values)
