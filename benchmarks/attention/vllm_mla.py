# SPDX-License-Identifier: Apache-2.0
"""vLLM's MLA backends, called as they call their kernels in vLLM 0.26 with full CUDA graphs; in rows of
batch-invariant mode, as with VLLM_BATCH_INVARIANT=1. And FA4's MLA decode, which vLLM does not call.

Only the attention kernels are timed. In vLLM each layer of TRITON_MLA also fills its output with zeros and concatenates
the two parts of the query; that is not timed.
"""

import torch
from dsl_backend.providers import Launch, Run, provider

from ..columns import broken, missing, of_capability
from . import flash_attention_4 as fa4
from .inputs import Inputs, repage
from .problems import Problem
from .vllm_dense import e4m3_only, flash_splits, limits, queries, vllm_module

# The size of page that FA4 loads with TMA.
FA4_PAGE = 128
# TritonMLAImpl's constants.
TRITON_KEYS_PER_SPLIT = 512
TRITON_BLOCKS_PER_SM = 2
FLASHMLA_PAGE = 64


def triton_mla_objections(problem: Problem) -> list[str]:
    reasons = missing("vllm")
    if max(problem.q_lens) > 1:
        reasons.append("decodes one query a request")
    return reasons + e4m3_only(problem)


@provider("mla-decode", name="TRITON_MLA", objections=triton_mla_objections, limits=limits, package="vllm")
def triton_mla(problem: Problem, inputs: Inputs) -> Run:
    """TRITON_MLA: `decode_attention_fwd`."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    device, batch = inputs.one.device, inputs.batch
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    ideal = 1 << (max(1, batch.max_seq_len // TRITON_KEYS_PER_SPLIT) - 1).bit_length()
    splits = 1 if problem.batch_invariant else min(ideal, sm_count * TRITON_BLOCKS_PER_SM)
    lse = torch.zeros(problem.tokens, problem.heads_q, dtype=problem.dtype, device=device)
    shape = (problem.tokens, problem.heads_q, splits, problem.head_dim_v + 1)
    partials = torch.empty(shape, dtype=torch.float32, device=device)
    scale = inputs.one.reshape(())

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        decode_attention_fwd(
            layer.q,
            layer.keys,
            layer.values,
            layer.out,
            lse,
            batch.block_table,
            batch.seq_lens,
            partials,
            splits,
            problem.scale,
            problem.page_size,
            k_scale=scale,
            v_scale=scale,
            is_mla=True,
        )
        return layer.out

    return run


def flash_attn_mla_objections(problem: Problem) -> list[str]:
    reasons = ["vLLM's FA3 for MLA does not read fp8 keys"] if problem.is_fp8_kv else []
    if absent := missing("vllm") or broken("vllm.vllm_flash_attn"):
        return [*absent, *reasons]
    from vllm.vllm_flash_attn import fa_version_unsupported_reason

    reason = fa_version_unsupported_reason(3)
    return [reason, *reasons] if reason else reasons


@provider(
    "mla-decode", name="FLASH_ATTN_MLA", objections=flash_attn_mla_objections, package="vllm", details=vllm_module
)
def flash_attn_mla(problem: Problem, inputs: Inputs) -> Run:
    """FLASH_ATTN_MLA: FA3 over the rope part, with the latent part as `q_v`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    batch, latent = inputs.batch, problem.head_dim_v
    rope = problem.head_dim - latent
    splits = flash_splits(problem)
    schedule = get_scheduler_metadata(
        batch_size=problem.requests,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        num_heads_q=problem.heads_q,
        num_heads_kv=1,
        headdim=rope,
        cache_seqlens=batch.seq_lens,
        qkv_dtype=problem.kv_dtype,
        headdim_v=latent,
        page_size=problem.page_size,
        cu_seqlens_q=batch.query_start_loc,
        causal=True,
        num_splits=splits,
    )

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        q_latent, q_rope = torch.split(layer.q, [latent, rope], dim=-1)
        result: torch.Tensor = flash_attn_varlen_func(
            q=q_rope,
            k=layer.cache[..., latent:].unsqueeze(-2),
            v=layer.cache[..., :latent].unsqueeze(-2),
            q_v=q_latent,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            softmax_scale=problem.scale,
            causal=True,
            fa_version=3,
            scheduler_metadata=schedule,
            num_splits=splits,
        )
        return result

    return run


