# SPDX-License-Identifier: Apache-2.0
"""The softmax warps of absorbed MLA for SM100: one warpgroup for softmax, rescaling of O, and epilogue.

A thread has a part of two rows of S, in the register order of a WGMMA accumulator. Of O, which is transposed, it has
one column of each PV MMA, and all rows.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warp as warp_ops

from dsl_backend.attention.cute.args import Outputs
from dsl_backend.attention.cute.combine import combine_scales
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, AccumulatorRows, reshape_acc_to_mn
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import num_splits_of, split_of
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, partial_size
from dsl_backend.attention.cute.sm100.dense_configs import WARP
from dsl_backend.attention.cute.sm100.folded_row import is_last_split
from dsl_backend.attention.cute.sm100.mla_barriers import Barriers
from dsl_backend.attention.cute.sm100.mla_configs import DV_TILE, S_STAGES
from dsl_backend.attention.cute.sm100.mla_mma import o_offset
from dsl_backend.attention.cute.softmax import OnlineSoftmax, finalize
from dsl_backend.primitives import tmem
from dsl_backend.primitives.accumulators import fence_register
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.math import fma
from dsl_backend.primitives.ring import phase_of, stage_of

WARPGROUP_BARRIER = 1  # named barrier of the warpgroup
O_ROWS = 16  # of O in registers at a time
RESCALE_THRESHOLD = 8.0  # O is rescaled when a row's maximum has grown by more than this, in base 2
# The statistics of a row in shared memory: what O is multiplied by for a tile or a split, and at the end; and of a
# batch-invariant layer, what O of the splits before is multiplied by.
ACC_SCALE, OUT_SCALE, FOLD_SCALE = 0, 1, 2


class MlaSoftmaxWarps:
    """A thread's registers, and what it does with a work tile.

    Args:
        kernel: the `MlaForward`.
        tmem_base: address of the CTA's tensor memory.
        sStats: [row, statistic], through which the warps exchange what they know of a row.
        sV: [key, column, stage]; sP: [row, key].
    """

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        barriers: Barriers,
        tmem_base: cute.Pointer,
        sStats: cute.Tensor,
        sV: cute.Tensor,
        sP: cute.Tensor,
        outputs: Outputs,
        requests: Requests,
        scoring: ScoreModArgs,
    ) -> None:
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.tmem_base, self.sStats = work_pipeline, barriers, tmem_base, sStats
        self.sV, self.sP = sV, sP
        self.out, self.lse, self.partials, self.fold_workspace = outputs
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = cute.arch.lane_idx()
        self.row, self.column = self.thread // WARP * 16 + lane // QUAD, lane % QUAD * 2
        self.rows = AccumulatorRows(kernel.key, kernel.tile_n, requests, scoring, self.row, self.column)
        self.softmax = self.make_softmax()
        registers = ROWS_PER_THREAD * kernel.tile_n // QUAD
        self.acc_S = cute.make_rmem_tensor(registers, cutlass.Float32)
        self.probs = cute.make_rmem_tensor(registers, kernel.mma_dtype)
        self.acc_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        self.base2_max = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)

    def make_softmax(self) -> Any:
        return OnlineSoftmax(ROWS_PER_THREAD, QUAD, self.rows.score_mod, RESCALE_THRESHOLD)

    @cute.jit
    def run(self):
        work_tiles, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            self.begin_q(work_tiles)
            if cutlass.const_expr(self.key.tiles_per_split):
                for index in cutlass.range(num_splits_of(self.key, work), unroll=1):
                    split = split_of(self.key, work, index)
                    tiles = self.softmax_tiles(split, tiles)
                    self.end_split(work, split)
            else:
                tiles = self.softmax_tiles(work, tiles)
                self.epilogue(work)
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid

    def begin_q(self, count: cutlass.Int32) -> None:
        """Before a work tile, behind `count` others: nothing, as Q has no scales."""

    @cute.jit
    def softmax_tiles(self, work: WorkTile, tiles: cutlass.Int32):
        """The key tiles of a work tile, or of a split, until O is complete; return `tiles`, those so far."""
        self.softmax.reset()
        self.rows.start(work)
        for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
            self.online_softmax(work, work.n_block_max - 1 - step, tiles, step > 0)
            tiles += 1
        self.softmax.reduce_row_sum()
        self.wait_o(tiles - 1)
        return tiles

    # ------------------------------------------------------------------ softmax

    @cute.jit
    def online_softmax(self, work: WorkTile, n_block: cutlass.Int32, count: cutlass.Int32, accumulate: cutlass.Boolean):
        """Turn S of a key tile into P in shared memory, and rescale O.

        Args:
            count: key tiles before it.
            accumulate: O holds earlier key tiles of the work tile.
        """
        s_stage = count % S_STAGES
        cute.arch.mbarrier_wait(self.barriers.s_full + s_stage, (count // S_STAGES) & 1)
        tmem.after_sync()
        tmem.load_rows(self.tmem_base, s_stage * self.kernel.tile_n, self.acc_S, self.thread)
        cute.arch.fence_view_async_tmem_load()
        acc_S_mn = reshape_acc_to_mn(self.acc_S)
        self.scale_q(acc_S_mn)
        self.rows.apply_score_mod(acc_S_mn, work, n_block)
        if n_block >= work.n_block_full_max or n_block < work.n_block_full_min:
            self.rows.apply_mask(acc_S_mn, work, n_block)
        self.to_probs(acc_S_mn)
        self.zero_unseen_v(work, n_block, count)
        # The PV MMA before has read P and written O.
        cute.arch.mbarrier_wait(self.barriers.o_full, (count & 1) ^ 1)
        tmem.after_sync()
        self.rescale_o(work, accumulate)
        self.store_p()
        cute.arch.fence_proxy("async.shared", space="cta")
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.p_full)

    def scale_q(self, acc_S: cute.Tensor) -> None:
        """Multiply S [row, column] by the scales of Q, where a score modification needs it: here it has none."""

    def to_probs(self, acc_S: cute.Tensor) -> None:
        """Turn scores [row, column] into P, in `probs`."""
        self.softmax.online_softmax(acc_S, self.acc_scale)
        self.probs.store(self.acc_S.load().to(self.kernel.dtype))

    @cute.jit
    def store_p(self):
        """Store P from registers to shared memory."""
        kernel = self.kernel
        # A tiled MMA of warp instructions, whose accumulator has the register order of P.
        tiled_mma = cute.make_tiled_mma(
            warp_ops.MmaF16BF16Op(kernel.dtype, cutlass.Float32, (16, 8, 16)),
            (WARPGROUP // WARP, 1, 1),
            permutation_mnk=(ROWS, 16, 16),
        )
        copy_atom = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(num_matrices=4), kernel.dtype)
        tiled_copy = cute.make_tiled_copy_C(copy_atom, tiled_mma)
        thr_copy = tiled_copy.get_slice(self.thread)
        layout = cute.make_layout(tiled_mma.partition_shape_C((ROWS, kernel.tile_n)))
        probs = cute.make_tensor(self.probs.iterator, layout)
        cute.copy(tiled_copy, tiled_copy.retile(probs), thr_copy.partition_D(self.sP))

    @cute.jit
    def zero_unseen_v(self, work: WorkTile, n_block: cutlass.Int32, count: cutlass.Int32):
        """Zero V beyond the last key, and V before the windows of all rows: P = 0 does not remove a NaN.

        QK of the tile is done, so that nothing reads these rows as K any more.
        """
        keys = work.seqlen_k - n_block * self.kernel.tile_n
        before = self.rows.mask.keys_before_window(work.q_position, n_block)
        if keys < self.kernel.tile_n or before > 0:
            stage, phase = stage_of(count, self.config.stages), phase_of(count, self.config.stages)
            # Not the rope part: it may hold a later tile already.
            for part in cutlass.range_constexpr(1, PARTS):
                cute.arch.mbarrier_wait(self.barriers.k_full + stage * PARTS + part, phase)
            sV = self.sV[None, None, stage]
            clear_rows(sV, cutlass.max(keys, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            if cutlass.const_expr(self.key.has_window_left):
                clear_rows(sV, 0, before, self.thread, WARPGROUP)

    # ------------------------------------------------------------------ O

    @cute.jit
    def wait_o(self, count: cutlass.Int32):
        """Until P V of the count-th key tile, and of all before it, is added to O."""
        cute.arch.mbarrier_wait(self.barriers.o_full, count & 1)
        tmem.after_sync()

    @cute.jit
    def rescale_o(self, work: WorkTile, accumulate: cutlass.Boolean):
        """Multiply O by acc_scale, where the maximum of a row of the warp's columns has grown."""
        # All threads read it before PV of this tile is done, and so before it is written again.
        self.share_stat(self.acc_scale, ACC_SCALE)
        rescales = cutlass.Boolean(False)
        for i in cutlass.range_constexpr(ROWS // WARP):
            row = cute.arch.lane_idx() + i * WARP
            rescales = rescales or (row < work.num_rows and self.sStats[row, ACC_SCALE] != 1.0)
        if cute.arch.vote_any_sync(rescales and accumulate):
            for dv_tile in cutlass.range_constexpr(self.kernel.dims_v // DV_TILE):
                for first in cutlass.range(0, work.num_rows, O_ROWS, unroll=1):
                    column = o_offset(self.kernel, dv_tile) + first
                    acc_O = self.load_o(column, first, ACC_SCALE)
                    tmem.store(acc_O, self.tmem_base, column, self.thread)
            cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def share_stat(self, values: cute.Tensor, stat: cutlass.Constexpr[int]):
        """Give the warpgroup a statistic of this thread's rows."""
        sStats = self.sStats
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                sStats[self.row + 8 * row, stat] = values[row]
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def load_o(self, column: cutlass.Int32, first: cutlass.Int32, stat: cutlass.Constexpr[int]):
        """O of O_ROWS rows, `first` and after, times a statistic of each row; `column`: of tensor memory."""
        acc_O = cute.make_rmem_tensor(O_ROWS, cutlass.Float32)
        tmem.load(self.tmem_base, column, acc_O, self.thread)
        cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(O_ROWS):
            acc_O[j] *= self.sStats[first + j, stat]
        return acc_O

    # ------------------------------------------------------------------ splits

    @cute.jit
    def end_split(self, work: WorkTile, split: WorkTile):
        """Store a split of a batch-invariant layer as a partial result, or fold it into those before."""
        if split.partial_idx != NOT_SPLIT:
            self.store_partial(split)
        else:
            self.fold_split(work, split)
            if is_last_split(work, split):
                self.store_out(split)
        # MMAs overwrite O; and all threads have read the statistics.
        tmem.before_sync()
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def fold_split(self, work: WorkTile, split: WorkTile):
        """Fold the splits before into a split: keep the result in global memory, or the last one in O.

        Global memory has O (row, column), then (row_max, row_sum) of each row.
        """
        columns, row_max = cutlass.const_expr(self.kernel.dims_v), self.softmax.row_max
        row_sum, scales = self.softmax.row_sum, cute.make_rmem_tensor((ROWS_PER_THREAD, 2), cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            stats = self.fold_workspace.iterator + (ROWS * columns + (self.row + 8 * row) * 2)
            stats = cute.make_tensor(stats, cute.make_layout(2))
            max_before, sum_before = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if split.n_block_max < work.n_block_max:
                max_before, sum_before = stats[0], stats[1]
            # Fenced: the compiler would fuse this product with a later subtraction, which rounds differently.
            own_max = fence_register(row_max[row] * self.softmax.softmax_scale_log2)
            new_max = cute.arch.fmax(max_before, own_max)
            scales[row, 0], scales[row, 1] = combine_scales(max_before, own_max, new_max)
            self.base2_max[row] = new_max
            row_sum[row] = fma(row_sum[row], scales[row, 1], sum_before * scales[row, 0])
        # All lanes of a quad have read the statistics.
        self.share_stat(scales[None, 0], FOLD_SCALE)
        self.share_stat(scales[None, 1], ACC_SCALE)
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                stats = self.fold_workspace.iterator + (ROWS * columns + (self.row + 8 * row) * 2)
                stats = cute.make_tensor(stats, cute.make_layout(2))
                stats[0], stats[1] = self.base2_max[row], row_sum[row]
        for dv_tile in cutlass.range_constexpr(columns // DV_TILE):
            for first in cutlass.range(0, work.num_rows, O_ROWS, unroll=1):
                self.fold_rows(work, split, dv_tile, first)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def fold_rows(self, work: WorkTile, split: WorkTile, dv_tile: cutlass.Constexpr[int], first: cutlass.Int32):
        """The same for the thread's column of O_ROWS rows."""
        acc_O, before = (cute.make_rmem_tensor(O_ROWS, cutlass.Float32) for _ in range(2))
        columns = cutlass.const_expr(self.kernel.dims_v)
        offset = first * columns + dv_tile * DV_TILE + self.thread
        folded = cute.make_tensor(self.fold_workspace.iterator + offset, cute.make_layout(O_ROWS, stride=columns))
        before.fill(0.0)
        if split.n_block_max < work.n_block_max:
            for j in cutlass.range_constexpr(O_ROWS):
                before[j] = folded[j]
        column = o_offset(self.kernel, dv_tile) + first
        tmem.load(self.tmem_base, column, acc_O, self.thread)
        cute.arch.fence_view_async_tmem_load()
        sStats = self.sStats
        for j in cutlass.range_constexpr(O_ROWS):
            scale_before, scale = sStats[first + j, FOLD_SCALE], sStats[first + j, ACC_SCALE]
            acc_O[j] = fma(acc_O[j], scale, before[j] * scale_before)
        if is_last_split(work, split):
            tmem.store(acc_O, self.tmem_base, column, self.thread)
        else:
            for j in cutlass.range_constexpr(O_ROWS):
                folded[j] = acc_O[j]

    def stats_of(self, row: int) -> tuple[cutlass.Float32, cutlass.Float32]:
        """(row_max in base 2, row_sum), of all splits if they were folded."""
        if self.key.tiles_per_split:
            return self.base2_max[row], self.softmax.row_sum[row]
        return self.split_stats(row)

    def split_stats(self, row: int) -> tuple[cutlass.Float32, cutlass.Float32]:
        """The same of the last split alone."""
        return self.softmax.row_max[row] * self.softmax.softmax_scale_log2, self.softmax.row_sum[row]

    # ------------------------------------------------------------------ epilogue

    @cute.jit
    def epilogue(self, work: WorkTile):
        """Write O of a work tile."""
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                self.store_partial(work)
            else:
                self.store_out(work)
        else:
            self.store_out(work)

    @cute.jit
    def store_partial(self, work: WorkTile):
        """O as it is, in float32, with row_max and row_sum; the combine kernel does the rest."""
        rows, columns = self.rows.requests.rows, cutlass.const_expr(self.kernel.dims_v)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(rows, columns)
        acc_O = cute.make_rmem_tensor(O_ROWS, cutlass.Float32)
        for dv_tile in cutlass.range_constexpr(columns // DV_TILE):
            for first in cutlass.range(0, work.num_rows, O_ROWS, unroll=1):
                tmem.load(self.tmem_base, o_offset(self.kernel, dv_tile) + first, acc_O, self.thread)
                cute.arch.fence_view_async_tmem_load()
                for j in cutlass.range_constexpr(O_ROWS):
                    if first + j < work.num_rows:
                        target = partial + ((first + j) * columns + dv_tile * DV_TILE + self.thread)
                        cute.make_tensor(target, cute.make_layout(1))[0] = acc_O[j]
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                m = self.row + 8 * row
                if m < work.num_rows:
                    row_max, row_sum = self.split_stats(row)
                    target = partial + rows * columns + m
                    cute.make_tensor(target, cute.make_layout(1))[0] = row_max
                    cute.make_tensor(target + rows, cute.make_layout(1))[0] = row_sum

    @cute.jit
    def store_out(self, work: WorkTile):
        """O divided by row_sum, rounded, and the LSE: neighbouring threads have neighbouring columns."""
        out_scales = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max, row_sum = self.stats_of(row)
            out_scales[row], lse = finalize(row_max, row_sum, self.rows.sink(work, row), self.rows.out_factor(work))
            m = self.row + 8 * row
            if cutlass.const_expr(self.key.lse):
                mLSE = self.lse
                if self.column == 0 and m < work.num_rows:
                    mLSE[work.q_offset + m // self.key.pack_gqa, self.rows.head(work, row)] = lse
        self.share_stat(out_scales, OUT_SCALE)
        for first in cutlass.range(0, work.num_rows, O_ROWS, unroll=1):
            offsets = [self.out_offset(work, first + j) for j in range(O_ROWS)]
            for dv_tile in cutlass.range_constexpr(self.kernel.dims_v // DV_TILE):
                acc_O = self.load_o(o_offset(self.kernel, dv_tile) + first, first, OUT_SCALE)
                for j in cutlass.range_constexpr(O_ROWS):
                    if first + j < work.num_rows:
                        target = self.out.iterator + (offsets[j] + dv_tile * DV_TILE)
                        cute.make_tensor(target, cute.make_layout(1))[0] = acc_O[j].to(self.kernel.dtype)

    def out_offset(self, work: WorkTile, row: cutlass.Int32) -> cutlass.Int64:
        """Of the thread's first column in a row of the output, in elements."""
        token = work.q_offset + row // self.key.pack_gqa
        head = work.head_block * self.key.pack_gqa + row % self.key.pack_gqa
        return cutlass.Int64(token) * self.out.stride[0] + head * self.out.stride[1] + self.thread
