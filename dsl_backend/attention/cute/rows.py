# SPDX-License-Identifier: Apache-2.0
"""The rows of a query tile that a thread has in its accumulator: their heads, positions, scores and stores."""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, q_head_of
from dsl_backend.attention.cute.score_mod import ScoreModArgs, out_factor_of, score_mod_of
from dsl_backend.primitives.accumulators import cvt_f16x2, words_of
from dsl_backend.primitives.copy import store_vector
from dsl_backend.primitives.math import LOG2_E, f32_to_e4m3, permute_bytes

ROWS_PER_THREAD = 2  # of an accumulator, 8 apart
QUAD = 4  # lanes that share a row of an accumulator


class AccumulatorRows:
    """Rows `row` and `row + 8` of a tile; of each 8 columns, `column` and the one after it.

    With pack_gqa, neighbouring rows are the query heads of one token, then those of the next token.

    Args:
        key: the `LayerKey`.
        tile_n: keys of a key tile.
    """

    count = ROWS_PER_THREAD

    def __init__(
        self,
        key: Any,
        tile_n: int,
        requests: Requests,
        scoring: ScoreModArgs,
        row: cutlass.Int32,
        column: cutlass.Int32,
    ) -> None:
        self.key, self.tile_n, self.requests, self.scoring = key, tile_n, requests, scoring
        self.mask = Mask(key, tile_n, requests)
        self.row, self.column = row, column
        self.score_mod = score_mod_of(key, scoring)
        self.slope = cute.make_rmem_tensor(self.count, cutlass.Float32)

    def column_of(self, j: int) -> int:
        """The column of a row's j-th score, counted from `column`."""
        return j // 2 * 8 + j % 2

    @cute.jit
    def start(self, work: WorkTile):
        """Before the scores of a work tile."""
        self.score_mod.softmax_scale.load(work)
        if cutlass.const_expr(self.key.scores.alibi):
            for row in cutlass.range_constexpr(self.count):
                self.slope[row] = self.scoring.alibi_slopes[self.head(work, row)] * LOG2_E

    @cute.jit
    def position(self, work: WorkTile, row: cutlass.Constexpr[int]):
        """The position of a row's token among its request's keys."""
        return work.q_position + (self.row + 8 * row) // self.key.pack_gqa

    @cute.jit
    def head(self, work: WorkTile, row: cutlass.Constexpr[int]):
        """The query head of a row."""
        return q_head_of(self.key, work.head_block, self.row + 8 * row)

    @cute.jit
    def sink(self, work: WorkTile, row: cutlass.Constexpr[int]):
        """The logit that joins a row's softmax; None where the layer has no sinks."""
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[self.head(work, row)].to(cutlass.Float32)
        return sink

    @cute.jit
    def out_factor(self, work: WorkTile):
        """What outputs are multiplied by besides the inverse of row_sum: `out_factor_of` the work tile."""
        return out_factor_of(self.key, self.scoring, work.head_block, work.kv_source)

    @cute.jit
    def apply_score_mod(self, acc_S: cute.Tensor, work: WorkTile, n_block: cutlass.Int32):
        """q·k becomes scores in place, where that takes more than a scale. acc_S: (row, column)."""
        if cutlass.const_expr(self.score_mod.modifies):
            first_key = n_block * self.tile_n + self.column
            for row in cutlass.range_constexpr(self.count):
                distance = self.position(work, row) - first_key
                for j in cutlass.range_constexpr(cute.size(acc_S, mode=[1])):
                    acc_S[row, j] = self.score_mod.apply(acc_S[row, j], self.slope[row], distance - self.column_of(j))

    @cute.jit
    def apply_mask(self, acc_S: cute.Tensor, work: WorkTile, n_block: cutlass.Int32):
        """Scores of keys that a row does not see become -inf. acc_S: (row, column)."""
        first_key = n_block * self.tile_n + self.column
        for row in cutlass.range_constexpr(self.count):
            position = self.position(work, row)
            limit_right = self.mask.col_limit_right(work, position, first_key)
            for j in cutlass.range_constexpr(cute.size(acc_S, mode=[1])):
                acc_S[row, j] = acc_S[row, j] if self.column_of(j) < limit_right else -cutlass.Float32.inf
            if cutlass.const_expr(self.mask.has_left):
                limit_left = self.mask.col_limit_left(position, first_key)
                for j in cutlass.range_constexpr(cute.size(acc_S, mode=[1])):
                    acc_S[row, j] = acc_S[row, j] if self.column_of(j) >= limit_left else -cutlass.Float32.inf


class AccumulatorRow(AccumulatorRows):
    """Row `row` alone, with all columns from `column` on."""

    count = 1

    def column_of(self, j: int) -> int:
        return j


