# SPDX-License-Identifier: Apache-2.0
"""A math thread's rows of a query tile: whose they are, what their scores become, and which of them count."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import q_head_of
from dsl_backend.attention.cute.score_mod import score_mod_of, v_scale_of
from dsl_backend.primitives.accumulators import packed, words_of
from dsl_backend.primitives.copy import store_vector
from dsl_backend.primitives.math import LOG2_E

# A thread's rows of an accumulator, 8 apart.
ROWS_PER_THREAD = 2
QUAD = 4  # lanes that share a row of an accumulator


class AccumulatorRows:
    """Rows `row` and `row + 8`, columns `column` and the one after it of each 8.

    Neighbouring rows are the heads of a token that share a tile, then the next token's.
    """

    count = ROWS_PER_THREAD

    def __init__(self, key, tile_n: int, requests, scoring, row, column):
        self.key, self.tile_n, self.requests, self.scoring = key, tile_n, requests, scoring
        self.row, self.column = row, column
        self.scores = score_mod_of(key, scoring)
        self.slope = cute.make_rmem_tensor(self.count, cutlass.Float32)

    def place(self, j: int) -> int:
        """Where the j-th of a row's scores stands, from `column` on."""
        return j // 2 * 8 + j % 2

    @cute.jit
    def start(self, work):
        """Before the scores of an item."""
        self.scores.of_head.start(work.head_block)
        if cutlass.const_expr(self.key.scores.alibi):
            for row in cutlass.range_constexpr(self.count):
                self.slope[row] = self.scoring.alibi_slopes[self.head(work, row)] * LOG2_E

    @cute.jit
    def position(self, work, row: cutlass.Constexpr[int]):
        """Where a row's token stands among its request's keys."""
        return work.q_position + (self.row + 8 * row) // self.key.pack_gqa

    @cute.jit
    def head(self, work, row: cutlass.Constexpr[int]):
        return q_head_of(self.key, work.head_block, self.row + 8 * row)

    @cute.jit
    def sink(self, work, row: cutlass.Constexpr[int]):
        """The logit that joins a row's softmax; None where there is none."""
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[self.head(work, row)].to(cutlass.Float32)
        return sink

    @cute.jit
    def v_scale(self, work):
        """What stored values are multiplied by; None where they are real ones."""
        return v_scale_of(self.key, self.scoring, work.head_block)

    @cute.jit
    def score_mod(self, scores, work, tile):
        """Products [row, column] become scores, where that is more than a factor."""
        if cutlass.const_expr(self.scores.modifies):
            first = tile * self.tile_n + self.column
            for row in cutlass.range_constexpr(self.count):
                away = self.position(work, row) - first
                for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    scores[row, j] = self.scores.score_mod(scores[row, j], self.slope[row], away - self.place(j))

    @cute.jit
    def mask(self, scores, work, tile):
        """What a row does not see becomes -inf."""
        first = tile * self.tile_n + self.column
        for row in cutlass.range_constexpr(self.count):
            position = self.position(work, row)
            stop = work.seqlen_k
            if cutlass.const_expr(self.key.has_window_right or self.key.causality != "full"):
                stop = cutlass.min(stop, position + work.window_size_right + 1)
            stop -= first
            for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[row, j] = scores[row, j] if self.place(j) < stop else -cutlass.Float32.inf
            if cutlass.const_expr(self.key.has_window_left):
                start = position - self.requests.window_size_left - first
                for j in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                    scores[row, j] = scores[row, j] if self.place(j) >= start else -cutlass.Float32.inf


class AccumulatorRow(AccumulatorRows):
    """Row `row` alone, all columns from `column` on."""

    count = 1

    def place(self, j: int) -> int:
        return j


def reshape_acc_to_mn(accumulator: cute.Tensor) -> cute.Tensor:
    """A thread's accumulator as [row, column]: its registers are (2 columns, 2 rows, blocks of 8 columns)."""
    num_ctas = cute.size(accumulator) // 4
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, (2, num_ctas)), stride=(2, (1, 4))))


@cute.jit
def store_acc_row(sums, row: cutlass.Constexpr[int], out, offset, thread, there, columns: cutlass.Constexpr[int]):
    """A row's sums [row, column] of an accumulator to the output, rounded, 8 bytes at a time; by all lanes of a warp.

    Straight from registers: the queries' place is free as soon as they are multiplied, and the next ones are on their
    way meanwhile. Neighbouring lanes trade a pair of columns, so that a quad writes 32 bytes side by side.

    Args:
        offset: of the row's first column in the output, in elements.
        there: whether the row is the output's. columns: of the output that it has.
    """
    odd = thread % 2 != 0
    held = cute.make_rmem_tensor(4, out.element_type)
    words = words_of(held)
    for j in cutlass.range_constexpr(0, cute.size(sums, mode=[1]), 4):
        # Of two blocks of 8 columns, an even lane gets 4 of the first, an odd one of the second.
        first = packed(sums[row, j], sums[row, j + 1], out.element_type)
        second = packed(sums[row, j + 2], sums[row, j + 3], out.element_type)
        taken = cute.arch.shuffle_sync_bfly(first if odd else second, 1)
        words[0] = taken if odd else first
        words[1] = second if odd else taken
        column = j * 4 + (8 if odd else 0) + thread % QUAD // 2 * 4
        if there and column < columns:
            store_vector(held, out.iterator, offset + column)
