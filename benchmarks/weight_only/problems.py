# SPDX-License-Identifier: Apache-2.0
"""A linear layer of weights of 4 or 8 bits, its tensors, and the exact results of some rows."""

from dataclasses import dataclass

import torch
from dsl_backend.checks import short
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.providers import Limits
from dsl_backend.quant.weight_only import WeightOnlyFormat, dequantized

from ..case import Reference, compared_rows
from ..check import BF16_LIMITS

COMPARED = 16  # number of compared rows of a layer


@dataclass(frozen=True, kw_only=True)
class Problem:
    """x [m, k] to [m, n], by symmetric weights [n, k] of so many bits, 128 columns of which share a scale."""

    m: int
    n: int
    k: int
    bits: int = 4
    dtype: torch.dtype = torch.bfloat16

    @property
    def kind(self) -> WeightOnlyFormat:
        return WeightOnlyFormat(bits=self.bits)

    @property
    def spec(self) -> WeightOnlyGemmSpec:
        return WeightOnlyGemmSpec(n=self.n, k=self.k, dtype=self.dtype, kind=self.kind)

    @property
    def traffic_bytes(self) -> int:
        """Weights, scales and x are read once; the output is written once."""
        numbers = self.n * self.kind.groups(self.k) + self.m * (self.k + self.n)
        return self.n * self.k * self.bits // 8 + numbers * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def limits(self) -> Limits:
        return BF16_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {"m": self.m, "n": self.n, "k": self.k, "bits": self.bits, "dtype": short(self.dtype)}


@dataclass(frozen=True)
class Layer:
    """One layer's tensors. A weight is (value - half of the range) * scale.

    Attributes:
        x: [m, k].
        values: uint8 [n, k].
        scale: [n, groups], in x's dtype.
    """

    x: torch.Tensor
    values: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    layers: tuple[Layer, ...]


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    """Normal x, and weights that nearly preserve its variance."""
    generator = torch.Generator(device).manual_seed(seed)
    kind, n, k = problem.kind, problem.n, problem.k
    # Values are uniform: their standard deviation is the range over the square root of 12.
    usual = 12**0.5 / (1 << kind.bits) * k**-0.5

    def layer() -> Layer:
        x = torch.empty((problem.m, k), dtype=problem.dtype, device=device).normal_(0, 1, generator=generator)
        values = torch.randint(0, 1 << kind.bits, (n, k), dtype=torch.uint8, device=device, generator=generator)
        scale = torch.empty((n, kind.groups(k)), device=device).uniform_(0.5 * usual, 1.5 * usual, generator=generator)
        return Layer(x, values, scale.to(problem.dtype))

    return Inputs(tuple(layer() for _ in range(layers)))


def nothing_to_fill(inputs: Inputs) -> None:
    """Every launch makes its own output."""


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The first row, the last one and random ones in float64."""
    given = inputs.layers[layer]
    chosen = compared_rows(problem.m, COMPARED, seed, given.x.device)
    return Reference(chosen, given.x[chosen].double() @ dequantized(given.values, given.scale, None, problem.kind).t())
