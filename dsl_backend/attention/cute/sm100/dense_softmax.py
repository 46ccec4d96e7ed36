# SPDX-License-Identifier: Apache-2.0
"""The softmax role: a warpgroup turns S of its S stage into P in place, a row for each thread."""

from collections.abc import Sequence

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import num_splits_of, split_of
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline, q_head_of
from dsl_backend.attention.cute.score_mod import ScoreModArgs, score_mod_of
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_barriers import AnyBarriers
from dsl_backend.attention.cute.sm100.dense_configs import MMA_M, P_COLUMNS
from dsl_backend.attention.cute.sm100.dense_mma import tmem_offset_S
from dsl_backend.attention.cute.sm100.idle_warps import arrive, arrive_count_of
from dsl_backend.attention.cute.tiles import TiledKernel
from dsl_backend.primitives import tmem
from dsl_backend.primitives.math import (
    LOG2_E,
    Pair,
    add_pair,
    ex2_emulation_pair,
    exp2,
    finite_or_zero,
    fma_pair,
    fmax3_tree,
    tree_reduce,
)

# Columns of sStats, a row's statistics: acc_scale for each key tile; at the end of a work tile row_sum and row_max.
ACC_SCALE, ROW_SUM, ROW_MAX = 0, 0, 1
FIRST_BARRIER_ID = 2  # named barriers of the warpgroups; the correction warps have the one before
ROW_SUMS = 4  # partial sums of P side by side
NARROW = 64  # columns of V up to which P does not wait for O to be rescaled: its MMAs are short


