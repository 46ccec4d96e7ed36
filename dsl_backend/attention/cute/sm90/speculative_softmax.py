# SPDX-License-Identifier: Apache-2.0
"""Online softmax with a speculative maximum: a third of a softmax's instructions look for row_max.

row_max seldom moves after a row's first tile, and it need not be exact: any reference close to it keeps exponentials in
range. So P is computed with the row_max of the tiles before. Its sum, which is needed anyway, checks the speculation:
if it is at most 2^rescale_threshold, so is every element of P. Else the tile's own row_max is computed after all.
"""

from collections.abc import Sequence

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.rows import ROWS_PER_THREAD
from dsl_backend.attention.cute.score_mod import NoScoreMod, ScoreMod
from dsl_backend.attention.cute.softmax import OnlineSoftmax
from dsl_backend.primitives.accumulators import cvt_f16x2, downcast, words_of
from dsl_backend.primitives.math import exp2

# Part of the limit of a speculative sum.
IN_ORDER_MARGIN = 2.0**-10


class SpeculativeSoftmax(OnlineSoftmax):
    """The online softmax of the two rows that a thread of a WGMMA accumulator has.

    Args:
        rescale_threshold: also how far, in base 2, a tile's maximum may exceed a speculative row_max.
        in_order: sum the P of `online_softmax` in the order of `speculate`. A row's bits then do not depend on whether
            the speculation held, which depends on all rows of its warp.
    """

    def __init__(
        self,
        rows: int,
        lanes: int,
        score_mod: NoScoreMod | ScoreMod,
        rescale_threshold: float = 0.0,
        in_order: bool = False,
    ):
        super().__init__(rows, lanes, score_mod, rescale_threshold)
        self.in_order = in_order

    def tile_sum(self, probs: Sequence[cutlass.Float32]) -> cutlass.Float32:
        if not self.in_order:
            return super().tile_sum(probs)
        low, high = cutlass.Float32(0.0), cutlass.Float32(0.0)
        for j in range(0, len(probs), 2):
            low += probs[j]
            high += probs[j + 1]
        return low + high

    @cute.jit
    def online_softmax_speculative(
        self,
        acc_S: cute.Tensor,
        acc: cute.Tensor,
        probs: cute.Tensor,
        acc_scale: cute.Tensor,
        has_row_max: cutlass.Boolean | None = None,
    ):
        """Turn S into P, in 16 bits: by the speculative row_max if that will do for all rows of the warp.

        Args:
            acc_S: [row, column] of `acc`, the accumulator's registers.
            probs: registers of the A operand.
            acc_scale: [row], as in `online_softmax`.
            has_row_max: False at the first tile of a split; None if there is always a row_max. A row without one only
                costs its warp time: its speculative sum is inf or NaN.
        """
        tile_sum, row_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32), self.row_sum
        tile_sum.fill(cutlass.Float32.inf)
        if cutlass.const_expr(has_row_max is not None):
            if has_row_max:
                self.speculate(acc_S, probs, tile_sum)
        else:
            self.speculate(acc_S, probs, tile_sum)
        acc_scale.fill(1.0)
        # With room for rounding in order, so that `online_softmax` would not move row_max either.
        limit = cutlass.const_expr(2.0**self.rescale_threshold * (1 - IN_ORDER_MARGIN * self.in_order))
        holds = tile_sum[0] <= limit and tile_sum[1] <= limit
        if cute.arch.vote_all_sync(holds):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                row_sum[row] += tile_sum[row]
        else:
            self.online_softmax(acc_S, acc_scale)
            downcast(acc, probs)

    @cute.jit
    def speculate(self, acc_S: cute.Tensor, probs: cute.Tensor, tile_sum: cute.Tensor):
        """Compute P in 16 bits with the current row_max, and its sums [row]. S stays."""
        words = words_of(probs)
        # Two chains of additions a row are enough: the exponentials take longer.
        sums = cute.make_rmem_tensor((ROWS_PER_THREAD, 2), cutlass.Float32)
        sums.fill(0.0)
        for j in cutlass.range_constexpr(0, cute.size(acc_S, mode=[1]), 2):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                row_max_scaled = self.row_max[row] * self.softmax_scale_log2
                low = exp2(acc_S[row, j] * self.softmax_scale_log2 - row_max_scaled)
                high = exp2(acc_S[row, j + 1] * self.softmax_scale_log2 - row_max_scaled)
                words[j + row] = cvt_f16x2(low, high, probs.element_type)
                sums[row, 0] += low
                sums[row, 1] += high
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            tile_sum[row] = sums[row, 0] + sums[row, 1]
