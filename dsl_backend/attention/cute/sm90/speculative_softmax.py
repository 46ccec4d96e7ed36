# SPDX-License-Identifier: Apache-2.0
"""Weights of a tile by the largest scores before it: a third of a softmax's instructions look for maxima.

The largest score of a row seldom moves after its first tile, and it need not be the reference of the exponentials:
anything close will do. So a tile's weights are taken by the old reference, and their sum, which is needed anyway, tells
whether that was close: where it is no more than 2^slack, no weight is. Else the tile's maxima are found after all.
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.rows import ROWS_PER_THREAD
from dsl_backend.attention.cute.softmax import OnlineSoftmax
from dsl_backend.primitives.accumulators import narrow, packed, words_of
from dsl_backend.primitives.math import exp2


class SpeculativeSoftmax(OnlineSoftmax):
    """The online softmax of a math thread's two rows; `slack` is also what a guess may miss the tops by.

    Args:
        in_order: weights that were not guessed are summed in the order of those that were, so that a row's bits do not
            tell whether the guess did for all rows of its warp.
    """

    def __init__(self, rows: int, lanes: int, scores, rescale_threshold: float = 0.0, in_order: bool = False):
        super().__init__(rows, lanes, scores, rescale_threshold)
        self.in_order = in_order

    def added(self, probs):
        """The sum of a row's weights of a tile."""
        if not self.in_order:
            return super().added(probs)
        low, high = cutlass.Float32(0.0), cutlass.Float32(0.0)
        for j in range(0, len(probs), 2):
            low += probs[j]
            high += probs[j + 1]
        return low + high

    @cute.jit
    def online_softmax_speculative(
        self, scores: cute.Tensor, products: cute.Tensor, probs: cute.Tensor, acc_scale, known=None
    ):
        """Scores become narrow weights, by the tops so far where they will do for all rows of the warp.

        Args:
            scores: [row, column] of `products`, the registers that hold them.
            weights: a product's operand.
            shrink: [row], as `weigh` has it.
            known: whether there are tops, where that is not known already. A row without one costs its warp time alone.
        """
        added, row_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32), self.row_sum
        added.fill(cutlass.Float32.inf)
        if cutlass.const_expr(known is not None):
            if known:
                self.speculate(scores, probs, added)
        else:
            self.speculate(scores, probs, added)
        acc_scale.fill(1.0)
        # A top of -inf makes the sum +inf or no number.
        most = cutlass.const_expr(2.0**self.rescale_threshold)
        fits = added[0] <= most and added[1] <= most
        if cute.arch.vote_all_sync(fits):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                row_sum[row] += added[row]
        else:
            self.online_softmax(scores, acc_scale)
            narrow(products, probs)

    @cute.jit
    def speculate(self, scores: cute.Tensor, probs: cute.Tensor, added: cute.Tensor):
        """Scores as narrow weights by the tops so far; added: their sums, [row]."""
        words = words_of(probs)
        # Two chains a row: the exponentials are slower than they.
        sums = cute.make_rmem_tensor((ROWS_PER_THREAD, 2), cutlass.Float32)
        sums.fill(0.0)
        for j in cutlass.range_constexpr(0, cute.size(scores, mode=[1]), 2):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                reference = self.row_max[row] * self.factor
                low = exp2(scores[row, j] * self.factor - reference)
                high = exp2(scores[row, j + 1] * self.factor - reference)
                words[j + row] = packed(low, high, probs.element_type)
                sums[row, 0] += low
                sums[row, 1] += high
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            added[row] = sums[row, 0] + sums[row, 1]
