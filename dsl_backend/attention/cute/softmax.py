# SPDX-License-Identifier: Apache-2.0
"""The online softmax of a thread's rows (Milakov and Gimelshein, 2018), with sums that lanes merge at the end."""

import cutlass
from cutlass import cute

from dsl_backend.primitives.math import LN_2, LOG2_E, exp2, finite_or_zero, tree


class OnlineSoftmax:
    """Rows of scores, tile by tile, into weights 2^(score - top).

    `top` is the largest score so far as the products give it, before `factor`; `total` this thread's sum of weights.
    With `slack`, top stays while it is exceeded by less: weights grow to 2^slack, and sums need not be shrunk.

    Args:
        scores: what products become, as `scores_of` makes it.
    """

    def __init__(self, rows: int, lanes: int, scores, slack: float = 0.0):
        self.rows, self.lanes, self.scores, self.slack = rows, lanes, scores, slack
        self.top = cute.make_rmem_tensor(rows, cutlass.Float32)
        self.total = cute.make_rmem_tensor(rows, cutlass.Float32)

    @property
    def factor(self):
        return self.scores.factor

    def start(self):
        self.top.fill(-cutlass.Float32.inf)
        self.total.fill(0.0)

    @cute.jit
    def weigh(self, scores: cute.Tensor, shrink: cute.Tensor):
        """Scores [rows, columns] become weights; shrink [rows] is what earlier sums and totals are multiplied by."""
        columns = cutlass.const_expr(cute.size(scores, mode=[1]))
        for row in cutlass.range_constexpr(self.rows):
            largest = tree([scores[row, j] for j in range(columns)], cute.arch.fmax)
            largest = self.across(largest)
            before = self.top[row]
            top = cute.arch.fmax(before, largest)
            if cutlass.const_expr(self.slack > 0.0):
                # The difference is no number where both are -inf: top stays.
                moves = (largest - before) * self.factor > self.slack
                top = largest if moves else before
            self.top[row] = top
            # A row that has seen nothing keeps -inf; the exponential needs a finite reference.
            reference = finite_or_zero(top) * self.factor
            shrink[row] = exp2(before * self.factor - reference)
            if cutlass.const_expr(self.slack > 0.0):
                # One exactly, whatever a fused multiplication makes of the difference.
                shrink[row] = shrink[row] if moves else 1.0
            for j in cutlass.range_constexpr(columns):
                scores[row, j] = exp2(scores[row, j] * self.factor - reference)
            self.total[row] = self.total[row] * shrink[row] + self.added([scores[row, j] for j in range(columns)])

    def added(self, weights):
        """The sum of a row's weights of a tile."""
        return tree(weights, lambda a, b: a + b)

    @cute.jit
    def across(self, largest):
        """The largest score of a row from those of the threads that share it."""
        for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << bit))
        return largest

    @cute.jit
    def merge_lanes(self):
        """Totals of whole rows, in all lanes."""
        for row in cutlass.range_constexpr(self.rows):
            for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                self.total[row] += cute.arch.shuffle_sync_bfly(self.total[row], 1 << bit)


@cute.jit
def normalized(top, total, sink, v_scale):
    """(what a row's sums are multiplied by, its natural LSE).

    Args:
        top, total: the row's largest base-2 score, and its sum of 2^(score - top).
        sink: a logit that joins the denominator; None where there is none.
        v_scale: what stored values are multiplied by; None where they are real ones.
    """
    shrink = cutlass.Float32(1.0)
    if cutlass.const_expr(sink is not None):
        higher = cute.arch.fmax(top, sink * LOG2_E)
        shrink = exp2(top - higher)
        total = total * shrink + exp2(sink * LOG2_E - higher)
        top = higher
    # The total is 0 where a row saw no key; a NaN stays one.
    factor = cutlass.Float32(0.0) if total == 0.0 else shrink / total
    if cutlass.const_expr(v_scale is not None):
        factor *= v_scale
    return factor, (top + cute.math.log2(total, fastmath=True)) * LN_2
