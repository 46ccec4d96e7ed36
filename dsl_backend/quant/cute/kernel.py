# SPDX-License-Identifier: Apache-2.0
"""Matrices to e4m3 with computed scales: one for each row, or one for each 128 columns of a row.

They follow a GEMM whose tiles have parts of a row or a group. A row's scale needs two passes over it, of which the
second one finds in L2, or in L1, what the first one read.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import torch
from cutlass import cute

from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import load_vector
from dsl_backend.primitives.math import f32_to_e4m3, tree_max
from dsl_backend.primitives.reduce import Max, row_reduce, row_smem, warp_reduce
from dsl_backend.quant.format import E4M3, GROUP
from dsl_backend.quant.reference import LEAST_OF_GROUP, LEAST_OF_ROW

WARP = 32
# Columns of a vector: a warp's are a group.
VECTOR = GROUP // WARP
# A row of 14336 columns is 7 vectors of each of a row's threads.
ROW_THREADS, GROUP_THREADS = 512, 128


@dataclass(frozen=True)
class QuantiseKey:
    """All that a kernel's code depends on.

    Attributes:
        by_group: a scale for each 128 columns of a row; else for each row.
        dtype: of the matrix.
    """

    by_group: bool
    dtype: torch.dtype = torch.float32


class ListedRows(NamedTuple):
    """Rows that a launch quantises instead of all.

    Attributes:
        mRows: int32 [listed], rows of x; -1 is none.
        mFactors: float32 [listed], what a row's scales are multiplied with once its elements are quantised.
    """

    mRows: cute.Tensor
    mFactors: cute.Tensor


@cute.jit
def load_wide(x: cute.Tensor, row: cutlass.Int32, column: cutlass.Int32, values: cute.Tensor):
    """A vector of a row, as float32."""
    offset = cutlass.Int64(row) * x.stride[0] + column
    if cutlass.const_expr(x.element_type is cutlass.Float32):
        load_vector(x.iterator, offset, values)
    else:
        narrow = cute.make_rmem_tensor(VECTOR, x.element_type)
        load_vector(x.iterator, offset, narrow)
        for i in cutlass.range_constexpr(VECTOR):
            values[i] = narrow[i].to(cutlass.Float32)


def largest_of(values: cute.Tensor):
    """Of the magnitudes of a vector; NaN is left out."""
    return tree_max([cute.arch.fmax(values[i], -values[i]) for i in range(VECTOR)])


class Quantise:
    """out [rows, n] e4m3 as bytes, scale [rows], or [rows, groups] of any strides, of x [rows, n].

    n is a multiple of 4. Rows of x start at multiples of 4 elements, those of out at multiples of 4 bytes.

    Args:
        waits_last: it runs beside the kernel before it, which has nothing to do with x, out and scale, and which lets
            it start when all kernels before that one have ended.
    """

    def __init__(self, key: QuantiseKey, waits_last: bool = False):
        self.by_group, self.waits_last = key.by_group, waits_last
        self.threads = GROUP_THREADS if key.by_group else ROW_THREADS

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, stream):
        """Launch: a CTA for each row, or a warp for each group."""
        self.launch(x, out, scale, None, stream)

    @cute.jit
    def launch(self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, mCount: cute.Tensor, stream):
        """Launch; mCount: int32 [1], the number of rows that count. None is all of them."""
        self.launch_rows(x, out, scale, x.shape[0], mCount, None, stream)

    @cute.jit
    def launch_listed(self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, listed: ListedRows, stream):
        """Launch for rows of a list; no other row of out and scale is written."""
        self.launch_rows(x, out, scale, listed.mRows.shape[0], None, listed, stream)

    def launch_rows(self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, rows, mCount, listed, stream):
        """Launch for so many rows."""
        ctas = rows
        if self.by_group:
            ctas = cute.ceil_div(rows * scale.shape[1], self.threads // WARP)
        self.kernel(x, out, scale, mCount, listed).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        scale: cute.Tensor,
        mCount: cute.Tensor,
        listed: ListedRows | None,
    ):
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        dependent_launch.launch_dependents()
        if cutlass.const_expr(not self.waits_last):
            dependent_launch.wait()
        item, groups = block, 1
        if cutlass.const_expr(self.by_group):
            item, groups = block * (self.threads // WARP) + thread // WARP, scale.shape[1]
        row, factor = cutlass.Int32(-1), cutlass.Float32(1.0)
        if cutlass.const_expr(listed is not None):
            if item < listed.mRows.shape[0] * groups:
                row, factor = listed.mRows[item // groups], listed.mFactors[item // groups]
        else:
            rows = x.shape[0] if cutlass.const_expr(mCount is None) else mCount[0]
            if item < rows * groups:
                row = item // groups
        if row >= 0:
            if cutlass.const_expr(self.by_group):
                self.group(x, out, scale, row, item % groups, factor, thread % WARP)
            else:
                self.row(x, out, scale, row, factor, thread)
        if cutlass.const_expr(self.waits_last):
            dependent_launch.wait()

    @cute.jit
    def row(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        scale: cute.Tensor,
        row: cutlass.Int32,
        factor: cutlass.Float32,
        thread: cutlass.Int32,
    ):
        """A CTA's row, whose scale is stored times a factor."""
        buffer, mbar = row_smem(Max, 1, self.threads // WARP, 1)
        vectors = x.shape[1] // VECTOR
        values = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        largest = cutlass.Float32(0.0)
        for i in cutlass.range(thread, vectors, self.threads, unroll=4):
            load_wide(x, row, i * VECTOR, values)
            largest = cute.arch.fmax(largest, largest_of(values))
        whole = row_reduce(Max(largest), buffer, mbar, self.threads, 1).maximum
        found = cute.arch.fmax(whole, LEAST_OF_ROW) / cutlass.Float32(E4M3.largest)
        if thread == 0:
            scale[row] = found * factor
        for i in cutlass.range(thread, vectors, self.threads, unroll=4):
            load_wide(x, row, i * VECTOR, values)
            self.store(out, values, found, row, i * VECTOR)

    @cute.jit
    def group(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        scale: cute.Tensor,
        row: cutlass.Int32,
        group: cutlass.Int32,
        factor: cutlass.Float32,
        lane: cutlass.Int32,
    ):
        """A warp's group of a row, whose scale is stored times a factor."""
        n, column = x.shape[1], group * GROUP + lane * VECTOR
        values = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        values.fill(0.0)
        if column < n:
            load_wide(x, row, column, values)
        largest = warp_reduce(Max(largest_of(values)), WARP).maximum
        found = cute.arch.fmax(largest, LEAST_OF_GROUP) / cutlass.Float32(E4M3.largest)
        if lane == 0:
            scale[row, group] = found * factor
        if column < n:
            self.store(out, values, found, row, column)

    @cute.jit
    def store(
        self, out: cute.Tensor, values: cute.Tensor, scale: cutlass.Float32, row: cutlass.Int32, column: cutlass.Int32
    ):
        """Four quotients in e4m3."""
        inverse = cutlass.Float32(1.0) / scale
        word = f32_to_e4m3(*(values[i] * inverse for i in range(VECTOR)))
        offset = cutlass.Int64(row) * out.stride[0] + column
        pointer = cute.make_ptr(cutlass.Int32, out.iterator.toint() + offset, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = word
