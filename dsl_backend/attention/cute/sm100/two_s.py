# SPDX-License-Identifier: Apache-2.0
"""Two S stages of the same 128 rows, and one O: key tiles alternate between the S stages.

O of wide values leaves no room in tensor memory for a second one. One softmax warpgroup turns S of all key tiles into P
in turn. Q K^T of a tile is issued before P V of the tile before it, so that it runs while the softmax of that tile
works. So S does not tell that O of the tile before is complete: `v_empty` does.
"""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sm100.dense_configs import TWO_S_STAGES
from dsl_backend.attention.cute.sm100.dense_correction import CorrectionWarps
from dsl_backend.attention.cute.sm100.dense_mma import MmaWarp, tmem_offset_O, tmem_offset_S
from dsl_backend.attention.cute.sm100.dense_softmax import ACC_SCALE, SoftmaxWarps
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of

WORK_TILE_END = TWO_S_STAGES  # of stats_full: the mbarrier of the final statistics
# The final statistics are in this column of sStats: row_sum for S stage 0, row_max for S stage 1.
FINAL_STATS = 1


class TwoSMmaWarp(MmaWarp):
    """S = Q K^T and O += P V of one CTA. O is complete when `o_full` is signalled."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tOrP_layout, self.tmem_ptr = self.tOrP[0].layout, self.tmem_S[0]

    @cute.jit
    def mma_tiles(self, work: WorkTile, q_stage: cutlass.Int32, kv_idx: cutlass.Int32):
        end = kv_idx + work.n_block_max - work.n_block_min
        self.qk_of_tile(q_stage, kv_idx, end)
        for tile in cutlass.range(kv_idx, end, unroll=1):
            if tile + 1 < end:
                self.qk_of_tile(q_stage, tile + 1, end)
            self.pv_of_tile(tile, tile > kv_idx)
        self.commit(self.barriers.o_full)
        return end

    @cute.jit
    def qk_of_tile(self, q_stage: cutlass.Int32, kv_idx: cutlass.Int32, end: cutlass.Int32):
        """S of a tile, over P of the tile two before, whose P V has been issued; `end`: of the work tile."""
        self.wait_k(kv_idx)
        s_stage, (k_stage,) = stage_of(kv_idx, TWO_S_STAGES), self.kv_stages.k_stages(kv_idx)
        tSrQ, tSrK = self.tSrQ[0][None, None, None, q_stage], self.tSrK[0][None, None, None, k_stage]
        commit = [self.barriers.s_full + s_stage, self.barriers.k_empty + k_stage]
        tmem_S = self.tmem_ptr + tmem_offset_S(self.kernel, s_stage)
        self.mma_qk.issue(tmem_S, tSrQ, [tSrK], False, commit=commit)
        self.release_q(q_stage, kv_idx + 1 == end)

    @cute.jit
    def pv_of_tile(self, kv_idx: cutlass.Int32, accumulate: cutlass.Boolean):
        """O (+)= P V of a tile, once P is written and O rescaled."""
        s_stage, v_stage = stage_of(kv_idx, TWO_S_STAGES), self.kv_stages.v_stage(kv_idx)
        self.wait_v(kv_idx)
        cute.arch.mbarrier_wait(self.barriers.p_full + s_stage, phase_of(kv_idx, TWO_S_STAGES))
        tmem.after_sync()
        tmem_P = cute.recast_ptr(self.tmem_ptr + tmem_offset_S(self.kernel, s_stage), dtype=self.kernel.mma_dtype_v)
        tOrP, tOrV = cute.make_tensor(tmem_P, self.tOrP_layout), self.tOrV[None, None, None, v_stage]
        tmem_O = self.tmem_ptr + tmem_offset_O(self.kernel, 0)
        self.mma_pv.issue(tmem_O, tOrP, [tOrV], accumulate, commit=[self.barriers.v_empty + v_stage])


class TwoSSoftmaxWarps(SoftmaxWarps):
    """A thread's row of the CTA."""

    def s_stage_of(self, s_idx: cutlass.Int32) -> tuple:
        s_stage = stage_of(s_idx, TWO_S_STAGES)
        return s_stage, phase_of(s_idx, TWO_S_STAGES), tmem_offset_S(self.kernel, s_stage)

    @cute.jit
    def send_final_stats(self, s_idx: cutlass.Int32):
        # The correction warps have read those of the work tile before.
        sStats = self.sStats
        sStats[self.thread, FINAL_STATS, 0] = self.row_sum[0]
        sStats[self.thread, FINAL_STATS, 1] = self.final_row_max()
        cute.arch.mbarrier_arrive(self.barriers.stats_full + WORK_TILE_END)


