# SPDX-License-Identifier: Apache-2.0
"""The softmax role of a CTA with a peer: key tiles alternate between two S stages."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.sm100.two_s import TwoSSoftmaxWarps


class TwoCtaSoftmaxWarps(TwoSSoftmaxWarps):
    """A thread's row of the CTA."""

    def arrive_p_full(self, s_stage: cutlass.Int32 | int) -> None:
        """At the leader's mbarrier."""
        cute.arch.mbarrier_arrive(self.barriers.p_full + s_stage, 0)
