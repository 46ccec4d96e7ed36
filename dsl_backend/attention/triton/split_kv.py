# SPDX-License-Identifier: Apache-2.0
"""Attention for short queries over long key ranges: decode, speculative decode, absorbed MLA.

Every program takes an equal, contiguous share of all the key tiles of the batch (stream-K: Osama et al., 2023), found
from the lengths on the device, so that one long request among short ones holds nobody up. The query heads of a
key/value head are packed into the rows of a tile. A key range that crosses programs leaves partial results, which a
second kernel merges; on SM90 and newer its launch overlaps the first (programmatic dependent launch).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsl_backend.attention.configs import SplitKVConfig
from dsl_backend.attention.kernel import Operands, Workspace
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.launch import STEP_ARGUMENTS, layer_arguments, layer_constants
from dsl_backend.attention.triton.parts import LOG2E, NEG_INF, attend, finish, normalizer, pages_of, window_right
from dsl_backend.runtime.target import Target

# int32s a program leaves for the merge kernel: parts (0: nothing to merge), first query row, key head, first row, rows.
MERGE_FIELDS = tl.constexpr(5)


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
def share_of(
    num_programs,
    num_requests,
    starts_ptr,
    kv_lens_ptr,
    shortest,
    longest,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr,
    MIN_SHARE: tl.constexpr,
):
    """Key tiles that each program takes, and those of the whole batch."""
    total_tiles = 0
    for chunk in range(0, num_requests, SCAN):
        r = chunk + tl.arange(0, SCAN)
        tiles = tiles_of(
            r, r < num_requests, starts_ptr, kv_lens_ptr, shortest, longest, HEADS_KV, GROUP, LEFT, BLOCK_M, BLOCK_N
        )
        total_tiles += tl.sum(tiles)
    return tl.maximum(tl.cdiv(total_tiles, num_programs), MIN_SHARE), total_tiles


@triton.jit
def locate(
    position,
    num_requests,
    starts_ptr,
    kv_lens_ptr,
    shortest,
    longest,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    LEFT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN: tl.constexpr,
):
    """The request that the batch's tile `position` belongs to, and the tiles of the requests before it."""
    request = 0
    base = 0
    seen = 0
    for chunk in range(0, num_requests, SCAN):
        r = chunk + tl.arange(0, SCAN)
        tiles = tiles_of(
            r, r < num_requests, starts_ptr, kv_lens_ptr, shortest, longest, HEADS_KV, GROUP, LEFT, BLOCK_M, BLOCK_N
        )
        through = seen + tl.cumsum(tiles, 0)
        before = (through <= position) & (r < num_requests)
        request += tl.sum(before.to(tl.int32))
        base = tl.maximum(base, tl.max(tl.where(before, through, 0)))
        seen += tl.sum(tiles)
    return request, base


@triton.jit(do_not_specialize=STEP_ARGUMENTS)
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
    merges_ptr,
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
    OVERLAP: tl.constexpr,
):
    # A partial result: the accumulator's rows, then top and total of each.
    DV: tl.constexpr = DV1 + DV2
    PARTIAL: tl.constexpr = BLOCK_M * (DV + 2)
    if OVERLAP:
        gdc_launch_dependents()  # the merge kernel may take its place beside this one, and waits there
    share, total_tiles = share_of(
        tl.num_programs(0), num_requests, starts_ptr, kv_lens_ptr, shortest, longest,
        HEADS_KV, GROUP, LEFT, BLOCK_M, BLOCK_N, SCAN, MIN_SHARE,
    )  # fmt: skip
    position = tl.program_id(0) * share
    end = tl.minimum(position + share, total_tiles)
    request, base = locate(
        position, num_requests, starts_ptr, kv_lens_ptr, shortest, longest,
        HEADS_KV, GROUP, LEFT, BLOCK_M, BLOCK_N, SCAN,
    )  # fmt: skip

    # What the merge kernel must do for the range that begins in this share and goes on after it, if there is one.
    merge_ptr = merges_ptr + tl.program_id(0) * MERGE_FIELDS
    parts = 0

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
            head = (head_kv * GROUP + m % GROUP).to(tl.int64)
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
            begin = first_tile + tile
            pages = pages_of(table_row, begin * BLOCK_N, kv_len, PAGE, BLOCK_N)
            for t in range(begin, begin + count):
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
                    query_position,
                    kv_len,
                    right,
                    packed_first,
                    slopes,
                    scale,
                    k_ptr + head_kv.to(tl.int64) * k_head_stride,
                    v_ptr + head_kv.to(tl.int64) * v_head_stride,
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
                pages = next_pages

            item_first = base + item * tiles
            if count == tiles:
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
            else:
                # A program holds at most two unfinished ranges: one that began before it, one that goes on after it.
                began_here = item_first // share == tl.program_id(0)
                slot = 2 * tl.program_id(0) + tl.where(began_here, 1, 0)
                partial = partial_ptr + slot.to(tl.int64) * PARTIAL
                rows = tl.arange(0, BLOCK_M)
                dv1 = tl.arange(0, DV1)
                tl.store(partial + rows[:, None] * DV + dv1[None, :], acc1, mask=keep[:, None])
                if DV2 > 0:
                    dv2 = DV1 + tl.arange(0, DV2)
                    tl.store(partial + rows[:, None] * DV + dv2[None, :], acc2, mask=keep[:, None])
                tl.store(partial + BLOCK_M * DV + rows, top)
                tl.store(partial + BLOCK_M * DV + BLOCK_M + rows, total)
                if began_here:
                    parts = (item_first + tiles - 1) // share - item_first // share + 1
                    first_row = (item % row_tiles) * BLOCK_M
                    tl.store(merge_ptr + 1, first_query)
                    tl.store(merge_ptr + 2, head_kv)
                    tl.store(merge_ptr + 3, first_row)
                    tl.store(merge_ptr + 4, tl.minimum(q_len * GROUP - first_row, BLOCK_M))
            position += count
    tl.store(merge_ptr, parts)


