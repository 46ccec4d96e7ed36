# SPDX-License-Identifier: Apache-2.0
"""The combine kernel of split-KV attention: partial O and LSE of several splits become outputs."""

from typing import Any, cast

import cutlass
from cutlass import cute

from dsl_backend.attention.cute import nvfp4_out
from dsl_backend.attention.cute.args import Outputs
from dsl_backend.attention.cute.scheduler.balanced import SPLIT_RANGE_FIELDS, SplitRange
from dsl_backend.attention.cute.scheduler.requests import Requests, from_lane, request_of
from dsl_backend.attention.cute.scheduler.split_kv import FIXED_SPLIT_RANGE_FIELDS, FixedSplitRange
from dsl_backend.attention.cute.scheduler.work_tile import q_head_of, v_split_of
from dsl_backend.attention.cute.score_mod import ScoreModArgs, out_factor_of
from dsl_backend.attention.cute.sizes import fold_workspace_size, partial_size
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.accumulators import round_to
from dsl_backend.primitives.copy import VECTOR_BYTES, load_vector, store_vector
from dsl_backend.primitives.math import exp2, finite_or_zero, fma, quotient, tree_reduce
from dsl_backend.primitives.moved import SmemAllocator

WARP, WARPS = 32, 8
THREADS = WARP * WARPS
CTAS_PER_SM = 3  # which leaves 80 registers for each thread
INTS_PER_VECTOR = 4
SPLITS_IN_FLIGHT = 8  # splits of which a thread loads O at a time
MAX_SPLITS_PER_WARP = 8  # more are combined by a whole CTA; not with fixed splits, which are combined one by one
# An estimate, in hundredths of a microsecond: a task of a CTA; a task of a warp, and each split of it.
CTA_TASK, WARP_TASK, WARP_SPLIT = 160, 100, 8
NARROW_TASKS = 2  # tasks of fixed splits with 32 columns, for each warp; where there may be more, they get 128


def blocks_of(columns: int, vector: int) -> int:
    """Tasks of a row whose lanes have `vector` columns each."""
    return -(-columns // (WARP * vector))


@cute.jit
def combine_scales(row_max: cutlass.Float32, other_max: cutlass.Float32, new_max: cutlass.Float32):
    """Scales of two partial results whose row_max together is new_max.

    The attention kernels and the combine kernel all call this, so that their results have the same bits.
    """
    reference = finite_or_zero(new_max)
    return exp2(row_max - reference), exp2(other_max - reference)


def wait_for_previous(split: bool) -> None:
    """Wait for the kernel before this one; then, if a combine kernel follows, let it start.

    By all threads of an SM100 kernel, whose tensor memory is allocated: CTAs of another kernel could hold it.
    """
    dependent_launch.wait()
    if split:
        dependent_launch.launch_dependents()


def with_fold_workspace(key: Any, outputs: Outputs, num_ctas: Any, tile_m: int, columns: int) -> Outputs:
    """Outputs whose `partials` is divided: the fold workspace of all CTAs, then the partial results."""
    workspace = outputs.partials
    if workspace is None or not key.has_fold_workspace:
        return outputs
    size = num_ctas * fold_workspace_size(tile_m, columns)
    partials = cute.make_tensor(workspace.iterator + size, cute.make_layout(cute.size(workspace) - size))
    return outputs._replace(partials=partials if key.split else None, fold_workspace=workspace)


def cta_fold_workspace(workspace: cute.Tensor | None, tile_m: int, columns: int) -> cute.Tensor | None:
    """The CTA's part of the fold workspace in global memory."""
    if workspace is None:
        return None
    size = fold_workspace_size(tile_m, columns)
    address = workspace.iterator.toint() + cutlass.Int64(cute.arch.block_idx()[0]) * (size * 4)
    pointer = cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(size))


