# SPDX-License-Identifier: Apache-2.0
"""This package's kernels of fp8 linear layers, as vLLM's methods call them.

A method quantises the weight's layout once (`process_weights_after_loading`), and calls `apply_weights` for each batch.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

from dsl_backend.gemm.activation import Activation
from dsl_backend.linear.scaled import api
from dsl_backend.quant.format import TENSOR_SCALED, ScaledFormat
from dsl_backend.quant.reference import Quantized


class Handed(NamedTuple):
    """What a linked gate and up projection returns to its down projection: values [..., n] and their scales."""

    values: torch.Tensor
    scale: torch.Tensor


class Link(NamedTuple):
    """A gate and up projection's activation, and the layer that takes its quantised output; None is one in 16 bits."""

    activation: Activation
    interleaved: bool
    consumer: nn.Module | None


class ServedByDsl:
    """What kernels with scales of rows and of blocks share.

    Attributes:
        x_kind, weight_kind: formats of the operands.
        kernel: the name of the kernel that is asked for; None is the best that serves.
        link: with it the layer applies the activation too.
    """

    x_kind: ScaledFormat
    weight_kind: ScaledFormat
    kernel: str | None = None
    link: Link | None = None
    config: Any

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """`find.judge` has asked dispatch."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def product(
        self, x: Quantized, lead: torch.Size, weight: Quantized, bias: torch.Tensor | None
    ) -> torch.Tensor | Handed:
        """The layer of x [rows, k], whose rows are `lead` to the model."""
        more: dict[str, Any] = {"dtype": self.config.out_dtype or torch.bfloat16, "kernel": self.kernel}
        if self.link is None:
            return of_shape(api.scaled_linear(x, weight, bias, **more), lead)
        more |= {"activation": self.link.activation, "interleaved": self.link.interleaved}
        consumer: Any = self.link.consumer
        if consumer is None:
            return of_shape(api.scaled_linear(x, weight, bias, **more), lead)
        # vLLM's quantisation of a layer's input follows from the format of its weight: the consumer's is this layer's.
        scale = consumer.input_scale.view(1) if self.x_kind == TENSOR_SCALED else None
        found = api.scaled_linear_quantized(x, weight, bias, to=self.x_kind, out_scale=scale, **more)
        return Handed(of_shape(found.values, lead), found.scale)

    def taken(self, x: Any) -> tuple[Quantized, torch.Size] | None:
        """A quantised input [rows, k] with the shape of its rows; None of an input that is not."""
        if not isinstance(x, Handed):
            return None
        values = x.values
        return Quantized(values.view(-1, values.shape[-1]), x.scale, self.x_kind), values.shape[:-1]


def of_shape(rows: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    return rows.view(*lead, rows.shape[-1])


def rows_of_weight(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] with neighbouring columns side by side; methods keep weights of scales by row as its transposed view."""
    return weight if weight.stride(-1) == 1 and weight.stride(0) != 1 else weight.t()


class RowScaledKernel(ServedByDsl, FP8ScaledMMLinearKernel):
    """Weights with one scale or one for each output channel."""

    def apply_weights(self, layer: nn.Module, x: Any, bias: torch.Tensor | None = None) -> Any:
        """Map x [..., k], or what a linked layer hands on, to [..., n]."""
        weight, weight_scale, x_scale, upper_bound = self._get_layer_params(layer)
        taken = self.taken(x)
        if taken is None:
            values, scale = self.quant_fp8(x.reshape(-1, x.shape[-1]), x_scale, upper_bound)
            taken = Quantized(values, scale.reshape(-1), self.x_kind), x.shape[:-1]
        quantized = Quantized(rows_of_weight(weight), weight_scale.reshape(-1), self.weight_kind)
        return self.product(*taken, quantized, bias)

    def apply_scaled_mm(self, **operands: Any) -> torch.Tensor:
        """Never called: `apply_weights` is this class' own."""
        raise NotImplementedError("RowScaledKernel.apply_weights calls the kernel itself")


class BlockScaledKernel(ServedByDsl, Fp8BlockScaledMMLinearKernel):
    """Weights with a scale for each block of 128x128. Scales of the input are column-major, as TMA needs them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        scale = config.activation_quant_key.scale
        known = inspect.signature(QuantFP8.__init__).parameters
        layout = {name: True for name in ("column_major_scales", "tma_aligned_scales") if name in known}
        self.quant_fp8 = QuantFP8(static=False, group_shape=scale.group_shape, use_ue8m0=False, **layout)

    def apply_weights(self, layer: nn.Module, x: Any, bias: torch.Tensor | None = None, **options: Any) -> Any:
        """Map x [..., k], or what a linked layer hands on, to [..., n]."""
        params = self._get_layer_params(layer)
        taken = self.taken(x)
        if taken is None:
            values, scale = self.quant_fp8(x.reshape(-1, x.shape[-1]), None, None)
            taken = Quantized(values, scale, self.x_kind), x.shape[:-1]
        return self.product(*taken, Quantized(params.weight, params.block_scale, self.weight_kind), bias)

    def apply_block_scaled_mm(self, **operands: Any) -> torch.Tensor:
        """Never called: `apply_weights` is this class' own."""
        raise NotImplementedError("BlockScaledKernel.apply_weights calls the kernel itself")


class HandedOn(nn.Module):
    """Replaces an activation whose projection applies it already: returns its input."""

    def forward(self, x: Any) -> Any:
        return x


def kernel_of(
    theirs: Any, x_kind: ScaledFormat, weight_kind: ScaledFormat, kernel: str | None
) -> RowScaledKernel | BlockScaledKernel:
    """This package's kernel in the place of one of vLLM's, of the same configuration."""
    made: RowScaledKernel | BlockScaledKernel
    if weight_kind.blocked:
        made = BlockScaledKernel(theirs.config)
    else:
        names = getattr(theirs, "layer_param_names", ["weight", "weight_scale", "input_scale", "input_scale_ub"])
        made = RowScaledKernel(theirs.config, layer_param_names=names)
    made.x_kind, made.weight_kind, made.kernel = x_kind, weight_kind, kernel
    return made
