# SPDX-License-Identifier: Apache-2.0
"""Attention for short queries over long key ranges: decode, speculative decode, absorbed MLA.

Every program takes an equal, contiguous share of all the key tiles of the batch (stream-K: Osama et al., 2023), found
from the lengths on the device, so that one long request among short ones holds nobody up. The query heads of a
key/value head are packed into the rows of a tile. A key range that crosses programs leaves partial results; the program
that arrives last merges them in order, so that the result does not depend on who was last.
"""

import triton
import triton.language as tl

from dsl_backend.attention.configs import SplitKVConfig, split_dim
from dsl_backend.attention.plan import Operands, Workspace
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.launch import layer_arguments, layer_constants
from dsl_backend.attention.triton.parts import LOG2E, NEG_INF, attend, finish, window_right
from dsl_backend.runtime.target import Target


@triton.jit
def tile_range(q_len, kv_len, LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key tile that any query of a request sees, and how many: at least one, so that every row is written."""
    first = q_len * 0
    if LEFT >= 0:
        first = tl.maximum(kv_len - q_len - LEFT, 0) // BLOCK_N
    return first, tl.maximum(tl.cdiv(kv_len, BLOCK_N) - first, 1)


@triton.jit
def tiles_of(
    request,
    inside,
    starts_ptr,
    kv_lens_ptr,
    shortest,
    longest,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Key tiles to visit for requests (a scalar or a vector): 0 for those that another kernel serves."""
    first_query = tl.load(starts_ptr + request, mask=inside, other=0)
    q_len = tl.load(starts_ptr + request + 1, mask=inside, other=0) - first_query
    kv_len = tl.load(kv_lens_ptr + request, mask=inside, other=0)
    _, tiles = tile_range(q_len, kv_len, LEFT, BLOCK_N)
    served = (q_len > 0) & (q_len >= shortest) & (q_len <= longest)
    return tl.where(served, HEADS_KV * tl.cdiv(q_len * GROUP, BLOCK_M) * tiles, 0)


@triton.jit
def split_kv_kernel(
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
    partial_ptr,
    arrivals_ptr,
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
    MIN_SHARE: tl.constexpr,
    MERGE: tl.constexpr,
):
    # A partial result: acc1, acc2, then top and total of each row.
    TOP: tl.constexpr = BLOCK_M * (DV1 + DV2)
    PARTIAL: tl.constexpr = TOP + 2 * BLOCK_M

    total_tiles = 0
    for chunk in range(0, num_requests, SCAN):
        r = chunk + tl.arange(0, SCAN)
        total_tiles += tl.sum(
            tiles_of(
                r, r < num_requests, starts_ptr, kv_lens_ptr, shortest, longest, HEADS_KV, GROUP, LEFT, BLOCK_M, BLOCK_N
            )
        )
    share = tl.maximum(tl.cdiv(total_tiles, tl.num_programs(0)), MIN_SHARE)
    position = tl.program_id(0) * share
    end = tl.minimum(position + share, total_tiles)

    # The request in which this share begins, and the tiles before it.
    request = 0
    base = 0
    seen = 0
    for chunk in range(0, num_requests, SCAN):
        r = chunk + tl.arange(0, SCAN)
        tiles = tiles_of(
            r, r < num_requests, starts_ptr, kv_lens_ptr, shortest, longest, HEADS_KV, GROUP, LEFT, BLOCK_M, BLOCK_N
        )
        through = seen + tl.cumsum(tiles, 0)
        before = through <= position
        request += tl.sum(before.to(tl.int32))
        base = tl.maximum(base, tl.max(tl.where(before, through, 0)))
        seen += tl.sum(tiles)

    scale = scale_log2
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)

    while position < end:
        work = tiles_of(
            request, True, starts_ptr, kv_lens_ptr, shortest, longest, HEADS_KV, GROUP, LEFT, BLOCK_M, BLOCK_N
        )
        if position - base >= work:
            base += work
            request += 1
        else:
            first_query = tl.load(starts_ptr + request)
            q_len = tl.load(starts_ptr + request + 1) - first_query
            kv_len = tl.load(kv_lens_ptr + request)
            first_tile, tiles = tile_range(q_len, kv_len, LEFT, BLOCK_N)
            row_tiles = tl.cdiv(q_len * GROUP, BLOCK_M)
            item = (position - base) // tiles
            tile = (position - base) % tiles
            count = tl.minimum(tiles - tile, end - position)
            head_kv = item // row_tiles

            m = (item % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
            keep = m < q_len * GROUP
            token = first_query + m // GROUP
            head = head_kv * GROUP + m % GROUP
            query_position = kv_len - q_len + m // GROUP
            right = window_right(causal_ptr, request, CAUSALITY, RIGHT)
            slopes = tl.zeros([BLOCK_M], tl.float32)
            if slopes_ptr is not None:
                slopes = tl.load(slopes_ptr + head, mask=keep, other=0.0) * LOG2E
            d1 = tl.arange(0, D1)
            q1 = tl.load(
                q_ptr + (token.to(tl.int64) * q_token_stride + head * q_head_stride)[:, None] + d1[None, :],
                mask=keep[:, None] & (d1 < HEAD_DIM)[None, :],
                other=0.0,
            )
            q2 = q1
            if D2 > 0:
                d2 = tl.arange(0, D2)
                q2 = tl.load(
                    q2_ptr + (token.to(tl.int64) * q2_token_stride + head * q2_head_stride)[:, None] + d2[None, :],
                    mask=keep[:, None] & (D1 + d2 < HEAD_DIM)[None, :],
                    other=0.0,
                )
            packed_first = 0
            table_row = table_ptr
            if PAGE > 0:
                table_row = table_ptr + request.to(tl.int64) * table_stride
            else:
                packed_first = tl.load(kv_starts_ptr + request)

            acc1 = tl.zeros([BLOCK_M, DV1], tl.float32)
            acc2 = tl.zeros([BLOCK_M, DV2 if DV2 > 0 else 16], tl.float32)
            top = tl.full([BLOCK_M], NEG_INF, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for t in range(first_tile + tile, first_tile + tile + count):
                acc1, acc2, top, total = attend(
                    q1,
                    q2,
                    acc1,
                    acc2,
                    top,
                    total,
                    t * BLOCK_N,
                    query_position,
                    kv_len,
                    right,
                    packed_first,
                    slopes,
                    scale,
                    k_ptr + head_kv * k_head_stride,
                    v_ptr + head_kv * v_head_stride,
                    table_row,
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
                    True,
                    BLOCK_N,
                )

            item_first = base + item * tiles
            first_program = item_first // share
            parts = (item_first + tiles - 1) // share - first_program + 1
            complete = parts == 1
            if parts > 1:
                # A program holds at most two unfinished ranges: one that began before it, one that goes on after it.
                began_here = tl.program_id(0) == first_program
                slot = 2 * tl.program_id(0) + tl.where(began_here, 1, 0)
                partial = partial_ptr + slot.to(tl.int64) * PARTIAL
                rows = tl.arange(0, BLOCK_M)
                dv1 = tl.arange(0, DV1)
                tl.store(partial + rows[:, None] * DV1 + dv1[None, :], acc1, mask=keep[:, None])
                if DV2 > 0:
                    dv2 = tl.arange(0, DV2)
                    tl.store(partial + BLOCK_M * DV1 + rows[:, None] * DV2 + dv2[None, :], acc2, mask=keep[:, None])
                tl.store(partial + TOP + rows, top)
                tl.store(partial + TOP + BLOCK_M + rows, total)
                tl.debug_barrier()  # every thread's part is stored before one of them counts
                arrived = tl.atomic_add(arrivals_ptr + first_program, 1, sem="acq_rel")
                complete = arrived == parts - 1
                if complete:
                    tl.store(arrivals_ptr + first_program, 0)
                    top = tl.full([BLOCK_M], NEG_INF, tl.float32)
                    for chunk in range(0, parts, MERGE):
                        part = chunk + tl.arange(0, MERGE)
                        slots = (2 * (first_program + part) + tl.where(part == 0, 1, 0)).to(tl.int64) * PARTIAL
                        tops = tl.load(
                            partial_ptr + slots[:, None] + TOP + rows[None, :],
                            mask=(part < parts)[:, None],
                            other=NEG_INF,
                            cache_modifier=".cg",
                        )
                        top = tl.maximum(top, tl.max(tops, 0))
                    reference = tl.where(top == NEG_INF, 0.0, top)
                    acc1 = tl.zeros([BLOCK_M, DV1], tl.float32)
                    acc2 = tl.zeros([BLOCK_M, DV2 if DV2 > 0 else 16], tl.float32)
                    total = tl.zeros([BLOCK_M], tl.float32)
                    for part in tl.range(0, parts, num_stages=4):
                        slot = 2 * (first_program + part) + tl.where(part == 0, 1, 0)
                        partial = partial_ptr + slot.to(tl.int64) * PARTIAL
                        weight = tl.exp2(tl.load(partial + TOP + rows, cache_modifier=".cg") - reference)
                        total += weight * tl.load(partial + TOP + BLOCK_M + rows, cache_modifier=".cg")
                        acc1 += weight[:, None] * tl.load(
                            partial + rows[:, None] * DV1 + dv1[None, :],
                            mask=keep[:, None],
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        if DV2 > 0:
                            acc2 += weight[:, None] * tl.load(
                                partial + BLOCK_M * DV1 + rows[:, None] * DV2 + dv2[None, :],
                                mask=keep[:, None],
                                other=0.0,
                                cache_modifier=".cg",
                            )
            if complete:
                finish(
                    acc1,
                    acc2,
                    top,
                    total,
                    keep,
                    token,
                    head,
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
            position += count


class SplitKV:
    """Split-KV attention of one layer spec; see the module."""

    def __init__(
        self,
        spec: AttentionSpec,
        target: Target,
        workspace: Workspace,
        config: SplitKVConfig | None = None,
    ) -> None:
        self.spec, self.target, self.workspace = spec, target, workspace
        self._config = config
        self.constants = layer_constants(spec)
        self._reserved: set[int] = set()

    def longest_query(self) -> int | None:
        """Rows that a tile of 64 holds, but at most 16 queries: longer ones belong to the prefill kernel."""
        return None if self.spec.latent else min(16, max(1, 64 // self.spec.group))

    def config(self, max_query_len: int) -> SplitKVConfig:
        """The configuration for batches of up to max_query_len queries a request."""
        return self._config or SplitKVConfig.default(self.spec, self.target, max_query_len)

    def launch(self, batch: Batch, operands: Operands, shortest: int, longest: int) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        config = self.config(min(longest, batch.max_query_len))
        partial = config.block_m * (sum(split_dim(self.spec.head_dim_v)) + 2)
        split_kv_kernel[(config.num_programs,)](
            *layer_arguments(self.spec, self.target, batch, operands, shortest, longest),
            self.workspace.partials(2 * config.num_programs * partial),
            self.workspace.counters(config.num_programs),
            **self.constants,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SCAN=config.scan,
            MIN_SHARE=config.min_share,
            MERGE=16,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
