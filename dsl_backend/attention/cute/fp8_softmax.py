# SPDX-License-Identifier: Apache-2.0
"""Online softmax whose P is e4m3: an offset keeps small P normal, and row sums are those of the rounded P."""

from collections.abc import Sequence

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.score_mod import NoScoreMod, ScoreMod
from dsl_backend.attention.cute.softmax import OnlineSoftmax
from dsl_backend.primitives.math import (
    add_f16x2,
    e4m3_to_f16,
    exp2,
    f16x2_to_f32,
    f32_to_e4m3,
    finite_or_zero,
    tree_max,
    tree_reduce,
)


def sum_of_e4m3(words: Sequence[cutlass.Int32]) -> cutlass.Float32:
    """The sum of e4m3 values, four in a word: in float16 up to the last addition. Each is at most 448."""
    halves = [half for word in words for half in e4m3_to_f16(word, cutlass.Float16)]
    low, high = f16x2_to_f32(tree_reduce(halves, add_f16x2))
    return low + high


class Fp8Softmax(OnlineSoftmax):
    """The online softmax of the two rows that a thread of a WGMMA accumulator has.

    Attributes:
        q_scale: [row], of the quantized queries.

    Args:
        p_offset: P is 2^p_offset where a score is row_max. It cancels when O is divided by row_sum.
        rescale_threshold: with p_offset, so small that P does not saturate.
    """

    def __init__(
        self, rows: int, lanes: int, score_mod: NoScoreMod | ScoreMod, p_offset: float, rescale_threshold: float
    ):
        super().__init__(rows, lanes, score_mod, rescale_threshold)
        self.p_offset = p_offset
        self.q_scale = cute.make_rmem_tensor(rows, cutlass.Float32)

    def scale_log2(self, row: int) -> cutlass.Float32:
        """What a row's S is multiplied by to be base-2 scores. A score modification has multiplied by q_scale."""
        scale = self.softmax_scale_log2
        return scale if self.score_mod.modifies else scale * self.q_scale[row]

    def row_stats(self, row: int) -> tuple[cutlass.Float32, cutlass.Float32]:
        """(row_max in base 2, row_sum), as `finalize` takes them."""
        return self.row_max[row] * self.scale_log2(row) - self.p_offset, self.row_sum[row]

    @cute.jit
    def online_softmax_e4m3(self, acc_S: cute.Tensor, words: cute.Tensor, acc_scale: cute.Tensor):
        """Turn S [row, column] into P, e4m3; acc_scale [row] becomes what O is to be multiplied by.

        Args:
            words: registers of the A operand. Each holds four P of a row; of 8 P of each of both rows there are four
                words: the first halves of the rows, then the second ones (PTX ISA, wgmma .m64nNk32, matrix A).
        """
        columns = cutlass.const_expr(cute.size(acc_S, mode=[1]))
        for row in cutlass.range_constexpr(self.rows):
            scale = self.scale_log2(row)
            tile_max = self.reduce_max(tree_max([acc_S[row, j] for j in range(columns)]))
            row_max_prev = self.row_max[row]
            # Where both are -inf, the difference is NaN and row_max stays.
            moves = (tile_max - row_max_prev) * scale > self.rescale_threshold
            row_max = tile_max if moves else row_max_prev
            self.row_max[row] = row_max
            row_max_scaled = finite_or_zero(row_max) * scale
            acc_scale[row] = exp2(row_max_prev * scale - row_max_scaled) if moves else cutlass.Float32(1.0)
            shift = row_max_scaled - self.p_offset
            for j in cutlass.range_constexpr(0, columns, 4):
                probs = [exp2(acc_S[row, j + i] * scale - shift) for i in range(4)]
                words[j // 8 * 4 + j // 4 % 2 * 2 + row] = f32_to_e4m3(*probs)
            mine = [words[j // 8 * 4 + j // 4 % 2 * 2 + row] for j in range(0, columns, 4)]
            self.row_sum[row] = self.row_sum[row] * acc_scale[row] + sum_of_e4m3(mine)
