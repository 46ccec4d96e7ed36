# SPDX-License-Identifier: Apache-2.0
"""The S stages have S in the same columns of tensor memory in turn, and P in columns of their own.

P in the columns of S makes a chain: the softmax of a tile, its P V, the next Q K^T, and the next softmax. Here S is
free as soon as it is in registers. The S of the other stage is made in its place, while the softmax warps go on, so
that each finds its next S when it has stored its P. Two warps issue Q K^T and P V: neither waits for what the other one
waits for.
"""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sm100.dense_configs import SHARED_S_STATS_STAGES
from dsl_backend.attention.cute.sm100.dense_correction import CorrectionWarps
from dsl_backend.attention.cute.sm100.dense_mma import MmaWarp, tmem_offset_P
from dsl_backend.attention.cute.sm100.dense_softmax import ACC_SCALE, ROW_MAX, ROW_SUM, SoftmaxWarps
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of

TILE_STATS = SHARED_S_STATS_STAGES - 1  # stages of a row's statistics that key tiles have in turn


def stats_stage_of(s_stage: cutlass.Int32 | int, tile: cutlass.Int32) -> cutlass.Int32:
    """Of a key tile's statistics."""
    return s_stage * SHARED_S_STATS_STAGES + stage_of(tile, TILE_STATS)


def final_stats_stage(s_stage: cutlass.Int32 | int) -> cutlass.Int32 | int:
    return s_stage * SHARED_S_STATS_STAGES + TILE_STATS


class QkWarp(MmaWarp):
    """S = Q K^T of each S stage."""

    barriers: Any

    @cute.jit
    def run(self):
        work_idx, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            q_stage = self.wait_q(work_idx)
            end = kv_idx + work.n_block_max - work.n_block_min
            for tile in cutlass.range(kv_idx, end, unroll=1):
                self.wait_k(tile)
                for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
                    self.wait_s(s_stage)
                    self.issue_qk(s_stage, q_stage, tile, self.k_released(s_stage, tile))
            self.release_q(q_stage, cutlass.Boolean(True))
            kv_idx = end
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid

    @cute.jit
    def wait_s(self, s_stage: cutlass.Constexpr[int]):
        """Until S of the S stage before is in registers. The two take turns, so that a stage has one phase."""
        cute.arch.mbarrier_wait(self.barriers.s_empty, s_stage ^ 1)
        tmem.after_sync()

    def k_released(self, s_stage: int, kv_idx: cutlass.Int32) -> list[cute.Pointer]:
        """The mbarrier of the K stage, if Q K^T of this S stage is the last to read it."""
        last = self.kernel.s_stages - 1
        return [self.barriers.k_empty + stage_of(kv_idx, self.config.stages)] if s_stage == last else []


class PvWarp(MmaWarp):
    """O += P V of each S stage."""

    barriers: Any

    @cute.jit
    def run(self):
        work_idx, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            end, accumulate = kv_idx + work.n_block_max - work.n_block_min, cutlass.Boolean(False)
            for tile in cutlass.range(kv_idx, end, unroll=1):
                self.wait_v(tile)
                for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
                    released = [self.barriers.p_empty + s_stage, *self.v_released(s_stage, tile)]
                    self.pv(s_stage, tile, tile, accumulate, released)
                accumulate = cutlass.Boolean(True)
            self.commit(self.barriers.o_full)
            kv_idx = end
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid


