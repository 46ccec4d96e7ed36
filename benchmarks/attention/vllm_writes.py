# SPDX-License-Identifier: Apache-2.0
"""vLLM's cache writers: the CUDA ones of FLASH_ATTN and the MLA backends, and the Triton one of TRITON_ATTN."""

import torch
from dsl_backend.providers import Run, provider

from ..columns import missing
from .problems import WriteProblem
from .writes import WriteInputs


def cuda_writer_objections(problem: WriteProblem) -> list[str]:
    return missing("vllm")


@provider("write-kv", name="vllm C++", objections=cuda_writer_objections, package="vllm")
def cuda_writer(problem: WriteProblem, inputs: WriteInputs) -> Run:
    """`reshape_and_cache_flash`, and for MLA `concat_and_cache_mla`."""
    from vllm import _custom_ops as ops

    kind = "auto" if problem.kv_dtype == problem.dtype else "fp8"
    scale = inputs.one.reshape(())

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        if problem.mla:
            key, value = layer.key.squeeze(1), layer.value.squeeze(1)
            ops.concat_and_cache_mla(key, value, layer.cache, inputs.slots, kind, scale)
        else:
            ops.reshape_and_cache_flash(
                layer.key, layer.value, layer.key_cache, layer.value_cache, inputs.slots, kind, scale, scale
            )
        return layer.cache

    return run


def triton_writer_objections(problem: WriteProblem) -> list[str]:
    reasons = missing("vllm")
    if problem.mla:
        reasons.append("writes separate keys and values only")
    return reasons


@provider("write-kv", name="vllm Triton", objections=triton_writer_objections, package="vllm")
def triton_writer(problem: WriteProblem, inputs: WriteInputs) -> Run:
    """`triton_reshape_and_cache_flash`."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    kind = "auto" if problem.kv_dtype == problem.dtype else "fp8"
    scale = inputs.one.reshape(())

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        triton_reshape_and_cache_flash(
            layer.key, layer.value, layer.key_cache, layer.value_cache, inputs.slots, kind, scale, scale
        )
        return layer.cache

    return run
