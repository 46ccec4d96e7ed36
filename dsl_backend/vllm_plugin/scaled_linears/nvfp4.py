# SPDX-License-Identifier: Apache-2.0
"""This package's kernels of NVFP4 linear layers, as vLLM's methods call them, and which layers have them.

Weights and inputs are e2m1 with a scale in e4m3 for 16 columns of k and one float32 scale of the whole matrix, as
ModelOpt and compressed-tensors store them. Each layer quantises its own input: linked layers would need an output in
NVFP4.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.linear.scaled import api, dispatch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import NVFP4
from dsl_backend.quant.reference import Quantized, mma_quantized, swizzled
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin.scaled_linears.find import NOTHING_MEASURED, Service, is_pre_processed

KERNEL = "kernel"


def kernels_base() -> Any:
    """VLLM's base class of NVFP4 kernels; None in versions without one."""
    try:
        from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
    except ImportError:
        return None
    return NvFp4LinearKernel


def holder_of(layer: Any) -> Any:
    """What has a layer's NVFP4 kernel as `kernel`: its method, or the scheme of a compressed-tensors layer; None."""
    base = kernels_base()
    for one in (layer.quant_method, getattr(layer, "scheme", None)):
        if base is not None and isinstance(getattr(one, KERNEL, None), base):
            return one
    return None


def layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The linear layers of a model that have a kernel of NVFP4, with their names."""
    from vllm.model_executor.layers.linear import LinearBase

    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            holder = holder_of(module)
            if holder is not None and not isinstance(getattr(holder, KERNEL), Nvfp4Kernel):
                yield name, module


def judge(layer: Any, target: Target, service: Service) -> ScaledLinearSpec | str:
    """The spec of a layer that is served; or why it stays vLLM's."""
    if service.measured:
        return NOTHING_MEASURED
    if is_pre_processed():
        return "its weights were loaded as another kernel had processed them"
    if "forward" in vars(layer):
        return f"another forward was put into {type(layer).__name__}"
    if not any(hasattr(layer, name) for name in ("input_scale", "input_global_scale")):
        return "its input is not quantised"
    dtype = layer.params_dtype
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    try:
        spec = ScaledLinearSpec(n=n, k=k, x=NVFP4, weight=NVFP4, dtype=dtype, bias=layer.bias is not None)
        dispatch.choose(spec, target, service.kernel)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return spec


def replace(layer: Any, service: Service) -> None:
    """Replace the kernel of a layer's method."""
    setattr(holder_of(layer), KERNEL, kernel_class()(service.kernel))
    # What the kernel before this one would have taken from a fused activation or norm.
    if hasattr(layer, "_input_quant_key"):
        del layer._input_quant_key


def quantised(x: torch.Tensor, inverse: torch.Tensor) -> Quantized:
    """X [rows, k] in NVFP4, by the inverse of the scale of the whole matrix."""
    if not x.is_cuda:
        return mma_quantized(x, NVFP4, 1 / inverse)
    from vllm import _custom_ops as ops

    values, scale = ops.scaled_fp4_quant(x, inverse)
    return Quantized(values, scale.view(NVFP4.scales), NVFP4)


class Nvfp4Kernel:
    """The kernel of NVFP4 layers.

    Args:
        kernel: the name of the kernel that is asked for; None is the best that serves.
    """

    def __init__(self, kernel: str | None) -> None:
        self.kernel = kernel

    def process_weights_after_loading(self, layer: Any) -> None:
        """Swizzle the weight's scales, once."""
        layer.weight_scale = nn.Parameter(swizzled(layer.weight_scale.data), requires_grad=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [..., k] to [..., n]."""
        rows = x.reshape(-1, x.shape[-1])
        weight = Quantized(layer.weight, layer.weight_scale, NVFP4)
        out = api.scaled_linear(
            quantised(rows, layer.input_global_scale_inv),
            weight,
            bias,
            dtype=x.dtype,
            kernel=self.kernel,
            alpha=layer.alpha.view(1),
        )
        return out.view(*x.shape[:-1], out.shape[-1])


@cache
def kernel_class() -> Any:
    """`Nvfp4Kernel` as one of vLLM's kernels; one class for all layers."""

    class OfVllm(Nvfp4Kernel, kernels_base()):  # type: ignore[misc]
        is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
        can_implement = classmethod(lambda cls, config: (True, None))

    return OfVllm
