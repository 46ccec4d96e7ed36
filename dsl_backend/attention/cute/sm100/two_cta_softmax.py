# SPDX-License-Identifier: Apache-2.0
"""The softmax role of a CTA with a peer: key tiles alternate between two S stages."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.sm100.dense_configs import TWO_CTA_S_STAGES
from dsl_backend.attention.cute.sm100.dense_mma import tmem_offset_S
from dsl_backend.attention.cute.sm100.dense_softmax import SoftmaxWarps
from dsl_backend.primitives.ring import phase_of, stage_of

WORK_TILE_END = TWO_CTA_S_STAGES  # of stats_full: the mbarrier of the final statistics
# The final statistics are in this column of sStats: row_sum for S stage 0, row_max for S stage 1.
FINAL_STATS = 1


class TwoCtaSoftmaxWarps(SoftmaxWarps):
    """A thread's row of the CTA."""

    def s_stage_of(self, s_idx: cutlass.Int32) -> tuple:
        s_stage = stage_of(s_idx, TWO_CTA_S_STAGES)
        return s_stage, phase_of(s_idx, TWO_CTA_S_STAGES), tmem_offset_S(self.kernel, s_stage)

    def arrive_p_full(self, s_stage: cutlass.Int32 | int) -> None:
        """At the leader's mbarrier."""
        cute.arch.mbarrier_arrive(self.barriers.p_full + s_stage, 0)

    @cute.jit
    def send_final_stats(self, s_idx: cutlass.Int32):
        # The correction warps have read those of the work tile before.
        sStats = self.sStats
        sStats[self.thread, FINAL_STATS, 0] = self.row_sum[0]
        sStats[self.thread, FINAL_STATS, 1] = self.row_max[0] * self.score_mod.softmax_scale_log2
        cute.arch.mbarrier_arrive(self.barriers.stats_full + WORK_TILE_END)
