# SPDX-License-Identifier: Apache-2.0
"""The math role: warpgroups that multiply, weigh and store.

The product of the next keys is issued before that of the last weights and values, so that the tensor cores have work
while a warpgroup is at its softmax (Shah et al., 2024); with two warpgroups, they take turns at issuing.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from dsl_backend.attention.cute.combine import combine_scales, fold_workspace_size, partial_size
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, AccumulatorRows, reshape_acc_to_mn, store_acc_row
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, lse_rows
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm90.dense_configs import ROWS
from dsl_backend.attention.cute.sm90.speculative_softmax import SpeculativeSoftmax
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.attention.cute.tiles import row_offset
from dsl_backend.primitives.accumulators import downcast, fence_operand, fence_register, keep_alive, words_of
from dsl_backend.primitives.copy import clear_rows, load_vector, store_vector
from dsl_backend.primitives.math import fma
from dsl_backend.primitives.ring import phase_of, stage_of

# Named barriers; 0 is the block's own.
TURN, ALL_MATH = 1, 4
# Sums are shrunk when a row's largest score has grown by a factor of 2^SLACK.
SLACK = 8.0


class MmaConsumer:
    """A math thread's registers and what it does with an item."""

    def __init__(
        self,
        kernel,
        work_pipeline,
        mmas,
        barriers,
        sQ,
        sK,
        sV,
        outputs,
        requests,
        scoring,
        thread,
    ):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers = work_pipeline, barriers
        self.tiled_mma_qk = with_accumulate(tiled_mma_qk, False)
        self.adding_product = with_accumulate(tiled_mma_qk, True)
        self.adding_weighing = with_accumulate(tiled_mma_pv, True)
        self.sQ, self.sV = sQ, sV
        self.out, self.lse, self.partials = outputs
        self.thread = thread
        self.group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        lane = thread % 32
        # Where the accumulators' elements are (PTX ISA, wgmma .m64nNk16, matrix D).
        self.row = self.group * ROWS + thread % WARPGROUP // 32 * 16 + lane // QUAD
        self.column = lane % QUAD * 2
        self.rows = AccumulatorRows(kernel.key, kernel.tile_n, requests, scoring, self.row, self.column)
        mine = tiled_mma_qk.get_slice(thread)
        weighs = tiled_mma_pv.get_slice(thread)
        self.fQ = tiled_mma_qk.make_fragment_A(mine.partition_A(sQ))
        self.fK = tiled_mma_qk.make_fragment_B(mine.partition_B(sK))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        self.fV = tiled_mma_pv.make_fragment_B(weighs.partition_B(sVt))
        self.S = cute.make_rmem_tensor(mine.partition_shape_C((kernel.tile_m, kernel.tile_n)), cutlass.Float32)
        self.P = cute.make_rmem_tensor(weighs.partition_shape_A((kernel.tile_m, kernel.tile_n)), kernel.dtype_v)
        self.O = cute.make_rmem_tensor(weighs.partition_shape_C((kernel.tile_m, kernel.dims_v)), cutlass.Float32)
        # Weights on their way to P, while products read it.
        self.guessed = cute.make_rmem_tensor(self.P.shape, kernel.dtype_v) if self.config.speculative_max else None
        self.acc_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        self.softmax = SpeculativeSoftmax(
            ROWS_PER_THREAD, QUAD, self.rows.score_mod, SLACK, in_order=kernel.key.tiles_per_split > 0
        )
        # Of a split that is complete, or of all that were folded: each row's largest base-2 score, and its total.
        self.ended_top = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        self.ended_total = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)

    @cute.jit
    def run(self):
        groups = cutlass.const_expr(self.config.groups)
        if cutlass.const_expr(self.config.ping_pong):
            if self.group == groups - 1:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)
        stages = cutlass.const_expr(self.config.query_stages)
        filled = cutlass.const_expr(self.kernel.rows_loaded)
        if cutlass.const_expr(filled < self.config.tile_m):
            # Rows that no tensor copy writes, or may write.
            threads = cutlass.const_expr(groups * WARPGROUP)
            for stage in cutlass.range_constexpr(stages):
                clear_rows(self.sQ[None, None, stage], filled, self.config.tile_m, self.thread, threads)
            if cutlass.const_expr(self.kernel.math_clears):
                cute.arch.fence_proxy("async.shared", space="cta")
                for stage in cutlass.range_constexpr(stages):
                    self.give_back(stage)
            else:
                self.publish()
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            tiles = self.attend(work, items, tiles)
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid
        if cutlass.const_expr(self.config.ping_pong):
            # Takes what the last turn left.
            if self.group == 0:
                cute.arch.barrier(barrier_id=TURN, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def attend(self, work, items, tiles):
        """One item; tiles: key tiles before it. Returns those after it."""
        stage = stage_of(items, self.config.query_stages)
        self.softmax.reset()
        self.O.fill(0.0)
        self.rows.start(work)
        cute.arch.mbarrier_wait(self.barriers.q_full + stage, phase_of(items, self.config.query_stages))
        last = work.n_block_max - 1
        self.first(work, last, stage, tiles)
        tiles += 1
        n_block_full_max = cutlass.min(work.n_block_full_max, last)
        for step in cutlass.range(last - n_block_full_max, unroll=1):
            self.next(work, last - 1 - step, stage, tiles, True)
            tiles += 1
        n_block_full_min = cutlass.min(work.n_block_full_min, n_block_full_max)
        for step in cutlass.range(n_block_full_max - n_block_full_min, unroll=1):
            self.next(work, n_block_full_max - 1 - step, stage, tiles, False)
            tiles += 1
        if cutlass.const_expr(self.key.has_window_left):
            for step in cutlass.range(n_block_full_min - work.n_block_min, unroll=1):
                self.next(work, n_block_full_min - 1 - step, stage, tiles, True)
                tiles += 1
        # The queries were multiplied with the last keys.
        self.give_back(stage)
        self.last(work, tiles)
        self.store(work)
        return tiles

    # ------------------------------------------------------------------ products

    @cute.jit
    def issue_scores(self, stage, count):
        """S = Q K^T of the count-th key tile, in flight."""
        buffer = stage_of(count, self.config.stages)
        cute.arch.mbarrier_wait(self.barriers.k_full + buffer, phase_of(count, self.config.stages))
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.fQ, mode=[2])):
            tiled_mma_qk = self.adding_product if cutlass.const_expr(k > 0) else self.tiled_mma_qk
            cute.gemm(tiled_mma_qk, self.S, self.fQ[None, None, k, stage], self.fK[None, None, k, buffer], self.S)
        warpgroup.commit_group()

    @cute.jit
    def issue_sums(self, count):
        """O += P V of the count-th value tile, in flight."""
        buffer = stage_of(count, self.config.stages)
        cute.arch.mbarrier_wait(self.barriers.v_full + buffer, phase_of(count, self.config.stages))
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.P, mode=[2])):
            cute.gemm(self.adding_weighing, self.O, self.P[None, None, k], self.fV[None, None, k, buffer], self.O)
        warpgroup.commit_group()

    @cute.jit
    def release(self, empty, count):
        """This warp has read a buffer."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + stage_of(count, self.config.stages))

    @cute.jit
    def take_turn(self):
        if cutlass.const_expr(self.config.ping_pong):
            cute.arch.barrier(barrier_id=TURN + self.group, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def give_turn(self):
        if cutlass.const_expr(self.config.ping_pong):
            other = (self.group + 1) % self.config.groups
            cute.arch.barrier_arrive(barrier_id=TURN + other, number_of_threads=2 * WARPGROUP)

    # ------------------------------------------------------------------ key tiles

    @cute.jit
    def first(self, work, tile, stage, count):
        """The item's first tile, the one at the end of its keys."""
        self.take_turn()
        self.issue_scores(stage, count)
        self.give_turn()
        warpgroup.wait_group(0)
        fence_operand(self.S)
        self.release(self.barriers.k_empty, count)
        self.clear_past(work, tile, count)
        self.online_softmax(work, tile, True)
        downcast(self.S, self.P)

    @cute.jit
    def next(self, work, tile, stage, count, masked: cutlass.Constexpr[bool]):
        """A tile's scores, while the one before is summed."""
        self.take_turn()
        self.issue_scores(stage, count)
        self.issue_sums(count - 1)
        self.give_turn()
        warpgroup.wait_group(1)
        fence_operand(self.S)
        self.release(self.barriers.k_empty, count)
        known, begins = None, False
        if cutlass.const_expr(self.key.tiles_per_split):
            begins = (tile + 1) % self.key.tiles_per_split == 0
            if begins:
                self.end_split()
            known = (tile + 1) % self.key.tiles_per_split != 0
        if cutlass.const_expr(self.config.speculative_max):
            self.softmax.online_softmax_speculative(
                self.scores(work, tile, masked), self.S, self.guessed, self.acc_scale, known
            )
        else:
            self.online_softmax(work, tile, masked)
        self.end_sums(count)
        if cutlass.const_expr(not self.key.tiles_per_split):
            rescale_rows(self.O, self.acc_scale)
        if cutlass.const_expr(self.config.speculative_max):
            take_words(self.guessed, self.P, self.rows.requests.rows >> 31)
        else:
            downcast(self.S, self.P)
        if cutlass.const_expr(self.key.tiles_per_split):
            if begins:
                # Behind the weights' rounding, which leaves registers for what is read.
                self.fold(work, tile + 1)
                self.keep_folded()
                self.O.fill(0.0)
            else:
                rescale_rows(self.O, self.acc_scale)

    # ------------------------------------------------------------------ splits

    @cute.jit
    def end_split(self):
        """The last tile of a split was weighed: its tops and totals are set aside, and the next split's begin."""
        self.softmax.reduce_row_sum()
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            # Settled: a product that is subtracted from would be rounded with the difference, once, and not here.
            self.ended_top[row] = fence_register(self.softmax.row_max[row] * self.softmax.softmax_scale_log2)
            self.ended_total[row] = self.softmax.row_sum[row]
        self.softmax.reset()

    @cute.jit
    def fold(self, work, tile):
        """O, and what `end_split` set aside, join what was folded before; `tile` is one of the split's.

        The splits of an item come from the last one to the first. Where their results are left to the merge kernel, it
        folds them in this order by these operations (`Merger.fold_row`).
        """
        tiles_per_split = cutlass.const_expr(self.key.tiles_per_split)
        if tile // tiles_per_split != (work.n_block_max - 1) // tiles_per_split:
            self.join_folded()

    @cute.jit
    def join_folded(self):
        sums, held = reshape_acc_to_mn(self.O), cute.make_rmem_tensor(4, cutlass.Float32)
        keeps = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        adds = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        load_vector(self.partials.iterator, self.folding(cute.size(sums, mode=[1])), held)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max, keeps[row], adds[row] = combine_scales(held[row], self.ended_top[row])
            row_sum = fma(self.ended_total[row], adds[row], held[2 + row] * keeps[row])
            self.ended_top[row], self.ended_total[row] = row_max, row_sum
        for j in cutlass.range_constexpr(0, cute.size(sums, mode=[1]), 2):
            load_vector(self.partials.iterator, self.folding(j), held)
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                for i in cutlass.range_constexpr(2):
                    sums[row, j + i] = fma(sums[row, j + i], adds[row], held[2 * row + i] * keeps[row])

    @cute.jit
    def keep_folded(self):
        """What was folded waits in memory for the next split."""
        sums, held = reshape_acc_to_mn(self.O), cute.make_rmem_tensor(4, cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            held[row], held[2 + row] = self.ended_top[row], self.ended_total[row]
        store_vector(held, self.partials.iterator, self.folding(cute.size(sums, mode=[1])))
        for j in cutlass.range_constexpr(0, cute.size(sums, mode=[1]), 2):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                held[2 * row], held[2 * row + 1] = sums[row, j], sums[row, j + 1]
            store_vector(held, self.partials.iterator, self.folding(j))

    @cute.jit
    def folding(self, j: cutlass.Constexpr[int]):
        """Where the thread's columns j and j + 1 of both rows wait, and its rows' statistics behind the last ones."""
        threads = cutlass.const_expr(self.config.groups * WARPGROUP)
        block = cutlass.Int64(cute.arch.block_idx()[0]) * fold_workspace_size(self.kernel.tile_m, self.kernel.dims_v)
        return block + (j // 2 * threads + self.thread) * 4

    @cute.jit
    def end_sums(self, count):
        """The sums of the tile before are there."""
        warpgroup.wait_group(0)
        fence_operand(self.O)
        self.release(self.barriers.v_empty, count - 1)

    @cute.jit
    def last(self, work, count):
        """The last tile's sums; count: tiles so far."""
        if cutlass.const_expr(self.key.has_window_left):
            self.clear_below(work, count - 1)
        self.issue_sums(count - 1)
        self.end_sums(count)

    @cute.jit
    def online_softmax(self, work, tile, masked: cutlass.Constexpr[bool]):
        self.softmax.online_softmax(self.scores(work, tile, masked), self.acc_scale)

    @cute.jit
    def scores(self, work, tile, masked: cutlass.Constexpr[bool]):
        """The products [row, column] as scores."""
        scores = reshape_acc_to_mn(self.S)
        self.rows.apply_score_mod(scores, work, tile)
        if cutlass.const_expr(masked):
            self.rows.apply_mask(scores, work, tile)
        return scores

    @cute.jit
    def clear_past(self, work, tile, count):
        """Zero the values behind the last key, which may be anything: a weight of 0 does not take away a NaN."""
        kept = work.seqlen_k - tile * self.kernel.tile_n
        if kept < self.kernel.tile_n:
            buffer = stage_of(count, self.config.stages)
            cute.arch.mbarrier_wait(self.barriers.v_full + buffer, phase_of(count, self.config.stages))
            values, threads = self.sV[None, None, buffer], self.config.groups * WARPGROUP
            clear_rows(values, cutlass.max(kept, 0), self.kernel.tile_n, self.thread, threads)
            self.publish()

    @cute.jit
    def clear_below(self, work, count):
        """Zero the values in front of the first row's window, whose pages may be another request's by now.

        Only the tile that the window begins in has such values and is loaded: an item's first one in memory.
        """
        below = self.rows.mask.keys_before_window(work.q_position, work.n_block_min)
        if below > 0:
            buffer = stage_of(count, self.config.stages)
            cute.arch.mbarrier_wait(self.barriers.v_full + buffer, phase_of(count, self.config.stages))
            clear_rows(self.sV[None, None, buffer], 0, below, self.thread, self.config.groups * WARPGROUP)
            self.publish()

    @cute.jit
    def give_back(self, stage):
        """This warp has done with a place of queries."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.q_empty + stage)

    @cute.jit
    def publish(self):
        """What math threads wrote to shared memory is there for every one's products."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ALL_MATH, number_of_threads=self.config.groups * WARPGROUP)

    # ------------------------------------------------------------------ results

    @cute.jit
    def store(self, work):
        if cutlass.const_expr(self.key.tiles_per_split):
            self.end_split()
            self.fold(work, work.n_block_min)
        else:
            self.softmax.reduce_row_sum()
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                self.store_partial(work)
            else:
                self.store_whole(work)
        else:
            self.store_whole(work)

    @cute.jit
    def statistics(self, row: cutlass.Constexpr[int]):
        """A row's largest base-2 score, and its total."""
        row_max, row_sum = self.ended_top[row], self.ended_total[row]
        if cutlass.const_expr(not self.key.tiles_per_split):
            row_max, row_sum = self.softmax.row_max[row] * self.softmax.softmax_scale_log2, self.softmax.row_sum[row]
        return row_max, row_sum

    @cute.jit
    def store_partial(self, work):
        """Sums as they are, in float32; the merge kernel does the rest."""
        held, columns = self.rows.requests.rows, cutlass.const_expr(self.kernel.dims_v)
        sums = reshape_acc_to_mn(self.O)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(held, columns)
        if cutlass.const_expr(self.key.tiles_per_split):
            partial += cute.arch.grid_dim()[0] * fold_workspace_size(self.kernel.tile_m, self.kernel.dims_v)
        pair = cute.make_rmem_tensor(2, cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            m = self.row + 8 * row
            if m < work.num_rows:
                for j in cutlass.range_constexpr(0, cute.size(sums, mode=[1]), 2):
                    pair[0], pair[1] = sums[row, j], sums[row, j + 1]
                    store_vector(pair, partial, m * columns + self.column + j * 4)
                if self.column == 0:
                    place = partial + held * columns + m
                    row_max, row_sum = self.statistics(row)
                    cute.make_tensor(place, cute.make_layout(1))[0] = row_max
                    cute.make_tensor(place + held, cute.make_layout(1))[0] = row_sum

    @cute.jit
    def store_whole(self, work):
        """Divide, and send the rows out."""
        sums = reshape_acc_to_mn(self.O)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max, row_sum = self.statistics(row)
            factor, lse = finalize(row_max, row_sum, self.rows.sink(work, row), self.rows.v_scale(work))
            for j in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                sums[row, j] *= factor
            if cutlass.const_expr(self.key.lse):
                m, to = self.row + 8 * row, self.lse
                if m < lse_rows(self.key, work) and self.column == 0:
                    to[work.q_offset + m // self.key.pack_gqa, self.rows.head(work, row)] = lse
            m = self.row + 8 * row
            columns, thread = cutlass.const_expr(self.key.columns), self.thread
            store_acc_row(
                sums, row, self.out, row_offset(self.out, work, self.key, m), thread, m < work.num_rows, columns
            )


def with_accumulate(tiled_mma_qk: cute.TiledMma, adds: bool) -> cute.TiledMma:
    """A product that adds to its accumulator, or overwrites it. Set once: a change inside a loop would stay in it."""
    changed = tiled_mma_qk.with_()
    changed.set(warpgroup.Field.ACCUMULATE, adds)
    return changed


def take_words(source: cute.Tensor, to: cute.Tensor, zero: cutlass.Int32):
    """An operand's registers, which products read until here, anew.

    Args:
        zero: 0, which ptxas must not know: it sees through copies, finds that a product's operands were made beside
            the products before it, and lets them run one at a time (C7513: CUDA 13.0).
    """
    words, taken = words_of(source), words_of(to)
    for i in range(cute.size(words)):
        # Else the source would get the same registers: the compiler does not know that the products still read them.
        keep_alive(taken[i])
    for i in range(cute.size(words)):
        taken[i] = fence_register(words[i] | zero)


@cute.jit
def rescale_rows(accumulator: cute.Tensor, acc_scale: cute.Tensor):
    """A thread's sums times its rows' factors, unless they are 1 throughout the warp."""
    sums = reshape_acc_to_mn(accumulator)
    if cute.arch.vote_any_sync(acc_scale[0] != 1.0 or acc_scale[1] != 1.0):
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            for j in cutlass.range(cute.size(sums, mode=[1]), unroll_full=True):
                sums[row, j] *= acc_scale[row]