def flash_attention_4_objections(problem: Problem) -> list[str]:
    reasons = of_capability(fa4.LATENT_MAJORS, "has latents on") or fa4.missing(latent=True)
    if problem.is_fp8_kv:
        reasons.append("does not read fp8 keys of latents")
    if problem.batch_invariant:
        reasons.append("vLLM does not use it for latents")
    return reasons


@provider("mla-decode", name="FA4", objections=flash_attention_4_objections, details=fa4.latent_source)
def flash_attention_4(problem: Problem, inputs: Inputs) -> Run:
    """FA4 over the rope part, with the latent part as `qv`; it does not split keys."""
    home = fa4.home_of(latent=True)
    assert home is not None
    function, batch, latent = fa4.function_of(home), inputs.batch, problem.head_dim_v
    table, caches = repage(problem, inputs, FA4_PAGE)

    def run(index: int) -> torch.Tensor:
        q, cache = inputs.layers[index].q, caches[index].unsqueeze(-2)
        result: torch.Tensor = function(
            q[..., latent:],
            cache[..., latent:],
            cache[..., :latent],
            qv=q[..., :latent],
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            page_table=table,
            softmax_scale=problem.scale,
            causal=True,
        )[0]
        return result

    return run


def flash_mla_objections(problem: Problem) -> list[str]:
    reasons = missing("vllm")
    if len(set(problem.q_lens)) > 1:
        reasons.append("needs the same number of queries in every request")
    if problem.batch_invariant:
        reasons.append("vLLM gives it one SM in batch-invariant mode")
    reasons += e4m3_only(problem)
    if reasons:
        return reasons
    from vllm.v1.attention.ops.flashmla import is_flashmla_dense_supported

    reason = is_flashmla_dense_supported()[1]
    return [reason] if reason else []


def flash_mla_fp8(problem: Problem, inputs: Inputs) -> Launch:
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache_fp8, get_mla_metadata_dense_fp8

    table, caches = repage(problem, inputs, FLASHMLA_PAGE)
    q_len, q = problem.q_lens[0], queries(problem, inputs)
    schedule, splits = get_mla_metadata_dense_fp8(inputs.batch.seq_lens, q_len * problem.heads_q, 1)

    def run(index: int) -> torch.Tensor:
        result, _ = flash_mla_with_kvcache_fp8(
            q=q[index].view(problem.requests, q_len, problem.heads_q, problem.head_dim),
            k_cache=caches[index].unsqueeze(-2),
            block_table=table,
            cache_seqlens=inputs.batch.seq_lens,
            head_dim_v=problem.head_dim_v,
            tile_scheduler_metadata=schedule,
            num_splits=splits,
            softmax_scale=problem.scale,
            causal=True,
            descale_q=inputs.one,
            descale_k=inputs.one,
        )
        return result

    return Launch(run, lambda result: result.flatten(0, 1))


@provider("mla-decode", name="FLASHMLA", objections=flash_mla_objections, limits=limits, package="vllm")
def flash_mla(problem: Problem, inputs: Inputs) -> Launch:
    """FLASHMLA, on the same keys in pages of 64, the only size that it supports."""
    if problem.is_fp8_kv:
        return flash_mla_fp8(problem, inputs)
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    table, caches = repage(problem, inputs, FLASHMLA_PAGE)
    q_len = problem.q_lens[0]
    # Still empty: the first call computes the schedule, and later layers reuse it.
    schedule, _ = get_mla_metadata()

    def run(index: int) -> torch.Tensor:
        result, _ = flash_mla_with_kvcache(
            q=inputs.layers[index].q.view(problem.requests, q_len, problem.heads_q, problem.head_dim),
            k_cache=caches[index].unsqueeze(-2),
            block_table=table,
            cache_seqlens=inputs.batch.seq_lens,
            head_dim_v=problem.head_dim_v,
            tile_scheduler_metadata=schedule,
            softmax_scale=problem.scale,
            causal=True,
            is_fp8_kvcache=False,
        )
        return result

    return Launch(run, lambda result: result.flatten(0, 1))