class TwoSCorrectionWarps(CorrectionWarps):
    """A thread's row of the CTA."""

    @cute.jit
    def run(self):
        work_idx, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            q_stage = stage_of(work_idx, self.config.query_stages)
            self.wait_acc_scale(kv_idx)
            self.clear_v_after_end(work, kv_idx)
            end = kv_idx + work.n_block_max - work.n_block_min
            if kv_idx + 1 == end:
                self.clear_last_v(work, kv_idx)
            self.arrive_p_full_of(kv_idx)
            for tile in cutlass.range(kv_idx + 1, end, unroll=1):
                self.p_of_tile(work, tile, tile + 1 == end)
            kv_idx = end
            self.wait_all_pv(work_idx, kv_idx)
            cute.arch.mbarrier_wait(self.barriers.stats_full + WORK_TILE_END, work_idx & 1)
            row_sum, row_max = self.sStats[self.thread, FINAL_STATS, 0], self.sStats[self.thread, FINAL_STATS, 1]
            cute.arch.mbarrier_arrive(self.barriers.stats_empty)
            self.epilogue(work, work, self.thread, q_stage, row_max, row_sum, [(0, None)])
            self.store_tile(work, q_stage)
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid

    @cute.jit
    def wait_acc_scale(self, kv_idx: cutlass.Int32):
        cute.arch.mbarrier_wait(
            self.barriers.stats_full + stage_of(kv_idx, TWO_S_STAGES), phase_of(kv_idx, TWO_S_STAGES)
        )

    @cute.jit
    def wait_pv(self, kv_idx: cutlass.Int32):
        """Until P V of the tile is done."""
        stages = self.config.stages
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage_of(kv_idx, stages), phase_of(kv_idx, stages))

    def wait_all_pv(self, work_idx: cutlass.Int32, kv_idx: cutlass.Int32) -> None:
        """Until O of a work tile is complete; `kv_idx`: key tiles up to its end."""
        self.wait_o(work_idx)

    @cute.jit
    def arrive_p_full_of(self, kv_idx: cutlass.Int32):
        """O is rescaled for the tile's P."""
        cute.arch.mbarrier_arrive(self.barriers.p_full + stage_of(kv_idx, TWO_S_STAGES))

    @cute.jit
    def p_of_tile(self, work: WorkTile, kv_idx: cutlass.Int32, last: cutlass.Boolean):
        """Rescale O to the row_max of the tile's P; `last`: of the work tile."""
        self.wait_acc_scale(kv_idx)
        acc_scale = self.sStats[self.thread, ACC_SCALE, stage_of(kv_idx, TWO_S_STAGES)]
        if cute.arch.vote_all_sync(acc_scale == 1.0):
            pass
        else:
            self.wait_pv(kv_idx - 1)
            self.rescale(0, acc_scale)
        if last:
            self.clear_last_v(work, kv_idx)
        self.arrive_p_full_of(kv_idx)

    @cute.jit
    def clear_last_v(self, work: WorkTile, kv_idx: cutlass.Int32):
        """Zero V of a work tile's last tile before the windows of all rows."""
        step = work.n_block_max - work.n_block_min - 1
        self.clear_v_before_window(work, kv_idx - step, step)
