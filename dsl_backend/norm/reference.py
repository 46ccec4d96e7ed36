# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in eager torch: the definition, the reference of the tests, and the kernel for CPUs."""

from functools import partial
from typing import NamedTuple

import torch

from dsl_backend.norm.kernel import Launch
from dsl_backend.norm.spec import FP8, FP8_MAX, MIN_SCALE, NormSpec, NormTensors, Scaling
from dsl_backend.quant.format import GROUP
from dsl_backend.quant.reference import LEAST_OF_GROUP
from dsl_backend.runtime.target import Target


class Normalised(NamedTuple):
    """Results before they are rounded to the output's dtype.

    Attributes:
        residual_out: x + residual, rounded to x's dtype; x itself without a residual.
        values: [rows, width], divided by the scale where there is one.
        scale_out: [rows] or [rows, groups]; None where scales are given or there are none.
    """

    residual_out: torch.Tensor
    values: torch.Tensor
    scale_out: torch.Tensor | None


def exact(tensors: NormTensors, spec: NormSpec, eps: float, dtype: torch.dtype = torch.float64) -> Normalised:
    """RMSNorm along the last dimension, in the given arithmetic.

    x + residual is computed in float32 and rounded to x's dtype whatever the arithmetic: the sum that is stored is the
    one that is normalised.
    """
    row = tensors.x
    if tensors.residual is not None:
        row = (row.float() + tensors.residual.float()).to(spec.dtype)
    z = row.to(dtype)
    values = z
    if tensors.weight is not None:
        values = z * (tensors.weight.to(dtype) + spec.weight_offset)
    values = values * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    scale_out = None
    if spec.scaling is Scaling.TENSOR:
        assert tensors.scale is not None
        values = values * tensors.scale.to(dtype).reciprocal()
    elif spec.scaling is Scaling.TOKEN:
        scale_out = (values.abs().amax(-1) / FP8_MAX).clamp(min=MIN_SCALE)
        values = values * scale_out.unsqueeze(-1).reciprocal()
    elif spec.scaling is Scaling.GROUP:
        groups = values.unflatten(-1, (-1, GROUP))
        scale_out = groups.abs().amax(-1).clamp(min=LEAST_OF_GROUP) / FP8_MAX
        values = (groups * scale_out.unsqueeze(-1).reciprocal()).flatten(-2)
    return Normalised(row, values, scale_out)


def converted(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in the output's dtype: rounded to nearest even; float8_e4m3fn saturates, NaN stays NaN."""
    return (values.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else values).to(dtype)


def rms_norm(tensors: NormTensors, eps: float, spec: NormSpec, target: Target) -> None:
    """Write out, residual_out and scale_out, computed in float32."""
    found = exact(tensors, spec, eps, torch.float32)
    tensors.out.copy_(converted(found.values, spec.out_dtype))
    if tensors.residual_out is not None:
        tensors.residual_out.copy_(found.residual_out)
    if tensors.scale_out is not None and found.scale_out is not None:
        tensors.scale_out.copy_(found.scale_out)


def bind(spec: NormSpec, target: Target) -> Launch:
    """As `kernel.Bind`."""
    return partial(rms_norm, spec=spec, target=target)
