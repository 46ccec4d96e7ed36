# SPDX-License-Identifier: Apache-2.0
"""This package's kernels of fp8 linear layers, as vLLM's methods call them.

A method quantises the weight's layout once (`process_weights_after_loading`), and calls `apply_weights` for each batch.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.utils import replace_parameter

from dsl_backend.linear.scaled import api
from dsl_backend.linear.scaled.eager import How
from dsl_backend.quant.format import BLOCK_SCALED_E8M0, MXFP8, TENSOR_SCALED, ScaledFormat
from dsl_backend.quant.reference import Quantized, in_mxfp8
from dsl_backend.vllm_plugin.scaled_linears.handed import Handed, Link, how_of
from dsl_backend.vllm_plugin.scaled_linears.operands import block_scale, mxfp8_input, powers_of_two


class Rows(NamedTuple):
    """A layer's input [rows, k]; without a scale it is in 16 bits."""

    values: torch.Tensor
    scale: torch.Tensor | None


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

    def weight_of(self, layer: nn.Module) -> Quantized:
        """The weight [n, k], as kernels read it."""
        raise NotImplementedError

    def layer_of(self, x: Any, operands: Callable[[torch.Tensor], Rows], weight: Quantized, bias: Any) -> Any:
        """The layer of x [..., k], or of what a linked layer hands on.

        Args:
            operands: quantises rows that are not.
        """
        if isinstance(x, Handed):
            rows, lead = Rows(x.values.view(-1, x.values.shape[-1]), x.scale), x.values.shape[:-1]
        else:
            rows, lead = operands(x.reshape(-1, x.shape[-1])), x.shape[:-1]
        out, scale = self.called(rows, weight, bias, self.consumers_scale, self.how)
        return of_shape(out, lead) if self.how.out_kind is None else Handed(of_shape(out, lead), scale)

    @property
    def how(self) -> How:
        """All of the layer that is no tensor."""
        return how_of(self.link, self.out_dtype, self.x_kind, self.kernel)

    @property
    def out_dtype(self) -> torch.dtype:
        """Of an output that is not quantised."""
        found: torch.dtype | None = self.config.out_dtype
        return found or torch.bfloat16

    @property
    def consumers_scale(self) -> torch.Tensor | None:
        """The given scale of a quantised output."""
        consumer: Any = None if self.link is None else self.link.consumer
        return consumer.input_scale.view(1) if consumer is not None and self.x_kind == TENSOR_SCALED else None

    def called(
        self, x: Rows, weight: Quantized, bias: torch.Tensor | None, out_scale: torch.Tensor | None, how: How
    ) -> tuple[torch.Tensor, Any]:
        """The layer of x's rows: the output, and the scale of a quantised one."""
        assert x.scale is not None
        return api.called(Quantized(x.values, x.scale, self.x_kind), weight, bias, out_scale, how)


