# SPDX-License-Identifier: Apache-2.0
"""The softmax role where operands are swapped: a thread has a key, and the scores of every query row against it.

Weights are taken by a reference of each query row that all threads of a warpgroup share. It follows the row's largest
score only when that has outgrown it by more than `patience`; whether any has is all that a tile's threads must agree
on, which is one barrier. Only then are largest scores found, and sums brought to the new scale.
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.combine import partial_size
from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, q_head_of
from dsl_backend.attention.cute.score_mod import score_mod_of, v_scale_of
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import ROWS
from dsl_backend.attention.cute.sm100.dense_softmax import SoftmaxWarps, hidden
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.attention.cute.tiles import VECTOR
from dsl_backend.primitives import tmem
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.math import (
    LOG2_E,
    add_pair,
    exp2,
    finite_or_zero,
    fma_pair,
    fmax3,
    in_pairs,
    mul_pair,
    sub_pair,
    tree_reduce,
)
from dsl_backend.primitives.ring import phase_of, stage_of

WARPS = WARPGROUP // 32
# Named barriers: of each half's warpgroup one, and one of both.
OWN, BOTH = 1, 3
# Of a query row, behind what each warp tells: its reference, and what both halves' sums are multiplied by.
TOP, FACTOR = WARPS, WARPS + 1


class SwapABSoftmaxWarps(SoftmaxWarps):
    """A thread's key: row `thread` of its half's tiles; and a column of values, by its lane of tensor memory.

    Attributes:
        bound: by query row, the score up to which its reference is kept; -inf before its first one.
        shift: minus the reference, in base 2; 0 before there is one.
        total: of this thread's weights.
    """

    def __init__(self, kernel, work_pipeline, barriers, base, sP, told, places, outputs, requests, scoring, half):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.base = work_pipeline, barriers, base
        self.sP, self.told, self.places = sP, told, places
        self.out, self.lse, self.partials = outputs
        self.mask = Mask(kernel.key, kernel.tile_n, requests)
        self.requests, self.scoring, self.score_mod = requests, scoring, score_mod_of(kernel.key, scoring)
        self.half, self.rows = half, kernel.tile_m
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.warp, lane = self.thread // 32, self.thread % 32
        # A product of 64 rows has 16 of them in the lanes of each warp.
        self.column = self.thread if kernel.dims_v == ROWS else self.warp * 16 + lane % 16
        self.stores = lane < kernel.dims_v // WARPS
        self.S, self.bound, self.shift, self.row_sum, self.slope = (
            cute.make_rmem_tensor(self.rows, cutlass.Float32) for _ in range(5)
        )
        self.row_sum.fill(0.0)
        self.before = cute.make_rmem_tensor(1, cutlass.Int32)  # tiles of earlier items

    @cute.jit
    def run(self):
        if cutlass.const_expr(self.kernel.dims_v < ROWS):
            # Lanes that no product writes are loaded with the others.
            tmem.store(self.row_sum, self.base, (2 + self.half) * self.rows, self.thread)
            cute.arch.fence_view_async_tmem_store()
        items, tiles, mine = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            count = work.n_block_max - work.n_block_min
            own = self.own(count)
            if self.half == 0:
                self.clear_past(work, tiles)
            self.before.fill(tiles)
            self.weigh_all(work, mine, own)
            cute.arch.mbarrier_wait(self.barriers.o_full, items & 1)
            tmem.after_sync()
            self.finish(work, count)
            mine += own
            tiles += count
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    def tell_end(self, tiles):
        """Nobody else needs to know."""

    @cute.jit
    def start(self, work):
        self.bound.fill(-cutlass.Float32.inf)
        self.shift.fill(0.0)
        self.row_sum.fill(0.0)
        if cutlass.const_expr(self.key.scores.alibi):
            for n in cutlass.range_constexpr(self.rows):
                self.slope[n] = self.scoring.alibi_slopes[q_head_of(self.key, work.head_block, n)] * LOG2_E

    def meet(self):
        """All threads of the half."""
        cute.arch.barrier(barrier_id=OWN + self.half, number_of_threads=WARPGROUP)

    def meet_both(self):
        cute.arch.barrier(barrier_id=BOTH, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def online_softmax(self, work, tiles, count, masked: cutlass.Constexpr[bool]):
        """A tile's scores into weights; arguments as the base class has them."""
        half = self.half
        cute.arch.mbarrier_wait(self.barriers.s_full + half, count & 1)
        tmem.after_sync()
        tmem.load(self.base, half * self.rows, self.S, self.thread)
        cute.arch.fence_view_async_tmem_load()
        scores = [self.S[n] for n in range(self.rows)]
        key = (work.n_block_max - 1 - 2 * (count - tiles) - half) * self.kernel.tile_n + self.thread
        if cutlass.const_expr(self.score_mod.modifies):
            scores = [
                self.score_mod.apply(score, self.slope[n], self.position(work, n) - key)
                for n, score in enumerate(scores)
            ]
        if cutlass.const_expr(masked):
            scores = self.masked(scores, work, key)
            self.clear_before(work, 2 * (count - tiles) + half)
        # What is not a number outgrows nothing, and stays one in its weight.
        growth = in_pairs(sub_pair, scores, [self.bound[n] for n in range(self.rows)])
        if self.any_of_half(largest_of(growth) > 0.0):
            self.refer(scores, count > tiles)
        factor = self.score_mod.softmax_scale_log2
        powers = in_pairs(
            lambda a, b: fma_pair(a, (factor, factor), b), scores, [self.shift[n] for n in range(self.rows)]
        )
        probs = [exp2(power) for power in powers]
        self.place(probs)
        for n, row_sum in enumerate(in_pairs(add_pair, [self.row_sum[n] for n in range(self.rows)], probs)):
            self.row_sum[n] = row_sum
        # Products read by another proxy: weights, and values that were cleared; and sums that were scaled.
        cute.arch.fence_proxy("async.shared", space="cta")
        tmem.before_sync()
        cute.arch.mbarrier_arrive(self.barriers.p_full + half)

    def position(self, work, n: int):
        """Where a query row's token stands among its request's keys."""
        return work.q_position + n // self.key.pack_gqa

    @cute.jit
    def masked(self, scores, work, key):
        """What a query row does not see becomes -inf."""
        kept = []
        for n, score in enumerate(scores):
            score = hidden(score, key < self.mask.col_limit_right(work, self.position(work, n), 0))
            if cutlass.const_expr(self.mask.has_left):
                score = hidden(score, key >= self.mask.col_limit_left(self.position(work, n), 0))
            kept.append(score)
        return kept

    def any_of_half(self, condition):
        """Whether it holds for any thread of the half: for all of them to know."""
        return (
            cute.arch.inline_ptx(
                "{ .reg .pred mine, any; setp.ne.b32 mine, {$r0}, 0; "
                f"barrier.cta.red.or.aligned.pred any, {{$r1}}, {WARPGROUP}, mine; selp.b32 {{$w0}}, 1, 0, any; }}",
                write_only_types=[cutlass.Int32],
                read_only_args=[cutlass.Int32(condition), cutlass.Int32(OWN + self.half)],
            )
            != 0
        )

    @cute.jit
    def refer(self, scores, adds):
        """New references for query rows whose largest score has outgrown theirs, and totals and sums at their scale.

        Args:
            adds: whether there are sums already.
        """
        factor = self.score_mod.softmax_scale_log2
        mine = cute.make_rmem_tensor(self.rows, cutlass.Float32)
        for n, score in enumerate(scores):
            mine[n] = cute.arch.warp_redux_sync(score, "fmax")
        told, warp, half = self.told, self.warp, self.half
        if cute.arch.lane_idx() == 0:
            cute.autovec_copy(mine, told[None, warp, half])
        self.meet()
        largest = [self.read(warp, half) for warp in range(WARPS)]
        shrinks = cute.make_rmem_tensor(self.rows, cutlass.Float32)
        for n in cutlass.range_constexpr(self.rows):
            row_max = tree_reduce([one[n] for one in largest], cute.arch.fmax)
            outgrown = row_max > self.bound[n]
            shift = -row_max * factor if outgrown else self.shift[n]
            acc_scale = exp2(shift - self.shift[n]) if self.bound[n] > -cutlass.Float32.inf else cutlass.Float32(0.0)
            shrinks[n] = acc_scale
            self.bound[n] = row_max + self.config.rescale_threshold / factor if outgrown else self.bound[n]
            self.shift[n] = shift
            self.row_sum[n] *= acc_scale
        if adds:
            self.scale(shrinks)

    def read(self, what, half):
        """What was told of each query row."""
        found = cute.make_rmem_tensor(self.rows, cutlass.Float32)
        cute.autovec_copy(self.told[None, what, half], found)
        return found

    @cute.jit
    def scale(self, shrinks):
        """The half's sums times a factor for each query row. Products are done: the scores came after them."""
        held = cute.make_rmem_tensor(self.rows, cutlass.Float32)
        first = (2 + self.half) * self.rows
        tmem.load(self.base, first, held, self.thread)
        cute.arch.fence_view_async_tmem_load()
        scaled = in_pairs(mul_pair, [held[n] for n in range(self.rows)], [shrinks[n] for n in range(self.rows)])
        for n, value in enumerate(scaled):
            held[n] = value
        tmem.store(held, self.base, first, self.thread)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def place(self, probs):
        """A key's weights side by side, where products read them."""
        wide = cute.make_rmem_tensor(self.rows, cutlass.Float32)
        for n, weight in enumerate(probs):
            wide[n] = weight
        narrow = cute.make_rmem_tensor((VECTOR, self.rows // VECTOR), self.kernel.dtype)
        narrow.store(wide.load().to(self.kernel.dtype).reshape((VECTOR, self.rows // VECTOR)))
        rows = self.sP[None, None, self.half]
        for i in cutlass.range_constexpr(self.rows // VECTOR):
            to = cute.local_tile(rows, (1, VECTOR), (self.thread, i))
            cute.autovec_copy(narrow[None, i], cute.group_modes(to, 0, 2))

    @cute.jit
    def clear_past(self, work, count):
        """Zero the values behind the last key, which may be anything: a weight of 0 does not take away a NaN."""
        kept = work.seqlen_k - (work.n_block_max - 1) * self.kernel.tile_n
        if kept < self.kernel.tile_n:
            self.wait_values(count)
            values = self.places.values[None, None, self.places.of_values(count)]
            clear_rows(values, cutlass.max(kept, 0), self.kernel.tile_n, self.thread, WARPGROUP)

    @cute.jit
    def clear_before(self, work, step):
        """Zero the values below the windows of all rows, which lie in an item's last tile if in any; step: the tile."""
        if cutlass.const_expr(self.key.has_window_left):
            below = self.mask.keys_before_window(work.q_position, work.n_block_min)
            if step == work.n_block_max - work.n_block_min - 1 and below > 0:
                count = self.before[0] + step
                self.wait_values(count)
                values = self.places.values[None, None, self.places.of_values(count)]
                clear_rows(values, 0, below, self.thread, WARPGROUP)

    @cute.jit
    def wait_values(self, count):
        stages = self.config.stages
        cute.arch.mbarrier_wait(self.barriers.v_full + stage_of(count, stages), phase_of(count, stages))

    @cute.jit
    def finish(self, work, count):
        """Both halves' sums of an item together: each half's threads store half of the query rows.

        Args:
            count: tiles of the item; of one alone the second half has no sums.
        """
        row_sum = spread_sums([self.row_sum[n] for n in range(self.rows)])
        row_maxes = cute.make_rmem_tensor(self.rows, cutlass.Float32)
        for n in cutlass.range_constexpr(self.rows):
            unseen = self.bound[n] == -cutlass.Float32.inf
            row_maxes[n] = -cutlass.Float32.inf if unseen else -self.shift[n]
        told, warp, half, lane = self.told, self.warp, self.half, cute.arch.lane_idx()
        if lane < self.rows:
            told[lane, warp, half] = row_sum
        if self.thread == 0:
            cute.autovec_copy(row_maxes, told[None, TOP, half])
        self.meet_both()
        own = cutlass.const_expr(self.rows // 2)
        first = half * own
        if self.thread < own:
            self.judge(work, first + self.thread)
        sums = [cute.make_rmem_tensor(own, cutlass.Float32) for _ in range(2)]
        sums[1].fill(0.0)
        place = cute.assume(2 * self.rows + first, divby=own)
        tmem.load(self.base, place, sums[0], self.thread)
        if count > 1:
            tmem.load(self.base, place + self.rows, sums[1], self.thread)
        cute.arch.fence_view_async_tmem_load()
        self.meet()
        factors = [cute.make_rmem_tensor(own, cutlass.Float32) for _ in range(2)]
        for g in cutlass.range_constexpr(2):
            cute.autovec_copy(cute.local_tile(self.told[None, FACTOR + g, half], (own,), (half,)), factors[g])
        for j in cutlass.range_constexpr(own):
            value = sums[0][j] * factors[0][j] + sums[1][j] * factors[1][j]
            self.store(work, first + j, value)
        # The next item's weights, totals and sums come behind.
        tmem.before_sync()
        self.meet_both()

    @cute.jit
    def judge(self, work, m):
        """What both halves' sums of query row m are multiplied by, and all of it that is no sum."""
        told, half = self.told, self.half
        row_maxes = [told[m, TOP, g] for g in range(2)]
        row_sums = [tree_reduce([told[m, warp, g] for warp in range(WARPS)], add) for g in range(2)]
        row_max = cute.arch.fmax(*row_maxes)
        probs = [exp2(one - finite_or_zero(row_max)) for one in row_maxes]
        row_sum = row_sums[0] * probs[0] + row_sums[1] * probs[1]
        factor = cutlass.Float32(1.0)
        if work.partial_idx == NOT_SPLIT:
            factor = self.whole(work, m, row_max, row_sum)
        elif m < work.num_rows:
            held = self.requests.rows
            place = self.partial(work) + held * self.kernel.dims_v + m
            cute.make_tensor(place, cute.make_layout(1))[0] = row_max
            cute.make_tensor(place + held, cute.make_layout(1))[0] = row_sum
        for g in cutlass.range_constexpr(2):
            told[m, FACTOR + g, half] = probs[g] * factor

    @cute.jit
    def whole(self, work, m, row_max, row_sum):
        """What an output is divided by; its LSE goes out."""
        head = q_head_of(self.key, work.head_block, m)
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[head].to(cutlass.Float32)
        factor, row_lse = finalize(row_max, row_sum, sink, v_scale_of(self.key, self.scoring, work.head_block))
        if cutlass.const_expr(self.key.lse):
            to = self.lse
            if m < work.num_rows:
                to[work.q_offset + m // self.key.pack_gqa, head] = row_lse
        return factor

    def partial(self, work):
        """Where an unfinished item's sums go."""
        size = partial_size(self.requests.rows, self.kernel.dims_v)
        return self.partials.iterator + cutlass.Int64(work.partial_idx) * size

    @cute.jit
    def store(self, work, m, value):
        """This thread's column of query row m: an output, or for the merge kernel a sum as it is, in float32."""
        out, column = self.out, self.column
        if m < work.num_rows and self.stores:
            if work.partial_idx != NOT_SPLIT:
                place = self.partial(work) + m * self.kernel.dims_v + column
                cute.make_tensor(place, cute.make_layout(1))[0] = value
            elif column < self.key.head_dim_v:
                head = q_head_of(self.key, work.head_block, m)
                out[work.q_offset + m // self.key.pack_gqa, head, column] = value.to(self.kernel.dtype)


def add(a, b):
    return a + b


def spread_sums(values):
    """Lane i's is the sum of all lanes' values[i % len(values)]; their number a power of two up to 32."""
    lane, bit, rest = cute.arch.lane_idx(), len(values) // 2, len(values)
    while bit:
        upper = (lane & bit) != 0
        halves = list(zip(values[:bit], values[bit:], strict=True))
        kept, given = [either(upper, high, low) for low, high in halves], [either(upper, *pair) for pair in halves]
        values = [own + cute.arch.shuffle_sync_bfly(other, bit) for own, other in zip(kept, given, strict=True)]
        bit //= 2
    value = values[0]
    while rest < 32:
        value += cute.arch.shuffle_sync_bfly(value, rest)
        rest *= 2
    return value


@cute.jit
def either(condition, first, second):
    return first if condition else second


def largest_of(values):
    """The largest of an even number of float32 values, NaN left out."""
    level = [cute.arch.fmax(values[0], values[1]), *values[2:]]
    while len(level) > 1:
        threes = [fmax3(*level[i : i + 3], False) for i in range(0, len(level) - 2, 3)]
        rest = level[len(threes) * 3 :]
        level = threes + ([cute.arch.fmax(*rest)] if len(rest) == 2 else rest)
    return level[0]
