# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant attention: decode, prefill, extend and absorbed MLA in one kernel with one reduction order.

A row's bits depend on its query, its position and its keys alone: neither on other requests, nor on where a chunk
begins, nor on what a prefix cache held. For that, everything that decides the order of additions is a constant of the
layer:

- One tile shape whatever the query length. Other numbers of rows are other matrix instructions.
- Key tiles and splits lie at absolute key positions: tile t has the keys t * n to (t + 1) * n - 1, split s the tiles
  s * SPLIT to (s + 1) * SPLIT - 1. A split is reduced by itself, its tiles in ascending order.
- The splits of a row are folded into its result from the last to the first (`fold`), with explicit multiply-adds.
- Tiles and splits that a row does not see are exact no-ops: its probabilities are 0, and what was there is multiplied
  by exactly 1. So it does not matter which rows share a tile. All tiles are masked: there is no other code path.

Work is scheduled on the device, by any rule: one program processes a row tile whole and folds its splits in registers,
or each split is a work tile of its own whose partial result goes to scratch, and `combine_kernel` folds these in the
same order by the same function. Scratch has a fixed size: requests get room for their partial results in order until
none is left; the others are processed whole.
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
from dsl_backend.attention.triton.configs import BatchInvariantConfig
from dsl_backend.attention.triton.parts import (
    FULL,
    LOG2E,
    NEG_INF,
    attend,
    finish,
    key_source,
    load_queries,
    pages_of,
    query_range,
    window_right,
)
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# int32s for each row tile that is split: slot of its first split, splits, first query row, key head, first row, rows.
COMBINE_FIELDS = tl.constexpr(6)
# Before them: how many row tiles are split.
COUNT_FIELDS = tl.constexpr(1)


@triton.jit
def fold(acc1, acc2, top, total, part1, part2, part_top, part_total, LAYER):
    """Fold a split's partial result into that of the splits after it: acc1, acc2, top, total updated.

    A split that a row does not see (part_top of -inf) leaves the row as it is.
    """
    new_top = tl.maximum(top, part_top)
    reference = tl.where(new_top == NEG_INF, 0.0, new_top)
    old = tl.exp2(top - reference)
    new = tl.exp2(part_top - reference)
    total = tl.fma(part_total, new, total * old)
    acc1 = tl.fma(part1, tl.broadcast_to(new[:, None], part1.shape), acc1 * old[:, None])
    if LAYER.dv2 > 0:
        acc2 = tl.fma(part2, tl.broadcast_to(new[:, None], part2.shape), acc2 * old[:, None])
    return acc1, acc2, new_top, total