def of_shape(rows: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    return rows.view(*lead, rows.shape[-1])


def rows_of_weight(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] with neighbouring columns side by side; methods keep weights of scales by row as its transposed view."""
    return weight if weight.stride(-1) == 1 and weight.stride(0) != 1 else weight.t()


class RowScaledKernel(ServedByDsl, FP8ScaledMMLinearKernel):
    """Weights with one scale or one for each output channel."""

    def apply_weights(self, layer: nn.Module, x: Any, bias: torch.Tensor | None = None) -> Any:
        """Map x [..., k], or what a linked layer hands on, to [..., n]."""
        _, _, x_scale, upper_bound = self._get_layer_params(layer)

        def operands(rows: torch.Tensor) -> Rows:
            values, scale = self.quant_fp8(rows, x_scale, upper_bound)
            return Rows(values, scale.reshape(-1))

        return self.layer_of(x, operands, self.weight_of(layer), bias)

    def weight_of(self, layer: nn.Module) -> Quantized:
        weight, weight_scale, _, _ = self._get_layer_params(layer)
        return Quantized(rows_of_weight(weight), weight_scale.reshape(-1), self.weight_kind)

    def apply_scaled_mm(self, **operands: Any) -> torch.Tensor:
        """Never called: `apply_weights` is this class' own."""
        raise NotImplementedError("RowScaledKernel.apply_weights calls the kernel itself")


def group_quantisation(config: Any, *, use_ue8m0: bool = False) -> QuantFP8:
    """VLLM's quantisation of a layer's input by group; with scales that are powers of two where that is asked for."""
    known = inspect.signature(QuantFP8.__init__).parameters
    layout = {name: True for name in ("column_major_scales", "tma_aligned_scales") if name in known}
    group_shape = config.activation_quant_key.scale.group_shape
    return QuantFP8(static=False, group_shape=group_shape, use_ue8m0=use_ue8m0, **layout)


class BlockScaledKernel(ServedByDsl, Fp8BlockScaledMMLinearKernel):
    """Weights with a scale for each block of 128x128. Scales of the input are column-major, as TMA needs them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.quant_fp8 = group_quantisation(config)

    def apply_weights(self, layer: nn.Module, x: Any, bias: torch.Tensor | None = None, **options: Any) -> Any:
        """Map x [..., k], or what a linked layer hands on, to [..., n]."""
        return self.layer_of(x, self.operands, self.weight_of(layer), bias)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Scales that are stored as powers of two become float32."""
        super().process_weights_after_loading(layer)
        found = block_scale(layer)
        if found is not None and found[1].dtype != torch.float32:
            replace_parameter(layer, found[0], found[1].to(torch.float32))

    def weight_of(self, layer: Any) -> Quantized:
        found = block_scale(layer)
        assert found is not None
        return Quantized(layer.weight, found[1], self.weight_kind)

    def operands(self, rows: torch.Tensor) -> Rows:
        return Rows(*self.quant_fp8(rows, None, None))

    def apply_block_scaled_mm(self, **operands: Any) -> torch.Tensor:
        """Never called: `apply_weights` is this class' own."""
        raise NotImplementedError("BlockScaledKernel.apply_weights calls the kernel itself")


class PowersOfTwoKernel(BlockScaledKernel):
    """Weights with a scale for each block of 128x128 that is a power of two, multiplied in MXFP8.

    SM100's matrix products apply such scales, so that sums need not be promoted. Inputs are quantised by 32 columns.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        """Raises InvalidInput: a scale is no power of two."""
        Fp8BlockScaledMMLinearKernel.process_weights_after_loading(self, layer)
        values, scale, _ = super().weight_of(layer)
        blocks = Quantized(values, powers_of_two(scale), BLOCK_SCALED_E8M0)
        layer.mxfp8_scale = nn.Parameter(in_mxfp8(blocks).scale, requires_grad=False)

    def weight_of(self, layer: Any) -> Quantized:
        return Quantized(layer.weight, layer.mxfp8_scale, MXFP8)

    def operands(self, rows: torch.Tensor) -> Rows:
        found = mxfp8_input(rows)
        return Rows(found.values, found.scale)


class HandedOn(nn.Module):
    """Replaces an activation whose projection applies it already: returns its input."""

    def forward(self, x: Any) -> Any:
        return x


def kernel_of(
    theirs: Any,
    x_kind: ScaledFormat,
    weight_kind: ScaledFormat,
    kernel: str | None,
    *,
    rows: type[RowScaledKernel] = RowScaledKernel,
    blocks: type[BlockScaledKernel] = BlockScaledKernel,
) -> RowScaledKernel | BlockScaledKernel:
    """This package's kernel in the place of one of vLLM's, of the same configuration.

    Args:
        rows, blocks: its class, with scales of rows and of blocks.
    """
    made: RowScaledKernel | BlockScaledKernel
    if weight_kind.swizzled:
        made = PowersOfTwoKernel(theirs.config)
    elif weight_kind.blocked:
        made = blocks(theirs.config)
    else:
        names = getattr(theirs, "layer_param_names", ["weight", "weight_scale", "input_scale", "input_scale_ub"])
        made = rows(theirs.config, layer_param_names=names)
    made.x_kind, made.weight_kind, made.kernel = x_kind, weight_kind, kernel
    return made
