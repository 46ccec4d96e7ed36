# SPDX-License-Identifier: Apache-2.0
"""Operands of quantised layers: scales of blocks as layers store them, and inputs as vLLM quantises them."""

from typing import Any

import torch

from dsl_backend.errors import InvalidInput
from dsl_backend.quant.format import MXFP8, NVFP4
from dsl_backend.quant.reference import Quantized, mma_quantized


def block_scale(layer: Any) -> tuple[str, torch.Tensor] | None:
    """A weight's scales of blocks, with the name of their parameter; None where there are none.

    `Fp8LinearMethod` names them weight_scale_inv, compressed-tensors weight_scale. vLLM 0.26 has no `block_scale` among
    a kernel's parameters, which tells them apart.
    """
    for name in ("weight_scale_inv", "weight_scale"):
        if (scale := getattr(layer, name, None)) is not None:
            return name, scale
    return None


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The same scales as float8_e8m0fnu. Raises InvalidInput: one is no power of two."""
    if scale.dtype == MXFP8.scales:
        return scale
    stored = scale.to(MXFP8.scales)
    if not torch.equal(stored.to(torch.float32), scale):
        wrong = scale[stored.to(torch.float32) != scale].flatten()[0].item()
        raise InvalidInput(
            f"a scale of the weight is {wrong}: the checkpoint's config says scale_fmt ue8m0, powers of two; "
            "additional_config['dsl']['scaled_linears'] vllm does without"
        )
    return stored


def nvfp4_input(x: torch.Tensor, inverse: torch.Tensor) -> Quantized:
    """X [rows, k], in 16 bits, in NVFP4, by the inverse of the scale of the whole matrix."""
    if not x.is_cuda:
        return mma_quantized(x, NVFP4, 1 / inverse)
    from vllm import _custom_ops as ops

    values, scale = ops.scaled_fp4_quant(x, inverse)
    return Quantized(values, scale.view(NVFP4.scales), NVFP4)


def mxfp8_input(x: torch.Tensor) -> Quantized:
    """X [rows, k], in 16 bits, in MXFP8."""
    if not x.is_cuda:
        return mma_quantized(x, MXFP8)
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize

    values, scale = mxfp8_e4m3_quantize(x, is_sf_swizzled_layout=True)
    return Quantized(values, scale.view(MXFP8.scales).view(MXFP8.scale_shape(*x.shape)), MXFP8)
