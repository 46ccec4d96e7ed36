# SPDX-License-Identifier: Apache-2.0
"""The fixed splits of a batch-invariant layer within one CTA of SM90: each is summed by itself, and folded or stored.

The splits of a work tile are processed from the last to the first. A CTA that has all splits of a row tile folds each
result into that of the splits before. Otherwise each is a partial result, and the combine kernel folds them in the same
order and by the same operations (`CombineThread.combine_in_order`).
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.combine import combine_scales
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, reshape_acc_to_mn
from dsl_backend.attention.cute.softmax import OnlineSoftmax
from dsl_backend.primitives.accumulators import fence_register
from dsl_backend.primitives.math import fma

# Vectors that a thread loads ahead of the one that it folds. ptxas by itself had one to three in flight, so that a fold
# of 32 vectors in global memory was a chain of more than ten loads.
LOADS_AHEAD = 16
VECTOR = 4  # float32 of a vector: two columns of a thread's two rows


class FoldWorkspace:
    """Where a thread's part of the result so far waits.

    Args:
        workspace: of the CTA, float32, in shared or in global memory.
        vectors: of a thread.
        thread: of `threads`.

    Attributes:
        folded_O: (element, vector). folded_stats: row_max and row_sum of both rows, (element,).
    """

    def __init__(self, workspace: cute.Tensor, vectors: int, thread: cutlass.Int32, threads: int) -> None:
        # A pointer plus a thread's offset does not say that vectors are aligned. In words they were four times as many
        # accesses, each of which takes a quarter of the sectors that it touches.
        first = workspace.iterator + cute.assume(thread * VECTOR, divby=VECTOR)
        self.folded_O = cute.make_tensor(first, cute.make_layout((VECTOR, vectors), stride=(1, VECTOR * threads)))
        in_stats = cute.assume(VECTOR * threads * vectors + thread // QUAD * VECTOR, divby=VECTOR)
        self.folded_stats = cute.make_tensor(workspace.iterator + in_stats, cute.make_layout(VECTOR))


class SplitFold:
    """A thread's part of the fold. The result so far waits in memory, since registers have no room for it.

    Rows that do not exist are not folded: a decode step of 4 packed heads has 4 of a tile's 64 rows. With all of them
    in global memory, 64 requests of 8k keys took 822 us and not 781, 128 of 16 heads of MLA 392 us and not 304 (H100).

    Args:
        workspace: of the CTA, float32, in shared or in global memory.
        thread: of `threads`, which all have the same number of accumulator registers.
        row: of the tile, the first of the thread's two.
        few_rows: work tiles of up to so many rows are folded in `few_rows_workspace`, which belongs to the threads that
            have these rows; 0: none.

    Attributes:
        row_max, row_sum: [row] of the split that ended, or once it is folded of all splits so far; row_max in base 2.
    """

    def __init__(
        self,
        acc_O: cute.Tensor,
        softmax: OnlineSoftmax,
        workspace: cute.Tensor,
        thread: cutlass.Int32,
        threads: int,
        row: cutlass.Int32,
        few_rows: int = 0,
        few_rows_workspace: FoldWorkspace | None = None,
    ) -> None:
        self.acc_O, self.softmax, self.row, self.few_rows = acc_O, softmax, row, few_rows
        self.vectors = cute.size(acc_O) // VECTOR
        self.workspace = FoldWorkspace(workspace, self.vectors, thread, threads)
        self.few_rows_workspace = few_rows_workspace
        self.writes_stats = thread % QUAD == 0
        self.row_max = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        self.row_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)

    @cute.jit
    def end_split(self):
        """Keep row_max and row_sum of a split, which is the sum over a row's threads, and reset the softmax."""
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            # Fenced: the compiler would fuse this product with a later subtraction, which rounds differently.
            self.row_max[row] = fence_register(self.softmax.row_max[row] * self.softmax.softmax_scale_log2)
            self.row_sum[row] = self.softmax.row_sum[row]
        self.softmax.reset()

    @cute.jit
    def load(self, num_rows: cutlass.Int32):
        """Fold the result so far into that of the split that ended, where the tile has rows."""
        if self.row < num_rows:
            if cutlass.const_expr(self.few_rows > 0):
                if num_rows <= self.few_rows:
                    self.load_rows(self.few_rows_workspace)
                else:
                    self.load_rows(self.workspace)
            else:
                self.load_rows(self.workspace)

    @cute.jit
    def load_rows(self, workspace: FoldWorkspace):
        acc_O, vector = reshape_acc_to_mn(self.acc_O), cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        ahead = cutlass.const_expr(min(LOADS_AHEAD, self.vectors))
        folded = cute.make_rmem_tensor((VECTOR, ahead), cutlass.Float32)
        scale_prev = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        scale = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        cute.autovec_copy(workspace.folded_stats, vector)
        for j in cutlass.range_constexpr(ahead):
            cute.autovec_copy(workspace.folded_O[None, j], folded[None, j])
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max = cute.arch.fmax(vector[row], self.row_max[row])
            scale_prev[row], scale[row] = combine_scales(vector[row], self.row_max[row], row_max)
            row_sum = fma(self.row_sum[row], scale[row], vector[2 + row] * scale_prev[row])
            self.row_max[row], self.row_sum[row] = row_max, row_sum
        for j in cutlass.range_constexpr(self.vectors):
            at = j % ahead
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                for i in cutlass.range_constexpr(2):
                    acc_O[row, 2 * j + i] = fma(
                        acc_O[row, 2 * j + i], scale[row], folded[2 * row + i, at] * scale_prev[row]
                    )
            if cutlass.const_expr(j + ahead < self.vectors):
                cute.autovec_copy(workspace.folded_O[None, j + ahead], folded[None, at])

    @cute.jit
    def store(self, num_rows: cutlass.Int32):
        """Store the result so far, where the tile has rows, until the next split has ended."""
        # All lanes of a quad have read the statistics.
        cute.arch.sync_warp()
        if self.row < num_rows:
            if cutlass.const_expr(self.few_rows > 0):
                if num_rows <= self.few_rows:
                    self.store_rows(self.few_rows_workspace)
                else:
                    self.store_rows(self.workspace)
            else:
                self.store_rows(self.workspace)
        cute.arch.sync_warp()

    @cute.jit
    def store_rows(self, workspace: FoldWorkspace):
        acc_O, vector = reshape_acc_to_mn(self.acc_O), cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        if self.writes_stats:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                vector[row], vector[2 + row] = self.row_max[row], self.row_sum[row]
            cute.autovec_copy(vector, workspace.folded_stats)
        for j in cutlass.range_constexpr(self.vectors):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                vector[2 * row], vector[2 * row + 1] = acc_O[row, 2 * j], acc_O[row, 2 * j + 1]
            cute.autovec_copy(vector, workspace.folded_O[None, j])
