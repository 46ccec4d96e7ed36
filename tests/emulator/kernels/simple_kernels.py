# SPDX-License-Identifier: Apache-2.0
"""Kernels that are small enough to be done by hand."""

import cutlass
from cutlass import cute

from dsl_backend.primitives.moved import SmemAllocator


class Affine:
    """y = x * scale + 1 over vectors of float32, a thread per element."""

    def __init__(self, threads=128, scale=2.0):
        self.threads, self.scale = threads, scale

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor):
        count = cute.size(x)
        self.kernel(x, y, count).launch(grid=(cute.ceil_div(count, self.threads), 1, 1), block=(self.threads, 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, count: cutlass.Int32):
        index = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        if index < count:
            y[index] = x[index] * self.scale + 1.0


class Shaped:
    """Stores block and cluster numbers; what is launched is as asked: shared memory, cluster, PDL, cooperative."""

    def __init__(self, grid=(4, 1, 1), block=(64, 1, 1), cluster=None, smem=None, pdl=False, cooperative=False):
        self.launch = {"grid": grid, "block": block, "smem": smem, "use_pdl": pdl, "cooperative": cooperative}
        if cluster is not None:
            self.launch["cluster"] = cluster

    @cute.jit
    def __call__(self, out: cute.Tensor):
        self.kernel(out).launch(**self.launch)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        block = cute.arch.block_idx()[0]
        out[block] = cutlass.Float32(cute.arch.block_idx_in_cluster() + 100 * block)


class Totals:
    """Every thread adds its elements of x [threads, n] to out [n], by one atomic addition."""

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor):
        self.kernel(x, out).launch(grid=(1, 1, 1), block=(cute.size(x, mode=[0]), 1, 1))

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor):
        mine = x[cute.arch.thread_idx()[0], None].load()
        if cutlass.const_expr(cute.size(out) == 1):
            cute.arch.atomic_add(out.iterator, mine[0])
        else:
            cute.arch.atomic_add(out.iterator, mine.ir_value())


class Staged:
    """Puts a value into dynamic shared memory that the DSL counts, and gets it back."""

    @cute.jit
    def __call__(self, out: cute.Tensor):
        self.kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        shared = SmemAllocator()
        sRow = shared.allocate_tensor(cutlass.Float32, cute.make_layout(1000), byte_alignment=16)
        thread = cute.arch.thread_idx()[0]
        sRow[thread] = cutlass.Float32(thread)
        cute.arch.sync_threads()
        out[thread] = sRow[31 - thread]


class Persistent:
    """As many blocks as the device has SMs, found by host code."""

    @cute.jit
    def __call__(self, out: cute.Tensor, blocks: cutlass.Constexpr[int]):
        self.kernel(out).launch(grid=(blocks, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        out[cute.arch.block_idx()[0]] = cutlass.Float32(1)


@cute.jit
def foreign(out: cute.Tensor):
    """Host code that calls a function that nobody has."""
    cute.ffi(name="nobody_has_this", params_types=[cutlass.Int32])(cutlass.Int32(1))
    Affine()(out, out)
