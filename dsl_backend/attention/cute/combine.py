# SPDX-License-Identifier: Apache-2.0
"""The combine kernel of split-KV attention: partial O and LSE of several splits become outputs."""

from typing import Any, cast

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.args import Outputs
from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.balanced import SPLIT_RANGE_FIELDS, SplitRange
from dsl_backend.attention.cute.scheduler.requests import Requests, seqlen_info_of
from dsl_backend.attention.cute.scheduler.split_kv import even_splits_of, fixed_splits_of, row_tile_idx_of
from dsl_backend.attention.cute.scheduler.work_tile import q_head_of, v_split_of
from dsl_backend.attention.cute.score_mod import ScoreModArgs, v_scale_of
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.math import exp2, finite_or_zero, fma, quotient, tree_reduce

WARP, WARPS = 32, 8
THREADS = WARP * WARPS
CTAS_PER_SM = 3  # which leaves 80 registers for each thread
SPLITS_IN_FLIGHT = 8  # splits of which a thread loads O at a time
FIXED_SPLITS_IN_FLIGHT = 4  # the same for fixed splits, which are combined one by one
MAX_SPLITS_PER_WARP = 8  # more are combined by a whole CTA
MAX_CTAS_PER_REQUEST = 16  # for each head block of a request, with even or fixed splits


def partial_size(rows: int, columns: int) -> int:
    """float32 elements of a partial result: O [rows, columns], row_max [rows] of base-2 scores, row_sum [rows]."""
    return rows * columns + (2 * rows + 3) // 4 * 4


def fold_workspace_size(rows: int, columns: int) -> int:
    """float32 elements of a CTA that combines its own splits: O of a row tile, and two rows' statistics a thread."""
    return rows * (columns + 8)


@cute.jit
def combine_scales(row_max: cutlass.Float32, other_max: cutlass.Float32):
    """(row_max of two partial results together, the scale of the first, the scale of the second).

    The attention kernel and the combine kernel both call this, so that their results have the same bits.
    """
    new_max = cute.arch.fmax(row_max, other_max)
    reference = finite_or_zero(new_max)
    return new_max, exp2(row_max - reference), exp2(other_max - reference)


class SplitKVCombine:
    """A warp combines up to 128 columns of a row, two or four a lane. The warps of a CTA share the splits where many.

    With balanced split-KV every CTA reads all split ranges and takes its part of their rows, which are few in some
    batches and many in others. With even or fixed splits, CTAs are launched for each request and head block.

    Args:
        key: the `LayerKey`.
        tile_n: keys of a key tile. min_split_tiles: key tiles of a split at least, as the scheduler has them.
        columns: of a partial result.
        tokens_per_tile: of a row tile; None where a row tile has all tokens of a request.
        ctas_per_sm: of the attention kernel.
    """

    def __init__(
        self,
        key: Any,
        tile_n: int,
        min_split_tiles: int,
        columns: int,
        tokens_per_tile: int | None = None,
        ctas_per_sm: int = 1,
    ) -> None:
        self.key, self.tile_n, self.min_split_tiles, self.columns = key, tile_n, min_split_tiles, columns
        self.tokens_per_tile, self.ctas_per_sm = tokens_per_tile, ctas_per_sm
        self.head_blocks = key.head_blocks
        self.vector = 4 if columns > 2 * WARP else 2
        self.column_blocks = -(-columns // (WARP * self.vector))

    @cute.jit
    def __call__(
        self,
        outputs: Outputs,
        split_ranges: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
        num_ctas: cutlass.Int32,
        stream,
    ):
        grid = (num_ctas * CTAS_PER_SM // self.ctas_per_sm, 1, 1)
        if cutlass.const_expr(self.key.max_splits or self.key.tiles_per_split):
            needed = cutlass.min(cute.ceil_div(requests.rows * self.column_blocks, WARPS), MAX_CTAS_PER_REQUEST)
            grid = (cute.size(requests.seqused_k) * self.head_blocks, needed, 1)
        self.kernel(outputs.partials, split_ranges, requests, outputs.out, outputs.lse, scoring).launch(
            grid=grid,
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=CTAS_PER_SM,
            # Must be named then (runtime/compile.py).
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        partials: cute.Tensor,
        split_ranges: cute.Tensor | None,
        requests: Requests,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        scoring: ScoreModArgs,
    ):
        allocator = cutlass.utils.SmemAllocator()
        sO = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((self.vector, WARP, WARPS)), 16)
        sStats = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((WARPS, 2)), 16)
        thread = CombineThread(self, Outputs(out, lse, partials), requests, scoring, sO, sStats)
        if cutlass.const_expr(self.key.tiles_per_split):
            thread.combine_fixed_splits(split_ranges)
        elif cutlass.const_expr(self.key.max_splits):
            thread.combine_even_splits()
        else:
            thread.combine_balanced(split_ranges)