def reshape_acc_to_mn(acc: cute.Tensor) -> cute.Tensor:
    """A thread's accumulator as (row, column). Its registers are (2 columns, 2 rows, groups of 8 columns)."""
    groups = cute.size(acc) // 4
    return cute.make_tensor(acc.iterator, cute.make_layout((2, (2, groups)), stride=(2, (1, 4))))


@cute.jit
def store_acc_row(
    acc_O: cute.Tensor,
    row: cutlass.Constexpr[int],
    out: cute.Tensor,
    offset: cutlass.Int64,
    thread: cutlass.Int32,
    row_exists: cutlass.Boolean,
    columns: cutlass.Constexpr[int],
):
    """A row of O (row, column) from registers to the output, rounded, 8 bytes at a time; by all lanes of a warp.

    An output of bytes gets e4m3.

    Not through shared memory: the stage of Q is free as soon as QK is done, and the next Q is being loaded into it.
    Neighbouring lanes exchange a pair of columns, so that a quad writes 32 contiguous bytes.

    Args:
        offset: of the row's first column in the output, in elements.
        row_exists: whether the output has the row. columns: of the output that the row has.
    """
    if cutlass.const_expr(out.element_type is cutlass.Uint8):
        store_acc_row_e4m3(acc_O, row, out, offset, thread, row_exists, columns)
    else:
        store_acc_row_16(acc_O, row, out, offset, thread, row_exists, columns)


@cute.jit
def store_acc_row_16(
    acc_O: cute.Tensor,
    row: cutlass.Constexpr[int],
    out: cute.Tensor,
    offset: cutlass.Int64,
    thread: cutlass.Int32,
    row_exists: cutlass.Boolean,
    columns: cutlass.Constexpr[int],
):
    odd = thread % 2 != 0
    vector = cute.make_rmem_tensor(4, out.element_type)
    words = words_of(vector)
    for j in cutlass.range_constexpr(0, cute.size(acc_O, mode=[1]), 4):
        # Of two groups of 8 columns, an even lane stores 4 of the first, an odd lane 4 of the second.
        first = cvt_f16x2(acc_O[row, j], acc_O[row, j + 1], out.element_type)
        second = cvt_f16x2(acc_O[row, j + 2], acc_O[row, j + 3], out.element_type)
        received = cute.arch.shuffle_sync_bfly(first if odd else second, 1)
        words[0] = received if odd else first
        words[1] = second if odd else received
        column = j * 4 + (8 if odd else 0) + thread % QUAD // 2 * 4
        if row_exists and column < columns:
            store_vector(vector, out.iterator, offset + column)


@cute.jit
def store_acc_row_e4m3(
    acc_O: cute.Tensor,
    row: cutlass.Constexpr[int],
    out: cute.Tensor,
    offset: cutlass.Int64,
    thread: cutlass.Int32,
    row_exists: cutlass.Boolean,
    columns: cutlass.Constexpr[int],
):
    """A lane has a pair of each 8 columns, and a quad exchanges them, so that each of its lanes has 8 columns."""
    odd, upper = thread % 2 != 0, thread % QUAD >= QUAD // 2
    low_halves, high_halves = cutlass.Int32(0x5410), cutlass.Int32(0x7632)
    own_halves, other_halves = (high_halves if odd else low_halves), (low_halves if odd else high_halves)
    vector = cute.make_rmem_tensor(8, out.element_type)
    words = words_of(vector)
    count = cutlass.const_expr(cute.size(acc_O, mode=[1]))
    for j in cutlass.range_constexpr(0, count, 8):
        # Pairs of the first two of four groups of 8 columns, and of the last two, which go to the upper lanes.
        low, high = f32_to_e4m3(*[acc_O[row, j + i] for i in range(4)]), cutlass.Int32(0)
        if cutlass.const_expr(j + 4 < count):
            high = f32_to_e4m3(*[acc_O[row, j + i] for i in range(4, 8)])
        received = cute.arch.shuffle_sync_bfly(low if upper else high, 2)
        of_lower, of_upper = (received if upper else low), (high if upper else received)
        # One of these two groups is the lane's, the other its neighbour's.
        kept = permute_bytes(of_lower, of_upper, own_halves)
        received = cute.arch.shuffle_sync_bfly(permute_bytes(of_lower, of_upper, other_halves), 1)
        of_even, of_odd = (received if odd else kept), (kept if odd else received)
        words[0] = permute_bytes(of_even, of_odd, low_halves)
        words[1] = permute_bytes(of_even, of_odd, high_halves)
        column = j * 4 + thread % QUAD * 8
        if row_exists and column < columns:
            store_vector(vector, out.iterator, offset + column)
