# SPDX-License-Identifier: Apache-2.0
"""A row-wise softmax, its tensors, and the exact results of some rows."""

from dataclasses import dataclass

import torch
from dsl_backend.checks import short
from dsl_backend.providers import Limits
from dsl_backend.rows import common_vector
from dsl_backend.softmax import reference as eager
from dsl_backend.softmax.spec import SoftmaxSpec

from ..case import Reference, compared_rows
from ..check import BF16_LIMITS

COMPARED = 64  # number of compared rows of a layer
# Two approximate instructions (2^-22 each) and a sum of a quarter million terms.
F32_LIMITS = Limits(total=1e-5, row=3e-5)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """x [rows, width] to an output of the same shape, both contiguous."""

    rows: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    log: bool = False

    @property
    def traffic_bytes(self) -> int:
        """Every element is read once and written once."""
        return self.rows * self.width * (self.dtype.itemsize + self.out_dtype.itemsize)

    @property
    def limits(self) -> Limits:
        return F32_LIMITS if self.out_dtype == torch.float32 else BF16_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "width": self.width,
            "dtype": short(self.dtype),
            "out_dtype": short(self.out_dtype),
            "log": self.log,
        }


def spec_of(problem: Problem) -> SoftmaxSpec:
    """The problem of dispatch, for rows that are aligned to vectors where their width is."""
    x = torch.empty(1, problem.width, dtype=problem.dtype)
    out = torch.empty(1, problem.width, dtype=problem.out_dtype)
    vector = common_vector(x, out)
    return SoftmaxSpec(
        width=problem.width, dtype=problem.dtype, out_dtype=problem.out_dtype, log=problem.log, vector=vector
    )


@dataclass(frozen=True)
class Layer:
    """x and out, [rows, width]."""

    x: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    layers: tuple[Layer, ...]


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    """Normal logits with a standard deviation like a model's, and outputs of NaN."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.rows, problem.width)
    made = []
    for _ in range(layers):
        x = torch.empty(shape, dtype=problem.dtype, device=device).normal_(0, 3, generator=generator)
        made.append(Layer(x, torch.full(shape, torch.nan, dtype=problem.out_dtype, device=device)))
    return Inputs(tuple(made))


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The first row, the last one and random ones in float64."""
    x = inputs.layers[layer].x
    chosen = compared_rows(problem.rows, COMPARED, seed, x.device)
    return Reference(chosen, eager.exact(x[chosen], log=problem.log))
