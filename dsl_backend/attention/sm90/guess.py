# SPDX-License-Identifier: Apache-2.0
"""Weights of a tile by the largest scores before it: a third of a softmax's instructions look for maxima.

The largest score of a row seldom moves after its first tile, and it need not be the reference of the exponentials:
anything close will do. So a tile's weights are taken by the old reference, and their sum, which is needed anyway, tells
whether that was close: where it is no more than 2^slack, no weight is. Else the tile's maxima are found after all.
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.rows import THREAD_ROWS
from dsl_backend.attention.parts.softmax import OnlineSoftmax
from dsl_backend.primitives.accumulators import narrow, packed, words_of
from dsl_backend.primitives.math import exp2, tree


class GuessingSoftmax(OnlineSoftmax):
    """The online softmax of a math thread's two rows; `slack` is also what a guess may miss the tops by.

    `added` holds the sums of the last guess's weights.
    """

    def __init__(self, rows: int, lanes: int, factor: cutlass.Float32, slack: float):
        super().__init__(rows, lanes, factor, slack)
        self.added = cute.make_rmem_tensor(rows, cutlass.Float32)

    @cute.jit
    def weigh_by_guess(self, scores: cute.Tensor, products: cute.Tensor, weights: cute.Tensor, shrink, known=None):
        """Scores become narrow weights, by the tops so far where they will do for all rows of the warp.

        Args:
            scores: [row, column] of `products`, the registers that hold them.
            weights: a product's operand.
            shrink: [row], as `weigh` has it.
            known: whether there are tops, where that is not known already. A row without one costs its warp time alone.
        """
        self.added.fill(cutlass.Float32.inf)
        if cutlass.const_expr(known is not None):
            if known:
                self.guess(scores, weights)
        else:
            self.guess(scores, weights)
        shrink.fill(1.0)
        if cute.arch.vote_all_sync(self.fits()):
            self.take()
        else:
            self.weigh(scores, shrink)
            narrow(products, weights)

    @cute.jit
    def guess_in_place(self, scores: cute.Tensor):
        """Scores become weights by the tops so far, in float32. Returns whether these will do for the thread's rows.

        Where they do for all rows of a product, `take` takes their sums; else its scores must be multiplied anew.
        """
        for row in cutlass.range_constexpr(THREAD_ROWS):
            reference = self.top[row] * self.factor
            for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[row, j] = exp2(scores[row, j] * self.factor - reference)
            weights = [scores[row, j] for j in range(cute.size(scores, mode=[1]))]
            self.added[row] = tree(weights, lambda a, b: a + b)
        return self.fits()

    @cute.jit
    def fits(self):
        """Whether the last guess will do for the thread's rows."""
        most = cutlass.const_expr(2.0**self.slack)
        # A top of -inf makes the sum +inf or no number.
        return self.added[0] <= most and self.added[1] <= most

    @cute.jit
    def take(self):
        """The sums of the last guess, which fitted."""
        for row in cutlass.range_constexpr(THREAD_ROWS):
            self.total[row] += self.added[row]

    @cute.jit
    def guess(self, scores: cute.Tensor, weights: cute.Tensor):
        """Scores as narrow weights by the tops so far."""
        words, added = words_of(weights), self.added
        # Two chains a row: the exponentials are slower than they.
        sums = cute.make_rmem_tensor((THREAD_ROWS, 2), cutlass.Float32)
        sums.fill(0.0)
        for j in cutlass.range_constexpr(0, cute.size(scores, mode=[1]), 2):
            for row in cutlass.range_constexpr(THREAD_ROWS):
                reference = self.top[row] * self.factor
                low = exp2(scores[row, j] * self.factor - reference)
                high = exp2(scores[row, j + 1] * self.factor - reference)
                words[j + row] = packed(low, high, weights.element_type)
                sums[row, 0] += low
                sums[row, 1] += high
        for row in cutlass.range_constexpr(THREAD_ROWS):
            added[row] = sums[row, 0] + sums[row, 1]
