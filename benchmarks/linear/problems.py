# SPDX-License-Identifier: Apache-2.0
"""A linear layer, its tensors, and the exact results of some rows."""

from dataclasses import dataclass

import torch
from dsl_backend.checks import short
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear import reference as eager
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.providers import Limits

from ..case import Reference, compared_rows
from ..check import BF16_LIMITS

COMPARED = 16  # number of compared rows of a layer


@dataclass(frozen=True, kw_only=True)
class Problem:
    """x [m, k] to [m, n]: SwiGLU with weights [2 n, k], or the plain product with weights [n, k]."""

    m: int
    n: int
    k: int
    gated: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def spec(self) -> LinearSpec:
        activation = Swiglu() if self.gated else None
        return LinearSpec(n=self.n, k=self.k, dtypes=Dtypes.of(self.dtype), activation=activation)

    @property
    def traffic_bytes(self) -> int:
        """Weights and x are read once; the output is written once."""
        return (self.spec.weight_rows * self.k + self.m * (self.k + self.n)) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        return 2 * self.m * self.spec.weight_rows * self.k

    @property
    def limits(self) -> Limits:
        return BF16_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {"m": self.m, "n": self.n, "k": self.k, "gated": self.gated, "dtype": short(self.dtype)}


@dataclass(frozen=True)
class Layer:
    """x [m, k], weight [n or 2 n, k] with gate rows first, out [m, n]."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    layers: tuple[Layer, ...]


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    """Normal x, weights that preserve its variance, and outputs of NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        made = torch.empty((rows, columns), dtype=problem.dtype, device=device)
        return made.normal_(0, deviation, generator=generator)

    return Inputs(
        tuple(
            Layer(
                normal(problem.m, problem.k, 1),
                normal(problem.spec.weight_rows, problem.k, problem.k**-0.5),
                torch.full((problem.m, problem.n), torch.nan, dtype=problem.dtype, device=device),
            )
            for _ in range(layers)
        )
    )


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The first row, the last one and random ones in float64."""
    given = inputs.layers[layer]
    chosen = compared_rows(problem.m, COMPARED, seed, given.x.device)
    return Reference(chosen, eager.exact(given.x[chosen], given.weight, activation=problem.spec.activation))
