# SPDX-License-Identifier: Apache-2.0
"""What a norm of vLLM's calls in place of its own kernels."""

from typing import Any

import torch

from dsl_backend.norm import launch
from dsl_backend.norm.spec import FP8, NormTensors, Scaling
from dsl_backend.quant.format import GROUP
from dsl_backend.quant.reference import column_major
from dsl_backend.runtime.op import register_op
from dsl_backend.vllm_plugin.scaled_linears.handed import Handed


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> torch.Tensor:
    """RMSNorm of x [rows, width]; a new tensor."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch.run(NormTensors(x, None, weight, None, out, None, None), eps, weight_offset, None)
    return out


def norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of x + residual, x + residual), both [rows, width] and new."""
    out, added = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    launch.run(NormTensors(x, residual, weight, None, out, added, None), eps, weight_offset, None)
    return out, added


def add_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, added = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return out, added


def norm_in_8_bits(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, by_group: bool, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of x [rows, width] in e4m3, its scales), both new.

    Args:
        scale: of all rows: the scales are empty then. None computes one for each row, or with `by_group` for each 128
            columns, column-major as linear layers read them.
    """
    values, scales = norm_in_8_bits_fake(x, weight, scale, by_group, eps, weight_offset)
    computed = scales if scale is None else None
    launch.run(NormTensors(x, None, weight, scale, values, None, computed), eps, weight_offset, None)
    return values, scales


def norm_in_8_bits_fake(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, by_group: bool, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    values = x.new_empty((rows, width), dtype=FP8)
    if by_group:
        return values, column_major(rows, width // GROUP, torch.float32, x.device)
    return values, x.new_empty(rows if scale is None else 0, dtype=torch.float32)


def add_norm_in_8_bits(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    by_group: bool,
    eps: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `norm_in_8_bits` of x + residual, and this sum."""
    values, scales, added = add_norm_in_8_bits_fake(x, residual, weight, scale, by_group, eps, weight_offset)
    computed = scales if scale is None else None
    launch.run(NormTensors(x, residual, weight, scale, values, added, computed), eps, weight_offset, None)
    return values, scales, added


def add_norm_in_8_bits_fake(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    by_group: bool,
    eps: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    added = torch.empty_like(x, memory_format=torch.contiguous_format)
    return *norm_in_8_bits_fake(x, weight, scale, by_group, eps, weight_offset), added


NORM = register_op("norm_layer", norm, fake=norm_fake)
ADD_NORM = register_op("add_norm_layer", add_norm, fake=add_norm_fake)
NORM_IN_8_BITS = register_op("norm_layer_in_8_bits", norm_in_8_bits, fake=norm_in_8_bits_fake)
ADD_NORM_IN_8_BITS = register_op("add_norm_layer_in_8_bits", add_norm_in_8_bits, fake=add_norm_in_8_bits_fake)


def forward(module: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """The norm as vLLM's `RMSNorm.forward` and `GemmaRMSNorm.forward` have it: out, or (out, x + residual)."""
    width = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    if residual is None:
        out: torch.Tensor = NORM(rows, module.weight.data, module.variance_epsilon, module.dsl_weight_offset)
        return out if x.dim() == 2 else out.view(x.shape)
    added = residual if x.dim() == 2 else residual.reshape(-1, width)
    out, added = ADD_NORM(rows, added, module.weight.data, module.variance_epsilon, module.dsl_weight_offset)
    return (out, added) if x.dim() == 2 else (out.view(x.shape), added.view(x.shape))


def forward_in_8_bits(module: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """As `forward`, with a result that the projection behind the norm takes: `Handed`, or (`Handed`, x + residual)."""
    width, to = x.shape[-1], module.dsl_handed_to
    scale, by_group = to.scale, to.scaling is Scaling.GROUP
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    facts = (module.weight.data, scale, by_group, module.variance_epsilon, module.dsl_weight_offset)
    if residual is None:
        values, scales = NORM_IN_8_BITS(rows, *facts)
        return Handed(values.view(x.shape), scales if scale is None else scale)
    values, scales, added = ADD_NORM_IN_8_BITS(rows, residual if x.dim() == 2 else residual.reshape(-1, width), *facts)
    return Handed(values.view(x.shape), scales if scale is None else scale), added.view(x.shape)
