# SPDX-License-Identifier: Apache-2.0
"""Kernels of fp8 linear layers that run for numbers of rows for which they were measured to be faster; else vLLM's own.

vLLM's kernel processes the weights, and both kernels read them as it leaves them: e4m3 [n, k] with scales in float32,
as CUTLASS, torch, and on SM90 DeepGEMM have them. It also takes the input that this package's kernels take: e4m3 and
scales of tokens or groups. Behind vLLM's product of a linked gate and up projection this package's activation and
quantisation run as one launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel

from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.activation import encoded
from dsl_backend.linear.scaled import eager, ops, tuned
from dsl_backend.linear.scaled.activated import activated
from dsl_backend.linear.scaled.eager import How
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import ROW_SCALED, ScaledFormat
from dsl_backend.quant.reference import Quantized
from dsl_backend.runtime.op import register_op
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin.scaled_linears.kernels import (
    BlockScaledKernel,
    Rows,
    RowScaledKernel,
    ServedByDsl,
    group_quantisation,
    kernel_of,
)


def takes_16_bits(theirs: Any) -> bool:
    """Whether a kernel of vLLM's quantises its input itself."""
    return not getattr(theirs, "apply_input_quant", True)


def of_quantised(theirs: Any) -> Any:
    """A kernel of vLLM's, or the part of it, that takes a quantised input; None where there is none.

    FlashInfer's kernel of few rows takes 16 bits. vLLM's kernel of it has DeepGEMM's for more rows.
    """
    one = getattr(theirs, "fallback", None) if takes_16_bits(theirs) else theirs
    for base in (FP8ScaledMMLinearKernel, Fp8BlockScaledMMLinearKernel):
        # Kernels with an `apply_weights` of their own have weights in another layout, or take no e4m3.
        if isinstance(one, base) and type(one).apply_weights is base.apply_weights:
            return one
    return None


# Rows from which vLLM has DeepGEMM's kernel in the place of FlashInfer's, which no record is of.
DEEP_GEMM_FROM = 32
# The least and the most rows.
Range = tuple[int, int]


def ranges_of(theirs: Any, spec: ScaledLinearSpec, target: Target, *, handed: bool) -> list[Range]:
    """Ranges of rows for which a layer was measured to be faster than vLLM's kernel.

    Args:
        handed: its input is what a linked layer quantised.
    """
    least = DEEP_GEMM_FROM if takes_16_bits(theirs) and not handed else 1
    found = [(max(one.least_rows, least), one.most_rows) for one in tuned.faster(spec, target)]
    return sorted((first, last) for first, last in found if first <= last)