class SplitKVCombine:
    """A warp combines up to 128 columns of a row, two or four a lane. The warps of a CTA share the splits where many.

    Every CTA reads all split ranges and takes its part of their rows, which are few in some batches and many in others.
    Fixed splits are combined in order, by a warp for each 32 columns, or for as many as others where rows are many.

    Args:
        key: the `LayerKey`.
        columns: of a partial result.
        ctas_per_sm: of the attention kernel.
        early_dependents: the next kernel may start once the attention kernel has ended.
        many_rows: output tiles of many rows have more tasks than there are CTAs, and warps then combine more splits;
            fixed splits in tasks of 128 columns, of which a quarter as many splits are in flight.
        by_tasks: the kernel itself decides the columns of a task of fixed splits, by how many tasks there may be.
        whole_rows: of an output tile with two splits, a warp's task is a row.
    """

    def __init__(
        self,
        key: Any,
        columns: int,
        ctas_per_sm: int = 1,
        many_rows: bool = False,
        early_dependents: bool = False,
        by_tasks: bool = False,
        whole_rows: bool = False,
    ) -> None:
        self.early_dependents, self.whole_rows = early_dependents, whole_rows
        self.key, self.columns, self.ctas_per_sm, self.many_rows = key, columns, ctas_per_sm, many_rows
        self.wide_vector = 4 if columns > 2 * WARP else 2
        self.vector = 1 if key.tiles_per_split and (by_tasks or not many_rows) else self.wide_vector
        if not by_tasks:
            self.wide_vector = self.vector
        self.column_blocks = blocks_of(columns, self.vector)

    @cute.jit
    def __call__(
        self,
        outputs: Outputs,
        split_ranges: cute.Tensor,
        requests: Requests,
        scoring: ScoreModArgs,
        num_ctas: cutlass.Int32,
        stream,
    ):
        self.kernel(outputs.partials, split_ranges, requests, outputs.out, outputs.lse, scoring).launch(
            grid=(num_ctas * CTAS_PER_SM // self.ctas_per_sm, 1, 1),
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
        split_ranges: cute.Tensor,
        requests: Requests,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        scoring: ScoreModArgs,
    ):
        allocator = SmemAllocator()
        sO = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((self.vector, WARP, WARPS)), 16)
        sStats = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((WARPS, 2)), 16)
        thread = CombineThread(self, Outputs(out, lse, partials), requests, scoring, sO, sStats)
        if cutlass.const_expr(self.key.tiles_per_split):
            thread.combine_fixed_splits(split_ranges)
        else:
            thread.combine_balanced(split_ranges)


