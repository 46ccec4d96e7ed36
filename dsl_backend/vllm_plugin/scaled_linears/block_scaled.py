# SPDX-License-Identifier: Apache-2.0
"""This package's kernels of NVFP4 and MXFP8 linear layers, as vLLM's methods call them, and which layers have them.

Weights and inputs have a scale for each 16 or 32 columns of k, which SM100's matrix products apply; those of NVFP4 have
one float32 scale of the whole matrix too. Checkpoints are ModelOpt's and those of compressed-tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.linear.scaled import api, dispatch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import MXFP8, NVFP4, ScaledFormat
from dsl_backend.quant.reference import Quantized, swizzled
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin.scaled_linears.find import NOTHING_MEASURED, Service, is_pre_processed
from dsl_backend.vllm_plugin.scaled_linears.handed import Handed, Link, how_of
from dsl_backend.vllm_plugin.scaled_linears.operands import mxfp8_input, nvfp4_input
from dsl_backend.vllm_plugin.served_layers import holder_of, layers_of


class BlockScaledMma:
    """What kernels of both formats share.

    Args:
        kernel: the name of the kernel that is asked for; None is the best that serves.
        out_dtype: of an output that is not quantised.

    Attributes:
        kind: the format of x and of the weight.
        link: with it the layer applies the activation too.
    """

    kind: ScaledFormat

    def __init__(self, kernel: str | None, out_dtype: torch.dtype) -> None:
        self.kernel, self.out_dtype = kernel, out_dtype
        self.link: Link | None = None

    @property
    def x_kind(self) -> ScaledFormat:
        return self.kind

    @property
    def weight_kind(self) -> ScaledFormat:
        return self.kind

    def process_weights_after_loading(self, layer: Any) -> None:
        """Swizzle the weight's scales, once."""
        scale = layer.weight_scale.data.view(self.kind.scales)
        layer.weight_scale = nn.Parameter(swizzled(scale), requires_grad=False)

    def apply_weights(self, layer: Any, x: Any, bias: torch.Tensor | None = None) -> Any:
        """Map x [..., k], or what a linked layer hands on, to [..., n]."""
        if isinstance(x, Handed):
            lead, rows = x.values.shape[:-1], Quantized(x.values.view(-1, x.values.shape[-1]), x.scale, self.kind)
        else:
            lead, rows = x.shape[:-1], self.quantised(layer, x.reshape(-1, x.shape[-1]))
        weight = Quantized(layer.weight, layer.weight_scale, self.kind)
        how = how_of(self.link, self.out_dtype, self.kind, self.kernel)
        consumer = None if self.link is None else self.link.consumer
        out_scale = None if consumer is None else self.scale_of_input(consumer)
        out, scale = api.called(rows, weight, bias, out_scale, how, self.alpha_of(layer))
        out = out.view(*lead, out.shape[-1])
        return out if scale is None else Handed(out, scale)

    def quantised(self, layer: Any, x: torch.Tensor) -> Quantized:
        """X [rows, k] in the layer's format."""
        raise NotImplementedError

    def alpha_of(self, layer: Any) -> torch.Tensor | None:
        """The product of the scales of both whole matrices."""
        return None

    def scale_of_input(self, layer: Any) -> torch.Tensor | None:
        """The scale of a layer's whole input, [1]."""
        return None


class Nvfp4Kernel(BlockScaledMma):
    """The kernel of NVFP4 layers."""

    kind = NVFP4

    def quantised(self, layer: Any, x: torch.Tensor) -> Quantized:
        return nvfp4_input(x, layer.input_global_scale_inv)

    def alpha_of(self, layer: Any) -> torch.Tensor:
        return layer.alpha.view(1)

    def scale_of_input(self, layer: Any) -> torch.Tensor:
        return layer.input_global_scale.view(1)


class Mxfp8Kernel(BlockScaledMma):
    """The kernel of MXFP8 layers."""

    kind = MXFP8

    def quantised(self, layer: Any, x: torch.Tensor) -> Quantized:
        return mxfp8_input(x)


