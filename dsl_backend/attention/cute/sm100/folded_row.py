# SPDX-License-Identifier: Apache-2.0
"""The fixed splits of a batch-invariant layer within one CTA of SM100, by threads that each have a row of O.

The splits of a work tile are processed from the last to the first, and each is summed by itself. A CTA that has all
splits of a row tile folds each result into that of the splits before, which waits in global memory. The combine kernel
folds partial results in the same order and by the same operations (`CombineThread.combine_in_order`).
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.combine import combine_scales
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.primitives.math import Pair, fma, fma_pair, mul_pair

VECTOR = 4  # float32 of a vector


class FoldedRow:
    """A row of the splits that the CTA has combined, or a part of its columns.

    Args:
        workspace: of the CTA, float32: O (vector of columns, row), then (row_max, row_sum) of each row's parts.
        rows, columns: of the CTA.
        row: of the thread. part: of the row, whose threads keep row_max and row_sum each for itself.
    """

    def __init__(
        self,
        workspace: cute.Tensor,
        rows: int,
        columns: int,
        row: cutlass.Int32,
        part: cutlass.Int32 | int = 0,
    ) -> None:
        layout = cute.make_layout((VECTOR, columns // VECTOR), stride=(1, VECTOR * rows))
        self.folded_O = cute.make_tensor(workspace.iterator + row * VECTOR, layout)
        stats = workspace.iterator + (rows * columns + (part * rows + row) * 2)
        self.folded_stats = cute.make_tensor(stats, cute.make_layout(2))

    @cute.jit
    def scales(
        self,
        work: WorkTile,
        split: WorkTile,
        row_max: cutlass.Float32,
        row_sum: cutlass.Float32,
    ):
        """(row_max and row_sum of a split and those before it, scales of O of those before it, and of its own O)."""
        max_before, sum_before = -cutlass.Float32.inf, cutlass.Float32(0.0)
        if split.n_block_max < work.n_block_max:
            max_before, sum_before = self.folded_stats[0], self.folded_stats[1]
        new_max = cute.arch.fmax(max_before, row_max)
        scale_before, scale = combine_scales(max_before, row_max, new_max)
        return new_max, fma(row_sum, scale, sum_before * scale_before), scale_before, scale

    @cute.jit
    def fold(
        self,
        work: WorkTile,
        split: WorkTile,
        acc_O: cute.Tensor,
        column: cutlass.Int32,
        scale_before: cutlass.Float32,
        scale: cutlass.Float32,
    ):
        """Fold O of the splits before into columns of a split's O; `column`: the first of them."""
        vector, vectors = cute.make_rmem_tensor(VECTOR, cutlass.Float32), cute.size(acc_O) // VECTOR
        for i in cutlass.range_constexpr(vectors):
            vector.fill(0.0)
            if split.n_block_max < work.n_block_max:
                cute.autovec_copy(self.folded_O[None, column // VECTOR + i], vector)
            for j in cutlass.range_constexpr(0, VECTOR, 2):
                before: Pair = mul_pair((vector[j], vector[j + 1]), (scale_before, scale_before))
                own = (acc_O[i * VECTOR + j], acc_O[i * VECTOR + j + 1])
                acc_O[i * VECTOR + j], acc_O[i * VECTOR + j + 1] = fma_pair(own, (scale, scale), before)

    @cute.jit
    def store(self, acc_O: cute.Tensor, column: cutlass.Int32):
        """Store columns of O, until the next split has ended."""
        vectors = cute.make_tensor(acc_O.iterator, cute.make_layout((VECTOR, cute.size(acc_O) // VECTOR)))
        for i in cutlass.range_constexpr(cute.size(vectors, mode=[1])):
            cute.autovec_copy(vectors[None, i], self.folded_O[None, column // VECTOR + i])

    @cute.jit
    def store_stats(self, row_max: cutlass.Float32, row_sum: cutlass.Float32):
        folded_stats = self.folded_stats
        folded_stats[0], folded_stats[1] = row_max, row_sum


def is_last_split(work: WorkTile, split: WorkTile) -> cutlass.Boolean:
    """Whether a split is the last one of its work tile that is processed."""
    return split.n_block_min == work.n_block_min
