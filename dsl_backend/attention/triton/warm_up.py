# SPDX-License-Identifier: Apache-2.0
"""Launches that have nothing to do, so that Triton compiles what a layer's steps will launch.

Triton compiles for dtypes, for which tensors there are, and for addresses and strides that are multiples of 16. What
changes from step to step is none of these (`args.unspecialized`), so one launch for each layout of a layer will do.
"""

from collections.abc import Callable, Iterator

import torch

from dsl_backend.attention.protocol import Operands
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.quant.format import NVFP4

Attend = Callable[[Batch, int, int, Operands], None]


def warm_up(attend: Attend, max_query_len: int, operands: Iterator[Operands], spec: AttentionSpec) -> None:
    """Launch a kernel's `attend` for one request of up to max_query_len queries, which has none and no keys."""
    for one in operands:
        device = one.q.device
        zeros = torch.zeros(2, dtype=torch.int32, device=device)
        paged, per_request = spec.page_size is not None, spec.causality is Causality.PER_REQUEST
        batch = Batch(
            query_start_loc=zeros,
            seq_lens=zeros[:1],
            num_tokens=1,
            max_query_len=max_query_len,
            max_seq_len=1,
            block_table=torch.zeros(1, 1, dtype=torch.int32, device=device) if paged else None,
            kv_start_loc=None if paged else zeros,
            causal=torch.zeros(1, dtype=torch.bool, device=device) if per_request else None,
        )
        attend(batch, 0, max_query_len, one)


def caches(spec: AttentionSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A page of what is written, keys and values, or latent and rope parts, as vLLM lays them out: side by side."""
    dims = spec.written_dims
    if spec.kv.nvfp4:
        keys, values = (
            torch.zeros(1, spec.heads_kv, spec.page_size or 1, spec.kv.width(dim), dtype=torch.uint8, device=device)
            .transpose(1, 2)
            .view(spec.kv_dtype)
            for dim in dims
        )
        return keys, values
    pages = torch.zeros(1, spec.page_size or 1, spec.heads_kv, sum(dims), dtype=spec.kv_dtype, device=device)
    written, beside = pages.split_with_sizes(dims, -1)
    return written, beside


def attended(spec: AttentionSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of one page, or of one packed token."""
    if spec.page_size is None:
        dims = (spec.head_dim, spec.head_dim_v)
        keys, values = (torch.zeros(1, spec.heads_kv, dim, dtype=spec.kv_dtype, device=device) for dim in dims)
        return keys, values
    keys, values = caches(spec, device)
    # The latent part of absorbed MLA is the value, and the whole row is the key.
    return (keys.as_strided((*keys.shape[:-1], spec.head_dim), keys.stride()), keys) if spec.mla else (keys, values)


def query_rows(spec: AttentionSpec, device: torch.device) -> Iterator[torch.Tensor]:
    """[1, heads_q, head_dim] of its own, and beside keys and values if that is another layout to Triton."""
    own = spec.heads_q * spec.head_dim
    beside = own + spec.heads_kv * (spec.head_dim + spec.head_dim_v)
    for width in dict.fromkeys((own, beside if own % 16 != beside % 16 else own)):
        rows = torch.zeros(1, width, dtype=spec.query_dtype, device=device)
        yield rows[:, :own].unflatten(1, (spec.heads_q, spec.head_dim))


def operands_of(spec: AttentionSpec, device: torch.device, lse: bool, sinks: torch.dtype | None) -> Iterator[Operands]:
    """The operands of a layer, of one token."""
    keys, values = attended(spec, device)
    shape = (1, spec.heads_kv) if spec.scales_by_request else (1,)
    scale = torch.ones(shape, device=device) if spec.is_quantized_kv else None
    block_scale = None
    if spec.is_nvfp4_out:
        block_scale = torch.zeros(spec.block_scale_shape(1), dtype=torch.uint8, device=device).view(NVFP4.scales)
    for q in query_rows(spec, device):
        yield Operands(
            q=q,
            q_rope=None,
            keys=keys,
            values=values,
            out=torch.zeros(1, spec.heads_q, spec.output_width, dtype=spec.output_dtype, device=device),
            lse=torch.zeros(1, spec.heads_q, device=device) if lse else None,
            sinks=None if sinks is None else torch.zeros(spec.heads_q, dtype=sinks, device=device),
            alibi_slopes=torch.zeros(spec.heads_q, device=device) if spec.alibi else None,
            k_scale=scale,
            v_scale=scale,
            q_scale=scale if spec.is_fp8_q else None,
            out_scale=torch.ones(1, device=device) if spec.is_quantized_out else None,
            out_block_scale=block_scale,
        )
