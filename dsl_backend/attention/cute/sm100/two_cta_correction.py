# SPDX-License-Identifier: Apache-2.0
"""The correction role of a CTA with a peer."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import TWO_S_STAGES
from dsl_backend.attention.cute.sm100.two_s import TwoSCorrectionWarps
from dsl_backend.primitives import tmem
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.ring import stage_of


class TwoCtaCorrectionWarps(TwoSCorrectionWarps):
    """A thread's row of the CTA."""

    def wait_all_pv(self, work_idx: cutlass.Int32, kv_idx: cutlass.Int32) -> None:
        self.wait_pv(kv_idx - 1)
        tmem.after_sync()

    @cute.jit
    def arrive_p_full_of(self, kv_idx: cutlass.Int32):
        """At the leader's mbarrier."""
        cute.arch.mbarrier_arrive(self.barriers.p_full + stage_of(kv_idx, TWO_S_STAGES), 0)

    @cute.jit
    def clear_v_after_end(self, work: WorkTile, kv_idx: cutlass.Int32):
        """As in the base class. The MMA warp has waited for V before it signalled S."""
        num_keys = work.seqlen_k - (work.n_block_max - 1) * self.kernel.tile_n
        if num_keys < self.kernel.tile_n:
            sV = self.kv_stages.sV[None, None, self.kv_stages.v_stage(kv_idx)]
            clear_rows(sV, cutlass.max(num_keys, 0), self.kernel.tile_n, self.thread, WARPGROUP)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_last_v(self, work: WorkTile, kv_idx: cutlass.Int32):
        """Zero V of a work tile's last tile before the windows of all rows of both CTAs."""
        if cutlass.const_expr(self.key.has_window_left):
            # Each CTA's V is multiplied by the rows of both, so the first row of the leader counts.
            tokens_before = cute.arch.block_idx_in_cluster() * self.kernel.tokens_per_tile
            num_keys = self.mask.keys_before_window(work.q_position - tokens_before, work.n_block_min)
            if num_keys > 0:
                sV = self.kv_stages.sV[None, None, self.kv_stages.v_stage(kv_idx)]
                clear_rows(sV, 0, num_keys, self.thread, WARPGROUP)
                cute.arch.fence_proxy("async.shared", space="cta")
