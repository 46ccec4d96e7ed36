# SPDX-License-Identifier: Apache-2.0
"""vLLM's dense attention backends, called as they call their kernels in vLLM 0.26 with full CUDA graphs; in rows of
batch-invariant mode, as with VLLM_BATCH_INVARIANT=1. Without vLLM's copy of FA4, the package flash-attn-4 runs.

The work of a backend's metadata builder, which runs once in a step, is not timed. The arguments that its `forward`
passes for each layer are passed for each layer here. Query quantization for fp8 keys, which vLLM fuses into the
previous operation, is not timed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from dsl_backend.checks import short
from dsl_backend.providers import Limits, Run, provider

from ..check import BF16_LIMITS, FP8_LIMITS
from ..columns import broken, missing
from . import flash_attention_4
from .inputs import Inputs
from .problems import Problem

# vLLM's default capture sizes with 256 sequences or more.
CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
# TritonAttentionMetadataBuilder's constants.
TRITON_SMALLEST_GRID_2D = 128
TRITON_SEGMENTS = 16
# AttentionConfig.flash_attn_max_num_splits_for_cuda_graph
FLASH_SPLITS_IN_GRAPHS = 32


def flash_splits(problem: Problem, version: int = 3) -> int:
    """num_splits of FlashAttention's builders: one in batch-invariant mode, at most so many in graphs, 0 for any."""
    if problem.batch_invariant:
        return 1
    return FLASH_SPLITS_IN_GRAPHS if version == 3 and problem.tokens <= CAPTURE_SIZES[-1] else 0


def limits(problem: Problem) -> Limits:
    """Of kernels that round queries and P to the 8 bits of the keys."""
    return FP8_LIMITS if problem.is_fp8_kv else BF16_LIMITS


def e4m3_only(problem: Problem) -> list[str]:
    """Why a kernel of vLLM does not read the keys, whose only fp8 type on NVIDIA GPUs is e4m3."""
    if problem.is_fp8_kv and problem.kv_dtype != torch.float8_e4m3fn:
        return [f"reads fp8 keys as e4m3, these are {short(problem.kv_dtype)}"]
    return []


def window(problem: Problem) -> tuple[int, int]:
    return (-1, -1) if problem.window_left is None else (problem.window_left, 0)


def queries(problem: Problem, inputs: Inputs) -> list[torch.Tensor]:
    """Each layer's queries as vLLM passes them to the backend: fp8 if the cache is."""
    quantized = problem.kv_dtype if problem.is_fp8_kv else problem.dtype
    return [layer.q.to(quantized) for layer in inputs.layers]


def triton_attention_objections(problem: Problem) -> list[str]:
    unequal = problem.head_dim != problem.head_dim_v
    sizes = ["has keys and values of one size"] if unequal else []
    return missing("vllm") + e4m3_only(problem) + sizes


