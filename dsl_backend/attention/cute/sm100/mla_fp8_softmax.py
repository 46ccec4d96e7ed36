# SPDX-License-Identifier: Apache-2.0
"""The softmax role of the SM100 kernel of absorbed MLA with e4m3 products: P is e4m3."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.fp8_smem import store_p
from dsl_backend.attention.cute.fp8_softmax import Fp8Softmax
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD
from dsl_backend.attention.cute.sm100.mla_fp8_configs import Q_SCALE_STAGES
from dsl_backend.attention.cute.sm100.mla_softmax import MlaSoftmaxWarps
from dsl_backend.primitives.accumulators import words_of
from dsl_backend.primitives.math import permute_bytes
from dsl_backend.primitives.ring import phase_of, stage_of

# Of two words of (pair of one eight keys, pair of the next eight): the pairs of the first, those of the second.
FIRST_PAIRS, SECOND_PAIRS = 0x5410, 0x7632


class Fp8MlaSoftmaxWarps(MlaSoftmaxWarps):
    """As MlaSoftmaxWarps; sV and sP are bytes.

    Attributes:
        sQScale: (row, parity of the work tile), of the quantized Q.
    """

    softmax: Fp8Softmax
    sQScale: cute.Tensor

    def make_softmax(self) -> Fp8Softmax:
        config = self.config
        return Fp8Softmax(ROWS_PER_THREAD, QUAD, self.rows.score_mod, config.p_offset, config.rescale_threshold)

    @cute.jit
    def begin_q(self, count: cutlass.Int32):
        stage = stage_of(count, Q_SCALE_STAGES)
        cute.arch.mbarrier_wait(self.barriers.q_scale_full + stage, phase_of(count, Q_SCALE_STAGES))
        for own in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.q_scale[own] = self.sQScale[self.row + 8 * own, stage]

    @cute.jit
    def scale_q(self, acc_S: cute.Tensor):
        if cutlass.const_expr(self.rows.score_mod.modifies):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                for j in cutlass.range_constexpr(cute.size(acc_S, mode=[1])):
                    acc_S[row, j] *= self.softmax.q_scale[row]

    def to_probs(self, acc_S: cute.Tensor) -> None:
        self.softmax.online_softmax_e4m3(acc_S, words_of(self.probs), self.acc_scale)

    @cute.jit
    def store_p(self):
        """Store P, each row in the order of its keys: V is multiplied as it lies in memory."""
        words, lane = words_of(self.probs), cute.arch.lane_idx()
        selector = cutlass.Int32(FIRST_PAIRS) if lane % QUAD < 2 else cutlass.Int32(SECOND_PAIRS)
        source = lane // QUAD * QUAD + lane % 2 * 2
        for i in cutlass.range_constexpr(cute.size(words)):
            # Of 16 keys a lane has two pairs, eight keys apart; stmatrix takes four keys in a row from it.
            low, high = (cute.arch.shuffle_sync(words[i], source + neighbour) for neighbour in range(2))
            words[i] = permute_bytes(low, high, selector)
        store_p(words, self.sP, self.thread)

    def split_stats(self, row: int) -> tuple[cutlass.Float32, cutlass.Float32]:
        return self.softmax.row_stats(row)
