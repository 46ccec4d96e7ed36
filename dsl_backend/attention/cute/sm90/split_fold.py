# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant splits within one CTA: partial results of a work tile's splits, combined in a fixed order.

A split begins at a multiple of `tiles_per_split` key tiles. The splits of a work tile are processed from the last to
the first, and each result is folded into that of the splits before. If another CTA has some of the splits, the combine
kernel folds all of them in the same order and by the same operations (`CombineThread.fold_row`).
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.combine import combine_scales, fold_workspace_size
from dsl_backend.attention.cute.rows import ROWS_PER_THREAD, reshape_acc_to_mn
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.softmax import OnlineSoftmax
from dsl_backend.attention.cute.tiles import TiledKernel
from dsl_backend.primitives.accumulators import fence_register
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.math import fma


class SplitFold:
    """A thread's part of the fold. The result so far waits in global memory, since registers have no room for it.

    Attributes:
        row_max, row_sum: [row] of the split that ended, or once it is folded of all splits so far; row_max in base 2.
    """

    def __init__(
        self,
        kernel: TiledKernel,
        acc_O: cute.Tensor,
        softmax: OnlineSoftmax,
        workspace: cute.Tensor | None,
        thread: cutlass.Int32,
    ):
        self.kernel, self.tiles_per_split = kernel, kernel.key.tiles_per_split
        self.acc_O, self.softmax, self.workspace, self.thread = acc_O, softmax, workspace, thread
        self.row_max = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        self.row_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)

    @cute.jit
    def end_split(self):
        """Keep row_max and row_sum of the split whose last tile the softmax has seen, and reset the softmax."""
        self.softmax.reduce_row_sum()
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            # Fenced: the compiler would fuse this product with a later subtraction, which rounds differently.
            self.row_max[row] = fence_register(self.softmax.row_max[row] * self.softmax.softmax_scale_log2)
            self.row_sum[row] = self.softmax.row_sum[row]
        self.softmax.reset()

    @cute.jit
    def fold(self, work: WorkTile, n_block: cutlass.Int32):
        """Fold the result so far into O, row_max and row_sum of the split that has key tile `n_block`."""
        tiles_per_split = cutlass.const_expr(self.tiles_per_split)
        if n_block // tiles_per_split != (work.n_block_max - 1) // tiles_per_split:
            self.load()

    @cute.jit
    def load(self):
        acc_O, vector = reshape_acc_to_mn(self.acc_O), cute.make_rmem_tensor(4, cutlass.Float32)
        scale_prev = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        scale = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        load_vector(self.workspace.iterator, self.offset(cute.size(acc_O, mode=[1])), vector)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max, scale_prev[row], scale[row] = combine_scales(vector[row], self.row_max[row])
            row_sum = fma(self.row_sum[row], scale[row], vector[2 + row] * scale_prev[row])
            self.row_max[row], self.row_sum[row] = row_max, row_sum
        for j in cutlass.range_constexpr(0, cute.size(acc_O, mode=[1]), 2):
            load_vector(self.workspace.iterator, self.offset(j), vector)
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                for i in cutlass.range_constexpr(2):
                    acc_O[row, j + i] = fma(acc_O[row, j + i], scale[row], vector[2 * row + i] * scale_prev[row])

    @cute.jit
    def store(self):
        """Store the result so far, until the next split has ended."""
        acc_O, vector = reshape_acc_to_mn(self.acc_O), cute.make_rmem_tensor(4, cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            vector[row], vector[2 + row] = self.row_max[row], self.row_sum[row]
        store_vector(vector, self.workspace.iterator, self.offset(cute.size(acc_O, mode=[1])))
        for j in cutlass.range_constexpr(0, cute.size(acc_O, mode=[1]), 2):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                vector[2 * row], vector[2 * row + 1] = acc_O[row, j], acc_O[row, j + 1]
            store_vector(vector, self.workspace.iterator, self.offset(j))

    @cute.jit
    def offset(self, j: cutlass.Constexpr[int]):
        """Offset of columns j and j + 1 of the thread's two rows in the workspace; behind the last ones, row_max and
        row_sum.
        """
        threads = cutlass.const_expr(self.kernel.config.groups * WARPGROUP)
        cta = cutlass.Int64(cute.arch.block_idx()[0]) * fold_workspace_size(self.kernel.tile_m, self.kernel.dims_v)
        return cta + (j // 2 * threads + self.thread) * 4