@provider(
    "decode", "prefill", name="TRITON_ATTN", objections=triton_attention_objections, limits=limits, package="vllm"
)
def triton_attention(problem: Problem, inputs: Inputs) -> Run:
    """TRITON_ATTN: `unified_attention`; splits keys into segments for small batches, not in batch-invariant mode."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    wanted = TRITON_SMALLEST_GRID_2D // problem.heads_kv
    threshold = min(CAPTURE_SIZES, key=lambda size: abs(size - wanted))
    device = inputs.one.device
    padded = 1 << (problem.head_dim - 1).bit_length()
    segments = (threshold, problem.heads_q, TRITON_SEGMENTS)
    segment_out = torch.empty(*segments, padded, dtype=torch.float32, device=device)
    segment_max = torch.empty(segments, dtype=torch.float32, device=device)
    segment_sum = torch.empty(segments, dtype=torch.float32, device=device)
    batch, q = inputs.batch, queries(problem, inputs)
    descale = inputs.one.reshape(()).expand(problem.requests, problem.heads_kv)
    q_descale = inputs.one if problem.is_fp8_kv else None
    mode = get_kv_quant_mode("fp8" if problem.is_fp8_kv else "auto")

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        unified_attention(
            q=q[index],
            k=layer.keys,
            v=layer.values,
            out=layer.out,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=problem.scale,
            causal=True,
            window_size=window(problem),
            block_table=batch.block_table,
            softcap=0,
            q_descale=q_descale,
            k_descale=descale,
            v_descale=descale,
            seq_threshold_3D=None if problem.batch_invariant else threshold,
            num_par_softmax_segments=TRITON_SEGMENTS,
            softmax_segm_output=segment_out,
            softmax_segm_max=segment_max,
            softmax_segm_expsum=segment_sum,
            kv_quant_mode=mode,
        )
        return layer.out

    return run


def flash_attention_objections(problem: Problem, version: int) -> list[str]:
    reasons = ["only FA3 serves fp8 keys"] if problem.is_fp8_kv and version != 3 else e4m3_only(problem)
    if version == 4 and flash_attention_4.home_of() != flash_attention_4.COPY:
        return flash_attention_4.missing() + flash_attention_4.package_objections(problem) + reasons
    if absent := missing("vllm") or broken("vllm.vllm_flash_attn"):
        return [*absent, *reasons]
    from vllm.vllm_flash_attn import fa_version_unsupported_reason

    reason = fa_version_unsupported_reason(version)
    return [reason, *reasons] if reason else reasons


def flash_attention(problem: Problem, inputs: Inputs, version: int) -> Run:
    """FLASH_ATTN of one version; FA3 with the scheduler metadata that its builder makes once in a step."""
    if version == 4 and flash_attention_4.home_of() == flash_attention_4.PACKAGE:
        return flash_attention_4.attention(problem, inputs)
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    batch, q = inputs.batch, queries(problem, inputs)
    keys = [canonicalize_singleton_dim_strides(layer.keys) for layer in inputs.layers]
    values = [canonicalize_singleton_dim_strides(layer.values) for layer in inputs.layers]
    splits, schedule = flash_splits(problem, version), None
    # A schedule depends on the batch.
    if version == 3 and not problem.batch_invariant:
        schedule = get_scheduler_metadata(
            batch_size=problem.requests,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            num_heads_q=problem.heads_q,
            num_heads_kv=problem.heads_kv,
            headdim=problem.head_dim,
            headdim_v=problem.head_dim_v,
            cache_seqlens=batch.seq_lens,
            qkv_dtype=problem.kv_dtype,
            cu_seqlens_q=batch.query_start_loc,
            page_size=problem.page_size,
            causal=True,
            window_size=window(problem),
            num_splits=splits,
        )
    descale = inputs.one.reshape(()).expand(problem.requests, problem.heads_kv)

    def run(index: int) -> torch.Tensor:
        out = inputs.layers[index].out
        flash_attn_varlen_func(
            q=q[index],
            k=keys[index],
            v=values[index],
            out=out,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            seqused_k=batch.seq_lens,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=problem.scale,
            causal=True,
            window_size=list(window(problem)),
            block_table=batch.block_table,
            softcap=0,
            scheduler_metadata=schedule,
            fa_version=version,
            q_descale=descale,
            k_descale=descale,
            v_descale=descale,
            num_splits=splits,
        )
        return out

    return run


def vllm_module() -> Sequence[str]:
    """Where vLLM's FlashAttention is, which has no version of its own."""
    return ("vllm.vllm_flash_attn",)


def source_of(version: int) -> dict[str, Any]:
    """What the report shows of a version, as arguments of `provider`."""
    return {"details": flash_attention_4.source} if version == 4 else {"package": "vllm", "details": vllm_module}


for number in (3, 2, 4):
    provider(
        "decode",
        "prefill",
        name=f"FA{number}",
        objections=partial(flash_attention_objections, version=number),
        limits=limits,
        default=number != 2,
        **source_of(number),
    )(partial(flash_attention, version=number))


def flash_prefill(problem: Problem, inputs: Inputs, version: int) -> Run:
    """MLA's prefill over packed keys, as vLLM's FlashAttnPrefillBackend runs its new tokens."""
    if version == 4 and flash_attention_4.home_of() == flash_attention_4.PACKAGE:
        return flash_attention_4.attention(problem, inputs)
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    batch = inputs.batch

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        flash_attn_varlen_func(
            q=layer.q,
            k=layer.keys,
            v=layer.values,
            cu_seqlens_q=batch.query_start_loc,
            cu_seqlens_k=batch.kv_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=problem.scale,
            causal=True,
            out=layer.out,
            fa_version=version,
        )
        return layer.out

    return run


for number in (3, 2, 4):
    provider(
        "mla-prefill",
        name=f"FA{number}",
        objections=partial(flash_attention_objections, version=number),
        default=number != 2,
        **source_of(number),
    )(partial(flash_prefill, version=number))
