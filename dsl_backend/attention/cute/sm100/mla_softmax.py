# SPDX-License-Identifier: Apache-2.0
"""The math role of absorbed MLA: a warpgroup turns scores into weights, keeps sums at their scale, and stores them.

A thread has pieces of two rows of scores, as in an accumulator of warp instructions; of the sums, which are transposed,
it has one value column in each block, and all rows.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warp as warp_ops

from dsl_backend.attention.cute.combine import partial_size
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, AccumulatorRows, reshape_acc_to_mn
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.mla_configs import BLOCK, SCORES
from dsl_backend.attention.cute.sm100.mla_mma import sums_at
from dsl_backend.attention.cute.softmax import OnlineSoftmax, finalize
from dsl_backend.primitives import tmem
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.ring import phase_of, stage_of

WARP = 32
OWN = 1  # named barrier of the warpgroup
PIECE = 16  # rows of sums in registers at a time
# Sums are shrunk when a row's largest score has grown by a factor of 2^SLACK.
SLACK = 8.0
# What warps tell each other of a row: how its sums shrink, and in the end what they are multiplied by.
SHRINK, FACTOR = 0, 1


class MlaSoftmaxWarps:
    """A thread's registers and what it does with an item."""

    def __init__(self, kernel, work_pipeline, barriers, base, statistics, sV, sP, outputs, requests, scoring):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.base, self.statistics = work_pipeline, barriers, base, statistics
        self.sV, self.sP = sV, sP
        self.out, self.lse, self.partials = outputs
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = cute.arch.lane_idx()
        self.row, self.column = self.thread // WARP * 16 + lane // QUAD, lane % QUAD * 2
        self.rows = AccumulatorRows(kernel.key, kernel.tile_n, requests, scoring, self.row, self.column)
        self.softmax = OnlineSoftmax(ROWS_PER_THREAD, QUAD, self.rows.score_mod, SLACK)
        held = ROWS_PER_THREAD * kernel.tile_n // QUAD
        self.S = cute.make_rmem_tensor(held, cutlass.Float32)
        self.P = cute.make_rmem_tensor(held, kernel.dtype)
        self.acc_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            self.softmax.reset()
            self.rows.start(work)
            for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
                self.online_softmax(work, work.n_block_max - 1 - step, tiles, step > 0)
                tiles += 1
            self.softmax.reduce_row_sum()
            self.sums_done(tiles - 1)
            self.store(work)
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    # ------------------------------------------------------------------ weights

    @cute.jit
    def online_softmax(self, work, tile, count, adds):
        """A tile's scores into weights; count: tiles before it; adds: to earlier sums of the item."""
        place = count % SCORES
        cute.arch.mbarrier_wait(self.barriers.s_full + place, (count // SCORES) & 1)
        tmem.after_sync()
        tmem.load_rows(self.base, place * self.kernel.tile_n, self.S, self.thread)
        cute.arch.fence_view_async_tmem_load()
        scores = reshape_acc_to_mn(self.S)
        self.rows.apply_score_mod(scores, work, tile)
        if tile >= work.n_block_full_max or tile < work.n_block_full_min:
            self.rows.apply_mask(scores, work, tile)
        self.softmax.online_softmax(scores, self.acc_scale)
        self.P.store(self.S.load().to(self.kernel.dtype))
        self.clear_past(work, tile, count)
        # The weights' place is read, and the sums are at rest.
        cute.arch.mbarrier_wait(self.barriers.o_full, (count & 1) ^ 1)
        tmem.after_sync()
        self.shrink_sums(work, adds)
        self.lay_weights()
        cute.arch.fence_proxy("async.shared", space="cta")
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.p_full)

    @cute.jit
    def lay_weights(self):
        """From registers into shared memory, [row, key]."""
        kernel = self.kernel
        # What the warps' own products would give: they lay out registers as these are.
        warps = cute.make_tiled_mma(
            warp_ops.MmaF16BF16Op(kernel.dtype, cutlass.Float32, (16, 8, 16)),
            (WARPGROUP // WARP, 1, 1),
            permutation_mnk=(ROWS, 16, 16),
        )
        store = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(num_matrices=4), kernel.dtype)
        copy = cute.make_tiled_copy_C(store, warps)
        mine = copy.get_slice(self.thread)
        held = cute.make_tensor(self.P.iterator, cute.make_layout(warps.partition_shape_C((ROWS, kernel.tile_n))))
        cute.copy(copy, copy.retile(held), mine.partition_D(self.sP))

    @cute.jit
    def clear_past(self, work, tile, count):
        """Zero the values behind the last key and below the windows of all rows, when nobody reads them as keys.

        They may be anything: a weight of 0 does not take away a NaN.
        """
        kept = work.seqlen_k - tile * self.kernel.tile_n
        below = self.rows.mask.keys_before_window(work.q_position, tile)
        if kept < self.kernel.tile_n or below > 0:
            stage, round_ = stage_of(count, self.config.stages), phase_of(count, self.config.stages)
            # Not of what is only key: its room may be full of a later tile already.
            for part in cutlass.range_constexpr(1, PARTS):
                cute.arch.mbarrier_wait(self.barriers.k_full + stage * PARTS + part, round_)
            values = self.sV[None, None, stage]
            clear_rows(values, cutlass.max(kept, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            if cutlass.const_expr(self.key.has_window_left):
                clear_rows(values, 0, below, self.thread, WARPGROUP)

    # ------------------------------------------------------------------ sums

    @cute.jit
    def sums_done(self, count):
        """The sums hold all tiles up to the count-th."""
        cute.arch.mbarrier_wait(self.barriers.o_full, count & 1)
        tmem.after_sync()

    @cute.jit
    def shrink_sums(self, work, adds):
        """Sums times what their rows' shares shrink by, where a row needs it."""
        # Read by all before the sums of the tile are done, and so before it is written again.
        self.tell(self.acc_scale, SHRINK)
        moved = cutlass.Boolean(False)
        for i in cutlass.range_constexpr(ROWS // WARP):
            row = cute.arch.lane_idx() + i * WARP
            moved = moved or (row < work.num_rows and self.statistics[row, SHRINK] != 1.0)
        if cute.arch.vote_any_sync(moved and adds):
            for block in cutlass.range_constexpr(self.kernel.dims_v // BLOCK):
                for first in cutlass.range(0, work.num_rows, PIECE, unroll=1):
                    column = sums_at(self.kernel, block) + first
                    held = self.scaled(column, first, SHRINK)
                    tmem.store(held, self.base, column, self.thread)
            cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def tell(self, values, place):
        """Values of this thread's rows to the warpgroup."""
        statistics = self.statistics
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                statistics[self.row + 8 * row, place] = values[row]
        cute.arch.barrier(barrier_id=OWN, number_of_threads=WARPGROUP)

    @cute.jit
    def scaled(self, column, first, place):
        """Sums of PIECE rows from a column of tensor memory on, times a statistic of their rows."""
        held = cute.make_rmem_tensor(PIECE, cutlass.Float32)
        tmem.load(self.base, column, held, self.thread)
        cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(PIECE):
            held[j] *= self.statistics[first + j, place]
        return held

    # ------------------------------------------------------------------ results

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
        rows, columns = self.rows.requests.rows, cutlass.const_expr(self.kernel.dims_v)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(rows, columns)
        held = cute.make_rmem_tensor(PIECE, cutlass.Float32)
        for block in cutlass.range_constexpr(columns // BLOCK):
            for first in cutlass.range(0, work.num_rows, PIECE, unroll=1):
                tmem.load(self.base, sums_at(self.kernel, block) + first, held, self.thread)
                cute.arch.fence_view_async_tmem_load()
                for j in cutlass.range_constexpr(PIECE):
                    if first + j < work.num_rows:
                        place = partial + ((first + j) * columns + block * BLOCK + self.thread)
                        cute.make_tensor(place, cute.make_layout(1))[0] = held[j]
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                m = self.row + 8 * row
                if m < work.num_rows:
                    place = partial + rows * columns + m
                    row_max = self.softmax.row_max[row] * self.softmax.softmax_scale_log2
                    cute.make_tensor(place, cute.make_layout(1))[0] = row_max
                    cute.make_tensor(place + rows, cute.make_layout(1))[0] = self.softmax.row_sum[row]

    @cute.jit
    def store_whole(self, work):
        """Divide, and send the rows out: neighbouring threads have neighbouring columns."""
        factors = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max, row_sum = self.softmax.row_max[row] * self.softmax.softmax_scale_log2, self.softmax.row_sum[row]
            factors[row], lse = finalize(row_max, row_sum, self.rows.sink(work, row), self.rows.v_scale(work))
            m = self.row + 8 * row
            if cutlass.const_expr(self.key.lse):
                to = self.lse
                if self.column == 0 and m < work.num_rows:
                    to[work.q_offset + m // self.key.pack_gqa, self.rows.head(work, row)] = lse
        self.tell(factors, FACTOR)
        for block in cutlass.range_constexpr(self.kernel.dims_v // BLOCK):
            for first in cutlass.range(0, work.num_rows, PIECE, unroll=1):
                held = self.scaled(sums_at(self.kernel, block) + first, first, FACTOR)
                for j in cutlass.range_constexpr(PIECE):
                    m = first + j
                    if m < work.num_rows:
                        token, head = (
                            work.q_offset + m // self.key.pack_gqa,
                            work.head_block * self.key.pack_gqa + m % self.key.pack_gqa,
                        )
                        offset = cutlass.Int64(token) * self.out.stride[0] + head * self.out.stride[1]
                        place = self.out.iterator + (offset + block * BLOCK + self.thread)
                        cute.make_tensor(place, cute.make_layout(1))[0] = held[j].to(self.kernel.dtype)
