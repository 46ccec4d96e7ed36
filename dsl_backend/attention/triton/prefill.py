# SPDX-License-Identifier: Apache-2.0
"""Attention for long queries: prefill and extend, over paged or packed keys (FlashAttention-2: Dao, 2023).

One program a query tile and head. Programs of neighbouring heads run side by side and share their keys in L2; tiles at
the end of a request, which see the most keys, start first. Only tiles at the edge of what a row sees are masked.
"""

import triton
import triton.language as tl

from dsl_backend.attention.configs import PrefillConfig
from dsl_backend.attention.kernel import Operands, Workspace
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.launch import STEP_ARGUMENTS, layer_arguments, layer_constants
from dsl_backend.attention.triton.parts import FULL, LOG2E, NEG_INF, attend, finish, pages_of, window_right
from dsl_backend.runtime.target import Target


@triton.jit
def query_tiles_of(request, inside, starts_ptr, shortest, longest, BLOCK_M: tl.constexpr):
    """Query tiles of requests [SCAN]: 0 for those that another kernel serves."""
    first_query = tl.load(starts_ptr + request, mask=inside, other=0)
    q_len = tl.load(starts_ptr + request + 1, mask=inside, other=0) - first_query
    served = (q_len > 0) & (q_len >= shortest) & (q_len <= longest)
    return tl.where(served, tl.cdiv(q_len, BLOCK_M), 0)


