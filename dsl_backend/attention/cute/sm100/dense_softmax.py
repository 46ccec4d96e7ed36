# SPDX-License-Identifier: Apache-2.0
"""The softmax role: a warpgroup turns the scores of a half into weights, a thread a row, in place."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.work_tile import q_head_of
from dsl_backend.attention.cute.score_mod import score_mod_of
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import ROWS
from dsl_backend.attention.cute.sm100.dense_mma import scores_at
from dsl_backend.attention.cute.sm100.idle_warps import arrivals_of, arrive
from dsl_backend.primitives import tmem
from dsl_backend.primitives.math import (
    LOG2_E,
    add_pair,
    ex2_emulation_pair,
    exp2,
    finite_or_zero,
    fma_pair,
    fmax3_tree,
    tree_reduce,
)

# What the correction is told of a row: first how its sums shrink, at the end its total and its largest score.
SHRINK, TOP = 0, 1
PIECE = 32  # weights of a row in registers at a time
CHAINS = 4  # sums of weights side by side


class SoftmaxWarps:
    """A thread's row: row `thread` of its half."""

    def __init__(self, kernel, work_pipeline, barriers, base, statistics, requests, scoring, half):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.base, self.statistics = work_pipeline, barriers, base, statistics
        self.mask = Mask(kernel.key, kernel.tile_n, requests)
        self.requests, self.scoring, self.score_mod = requests, scoring, score_mod_of(kernel.key, scoring)
        self.half = half
        # Its error is far below that of 16-bit outputs, and far above that of a float32 LSE.
        self.ex2_emulation = 0 if kernel.key.lse else kernel.config.ex2_emulation
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.row = self.thread if kernel.alternate else half * ROWS + self.thread
        self.columns = scores_at(kernel, 1) * half
        self.rests = kernel.rests
        self.arrivals = cute.make_rmem_tensor(1, cutlass.Int32) if self.rests else None
        self.S = cute.make_rmem_tensor(kernel.tile_n, cutlass.Float32)
        self.row_max = cute.make_rmem_tensor(1, cutlass.Float32)
        self.row_sum = cute.make_rmem_tensor(1, cutlass.Float32)
        self.slope = cute.make_rmem_tensor(1, cutlass.Float32)

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            # The correction has read the totals of the item before: warps that rest go no further ahead than that.
            cute.arch.mbarrier_wait(self.barriers.l_empty + self.half, (items & 1) ^ 1)
            own = self.own(work.n_block_max - work.n_block_min)
            if cutlass.const_expr(self.rests):
                arrivals = arrivals_of(work, self.thread)
                self.arrivals.fill(arrivals)
                if arrivals > 0:
                    self.weigh_all(work, tiles, own)
            else:
                self.weigh_all(work, tiles, own)
            tiles += own
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    def own(self, stop):
        """How many of an item's last `stop` tiles are the half's."""
        return (stop + 1 - self.half) // 2 if self.kernel.alternate else stop

    @cute.jit
    def weigh_all(self, work, tiles, own):
        """The half's tiles of an item; tiles: those before it."""
        self.start(work)
        n_block_full_max = cutlass.max(cutlass.min(work.n_block_full_max, work.n_block_max), work.n_block_min)
        n_block_full_min = cutlass.min(work.n_block_full_min, n_block_full_max)
        whole, rest = (
            tiles + self.own(work.n_block_max - n_block_full_max),
            tiles + self.own(work.n_block_max - n_block_full_min),
        )
        for count in cutlass.range(tiles, whole, unroll=1):
            self.online_softmax(work, tiles, count, True)
        for count in cutlass.range(whole, rest, unroll=1):
            self.online_softmax(work, tiles, count, False)
        if cutlass.const_expr(self.key.has_window_left):
            for count in cutlass.range(rest, tiles + own, unroll=1):
                self.online_softmax(work, tiles, count, True)
        self.tell_end(tiles + own)

    @cute.jit
    def start(self, work):
        self.row_max.fill(-cutlass.Float32.inf)
        self.row_sum.fill(0.0)
        self.score_mod.softmax_scale.load(work.head_block)
        if cutlass.const_expr(self.key.scores.alibi):
            self.slope[0] = self.scoring.alibi_slopes[self.head(work)] * LOG2_E

    @cute.jit
    def head(self, work):
        return q_head_of(self.key, work.head_block, self.row)

    @cute.jit
    def online_softmax(self, work, tiles, count, masked: cutlass.Constexpr[bool]):
        """A tile's scores into weights.

        Args:
            tiles: the half's before the item.
            count: the half's before this one.
        """
        half, phase, columns = self.turn(count)
        cute.arch.mbarrier_wait(self.barriers.s_full + half, phase)
        tmem.after_sync()
        tmem.load(self.base, columns, self.S, self.thread)
        cute.arch.fence_view_async_tmem_load()
        scores = [self.S[j] for j in range(self.kernel.tile_n)]
        position = work.q_position + self.row // self.key.pack_gqa
        place = count - tiles
        if cutlass.const_expr(self.kernel.alternate):
            place = 2 * place + self.half
        first = (work.n_block_max - 1 - place) * self.kernel.tile_n
        if cutlass.const_expr(self.score_mod.modifies):
            away = position - first
            scores = [self.score_mod.apply(score, self.slope[0], away - j) for j, score in enumerate(scores)]
        if cutlass.const_expr(masked):
            scores = self.masked(scores, work, position, first)
        before = self.row_max[0]
        # A NaN must not vanish: the polynomial has none.
        row_max = fmax3_tree([before, *scores], nan=self.ex2_emulation > 0)
        # A little growth is let pass: weights above 1 are as good, and sums need no correction.
        growth = (row_max - before) * self.score_mod.softmax_scale_log2
        row_max = before if growth <= self.config.rescale_threshold else row_max
        self.row_max[0] = row_max
        reference = finite_or_zero(row_max) * self.score_mod.softmax_scale_log2
        acc_scale = exp2(before * self.score_mod.softmax_scale_log2 - reference)
        self.statistics[self.thread, SHRINK, half] = acc_scale
        arrive(self.barriers.l_full + half, self.arrivals)
        sums = self.narrow(scores, reference, 0 if masked else self.ex2_emulation, columns)
        cute.arch.fence_view_async_tmem_store()
        tmem.before_sync()
        self.tell_weights(half)
        self.row_sum[0] = self.row_sum[0] * acc_scale + (sums[0] + sums[1])

    def turn(self, count):
        """Of the count-th tile: the half, the phase of its barriers, the first column of its scores."""
        return self.half, count & 1, self.columns

    def tell_weights(self, half):
        arrive(self.barriers.p_full + half, self.arrivals)

    def narrow(self, scores, reference, ex2_emulation: int, columns):
        """Weights into the scores' place, some at a time, so that few are in registers; their sum, as a pair."""
        sums: list = []
        for first in range(0, self.kernel.tile_n, PIECE):
            probs = self.powers(scores[first : first + PIECE], reference, ex2_emulation)
            wide = cute.make_rmem_tensor(len(probs), cutlass.Float32)
            for j, weight in enumerate(probs):
                wide[j] = weight
            narrow = cute.make_rmem_tensor(len(probs), self.kernel.dtype_v)
            narrow.store(wide.load().to(self.kernel.dtype_v))
            packed = cute.recast_tensor(narrow, cutlass.Float32)
            tmem.store(packed, self.base, columns + first // 2, self.thread)
            for j, pair in enumerate(zip(probs[::2], probs[1::2], strict=True)):
                if len(sums) < CHAINS:
                    sums.append(pair)
                else:
                    sums[j % CHAINS] = add_pair(sums[j % CHAINS], pair)
        return tree_reduce(sums, add_pair)

    def powers(self, scores, reference, ex2_emulation: int) -> list:
        """2^(factor score - reference); of each 16, `polynomial` on the FMA pipe rather than the special unit."""
        factor = self.score_mod.softmax_scale_log2
        probs: list = []
        for j in range(0, len(scores), 2):
            power = fma_pair((scores[j], scores[j + 1]), (factor, factor), (-reference, -reference))
            probs += ex2_emulation_pair(power) if j % 16 < ex2_emulation else (exp2(power[0]), exp2(power[1]))
        return probs

    @cute.jit
    def masked(self, scores, work, position, first):
        """What the row does not see becomes -inf."""
        limit_right = self.mask.col_limit_right(work, position, first)
        limit_left = self.mask.col_limit_left(position, first) if cutlass.const_expr(self.mask.has_left) else None
        kept = [hidden(score, j < limit_right) for j, score in enumerate(scores)]
        if cutlass.const_expr(self.mask.has_left):
            kept = [hidden(score, limit_left <= j) for j, score in enumerate(kept)]
        return kept

    @cute.jit
    def tell_end(self, tiles):
        """The correction, of this row of an item; tiles: so far."""
        # It has read what the last tile's message said. That of the tiles before came ahead of scores, which follow it.
        cute.arch.mbarrier_wait(self.barriers.p_full + self.half, (tiles - 1) & 1)
        place = self.statistics
        place[self.thread, SHRINK, self.half] = self.row_sum[0]
        place[self.thread, TOP, self.half] = self.row_max[0] * self.score_mod.softmax_scale_log2
        arrive(self.barriers.l_full + self.half, self.arrivals)


@cute.jit
def hidden(score: cutlass.Float32, seen):
    return score if seen else -cutlass.Float32.inf
