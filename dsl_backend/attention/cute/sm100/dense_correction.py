# SPDX-License-Identifier: Apache-2.0
"""The correction role: a warpgroup keeps the sums at the scale of the weights to come, and stores what comes out."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.combine import partial_size
from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, lse_rows, q_head_of
from dsl_backend.attention.cute.score_mod import v_scale_of
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import ROWS
from dsl_backend.attention.cute.sm100.dense_mma import sums_at
from dsl_backend.attention.cute.sm100.dense_softmax import SHRINK, TOP
from dsl_backend.attention.cute.sm100.idle_warps import WARP, arrivals_of, arrive
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.attention.cute.tiles import VECTOR, store_rows
from dsl_backend.primitives import tmem
from dsl_backend.primitives.copy import clear_rows, store_vector
from dsl_backend.primitives.math import exp2, finite_or_zero, fma_pair, mul_pair
from dsl_backend.primitives.ring import phase_of, stage_of

OWN = 1  # named barrier of the warpgroup
PIECE = 16  # columns of sums in registers at a time


class CorrectionWarps:
    """A thread's row of each half."""

    def __init__(self, kernel, work_pipeline, barriers, base, statistics, places, sOut, outputs, requests, scoring):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.base, self.statistics = work_pipeline, barriers, base, statistics
        self.places, self.sOut = places, sOut
        self.out, self.lse, self.partials = outputs
        self.scoring, self.requests, self.held = scoring, requests, requests.rows
        self.mask = Mask(kernel.key, kernel.tile_n, requests)
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.rests = kernel.rests
        self.arrivals = cute.make_rmem_tensor(1, cutlass.Int32) if self.rests else None

    @cute.jit
    def run(self):
        items, tiles, odd = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            self.clear_past(work, tiles)
            count = work.n_block_max - work.n_block_min
            stage = stage_of(items, self.config.query_stages)
            if cutlass.const_expr(self.rests):
                arrivals = arrivals_of(work, self.thread)
                self.arrivals.fill(arrivals)
                if arrivals > 0:
                    self.serve(work, stage, items, tiles, odd)
            else:
                self.serve(work, stage, items, tiles, odd)
            self.leave(work, stage)
            tiles += count
            odd += count // 2
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    @cute.jit
    def serve(self, work, stage, items, tiles, odd):
        """The sums of an item, from its first tile to what comes out.

        Args:
            items, tiles: before it.
            odd: of these tiles those that are the second half's, where halves alternate.
        """
        count = work.n_block_max - work.n_block_min
        if cutlass.const_expr(self.kernel.alternate):
            even = tiles - odd
            self.clear_before(work, tiles, 0)
            self.begin(0, even + items)
            if count > 1:
                self.clear_before(work, tiles, 1)
                self.begin(1, odd + items)
            for step in cutlass.range(1, (count + 1) // 2, unroll=1):
                self.clear_before(work, tiles, 2 * step)
                self.correct(0, even + step + items)
                if 2 * step + 1 < count:
                    self.clear_before(work, tiles, 2 * step + 1)
                    self.correct(1, odd + step + items)
            self.finish_together(work, stage, items, even + (count + 1) // 2 + items, odd + count // 2 + items)
        else:
            self.clear_before(work, tiles, 0)
            for g in cutlass.range_constexpr(self.kernel.halves):
                self.begin(g, tiles + items)
            told = tiles + items
            for message in cutlass.range(told + 1, told + count, unroll=1):
                self.clear_before(work, tiles, message - told)
                for g in cutlass.range_constexpr(self.kernel.halves):
                    self.correct(g, message)
            self.wait_sums(items)
            for g in cutlass.range_constexpr(self.kernel.halves):
                row_sum, row_max = self.told(g, told + count)
                self.finish(work, g * ROWS + self.thread, stage, row_max, row_sum, [(g, None)])

    @cute.jit
    def leave(self, work, stage):
        """Whole rows go out; the queries' place is free, and the sums of the warpgroup's rows."""
        tmem.before_sync()
        self.meet()
        if work.partial_idx == NOT_SPLIT:
            rows = self.sOut[None, None, stage]
            store_rows(rows, self.out, work, self.key, 0, self.kernel.tile_m, self.thread, WARPGROUP)
        # The next queries arrive by another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.q_empty + stage)

    def meet(self):
        cute.arch.barrier(barrier_id=OWN, number_of_threads=WARPGROUP)

    @cute.jit
    def begin(self, g: cutlass.Constexpr[int], count):
        """The half's sums are free for the weights of an item's first tile; count: of messages before."""
        self.wait_told(g, count)
        self.ready(g)

    @cute.jit
    def correct(self, g: cutlass.Constexpr[int], count):
        """The half's sums are brought to the scale of the weights of the next tile."""
        self.wait_told(g, count)
        self.acc_scale(g, self.statistics[self.thread, SHRINK, g])
        self.ready(g)

    @cute.jit
    def ready(self, g: cutlass.Constexpr[int]):
        """The half's sums are; and what was told has been read, which the next scores come behind."""
        arrive(self.barriers.p_full + g, self.arrivals)

    @cute.jit
    def wait_sums(self, items):
        cute.arch.mbarrier_wait(self.barriers.o_full, items & 1)
        tmem.after_sync()

    @cute.jit
    def finish_together(self, work, stage, items, even, odd):
        """Both halves have a part of the same rows."""
        self.wait_sums(items)
        row_sums, row_maxes = [], []
        for g, count in ((0, even), (1, odd)):
            row_sum, row_max = self.told(g, count)
            row_sums.append(row_sum)
            row_maxes.append(row_max)
        row_max = cute.arch.fmax(row_maxes[0], row_maxes[1])
        probs = [exp2(one - finite_or_zero(row_max)) for one in row_maxes]
        row_sum = row_sums[0] * probs[0] + row_sums[1] * probs[1]
        self.finish(work, self.thread, stage, row_max, row_sum, list(enumerate(probs)))

    @cute.jit
    def told(self, g: cutlass.Constexpr[int], count):
        """What the half's softmax says of this thread's row: its total and largest score."""
        self.wait_told(g, count)
        value, row_max = self.statistics[self.thread, SHRINK, g], self.statistics[self.thread, TOP, g]
        arrive(self.barriers.l_empty + g, self.arrivals)
        return value, row_max

    @cute.jit
    def wait_told(self, g: cutlass.Constexpr[int], count):
        cute.arch.mbarrier_wait(self.barriers.l_full + g, count & 1)

    @cute.jit
    def acc_scale(self, g: cutlass.Constexpr[int], factor):
        """Sums times the factor, where a row of the warp needs it. Products are done: the scores came after them."""
        # This way around the vote is what the branch takes: the other way it is negated first, for every tile.
        if cute.arch.vote_all_sync(factor == 1.0):
            pass
        else:
            self.scale(g, factor)

    def scale(self, g: int, factor):
        """Sums times the factor."""
        tmem.after_sync()
        base = self.base + sums_at(self.kernel, g)
        for first in range(0, self.kernel.dims_v, PIECE):
            held = cute.make_rmem_tensor(PIECE, cutlass.Float32)
            tmem.load(base, first, held, self.thread)
            cute.arch.fence_view_async_tmem_load()
            for j in range(0, PIECE, 2):
                held[j], held[j + 1] = mul_pair((held[j], held[j + 1]), (factor, factor))
            tmem.store(held, base, first, self.thread)
        cute.arch.fence_view_async_tmem_store()
        tmem.before_sync()

    @cute.jit
    def finish(self, work, m, stage, row_max, row_sum, halves: cutlass.Constexpr):
        """Row m: sums of the halves, each times its weight; divided, into the place of its queries, or as they are.

        Args:
            top, total: the row's largest base-2 score, and its sum of 2^(score - top).
            halves: (half, weight), the weight None where there is one half.
        """
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                self.store_partial(work, m, row_max, row_sum, halves)
            else:
                self.store_whole(work, m, stage, row_max, row_sum, halves)
        else:
            self.store_whole(work, m, stage, row_max, row_sum, halves)

    @cute.jit
    def columns(self, g: cutlass.Constexpr[int], first: cutlass.Int32, registers: cute.Tensor):
        """The half's sums of this thread's row."""
        first = cute.assume(first, divby=PIECE)
        tmem.load(self.base + sums_at(self.kernel, g), first, registers, self.thread)
        cute.arch.fence_view_async_tmem_load()

    @cute.jit
    def sums(self, work, first: cutlass.Int32, halves: cutlass.Constexpr):
        """A piece of a row: the halves' columns, weighed and added."""
        found = cute.make_rmem_tensor(PIECE, cutlass.Float32)
        self.columns(halves[0][0], first, found)
        if cutlass.const_expr(len(halves) > 1):
            (_, weight), (other, other_weight) = halves
            for j in cutlass.range_constexpr(0, PIECE, 2):
                found[j], found[j + 1] = mul_pair((found[j], found[j + 1]), (weight, weight))
            # One without a tile has sums that nobody wrote.
            if work.n_block_max - work.n_block_min > 1:
                held = cute.make_rmem_tensor(PIECE, cutlass.Float32)
                self.columns(other, first, held)
                for j in cutlass.range_constexpr(0, PIECE, 2):
                    others, probs = (held[j], held[j + 1]), (other_weight, other_weight)
                    found[j], found[j + 1] = fma_pair(others, probs, (found[j], found[j + 1]))
        return found

    @cute.jit
    def store_whole(self, work, m, stage, row_max, row_sum, halves: cutlass.Constexpr):
        head = q_head_of(self.key, work.head_block, m)
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[head].to(cutlass.Float32)
        factor, row_lse = finalize(row_max, row_sum, sink, v_scale_of(self.key, self.scoring, work.head_block))
        if cutlass.const_expr(self.key.lse):
            to = self.lse
            if m < lse_rows(self.key, work):
                to[work.q_offset + m // self.key.pack_gqa, head] = row_lse
        rows = self.sOut[None, None, stage]
        # Unrolled, the addresses of all pieces would be in registers.
        for piece in cutlass.range(self.kernel.dims_v // PIECE, unroll=1):
            found = self.sums(work, piece * PIECE, halves)
            narrow = cute.make_rmem_tensor((VECTOR, PIECE // VECTOR), self.kernel.dtype)
            for j in cutlass.range_constexpr(0, PIECE, 2):
                pair = mul_pair((found[j], found[j + 1]), (factor, factor))
                narrow[j], narrow[j + 1] = pair[0].to(self.kernel.dtype), pair[1].to(self.kernel.dtype)
            for i in cutlass.range_constexpr(PIECE // VECTOR):
                place = cute.local_tile(rows, (1, VECTOR), (m, piece * (PIECE // VECTOR) + i))
                cute.autovec_copy(narrow[None, i], cute.group_modes(place, 0, 2))

    @cute.jit
    def store_partial(self, work, m, row_max, row_sum, halves: cutlass.Constexpr):
        """Sums as they are, in float32; the merge kernel does the rest."""
        held, columns = self.held, cutlass.const_expr(self.kernel.dims_v)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(held, columns)
        for piece in cutlass.range(columns // PIECE, unroll=1):
            found = self.sums(work, piece * PIECE, halves)
            if m < work.num_rows:
                for i in cutlass.range_constexpr(0, PIECE, 4):
                    part = cute.make_tensor(found.iterator + i, cute.make_layout(4))
                    store_vector(part, partial, m * columns + piece * PIECE + i)
        if m < work.num_rows:
            place = partial + held * columns + m
            cute.make_tensor(place, cute.make_layout(1))[0] = row_max
            cute.make_tensor(place + held, cute.make_layout(1))[0] = row_sum

    @cute.jit
    def clear_past(self, work, count):
        """Zero the values behind the last key, which may be anything: a weight of 0 does not take away a NaN."""
        kept = work.seqlen_k - (work.n_block_max - 1) * self.kernel.tile_n
        if kept < self.kernel.tile_n:
            self.wait_values(count)
            values = self.places.values[None, None, self.places.of_values(count)]
            clear_rows(values, cutlass.max(kept, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(self.rests):
                # Others arrive for warps that rest.
                self.meet()

    @cute.jit
    def clear_before(self, work, tiles, step):
        """Zero the values below the windows of all rows, which lie in an item's last tile if in any; step: the tile."""
        if cutlass.const_expr(self.key.has_window_left):
            below = self.mask.keys_before_window(work.q_position, work.n_block_min)
            if step == work.n_block_max - work.n_block_min - 1 and below > 0:
                count = tiles + step
                self.wait_values(count)
                # By the warps that do not rest: each arrives behind what it cleared, and the first one for the others.
                threads = cutlass.Int32(WARPGROUP)
                if cutlass.const_expr(self.rests):
                    threads = cutlass.min((work.num_rows + WARP - 1) // WARP * WARP, WARPGROUP)
                values = self.places.values[None, None, self.places.of_values(count)]
                clear_rows(values, 0, below, self.thread, threads)
                cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def wait_values(self, count):
        stages = self.config.stages
        cute.arch.mbarrier_wait(self.barriers.v_full + stage_of(count, stages), phase_of(count, stages))
