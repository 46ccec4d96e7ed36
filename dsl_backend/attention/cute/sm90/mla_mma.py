# SPDX-License-Identifier: Apache-2.0
"""The math role of absorbed MLA: two warpgroups, each with half of the outputs' columns and every other tile's scores.

The first takes the scores of an item's tiles 0, 2, 4, the second those of tiles 1, 3, 5. Who has a tile's weights
keeps them in registers and lays a copy into shared memory, with the rows' new maxima: the other sums its columns from
there, and goes on from these maxima with the next tile. The copy needs one place only: who writes it next is who has
read it last.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cute.nvgpu import warpgroup

from dsl_backend.attention.cute.combine import partial_size
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, AccumulatorRows, reshape_acc_to_mn, store_acc_row
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm90.dense_mma import RESCALE_THRESHOLD, rescale_rows, with_accumulate
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS
from dsl_backend.attention.cute.sm90.speculative_softmax import SpeculativeSoftmax
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.attention.cute.tiles import row_offset
from dsl_backend.primitives.accumulators import downcast, fence_operand
from dsl_backend.primitives.copy import clear_rows, store_vector

# Named barriers; 0 is the block's own. Weights of group g lie ready: READY + g.
READY, ALL_MATH, OWN_GROUP = 1, 3, 4
MATH_THREADS = GROUPS * WARPGROUP


class MlaMmaConsumer:
    """A math thread's registers and what it does with an item."""

    def __init__(
        self,
        kernel,
        work_pipeline,
        mmas,
        barriers,
        smem,
        outputs,
        requests,
        scoring,
        thread,
    ):
        tiled_mma_qk, tiled_mma_pv, weighing_shared = mmas
        sQ, sK, sV, sP, state, row_sums = smem
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers = work_pipeline, barriers
        self.tiled_mma_qk = with_accumulate(tiled_mma_qk, False)
        self.adding_product = with_accumulate(tiled_mma_qk, True)
        self.tiled_mma_pv = with_accumulate(tiled_mma_pv, True)
        self.weighing_shared = with_accumulate(weighing_shared, True)
        self.sQ, self.sV, self.sP, self.state, self.row_sums = sQ, sV, sP, state, row_sums
        self.out, self.lse, self.partials = outputs
        self.thread = thread % WARPGROUP
        self.group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        lane = thread % 32
        # Where the accumulators' elements are (PTX ISA, wgmma .m64nNk16, matrix D).
        self.row = self.thread // 32 * 16 + lane // QUAD
        self.column = lane % QUAD * 2
        self.rows = AccumulatorRows(kernel.key, kernel.tile_n, requests, scoring, self.row, self.column)
        mine, weighs = tiled_mma_qk.get_slice(self.thread), tiled_mma_pv.get_slice(thread)
        weighs_shared = weighing_shared.get_slice(thread)
        self.fQ = tiled_mma_qk.make_fragment_A(mine.partition_A(sQ))
        self.fK = tiled_mma_qk.make_fragment_B(mine.partition_B(sK))
        sVt = cute.make_tensor(sV.iterator, kernel.by_group(cute.select(sV.layout, mode=[1, 0, 2])))
        self.fV = tiled_mma_pv.make_fragment_B(weighs.partition_B(sVt))
        self.fP = weighing_shared.make_fragment_A(weighs_shared.partition_A(sP))
        self.S = cute.make_rmem_tensor(mine.partition_shape_C((ROWS, kernel.tile_n)), cutlass.Float32)
        self.P = cute.make_rmem_tensor(weighs.partition_shape_A((ROWS, kernel.tile_n)), kernel.dtype)
        self.O = cute.make_rmem_tensor(weighs.partition_shape_C((ROWS, kernel.dims_v)), cutlass.Float32)
        self.acc_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        self.softmax = SpeculativeSoftmax(ROWS_PER_THREAD, QUAD, self.rows.score_mod, RESCALE_THRESHOLD)

    @cute.jit
    def run(self):
        if cutlass.const_expr(self.kernel.math_clears):
            # Rows that no tensor copy may write; the loader waits for it. While work is looked for, it costs nothing:
            # in front of the roles it took 0.7 us.
            first, thread = self.kernel.rows_loaded, self.thread + self.group * WARPGROUP
            clear_rows(self.sQ[None, None, 0], first, ROWS, thread, MATH_THREADS)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.release(self.barriers.q_empty)
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            self.softmax.reset()
            self.O.fill(0.0)
            self.rows.start(work)
            cute.arch.mbarrier_wait(self.barriers.q_full, items & 1)
            if self.group == 0:
                self.lead(work, tiles)
            else:
                self.follow(work, tiles)
            self.merge_totals(items)
            self.store(work)
            tiles += work.n_block_max - work.n_block_min
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    @cute.jit
    def lead(self, work, tiles):
        """The first warpgroup's item; tiles: those before it."""
        count = work.n_block_max - work.n_block_min
        for step in cutlass.range(0, count, 2, unroll=1):
            self.issue_scores(tiles + step)
            warpgroup.wait_group(0)
            self.scores_done(work, step, tiles + step)
            self.online_softmax(work, step)
            self.give(work, step, tiles + step)
            self.sums_done(tiles + step)
            if step + 1 < count:
                self.take(work, step + 1, tiles + step + 1)
                warpgroup.wait_group(0)
                self.sums_done(tiles + step + 1)

    @cute.jit
    def follow(self, work, tiles):
        """The second warpgroup's item."""
        count = work.n_block_max - work.n_block_min
        if count == 1:
            self.release(self.barriers.q_empty)
        for pair in cutlass.range(count // 2, unroll=1):
            step = 2 * pair
            if cutlass.const_expr(self.config.scores_first):
                self.issue_scores(tiles + step + 1)
                self.take(work, step, tiles + step)
                warpgroup.wait_group(1)
                self.scores_done(work, step + 1, tiles + step + 1)
                self.online_softmax(work, step + 1)
                warpgroup.wait_group(0)
                self.sums_done(tiles + step)
            else:
                self.take(work, step, tiles + step)
                warpgroup.wait_group(0)
                self.sums_done(tiles + step)
                self.issue_scores(tiles + step + 1)
                warpgroup.wait_group(0)
                self.scores_done(work, step + 1, tiles + step + 1)
                self.online_softmax(work, step + 1)
            self.give(work, step + 1, tiles + step + 1)
            self.sums_done(tiles + step + 1)
        if count % 2 == 1:
            self.take(work, count - 1, tiles + count - 1)
            warpgroup.wait_group(0)
            self.sums_done(tiles + count - 1)

    # ------------------------------------------------------------------ products

    @cute.jit
    def issue_scores(self, count):
        """S = Q K^T of the count-th tile, in flight: part by part as they arrive."""
        buffer, round_ = count % self.config.stages, (count // self.config.stages) & 1
        rope = cutlass.const_expr(self.kernel.parts[0])
        for part in cutlass.range_constexpr(PARTS):
            cute.arch.mbarrier_wait(self.barriers.k_full + buffer * PARTS + part, round_)
            warpgroup.fence()
            if cutlass.const_expr(part == 0):
                for chunk in cutlass.range_constexpr(rope.start, rope.stop):
                    self.multiply_chunk(chunk, buffer, chunk == rope.start)
            else:
                # A loop: ptxas would keep the addresses of all products in registers.
                chunks = cutlass.const_expr(self.kernel.parts[part])
                for chunk in cutlass.range(chunks.start, chunks.stop, unroll=1):
                    self.multiply_chunk(chunk, buffer, False)
        warpgroup.commit_group()

    @cute.jit
    def multiply_chunk(self, chunk, buffer, first: cutlass.Constexpr[bool]):
        for block in cutlass.range_constexpr(self.kernel.chunk // 16):
            tiled_mma_qk = self.tiled_mma_qk if cutlass.const_expr(first and block == 0) else self.adding_product
            queries, keys = self.fQ[None, None, (block, chunk), 0], self.fK[None, None, (block, chunk), buffer]
            cute.gemm(tiled_mma_qk, self.S, queries, keys, self.S)

    @cute.jit
    def scores_done(self, work, step, count):
        """This group has read the tile as keys; the last time in an item, the queries too."""
        self.release_part(count, 0)
        if step + 2 >= work.n_block_max - work.n_block_min:
            self.release(self.barriers.q_empty)

    @cute.jit
    def sums_done(self, count):
        """This group has read its half of the tile's values."""
        self.release_part(count, 1 + self.group)

    @cute.jit
    def release_part(self, count, part):
        """This warp has read a part of the count-th tile; every block of a cluster may write to it."""
        empty = self.barriers.k_empty + count % self.config.stages * PARTS + part
        if cutlass.const_expr(self.config.cluster == 1 or self.key.kv.fp8):
            self.release(empty)
        else:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                for block in cutlass.range_constexpr(self.config.cluster):
                    cute.arch.mbarrier_arrive(empty, block)

    @cute.jit
    def release(self, empty):
        """This warp has read a buffer."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

    # ------------------------------------------------------------------ weights

    @cute.jit
    def online_softmax(self, work, step):
        fence_operand(self.S)
        tile = work.n_block_max - 1 - step
        scores = reshape_acc_to_mn(self.S)
        self.rows.apply_score_mod(scores, work, tile)
        if tile >= work.n_block_full_max or tile < work.n_block_full_min:
            self.rows.apply_mask(scores, work, tile)
        if cutlass.const_expr(self.config.speculative_max):
            self.softmax.online_softmax_speculative(scores, self.S, self.P, self.acc_scale, step > 0)
        else:
            self.softmax.online_softmax(scores, self.acc_scale)
            downcast(self.S, self.P)

    @cute.jit
    def give(self, work, step, count):
        """Weights and maxima to the other group; then the sums of this one, which are done at the end.

        What lies in the place was read by this group's products. A warp's products read its own rows of weights, and
        it has waited for them: it may write there.
        """
        to_shared = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(num_matrices=4), self.kernel.dtype), self.tiled_mma_qk
        )
        mine = to_shared.get_slice(self.thread)
        rounded = cute.make_tensor(self.P.iterator, self.S.layout)
        cute.copy(to_shared, to_shared.retile(rounded), mine.partition_D(self.sP))
        state = self.state
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                state[self.row + 8 * row, 0] = self.softmax.row_max[row]
                state[self.row + 8 * row, 1] = self.acc_scale[row]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=READY + self.group, number_of_threads=MATH_THREADS)
        self.clear_past(work, step, count)
        rescale_rows(self.O, self.acc_scale)
        buffer = count % self.config.stages
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.P, mode=[2])):
            cute.gemm(self.tiled_mma_pv, self.O, self.P[None, None, k], self.fV[None, None, k, buffer], self.O)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def take(self, work, step, count):
        """The sums of the other group's tile, in flight."""
        cute.arch.barrier(barrier_id=READY + 1 - self.group, number_of_threads=MATH_THREADS)
        self.clear_past(work, step, count)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.row_max[row] = self.state[self.row + 8 * row, 0]
            self.acc_scale[row] = self.state[self.row + 8 * row, 1]
            self.softmax.row_sum[row] *= self.acc_scale[row]
        rescale_rows(self.O, self.acc_scale)
        buffer = count % self.config.stages
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.P, mode=[2])):
            cute.gemm(self.weighing_shared, self.O, self.fP[None, None, k], self.fV[None, None, k, buffer], self.O)
        warpgroup.commit_group()

    @cute.jit
    def clear_past(self, work, step, count):
        """Zero this group's half of the values that no row sees, when nobody reads them as keys any more.

        Those behind the last key and in front of the first row's window may be anything: a weight of 0 does not take
        away a NaN.
        """
        tile_n = cutlass.const_expr(self.kernel.tile_n)
        n_block = work.n_block_max - 1 - step
        kept = work.seqlen_k - n_block * tile_n
        if kept < tile_n:
            self.clear(count, cutlass.max(kept, 0), tile_n)
        if cutlass.const_expr(self.key.has_window_left):
            below = self.rows.mask.keys_before_window(work.q_position, n_block)
            if below > 0:
                self.clear(count, 0, below)

    @cute.jit
    def clear(self, count, first, end):
        """Zero rows of this group's half of the count-th tile's values."""
        half = (self.kernel.tile_n, self.kernel.dims_v // GROUPS)
        values = cute.local_tile(self.sV[None, None, count % self.config.stages], half, (0, self.group))
        clear_rows(values, first, end, self.thread, WARPGROUP)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=OWN_GROUP + self.group, number_of_threads=WARPGROUP)

    # ------------------------------------------------------------------ results

    @cute.jit
    def merge_totals(self, items):
        """Each group has the totals of its tiles. Items take turns at two places: one may still be read."""
        self.softmax.reduce_row_sum()
        place, row_sums = items & 1, self.row_sums
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                row_sums[self.row + 8 * row, self.group, place] = self.softmax.row_sum[row]
        cute.arch.barrier(barrier_id=ALL_MATH, number_of_threads=MATH_THREADS)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.row_sum[row] += row_sums[self.row + 8 * row, 1 - self.group, place]

    @cute.jit
    def store(self, work):
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                self.store_partial(work)
            else:
                self.store_whole(work)
        else:
            self.store_whole(work)

    @cute.jit
    def store_partial(self, work):
        """Sums as they are, in float32; the merge kernel does the rest."""
        held, columns = self.rows.requests.rows, cutlass.const_expr(self.kernel.dims_v)
        sums = reshape_acc_to_mn(self.O)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(held, columns)
        pair = cute.make_rmem_tensor(2, cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            m = self.row + 8 * row
            if m < work.num_rows:
                first = m * columns + self.group * (columns // GROUPS) + self.column
                for j in cutlass.range(0, cute.size(sums, mode=[1]), 2, unroll_full=True):
                    pair[0], pair[1] = sums[row, j], sums[row, j + 1]
                    store_vector(pair, partial, first + j * 4)
                if self.column == 0 and self.group == 0:
                    place = partial + held * columns + m
                    row_max = self.softmax.row_max[row] * self.softmax.softmax_scale_log2
                    cute.make_tensor(place, cute.make_layout(1))[0] = row_max
                    cute.make_tensor(place + held, cute.make_layout(1))[0] = self.softmax.row_sum[row]

    @cute.jit
    def store_whole(self, work):
        """Divide, and send the rows out from registers: the queries' place is the next item's by now."""
        columns = cutlass.const_expr(self.kernel.dims_v)
        sums = reshape_acc_to_mn(self.O)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max, row_sum = self.softmax.row_max[row] * self.softmax.softmax_scale_log2, self.softmax.row_sum[row]
            factor, lse = finalize(row_max, row_sum, self.rows.sink(work, row), self.rows.v_scale(work))
            for j in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                sums[row, j] *= factor
            m, to = self.row + 8 * row, self.lse
            offset = row_offset(self.out, work, self.key, m) + self.group * (columns // GROUPS)
            store_acc_row(sums, row, self.out, offset, self.thread, m < work.num_rows, columns)
            if cutlass.const_expr(self.key.lse):
                if m < work.num_rows and self.column == 0 and self.group == 0:
                    to[work.q_offset + m // self.key.pack_gqa, self.rows.head(work, row)] = lse
