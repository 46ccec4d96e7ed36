# SPDX-License-Identifier: Apache-2.0
"""The softmax warps of each CTA of a pair, for absorbed MLA: softmax, rescaling of O, and epilogue.

Thread t and thread t + 64 of the warpgroup share row t: each has half of the tile's keys, and of V's columns.
"""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.args import Outputs
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.rows import AccumulatorRow
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import num_splits_of, split_of
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WorkTile, WorkTilePipeline, q_head_of
from dsl_backend.attention.cute.score_mod import NoScoreMod, ScoreMod, ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, partial_size
from dsl_backend.attention.cute.sm100.dense_configs import CTA_PAIR
from dsl_backend.attention.cute.sm100.folded_row import FoldedRow, is_last_split
from dsl_backend.attention.cute.sm100.mla_barriers import TwoCtaBarriers
from dsl_backend.attention.cute.sm100.mla_configs import S_STAGES
from dsl_backend.attention.cute.sm100.mla_softmax import RESCALE_THRESHOLD, WARPGROUP_BARRIER
from dsl_backend.attention.cute.sm100.two_cta_mla_mma import o_offset
from dsl_backend.attention.cute.softmax import OnlineSoftmax, finalize
from dsl_backend.attention.cute.tiles import VECTOR
from dsl_backend.primitives import tmem
from dsl_backend.primitives.accumulators import fence_register
from dsl_backend.primitives.copy import clear_rows, exchange_vectors, store_vector
from dsl_backend.primitives.math import add_pair, exp2, finite_or_zero, fma_pair, fmax3_tree, tree_reduce
from dsl_backend.primitives.ring import phase_of, stage_of

ROW_SUM = 2  # index in the exchanged statistics, behind a maximum for each S stage
O_COLUMNS = 32  # of O in registers at a time


class HalfRowSoftmax(OnlineSoftmax):
    """The online softmax of a thread that has half of one row. It computes P of two keys with one instruction.

    Args:
        sStats: [thread, statistic] in shared memory, through which the two threads of a row exchange values.
        thread: of the warpgroup.
    """

    def __init__(self, score_mod: NoScoreMod | ScoreMod, sStats: cute.Tensor, thread: cutlass.Int32) -> None:
        super().__init__(1, 1, score_mod, RESCALE_THRESHOLD)
        self.sStats, self.thread = sStats, thread

    @cute.jit
    def online_softmax_half(self, acc_S: cute.Tensor, acc_scale: cute.Tensor, s_stage: cutlass.Int32):
        """As `online_softmax`; `s_stage`: index of the statistic for the row's maximum."""
        row_max_prev, softmax_scale_log2 = self.row_max[0], self.softmax_scale_log2
        tile_max = fmax3_tree([row_max_prev, *(acc_S[j] for j in range(cute.size(acc_S)))], nan=False)
        tile_max = cute.arch.fmax(tile_max, self.exchange(tile_max, s_stage))
        # Where both are -inf, the difference is NaN and row_max stays.
        moves = (tile_max - row_max_prev) * softmax_scale_log2 > self.rescale_threshold
        row_max = tile_max if moves else row_max_prev
        self.row_max[0] = row_max
        row_max_scaled = finite_or_zero(row_max) * softmax_scale_log2
        acc_scale[0] = exp2(row_max_prev * softmax_scale_log2 - row_max_scaled) if moves else 1.0
        probs = []
        for j in cutlass.range_constexpr(0, cute.size(acc_S), 2):
            power = fma_pair(
                (acc_S[j], acc_S[j + 1]), (softmax_scale_log2, softmax_scale_log2), (-row_max_scaled, -row_max_scaled)
            )
            acc_S[j], acc_S[j + 1] = exp2(power[0]), exp2(power[1])
            probs.append((acc_S[j], acc_S[j + 1]))
        tile_sum = tree_reduce(probs, add_pair)
        self.row_sum[0] = self.row_sum[0] * acc_scale[0] + (tile_sum[0] + tile_sum[1])

    @cute.jit
    def exchange(self, value: cutlass.Float32, statistic: cutlass.Int32):
        """Give a value to the thread with the other half of the row, and return that thread's."""
        sStats = self.sStats
        sStats[self.thread, statistic] = value
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER, number_of_threads=WARPGROUP)
        return sStats[self.thread ^ ROWS, statistic]