@triton.jit
def request_tiles(request, inside, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES):
    """Row tiles of requests (a scalar or a vector) times key heads, and their key tiles first ... last.

    No row tiles for requests that are not served; otherwise one key tile at least, so that every row is written.
    """
    _, q_len = query_range(requests, request, inside)
    kv_len = tl.load(requests.kv_lens + request, mask=inside, other=0)
    served = (q_len > 0) & (q_len >= min_seqlen_q) & (q_len <= max_seqlen_q)
    items = tl.where(served, LAYER.heads_kv * tl.cdiv(q_len * LAYER.group, TILES.m), 0)
    first = q_len * 0
    if LAYER.left >= 0:
        first = tl.maximum(kv_len - q_len - LAYER.left, 0) // TILES.n
    return items, first, tl.maximum((kv_len - 1) // TILES.n, first)


@triton.jit
def even_share(requests, num_requests, min_seqlen_q, max_seqlen_q, LAYER, TILES, PROGRAMS: tl.constexpr):
    """The batch's key tiles over PROGRAMS: what a program would do if all were busy to the end; int64."""
    tiles = tl.zeros([TILES.scan], tl.int64)
    for chunk in range(0, num_requests, TILES.scan):
        r = chunk + tl.arange(0, TILES.scan)
        items, first, last = request_tiles(r, r < num_requests, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES)
        tiles += items.to(tl.int64) * (last - first + 1)
    return tl.sum(tiles) // PROGRAMS


@triton.jit
def slots_wanted(items, first, last, share, slots, SPLIT: tl.constexpr, FACTOR: tl.constexpr):
    """Slots for partial results that requests ask for; slots + 1 is more than there are.

    A request asks where a row tile alone would keep a program busy for a large part of its even share.
    """
    splits = last // SPLIT - first // SPLIT + 1
    asks = (splits > 1) & ((last - first + 1).to(tl.int64) * FACTOR > share)
    wanted = items.to(tl.int64) * splits
    return tl.where(asks, tl.minimum(wanted, slots + 1), 0).to(tl.int32), splits


@triton.jit
def locate_work(
    place,
    whole,
    requests,
    num_requests,
    min_seqlen_q,
    max_seqlen_q,
    share,
    slots,
    LAYER,
    TILES,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Where work tile `place` is: its request, work tiles and split row tiles before that; and all of both.

    whole: the work tiles of requests that are processed whole are counted, otherwise splits of the others. A split's
    number is its slot.
    """
    request = 0
    before_work = 0
    before_items = 0
    all_work = 0
    all_items = 0
    all_slots = 0
    for chunk in range(0, num_requests, TILES.scan):
        r = chunk + tl.arange(0, TILES.scan)
        items, first, last = request_tiles(r, r < num_requests, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES)
        wanted, _ = slots_wanted(items, first, last, share, slots, SPLIT, FACTOR)
        is_split = (wanted > 0) & (all_slots + tl.cumsum(wanted, 0) <= slots)
        split_items = tl.where(is_split, items, 0)
        work = tl.where(whole, items - split_items, tl.where(is_split, wanted, 0))
        through = all_work + tl.cumsum(work, 0)
        before = (through <= place) & (r < num_requests)
        request += tl.sum(before.to(tl.int32))
        before_work = tl.maximum(before_work, tl.max(tl.where(before, through, 0)))
        before_items += tl.sum(tl.where(before, split_items, 0))
        all_work += tl.sum(work)
        all_items += tl.sum(split_items)
        # Saturated: the sum of what thousands of requests ask for would not overflow, that of more might.
        all_slots = tl.minimum(all_slots + tl.sum(wanted), slots + 1)
    return request, before_work, before_items, all_work, all_items


@triton.jit
def key_tiles_of(first_row, q_len, kv_len, right, LAYER, TILES):
    """Key tiles first ... stop - 1 that some row of a tile sees: at least one."""
    shift = kv_len - q_len
    stop = kv_len
    if LAYER.causality != FULL or LAYER.right >= 0:
        last_row = tl.minimum(first_row + TILES.m, q_len * LAYER.group) - 1
        stop = tl.minimum(kv_len, tl.maximum(shift + last_row // LAYER.group + right + 1, 0))
    first = q_len * 0
    if LAYER.left >= 0:
        first = tl.maximum(shift + first_row // LAYER.group - LAYER.left, 0) // TILES.n
    return first, tl.maximum(tl.cdiv(stop, TILES.n), first + 1)


@triton.jit
def store_partial(acc1, acc2, top, total, keep, partial, rows_of_slot, LAYER, TILES):
    """A split's result: the accumulator's rows, then top and total of each."""
    DV: tl.constexpr = LAYER.dv1 + LAYER.dv2
    rows = tl.arange(0, TILES.m)
    tl.store(partial + rows[:, None] * DV + tl.arange(0, LAYER.dv1)[None, :], acc1, mask=keep[:, None])
    if LAYER.dv2 > 0:
        columns = LAYER.dv1 + tl.arange(0, LAYER.dv2)
        tl.store(partial + rows[:, None] * DV + columns[None, :], acc2, mask=keep[:, None])
    tl.store(partial + rows_of_slot * DV + rows, top, mask=keep)
    tl.store(partial + rows_of_slot * (DV + 1) + rows, total, mask=keep)


@triton.jit(do_not_specialize=[*STEP_ARGUMENTS, *SCALE_STRIDES, "slots", "rows_of_slot"])
def batch_invariant_kernel(
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
    combines_ptr,
    slots,
    rows_of_slot,
    LAYER,
    TILES,
    SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first PROGRAMS programs share the splits evenly; each one after them processes one row tile whole."""
    BLOCK_N: tl.constexpr = TILES.n
    if OVERLAP:
        gdc_launch_dependents()  # programs of the combine kernel may start beside these, and wait there
    program = tl.program_id(0)
    whole = program >= PROGRAMS
    share = even_share(requests, num_requests, min_seqlen_q, max_seqlen_q, LAYER, TILES, PROGRAMS)
    _, _, _, all_work, all_items = locate_work(
        0, whole, requests, num_requests, min_seqlen_q, max_seqlen_q, share, slots, LAYER, TILES, SPLIT, FACTOR
    )
    if program == 0:
        tl.store(combines_ptr, all_items)
    count = tl.where(whole, 1, tl.cdiv(all_work, PROGRAMS))
    place = tl.where(whole, program - PROGRAMS, program * count)
    end = tl.minimum(place + count, all_work)
    if place >= end:
        return
    request, base, item_base, _, _ = locate_work(
        place, whole, requests, num_requests, min_seqlen_q, max_seqlen_q, share, slots, LAYER, TILES, SPLIT, FACTOR
    )
    while place < end:
        items, first, last = request_tiles(request, True, requests, min_seqlen_q, max_seqlen_q, LAYER, TILES)
        wanted, splits = slots_wanted(items, first, last, share, slots, SPLIT, FACTOR)
        # `locate_work` has found the request of a row tile that is processed whole.
        work = tl.where(whole, items, wanted)
        if place - base >= work:
            base += work
            item_base += tl.where(work > 0, items, 0)
            request += 1
        else:
            first_query, q_len = query_range(requests, request, True)
            kv_len = tl.load(requests.kv_lens + request)
            item = tl.where(whole, place - base, (place - base) // splits)
            # The last row tiles of a request see the most keys: they start first.
            head_kv = item % LAYER.heads_kv
            scale = scoring.scale_log2
            if scoring.k_scale is not None:
                scale *= tl.load(scoring.k_scale + head_kv * k_scale_stride)
            first_row = (items // LAYER.heads_kv - 1 - item // LAYER.heads_kv) * TILES.m
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

            tile_first, tile_stop = key_tiles_of(first_row, q_len, kv_len, right, LAYER, TILES)
            split_first = tile_first // SPLIT
            split_stop = tl.cdiv(tile_stop, SPLIT)
            split = first // SPLIT + (place - base) % splits
            begin_split = tl.where(whole, split_first, tl.maximum(split, split_first))
            end_split = tl.where(whole, split_stop, tl.minimum(split + 1, split_stop))

            acc1 = tl.zeros([TILES.m, LAYER.dv1], tl.float32)
            acc2 = tl.zeros([TILES.m, LAYER.dv2 if LAYER.dv2 > 0 else 16], tl.float32)
            top = tl.full([TILES.m], NEG_INF, tl.float32)
            total = tl.zeros([TILES.m], tl.float32)
            for turn in range(end_split - begin_split):
                s = end_split - 1 - turn
                part1 = tl.zeros([TILES.m, LAYER.dv1], tl.float32)
                part2 = tl.zeros([TILES.m, LAYER.dv2 if LAYER.dv2 > 0 else 16], tl.float32)
                part_top = tl.full([TILES.m], NEG_INF, tl.float32)
                part_total = tl.zeros([TILES.m], tl.float32)
                begin = tl.maximum(s * SPLIT, tile_first)
                pages = pages_of(table_row, begin * BLOCK_N, kv_len, LAYER, BLOCK_N)
                for t in range(begin, tl.minimum((s + 1) * SPLIT, tile_stop)):
                    next_pages = pages_of(table_row, (t + 1) * BLOCK_N, kv_len, LAYER, BLOCK_N)
                    part1, part2, part_top, part_total = attend(
                        part1,
                        part2,
                        part_top,
                        part_total,
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
                acc1, acc2, top, total = fold(acc1, acc2, top, total, part1, part2, part_top, part_total, LAYER)

            if whole:
                finish(acc1, acc2, top, total, keep, token, head, out, lse, scoring, v_scale_stride, LAYER)
            elif begin_split < end_split:
                floats = rows_of_slot * (LAYER.dv1 + LAYER.dv2 + 2)
                partial = partials_ptr + place.to(tl.int64) * floats
                store_partial(acc1, acc2, top, total, keep, partial, rows_of_slot, LAYER, TILES)
                if split == split_first:
                    combine_ptr = combines_ptr + COUNT_FIELDS + (item_base + item) * COMBINE_FIELDS
                    tl.store(combine_ptr, place)
                    tl.store(combine_ptr + 1, split_stop - split_first)
                    tl.store(combine_ptr + 2, first_query)
                    tl.store(combine_ptr + 3, head_kv)
                    tl.store(combine_ptr + 4, first_row)
                    tl.store(combine_ptr + 5, tl.minimum(q_len * LAYER.group - first_row, TILES.m))
            place += 1


@triton.jit
def load_part(partial, row, rows_of_slot, LAYER):
    """A row [1, ...] of a split's result, as `store_partial` left it."""
    DV: tl.constexpr = LAYER.dv1 + LAYER.dv2
    part1 = tl.load(partial + row[:, None] * DV + tl.arange(0, LAYER.dv1)[None, :])
    part2 = tl.zeros([1, 16], tl.float32)
    if LAYER.dv2 > 0:
        part2 = tl.load(partial + row[:, None] * DV + LAYER.dv1 + tl.arange(0, LAYER.dv2)[None, :])
    top = tl.load(partial + rows_of_slot * DV + row)
    return part1, part2, top, tl.load(partial + rows_of_slot * (DV + 1) + row)


@triton.jit(do_not_specialize=[*SCALE_STRIDES, "rows_of_slot"])
def combine_kernel(
    out,
    lse,
    scoring,
    v_scale_stride,
    partials_ptr,
    combines_ptr,
    rows_of_slot,
    LAYER,
    OVERLAP: tl.constexpr,
):
    """Fold the splits of every row that has several work tiles, as a program does that processes a row tile whole."""
    if OVERLAP:
        # Before any exit: a kernel that ends early would let the next one start beside the first.
        gdc_wait()
    floats = rows_of_slot * (LAYER.dv1 + LAYER.dv2 + 2)
    rows = tl.load(combines_ptr) * rows_of_slot
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        combine_ptr = combines_ptr + COUNT_FIELDS + index // rows_of_slot * COMBINE_FIELDS
        row = index % rows_of_slot + tl.arange(0, 1)
        if index % rows_of_slot < tl.load(combine_ptr + 5):
            slot = tl.load(combine_ptr).to(tl.int64)
            parts = tl.load(combine_ptr + 1)
            acc1 = tl.zeros([1, LAYER.dv1], tl.float32)
            acc2 = tl.zeros([1, LAYER.dv2 if LAYER.dv2 > 0 else 16], tl.float32)
            top = tl.full([1], NEG_INF, tl.float32)
            total = tl.zeros([1], tl.float32)
            for turn in range(parts):
                part1, part2, part_top, part_total = load_part(
                    partials_ptr + (slot + parts - 1 - turn) * floats, row, rows_of_slot, LAYER
                )
                acc1, acc2, top, total = fold(acc1, acc2, top, total, part1, part2, part_top, part_total, LAYER)
            m = tl.load(combine_ptr + 4) + row
            token = tl.load(combine_ptr + 2) + m // LAYER.group
            head = (tl.load(combine_ptr + 3) * LAYER.group + m % LAYER.group).to(tl.int64)
            finish(acc1, acc2, top, total, row >= 0, token, head, out, lse, scoring, v_scale_stride, LAYER)


class BatchInvariant:
    """Batch-invariant attention of one layer spec, for queries of any length; see the module."""

    def __init__(
        self,
        spec: AttentionSpec,
        target: Target,
        workspace: Workspace,
        config: BatchInvariantConfig | None = None,
    ) -> None:
        self.spec, self.target, self.workspace = spec, target, workspace
        self.config = config or BatchInvariantConfig.default(spec, target)
        self.layer = layer_of(spec)
        self.overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
        self.dv = self.layer.dv1.value + self.layer.dv2.value
        self.scratch()  # now, and not while a graph is captured

    def max_query_len_served(self) -> int | None:
        """No limit: another kernel for longer queries would have another reduction order."""
        return None

    def rows_of_slot(self, max_seqlen_q: int) -> int:
        """Rows that a slot has room for, with queries of up to `longest` tokens."""
        return min(self.config.block_m, max_seqlen_q * self.spec.group)

    def slots(self, rows: int) -> int:
        """Partial results of that many rows for which there is room."""
        return self.config.scratch_bytes // (4 * rows * (self.dv + 2))

    def scratch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial results, and what the combine kernel must do with them: one size for all batches.

        A row tile that is split has two slots at least, and a slot one row at least.
        """
        return (
            self.workspace.partials(self.config.scratch_bytes // 4),
            self.workspace.integers(COUNT_FIELDS.value + self.slots(1) // 2 * COMBINE_FIELDS.value),
        )

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        pass

    def bind(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int) -> Launch:
        return partial(self.attend, batch, min_seqlen_q, max_seqlen_q)

    def attend(self, batch: Batch, min_seqlen_q: int, max_seqlen_q: int, operands: Operands) -> None:
        if batch.num_requests == 0 or batch.num_tokens == 0:
            return
        # Each served request ends with at most one row tile that is not full.
        served = min(batch.num_requests, batch.num_tokens // max(1, min_seqlen_q))
        row_tiles = batch.num_tokens * self.spec.group // self.config.block_m + served
        if row_tiles == 0:
            return
        items = row_tiles * self.spec.heads_kv
        rows = self.rows_of_slot(min(max_seqlen_q, batch.max_query_len))
        slots = self.slots(rows)
        partials, combines = self.scratch()
        # Fused multiply-adds where the code says so, and nowhere else: two kernels must round alike.
        options = {"enable_fp_fusion": False}
        batch_invariant_kernel[(self.config.num_programs + items,)](
            *launch_arguments(self.spec, self.target, batch, operands),
            min_seqlen_q,
            max_seqlen_q,
            partials,
            combines,
            slots,
            rows,
            self.layer,
            tiles_of(self.config, self.config.scan),
            SPLIT=self.config.split_tiles,
            FACTOR=self.config.split_factor,
            PROGRAMS=self.config.num_programs,
            OVERLAP=self.overlap,
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
            **options,
        )
        combine_kernel[(min(items * rows, 8 * self.config.num_programs),)](
            rows_of(operands.out),
            rows_of(operands.lse),
            scoring_of(self.spec, operands),
            scale_stride(operands.v_scale),
            partials,
            combines,
            rows,
            self.layer,
            OVERLAP=self.overlap,
            num_warps=max(1, min(4, self.dv // 128)),
            **options,
            **({"launch_pdl": True} if self.overlap else {}),
        )