class CombineThread:
    """What a thread does. A task is a block of up to 128 columns of a row: row * column_blocks + column block.

    `source` says where the partial results of a row are: the CTA that the split range begins in (balanced), or
    request * head_blocks + head_block (even splits).

    Args:
        sO: (vector, lane, warp). sStats: (warp, row_max or row_sum). Both exchange partial sums between warps.
    """

    def __init__(
        self,
        combine: SplitKVCombine,
        outputs: Outputs,
        requests: Requests,
        scoring: ScoreModArgs,
        sO: cute.Tensor,
        sStats: cute.Tensor,
    ) -> None:
        self.key, self.columns, self.vector = combine.key, combine.columns, combine.vector
        self.column_blocks, self.min_split_tiles = combine.column_blocks, combine.min_split_tiles
        self.tokens_per_tile, self.head_blocks = combine.tokens_per_tile, combine.head_blocks
        self.out, self.lse, self.partials = outputs.out, outputs.lse, cast("cute.Tensor", outputs.partials)
        self.requests, self.scoring = requests, scoring
        self.sO, self.sStats = sO, sStats
        self.lane = cute.arch.lane_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.partial_rows = requests.rows
        self.mask = Mask(self.key, combine.tile_n, requests)
        self.size = partial_size(requests.rows, combine.columns)

    # ------------------------------------------------------------------ which tasks a warp or a CTA has

    @cute.jit
    def combine_even_splits(self):
        """All row tiles of the CTA's request and head block, together with the CTAs of the same block_idx.x."""
        source, cta, _ = cute.arch.block_idx()
        num_ctas = cute.arch.grid_dim()[1]
        num_splits, q_offset, head_block, num_rows = self.even_split_range(source)
        # Before any exit, as below.
        cute.arch.griddepcontrol_wait()
        num_tasks = num_rows * self.column_blocks
        if num_splits <= MAX_SPLITS_PER_WARP:
            for task in cutlass.range(cta * WARPS + self.warp, num_tasks, num_ctas * WARPS, unroll=1):
                self.combine_by_warp(source, num_splits, q_offset, head_block, task)
        else:
            for task in cutlass.range(cta, num_tasks, num_ctas, unroll=1):
                self.combine_by_cta(source, num_splits, q_offset, head_block, task)

    @cute.jit
    def combine_fixed_splits(self, partial_bases: cute.Tensor):
        """The same for splits that begin at fixed keys."""
        source, cta, _ = cute.arch.block_idx()
        num_ctas = cute.arch.grid_dim()[1]
        request, head_block = source // self.head_blocks, source % self.head_blocks
        info = seqlen_info_of(self.requests, request, cute.size(self.requests.seqused_k))
        _, num_splits = fixed_splits_of(self.mask, info.seqlen_q, info.seqlen_k)
        # Before any exit, as below.
        cute.arch.griddepcontrol_wait()
        base = partial_bases[request]
        if base >= 0:
            num_tasks = info.seqlen_q * self.key.pack_gqa * self.column_blocks
            for task in cutlass.range(cta * WARPS + self.warp, num_tasks, num_ctas * WARPS, unroll=1):
                self.combine_in_order(base, num_splits, info.offset_q, head_block, task)

    @cute.jit
    def combine_in_order(
        self,
        base: cutlass.Int32,
        num_splits: cutlass.Int32,
        q_offset: cutlass.Int32,
        head_block: cutlass.Int32,
        task: cutlass.Int32,
    ):
        """A task's splits from the last to the first, with the operations of a CTA that combines its own splits."""
        row, column = task // self.column_blocks, self.column(task)
        tile_rows = cutlass.const_expr(self.tokens_per_tile * self.key.pack_gqa)
        first, m = base + row // tile_rows * num_splits * self.head_blocks + head_block, row % tile_rows
        stats = self.partials.iterator + self.partial_rows * self.columns + m
        row_max, row_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        acc_O = cute.make_rmem_tensor(self.vector, cutlass.Float32)
        partial_O = cute.make_rmem_tensor((self.vector, FIXED_SPLITS_IN_FLIGHT), cutlass.Float32)
        acc_O.fill(0.0)
        for chunk in cutlass.range(0, num_splits, WARP, unroll=1):
            # Lane i: the statistics of the chunk's i-th split from its end.
            split = num_splits - 1 - chunk - self.lane
            lane_max, lane_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if split >= 0:
                lane_stats = stats + cutlass.Int64(first + split * self.head_blocks) * self.size
                lane_max = cute.make_tensor(lane_stats, cute.make_layout(1))[0]
                lane_sum = cute.make_tensor(lane_stats + self.partial_rows, cute.make_layout(1))[0]
            for at in cutlass.range(0, cutlass.min(num_splits - chunk, WARP), FIXED_SPLITS_IN_FLIGHT, unroll=1):
                partial_O.fill(0.0)
                for i in cutlass.range_constexpr(FIXED_SPLITS_IN_FLIGHT):
                    one = num_splits - 1 - chunk - at - i
                    if one >= 0 and column < self.columns:
                        offset = cutlass.Int64(first + one * self.head_blocks) * self.size + m * self.columns + column
                        load_vector(self.partials.iterator, offset, partial_O[None, i])
                for i in cutlass.range_constexpr(FIXED_SPLITS_IN_FLIGHT):
                    split_max, split_sum = (cute.arch.shuffle_sync(one, at + i) for one in (lane_max, lane_sum))
                    row_max, acc_scale, split_scale = combine_scales(row_max, split_max)
                    row_sum = fma(split_sum, split_scale, row_sum * acc_scale)
                    for j in cutlass.range_constexpr(self.vector):
                        acc_O[j] = fma(partial_O[j, i], split_scale, acc_O[j] * acc_scale)
        self.store(acc_O, row_max, row_sum, q_offset, head_block, row, column)

    @cute.jit
    def even_split_range(self, source: cutlass.Int32):
        """The SplitRange of a request and head block, with the rows of all its row tiles; 0 rows: not split."""
        requests = self.requests
        info = seqlen_info_of(requests, source // self.head_blocks, cute.size(requests.seqused_k))
        _, key_tiles, split_tiles = even_splits_of(self.mask, self.min_split_tiles, info.seqlen_q, info.seqlen_k)
        num_splits, num_rows = (key_tiles + split_tiles - 1) // split_tiles, info.seqlen_q * self.key.pack_gqa
        if num_splits == 1 or info.seqlen_q < requests.min_seqlen_q or info.seqlen_q > requests.max_seqlen_q:
            num_rows = cutlass.Int32(0)
        return SplitRange(num_splits, info.offset_q, source % self.head_blocks, num_rows)

    @cute.jit
    def combine_balanced(self, split_ranges: cute.Tensor):
        """Tasks of all split ranges: those with many splits by CTAs, the others by warps.

        There is an index for each possible task of each CTA's split range: task * split ranges + split range. A CTA, or
        a warp, takes indices in steps of one less than there are CTAs, or warps. Where all ranges are equally long, the
        split ranges that exist are a fixed distance apart, and steps of the whole number would meet all or none.
        """
        cta, num_ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        num_steps = cute.ceil_div(
            cute.size(split_ranges, mode=[0]) * self.partial_rows * self.column_blocks, cutlass.max(num_ctas - 1, 1)
        )
        for first in cutlass.range(0, num_steps, WARP, unroll=1):
            cta_source, cta_task = self.task_at(split_ranges, cta, num_ctas, first + self.lane)
            warp_source, warp_task = self.task_at(
                split_ranges, cta * WARPS + self.warp, num_ctas * WARPS, first + self.lane
            )
            if first == 0:
                # Before any exit: a kernel that ends early would let the next one start beside the one before.
                cute.arch.griddepcontrol_wait()
            cta_range, warp_range = (
                self.split_range(split_ranges, cta_source),
                self.split_range(split_ranges, warp_source),
            )
            many = cta_range.num_splits > MAX_SPLITS_PER_WARP and cta_task < cta_range.num_rows * self.column_blocks
            few = (
                warp_range.num_splits > 0
                and warp_range.num_splits <= MAX_SPLITS_PER_WARP
                and warp_task < warp_range.num_rows * self.column_blocks
            )
            many, few = cute.arch.vote_ballot_sync(many), cute.arch.vote_ballot_sync(few)
            self.combine_tasks(split_ranges, warp_source, warp_task, few, False)
            self.combine_tasks(split_ranges, cta_source, cta_task, many, True)

    @cute.jit
    def task_at(
        self, split_ranges: cute.Tensor, worker: cutlass.Int32, num_workers: cutlass.Int32, step: cutlass.Int32
    ):
        """(the split range, the task) of a CTA's or a warp's step."""
        num_ranges = cute.size(split_ranges, mode=[0])
        idx = worker + step * cutlass.max(num_workers - 1, 1)
        if worker > 0 and worker == num_workers - 1:
            idx = num_ranges * self.partial_rows * self.column_blocks  # beyond all tasks
        task = quotient(idx, num_ranges)
        return idx - task * num_ranges, task

    @cute.jit
    def combine_tasks(
        self,
        split_ranges: cute.Tensor,
        lane_source: cutlass.Int32,
        lane_task: cutlass.Int32,
        lanes: cutlass.Int32,
        by_cta: cutlass.Constexpr[bool],
    ):
        """The tasks of the lanes whose bit is set, one after the other.

        The split range is read again here: kept, it would take registers that partial O needs.
        """
        while lanes != 0:
            lane = cute.arch.popc(~lanes & (lanes - 1))
            source, task = cute.arch.shuffle_sync(lane_source, lane), cute.arch.shuffle_sync(lane_task, lane)
            num_splits, q_offset, head_block, _ = self.split_range(split_ranges, source)
            if cutlass.const_expr(by_cta):
                self.combine_by_cta(source, num_splits, q_offset, head_block, task)
            else:
                self.combine_by_warp(source, num_splits, q_offset, head_block, task)
            lanes &= lanes - 1

    @cute.jit
    def split_range(self, split_ranges: cute.Tensor, cta: cutlass.Int32):
        """The SplitRange that a CTA of the attention kernel wrote."""
        fields = cute.make_rmem_tensor(SPLIT_RANGE_FIELDS, cutlass.Int32)
        load_vector(split_ranges.iterator, cutlass.Int64(cta) * SPLIT_RANGE_FIELDS, fields)
        return SplitRange(*[fields[i] for i in range(SPLIT_RANGE_FIELDS)])

    # ------------------------------------------------------------------ a task

    @cute.jit
    def combine_by_warp(
        self,
        source: cutlass.Int32,
        num_splits: cutlass.Int32,
        q_offset: cutlass.Int32,
        head_block: cutlass.Int32,
        task: cutlass.Int32,
    ):
        """All splits by one warp."""
        row, column = task // self.column_blocks, self.column(task)
        row_max, row_sum, acc_O = self.accumulate(source, q_offset, row, column, num_splits, 0, 1)
        self.store(acc_O, row_max, row_sum, q_offset, head_block, row, column)

    @cute.jit
    def combine_by_cta(
        self,
        source: cutlass.Int32,
        num_splits: cutlass.Int32,
        q_offset: cutlass.Int32,
        head_block: cutlass.Int32,
        task: cutlass.Int32,
    ):
        """Each warp has every WARPS-th split; the first warp combines what they found."""
        row, column = task // self.column_blocks, self.column(task)
        row_max, row_sum, acc_O = self.accumulate(source, q_offset, row, column, num_splits, self.warp, WARPS)
        sO, sStats = self.sO, self.sStats
        for j in cutlass.range_constexpr(self.vector):
            sO[j, self.lane, self.warp] = acc_O[j]
        if self.lane == 0:
            sStats[self.warp, 0], sStats[self.warp, 1] = row_max, row_sum
        cute.arch.sync_threads()
        if self.warp == 0:
            row_maxes = [sStats[warp, 0] for warp in range(WARPS)]
            row_max = tree_reduce(row_maxes, cute.arch.fmax)
            scales = [exp2(one - finite_or_zero(row_max)) for one in row_maxes]
            row_sum = tree_reduce([sStats[warp, 1] * scales[warp] for warp in range(WARPS)], lambda a, b: a + b)
            for j in cutlass.range_constexpr(self.vector):
                scaled_O = [sO[j, self.lane, warp] * scales[warp] for warp in range(WARPS)]
                acc_O[j] = tree_reduce(scaled_O, lambda a, b: a + b)
            self.store(acc_O, row_max, row_sum, q_offset, head_block, row, column)
        cute.arch.sync_threads()

    @cute.jit
    def column(self, task: cutlass.Int32):
        """The lane's first column."""
        return (task % self.column_blocks * WARP + self.lane) * self.vector

    @cute.jit
    def accumulate(
        self,
        source: cutlass.Int32,
        q_offset: cutlass.Int32,
        row: cutlass.Int32,
        column: cutlass.Int32,
        num_splits: cutlass.Int32,
        first: cutlass.Int32,
        step: cutlass.Constexpr[int],
    ):
        """(row_max, row_sum, the lane's columns of O) of splits `first`, `first + step`, ... of a row."""
        base, m = self.partial_base(source, q_offset, row)
        count = (num_splits - first + step - 1) // step
        row_max, row_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        acc_O = cute.make_rmem_tensor(self.vector, cutlass.Float32)
        partial_O = cute.make_rmem_tensor((self.vector, SPLITS_IN_FLIGHT), cutlass.Float32)
        acc_O.fill(0.0)
        stats = self.partials.iterator + self.partial_rows * self.columns + m
        for chunk in cutlass.range(0, count, WARP, unroll=1):
            lane_max, lane_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if chunk + self.lane < count:
                lane_stats = stats + self.partial_offset(base, first + (chunk + self.lane) * step)
                lane_max = cute.make_tensor(lane_stats, cute.make_layout(1))[0]
                lane_sum = cute.make_tensor(lane_stats + self.partial_rows, cute.make_layout(1))[0]
            # In flight while scales are computed.
            self.load(partial_O, base, m, column, first + chunk * step, count - chunk, step)
            new_max = cute.arch.fmax(row_max, cute.arch.warp_reduction(lane_max, cute.arch.fmax))
            reference = finite_or_zero(new_max)
            lane_scale, acc_scale = exp2(lane_max - reference), exp2(row_max - reference)
            row_sum = row_sum * acc_scale + cute.arch.warp_reduction(lane_sum * lane_scale, lambda a, b: a + b)
            row_max = new_max
            for j in cutlass.range_constexpr(self.vector):
                acc_O[j] *= acc_scale
            self.add_scaled(acc_O, partial_O, lane_scale, 0)
            for at in cutlass.range(SPLITS_IN_FLIGHT, cutlass.min(count - chunk, WARP), SPLITS_IN_FLIGHT, unroll=1):
                self.load(partial_O, base, m, column, first + (chunk + at) * step, count - chunk - at, step)
                self.add_scaled(acc_O, partial_O, lane_scale, at)
        return row_max, row_sum, acc_O

    @cute.jit
    def load(
        self,
        partial_O: cute.Tensor,
        base: cutlass.Int32,
        m: cutlass.Int32,
        column: cutlass.Int32,
        first: cutlass.Int32,
        count: cutlass.Int32,
        step: cutlass.Constexpr[int],
    ):
        """The lane's columns of up to SPLITS_IN_FLIGHT splits; 0 for those beyond `count`. m: row of the row tile."""
        partials = self.partials
        partial_O.fill(0.0)
        for i in cutlass.range_constexpr(SPLITS_IN_FLIGHT):
            if i < count and column < self.columns:
                offset = self.partial_offset(base, first + i * step) + m * self.columns + column
                load_vector(partials.iterator, offset, partial_O[None, i])

    @cute.jit
    def add_scaled(
        self, acc_O: cute.Tensor, partial_O: cute.Tensor, lane_scale: cutlass.Float32, first_lane: cutlass.Int32
    ):
        """acc_O += scale * partial_O for each split, whose scale is in lane `first_lane` + its index."""
        for i in cutlass.range_constexpr(SPLITS_IN_FLIGHT):
            scale = cute.arch.shuffle_sync(lane_scale, first_lane + i)
            for j in cutlass.range_constexpr(self.vector):
                acc_O[j] += partial_O[j, i] * scale

    @cute.jit
    def store(
        self,
        acc_O: cute.Tensor,
        row_max: cutlass.Float32,
        row_sum: cutlass.Float32,
        q_offset: cutlass.Int32,
        head_block: cutlass.Int32,
        row: cutlass.Int32,
        column: cutlass.Int32,
    ):
        """Normalized O and LSE to the output, where the column is one of the head block's."""
        out, lse = self.out, self.lse
        head = q_head_of(self.key, head_block, row)
        token = q_offset + row // self.key.pack_gqa
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[head].to(cutlass.Float32)
        scale, row_lse = finalize(row_max, row_sum, sink, v_scale_of(self.key, self.scoring, head_block))
        out_column = column
        if cutlass.const_expr(self.key.v_splits > 1):
            out_column += v_split_of(self.key, head_block) * self.key.columns
        if column < self.key.columns:
            result = cute.make_rmem_tensor(self.vector, out.element_type)
            for j in cutlass.range_constexpr(self.vector):
                result[j] = (acc_O[j] * scale).to(out.element_type)
            offset = cutlass.Int64(token) * out.stride[0] + head * out.stride[1] + out_column
            store_vector(result, out.iterator, offset)
        if cutlass.const_expr(self.key.lse):
            if out_column == 0:
                lse[token, head] = row_lse

    @cute.jit
    def partial_base(self, source: cutlass.Int32, q_offset: cutlass.Int32, row: cutlass.Int32):
        """(what `partial_offset` takes for the row tile of a row, the row within that row tile)."""
        base, m = source, row
        if cutlass.const_expr(self.key.max_splits):
            row_tile = cutlass.Int32(0)
            if cutlass.const_expr(self.tokens_per_tile is not None):
                tile_rows = cutlass.const_expr(self.tokens_per_tile * self.key.pack_gqa)
                row_tile, m = row // tile_rows, row % tile_rows
            row_tile_idx = row_tile_idx_of(q_offset, source // self.head_blocks, row_tile, self.tokens_per_tile)
            base = (row_tile_idx * self.head_blocks + source % self.head_blocks) * self.key.max_splits
        return base, m

    @cute.jit
    def partial_offset(self, base: cutlass.Int32, split: cutlass.Int32):
        """Where a split's partial result begins, in elements of `partials`."""
        partial_idx = 2 * (base + split) + (1 if split == 0 else 0)
        if cutlass.const_expr(self.key.max_splits):
            partial_idx = base + split
        return cutlass.Int64(partial_idx) * self.size
