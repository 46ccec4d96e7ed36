# SPDX-License-Identifier: Apache-2.0
"""This package's kernel of linear layers with weights of 4 or 8 bits, as vLLM's methods call it."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel

from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear.weight_only import api
from dsl_backend.quant.weight_only import WeightOnlyFormat


def by_rows(parameter: Any) -> torch.Tensor:
    """A parameter's data with output channels as the first dimension; see `permute_param_layout_` of vLLM."""
    output_dim = getattr(parameter, "output_dim", None)
    if output_dim is None:
        output_dim = 1 - parameter.input_dim
    return parameter.data if output_dim == 0 else parameter.data.t()


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned numbers in 32-bit words, lowest bits first, as uint8 in a further dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).to(torch.uint8)


def packed_of(weight: Any, scale: Any, zero_points: Any, kind: WeightOnlyFormat) -> torch.Tensor:
    """The weight as kernels read it, of parameters as they were loaded.

    Args:
        weight: words of neighbouring columns. scale: of rows and groups, in either order. zero_points: words of
            neighbouring rows; None without any.
    """
    words = by_rows(weight)
    values = fields(words, kind.bits).reshape(words.shape[0], -1)
    offsets = None
    if zero_points is not None:
        # [n / words' numbers, groups, numbers] -> [n, groups].
        numbers = fields(by_rows(zero_points), kind.bits).transpose(1, 2)
        offsets = numbers.reshape(values.shape[0], -1)
    return api.pack(values, by_rows(scale).contiguous(), offsets, kind)


class WeightOnlyKernel(MPLinearKernel):
    """Weights of 4 or 8 bits in the place of one of vLLM's kernels, of the same configuration.

    Args:
        theirs: vLLM's kernel.
    """

    def __init__(self, theirs: Any, spec: WeightOnlyGemmSpec) -> None:
        super().__init__(theirs.config, theirs.w_q_name, theirs.w_s_name, theirs.w_zp_name)
        self.spec = spec

    @classmethod
    def get_min_capability(cls) -> int:
        """`find.judge` has asked dispatch."""
        return 0

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Pack the weight with its scales and zero points, and give their memory back."""
        weight, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        zero_points = getattr(layer, self.w_zp_name) if self.spec.kind.zero_points else None
        packed = packed_of(weight, scale, zero_points, self.spec.kind)
        setattr(layer, self.w_q_name, nn.Parameter(packed, requires_grad=False))
        for name in (self.w_s_name, self.w_zp_name):
            # GPTQ's layers have zero points that say what is known.
            if getattr(layer, name or "", None) is not None:
                setattr(layer, name, nn.Parameter(getattr(layer, name).data.new_empty(0), requires_grad=False))

    def apply_weights(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [..., k] to [..., n]."""
        spec = self.spec
        rows = x.reshape(-1, x.shape[-1])
        out = api.weight_only_linear(rows, getattr(layer, self.w_q_name), bias, n=spec.n, kind=spec.kind)
        return out.view(*x.shape[:-1], spec.n)
