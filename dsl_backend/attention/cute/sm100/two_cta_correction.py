# SPDX-License-Identifier: Apache-2.0
"""The correction role of a CTA with a peer."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import TWO_CTA_S_STAGES
from dsl_backend.attention.cute.sm100.dense_correction import CorrectionWarps
from dsl_backend.attention.cute.sm100.dense_softmax import ACC_SCALE
from dsl_backend.attention.cute.sm100.two_cta_softmax import FINAL_STATS, WORK_TILE_END
from dsl_backend.primitives import tmem
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.ring import phase_of, stage_of


class TwoCtaCorrectionWarps(CorrectionWarps):
    """A thread's row of the CTA.

    S of a tile is made before P V of the tile before it, so S does not tell that O is complete: `v_empty` does.
    """

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
                self.clear_v_before_pair_window(work, kv_idx)
            self.arrive_p_full(kv_idx)
            for tile in cutlass.range(kv_idx + 1, end, unroll=1):
                self.next_p(work, tile, tile + 1 == end)
            kv_idx = end
            self.wait_pv(kv_idx - 1)
            tmem.after_sync()
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
            self.barriers.stats_full + stage_of(kv_idx, TWO_CTA_S_STAGES), phase_of(kv_idx, TWO_CTA_S_STAGES)
        )

    @cute.jit
    def wait_pv(self, kv_idx: cutlass.Int32):
        """Until P V of the tile is done."""
        stages = self.config.stages
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage_of(kv_idx, stages), phase_of(kv_idx, stages))

    @cute.jit
    def arrive_p_full(self, kv_idx: cutlass.Int32):
        """At the leader's mbarrier."""
        cute.arch.mbarrier_arrive(self.barriers.p_full + stage_of(kv_idx, TWO_CTA_S_STAGES), 0)

    @cute.jit
    def next_p(self, work: WorkTile, kv_idx: cutlass.Int32, last: cutlass.Boolean):
        """Rescale O to the row_max of the tile's P; `last`: of the work tile."""
        self.wait_acc_scale(kv_idx)
        acc_scale = self.sStats[self.thread, ACC_SCALE, stage_of(kv_idx, TWO_CTA_S_STAGES)]
        if cute.arch.vote_all_sync(acc_scale == 1.0):
            pass
        else:
            self.wait_pv(kv_idx - 1)
            self.rescale(0, acc_scale)
        if last:
            self.clear_v_before_pair_window(work, kv_idx)
        self.arrive_p_full(kv_idx)

    @cute.jit
    def clear_v_after_end(self, work: WorkTile, kv_idx: cutlass.Int32):
        """As in the base class. The MMA warp has waited for V before it signalled S."""
        num_keys = work.seqlen_k - (work.n_block_max - 1) * self.kernel.tile_n
        if num_keys < self.kernel.tile_n:
            sV = self.kv_stages.sV[None, None, self.kv_stages.v_stage(kv_idx)]
            clear_rows(sV, cutlass.max(num_keys, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_v_before_pair_window(self, work: WorkTile, kv_idx: cutlass.Int32):
        """Zero V of a work tile's last tile before the windows of all rows of both CTAs."""
        if cutlass.const_expr(self.key.has_window_left):
            # Each CTA's V is multiplied by the rows of both, so the first row of the leader counts.
            tokens_before = cute.arch.block_idx_in_cluster() * self.kernel.tokens_per_tile
            num_keys = self.mask.keys_before_window(work.q_position - tokens_before, work.n_block_min)
            if num_keys > 0:
                sV = self.kv_stages.sV[None, None, self.kv_stages.v_stage(kv_idx)]
                clear_rows(sV, 0, num_keys, self.thread, WARPGROUP)
                cute.arch.fence_proxy("async.shared", space="cta")