@triton.jit
def merge_kernel(
    out_ptr,
    lse_ptr,
    sinks_ptr,
    v_scale_ptr,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    lse_head_stride,
    partial_ptr,
    merges_ptr,
    GROUP: tl.constexpr,
    DV1: tl.constexpr,
    DV2: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the partial results of the key range that begins in share program_id(0) and ends in a later one.

    Each program does COLUMNS elements of the tile's row program_id(1), PARTS partial results at a time.
    """
    DV: tl.constexpr = DV1 + DV2
    PARTIAL: tl.constexpr = BLOCK_M * (DV + 2)
    if OVERLAP:
        # Before any exit: a kernel that ends early would let the next one start beside the split kernel.
        gdc_wait()
    program = tl.program_id(0)
    row = tl.program_id(1)
    merge_ptr = merges_ptr + program * MERGE_FIELDS
    parts = tl.load(merge_ptr)
    first_query = tl.load(merge_ptr + 1)
    head_kv = tl.load(merge_ptr + 2)
    first_row = tl.load(merge_ptr + 3)
    if (parts == 0) | (row >= tl.load(merge_ptr + 4)):
        return
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.full([1], NEG_INF, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for chunk in range(0, parts, PARTS):
        part = chunk + tl.arange(0, PARTS)
        slot = 2 * (program + part) + tl.where(part == 0, 1, 0)
        partial = partial_ptr + slot.to(tl.int64) * PARTIAL
        here = part < parts
        tops = tl.load(partial + BLOCK_M * DV + row, mask=here, other=NEG_INF)
        totals = tl.load(partial + BLOCK_M * DV + BLOCK_M + row, mask=here, other=0.0)
        values = tl.load(partial[:, None] + row * DV + column[None, :], mask=here[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        reference = tl.where(new_top == NEG_INF, 0.0, new_top)
        weights = tl.exp2(tops - reference)
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(weights * totals, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        top = new_top

    m = first_row + row
    token = (first_query + m // GROUP).to(tl.int64)
    head = (head_kv * GROUP + m % GROUP).to(tl.int64)
    factor, lse = normalizer(top, total, True, head, sinks_ptr, v_scale_ptr)
    pointers = out_ptr + token * out_token_stride + head * out_head_stride + column
    tl.store(pointers, (acc * factor).to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM_V)
    if lse_ptr is not None:
        if tl.program_id(2) == 0:
            tl.store(lse_ptr + token * lse_token_stride + head * lse_head_stride + tl.arange(0, 1), lse)


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
        self.overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
        self.dv = self.constants["DV1"] + self.constants["DV2"]
        self.scratch(self.config(self.longest_query() or 64))  # now, and not while a graph is captured

    def longest_query(self) -> int | None:
        """Rows that a tile of 64 holds, but at most 16 queries: longer ones belong to the prefill kernel."""
        return None if self.spec.latent else min(16, max(1, 64 // self.spec.group))

    def config(self, max_query_len: int) -> SplitKVConfig:
        """The configuration for batches of up to max_query_len queries a request."""
        return self._config or SplitKVConfig.default(self.spec, self.target, max_query_len)

    def scratch(self, config: SplitKVConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial results, and what the merge kernel must do with them."""
        return (
            self.workspace.partials(2 * config.num_programs * config.block_m * (self.dv + 2)),
            self.workspace.integers(config.num_programs * MERGE_FIELDS.value),
        )

    def launch(self, batch: Batch, operands: Operands, shortest: int, longest: int) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        config = self.config(min(longest, batch.max_query_len))
        partials, merges = self.scratch(config)
        split_kv_kernel[(config.num_programs,)](
            *layer_arguments(self.spec, self.target, batch, operands, shortest, longest),
            partials,
            merges,
            **self.constants,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            SCAN=config.scan,
            MIN_SHARE=config.min_share,
            OVERLAP=self.overlap,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        rows = min(config.block_m, min(longest, batch.max_query_len) * self.spec.group)
        columns = min(256, self.dv & -self.dv)  # the largest power of two that divides a row
        merge_kernel[(config.num_programs, rows, self.dv // columns)](
            operands.out,
            operands.lse,
            operands.sinks,
            operands.v_scale if self.spec.is_fp8_kv else None,
            operands.out.stride(0),
            operands.out.stride(1),
            *((0, 0) if operands.lse is None else operands.lse.stride()),
            partials,
            merges,
            GROUP=self.constants["GROUP"],
            DV1=self.constants["DV1"],
            DV2=self.constants["DV2"],
            HEAD_DIM_V=self.constants["HEAD_DIM_V"],
            BLOCK_M=config.block_m,
            OVERLAP=self.overlap,
            COLUMNS=columns,
            PARTS=min(64, 4096 // columns),  # 32 float32 a thread, so that all loads are in flight
            num_warps=4,
            **({"launch_pdl": True} if self.overlap else {}),
        )