class SharedSSoftmaxWarps(SoftmaxWarps):
    """The statistics of a tile are sent before P of the tile before is read; P waits for that."""

    barriers: Any
    count: Any

    @cute.jit
    def softmax_if_active(self, work: WorkTile, s_idx: cutlass.Int32, count: cutlass.Int32):
        num_tiles = work.n_block_max - work.n_block_min
        self.count = count
        self.softmax_work_tile(work, s_idx, num_tiles)
        return s_idx + num_tiles

    def s_taken(self, s_stage: cutlass.Int32 | int) -> None:
        tmem.before_sync()
        cute.arch.mbarrier_arrive(self.barriers.s_empty)

    def p_offset(self, tmem_offset: cutlass.Int32 | int, s_stage: cutlass.Int32 | int) -> cutlass.Int32 | int:
        return tmem_offset_P(self.kernel, s_stage)

    def wait_p(self, s_stage: cutlass.Int32 | int, s_idx: cutlass.Int32) -> None:
        cute.arch.mbarrier_wait(self.barriers.p_empty + s_stage, (s_idx & 1) ^ 1)
        tmem.after_sync()

    def send_acc_scale(self, acc_scale: cutlass.Float32, s_stage: cutlass.Int32 | int, s_idx: cutlass.Int32) -> None:
        # Read of the tile before the one before: P of that has been read, which this warp has waited for.
        stats_stage = stats_stage_of(s_stage, s_idx)
        self.sStats[self.thread, ACC_SCALE, stats_stage] = acc_scale
        cute.arch.mbarrier_arrive(self.barriers.stats_full + stats_stage)

    @cute.jit
    def wait_final_stats_read(self):
        """Until the correction warps have read those of the work tile before."""
        cute.arch.mbarrier_wait(self.barriers.stats_empty + self.s_stage, (self.count & 1) ^ 1)

    @cute.jit
    def send_final_stats(self, s_idx: cutlass.Int32):
        self.wait_final_stats_read()
        sStats, stats_stage = self.sStats, final_stats_stage(self.s_stage)
        sStats[self.thread, ROW_SUM, stats_stage] = self.row_sum[0]
        sStats[self.thread, ROW_MAX, stats_stage] = self.row_max[0] * self.score_mod.softmax_scale_log2
        cute.arch.mbarrier_arrive(self.barriers.stats_full + stats_stage)


class SharedSCorrectionWarps(CorrectionWarps):
    """S does not tell that O is complete: `p_empty` does. Only who rescales O waits for it."""

    barriers: Any

    @cute.jit
    def first_ps(self, work: WorkTile, work_idx: cutlass.Int32, kv_idx: cutlass.Int32):
        for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
            self.wait_acc_scale(s_stage, kv_idx)
            if cutlass.const_expr(s_stage == 0):
                self.clear_v_before_window(work, kv_idx, 0)
            self.arrive_p_full(s_stage)

    @cute.jit
    def rescale_all(self, work: WorkTile, work_idx: cutlass.Int32, kv_idx: cutlass.Int32):
        for tile in cutlass.range(kv_idx + 1, kv_idx + work.n_block_max - work.n_block_min, unroll=1):
            for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
                self.wait_acc_scale(s_stage, tile)
                # Statistics come after P V of two tiles before, so that V's stage has its values of then. Ahead of that
                # a wait for V may end at once, for the stage's phase before those.
                if cutlass.const_expr(s_stage == 0):
                    self.clear_v_before_window(work, kv_idx, tile - kv_idx)
                acc_scale = self.sStats[self.thread, ACC_SCALE, stats_stage_of(s_stage, tile)]
                if cute.arch.vote_all_sync(acc_scale == 1.0):
                    pass
                else:
                    self.wait_pv(s_stage, tile - 1)
                    self.rescale(s_stage, acc_scale)
                self.wait_others(s_stage, tile - 1)
                self.arrive_p_full(s_stage)

    @cute.jit
    def wait_others(self, s_stage: cutlass.Constexpr[int], tile: cutlass.Int32):
        """Until all warps have arrived for P of the tile: this one would be counted in their place."""
        cute.arch.mbarrier_wait(self.barriers.p_full + s_stage, tile & 1)

    @cute.jit
    def wait_pv(self, s_stage: cutlass.Constexpr[int], tile: cutlass.Int32):
        """Until P V of the tile is done."""
        cute.arch.mbarrier_wait(self.barriers.p_empty + s_stage, tile & 1)

    @cute.jit
    def wait_acc_scale(self, s_stage: cutlass.Constexpr[int], tile: cutlass.Int32):
        cute.arch.mbarrier_wait(self.barriers.stats_full + stats_stage_of(s_stage, tile), phase_of(tile, TILE_STATS))

    @cute.jit
    def final_stats_of(
        self, s_stage: cutlass.Constexpr[int], work: WorkTile, work_idx: cutlass.Int32, kv_idx: cutlass.Int32
    ):
        stats_stage = cutlass.const_expr(final_stats_stage(s_stage))
        cute.arch.mbarrier_wait(self.barriers.stats_full + stats_stage, work_idx & 1)
        row_sum, row_max = (
            self.sStats[self.thread, ROW_SUM, stats_stage],
            self.sStats[self.thread, ROW_MAX, stats_stage],
        )
        cute.arch.mbarrier_arrive(self.barriers.stats_empty + s_stage)
        return row_sum, row_max