class SoftmaxWarps:
    """A thread's row: row `thread` of its S stage.

    Args:
        sStats: (row, ACC_SCALE ... ROW_MAX, S stage), for the correction warps.
        s_stage: of this warpgroup.
    """

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        barriers: AnyBarriers,
        tmem_ptr: cute.Pointer,
        sStats: cute.Tensor,
        requests: Requests,
        scoring: ScoreModArgs,
        s_stage: cutlass.Int32 | int,
    ):
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.tmem_ptr, self.sStats = work_pipeline, barriers, tmem_ptr, sStats
        self.mask = Mask(kernel.key, kernel.tile_n, requests)
        self.requests, self.scoring, self.score_mod = requests, scoring, score_mod_of(kernel.key, scoring)
        self.s_stage = s_stage
        # The emulation's error is far below that of 16-bit outputs, and far above that of a float32 LSE.
        self.ex2_emulation = 0 if kernel.key.lse else kernel.config.ex2_emulation
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.row = self.thread if kernel.alternate else s_stage * MMA_M + self.thread
        self.tmem_offset = tmem_offset_S(kernel, 1) * s_stage
        self.skip_idle_warps = kernel.skip_idle_warps
        self.arrive_count = cute.make_rmem_tensor(1, cutlass.Int32) if self.skip_idle_warps else None
        self.acc_S = cute.make_rmem_tensor(kernel.tile_n, cutlass.Float32)
        self.row_max = cute.make_rmem_tensor(1, cutlass.Float32)
        self.row_sum = cute.make_rmem_tensor(1, cutlass.Float32)
        self.slope = cute.make_rmem_tensor(1, cutlass.Float32)

    @cute.jit
    def run(self):
        self.begin()
        work_idx, s_idx, split_idx = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            if cutlass.const_expr(self.key.tiles_per_split):
                for index in cutlass.range(num_splits_of(self.key, work), unroll=1):
                    s_idx = self.softmax_if_active(split_of(self.key, work, index), s_idx, split_idx)
                    split_idx += 1
            else:
                s_idx = self.softmax_if_active(work, s_idx, work_idx)
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid

    def begin(self) -> None:
        """Begin, before the first work tile."""

    @cute.jit
    def softmax_if_active(self, work: WorkTile, s_idx: cutlass.Int32, count: cutlass.Int32):
        """The softmax of a work tile, or of a split, unless the warp is idle; return s_idx of the next one.

        Args:
            s_idx: key tiles of the S stage before. count: work tiles, or splits, before.
        """
        self.begin_q(count)
        # The correction warps have read the row sums of the work tile before: idle warps are at most one ahead.
        cute.arch.mbarrier_wait(self.barriers.stats_empty + self.s_stage, (count & 1) ^ 1)
        num_tiles = self.own_tiles(work.n_block_max - work.n_block_min)
        if cutlass.const_expr(self.skip_idle_warps):
            # Or the others could end this work tile too: an idle warp that still waits would never see the phase.
            self.sync_warpgroup()
            arrive_count = arrive_count_of(work, self.thread)
            self.arrive_count.fill(arrive_count)
            if arrive_count > 0:
                self.softmax_work_tile(work, s_idx, num_tiles)
        else:
            self.softmax_work_tile(work, s_idx, num_tiles)
        return s_idx + num_tiles

    def sync_warpgroup(self) -> None:
        cute.arch.barrier(barrier_id=FIRST_BARRIER_ID + self.s_stage, number_of_threads=WARPGROUP)

    def begin_q(self, count: cutlass.Int32) -> None:
        """Begin a work tile, after `count` others. Queries of 16 bits have no scales."""

    def own_tiles(self, num_tiles: cutlass.Int32) -> cutlass.Int32:
        """How many of the first key tiles that are processed belong to this S stage."""
        return (num_tiles + 1 - self.s_stage) // 2 if self.kernel.alternate else num_tiles

    @cute.jit
    def softmax_work_tile(self, work: WorkTile, first_idx: cutlass.Int32, num_tiles: cutlass.Int32):
        """The S stage's key tiles of a work tile; `first_idx`: its key tiles before the work tile."""
        self.reset(work)
        n_block_full_max = cutlass.max(cutlass.min(work.n_block_full_max, work.n_block_max), work.n_block_min)
        n_block_full_min = cutlass.min(work.n_block_full_min, n_block_full_max)
        unmasked, masked_left = (
            first_idx + self.own_tiles(work.n_block_max - n_block_full_max),
            first_idx + self.own_tiles(work.n_block_max - n_block_full_min),
        )
        for s_idx in cutlass.range(first_idx, unmasked, unroll=1):
            self.online_softmax(work, first_idx, s_idx, True)
        for s_idx in cutlass.range(unmasked, masked_left, unroll=1):
            self.online_softmax(work, first_idx, s_idx, False)
        if cutlass.const_expr(self.key.has_window_left):
            for s_idx in cutlass.range(masked_left, first_idx + num_tiles, unroll=1):
                self.online_softmax(work, first_idx, s_idx, True)
        self.send_final_stats(first_idx + num_tiles)

    @cute.jit
    def reset(self, work: WorkTile):
        self.row_max.fill(-cutlass.Float32.inf)
        self.row_sum.fill(0.0)
        self.score_mod.softmax_scale.load(work)
        if cutlass.const_expr(self.key.scores.alibi):
            self.slope[0] = self.scoring.alibi_slopes[self.head(work)] * LOG2_E

    @cute.jit
    def head(self, work: WorkTile):
        """The query head of the thread's row."""
        return q_head_of(self.key, work.head_block, self.row)

    @cute.jit
    def online_softmax(
        self,
        work: WorkTile,
        first_idx: cutlass.Int32,
        s_idx: cutlass.Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """Turn S of a key tile into P.

        Args:
            first_idx: key tiles of the S stage before the work tile.
            s_idx: those before this one.
        """
        s_stage, phase, tmem_offset = self.s_stage_of(s_idx)
        cute.arch.mbarrier_wait(self.barriers.s_full + s_stage, phase)
        tmem.after_sync()
        tmem.load(self.tmem_ptr, tmem_offset, self.acc_S, self.thread)
        cute.arch.fence_view_async_tmem_load()
        self.s_taken(s_stage)
        scores = [self.acc_S[j] for j in range(self.kernel.tile_n)]
        position = work.q_position + self.row // self.key.pack_gqa
        step = s_idx - first_idx
        if cutlass.const_expr(self.kernel.alternate):
            step = 2 * step + self.s_stage
        first_key = (work.n_block_max - 1 - step) * self.kernel.tile_n
        if cutlass.const_expr(self.score_mod.modifies):
            distance, scores = position - first_key, self.scaled_by_q(scores)
            scores = [self.score_mod.apply(score, self.slope[0], distance - j) for j, score in enumerate(scores)]
        if cutlass.const_expr(masked):
            scores = self.apply_mask(scores, work, position, first_key)
        row_max_prev = self.row_max[0]
        # NaN must stay: the emulated exponential of NaN is a number.
        row_max = fmax3_tree([row_max_prev, *scores], nan=self.ex2_emulation > 0)
        # Conditional rescale: if row_max grows little, P above 1 is as exact, and O needs no rescale.
        growth = (row_max - row_max_prev) * self.scale_log2()
        row_max = row_max_prev if growth <= self.config.rescale_threshold else row_max
        self.row_max[0] = row_max
        row_max_scaled = finite_or_zero(row_max) * self.scale_log2()
        acc_scale = exp2(row_max_prev * self.scale_log2() - row_max_scaled)
        self.send_acc_scale(acc_scale, s_stage, s_idx)
        if cutlass.const_expr(self.kernel.dims_v > NARROW and self.config.late_p_keys > 0):
            hold_order()
        emulated = 0 if masked else self.ex2_emulation
        p_sum = self.store_p(scores, row_max_scaled, emulated, self.p_offset(tmem_offset, s_stage), s_stage, s_idx)
        self.row_sum[0] = self.row_sum[0] * acc_scale + (p_sum[0] + p_sum[1])

    def scale_log2(self) -> cutlass.Float32:
        """What S, or a modified score, is multiplied by to be a base-2 score."""
        return self.score_mod.softmax_scale_log2

    def scaled_by_q(self, scores: list[cutlass.Float32]) -> list[cutlass.Float32]:
        """Q k of the queries as they arrived, of which a score modification makes scores."""
        return scores

    def s_stage_of(self, s_idx: cutlass.Int32) -> tuple:
        """Of a key tile: the S stage, the phase of its mbarriers, the first column of S in tensor memory."""
        return self.s_stage, s_idx & 1, self.tmem_offset

    def s_taken(self, s_stage: cutlass.Int32 | int) -> None:
        """S is in registers."""

    def send_acc_scale(self, acc_scale: cutlass.Float32, s_stage: cutlass.Int32 | int, s_idx: cutlass.Int32) -> None:
        """What O is multiplied by, to the correction warps."""
        self.sStats[self.thread, ACC_SCALE, s_stage] = acc_scale
        arrive(self.barriers.stats_full + s_stage, self.arrive_count)

    def p_offset(self, tmem_offset: cutlass.Int32 | int, s_stage: cutlass.Int32 | int) -> cutlass.Int32 | int:
        """First column of P in tensor memory; `tmem_offset`: of S."""
        return tmem_offset

    def wait_p(self, s_stage: cutlass.Int32 | int, s_idx: cutlass.Int32) -> None:
        """Wait until P of the tile before was read. In the columns of S nothing is left to wait for."""

    def arrive_p_full(self, s_stage: cutlass.Int32 | int) -> None:
        arrive(self.barriers.p_full + s_stage, self.arrive_count)

    def store_p(
        self,
        scores: Sequence[cutlass.Float32],
        row_max_scaled: cutlass.Float32,
        ex2_emulation: int,
        tmem_offset: cutlass.Int32 | int,
        s_stage: cutlass.Int32 | int,
        s_idx: cutlass.Int32,
    ) -> Pair:
        """Store P over S, few columns at a time, so that few are in registers, and hand it over; its sum, as a pair."""
        sums: list = []
        early = self.kernel.tile_n - self.config.late_p_keys
        for first in range(0, self.kernel.tile_n, P_COLUMNS):
            probs = self.exp2_scaled(scores[first : first + P_COLUMNS], row_max_scaled, ex2_emulation)
            rP_f32 = cute.make_rmem_tensor(len(probs), cutlass.Float32)
            for j, prob in enumerate(probs):
                rP_f32[j] = prob
            rP = cute.make_rmem_tensor(len(probs), self.kernel.dtype_v)
            rP.store(rP_f32.load().to(self.kernel.dtype_v))
            rP_words = cute.recast_tensor(rP, cutlass.Float32)
            if first == 0:
                self.wait_p(s_stage, s_idx)
            tmem.store(rP_words, self.tmem_ptr, tmem_offset + first // 2, self.thread)
            for j, pair in enumerate(zip(probs[::2], probs[1::2], strict=True)):
                if len(sums) < ROW_SUMS:
                    sums.append(pair)
                else:
                    sums[j % ROW_SUMS] = add_pair(sums[j % ROW_SUMS], pair)
            if first + P_COLUMNS == early:
                p_stored()
                self.arrive_p_full(s_stage)
                if self.config.late_p_keys:
                    hold_order()
        if self.config.late_p_keys:
            late_p_full = self.barriers.late_p_full
            assert late_p_full is not None
            p_stored()
            arrive(late_p_full + s_stage, self.arrive_count)
        return tree_reduce(sums, add_pair)

    def exp2_scaled(
        self, scores: Sequence[cutlass.Float32], row_max_scaled: cutlass.Float32, ex2_emulation: int
    ) -> list[cutlass.Float32]:
        """2^(softmax_scale_log2 score - row_max_scaled); `ex2_emulation` of each 16 on the FMA units."""
        scale = self.scale_log2()
        probs: list = []
        for j in range(0, len(scores), 2):
            exponent = fma_pair((scores[j], scores[j + 1]), (scale, scale), (-row_max_scaled, -row_max_scaled))
            probs += ex2_emulation_pair(exponent) if j % 16 < ex2_emulation else (exp2(exponent[0]), exp2(exponent[1]))
        return probs

    @cute.jit
    def apply_mask(
        self,
        scores: cutlass.Constexpr[Sequence],
        work: WorkTile,
        position: cutlass.Int32,
        first_key: cutlass.Int32,
    ):
        """Scores of keys that the row does not see become -inf."""
        limit_right = self.mask.col_limit_right(work, position, first_key)
        limit_left = self.mask.col_limit_left(position, first_key) if cutlass.const_expr(self.mask.has_left) else None
        masked = [score_or_minus_inf(score, j < limit_right) for j, score in enumerate(scores)]
        if cutlass.const_expr(self.mask.has_left):
            masked = [score_or_minus_inf(score, limit_left <= j) for j, score in enumerate(masked)]  # type: ignore[operator]
        return masked

    @cute.jit
    def send_final_stats(self, s_idx: cutlass.Int32):
        """row_sum and row_max of a work tile to the correction warps; `s_idx`: key tiles of the S stage so far."""
        # The correction warps have read the statistics of the last tile. Those of the tiles before came ahead of S.
        cute.arch.mbarrier_wait(self.barriers.p_full + self.s_stage, (s_idx - 1) & 1)
        sStats = self.sStats
        sStats[self.thread, ROW_SUM, self.s_stage] = self.row_sum[0]
        sStats[self.thread, ROW_MAX, self.s_stage] = self.final_row_max()
        arrive(self.barriers.stats_full + self.s_stage, self.arrive_count)

    def final_row_max(self) -> cutlass.Float32:
        """In base 2: what P is relative to."""
        return self.row_max[0] * self.scale_log2()


def p_stored() -> None:
    """Wait until this thread's P is in tensor memory, ahead of an arrival."""
    cute.arch.fence_view_async_tmem_store()
    tmem.before_sync()


def hold_order() -> None:
    """Keep an arrival ahead of the exponentials behind it: nothing passes a wait for tensor memory, if for nothing."""
    cute.arch.fence_view_async_tmem_load()


@cute.jit
def score_or_minus_inf(score: cutlass.Float32, seen: cutlass.Boolean):
    return score if seen else -cutlass.Float32.inf
