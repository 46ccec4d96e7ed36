# SPDX-License-Identifier: Apache-2.0
"""Attention for short queries over long key ranges: decode, speculative decode, absorbed MLA.

Every program takes an equal, contiguous share of all the key tiles of the batch (stream-K: Osama et al., 2023), found
from the lengths on the device, so that one long request among short ones holds nobody up. The query heads of a
key/value head are packed into the rows of a tile. A key range that crosses programs leaves partial results, which a
second kernel merges; on SM90 and newer its launch overlaps the first (programmatic dependent launch).
"""

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsl_backend.attention.protocol import Launch, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.arguments import (
    SCALE_STRIDES,
    STEP_ARGUMENTS,
    launch_arguments,
    layer_of,
    rows_of,
    scale_stride,
    scoring_of,
    tiles_of,
)
from dsl_backend.attention.triton.configs import SplitKVConfig
from dsl_backend.attention.triton.parts import (
    LOG2E,
    NEG_INF,
    attend,
    finish,
    key_source,
    load_queries,
    locate,
    normalizer,
    pages_of,
    query_range,
    window_right,
)
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# int32s a program leaves for the merge kernel: parts (0: nothing to merge), first query row, key head, first row, rows.
MERGE_FIELDS = tl.constexpr(5)


@triton.jit
def tile_range(q_len, kv_len, LAYER, TILES):
    """First key tile that any query of a request sees, and how many: at least one, so that every row is written."""
    first = q_len * 0
    if LAYER.left >= 0:
        first = tl.maximum(kv_len - q_len - LAYER.left, 0) // TILES.n
    return first, tl.maximum(tl.cdiv(kv_len, TILES.n) - first, 1)


@triton.jit
def work_of(request, inside, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES):
    """Key tiles to visit for requests (a scalar or a vector): 0 for those that another kernel serves."""
    _, q_len = query_range(requests, request, inside)
    kv_len = tl.load(requests.kv_lens + request, mask=inside, other=0)
    _, tiles = tile_range(q_len, kv_len, LAYER, TILES)
    served = (q_len > 0) & (q_len >= min_seqlen_q) & (q_len <= max_seqlen_q)
    return tl.where(served, LAYER.heads_kv * tl.cdiv(q_len * LAYER.group, TILES.m) * tiles, 0)


@triton.jit
def share_of(num_programs, requests, num_requests, min_seqlen_q, max_seqlen_q, LAYER, TILES, MIN_SHARE: tl.constexpr):
    """Key tiles that each program takes, and those of the whole batch."""
    total_tiles = 0
    for chunk in range(0, num_requests, TILES.scan):
        r = chunk + tl.arange(0, TILES.scan)
        total_tiles += tl.sum(work_of(r, r < num_requests, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES))
    return tl.maximum(tl.cdiv(total_tiles, num_programs), MIN_SHARE), total_tiles


@triton.jit
def store_partial(acc1, acc2, top, total, keep, partial, LAYER, TILES):
    """An unfinished range: the accumulator's rows, then top and total of each."""
    DV: tl.constexpr = LAYER.dv1 + LAYER.dv2
    rows = tl.arange(0, TILES.m)
    dv1 = tl.arange(0, LAYER.dv1)
    tl.store(partial + rows[:, None] * DV + dv1[None, :], acc1, mask=keep[:, None])
    if LAYER.dv2 > 0:
        dv2 = LAYER.dv1 + tl.arange(0, LAYER.dv2)
        tl.store(partial + rows[:, None] * DV + dv2[None, :], acc2, mask=keep[:, None])
    tl.store(partial + TILES.m * DV + rows, top)
    tl.store(partial + TILES.m * (DV + 1) + rows, total)


