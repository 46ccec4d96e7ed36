# SPDX-License-Identifier: Apache-2.0
"""An RMSNorm, its tensors, and the exact results of some rows."""

from dataclasses import dataclass, replace

import torch
from dsl_backend.checks import short
from dsl_backend.norm import launch
from dsl_backend.norm import reference as eager
from dsl_backend.norm.spec import FP8, NormSpec, NormTensors, Scaling
from dsl_backend.providers import Limits
from dsl_backend.quant.format import GROUP
from dsl_backend.quant.reference import column_major

from ..case import Reference, compared_rows
from ..check import BF16_LIMITS

COMPARED = 64  # number of compared rows of a layer
EPS = 1e-5
F32_LIMITS = Limits(total=1e-5, row=3e-5)
# Rounding to e4m3 costs up to 2^-4 an element.
FP8_LIMITS = Limits(total=0.05, row=0.1)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """x [rows, width], and a residual of its shape, to an output of the same shape; all contiguous."""

    rows: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    residual: bool = False
    scaling: Scaling = Scaling.NONE

    @property
    def out_dtype(self) -> torch.dtype:
        return self.dtype if self.scaling is Scaling.NONE else FP8

    @property
    def traffic_bytes(self) -> int:
        """Every element is read once and written once, and so are the residual's and the weight's."""
        element = self.dtype.itemsize * (3 if self.residual else 1) + self.out_dtype.itemsize
        return self.rows * self.width * element + self.width * self.dtype.itemsize

    @property
    def limits(self) -> Limits:
        if self.scaling is not Scaling.NONE:
            return FP8_LIMITS
        return F32_LIMITS if self.dtype == torch.float32 else BF16_LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "width": self.width,
            "dtype": short(self.dtype),
            "residual": self.residual,
            "scaling": self.scaling.value,
        }

    def spec(self) -> NormSpec:
        """The problem of dispatch, for rows that are aligned to vectors where their width is."""
        return launch.spec_of(layer_of(replace(self, rows=1), torch.device("cpu"), None), 0.0)


@dataclass(frozen=True)
class Inputs:
    layers: tuple[NormTensors, ...]


def layer_of(problem: Problem, device: torch.device, generator: torch.Generator | None) -> NormTensors:
    """Normal rows, a weight near 1, and outputs without values; one of the scales that the problem asks for."""
    shape = (problem.rows, problem.width)

    def normal() -> torch.Tensor:
        return torch.empty(shape, dtype=problem.dtype, device=device).normal_(generator=generator)

    def empty(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    scale_out = None
    if problem.scaling is Scaling.TOKEN:
        scale_out = torch.empty(problem.rows, 1, device=device)
    elif problem.scaling is Scaling.GROUP:
        scale_out = column_major(problem.rows, problem.width // GROUP, torch.float32, device)
    return NormTensors(
        x=normal(),
        residual=normal() if problem.residual else None,
        weight=torch.empty(problem.width, dtype=problem.dtype, device=device).normal_(1, 0.1, generator=generator),
        scale=torch.full((1,), 0.01, device=device) if problem.scaling is Scaling.TENSOR else None,
        out=empty(problem.out_dtype),
        residual_out=empty(problem.dtype) if problem.residual else None,
        scale_out=scale_out,
    )


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    inputs = Inputs(tuple(layer_of(problem, device, generator) for _ in range(layers)))
    poison(inputs)
    return inputs


def poison(inputs: Inputs) -> None:
    """Fill outputs with NaN."""
    for layer in inputs.layers:
        for tensor in (layer.out, layer.residual_out, layer.scale_out):
            if tensor is not None and tensor.dtype == FP8:
                tensor.view(torch.uint8).fill_(0x7F)
            elif tensor is not None:
                tensor.fill_(torch.nan)


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    """The first row, the last one and random ones in float64."""
    tensors = inputs.layers[layer]
    chosen = compared_rows(problem.rows, COMPARED, seed, tensors.x.device)
    residual = None if tensors.residual is None else tensors.residual[chosen]
    part = tensors._replace(x=tensors.x[chosen], residual=residual)
    return Reference(chosen, eager.exact(part, problem.spec(), EPS).values)
