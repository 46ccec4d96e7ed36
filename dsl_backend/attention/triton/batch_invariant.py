# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant attention: decode, prefill, extend and absorbed MLA in one kernel with one reduction order.

The bits of a row depend on its query, its position and its keys alone: neither on other requests, nor on where a chunk
begins, nor on what a prefix cache held. So everything that decides the order of additions is a constant of the layer:

- One tile shape whatever the query length. Other numbers of rows are other matrix instructions.
- Key tiles and splits lie at absolute key positions: tile t has the keys t * n to (t + 1) * n - 1, split s the tiles
  s * SPLITS.tiles to (s + 1) * SPLITS.tiles - 1. A split is reduced by itself, its tiles in ascending order.
- The splits of a row are combined from the last to the first (`fold`), with explicit multiply-adds.
- Tiles and splits that a row does not see change nothing: their probabilities are 0, and the accumulator is multiplied
  by exactly 1. So it does not matter which rows share a tile. All tiles are masked: there is no other code path.

The schedule changes no result, and is made on the device. Either a program processes a row tile whole and combines its
splits in registers; or each split is a work tile of its own whose partial result goes to scratch, and `combine_kernel`
combines these in the same order by the same function. Scratch has a fixed size: requests get room for their partial
results in order until none is left. The others are processed whole.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsl_backend.attention.protocol import Kernel, Launch, Operands
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.attention.triton.args import (
    SCALE_STRIDES,
    STEP_ARGUMENTS,
    Scratch,
    Splits,
    constants,
    launch_arguments,
    layer_of,
    outputs_of,
    scale_stride,
    score_mod_of,
    tiles_of,
)
from dsl_backend.attention.triton.configs import BatchInvariantConfig
from dsl_backend.attention.triton.scheduler import Step, batch_work, load_request, request_tiles
from dsl_backend.attention.triton.tiles import (
    NEG_INF,
    Scores,
    Softmax,
    attend,
    empty_softmax,
    epilogue,
    key_range,
    load_query_tile,
    store_partial,
    window_right,
)
from dsl_backend.attention.triton.warm_up import operands_of, warm_up
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# int32s for each row tile that is split: index of its first partial result, splits, first query row, key head, first
# row, rows, request.
COMBINE_FIELDS = tl.constexpr(7)
# Before them: how many row tiles are split.
COUNT_FIELDS = tl.constexpr(1)


class SplitLimits(NamedTuple):
    """What decides which requests are split.

    Attributes:
        program_work: key tiles of a program if the batch were divided evenly.
        partials: partial results that scratch has room for.
    """

    program_work: Any
    partials: Any


@triton.jit
def fold(later, split, LAYER):
    """Combine the state of the splits after it with that of a split.

    A split that a row does not see (row_max of -inf) leaves the row as it is.
    """
    row_max = tl.maximum(later.row_max, split.row_max)
    reference = tl.where(row_max == NEG_INF, 0.0, row_max)
    acc_scale = tl.exp2(later.row_max - reference)
    split_scale = tl.exp2(split.row_max - reference)
    row_sum = tl.fma(split.row_sum, split_scale, later.row_sum * acc_scale)
    acc1 = tl.fma(split.acc1, tl.broadcast_to(split_scale[:, None], split.acc1.shape), later.acc1 * acc_scale[:, None])
    acc2 = later.acc2
    if LAYER.dv2 > 0:
        acc2 = tl.fma(split.acc2, tl.broadcast_to(split_scale[:, None], split.acc2.shape), acc2 * acc_scale[:, None])
    return Softmax(acc1, acc2, row_max, row_sum)


@triton.jit
def partials_wanted(row_tiles, first, last, limits, SPLITS):
    """Partial results that requests need room for, at most limits.partials + 1; and the splits of a row tile.

    A request is split where one row tile would keep a program busy for a large part of its even share of the batch.
    """
    splits = last // SPLITS.tiles - first // SPLITS.tiles + 1
    is_long = (last - first + 1).to(tl.int64) * SPLITS.factor > limits.program_work
    wanted = tl.minimum(row_tiles.to(tl.int64) * splits, limits.partials + 1)
    return tl.where((splits > 1) & is_long, wanted, 0).to(tl.int32), splits


