# SPDX-License-Identifier: Apache-2.0
"""The softmax role of a block of a pair: scores have two places, taken in turn."""

from cutlass import cute

from dsl_backend.attention.cute.sm100.dense_configs import PAIR
from dsl_backend.attention.cute.sm100.dense_softmax import TOP, SoftmaxWarps
from dsl_backend.primitives.ring import phase_of, stage_of

END = PAIR  # of l_full: the message of an item's end


class TwoCtaSoftmaxWarps(SoftmaxWarps):
    """A thread's row of the block."""

    def turn(self, count):
        place = stage_of(count, PAIR)
        return place, phase_of(count, PAIR), place * self.kernel.tile_n

    def tell_weights(self, half):
        cute.arch.mbarrier_arrive(self.barriers.p_full + half, 0)

    @cute.jit
    def tell_end(self, tiles):
        # It has read what it was told of the item before.
        place = self.statistics
        place[self.thread, TOP, 0] = self.row_sum[0]
        place[self.thread, TOP, 1] = self.row_max[0] * self.score_mod.softmax_scale_log2
        cute.arch.mbarrier_arrive(self.barriers.l_full + END)
