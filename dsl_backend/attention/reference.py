# SPDX-License-Identifier: Apache-2.0
"""Attention in eager torch: the oracle of the tests, and the server's kernels on a CPU.

It follows the definition, one request after another, in any compute dtype up to float64. It reads lengths on the host;
the device kernels never do.
"""

from functools import partial

import torch

from dsl_backend.attention.protocol import Kernel, Launch, Operands, Writes
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.checks import require
from dsl_backend.errors import InvalidInput
from dsl_backend.quant.format import E2M1_MAX, E4M3, KV_BLOCK, format_of, is_fp8
from dsl_backend.quant.reference import packed_e2m1, swizzled_places, unpacked_e2m1
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def gather_keys(rows: torch.Tensor, spec: AttentionSpec, batch: Batch, request: int, kv_len: int) -> torch.Tensor:
    """One request's rows [kv_len, heads_kv, dim] of a paged [pages, page_size, heads_kv, dim] or packed tensor.

    NVFP4's are float32, the scales of blocks included.
    """
    if spec.page_size is None:
        assert batch.kv_start_loc is not None
        first = int(batch.kv_start_loc[request])
        return rows[first : first + kv_len]
    assert batch.block_table is not None
    needed = -(-kv_len // spec.page_size)
    pages = batch.block_table[request, :needed].long()
    require(len(pages) == needed, f"request {request} has {kv_len} keys: block_table has {len(pages)} pages for them")
    outside = pages[(pages < 0) | (pages >= rows.shape[0])]
    if len(outside):
        raise InvalidInput(
            f"block_table has page {int(outside[0])} of request {request}: the cache has pages 0 to {rows.shape[0] - 1}"
        )
    if spec.kv.nvfp4:
        elements, scales = (part[pages].flatten(0, 1)[:kv_len] for part in spec.kv.parts(rows))
        return dequantize_nvfp4(elements, scales)
    return indexable(rows)[pages].view(rows.dtype).flatten(0, 1)[:kv_len]


def dequantize_nvfp4(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Elements times the scales of their blocks, [..., dim] float32: exact, as it is in every float of 16 bits."""
    numbers = unpacked_e2m1(elements.flatten(0, -2), torch.float32).view(*elements.shape[:-1], 2 * elements.shape[-1])
    return numbers * scales.view(E4M3.dtype).float().repeat_interleave(KV_BLOCK, -1)


def indexable(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that torch can gather and scatter: it has no indexing for fp8 on a CPU."""
    return rows.view(torch.uint8) if format_of(rows.dtype).quantized else rows


def visible(spec: AttentionSpec, q_len: int, kv_len: int, causal: bool, device: torch.device) -> torch.Tensor:
    """[q_len, kv_len] bool: which keys each query sees."""
    positions = torch.arange(kv_len - q_len, kv_len, device=device)
    distance = torch.arange(kv_len, device=device)[None, :] - positions[:, None]
    keep = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if causal:
        keep &= distance <= 0
    if spec.window_left is not None:
        keep &= distance >= -spec.window_left
    if spec.window_right is not None:
        keep &= distance <= spec.window_right
    return keep


def product_pv(probs: torch.Tensor, values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """P [..., q_len, kv_len] @ V [..., kv_len, dim], in which a masked key adds nothing, NaN and infinity included.

    Args:
        keep: [q_len, kv_len] bool: which keys a row sees. 0 * NaN would be NaN.
    """
    out = probs @ values
    if out.isfinite().all():
        return out
    not_finite = (~values.isfinite()).any(-1).flatten(0, -2).any(0).nonzero().flatten()
    finite = values.clone()
    finite[..., not_finite, :] = 0
    out = probs @ finite
    for key in not_finite.tolist():
        rows = keep[:, key]
        out[..., rows, :] += probs[..., rows, key, None] * values[..., key, None, :]
    return out


def masked_scores(
    spec: AttentionSpec,
    batch: Batch,
    request: int,
    products: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of a request's queries, -inf where a key is masked, and which keys a query sees.

    Args:
        products: q·k, [heads_kv, group, q_len, kv_len].

    Returns:
        scores [heads_kv, group, q_len, kv_len], keep [q_len, kv_len] bool.
    """
    (q_len, kv_len), device, dtype = products.shape[2:], products.device, products.dtype
    scores = products * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if alibi_slopes is not None:
        positions = torch.arange(kv_len - q_len, kv_len, device=device)
        distance = (positions[:, None] - torch.arange(kv_len, device=device)[None, :]).abs()
        slopes = alibi_slopes.to(dtype).view(spec.heads_kv, spec.group, 1, 1)
        scores = scores - slopes * distance.to(dtype)
    causal = spec.causality is Causality.CAUSAL
    if spec.causality is Causality.PER_REQUEST:
        assert batch.causal is not None
        causal = bool(batch.causal[request])
    keep = visible(spec, q_len, kv_len, causal, device)
    return scores.masked_fill(~keep, -torch.inf), keep


def own_scale(spec: AttentionSpec, scale: torch.Tensor, request: int) -> torch.Tensor:
    """A request's scale, [1, 1] or [heads_kv, 1], of one that `attention` takes."""
    return (scale[request] if spec.scales_by_request else scale).view(-1, 1)


def attention(
    spec: AttentionSpec,
    batch: Batch,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by its definition.

    Args:
        q: [tokens, heads_q, head_dim].
        keys, values: [pages, page_size, heads_kv, dim] or packed [tokens_kv, heads_kv, dim].
        sinks, alibi_slopes: [heads_q].
        k_scale, v_scale: a real value is the stored fp8 or NVFP4 value times its scale: one number, [heads_kv], or with
            `spec.scales_by_request` [requests, heads_kv].
        q_scale: the same of fp8 queries.
        compute_dtype: all arithmetic and every intermediate; float64 makes the result an oracle.

    Returns:
        out [tokens, heads_q, head_dim_v] and lse [tokens, heads_q] (natural log), both in compute_dtype. Rows that
        belong to no request are 0 and -inf; so are rows that see no key.
    """
    out = q.new_zeros((q.shape[0], spec.heads_q, spec.head_dim_v), dtype=compute_dtype)
    lse = q.new_full((q.shape[0], spec.heads_q), -torch.inf, dtype=compute_dtype)
    cu_seqlens_q, kv_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for request, kv_len in enumerate(kv_lens):
        first, last = cu_seqlens_q[request], cu_seqlens_q[request + 1]
        q_len = last - first
        if q_len == 0:
            continue
        k = gather_keys(keys, spec, batch, request, kv_len).to(compute_dtype)
        v = gather_keys(values, spec, batch, request, kv_len).to(compute_dtype)
        if k_scale is not None and spec.is_quantized_kv:
            k = k * own_scale(spec, k_scale, request).to(compute_dtype)
        if v_scale is not None and spec.is_quantized_kv:
            v = v * own_scale(spec, v_scale, request).to(compute_dtype)
        # [heads_kv, group, q_len, dim] against [heads_kv, 1, kv_len, dim]
        rows = q[first:last].to(compute_dtype).unflatten(1, (spec.heads_kv, spec.group)).permute(1, 2, 0, 3)
        if q_scale is not None:
            rows = rows * own_scale(spec, q_scale, request).to(compute_dtype)[:, None, None]
        products = rows @ k.permute(1, 2, 0)[:, None]
        scores, keep = masked_scores(spec, batch, request, products, alibi_slopes)
        logits = scores
        if sinks is not None:
            sink = sinks.to(compute_dtype).view(spec.heads_kv, spec.group, 1, 1).expand(-1, -1, q_len, 1)
            logits = torch.cat([scores, sink], dim=-1)
        probs = torch.softmax(logits, dim=-1).masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0)
        probs, row_lse = probs[..., :kv_len], torch.logsumexp(logits, dim=-1)
        product = product_pv(probs, v.transpose(0, 1)[:, None], keep)
        out[first:last] = product.permute(2, 0, 1, 3).flatten(1, 2)
        lse[first:last] = row_lse.permute(2, 0, 1).flatten(1, 2)
    return out, lse


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store rows of key and value [tokens, heads_kv, dim] at their slots; a negative slot is skipped.

    The caches are [pages, page_size, heads_kv, dim]; slot s is page s // page_size, token s % page_size. An fp8 or
    NVFP4 cache stores x / scale, saturated at the format's largest value.

    Raises:
        InvalidInput: a slot lies beyond the cache; nothing was written.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    capacity = key_cache.shape[0] * key_cache.shape[1]
    most = int(slots.max()) if len(slots) else -1
    require(most < capacity, f"slot_mapping has slot {most}: the caches have slots 0 to {capacity - 1}")
    pages, tokens = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for rows, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        written = rows[: slot_mapping.shape[0]][kept]
        store(cache, (pages, tokens), written, scale)


def store(cache: torch.Tensor, where: tuple[torch.Tensor, ...], rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Quantize rows [tokens, heads_kv, dim], and store them in the pages and tokens `where` of a cache."""
    kind = format_of(cache.dtype)
    if kind.nvfp4:
        for part, stored in zip(kind.parts(cache), quantize_nvfp4(rows, scale), strict=True):
            part[where] = stored
    else:
        indexable(cache)[where] = indexable(quantize(rows, cache.dtype, scale))


def quantize_nvfp4(rows: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, heads_kv, dim] as NVFP4: packed elements [..., dim / 2], scales of blocks [..., dim / 16], bytes.

    Args:
        scale: one number, or [heads_kv].
    """
    scaled = rows.float() if scale is None else rows.float() / scale.view(-1, 1)
    blocks = scaled.unflatten(-1, (-1, KV_BLOCK))
    largest = torch.finfo(E4M3.dtype).max
    block_scale = (blocks.abs().amax(-1) / E2M1_MAX).clamp(max=largest).to(E4M3.dtype)
    # 0 / 0 of a block of zeros, and a NaN, whose block's scale says so.
    quotients = (blocks / block_scale.float()[..., None]).nan_to_num(0.0, torch.inf, -torch.inf)
    elements = packed_e2m1(quotients.flatten(-2).flatten(0, -2)).view(*rows.shape[:-1], rows.shape[-1] // 2)
    return elements, block_scale.view(torch.uint8)


def quantize(rows: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Rows [tokens, heads_kv, dim] in the cache's dtype: fp8 saturates after division by scale, NaN stays NaN.

    Args:
        scale: one number, or [heads_kv].
    """
    if not is_fp8(dtype):
        return rows.to(dtype)
    limit = torch.finfo(dtype).max
    scaled = rows.float() if scale is None else rows.float() / scale.view(-1, 1)
    return scaled.clamp(-limit, limit).to(dtype)


def store_nvfp4_rows(operands: Operands, rows: torch.Tensor, where: slice) -> None:
    """Store outputs [tokens, heads_q, dim] in NVFP4, as the rows `where`."""
    assert operands.out_scale is not None
    assert operands.out_block_scale is not None
    elements, scales = quantize_nvfp4(rows.float() * operands.out_scale.view(1), None)
    operands.out[where] = elements
    stored = operands.out_block_scale.view(torch.uint8).view(-1)
    tokens = torch.arange(where.start, where.stop, device=rows.device)
    stored[swizzled_places(tokens, operands.out_block_scale.shape[1])] = scales.flatten(1)


def owned_rows(batch: Batch) -> slice:
    """The rows of q that belong to a request."""
    return slice(int(batch.query_start_loc[0]), int(batch.query_start_loc[-1]))


class ReferenceKernel(Kernel):
    """The eager reference behind the kernels' interface."""

    def __init__(self, spec: AttentionSpec, target: Target, workspace: Workspace) -> None:
        self.spec = spec

    def max_query_len_served(self) -> int | None:
        return None

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        pass

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        assert min_seqlen_q <= 1, f"{min_seqlen_q=}: the reference serves every request of a batch"
        assert max_seqlen_q >= batch.max_query_len, f"{max_seqlen_q=}: the reference serves every request of a batch"
        return partial(self.attend, batch)

    def attend(self, batch: Batch, operands: Operands) -> None:
        q = operands.q if operands.q_rope is None else torch.cat([operands.q, operands.q_rope], dim=-1)
        compute = torch.float64 if self.spec.dtype == torch.float64 else torch.float32
        out, lse = attention(
            self.spec,
            batch,
            q,
            operands.keys,
            operands.values,
            sinks=operands.sinks,
            alibi_slopes=operands.alibi_slopes,
            k_scale=operands.k_scale,
            v_scale=operands.v_scale,
            q_scale=operands.q_scale,
            compute_dtype=compute,
        )
        mine = owned_rows(batch)
        if self.spec.is_nvfp4_out:
            store_nvfp4_rows(operands, out[mine], mine)
        else:
            indexable(operands.out)[mine] = indexable(quantize(out[mine], operands.out.dtype, operands.out_scale))
        if operands.lse is not None:
            operands.lse[mine] = lse[mine].to(torch.float32)


class WriteKV(Writes):
    """`write_kv` behind the kernels' interface."""

    def __call__(self, *arguments: torch.Tensor | None) -> None:
        write_kv(*arguments)  # type: ignore[arg-type]