@triton.jit
def locate_work(tile_idx, whole, step, limits, LAYER, TILES, SPLITS):
    """Where work tile tile_idx is: its request, work tiles and split row tiles before that; and all of both.

    whole: the work tiles are the row tiles of requests that are processed whole; otherwise the splits of the others,
    numbered as their partial results are.
    """
    request = 0
    work_before = 0
    split_before = 0
    all_work = 0
    all_split = 0
    all_partials = 0
    for chunk in range(0, step.num_requests, TILES.scan):
        r = chunk + tl.arange(0, TILES.scan)
        row_tiles, first, last = request_tiles(r, r < step.num_requests, step, LAYER, TILES)
        wanted, _ = partials_wanted(row_tiles, first, last, limits, SPLITS)
        is_split = (wanted > 0) & (all_partials + tl.cumsum(wanted, 0) <= limits.partials)
        split_tiles = tl.where(is_split, row_tiles, 0)
        work = tl.where(whole, row_tiles - split_tiles, tl.where(is_split, wanted, 0))
        through = all_work + tl.cumsum(work, 0)
        before = (through <= tile_idx) & (r < step.num_requests)
        request += tl.sum(before.to(tl.int32))
        work_before = tl.maximum(work_before, tl.max(tl.where(before, through, 0)))
        split_before += tl.sum(tl.where(before, split_tiles, 0))
        all_work += tl.sum(work)
        all_split += tl.sum(split_tiles)
        # Saturated: the sum over thousands of requests does not overflow, over more it might.
        all_partials = tl.minimum(all_partials + tl.sum(wanted), limits.partials + 1)
    return request, work_before, split_before, all_work, all_split


@triton.jit
def attend_splits(tile, splits, blocks, tensors, LAYER, TILES, SPLITS):
    """The softmax state of the splits splits[0] ... splits[1] - 1 of a row tile.

    blocks: the first key tile that some row sees, and one past the last.
    """
    begin, end = splits
    block_min, block_max = blocks
    softmax = empty_softmax(TILES.m, LAYER)
    for i in range(end - begin):
        s = end - 1 - i
        first = tl.maximum(s * SPLITS.tiles, block_min)
        stop = tl.minimum((s + 1) * SPLITS.tiles, block_max)
        split = attend(empty_softmax(TILES.m, LAYER), tile, first, stop, tensors, LAYER, TILES.n, True)
        softmax = fold(softmax, split, LAYER)
    return softmax