@triton.jit(do_not_specialize=STEP_ARGUMENTS)
def prefill_kernel(
    q_ptr,
    q2_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    starts_ptr,
    kv_lens_ptr,
    table_ptr,
    kv_starts_ptr,
    causal_ptr,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale_log2,
    num_requests,
    shortest,
    longest,
    q_token_stride,
    q_head_stride,
    q2_token_stride,
    q2_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    table_stride,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSALITY: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr,
):
    HEADS: tl.constexpr = HEADS_KV * GROUP
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    index = tl.program_id(0) // HEADS

    request = 0
    base = 0
    seen = 0
    for chunk in range(0, num_requests, SCAN):
        r = chunk + tl.arange(0, SCAN)
        tiles = query_tiles_of(r, r < num_requests, starts_ptr, shortest, longest, BLOCK_M)
        through = seen + tl.cumsum(tiles, 0)
        before = (through <= index) & (r < num_requests)
        request += tl.sum(before.to(tl.int32))
        base = tl.maximum(base, tl.max(tl.where(before, through, 0)))
        seen += tl.sum(tiles)
    if request >= num_requests:
        return

    first_query = tl.load(starts_ptr + request)
    q_len = tl.load(starts_ptr + request + 1) - first_query
    kv_len = tl.load(kv_lens_ptr + request)
    # The last tiles of a request see the most keys: they start first.
    first_row = (tl.cdiv(q_len, BLOCK_M) - 1 - (index - base)) * BLOCK_M
    m = first_row + tl.arange(0, BLOCK_M)
    keep = m < q_len
    token = first_query + m
    position = kv_len - q_len + m
    right = window_right(causal_ptr, request, CAUSALITY, RIGHT)

    # Key tiles that some row sees, and those among them that every row sees whole.
    first_position = kv_len - q_len + first_row
    last_position = kv_len - q_len + tl.minimum(first_row + BLOCK_M, q_len) - 1
    stop = kv_len
    whole_stop = kv_len
    if CAUSALITY != FULL or RIGHT >= 0:
        stop = tl.minimum(kv_len, tl.maximum(last_position + right + 1, 0))
        whole_stop = tl.minimum(kv_len, tl.maximum(first_position + right + 1, 0))
    start_tile = 0
    whole_start_tile = 0
    if LEFT >= 0:
        start_tile = tl.maximum(first_position - LEFT, 0) // BLOCK_N
        whole_start_tile = tl.cdiv(tl.maximum(last_position - LEFT, 0), BLOCK_N)
    stop_tile = tl.cdiv(stop, BLOCK_N)
    whole_stop_tile = tl.maximum(whole_stop // BLOCK_N, start_tile)
    whole_start_tile = tl.minimum(whole_start_tile, whole_stop_tile)

    row = token.to(tl.int64)
    d1 = tl.arange(0, D1)
    q1 = tl.load(
        q_ptr + row[:, None] * q_token_stride + head * q_head_stride + d1[None, :],
        mask=keep[:, None] & (d1 < HEAD_DIM)[None, :],
        other=0.0,
    )
    q2 = q1
    if D2 > 0:
        d2 = tl.arange(0, D2)
        q2 = tl.load(
            q2_ptr + row[:, None] * q2_token_stride + head * q2_head_stride + d2[None, :],
            mask=keep[:, None] & (D1 + d2 < HEAD_DIM)[None, :],
            other=0.0,
        )
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if slopes_ptr is not None:
        slopes += tl.load(slopes_ptr + head) * LOG2E
    scale = scale_log2
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)
    packed_first = 0
    table_row = table_ptr
    if PAGE > 0:
        table_row = table_ptr + request.to(tl.int64) * table_stride
    else:
        packed_first = tl.load(kv_starts_ptr + request)
    k_head = k_ptr + (head // GROUP).to(tl.int64) * k_head_stride
    v_head = v_ptr + (head // GROUP).to(tl.int64) * v_head_stride

    acc1 = tl.zeros([BLOCK_M, DV1], tl.float32)
    acc2 = tl.zeros([BLOCK_M, DV2 if DV2 > 0 else 16], tl.float32)
    top = tl.full([BLOCK_M], NEG_INF, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Left edge (windows only), whole tiles, right edge.
    for phase in tl.static_range(0 if LEFT >= 0 else 1, 3):
        if phase == 0:
            begin, end = start_tile, whole_start_tile
        elif phase == 1:
            begin, end = whole_start_tile, whole_stop_tile
        else:
            begin, end = whole_stop_tile, stop_tile
        pages = pages_of(table_row, begin * BLOCK_N, kv_len, PAGE, BLOCK_N)
        for t in range(begin, end):
            next_pages = pages_of(table_row, (t + 1) * BLOCK_N, kv_len, PAGE, BLOCK_N)
            acc1, acc2, top, total = attend(
                q1,
                q2,
                acc1,
                acc2,
                top,
                total,
                t * BLOCK_N,
                pages,
                position,
                kv_len,
                right,
                packed_first,
                slopes,
                scale,
                k_head,
                v_head,
                slopes_ptr,
                k_page_stride,
                k_token_stride,
                v_page_stride,
                v_token_stride,
                D1,
                D2,
                DV1,
                DV2,
                HEAD_DIM,
                HEAD_DIM_V,
                PAGE,
                CAUSALITY,
                LEFT,
                RIGHT,
                SOFTCAP,
                LATENT,
                phase != 1,
                BLOCK_N,
            )
            pages = next_pages
    finish(
        acc1,
        acc2,
        top,
        total,
        keep,
        token,
        head + tl.zeros([BLOCK_M], tl.int64),
        out_ptr,
        lse_ptr,
        sinks_ptr,
        v_scale_ptr,
        out_token_stride,
        out_head_stride,
        lse_token_stride,
        lse_head_stride,
        DV1,
        DV2,
        HEAD_DIM_V,
    )


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
        self.constants = layer_constants(spec)

    def longest_query(self) -> int | None:
        return None

    def launch(self, batch: Batch, operands: Operands, shortest: int, longest: int) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        # Each served request ends with at most one tile that is not full.
        served = min(batch.num_requests, batch.num_tokens // max(1, shortest))
        tiles = batch.num_tokens // self.config.block_m + served
        if tiles == 0:
            return
        prefill_kernel[(tiles * self.spec.heads_q,)](
            *layer_arguments(self.spec, self.target, batch, operands, shortest, longest),
            **self.constants,
            BLOCK_M=self.config.block_m,
            BLOCK_N=self.config.block_n,
            SCAN=4 if self.target.is_cpu else 128,
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
        )
