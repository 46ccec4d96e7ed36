# SPDX-License-Identifier: Apache-2.0
"""The correction role: a warpgroup rescales O to the row_max of the next P, and stores the outputs."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute import nvfp4_out
from dsl_backend.attention.cute.args import Outputs
from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import num_splits_of, split_of
from dsl_backend.attention.cute.scheduler.work_tile import (
    NOT_SPLIT,
    WorkTile,
    WorkTilePipeline,
    lse_rows,
    q_head_of,
    v_split_of,
)
from dsl_backend.attention.cute.score_mod import ScoreModArgs, out_factor_of
from dsl_backend.attention.cute.sizes import WARPGROUP, partial_size
from dsl_backend.attention.cute.sm100.dense_barriers import AnyBarriers
from dsl_backend.attention.cute.sm100.dense_configs import MMA_M, WARP
from dsl_backend.attention.cute.sm100.dense_mma import tmem_offset_O
from dsl_backend.attention.cute.sm100.dense_softmax import ACC_SCALE, ROW_MAX, ROW_SUM
from dsl_backend.attention.cute.sm100.folded_row import FoldedRow, is_last_split
from dsl_backend.attention.cute.sm100.idle_warps import arrive, arrive_count_of
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVStages, SharedKVStages
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.attention.cute.tiles import VECTOR, TiledKernel, row_offset, store_rows, vector_of
from dsl_backend.primitives import tmem
from dsl_backend.primitives.accumulators import round_to
from dsl_backend.primitives.copy import clear_rows, exchange_vectors, store_vector
from dsl_backend.primitives.math import exp2, finite_or_zero, fma_pair, in_pairs, mul_pair
from dsl_backend.primitives.ring import phase_of, stage_of

BARRIER_ID = 1  # named barrier of the warpgroup
O_COLUMNS = 16  # of O in registers at a time


class CorrectionWarps:
    """A thread's row of each S stage.

    Args:
        sStats: (row, ACC_SCALE ... ROW_MAX, S stage), from the softmax warps.
        sO: (row, dim, q_stage), in the memory of Q.
    """

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        barriers: AnyBarriers,
        tmem_ptr: cute.Pointer,
        sStats: cute.Tensor,
        kv_stages: SeparateKVStages | SharedKVStages,
        sO: cute.Tensor,
        outputs: Outputs,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.tmem_ptr, self.sStats = work_pipeline, barriers, tmem_ptr, sStats
        self.kv_stages, self.sO = kv_stages, sO
        self.out, self.lse, self.partials, fold_workspace = outputs
        self.scoring, self.requests, self.partial_rows = scoring, requests, requests.rows
        self.mask = Mask(kernel.key, kernel.tile_n, requests)
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        # By S stage.
        self.folded: list[FoldedRow] = []
        if kernel.key.tiles_per_split:
            rows, columns = kernel.tile_m, kernel.dims_v
            self.folded = [
                FoldedRow(fold_workspace, rows, columns, s_stage * MMA_M + self.thread)
                for s_stage in range(kernel.s_stages)
            ]
        self.skip_idle_warps = kernel.skip_idle_warps
        self.arrive_count = cute.make_rmem_tensor(1, cutlass.Int32) if self.skip_idle_warps else None

    def run(self) -> None:
        # Idle warps meet the others where an output is stored: otherwise they could be a phase ahead.
        one_order = self.skip_idle_warps or self.kernel.alternate or self.key.tiles_per_split
        if self.config.query_stages > 1 and not one_order:
            self.run_ahead()
        else:
            self.run_in_order()

    @cute.jit
    def run_ahead(self):
        """Free O for the next work tile before this one's output is stored: there is a Q stage for each."""
        work_idx, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        if valid != 0:
            self.begin_work_tile(work, work_idx, kv_idx)
        while valid != 0:
            q_stage = stage_of(work_idx, self.config.query_stages)
            self.finish_work_tile(work, work, q_stage, work_idx, kv_idx)
            # The next work tile's MMAs overwrite O.
            tmem.before_sync()
            kv_idx += work.n_block_max - work.n_block_min
            work_idx += 1
            next_work = self.work_pipeline.consume(work_idx)
            valid = next_work.valid
            if valid != 0:
                self.begin_work_tile(next_work, work_idx, kv_idx)
            self.store_tile(work, q_stage)
            work = next_work

    @cute.jit
    def begin_work_tile(self, work: WorkTile, work_idx: cutlass.Int32, kv_idx: cutlass.Int32):
        """The first P of a work tile; arguments as of correct_work_tile."""
        self.clear_v_after_end(work, kv_idx)
        self.first_ps(work, work_idx, kv_idx)

    @cute.jit
    def run_in_order(self):
        work_idx, kv_idx, odd_idx = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        split_idx = cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            self.clear_v_after_end(work, kv_idx)
            num_tiles = work.n_block_max - work.n_block_min
            q_stage = stage_of(work_idx, self.config.query_stages)
            if cutlass.const_expr(self.skip_idle_warps):
                arrive_count = arrive_count_of(work, self.thread)
                self.arrive_count.fill(arrive_count)
                if arrive_count > 0:
                    self.correct_splits(work, q_stage, work_idx, split_idx, kv_idx, odd_idx)
            else:
                self.correct_splits(work, q_stage, work_idx, split_idx, kv_idx, odd_idx)
            self.store_tile(work, q_stage)
            if cutlass.const_expr(self.key.tiles_per_split):
                split_idx += num_splits_of(self.key, work)
            kv_idx += num_tiles
            odd_idx += num_tiles // 2
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid

    @cute.jit
    def correct_splits(
        self,
        work: WorkTile,
        q_stage: cutlass.Int32,
        work_idx: cutlass.Int32,
        split_idx: cutlass.Int32,
        kv_idx: cutlass.Int32,
        odd_idx: cutlass.Int32,
    ):
        """The splits of a work tile, or all of it. split_idx: splits before the work tile; others: see below."""
        if cutlass.const_expr(self.key.tiles_per_split):
            for index in cutlass.range(num_splits_of(self.key, work), unroll=1):
                split = split_of(self.key, work, index)
                first_idx = kv_idx + work.n_block_max - split.n_block_max
                self.correct_work_tile(work, split, q_stage, split_idx + index, first_idx, odd_idx)
                # The next split's MMAs overwrite O.
                tmem.before_sync()
        else:
            self.correct_work_tile(work, work, q_stage, work_idx, kv_idx, odd_idx)

    @cute.jit
    def correct_work_tile(
        self,
        whole: WorkTile,
        work: WorkTile,
        q_stage: cutlass.Int32,
        work_idx: cutlass.Int32,
        kv_idx: cutlass.Int32,
        odd_idx: cutlass.Int32,
    ):
        """Rescale O for each key tile of a work tile, then write the output to shared memory, or the partial result.

        Softmax warps send statistics once for each key tile and once for each work tile, which counts `stats_idx`.

        Args:
            whole: the work tile. work: the same, or a split of it.
            work_idx, kv_idx: work tiles, or splits, and key tiles before this one.
            odd_idx: of these key tiles those of S stage 1, where the S stages alternate.
        """
        num_tiles = work.n_block_max - work.n_block_min
        if cutlass.const_expr(self.kernel.alternate):
            even_idx = kv_idx - odd_idx
            self.alternate_p(work, kv_idx, 0, 0, even_idx + work_idx, True)
            if num_tiles > 1:
                self.alternate_p(work, kv_idx, 1, 1, odd_idx + work_idx, True)
            for pair in cutlass.range(1, (num_tiles + 1) // 2, unroll=1):
                self.alternate_p(work, kv_idx, 2 * pair, 0, even_idx + pair + work_idx, False)
                if 2 * pair + 1 < num_tiles:
                    self.alternate_p(work, kv_idx, 2 * pair + 1, 1, odd_idx + pair + work_idx, False)
            self.epilogue_of_both(
                work,
                q_stage,
                work_idx,
                even_idx + (num_tiles + 1) // 2 + work_idx,
                odd_idx + num_tiles // 2 + work_idx,
            )
        else:
            self.first_ps(work, work_idx, kv_idx)
            self.finish_work_tile(whole, work, q_stage, work_idx, kv_idx)

    @cute.jit
    def alternate_p(
        self,
        work: WorkTile,
        kv_idx: cutlass.Int32,
        step: cutlass.Int32 | int,
        s_stage: cutlass.Constexpr[int],
        stats_idx: cutlass.Int32,
        first: cutlass.Constexpr[bool],
    ):
        """As `first_p` or `next_p`, where the S stages alternate; other arguments as of `clear_v_before_window`.

        Statistics come after P V of two tiles before, so that V's stage has its values of then. Ahead of that a wait
        for V may end at once where there are two stages, for the stage's phase before those.
        """
        self.wait_stats(s_stage, stats_idx)
        self.clear_v_before_window(work, kv_idx, step)
        if cutlass.const_expr(first):
            self.arrive_p_full(s_stage)
        else:
            self.rescale_and_arrive(s_stage)

    @cute.jit
    def first_ps(self, work: WorkTile, work_idx: cutlass.Int32, kv_idx: cutlass.Int32):
        """Of all S stages; arguments as of correct_work_tile."""
        self.clear_v_before_window(work, kv_idx, 0)
        for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
            self.first_p(s_stage, kv_idx + work_idx)

    @cute.jit
    def finish_work_tile(
        self,
        whole: WorkTile,
        work: WorkTile,
        q_stage: cutlass.Int32,
        work_idx: cutlass.Int32,
        kv_idx: cutlass.Int32,
    ):
        """All of correct_work_tile after the first P, with its arguments."""
        self.rescale_all(work, work_idx, kv_idx)
        # Before O is complete: the softmax warps wait for this at the next work tile.
        row_sums, row_maxes = [], []
        for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
            row_sum, row_max = self.final_stats_of(s_stage, work, work_idx, kv_idx)
            row_sums.append(row_sum)
            row_maxes.append(row_max)
        self.wait_o(work_idx)
        for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
            row_sum, row_max = row_sums[s_stage], row_maxes[s_stage]
            row = s_stage * MMA_M + self.thread
            self.epilogue(whole, work, row, q_stage, row_max, row_sum, [(s_stage, None)])

    @cute.jit
    def rescale_all(self, work: WorkTile, work_idx: cutlass.Int32, kv_idx: cutlass.Int32):
        """Rescale O for each P of a work tile but the first."""
        first_idx, num_tiles = kv_idx + work_idx, work.n_block_max - work.n_block_min
        for stats_idx in cutlass.range(first_idx + 1, first_idx + num_tiles, unroll=1):
            self.clear_v_before_window(work, kv_idx, stats_idx - first_idx)
            for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
                self.next_p(s_stage, stats_idx)

    @cute.jit
    def final_stats_of(
        self, s_stage: cutlass.Constexpr[int], work: WorkTile, work_idx: cutlass.Int32, kv_idx: cutlass.Int32
    ):
        """(row_sum, row_max) of this thread's row of an S stage that has all key tiles of a work tile."""
        return self.final_stats(s_stage, kv_idx + work_idx + work.n_block_max - work.n_block_min)

    @cute.jit
    def store_tile(self, work: WorkTile, q_stage: cutlass.Int32):
        """Store the output tile from shared memory, if it is there; then the Q stage and O are free."""
        tmem.before_sync()
        if cutlass.const_expr(not self.config.direct_output):
            self.store_tile_from_smem(work, q_stage)

    @cute.jit
    def store_tile_from_smem(self, work: WorkTile, q_stage: cutlass.Int32):
        self.sync_warpgroup()
        # NVFP4 outputs are stored from registers.
        if work.partial_idx == NOT_SPLIT and cutlass.const_expr(not self.key.nvfp4_out):
            sO = self.sO[None, None, q_stage]
            store_rows(sO, self.out, work, self.key, 0, self.kernel.tile_m, self.thread, WARPGROUP)
        # TMA writes the next Q by the async proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.q_empty + q_stage)

    def sync_warpgroup(self) -> None:
        cute.arch.barrier(barrier_id=BARRIER_ID, number_of_threads=WARPGROUP)

    @cute.jit
    def first_p(self, s_stage: cutlass.Constexpr[int], stats_idx: cutlass.Int32):
        """O is free for the first P of a work tile."""
        self.wait_stats(s_stage, stats_idx)
        self.arrive_p_full(s_stage)

    @cute.jit
    def next_p(self, s_stage: cutlass.Constexpr[int], stats_idx: cutlass.Int32):
        """Rescale O to the row_max of the next P."""
        self.wait_stats(s_stage, stats_idx)
        self.rescale_and_arrive(s_stage)

    @cute.jit
    def rescale_and_arrive(self, s_stage: cutlass.Constexpr[int]):
        """Rescale O as the statistics that have arrived say, and tell of it."""
        self.rescale_if_needed(s_stage, self.sStats[self.thread, ACC_SCALE, s_stage])
        self.arrive_p_full(s_stage)

    @cute.jit
    def arrive_p_full(self, s_stage: cutlass.Constexpr[int]):
        """O is rescaled; and the statistics have been read, which the next S comes after."""
        arrive(self.barriers.p_full + s_stage, self.arrive_count)

    @cute.jit
    def wait_o(self, work_idx: cutlass.Int32):
        cute.arch.mbarrier_wait(self.barriers.o_full, work_idx & 1)
        tmem.after_sync()

    @cute.jit
    def epilogue_of_both(
        self,
        work: WorkTile,
        q_stage: cutlass.Int32,
        work_idx: cutlass.Int32,
        even_stats_idx: cutlass.Int32,
        odd_stats_idx: cutlass.Int32,
    ):
        """Both S stages have a part of the key tiles of the same rows."""
        self.wait_o(work_idx)
        row_sums, row_maxes = [], []
        for s_stage, stats_idx in ((0, even_stats_idx), (1, odd_stats_idx)):
            row_sum, row_max = self.final_stats(s_stage, stats_idx)
            row_sums.append(row_sum)
            row_maxes.append(row_max)
        row_max = cute.arch.fmax(row_maxes[0], row_maxes[1])
        scales = [exp2(one - finite_or_zero(row_max)) for one in row_maxes]
        row_sum = row_sums[0] * scales[0] + row_sums[1] * scales[1]
        self.epilogue(work, work, self.thread, q_stage, row_max, row_sum, list(enumerate(scales)))

    @cute.jit
    def final_stats(self, s_stage: cutlass.Constexpr[int], stats_idx: cutlass.Int32):
        """(row_sum, row_max) of this thread's row, at the end of a work tile."""
        self.wait_stats(s_stage, stats_idx)
        row_sum, row_max = self.sStats[self.thread, ROW_SUM, s_stage], self.sStats[self.thread, ROW_MAX, s_stage]
        arrive(self.barriers.stats_empty + s_stage, self.arrive_count)
        return row_sum, row_max

    @cute.jit
    def wait_stats(self, s_stage: cutlass.Constexpr[int], stats_idx: cutlass.Int32):
        cute.arch.mbarrier_wait(self.barriers.stats_full + s_stage, stats_idx & 1)

    @cute.jit
    def rescale_if_needed(self, s_stage: cutlass.Constexpr[int], acc_scale: cutlass.Float32):
        """Rescale O if a row of the warp needs it. P V of the tile before is done, since S came after it."""
        # This order of the branches takes the vote as it is. The other order negates it first, for every tile.
        if cute.arch.vote_all_sync(acc_scale == 1.0):
            pass
        else:
            self.rescale(s_stage, acc_scale)

    def rescale(self, s_stage: int, acc_scale: cutlass.Float32) -> None:
        """Multiply this thread's row of O by acc_scale."""
        tmem.after_sync()
        tmem_O = self.tmem_ptr + tmem_offset_O(self.kernel, s_stage)
        for column in range(0, self.kernel.dims_v, O_COLUMNS):
            acc_O = cute.make_rmem_tensor(O_COLUMNS, cutlass.Float32)
            tmem.load(tmem_O, column, acc_O, self.thread)
            cute.arch.fence_view_async_tmem_load()
            for j in range(0, O_COLUMNS, 2):
                acc_O[j], acc_O[j + 1] = mul_pair((acc_O[j], acc_O[j + 1]), (acc_scale, acc_scale))
            tmem.store(acc_O, tmem_O, column, self.thread)
        cute.arch.fence_view_async_tmem_store()
        tmem.before_sync()

    @cute.jit
    def epilogue(
        self,
        whole: WorkTile,
        work: WorkTile,
        row: cutlass.Int32,
        q_stage: cutlass.Int32,
        row_max: cutlass.Float32,
        row_sum: cutlass.Float32,
        o_scales: cutlass.Constexpr,
    ):
        """Finish a row: normalize O and write it to shared memory, or store it as a partial result.

        Args:
            whole: the work tile. work: the same, or a split of it.
            row_max: in base 2, scaled.
            o_scales: (S stage, what its O is multiplied by) for each S stage that has a part of the row; None for 1.
        """
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                self.store_partial(work, row, row_max, row_sum, o_scales)
            else:
                self.finish_row(whole, work, row, q_stage, row_max, row_sum, o_scales)
        else:
            self.finish_row(whole, work, row, q_stage, row_max, row_sum, o_scales)

    @cute.jit
    def finish_row(
        self,
        whole: WorkTile,
        work: WorkTile,
        row: cutlass.Int32,
        q_stage: cutlass.Int32,
        row_max: cutlass.Float32,
        row_sum: cutlass.Float32,
        o_scales: cutlass.Constexpr,
    ):
        """Normalize a row, or keep it until the splits before have ended."""
        if cutlass.const_expr(self.key.tiles_per_split):
            s_stage = cutlass.const_expr(o_scales[0][0])
            row_max, row_sum, scale_before, scale = self.folded[s_stage].scales(whole, work, row_max, row_sum)
            for group in cutlass.range(self.kernel.dims_v // O_COLUMNS, unroll=1):
                column = cute.assume(group * O_COLUMNS, divby=O_COLUMNS)
                acc_O = self.load_o_sum(work, column, o_scales)
                self.folded[s_stage].fold(whole, work, acc_O, column, scale_before, scale)
                if is_last_split(whole, work):
                    tmem.store(acc_O, self.tmem_ptr + tmem_offset_O(self.kernel, s_stage), column, self.thread)
                else:
                    self.folded[s_stage].store(acc_O, column)
            if is_last_split(whole, work):
                cute.arch.fence_view_async_tmem_store()
                self.store_normalized(work, row, q_stage, row_max, row_sum, o_scales)
            else:
                self.folded[s_stage].store_stats(row_max, row_sum)
        else:
            self.store_normalized(work, row, q_stage, row_max, row_sum, o_scales)

    @cute.jit
    def load_o(self, s_stage: cutlass.Constexpr[int], column: cutlass.Int32, acc_O: cute.Tensor):
        """Load columns of this thread's row of O."""
        column = cute.assume(column, divby=O_COLUMNS)
        tmem.load(self.tmem_ptr + tmem_offset_O(self.kernel, s_stage), column, acc_O, self.thread)
        cute.arch.fence_view_async_tmem_load()

    @cute.jit
    def load_o_sum(self, work: WorkTile, column: cutlass.Int32, o_scales: cutlass.Constexpr):
        """O_COLUMNS columns of this thread's row: O of the S stages, each times its scale, added up."""
        acc_O = cute.make_rmem_tensor(O_COLUMNS, cutlass.Float32)
        self.load_o(o_scales[0][0], column, acc_O)
        if cutlass.const_expr(len(o_scales) > 1):
            (_, scale), (other_stage, other_scale) = o_scales
            for j in cutlass.range_constexpr(0, O_COLUMNS, 2):
                acc_O[j], acc_O[j + 1] = mul_pair((acc_O[j], acc_O[j + 1]), (scale, scale))
            # O of an S stage without a key tile was never written.
            if work.n_block_max - work.n_block_min > 1:
                other_O = cute.make_rmem_tensor(O_COLUMNS, cutlass.Float32)
                self.load_o(other_stage, column, other_O)
                for j in cutlass.range_constexpr(0, O_COLUMNS, 2):
                    others, scales = (other_O[j], other_O[j + 1]), (other_scale, other_scale)
                    acc_O[j], acc_O[j + 1] = fma_pair(others, scales, (acc_O[j], acc_O[j + 1]))
        return acc_O

    @cute.jit
    def store_normalized(
        self,
        work: WorkTile,
        row: cutlass.Int32,
        q_stage: cutlass.Int32,
        row_max: cutlass.Float32,
        row_sum: cutlass.Float32,
        o_scales: cutlass.Constexpr,
    ):
        """Store the LSE of a row, and its output to shared memory."""
        head = q_head_of(self.key, work.head_block, row)
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[head].to(cutlass.Float32)
        factor = out_factor_of(self.key, self.scoring, work.head_block, work.kv_source)
        out_scale, row_lse = finalize(row_max, row_sum, sink, factor)
        if cutlass.const_expr(self.key.lse):
            mLSE = self.lse
            if row < lse_rows(self.key, work):
                mLSE[work.q_offset + row // self.key.pack_gqa, head] = row_lse
        if cutlass.const_expr(self.key.nvfp4_out):
            self.store_normalized_nvfp4(work, row, out_scale, o_scales)
        elif cutlass.const_expr(self.config.direct_output and self.key.out_format is not None):
            self.store_normalized_e4m3(work, row, out_scale, o_scales)
        elif cutlass.const_expr(self.config.direct_output):
            self.store_normalized_directly(work, row, out_scale, o_scales)
        else:
            self.store_normalized_to_smem(work, row, q_stage, out_scale, o_scales)

    @cute.jit
    def store_normalized_directly(
        self, work: WorkTile, row: cutlass.Int32, out_scale: cutlass.Float32, o_scales: cutlass.Constexpr
    ):
        """Store a row of the output. Two lanes write 32 bytes of a row, a sector, at once."""
        rows = [row // 2 * 2, row // 2 * 2 + 1]
        offsets = [row_offset(self.out, work, self.key, one) for one in rows]
        own = self.thread % 2 * VECTOR
        for group in cutlass.range(self.kernel.dims_v // O_COLUMNS, unroll=1):
            column, rO = group * O_COLUMNS + own, self.rounded(work, group, out_scale, o_scales)
            exchange_vectors(rO, self.thread)
            if column < self.key.columns:
                for parity in cutlass.range_constexpr(2):
                    if rows[parity] < work.num_rows:
                        for i in cutlass.range_constexpr(parity, O_COLUMNS // VECTOR, 2):
                            store_vector(rO[None, i], self.out.iterator, offsets[parity] + column)

    @cute.jit
    def store_normalized_e4m3(
        self, work: WorkTile, row: cutlass.Int32, out_scale: cutlass.Float32, o_scales: cutlass.Constexpr
    ):
        """Store a row of an output of bytes, 16 at a time: the group after completes a sector."""
        offset = row_offset(self.out, work, self.key, row)
        for group in cutlass.range(self.kernel.dims_v // O_COLUMNS, unroll=1):
            column, rO = group * O_COLUMNS, self.rounded(work, group, out_scale, o_scales)
            if row < work.num_rows and column < self.key.columns:
                store_vector(rO[None, 0], self.out.iterator, offset + column)

    @cute.jit
    def store_normalized_nvfp4(
        self, work: WorkTile, row: cutlass.Int32, out_scale: cutlass.Float32, o_scales: cutlass.Constexpr
    ):
        """Store a row of an output in NVFP4, two blocks at a time."""
        token, head = work.q_offset + row // self.key.pack_gqa, q_head_of(self.key, work.head_block, row)
        first = v_split_of(self.key, work.head_block) * self.key.columns
        for pair in cutlass.range(self.key.columns // nvfp4_out.PAIR, unroll=1):
            column, blocks = pair * nvfp4_out.PAIR, []
            for offset in cutlass.range_constexpr(0, nvfp4_out.PAIR, O_COLUMNS):
                acc_O = self.load_o_sum(work, column + offset, o_scales)
                blocks.append(in_pairs(mul_pair, [acc_O[j] for j in range(O_COLUMNS)], [out_scale] * O_COLUMNS))
            nvfp4_out.store_pair(
                blocks,
                self.key,
                self.out,
                self.scoring.out_block_scale,
                token,
                head,
                first + column,
                row < work.num_rows,
            )

    @cute.jit
    def rounded(self, work: WorkTile, group: cutlass.Int32, out_scale: cutlass.Float32, o_scales: cutlass.Constexpr):
        """O_COLUMNS columns of this thread's row of the output, [element, vector]."""
        acc_O = self.load_o_sum(work, group * O_COLUMNS, o_scales)
        vector = cutlass.const_expr(vector_of(self.out))
        rO = cute.make_rmem_tensor((vector, O_COLUMNS // vector), self.out.element_type)
        for j in cutlass.range_constexpr(0, O_COLUMNS, 2):
            acc_O[j], acc_O[j + 1] = mul_pair((acc_O[j], acc_O[j + 1]), (out_scale, out_scale))
        round_to([acc_O[j] for j in range(O_COLUMNS)], rO)
        return rO

    @cute.jit
    def store_normalized_to_smem(
        self,
        work: WorkTile,
        row: cutlass.Int32,
        q_stage: cutlass.Int32,
        out_scale: cutlass.Float32,
        o_scales: cutlass.Constexpr,
    ):
        sO = self.sO[None, None, q_stage]
        # Unrolled, the addresses of all column groups would be in registers.
        for group in cutlass.range(self.kernel.dims_v // O_COLUMNS, unroll=1):
            rO = self.rounded(work, group, out_scale, o_scales)
            # Of an output of bytes, an element of 16 bits has two of them.
            vectors = cutlass.const_expr(O_COLUMNS // vector_of(self.out))
            for i in cutlass.range_constexpr(vectors):
                target = cute.local_tile(sO, (1, VECTOR), (row, group * vectors + i))
                stored = cute.recast_tensor(rO[None, i], sO.element_type)
                cute.autovec_copy(stored, cute.group_modes(target, 0, 2))

    @cute.jit
    def store_partial(
        self,
        work: WorkTile,
        row: cutlass.Int32,
        row_max: cutlass.Float32,
        row_sum: cutlass.Float32,
        o_scales: cutlass.Constexpr,
    ):
        """Store a row of O, its row_max and row_sum in float32, for the combine kernel."""
        partial_rows, columns = self.partial_rows, cutlass.const_expr(self.kernel.dims_v)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(partial_rows, columns)
        for group in cutlass.range(columns // O_COLUMNS, unroll=1):
            acc_O = self.load_o_sum(work, group * O_COLUMNS, o_scales)
            if row < work.num_rows:
                for i in cutlass.range_constexpr(0, O_COLUMNS, 4):
                    vector = cute.make_tensor(acc_O.iterator + i, cute.make_layout(4))
                    store_vector(vector, partial, row * columns + group * O_COLUMNS + i)
        if row < work.num_rows:
            stats = partial + partial_rows * columns + row
            cute.make_tensor(stats, cute.make_layout(1))[0] = row_max
            cute.make_tensor(stats + partial_rows, cute.make_layout(1))[0] = row_sum

    @cute.jit
    def clear_v_after_end(self, work: WorkTile, kv_idx: cutlass.Int32):
        """Zero V after the last key, which can be NaN: P = 0 does not remove it."""
        num_keys = work.seqlen_k - (work.n_block_max - 1) * self.kernel.tile_n
        if num_keys < self.kernel.tile_n:
            self.wait_v(kv_idx)
            clear_rows(self.v_rows(kv_idx), cutlass.max(num_keys, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(self.skip_idle_warps):
                # Other warps arrive for idle warps.
                self.sync_warpgroup()

    def v_rows(self, kv_idx: cutlass.Int32) -> cute.Tensor:
        """V of a key tile, [key, column]."""
        return self.kv_stages.sV[None, None, self.kv_stages.v_stage(kv_idx)]

    @cute.jit
    def clear_v_before_window(self, work: WorkTile, first_idx: cutlass.Int32, step: cutlass.Int32 | int):
        """Zero V before the windows of all rows. Only the last tile of a work tile can have such keys.

        Args:
            first_idx: key tiles before the work tile.
            step: those of the work tile before this one.
        """
        if cutlass.const_expr(self.key.has_window_left):
            num_keys = self.mask.keys_before_window(work.q_position, work.n_block_min)
            if step == work.n_block_max - work.n_block_min - 1 and num_keys > 0:
                kv_idx = first_idx + step
                self.wait_v(kv_idx)
                # By the active warps: each arrives after what it cleared, and the first one for the idle ones.
                threads = cutlass.Int32(WARPGROUP)
                if cutlass.const_expr(self.skip_idle_warps):
                    threads = cutlass.min((work.num_rows + WARP - 1) // WARP * WARP, WARPGROUP)
                clear_rows(self.v_rows(kv_idx), 0, num_keys, self.thread, threads)
                cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def wait_v(self, kv_idx: cutlass.Int32):
        stages = self.config.stages
        cute.arch.mbarrier_wait(self.barriers.v_full + stage_of(kv_idx, stages), phase_of(kv_idx, stages))
