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
        scores: what products become, as `score_mod_of` makes it.
    """

    def __init__(self, rows: int, lanes: int, scores, rescale_threshold: float = 0.0):
        self.rows, self.lanes, self.scores, self.rescale_threshold = rows, lanes, scores, rescale_threshold
        self.row_max = cute.make_rmem_tensor(rows, cutlass.Float32)
        self.row_sum = cute.make_rmem_tensor(rows, cutlass.Float32)

    @property
    def factor(self):
        return self.scores.factor

    def start(self):
        self.row_max.fill(-cutlass.Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def online_softmax(self, scores: cute.Tensor, acc_scale: cute.Tensor):
        """Scores [rows, columns] become weights; shrink [rows] is what earlier sums and totals are multiplied by."""
        columns = cutlass.const_expr(cute.size(scores, mode=[1]))
        for row in cutlass.range_constexpr(self.rows):
            largest = tree([scores[row, j] for j in range(columns)], cute.arch.fmax)
            largest = self.across(largest)
            before = self.row_max[row]
            row_max = cute.arch.fmax(before, largest)
            if cutlass.const_expr(self.rescale_threshold > 0.0):
                # The difference is no number where both are -inf: top stays.
                moves = (largest - before) * self.factor > self.rescale_threshold
                row_max = largest if moves else before
            self.row_max[row] = row_max
            # A row that has seen nothing keeps -inf; the exponential needs a finite reference.
            reference = finite_or_zero(row_max) * self.factor
            acc_scale[row] = exp2(before * self.factor - reference)
            if cutlass.const_expr(self.rescale_threshold > 0.0):
                # One exactly, whatever a fused multiplication makes of the difference.
                acc_scale[row] = acc_scale[row] if moves else 1.0
            for j in cutlass.range_constexpr(columns):
                scores[row, j] = exp2(scores[row, j] * self.factor - reference)
            self.row_sum[row] = self.row_sum[row] * acc_scale[row] + self.added(
                [scores[row, j] for j in range(columns)]
            )

    def added(self, probs):
        """The sum of a row's weights of a tile."""
        return tree(probs, lambda a, b: a + b)

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
                self.row_sum[row] += cute.arch.shuffle_sync_bfly(self.row_sum[row], 1 << bit)


@cute.jit
def normalized(row_max, row_sum, sink, v_scale):
    """(what a row's sums are multiplied by, its natural LSE).

    Args:
        top, total: the row's largest base-2 score, and its sum of 2^(score - top).
        sink: a logit that joins the denominator; None where there is none.
        v_scale: what stored values are multiplied by; None where they are real ones.
    """
    acc_scale = cutlass.Float32(1.0)
    if cutlass.const_expr(sink is not None):
        higher = cute.arch.fmax(row_max, sink * LOG2_E)
        acc_scale = exp2(row_max - higher)
        row_sum = row_sum * acc_scale + exp2(sink * LOG2_E - higher)
        row_max = higher
    # The total is 0 where a row saw no key; a NaN stays one.
    factor = cutlass.Float32(0.0) if row_sum == 0.0 else acc_scale / row_sum
    if cutlass.const_expr(v_scale is not None):
        factor *= v_scale
    return factor, (row_max + cute.math.log2(row_sum, fastmath=True)) * LN_2
