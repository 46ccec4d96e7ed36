# SPDX-License-Identifier: Apache-2.0
"""VLLM's arithmetic of experts in MXFP8, MXFP4 and NVFP4 where it has no kernels: what dsl's errors are compared with.

Tokens are quantised by vLLM's functions, multiplied with dequantised weights, and go through vLLM's activations.
"""

from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul, SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import modelopt, mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_mxfp8,
)
from vllm.model_executor.layers.quantization.utils import mxfp8_utils, nvfp4_emulation_utils

from dsl_backend.quant.reference import unpacked_e2m1

# The module of a method, the function that chooses its kernels, and the choice that leaves weights as they are.
CHOICES: tuple[tuple[Any, str, Any], ...] = (
    (mxfp4, "select_mxfp4_moe_backend", Mxfp4MoeBackend.EMULATION),
    (mxfp4, "select_deepseek_v4_mxfp4_moe_backend", Mxfp4MoeBackend.EMULATION),
    (modelopt, "select_nvfp4_moe_backend", NvFp4MoeBackend.EMULATION),
    (compressed_tensors_moe_w4a4_nvfp4, "select_nvfp4_moe_backend", NvFp4MoeBackend.EMULATION),
    (modelopt, "select_mxfp8_moe_backend", Fp8MoeBackend.TRITON_MXFP8),
    (compressed_tensors_moe_w8a8_mxfp8, "select_mxfp8_moe_backend", Fp8MoeBackend.TRITON_MXFP8),
)


def loads_experts() -> None:
    """Lets vLLM's CPU build make experts of these formats. Called in an engine's process."""
    for module, name, backend in CHOICES:
        setattr(module, name, chooses(backend))


def chooses(backend: Any) -> Any:
    return lambda *_, **__: (backend, EmulatedExperts)


def dequantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """An expert's weights, by e8m0 or e4m3 scales as a checkpoint has them."""
    wide = unpacked_e2m1(values, torch.float32) if values.dtype == torch.uint8 else values.float()
    factor = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    return wide * factor.repeat_interleave(wide.shape[1] // factor.shape[1], 1)


def through(x: torch.Tensor, inverse: torch.Tensor | None) -> torch.Tensor:
    """X as it is after quantisation: in NVFP4 by the inverse of its scale, or in MXFP8."""
    if inverse is not None:
        return nvfp4_emulation_utils.ref_nvfp4_quant_dequant(x, inverse, 16)
    return mxfp8_utils.dequant_mxfp8_to_bf16(*mxfp8_utils._mxfp8_e4m3_quantize_torch(x)).to(x.dtype)


class EmulatedExperts(modular_kernel.FusedMoEExpertsModular):
    """Experts in vLLM's standard format, one after the other."""

    expects_unquantized_inputs = True
    activation_format = staticmethod(lambda: modular_kernel.FusedMoEActivationFormat.Standard)
    _supports_current_device = staticmethod(lambda: True)
    _supports_no_act_and_mul = staticmethod(lambda: False)
    _supports_quant_scheme = staticmethod(lambda weight_key, activation_key: True)
    _supports_activation = staticmethod(lambda activation: True)
    _supports_parallel_config = staticmethod(lambda config: True)

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config, quant_config)
        self.act = SwigluOAIAndMul() if moe_config.activation.name == "SWIGLUOAI" else SiluAndMul()

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any, **__: Any) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def apply(self, *, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
        x, ids, weights = hidden_states, given["topk_ids"], given["topk_weights"]
        if given["expert_map"] is not None:
            ids = torch.where(ids < 0, -1, given["expert_map"][ids.clamp(min=0).long()])
        config, out = self.quant_config, torch.zeros(output.shape)
        rows = through(x, config.a1_gscale)
        for expert in ids[ids >= 0].unique().tolist():
            tokens, slots = (ids == expert).nonzero(as_tuple=True)

            def product(
                rows: torch.Tensor, values: Any, scale: Any, alpha: Any, bias: Any, expert: int = expert
            ) -> torch.Tensor:
                weight = dequantised(values[expert], scale[expert])
                made = rows.float() @ (weight if alpha is None else weight * alpha[expert]).T
                return (made if bias is None else made + bias[expert].float()).to(x.dtype)

            first = product(rows[tokens], given["w1"], self.w1_scale, config.g1_alphas, self.w1_bias)
            hidden = through(self.act.forward_native(first), config.a2_gscale)
            made = product(hidden, given["w2"], self.w2_scale, config.g2_alphas, self.w2_bias)
            out.index_add_(0, tokens, made.float() * weights[tokens, slots, None].float())
        output.copy_(out)