def nvfp4_base() -> Any:
    """VLLM's base class of NVFP4 kernels; None in versions without one."""
    try:
        from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
    except ImportError:
        return None
    return NvFp4LinearKernel


def mxfp8_base() -> Any:
    """VLLM's base class of MXFP8 kernels; None in versions without one."""
    try:
        from vllm.model_executor.kernels.linear.mxfp8 import Mxfp8LinearKernel
    except ImportError:
        return None
    return Mxfp8LinearKernel


def against_nvfp4(layer: Any) -> str:
    """Why an NVFP4 layer stays vLLM's; empty where nothing is against it."""
    quantised = any(hasattr(layer, name) for name in ("input_scale", "input_global_scale"))
    return "" if quantised else "its input is not quantised"


def against_mxfp8(layer: Any) -> str:
    """Why an MXFP8 layer stays vLLM's; empty where nothing is against it."""
    return "it multiplies batches of matrices" if getattr(layer, "is_bmm", False) else ""


@dataclass(frozen=True)
class Layers:
    """Layers of a format.

    Attributes:
        name: in log lines.
        ours: their kernel.
        theirs: vLLM's base class of their kernels.
        against: why a layer stays vLLM's; empty where nothing is against it.
    """

    name: str
    ours: type[BlockScaledMma]
    theirs: Callable[[], Any]
    against: Callable[[Any], str]

    def holder_of(self, layer: Any) -> Any:
        """What has a layer's kernel; None: it has none of this format."""
        return holder_of(layer, self.theirs())

    def of(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """The linear layers of a model that have a kernel of this format, not this package's, with their names."""
        return layers_of(model, self.theirs(), BlockScaledMma)

    def judge(self, layer: Any, target: Target, service: Service) -> ScaledLinearSpec | str:
        """The spec of a layer that is served; or why it stays vLLM's."""
        if service.measured:
            return NOTHING_MEASURED
        if is_pre_processed():
            return "its weights were loaded as another kernel had processed them"
        if "forward" in vars(layer):
            return f"another forward was put into {type(layer).__name__}"
        if reason := self.against(layer):
            return reason
        dtype, kind = layer.params_dtype, self.ours.kind
        n, k = layer.output_size_per_partition, layer.input_size_per_partition
        try:
            spec = ScaledLinearSpec(n=n, k=k, x=kind, weight=kind, dtype=dtype, bias=layer.bias is not None)
            dispatch.choose(spec, target, service.kernel)
        except (InvalidInput, Unsupported) as error:
            return str(error)
        return spec

    def replace(self, layer: Any, service: Service) -> None:
        """Replace the kernel of a layer's method."""
        self.holder_of(layer).kernel = class_of(self)(service.kernel, layer.params_dtype)
        # What the kernel before this one would have taken from a fused activation or norm.
        if hasattr(layer, "_input_quant_key"):
            del layer._input_quant_key


@cache
def class_of(layers: Layers) -> Any:
    """The kernel of such layers as one of vLLM's; one class for all of them."""

    class OfVllm(layers.ours, layers.theirs()):  # type: ignore[misc, name-defined]
        is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
        can_implement = classmethod(lambda cls, config: (True, None))

    return OfVllm


NVFP4_LAYERS = Layers("NVFP4", Nvfp4Kernel, nvfp4_base, against_nvfp4)
MXFP8_LAYERS = Layers("MXFP8", Mxfp8Kernel, mxfp8_base, against_mxfp8)
FORMATS = (NVFP4_LAYERS, MXFP8_LAYERS)


def is_block_scaled(layer: Any) -> bool:
    """Whether a linear layer has a kernel of one of these formats, whoever's."""
    return any(form.holder_of(layer) is not None for form in FORMATS)


def kernel_of(layer: Any) -> BlockScaledMma | None:
    """This package's kernel of a linear layer; None where it has none of these formats."""
    kernels = (getattr(form.holder_of(layer), "kernel", None) for form in FORMATS)
    return next((kernel for kernel in kernels if isinstance(kernel, BlockScaledMma)), None)