@triton.jit(do_not_specialize=[*STEP_ARGUMENTS, *SCALE_STRIDES])
def batch_invariant_kernel(
    tensors,
    requests,
    score_mod,
    k_scale_stride,
    v_scale_stride,
    num_requests,
    min_seqlen_q,
    max_seqlen_q,
    scratch,
    LAYER,
    TILES,
    SPLITS,
):
    """SPLITS.programs programs divide the splits evenly; each one after them processes one row tile whole."""
    if SPLITS.overlap:
        gdc_launch_dependents()  # programs of the combine kernel may start beside these, and wait there
    step = Step(requests, num_requests, min_seqlen_q, max_seqlen_q)
    scores = Scores(score_mod, k_scale_stride, v_scale_stride)
    program = tl.program_id(0)
    whole = program >= SPLITS.programs
    rows_of_partial = tl.minimum(TILES.m, max_seqlen_q * LAYER.group)  # as BatchInvariant.rows_of_partial
    partial_floats = rows_of_partial * (LAYER.dv1 + LAYER.dv2 + 2)
    limits = SplitLimits(batch_work(step, LAYER, TILES) // SPLITS.programs, SPLITS.scratch_floats // partial_floats)
    _, _, _, all_work, all_split = locate_work(0, whole, step, limits, LAYER, TILES, SPLITS)
    if program == 0:
        tl.store(scratch.combines, all_split)
    count = tl.where(whole, 1, tl.cdiv(all_work, SPLITS.programs))
    tile_idx = tl.where(whole, program - SPLITS.programs, program * count)
    end = tl.minimum(tile_idx + count, all_work)
    if tile_idx >= end:
        return
    request_idx, base, split_base, _, _ = locate_work(tile_idx, whole, step, limits, LAYER, TILES, SPLITS)
    while tile_idx < end:
        row_tiles, first, last = request_tiles(request_idx, True, step, LAYER, TILES)
        wanted, splits = partials_wanted(row_tiles, first, last, limits, SPLITS)
        # `locate_work` has found the request of a row tile that is processed whole.
        work = tl.where(whole, row_tiles, wanted)
        if tile_idx - base >= work:
            base += work
            split_base += tl.where(work > 0, row_tiles, 0)
            request_idx += 1
        else:
            request = load_request(request_idx, True, requests)
            row_tile = tl.where(whole, tile_idx - base, (tile_idx - base) // splits)
            # The last row tiles of a request see the most keys: they start first.
            head_kv = row_tile % LAYER.heads_kv
            first_row = (row_tiles // LAYER.heads_kv - 1 - row_tile // LAYER.heads_kv) * TILES.m
            tile = load_query_tile(
                first_row, head_kv * LAYER.group, head_kv, request, requests, tensors, scores, LAYER.group, LAYER, TILES
            )
            right = window_right(request_idx, requests, LAYER)
            block_min, _, _, block_max = key_range(first_row, request, right, LAYER.group, LAYER, TILES)
            block_max = tl.maximum(block_max, block_min + 1)  # so that rows that see no key are written
            split_min = block_min // SPLITS.tiles
            split_max = tl.cdiv(block_max, SPLITS.tiles)
            split = first // SPLITS.tiles + (tile_idx - base) % splits
            begin = tl.where(whole, split_min, tl.maximum(split, split_min))
            end_split = tl.where(whole, split_max, tl.minimum(split + 1, split_max))
            softmax = attend_splits(tile, (begin, end_split), (block_min, block_max), tensors, LAYER, TILES, SPLITS)
            if whole:
                epilogue(softmax, tile.token, tile.head, tile.keep, request_idx, tensors.outputs, scores, LAYER)
            elif begin < end_split:
                partial = scratch.partials + tile_idx.to(tl.int64) * partial_floats
                store_partial(softmax, tile.keep, partial, rows_of_partial, LAYER, TILES)
                if split == split_min:
                    combine_ptr = scratch.combines + COUNT_FIELDS + (split_base + row_tile) * COMBINE_FIELDS
                    tl.store(combine_ptr, tile_idx)
                    tl.store(combine_ptr + 1, split_max - split_min)
                    tl.store(combine_ptr + 2, request.first_query)
                    tl.store(combine_ptr + 3, head_kv)
                    tl.store(combine_ptr + 4, first_row)
                    tl.store(combine_ptr + 5, tl.minimum(request.q_len * LAYER.group - first_row, TILES.m))
                    tl.store(combine_ptr + 6, request_idx)
            tile_idx += 1


@triton.jit
def load_partial(partial, row, ROWS, LAYER):
    """A row [1] of a split's state, as `store_partial` left it."""
    DV: tl.constexpr = LAYER.dv1 + LAYER.dv2
    acc1 = tl.load(partial + row[:, None] * DV + tl.arange(0, LAYER.dv1)[None, :])
    acc2 = tl.zeros([1, 16], tl.float32)
    if LAYER.dv2 > 0:
        acc2 = tl.load(partial + row[:, None] * DV + LAYER.dv1 + tl.arange(0, LAYER.dv2)[None, :])
    row_max = tl.load(partial + ROWS * DV + row)
    return Softmax(acc1, acc2, row_max, tl.load(partial + ROWS * (DV + 1) + row))


@triton.jit(do_not_specialize=[*SCALE_STRIDES, "rows_of_partial"])
def combine_kernel(outputs, score_mod, v_scale_stride, scratch, rows_of_partial, LAYER, SPLITS):
    """Combine the splits of each row that has several work tiles, as a program does that processes a row tile whole."""
    if SPLITS.overlap:
        # Before any exit: a kernel that ends early would let the next one start beside the first.
        gdc_wait()
    partial_floats = rows_of_partial * (LAYER.dv1 + LAYER.dv2 + 2)
    rows = tl.load(scratch.combines) * rows_of_partial
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        combine_ptr = scratch.combines + COUNT_FIELDS + index // rows_of_partial * COMBINE_FIELDS
        row = index % rows_of_partial + tl.arange(0, 1)
        if index % rows_of_partial < tl.load(combine_ptr + 5):
            partial_idx = tl.load(combine_ptr).to(tl.int64)
            splits = tl.load(combine_ptr + 1)
            softmax = empty_softmax(1, LAYER)
            for i in range(splits):
                partial = scratch.partials + (partial_idx + splits - 1 - i) * partial_floats
                softmax = fold(softmax, load_partial(partial, row, rows_of_partial, LAYER), LAYER)
            m = tl.load(combine_ptr + 4) + row
            token = (tl.load(combine_ptr + 2) + m // LAYER.group).to(tl.int64)
            head = (tl.load(combine_ptr + 3) * LAYER.group + m % LAYER.group).to(tl.int64)
            request = tl.load(combine_ptr + 6)
            scores = Scores(score_mod, 0, v_scale_stride)
            epilogue(softmax, token, head, row >= 0, request, outputs, scores, LAYER)


class BatchInvariant(Kernel):
    """Batch-invariant attention of one layer spec, for queries of any length; see the module."""

    def __init__(
        self, spec: AttentionSpec, target: Target, workspace: Workspace, config: BatchInvariantConfig | None = None
    ) -> None:
        self.spec, self.target, self.workspace = spec, target, workspace
        self.config = config or BatchInvariantConfig.default(spec, target)
        self.layer = layer_of(spec)
        self.tiles = tiles_of(self.config, self.config.scan)
        self.overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
        self.splits: Splits = constants(
            Splits,
            self.config.tiles_per_split,
            self.config.num_programs,
            self.config.split_factor,
            self.config.scratch_bytes // 4,
            self.overlap,
        )
        self.dv = self.layer.dv1.value + self.layer.dv2.value
        self.scratch()  # now, and not while a graph is captured

    def max_query_len_served(self) -> int | None:
        """No limit: another kernel for longer queries would have another reduction order."""
        return None

    def rows_of_partial(self, max_seqlen_q: int) -> int:
        """Rows that a partial result has room for, with queries of up to max_seqlen_q tokens."""
        return min(self.config.block_m, max_seqlen_q * self.spec.group)

    def scratch(self) -> Scratch:
        """One size for all batches. A row tile that is split has at least two partial results of at least one row."""
        floats = self.config.scratch_bytes // 4
        most = floats // (self.dv + 2)
        return Scratch(
            self.workspace.partials(floats),
            self.workspace.integers(COUNT_FIELDS.value + most // 2 * COMBINE_FIELDS.value),
        )

    def prepare(self, lse: bool, sinks: torch.dtype | None) -> None:
        if not self.target.is_cpu:
            warm_up(self.attend, 1, operands_of(self.spec, self.workspace.device, lse, sinks), self.spec)

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
        row_tiles *= self.spec.heads_kv
        max_seqlen_q = min(max_seqlen_q, batch.max_query_len)
        rows = self.rows_of_partial(max_seqlen_q)
        scratch = self.scratch()
        # Fused multiply-adds where the code says so, and nowhere else: two kernels must round alike.
        options = {"enable_fp_fusion": False}
        batch_invariant_kernel[(self.config.num_programs + row_tiles,)](
            *launch_arguments(self.spec, self.target, batch, operands),
            min_seqlen_q,
            max_seqlen_q,
            scratch,
            self.layer,
            self.tiles,
            self.splits,
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
            **options,
        )
        combine_kernel[(min(row_tiles * rows, 8 * self.config.num_programs),)](
            outputs_of(self.target, operands),
            score_mod_of(self.spec, operands),
            scale_stride(operands.v_scale),
            scratch,
            rows,
            self.layer,
            self.splits,
            num_warps=max(1, min(4, self.dv // 128)),
            **options,
            **({"launch_pdl": True} if self.overlap else {}),
        )
