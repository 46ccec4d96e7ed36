# SPDX-License-Identifier: Apache-2.0
"""What a norm of vLLM's calls in place of its own kernels."""

from typing import Any

import torch

from dsl_backend.norm import launch
from dsl_backend.norm.spec import NormTensors
from dsl_backend.runtime.op import register_op


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


NORM = register_op("norm_layer", norm, fake=norm_fake)
ADD_NORM = register_op("add_norm_layer", add_norm, fake=add_norm_fake)


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