class TwoCtaMlaSoftmaxWarps:
    """A thread's half of a row, and what it does with a work tile.

    Args:
        kernel: the `TwoCtaMlaForward`.
        tmem_base: address of the CTA's tensor memory.
        sStats: as `HalfRowSoftmax` takes it.
        sV: [key, column, stage]; sP: [row, key].
    """

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        barriers: TwoCtaBarriers,
        tmem_base: cute.Pointer,
        sStats: cute.Tensor,
        sV: cute.Tensor,
        sP: cute.Tensor,
        outputs: Outputs,
        requests: Requests,
        scoring: ScoreModArgs,
    ) -> None:
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.tmem_base = work_pipeline, barriers, tmem_base
        self.sV, self.sP = sV, sP
        self.out, self.lse, self.partials, fold_workspace = outputs
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.row, self.half = self.thread % ROWS, self.thread // ROWS
        self.keys = kernel.tile_n // CTA_PAIR
        self.folded: Any = None
        if kernel.key.tiles_per_split:
            self.folded = FoldedRow(fold_workspace, ROWS, kernel.dims_v, self.row, self.half)
        self.rows = AccumulatorRow(kernel.key, kernel.tile_n, requests, scoring, self.row, self.half * self.keys)
        self.softmax = HalfRowSoftmax(self.rows.score_mod, sStats, self.thread)
        self.acc_S = cute.make_rmem_tensor(self.keys, cutlass.Float32)
        self.probs = cute.make_rmem_tensor((VECTOR, self.keys // VECTOR), kernel.dtype)
        self.acc_scale = cute.make_rmem_tensor(1, cutlass.Float32)

    @cute.jit
    def run(self):
        work_tiles, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            if cutlass.const_expr(self.key.tiles_per_split):
                for index in cutlass.range(num_splits_of(self.key, work), unroll=1):
                    split = split_of(self.key, work, index)
                    tiles = self.softmax_tiles(split, tiles)
                    self.epilogue(work, split)
                    # MMAs overwrite O.
                    tmem.before_sync()
            else:
                tiles = self.softmax_tiles(work, tiles)
                self.epilogue(work, work)
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid

    @cute.jit
    def softmax_tiles(self, work: WorkTile, tiles: cutlass.Int32):
        """The key tiles of a work tile, or of a split, until O is complete; return `tiles`, those so far."""
        self.softmax.reset()
        self.rows.start(work)
        for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
            self.online_softmax(work, work.n_block_max - 1 - step, tiles, step > 0)
            tiles += 1
        cute.arch.mbarrier_wait(self.barriers.o_full, (tiles - 1) & 1)
        tmem.after_sync()
        return tiles

    @cute.jit
    def online_softmax(self, work: WorkTile, n_block: cutlass.Int32, count: cutlass.Int32, accumulate: cutlass.Boolean):
        """Turn S of a key tile into P in shared memory, and rescale O.

        Args:
            count: key tiles before it.
            accumulate: O holds earlier key tiles of the work tile.
        """
        s_stage = stage_of(count, S_STAGES)
        cute.arch.mbarrier_wait(self.barriers.s_full + s_stage, phase_of(count, S_STAGES))
        tmem.after_sync()
        tmem.load(self.tmem_base, s_stage * self.keys, self.acc_S, self.thread)
        cute.arch.fence_view_async_tmem_load()
        acc_S_row = cute.make_tensor(self.acc_S.iterator, cute.make_layout((1, self.keys)))
        self.rows.apply_score_mod(acc_S_row, work, n_block)
        if n_block >= work.n_block_full_max or n_block < work.n_block_full_min:
            self.rows.apply_mask(acc_S_row, work, n_block)
        self.softmax.online_softmax_half(self.acc_S, self.acc_scale, s_stage)
        self.probs.store(self.acc_S.load().to(self.kernel.dtype).reshape(self.probs.shape))
        self.zero_unseen_v(work, n_block, count)
        # The PV MMA before has read P and written O.
        cute.arch.mbarrier_wait(self.barriers.o_full, (count & 1) ^ 1)
        tmem.after_sync()
        if cute.arch.vote_any_sync(accumulate and self.row < work.num_rows and self.acc_scale[0] != 1.0):
            for first in cutlass.range(0, self.kernel.dims_v // CTA_PAIR, O_COLUMNS, unroll=1):
                acc_O = self.load_o(first, self.acc_scale[0])
                tmem.store(acc_O, self.tmem_base, o_offset(self.kernel) + first, self.thread)
            cute.arch.fence_view_async_tmem_store()
        for i in cutlass.range_constexpr(self.keys // VECTOR):
            target = cute.local_tile(self.sP, (1, VECTOR), (self.row, self.half * (self.keys // VECTOR) + i))
            cute.autovec_copy(self.probs[None, i], cute.group_modes(target, 0, 2))
        cute.arch.fence_proxy("async.shared", space="cta")
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.p_full, 0)

    @cute.jit
    def zero_unseen_v(self, work: WorkTile, n_block: cutlass.Int32, count: cutlass.Int32):
        """Zero V beyond the last key, and V before the windows of all rows: P = 0 does not remove a NaN.

        The MMA warp signals S of such a tile only once V has been loaded.
        """
        keys = work.seqlen_k - n_block * self.kernel.tile_n
        before = self.rows.mask.keys_before_window(work.q_position, n_block)
        if keys < self.kernel.tile_n or before > 0:
            sV = self.sV[None, None, stage_of(count, self.config.stages)]
            clear_rows(sV, cutlass.max(keys, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            if cutlass.const_expr(self.key.has_window_left):
                clear_rows(sV, 0, before, self.thread, WARPGROUP)

    @cute.jit
    def load_o(self, first: cutlass.Int32, scale: cutlass.Float32):
        """Some columns of this thread's O, times a scale."""
        acc_O = cute.make_rmem_tensor(O_COLUMNS, cutlass.Float32)
        tmem.load(self.tmem_base, o_offset(self.kernel) + first, acc_O, self.thread)
        cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(O_COLUMNS):
            acc_O[j] *= scale
        return acc_O

    # ------------------------------------------------------------------ epilogue

    @cute.jit
    def epilogue(self, whole: WorkTile, work: WorkTile):
        """Write the thread's half of a row of O. whole: the work tile; work: the same, or a split of it."""
        row_sum = self.softmax.row_sum[0]
        row_sum += self.softmax.exchange(row_sum, ROW_SUM)
        row_max = self.softmax.row_max[0] * self.softmax.softmax_scale_log2
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                self.store_partial(work, row_max, row_sum)
            else:
                self.finish_row(whole, work, row_max, row_sum)
        else:
            self.finish_row(whole, work, row_max, row_sum)

    @cute.jit
    def finish_row(self, whole: WorkTile, work: WorkTile, row_max: cutlass.Float32, row_sum: cutlass.Float32):
        """Write the half row, or keep it until the splits before have ended."""
        if cutlass.const_expr(self.key.tiles_per_split):
            columns = cutlass.const_expr(self.kernel.dims_v)
            # Fenced: the compiler would fuse this product with a later subtraction, which rounds differently.
            row_max, row_sum, scale_before, scale = self.folded.scales(whole, work, fence_register(row_max), row_sum)
            for first in cutlass.range(0, columns // CTA_PAIR, O_COLUMNS, unroll=1):
                acc_O, column = self.load_o(first, 1.0), self.half * (columns // CTA_PAIR) + first
                self.folded.fold(whole, work, acc_O, column, scale_before, scale)
                if is_last_split(whole, work):
                    tmem.store(acc_O, self.tmem_base, o_offset(self.kernel) + first, self.thread)
                else:
                    self.folded.store(acc_O, column)
            if is_last_split(whole, work):
                cute.arch.fence_view_async_tmem_store()
                self.store_out(work, row_max, row_sum)
            else:
                self.folded.store_stats(row_max, row_sum)
        else:
            self.store_out(work, row_max, row_sum)

    @cute.jit
    def store_partial(self, work: WorkTile, row_max: cutlass.Float32, row_sum: cutlass.Float32):
        """O as it is, in float32, with row_max and row_sum; the combine kernel does the rest."""
        rows, columns = self.rows.requests.rows, cutlass.const_expr(self.kernel.dims_v)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(rows, columns)
        for first in cutlass.range(0, columns // CTA_PAIR, O_COLUMNS, unroll=1):
            acc_O, column = self.load_o(first, 1.0), self.half * (columns // CTA_PAIR) + first
            vectors = cute.make_tensor(acc_O.iterator, cute.make_layout((4, O_COLUMNS // 4)))
            offsets = [cutlass.Int64(row * columns + column) for row in self.row_pair()]
            self.store_row_pair(vectors, partial, offsets, work)
        if self.row < work.num_rows and self.half == 0:
            row_max_partial = partial + rows * columns + self.row
            cute.make_tensor(row_max_partial, cute.make_layout(1))[0] = row_max
            cute.make_tensor(row_max_partial + rows, cute.make_layout(1))[0] = row_sum

    @cute.jit
    def store_out(self, work: WorkTile, row_max: cutlass.Float32, row_sum: cutlass.Float32):
        """O divided by row_sum, rounded, and the LSE."""
        columns, out = cutlass.const_expr(self.kernel.dims_v), self.out
        out_scale, lse = finalize(row_max, row_sum, self.rows.sink(work, 0), self.rows.out_factor(work))
        if cutlass.const_expr(self.key.lse):
            mLSE = self.lse
            if self.row < work.num_rows and self.half == 0:
                mLSE[work.q_offset + self.row // self.key.pack_gqa, self.rows.head(work, 0)] = lse
        offsets = []
        for row in self.row_pair():
            token, head = work.q_offset + row // self.key.pack_gqa, q_head_of(self.key, work.head_block, row)
            offset = cutlass.Int64(token) * out.stride[0] + head * out.stride[1]
            offsets.append(offset + self.half * (columns // CTA_PAIR))
        rounded = cute.make_rmem_tensor((VECTOR, O_COLUMNS // VECTOR), self.kernel.dtype)
        for first in cutlass.range(0, columns // CTA_PAIR, O_COLUMNS, unroll=1):
            acc_O = self.load_o(first, out_scale)
            for j in cutlass.range_constexpr(O_COLUMNS):
                rounded[j] = acc_O[j].to(self.kernel.dtype)
            self.store_row_pair(rounded, out.iterator, [offset + first for offset in offsets], work)

    def row_pair(self) -> tuple[cutlass.Int32, cutlass.Int32]:
        """The rows of two neighbouring lanes: the even one's and the odd one's."""
        even = self.row // 2 * 2
        return even, even + 1

    @cute.jit
    def store_row_pair(self, vectors: cute.Tensor, target: cute.Pointer, offsets: list[cutlass.Int64], work: WorkTile):
        """Store vectors [element, vector] of the thread's row: two lanes write 32 bytes of a row, a sector, at once.

        Args:
            offsets: of the first vector in the target, for each row of the pair, in elements.
        """
        exchange_vectors(vectors, self.thread)
        elements, rows = cutlass.const_expr(cute.size(vectors, mode=[0])), self.row_pair()
        own = self.thread % 2 * elements
        for parity in cutlass.range_constexpr(2):
            if rows[parity] < work.num_rows:
                for i in cutlass.range_constexpr(0, cute.size(vectors, mode=[1]), 2):
                    store_vector(vectors[None, i + parity], target, offsets[parity] + (own + i * elements))