@triton.jit(do_not_specialize=[*STEP_ARGUMENTS, *SCALE_STRIDES])
def split_kv_kernel(
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
    partials_ptr,
    merges_ptr,
    LAYER,
    TILES,
    MIN_SHARE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PARTIAL: tl.constexpr = TILES.m * (LAYER.dv1 + LAYER.dv2 + 2)
    BLOCK_N: tl.constexpr = TILES.n
    if OVERLAP:
        gdc_launch_dependents()  # the merge kernel may take its place beside this one, and waits there
    program = tl.program_id(0)
    share, total_tiles = share_of(
        tl.num_programs(0), requests, num_requests, min_seqlen_q, max_seqlen_q, LAYER, TILES, MIN_SHARE
    )
    place = program * share
    end = tl.minimum(place + share, total_tiles)
    request, base = locate(place, requests, num_requests, min_seqlen_q, max_seqlen_q, LAYER, TILES, work_of)

    # What the merge kernel must do for the range that begins in this share and goes on after it, if there is one.
    merge_ptr = merges_ptr + program * MERGE_FIELDS
    parts = 0

    while place < end:
        work = work_of(request, True, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES)
        if place - base >= work:
            base += work
            request += 1
        else:
            first_query, q_len = query_range(requests, request, True)
            kv_len = tl.load(requests.kv_lens + request)
            first_tile, tiles = tile_range(q_len, kv_len, LAYER, TILES)
            row_tiles = tl.cdiv(q_len * LAYER.group, TILES.m)
            item = (place - base) // tiles
            tile = (place - base) % tiles
            count = tl.minimum(tiles - tile, end - place)
            head_kv = item // row_tiles
            scale = scoring.scale_log2
            if scoring.k_scale is not None:
                scale *= tl.load(scoring.k_scale + head_kv * k_scale_stride)

            first_row = (item % row_tiles) * TILES.m
            m = first_row + tl.arange(0, TILES.m)
            keep = m < q_len * LAYER.group
            token = first_query + m // LAYER.group
            head = (head_kv * LAYER.group + m % LAYER.group).to(tl.int64)
            position = kv_len - q_len + m // LAYER.group
            right = window_right(requests, request, LAYER)
            q1, q2_rows = load_queries(q, q2, token, head, keep, LAYER)
            slopes = tl.zeros([TILES.m], tl.float32)
            if scoring.slopes is not None:
                slopes = tl.load(scoring.slopes + head, mask=keep, other=0.0) * LOG2E
            table_row, packed_first = key_source(requests, request, LAYER)

            acc1 = tl.zeros([TILES.m, LAYER.dv1], tl.float32)
            acc2 = tl.zeros([TILES.m, LAYER.dv2 if LAYER.dv2 > 0 else 16], tl.float32)
            top = tl.full([TILES.m], NEG_INF, tl.float32)
            total = tl.zeros([TILES.m], tl.float32)
            begin = first_tile + tile
            pages = pages_of(table_row, begin * BLOCK_N, kv_len, LAYER, BLOCK_N)
            for t in range(begin, begin + count):
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
                    head_kv,
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
                    True,
                )
                pages = next_pages

            if count == tiles:
                finish(acc1, acc2, top, total, keep, token, head, out, lse, scoring, v_scale_stride, LAYER)
            else:
                # A program holds at most two unfinished ranges: one that began before it, one that goes on after it.
                item_first = base + item * tiles
                began_here = item_first // share == program
                slot = 2 * program + tl.where(began_here, 1, 0)
                store_partial(acc1, acc2, top, total, keep, partials_ptr + slot.to(tl.int64) * PARTIAL, LAYER, TILES)
                if began_here:
                    parts = (item_first + tiles - 1) // share - item_first // share + 1
                    tl.store(merge_ptr + 1, first_query)
                    tl.store(merge_ptr + 2, head_kv)
                    tl.store(merge_ptr + 3, first_row)
                    tl.store(merge_ptr + 4, tl.minimum(q_len * LAYER.group - first_row, TILES.m))
            place += count
    tl.store(merge_ptr, parts)