@dataclass(frozen=True)
class Beside:
    """Both kernels of layers of a kind.

    Attributes:
        spec: with the activation and the quantisation of a linked layer.
        ours: the layer's kernel object, which quantises its input.
        theirs: vLLM's kernel.
        ranges: of rows for which this package's kernel runs.
    """

    spec: ScaledLinearSpec
    ours: Any
    theirs: Any
    ranges: Sequence[Range]

    def serves(self, rows: int) -> bool:
        return any(least <= rows <= most for least, most in self.ranges)

    def product(self, x: Rows, weight: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
        """VLLM's product [rows, rows of the weight], in 16 bits."""
        rows, columns = x.values.shape[0], weight.values.shape[0]
        if not weight.kind.blocked:
            assert x.scale is not None
            found: torch.Tensor = self.theirs.apply_scaled_mm(
                A=x.values,
                B=weight.values.t(),
                out_dtype=self.spec.dtype,
                As=x.scale.view(-1, 1) if self.spec.x == ROW_SCALED else x.scale,
                Bs=weight.scale.view(-1, 1) if weight.kind == ROW_SCALED else weight.scale,
                bias=bias,
                output_shape=[rows, columns],
            )
            return found
        if x.scale is None:
            kernel, scale = self.theirs, x.values.new_empty(1)
        else:
            kernel = of_quantised(self.theirs)
            # CUTLASS computes from the number of rows where a column of scales begins.
            aligned = getattr(kernel.quant_fp8, "tma_aligned_scales", False)
            scale = x.scale if aligned else x.scale.t().contiguous().t()
        found = kernel.apply_block_scaled_mm(A=x.values, B=weight.values, As=scale, Bs=weight.scale)
        return (found if bias is None else found + bias).to(self.spec.dtype)


# By their names, for the operators.
_layers: dict[str, Beside] = {}


def run(
    x: Rows, weight: Quantized, bias: torch.Tensor | None, out_scale: torch.Tensor | None, how: How, layer: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer by the kernel that was measured to be faster for its rows.

    The number of rows is known here and not to torch.compile. A CUDA graph keeps the choice that was made for its
    number of rows.
    """
    of, rows = _layers[layer], x.values.shape[0]
    if not rows or of.serves(rows):
        if x.scale is None:
            quantise = of.ours.quant_fp8
            x = Rows(*(quantise.forward_cuda if x.values.is_cuda else quantise.forward_native)(x.values))
        assert x.scale is not None
        return eager.linear(Quantized(x.values, x.scale, of.spec.x), weight, bias, out_scale, how)
    product = of.product(x, weight, bias)
    if how.activation is None:
        return product, None
    return activated(product, how, out_scale)


def layer(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    formats: str,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    kernel: str | None,
    name: str,
) -> torch.Tensor:
    how = ops.how_of(formats, activation, parameters, interleaved, kernel=kernel)
    of_weight = Quantized(weight, weight_scale, ops.formats_of(formats)[1])
    return run(Rows(x, x_scale), of_weight, bias, out_scale, how, name)[0]


def layer_dynamic(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    formats: str,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    kernel: str | None,
    name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    how = ops.how_of(formats, activation, parameters, interleaved, kernel=kernel)
    of_weight = Quantized(weight, weight_scale, ops.formats_of(formats)[1])
    out, computed = run(Rows(x, x_scale), of_weight, bias, None, how, name)
    assert computed is not None
    return out, computed


def layer_fake(*given: Any) -> torch.Tensor:
    operands, rest = given[:6], given[6:]
    return ops.scaled_linear_fake(*operands, None, *rest)


def layer_dynamic_fake(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    operands, rest = given[:5], given[5:]
    return ops.scaled_linear_dynamic_fake(*operands, None, None, *rest)


LAYER = register_op("measured_scaled_linear", layer, fake=layer_fake)
LAYER_DYNAMIC = register_op("measured_scaled_linear_dynamic", layer_dynamic, fake=layer_dynamic_fake)


class Measured(ServedByDsl):
    """What `MeasuredRows` and `MeasuredBlocks` share.

    Attributes:
        theirs: vLLM's kernel, whose place this one has.
        input_quant_key_before: what the layer said of inputs that vLLM's kernel takes from a fused activation or norm.
        name: of its `Beside`, once it is known what is linked.
        ranges: of rows for which this package's kernel runs.
    """

    theirs: Any
    input_quant_key_before: Any = None
    name: str = ""
    ranges: Sequence[Range] = ()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """As vLLM's kernel does. Raises InvalidInput: it leaves weights that this package's kernels cannot read."""
        self.theirs.process_weights_after_loading(layer)
        values, scale, kind = self.weight_of(layer)
        wanted = kind.scale_shape(*values.shape)
        if (values.dtype, scale.dtype, tuple(scale.shape)) != (kind.values, kind.scales, wanted):
            raise InvalidInput(
                f"{type(self.theirs).__name__} left {values.dtype} {list(values.shape)} with scales {scale.dtype} "
                f"{list(scale.shape)}: {kind} is needed; additional_config['dsl']['scaled_linears'] vllm does without"
            )

    def register(self, spec: ScaledLinearSpec, ranges: Sequence[Range], *, handed: bool) -> None:
        """Have the operator find both kernels of the layer; arguments as `ranges_of` has them."""
        # The same in all processes that load the model: compiled graphs have it.
        self.name = f"{type(self.theirs).__name__}: {spec}{', handed on' if handed else ''}"
        self.ranges = ranges
        _layers[self.name] = Beside(spec, self, self.theirs, ranges)

    def called(
        self, x: Rows, weight: Quantized, bias: torch.Tensor | None, out_scale: torch.Tensor | None, how: How
    ) -> tuple[torch.Tensor, Any]:
        activation, parameters = encoded(how.activation)
        formats = ops.encoded_formats(self.x_kind, weight.kind, how)
        tensors = (x.values, x.scale, weight.values, weight.scale, bias)
        options = (formats, activation, parameters, how.interleaved, how.kernel, self.name)
        if how.out_kind is None or out_scale is not None:
            return LAYER(*tensors, out_scale, *options), out_scale
        out, computed = LAYER_DYNAMIC(*tensors, *options)
        return out, computed


class MeasuredRows(Measured, RowScaledKernel):
    """Weights with one scale or one for each output channel."""


class MeasuredBlocks(Measured, BlockScaledKernel):
    """Weights with a scale for each block of 128x128."""

    def operands(self, rows: torch.Tensor) -> Rows:
        """As they are for a kernel of vLLM's that quantises them itself: the operator does so for this package's."""
        return Rows(rows, None) if takes_16_bits(self.theirs) else super().operands(rows)


def measured_kernel_of(theirs: Any, x_kind: ScaledFormat, weight_kind: ScaledFormat, kernel: str | None) -> Any:
    """The kernel of a layer in the place of vLLM's, which it keeps."""
    made = kernel_of(theirs, x_kind, weight_kind, kernel, rows=MeasuredRows, blocks=MeasuredBlocks)
    assert isinstance(made, Measured)
    made.theirs = theirs
    if weight_kind.blocked:
        # A row's bits do not depend on the kernel that vLLM's own engine would have quantised it for.
        of_theirs = of_quantised(theirs).quant_fp8
        made.quant_fp8 = group_quantisation(theirs.config, use_ue8m0=bool(of_theirs.use_ue8m0))
    return made
