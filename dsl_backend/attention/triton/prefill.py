# SPDX-License-Identifier: Apache-2.0
"""Attention for long queries: prefill and extend, over paged or packed keys (FlashAttention-2: Dao, 2023).

One program a query tile and head. Programs of neighbouring heads run side by side and share their keys in L2; tiles at
the end of a request, which see the most keys, start first. Only tiles at the edge of what a row sees are masked.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from dsl_backend.attention.protocol import Launch, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.arguments import SCALE_STRIDES, STEP_ARGUMENTS, launch_arguments, layer_of, tiles_of
from dsl_backend.attention.triton.configs import PrefillConfig
from dsl_backend.attention.triton.parts import (
    FULL,
    LOG2E,
    NEG_INF,
    attend,
    finish,
    key_source,
    load_queries,
    locate,
    pages_of,
    query_range,
    window_right,
)
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


@triton.jit
def query_tiles_of(request, inside, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES):
    """Query tiles of requests [scan]: 0 for those that another kernel serves."""
    _, q_len = query_range(requests, request, inside)
    served = (q_len > 0) & (q_len >= min_seqlen_q) & (q_len <= max_seqlen_q)
    return tl.where(served, tl.cdiv(q_len, TILES.m), 0)


@triton.jit
def key_tiles(first_position, last_position, right, kv_len, LAYER, BLOCK_N: tl.constexpr):
    """Key tiles start ... stop that some row sees, and whole_start ... whole_stop that every row sees whole."""
    stop = kv_len
    whole_stop = kv_len
    if LAYER.causality != FULL or LAYER.right >= 0:
        stop = tl.minimum(kv_len, tl.maximum(last_position + right + 1, 0))
        whole_stop = tl.minimum(kv_len, tl.maximum(first_position + right + 1, 0))
    start = 0
    whole_start = 0
    if LAYER.left >= 0:
        start = tl.maximum(first_position - LAYER.left, 0) // BLOCK_N
        whole_start = tl.cdiv(tl.maximum(last_position - LAYER.left, 0), BLOCK_N)
    whole_stop = tl.maximum(whole_stop // BLOCK_N, start)
    return start, tl.minimum(whole_start, whole_stop), whole_stop, tl.cdiv(stop, BLOCK_N)


@triton.jit(do_not_specialize=[*STEP_ARGUMENTS, *SCALE_STRIDES])
def prefill_kernel(
    q,
    q2,
    keys,
    values,
    out,
    lse,
    requests,
    scoring,
    k_scale_stride,
    v_scale_stride,
    num_requests,
    min_seqlen_q,
    max_seqlen_q,
    LAYER,
    TILES,
):
    HEADS: tl.constexpr = LAYER.heads_kv * LAYER.group
    BLOCK_N: tl.constexpr = TILES.n
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    index = tl.program_id(0) // HEADS
    request, base = locate(index, requests, num_requests, min_seqlen_q, max_seqlen_q, LAYER, TILES, query_tiles_of)
    if request >= num_requests:
        return

    first_query, q_len = query_range(requests, request, True)
    kv_len = tl.load(requests.kv_lens + request)
    # The last tiles of a request see the most keys: they start first.
    first_row = (tl.cdiv(q_len, TILES.m) - 1 - (index - base)) * TILES.m
    m = first_row + tl.arange(0, TILES.m)
    keep = m < q_len
    position = kv_len - q_len + m
    right = window_right(requests, request, LAYER)
    first_position = kv_len - q_len + first_row
    last_position = kv_len - q_len + tl.minimum(first_row + TILES.m, q_len) - 1
    start, whole_start, whole_stop, stop = key_tiles(first_position, last_position, right, kv_len, LAYER, BLOCK_N)

    heads = head + tl.zeros([TILES.m], tl.int64)
    q1, q2_rows = load_queries(q, q2, first_query + m, heads, keep, LAYER)
    slopes = tl.zeros([TILES.m], tl.float32)
    if scoring.slopes is not None:
        slopes += tl.load(scoring.slopes + head) * LOG2E
    scale = scoring.scale_log2
    if scoring.k_scale is not None:
        scale *= tl.load(scoring.k_scale + head // LAYER.group * k_scale_stride)
    table_row, packed_first = key_source(requests, request, LAYER)

    acc1 = tl.zeros([TILES.m, LAYER.dv1], tl.float32)
    acc2 = tl.zeros([TILES.m, LAYER.dv2 if LAYER.dv2 > 0 else 16], tl.float32)
    top = tl.full([TILES.m], NEG_INF, tl.float32)
    total = tl.zeros([TILES.m], tl.float32)
    # Left edge (windows only), whole tiles, right edge.
    for phase in tl.static_range(0 if LAYER.left >= 0 else 1, 3):
        if phase == 0:
            begin, end = start, whole_start
        elif phase == 1:
            begin, end = whole_start, whole_stop
        else:
            begin, end = whole_stop, stop
        pages = pages_of(table_row, begin * BLOCK_N, kv_len, LAYER, BLOCK_N)
        for t in range(begin, end):
            next_pages = pages_of(table_row, (t + 1) * BLOCK_N, kv_len, LAYER, BLOCK_N)
            acc1, acc2, top, total = attend(
                acc1,
                acc2,
                top,
                total,
                q1,
                q2_rows,
                t * BLOCK_N,
                pages,
                head // LAYER.group,
                position,
                right,
                kv_len,
                packed_first,
                slopes,
                scale,
                keys,
                values,
                scoring,
                LAYER,
                BLOCK_N,
                phase != 1,
            )
            pages = next_pages
    finish(acc1, acc2, top, total, keep, first_query + m, heads, out, lse, scoring, v_scale_stride, LAYER)


class Prefill:
    """Attention of long queries for one layer spec; see the module."""

    def __init__(
        self,
        spec: AttentionSpec,
        target: Target,
        workspace: Workspace,
        config: PrefillConfig | None = None,
    ) -> None:
        self.spec, self.target = spec, target
        self.config = config or PrefillConfig.default(spec, target)
        self.constants = (layer_of(spec), tiles_of(self.config, scan=4 if target.is_cpu else 128))

    def max_query_len_served(self) -> int | None:
        return None

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        pass

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        return partial(self.attend, batch, min_seqlen_q, max_seqlen_q)

    def attend(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int, operands: Operands) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        # Each served request ends with at most one tile that is not full.
        served = min(batch.num_requests, batch.num_tokens // max(1, min_seqlen_q))
        tiles = batch.num_tokens // self.config.block_m + served
        if tiles == 0:
            return
        prefill_kernel[(tiles * self.spec.heads_q,)](
            *launch_arguments(self.spec, self.target, batch, operands),
            min_seqlen_q,
            max_seqlen_q,
            *self.constants,
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
        )
