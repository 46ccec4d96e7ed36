# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache writers: the CUDA ones of FLASH_ATTN and the MLA backends, and the Triton one of TRITON_ATTN."""

import torch

from ..case import Launch, Limits
from ..check import EXACT
from .problems import WriteProblem
from .vllm_dense import missing
from .writes import WriteInputs


class CudaWriter:
    """`reshape_and_cache_flash`, and for MLA `concat_and_cache_mla`."""

    name = "vllm C++"
    default = True

    def objections(self, problem: WriteProblem) -> list[str]:
        return missing("vllm")

    def limits(self, problem: WriteProblem) -> Limits:
        return EXACT

    def prepare(self, problem: WriteProblem, inputs: WriteInputs) -> Launch:
        from vllm import _custom_ops as ops

        kind = "auto" if problem.kv_dtype == problem.dtype else "fp8"
        scale = inputs.one.reshape(())

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            if problem.latent:
                key, value = layer.key.squeeze(1), layer.value.squeeze(1)
                ops.concat_and_cache_mla(key, value, layer.cache, inputs.slots, kind, scale)
            else:
                ops.reshape_and_cache_flash(
                    layer.key, layer.value, layer.key_cache, layer.value_cache, inputs.slots, kind, scale, scale
                )
            return layer.cache

        return Launch(run, inputs.written)


class TritonWriter:
    """`triton_reshape_and_cache_flash`."""

    name = "vllm Triton"
    default = True

    def objections(self, problem: WriteProblem) -> list[str]:
        reasons = missing("vllm")
        if problem.latent:
            reasons.append("writes separate keys and values only")
        return reasons

    def limits(self, problem: WriteProblem) -> Limits:
        return EXACT

    def prepare(self, problem: WriteProblem, inputs: WriteInputs) -> Launch:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

        kind = "auto" if problem.kv_dtype == problem.dtype else "fp8"
        scale = inputs.one.reshape(())

        def run(index: int) -> torch.Tensor:
            layer = inputs.layers[index]
            triton_reshape_and_cache_flash(
                layer.key, layer.value, layer.key_cache, layer.value_cache, inputs.slots, kind, scale, scale
            )
            return layer.cache

        return Launch(run, inputs.written)
