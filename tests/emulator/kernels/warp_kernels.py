# SPDX-License-Identifier: Apache-2.0
"""A kernel with a bit of everything that one warp can do: exchange, votes, barriers, conversions, approximations."""

import cutlass
from cutlass import cute
from cutlass.cute import math

from dsl_backend.primitives.moved import SmemAllocator


class RowSoftmax:
    """y = softmax(x) over rows of 32 * PER_THREAD numbers in bfloat16, a warp per row, each through shared memory."""

    PER_THREAD = 4
    ROWS = 4

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        self.kernel(x, y).launch(grid=(cute.ceil_div(x.shape[0], self.ROWS), 1, 1), block=(32 * self.ROWS, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor):
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row = cute.arch.block_idx()[0] * self.ROWS + warp
        shared = SmemAllocator()
        sBarrier = shared.allocate_array(cutlass.Int64, 1)
        sRow = shared.allocate_tensor(cutlass.Float32, cute.make_layout((self.ROWS, 32)), byte_alignment=16)
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(sBarrier, 32 * self.ROWS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if row < x.shape[0]:
            largest = -cutlass.Float32.inf
            for i in cutlass.range_constexpr(self.PER_THREAD):
                largest = max(largest, x[row, lane + 32 * i].to(cutlass.Float32))
            for step in cutlass.range_constexpr(5):
                largest = max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1 << step))
            total = cutlass.Float32(0.0)
            for i in cutlass.range_constexpr(self.PER_THREAD):
                total += math.exp2(
                    (x[row, lane + 32 * i].to(cutlass.Float32) - largest) * 1.4426950408889634, fastmath=True
                )
            sRow[warp, lane] = total
        cute.arch.mbarrier_arrive(sBarrier)
        cute.arch.mbarrier_wait(sBarrier, 0)
        if row < x.shape[0]:
            total = cutlass.Float32(0.0)
            for i in range(32):
                total += sRow[warp, i]
            for i in cutlass.range_constexpr(self.PER_THREAD):
                value = x[row, lane + 32 * i].to(cutlass.Float32)
                y[row, lane + 32 * i] = (value / total).to(cutlass.BFloat16)