class CombineThread:
    """What a thread does. A task is a block of columns of a row: row * column_blocks + column block.

    `source` is the CTA that a split range begins in.

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
        self.key, self.columns = combine.key, combine.columns
        self.vector, self.wide_vector = combine.vector, combine.wide_vector
        self.early_dependents, self.whole_rows = combine.early_dependents, combine.whole_rows
        self.column_blocks, self.many_rows = combine.column_blocks, combine.many_rows
        self.out, self.lse, self.partials = outputs.out, outputs.lse, cast("cute.Tensor", outputs.partials)
        self.requests, self.scoring = requests, scoring
        self.sO, self.sStats = sO, sStats
        self.lane = cute.arch.lane_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.partial_rows = requests.rows
        self.size = partial_size(requests.rows, combine.columns)

    # ------------------------------------------------------------------ which tasks a warp or a CTA has

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
            cta_source, cta_task = self.task_at(split_ranges, cta, num_ctas, first + self.lane, self.column_blocks)
            warp_source, warp_task = self.task_at(
                split_ranges, cta * WARPS + self.warp, num_ctas * WARPS, first + self.lane, self.column_blocks
            )
            if first == 0:
                # Before any exit: a kernel that ends early would let the next one start beside the one before.
                dependent_launch.wait()
                if cutlass.const_expr(self.early_dependents):
                    dependent_launch.launch_dependents()
            cta_range, warp_range = (
                self.split_range(split_ranges, cta_source),
                self.split_range(split_ranges, warp_source),
            )
            many = self.is_for_cta(cta_range) and cta_task < cta_range.num_rows * self.column_blocks
            few = (
                warp_range.num_splits > 0
                and not self.is_for_cta(warp_range)
                and warp_task < warp_range.num_rows * self.warp_tasks_of_row(warp_range)
            )
            many, few = cute.arch.vote_ballot_sync(many), cute.arch.vote_ballot_sync(few)
            self.combine_tasks(split_ranges, warp_source, warp_task, few, False)
            self.combine_tasks(split_ranges, cta_source, cta_task, many, True)

    @cute.jit
    def warp_tasks_of_row(self, split_range: SplitRange):
        """Tasks of a row that are for warps."""
        tasks = self.column_blocks
        if cutlass.const_expr(self.whole_rows):
            tasks = 1 if split_range.num_splits == 2 else self.column_blocks
        return tasks

    @cute.jit
    def is_for_cta(self, split_range: SplitRange):
        """Whether the tasks of a split range are for whole CTAs.

        There are as many such output tiles as fit into the attention kernel's CTAs, num_splits each: so CTAS_PER_SM
        CTAs have tasks / num_splits tasks, and all warps one each or fewer.
        """
        is_many = split_range.num_splits > MAX_SPLITS_PER_WARP
        if cutlass.const_expr(self.many_rows):
            num_splits = split_range.num_splits
            tasks_time = split_range.num_rows * self.column_blocks * CTA_TASK
            is_many = is_many and tasks_time <= CTAS_PER_SM * num_splits * (WARP_TASK + WARP_SPLIT * num_splits)
        return is_many

    @cute.jit
    def task_at(
        self,
        split_ranges: cute.Tensor,
        worker: cutlass.Int32,
        num_workers: cutlass.Int32,
        step: cutlass.Int32,
        column_blocks: cutlass.Constexpr[int],
    ):
        """(the split range, the task) of a CTA's or a warp's step."""
        num_ranges = cute.size(split_ranges, mode=[0])
        idx = worker + step * cutlass.max(num_workers - 1, 1)
        if worker > 0 and worker == num_workers - 1:
            idx = num_ranges * self.partial_rows * column_blocks  # beyond all tasks
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
            elif cutlass.const_expr(self.whole_rows):
                if num_splits == 2:
                    self.combine_row(source, q_offset, head_block, task)
                else:
                    self.combine_by_warp(source, num_splits, q_offset, head_block, task)
            else:
                self.combine_by_warp(source, num_splits, q_offset, head_block, task)
            lanes &= lanes - 1

    @cute.jit
    def split_range(self, split_ranges: cute.Tensor, cta: cutlass.Int32):
        """The SplitRange that a CTA of the attention kernel wrote."""
        fields = cute.make_rmem_tensor(SPLIT_RANGE_FIELDS, cutlass.Int32)
        load_vector(split_ranges.iterator, cutlass.Int64(cta) * SPLIT_RANGE_FIELDS, fields)
        return SplitRange(*[fields[i] for i in range(SPLIT_RANGE_FIELDS)])

    # ------------------------------------------------------------------ fixed splits

    @cute.jit
    def combine_fixed_splits(self, split_ranges: cute.Tensor):
        """Tasks of all split ranges, by warps; their indices are those of `combine_balanced`."""
        if cutlass.const_expr(self.wide_vector > self.vector):
            if self.narrow_tasks_are_many(split_ranges):
                self.combine_fixed_tasks(split_ranges, self.wide_vector)
            else:
                self.combine_fixed_tasks(split_ranges, self.vector)
        else:
            self.combine_fixed_tasks(split_ranges, self.vector)

    @cute.jit
    def narrow_tasks_are_many(self, split_ranges: cute.Tensor):
        """Whether warps may have more than NARROW_TASKS tasks of 32 columns each; the same for all warps.

        Output tiles are counted as if a request had one row tile: requests of more have whole CTAs' output tiles too.
        """
        num_ranges, requests = cute.size(split_ranges, mode=[0]), cute.size(self.requests.seqused_k)
        tiles = cutlass.min(requests * self.key.head_blocks, num_ranges)
        return tiles * self.partial_rows * self.column_blocks > NARROW_TASKS * cute.arch.grid_dim()[0] * WARPS

    @cute.jit
    def combine_fixed_tasks(self, split_ranges: cute.Tensor, vector: cutlass.Constexpr[int]):
        """The same, with so many columns for each lane."""
        cta, num_ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        worker, num_workers = cta * WARPS + self.warp, num_ctas * WARPS
        column_blocks = cutlass.const_expr(blocks_of(self.columns, vector))
        num_ranges = cute.size(split_ranges, mode=[0])
        num_steps = cute.ceil_div(num_ranges * self.partial_rows * column_blocks, cutlass.max(num_workers - 1, 1))
        for first in cutlass.range(0, num_steps, WARP, unroll=1):
            source, task = self.task_at(split_ranges, worker, num_workers, first + self.lane, column_blocks)
            if first == 0:
                # Before any exit, as above.
                dependent_launch.wait()
            own_range = self.fixed_split_range(split_ranges, source)
            exists = own_range.num_splits > 0 and task < own_range.num_rows * column_blocks
            lanes = cute.arch.vote_ballot_sync(exists)
            while lanes != 0:
                lane = cute.arch.popc(~lanes & (lanes - 1))
                split_range = from_lane(own_range, lane)
                self.combine_in_order(split_range, cute.arch.shuffle_sync(task, lane), vector)
                lanes &= lanes - 1

    @cute.jit
    def fixed_split_range(self, split_ranges: cute.Tensor, cta: cutlass.Int32):
        """The FixedSplitRange that a CTA of the attention kernel wrote."""
        first, second = (cute.make_rmem_tensor(INTS_PER_VECTOR, cutlass.Int32) for _ in range(2))
        offset = cutlass.Int64(cta) * FIXED_SPLIT_RANGE_FIELDS
        load_vector(split_ranges.iterator, offset, first)
        load_vector(split_ranges.iterator, offset + INTS_PER_VECTOR, second)
        return FixedSplitRange(first[0], first[1], first[2], first[3], second[0])

    @cute.jit
    def combine_in_order(self, split_range: FixedSplitRange, task: cutlass.Int32, vector: cutlass.Constexpr[int]):
        """A task's splits, from the last to the first, by the operations of a CTA that combines its own splits.

        The loads of O run `in_flight` splits ahead, those of the statistics WARP splits.
        """
        column_blocks = cutlass.const_expr(blocks_of(self.columns, vector))
        row, column = task // column_blocks, (task % column_blocks * WARP + self.lane) * vector
        num_splits, partial_idx = split_range.num_splits, split_range.partial_idx
        row_max, row_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        in_flight = cutlass.const_expr(WARP // vector)
        acc_O = cute.make_rmem_tensor(vector, cutlass.Float32)
        partial_O = cute.make_rmem_tensor((vector, in_flight), cutlass.Float32)
        acc_O.fill(0.0)
        offset = cutlass.Int64(partial_idx) * self.size + row * self.columns + column
        lane_max, lane_sum = self.lane_stats(row, partial_idx, num_splits)
        for i in cutlass.range_constexpr(in_flight):
            self.load_in_order(partial_O, i, offset, column, i < num_splits)
            offset += self.size
        for first in cutlass.range(0, num_splits, WARP, unroll=1):
            count = num_splits - first
            next_max, next_sum = self.lane_stats(row, partial_idx + first + WARP, count - WARP)
            # A maximum does not depend on the order: all scales are computed at once.
            new_max = cute.arch.fmax(row_max, self.prefix_max(lane_max))
            max_before = cute.arch.shuffle_sync_up(new_max, 1, mask_and_clamp=0)
            max_before = row_max if self.lane == 0 else max_before
            acc_scale, lane_scale = combine_scales(max_before, lane_max, new_max)
            for at in cutlass.range_constexpr(0, WARP, in_flight):
                if at < count:
                    for i in cutlass.range_constexpr(in_flight):
                        if at + i < count:
                            scale_before, split_scale, split_sum = (
                                cute.arch.shuffle_sync(value, at + i) for value in (acc_scale, lane_scale, lane_sum)
                            )
                            row_sum = fma(split_sum, split_scale, row_sum * scale_before)
                            for j in cutlass.range_constexpr(vector):
                                acc_O[j] = fma(partial_O[j, i], split_scale, acc_O[j] * scale_before)
                        following = at + i + in_flight
                        self.load_in_order(partial_O, i, offset, column, following < count)
                        offset += self.size
            row_max = cute.arch.shuffle_sync(new_max, WARP - 1)
            lane_max, lane_sum = next_max, next_sum
        self.store(acc_O, row_max, row_sum, split_range.q_offset, split_range.head_block, row, column)

    @cute.jit
    def lane_stats(self, row: cutlass.Int32, first: cutlass.Int32, count: cutlass.Int32):
        """(row_max, row_sum) of the lane's split, of `count` from partial result `first` on."""
        lane_max, lane_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        if self.lane < count:
            stats = self.partials.iterator + self.partial_rows * self.columns + row
            own_stats = stats + cutlass.Int64(first + self.lane) * self.size
            lane_max = cute.make_tensor(own_stats, cute.make_layout(1))[0]
            lane_sum = cute.make_tensor(own_stats + self.partial_rows, cute.make_layout(1))[0]
        return lane_max, lane_sum

    @cute.jit
    def load_in_order(
        self,
        partial_O: cute.Tensor,
        i: cutlass.Constexpr[int],
        offset: cutlass.Int64,
        column: cutlass.Int32,
        exists: cutlass.Boolean,
    ):
        """The lane's columns of a split, from `offset` in `partials`, where it exists."""
        if exists and column < self.columns:
            load_vector(self.partials.iterator, offset, partial_O[None, i])

    @cute.jit
    def prefix_max(self, value: cutlass.Float32):
        """Inclusive: the maximum over this lane and those before it."""
        for bit in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(value, 1 << bit, mask_and_clamp=0)
            value = cute.arch.fmax(value, other)
        return value

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
        row_max, row_sum, acc_O = self.accumulate(source, row, column, num_splits, 0, 1)
        self.store(acc_O, row_max, row_sum, q_offset, head_block, row, column)

    @cute.jit
    def combine_row(
        self, source: cutlass.Int32, q_offset: cutlass.Int32, head_block: cutlass.Int32, row: cutlass.Int32
    ):
        """Both splits of a row by one warp. What it loads is in flight together."""
        partial_O = cute.make_rmem_tensor((self.vector, self.column_blocks, 2), cutlass.Float32)
        stats = []
        for split in cutlass.range_constexpr(2):
            offset = self.partial_offset(source, split) + row * self.columns
            for block in cutlass.range_constexpr(self.column_blocks):
                column = (block * WARP + self.lane) * self.vector
                if column < self.columns:
                    load_vector(self.partials.iterator, offset + column, partial_O[None, block, split])
            row_stats = self.partials.iterator + (self.partial_rows * self.columns + row)
            row_stats += self.partial_offset(source, split)
            pointers = (row_stats, row_stats + self.partial_rows)
            stats.append([cute.make_tensor(pointer, cute.make_layout(1))[0] for pointer in pointers])
        (first_max, first_sum), (second_max, second_sum) = stats
        row_max = cute.arch.fmax(first_max, second_max)
        first_scale, second_scale = combine_scales(first_max, second_max, row_max)
        row_sum = fma(first_sum, first_scale, second_sum * second_scale)
        for block in cutlass.range_constexpr(self.column_blocks):
            acc_O = cute.make_rmem_tensor(self.vector, cutlass.Float32)
            for j in cutlass.range_constexpr(self.vector):
                acc_O[j] = fma(partial_O[j, block, 0], first_scale, partial_O[j, block, 1] * second_scale)
            column = (block * WARP + self.lane) * self.vector
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
        row_max, row_sum, acc_O = self.accumulate(source, row, column, num_splits, self.warp, WARPS)
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
        row: cutlass.Int32,
        column: cutlass.Int32,
        num_splits: cutlass.Int32,
        first: cutlass.Int32,
        step: cutlass.Constexpr[int],
    ):
        """(row_max, row_sum, the lane's columns of O) of splits `first`, `first + step`, ... of a row."""
        count = (num_splits - first + step - 1) // step
        row_max, row_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        acc_O = cute.make_rmem_tensor(self.vector, cutlass.Float32)
        partial_O = cute.make_rmem_tensor((self.vector, SPLITS_IN_FLIGHT), cutlass.Float32)
        acc_O.fill(0.0)
        stats = self.partials.iterator + self.partial_rows * self.columns + row
        for chunk in cutlass.range(0, count, WARP, unroll=1):
            lane_max, lane_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if chunk + self.lane < count:
                lane_stats = stats + self.partial_offset(source, first + (chunk + self.lane) * step)
                lane_max = cute.make_tensor(lane_stats, cute.make_layout(1))[0]
                lane_sum = cute.make_tensor(lane_stats + self.partial_rows, cute.make_layout(1))[0]
            # In flight while scales are computed.
            self.load(partial_O, source, row, column, first + chunk * step, count - chunk, step)
            new_max = cute.arch.fmax(row_max, cute.arch.warp_reduction(lane_max, cute.arch.fmax))
            reference = finite_or_zero(new_max)
            lane_scale, acc_scale = exp2(lane_max - reference), exp2(row_max - reference)
            row_sum = row_sum * acc_scale + cute.arch.warp_reduction(lane_sum * lane_scale, lambda a, b: a + b)
            row_max = new_max
            for j in cutlass.range_constexpr(self.vector):
                acc_O[j] *= acc_scale
            self.add_scaled(acc_O, partial_O, lane_scale, 0)
            for at in cutlass.range(SPLITS_IN_FLIGHT, cutlass.min(count - chunk, WARP), SPLITS_IN_FLIGHT, unroll=1):
                self.load(partial_O, source, row, column, first + (chunk + at) * step, count - chunk - at, step)
                self.add_scaled(acc_O, partial_O, lane_scale, at)
        return row_max, row_sum, acc_O

    @cute.jit
    def load(
        self,
        partial_O: cute.Tensor,
        source: cutlass.Int32,
        row: cutlass.Int32,
        column: cutlass.Int32,
        first: cutlass.Int32,
        count: cutlass.Int32,
        step: cutlass.Constexpr[int],
    ):
        """The lane's columns of up to SPLITS_IN_FLIGHT splits; 0 for those beyond `count`."""
        partials = self.partials
        partial_O.fill(0.0)
        for i in cutlass.range_constexpr(SPLITS_IN_FLIGHT):
            if i < count and column < self.columns:
                offset = self.partial_offset(source, first + i * step) + row * self.columns + column
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
        request = cutlass.Int32(0)
        if cutlass.const_expr(self.key.scales_by_request):
            request = request_of(self.requests, q_offset)
        factor = out_factor_of(self.key, self.scoring, head_block, request)
        scale, row_lse = finalize(row_max, row_sum, sink, factor)
        out_column = column
        if cutlass.const_expr(self.key.v_splits > 1):
            out_column += v_split_of(self.key, head_block) * self.key.columns
        if cutlass.const_expr(self.key.nvfp4_out):
            nvfp4_out.store_by_lanes(
                [acc_O[j] * scale for j in range(cute.size(acc_O))],
                self.key,
                out,
                self.scoring.out_block_scale,
                token,
                head,
                out_column,
                column < self.key.columns,
            )
        elif column < self.key.columns:
            result = cute.make_rmem_tensor(acc_O.shape, out.element_type)
            round_to([acc_O[j] * scale for j in range(cute.size(acc_O))], result)
            offset = cutlass.Int64(token) * out.stride[0] + head * out.stride[1] + out_column
            store_vector(result, out.iterator, offset)
        if cutlass.const_expr(self.key.lse):
            if out_column == 0:
                lse[token, head] = row_lse

    @cute.jit
    def partial_offset(self, source: cutlass.Int32, split: cutlass.Int32):
        """Where a split's partial result begins, in elements of `partials`."""
        return cutlass.Int64(2 * (source + split) + (1 if split == 0 else 0)) * self.size