@triton.jit(do_not_specialize=SCALE_STRIDES)
def merge_kernel(
    out,
    lse,
    scoring,
    v_scale_stride,
    partials_ptr,
    merges_ptr,
    LAYER,
    TILES,
    OVERLAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the partial results of the key range that begins in share program_id(0) and ends in a later one.

    Each program does COLUMNS elements of the tile's row program_id(1), PARTS partial results at a time.
    """
    DV: tl.constexpr = LAYER.dv1 + LAYER.dv2
    PARTIAL: tl.constexpr = TILES.m * (DV + 2)
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
        partial = partials_ptr + slot.to(tl.int64) * PARTIAL
        here = part < parts
        tops = tl.load(partial + TILES.m * DV + row, mask=here, other=NEG_INF)
        totals = tl.load(partial + TILES.m * (DV + 1) + row, mask=here, other=0.0)
        values = tl.load(partial[:, None] + row * DV + column[None, :], mask=here[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        reference = tl.where(new_top == NEG_INF, 0.0, new_top)
        weights = tl.exp2(tops - reference)
        shrink = tl.exp2(top - reference)
        total = total * shrink + tl.sum(weights * totals, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        top = new_top

    m = first_row + row
    token = (first_query + m // LAYER.group).to(tl.int64)
    head = (head_kv * LAYER.group + m % LAYER.group).to(tl.int64)
    factor, row_lse = normalizer(top, total, True, head, scoring, v_scale_stride, LAYER)
    pointers = out.ptr + token * out.token_stride + head * out.head_stride + column
    tl.store(pointers, (acc * factor).to(out.ptr.dtype.element_ty), mask=column < LAYER.head_dim_v)
    if lse.ptr is not None:
        if tl.program_id(2) == 0:
            tl.store(lse.ptr + token * lse.token_stride + head * lse.head_stride + tl.arange(0, 1), row_lse)


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
        self._chosen: dict[int, SplitKVConfig] = {}
        self.layer = layer_of(spec)
        self.overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
        self.dv = self.layer.dv1.value + self.layer.dv2.value
        self.scratch(self.config(self.max_query_len_served() or 64))  # now, and not while a graph is captured

    def max_query_len_served(self) -> int | None:
        """Rows that a tile of 64 holds, but at most 16 queries: longer ones belong to the prefill kernel."""
        return None if self.spec.latent else min(16, max(1, 64 // self.spec.group))

    def config(self, max_query_len: int) -> SplitKVConfig:
        """The configuration for requests of up to max_query_len queries: asked in every launch, chosen once."""
        if self._config is not None:
            return self._config
        config = self._chosen.get(max_query_len)
        if config is None:
            config = self._chosen[max_query_len] = SplitKVConfig.default(self.spec, self.target, max_query_len)
        return config

    def scratch(self, config: SplitKVConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial results, and what the merge kernel must do with them."""
        return (
            self.workspace.partials(2 * config.num_programs * config.block_m * (self.dv + 2)),
            self.workspace.integers(config.num_programs * MERGE_FIELDS.value),
        )

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        pass

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        return partial(self.attend, batch, min_seqlen_q, max_seqlen_q)

    def attend(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int, operands: Operands) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        config = self.config(min(max_seqlen_q, batch.max_query_len))
        partials, merges = self.scratch(config)
        constants = (self.layer, tiles_of(config, config.scan))
        split_kv_kernel[(config.num_programs,)](
            *launch_arguments(self.spec, self.target, batch, operands),
            min_seqlen_q,
            max_seqlen_q,
            partials,
            merges,
            *constants,
            MIN_SHARE=config.min_share,
            OVERLAP=self.overlap,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        rows = min(config.block_m, min(max_seqlen_q, batch.max_query_len) * self.spec.group)
        columns = min(256, self.dv & -self.dv)  # the largest power of two that divides a row
        merge_kernel[(config.num_programs, rows, self.dv // columns)](
            rows_of(operands.out),
            rows_of(operands.lse),
            scoring_of(self.spec, operands),
            scale_stride(operands.v_scale),
            partials,
            merges,
            *constants,
            OVERLAP=self.overlap,
            COLUMNS=columns,
            PARTS=min(64, 4096 // columns),  # 32 float32 a thread, so that all loads are in flight
            num_warps=4,
            **({"launch_pdl": True} if self.overlap else {}),
        )
