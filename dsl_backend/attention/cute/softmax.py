# SPDX-License-Identifier: Apache-2.0
"""The online softmax of a thread's rows (Milakov and Gimelshein, 2018)."""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.score_mod import NoScoreMod, ScoreMod
from dsl_backend.primitives.math import LN_2, LOG2_E, exp2, finite_or_zero, tree_reduce


class OnlineSoftmax:
    """Turn S into P = 2^(softmax_scale_log2 (S - row_max)), tile by tile.

    `row_max` is the running maximum of S before the scale. `row_sum` is this thread's sum of P: `reduce_row_sum` adds
    up those of the threads that share a row.

    Args:
        rows: of S in a thread.
        lanes: that share a row.
        rescale_threshold: row_max stays until it is exceeded by more than this, in base 2 (conditional rescaling, as in
            FA4). P then grows to 2^rescale_threshold, and O is rescaled less often.
    """

    def __init__(self, rows: int, lanes: int, score_mod: NoScoreMod | ScoreMod, rescale_threshold: float = 0.0):
        self.rows, self.lanes, self.score_mod, self.rescale_threshold = rows, lanes, score_mod, rescale_threshold
        self.row_max = cute.make_rmem_tensor(rows, cutlass.Float32)
        self.row_sum = cute.make_rmem_tensor(rows, cutlass.Float32)

    @property
    def softmax_scale_log2(self) -> cutlass.Float32:
        return self.score_mod.softmax_scale_log2

    def reset(self) -> None:
        self.row_max.fill(-cutlass.Float32.inf)
        self.row_sum.fill(0.0)

    @cute.jit
    def online_softmax(self, acc_S: cute.Tensor, acc_scale: cute.Tensor):
        """Turn S [row, column] into P in place; acc_scale [row] becomes what O is to be multiplied by."""
        columns = cutlass.const_expr(cute.size(acc_S, mode=[1]))
        for row in cutlass.range_constexpr(self.rows):
            tile_max = tree_reduce([acc_S[row, j] for j in range(columns)], cute.arch.fmax)
            tile_max = self.reduce_max(tile_max)
            row_max_prev = self.row_max[row]
            row_max = cute.arch.fmax(row_max_prev, tile_max)
            if cutlass.const_expr(self.rescale_threshold > 0.0):
                # Where both are -inf, the difference is NaN and row_max stays.
                moves = (tile_max - row_max_prev) * self.softmax_scale_log2 > self.rescale_threshold
                row_max = tile_max if moves else row_max_prev
            self.row_max[row] = row_max
            # row_max is -inf while a row has seen no key; exp2 needs a finite reference.
            row_max_scaled = finite_or_zero(row_max) * self.softmax_scale_log2
            acc_scale[row] = exp2(row_max_prev * self.softmax_scale_log2 - row_max_scaled)
            if cutlass.const_expr(self.rescale_threshold > 0.0):
                # Exactly 1, which the difference above need not give when it is fused.
                acc_scale[row] = acc_scale[row] if moves else 1.0
            for j in cutlass.range_constexpr(columns):
                acc_S[row, j] = exp2(acc_S[row, j] * self.softmax_scale_log2 - row_max_scaled)
            self.row_sum[row] = self.row_sum[row] * acc_scale[row] + self.tile_sum(
                [acc_S[row, j] for j in range(columns)]
            )

    def tile_sum(self, probs: Sequence[cutlass.Float32]) -> cutlass.Float32:
        """Sum a row's P of a tile."""
        return tree_reduce(probs, lambda a, b: a + b)

    @cute.jit
    def reduce_max(self, value: cutlass.Float32):
        """Maximum over the lanes that share a row."""
        for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1 << bit))
        return value

    @cute.jit
    def reduce_row_sum(self):
        """Make row_sum the sum of the whole row, in all lanes that share it."""
        for row in cutlass.range_constexpr(self.rows):
            for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                self.row_sum[row] += cute.arch.shuffle_sync_bfly(self.row_sum[row], 1 << bit)


@cute.jit
def finalize(
    row_max: cutlass.Float32,
    row_sum: cutlass.Float32,
    sink: Any,
    factor: Any,
):
    """Return (what a row of O is multiplied by, the row's natural LSE).

    Args:
        row_max: in base 2, scaled.
        sink: float32, a logit that joins the denominator; None if the layer has none.
        factor: float32, of scales of values and outputs (`score_mod.out_factor_of`); None for 1.
    """
    rescale = cutlass.Float32(1.0)
    if cutlass.const_expr(sink is not None):
        sink_log2 = sink * LOG2_E
        row_max_sink = cute.arch.fmax(row_max, sink_log2)
        # A row without a key, and a sink that is none.
        shift = finite_or_zero(row_max_sink)
        rescale = exp2(row_max - shift)
        row_sum = row_sum * rescale + exp2(sink_log2 - shift)
        row_max = row_max_sink
    # row_sum is 0 if the row saw no key; NaN stays NaN.
    out_scale = cutlass.Float32(0.0) if row_sum == 0.0 else rescale / row_sum
    if cutlass.const_expr(factor is not None):
        out_scale *= factor
    return out_scale, (row_max + cute.math.log2(row_sum, fastmath=True)) * LN_2
