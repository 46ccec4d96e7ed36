# SPDX-License-Identifier: Apache-2.0
"""Matrices to e4m3 with computed scales: one for each row, or one for each 128 columns of a row.

They follow a GEMM whose tiles have parts of a row or a group, or make 8 bits of a layer's input. Memory bounds many
rows: each thread has several vectors of 16 bytes on their way.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import torch
from cutlass import cute

from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import VECTOR_BYTES, load_vector, load_vector_if, store_vector
from dsl_backend.primitives.math import f32_to_e4m3, max_f16x2, quotient, tree_max, tree_reduce
from dsl_backend.primitives.reduce import WARP, Max, row_reduce, row_smem
from dsl_backend.quant.format import E4M3, GROUP
from dsl_backend.quant.reference import LEAST_OF_GROUP, LEAST_OF_ROW

# A row of 14336 columns is 7 vectors of float32 of each of a row's threads.
ROW_THREADS, GROUP_THREADS = 256, 128
# Columns of a row that registers hold, from the load to the store.
HELD_COLUMNS = 16384
# Rows of a thread whose loads are on their way at once: a power of two.
ROWS = 4
# As many threads as run at once on 132 SMs: if they suffice, each has one row.
AT_ONCE = 132 * 1280


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


def wide(values: cute.Tensor) -> list:
    """An even number of values as float32."""
    if values.element_type is not cutlass.BFloat16:
        return [values[i].to(cutlass.Float32) for i in range(cute.size(values))]
    # Two instructions for two values; ptxas makes three of conversions.
    words = cute.recast_tensor(values, cutlass.Int32)
    halves = ((words[i] << 16, words[i] & -0x10000) for i in range(cute.size(words)))
    return [half.bitcast(cutlass.Float32) for pair in halves for half in pair]


def largest_of(values: cute.Tensor):
    """Of the magnitudes of a vector; NaN is left out."""
    numbers = values
    if values.element_type is not cutlass.Float32:
        kind = "xorsign.abs.bf16x2" if values.element_type is cutlass.BFloat16 else "xorsign.abs.f16x2"
        words = cute.recast_tensor(values, cutlass.Uint32)
        numbers = cute.make_rmem_tensor(2, values.element_type)
        pair = tree_reduce([words[i] for i in range(cute.size(words))], lambda a, b: max_f16x2(a, b, kind))
        cute.recast_tensor(numbers, cutlass.Uint32)[0] = pair
    return tree_max([cute.arch.fmax(value, -value) for value in wide(numbers)])


@cute.jit
def value_of(values: cute.Tensor, lane: cutlass.Int32):
    """Value lane % n of n, which is a power of two."""
    found = values[0]
    for i in cutlass.range_constexpr(1, cute.size(values)):
        if lane % cutlass.const_expr(cute.size(values)) == i:
            found = values[i]
    return found


@cute.jit
def largest_of_lanes(values: cute.Tensor, lane: cutlass.Int32, lanes: cutlass.Constexpr[int]):
    """The maximum of value lane % n of n over aligned groups of lanes; all lanes of the warp call it.

    n is a power of two up to the lanes. Exchanges halve what a lane has: 4 values of 16 lanes take 5 shuffles in place
    of 16.
    """
    count = cutlass.const_expr(cute.size(values))
    levels = cutlass.const_expr(count.bit_length() - 1)
    for level in cutlass.range_constexpr(levels):
        distance = cutlass.const_expr(count >> level + 1)
        upper = lane & distance != 0
        for i in cutlass.range_constexpr(distance):
            low, high = values[i], values[i + distance]
            received = cute.arch.shuffle_sync_bfly(low if upper else high, distance)
            values[i] = cute.arch.fmax(high if upper else low, received)
    largest = values[0]
    for level in cutlass.range_constexpr(levels, lanes.bit_length() - 1):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << level))
    return largest


class Quantise:
    """out [rows, n] e4m3 as bytes, scale [rows], or [rows, groups] of any strides, of x [rows, n].

    Rows of x, and their ends, are at multiples of 16 bytes; rows of out start at multiples of so many bytes as those 16
    have elements.

    Args:
        waits_last: it runs beside the kernel before it, which has nothing to do with x, out and scale, and which lets
            it start when all kernels before that one have ended.
    """

    def __init__(self, key: QuantiseKey, waits_last: bool = False):
        self.by_group, self.waits_last = key.by_group, waits_last
        self.threads = GROUP_THREADS if key.by_group else ROW_THREADS
        self.vector = VECTOR_BYTES // key.dtype.itemsize
        # Of a group.
        self.lanes = GROUP // self.vector

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, stream):
        """Launch: a CTA for each row; or 16 or 32 lanes for a group of 128 columns, of up to ROWS rows."""
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
        ctas = step = rows
        if self.by_group:
            groups = scale.shape[1]
            at_once = cutlass.max(AT_ONCE // self.lanes // groups, 1)
            step = cute.ceil_div(rows, cutlass.min(cute.ceil_div(rows, at_once), ROWS))
            ctas = cute.ceil_div(step * groups, self.threads // self.lanes)
        # Told of no CTAs of an SM, ptxas (CUDA 13.0) keeps to 64 registers, and spills.
        self.kernel(x, out, scale, mCount, listed, step).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        scale: cute.Tensor,
        mCount: cute.Tensor,
        listed: ListedRows | None,
        step: cutlass.Int32,
    ):
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        dependent_launch.launch_dependents()
        if cutlass.const_expr(not self.waits_last):
            dependent_launch.wait()
        if cutlass.const_expr(self.by_group):
            rows = self.rows_of(x, mCount, listed)
            if rows <= step:
                self.groups(x, out, scale, listed, rows, step, block, thread, 1)
            else:
                self.groups(x, out, scale, listed, rows, step, block, thread, ROWS)
        else:
            row, factor = self.row_of(block, self.rows_of(x, mCount, listed), listed)
            if row >= 0:
                self.row(x, out, scale, row, factor, thread)
        if cutlass.const_expr(self.waits_last):
            dependent_launch.wait()

    def rows_of(self, x: cute.Tensor, mCount, listed):
        """How many rows there are."""
        if listed is not None:
            return listed.mRows.shape[0]
        return x.shape[0] if mCount is None else mCount[0]

    @cute.jit
    def row_of(self, item: cutlass.Int32, rows: cutlass.Int32, listed: ListedRows | None):
        """(a row of x or -1, what its scales are stored times), of the number of a row that may not exist."""
        exists = item < rows
        row, factor = item if exists else cutlass.Int32(-1), cutlass.Float32(1.0)
        if cutlass.const_expr(listed is not None):
            rRow, rFactor = cute.make_rmem_tensor(1, cutlass.Int32), cute.make_rmem_tensor(1, cutlass.Float32)
            load_vector_if(exists, listed.mRows.iterator, item, rRow, -1)
            load_vector_if(exists, listed.mFactors.iterator, item, rFactor, 0)
            row, factor = rRow[0], rFactor[0]
        return row, factor

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
        """A CTA's row, whose scale is stored times a factor. Its first HELD_COLUMNS are read once."""
        buffer, mbar = row_smem(Max, 1, self.threads // WARP, 1)
        vectors, start = x.shape[1] // self.vector, cutlass.Int64(row) * x.stride[0]
        count = cutlass.const_expr(HELD_COLUMNS // (self.threads * self.vector))
        held = cute.make_rmem_tensor((self.vector, count), x.element_type)
        values = cute.make_rmem_tensor(self.vector, x.element_type)
        for j in cutlass.range_constexpr(count):
            i = thread + j * self.threads
            load_vector_if(i < vectors, x.iterator, start + i * self.vector, held[None, j], 0)
        largest = cutlass.Float32(0.0)
        for j in cutlass.range_constexpr(count):
            if j * self.threads < vectors:
                largest = cute.arch.fmax(largest, largest_of(held[None, j]))
        behind = thread + count * self.threads
        for i in cutlass.range(behind, vectors, self.threads, unroll=4):
            load_vector(x.iterator, start + i * self.vector, values)
            largest = cute.arch.fmax(largest, largest_of(values))
        whole = row_reduce(Max(largest), buffer, mbar, self.threads, 1).maximum
        found = cute.arch.fmax(whole, LEAST_OF_ROW) / cutlass.Float32(E4M3.largest)
        inverse = cutlass.Float32(1.0) / found
        if thread == 0:
            scale[row] = found * factor
        for j in cutlass.range_constexpr(count):
            i = thread + j * self.threads
            if i < vectors:
                self.store(out, held[None, j], inverse, row, i * self.vector)
        for i in cutlass.range(behind, vectors, self.threads, unroll=4):
            load_vector(x.iterator, start + i * self.vector, values)
            self.store(out, values, inverse, row, i * self.vector)

    @cute.jit
    def groups(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        scale: cute.Tensor,
        listed: ListedRows | None,
        rows: cutlass.Int32,
        step: cutlass.Int32,
        block: cutlass.Int32,
        thread: cutlass.Int32,
        count: cutlass.Constexpr[int],
    ):
        """A CTA's groups: each of up to `count` rows, `step` apart, of so many rows."""
        n = x.shape[1]
        item = block * (self.threads // self.lanes) + thread // self.lanes
        first = quotient(item, scale.shape[1])
        group, lane = item - first * scale.shape[1], thread % self.lanes
        column = group * GROUP + lane * self.vector
        values = cute.make_rmem_tensor((self.vector, count), x.element_type)
        of_each, factors = cute.make_rmem_tensor(count, cutlass.Int32), cute.make_rmem_tensor(count, cutlass.Float32)
        maxima = cute.make_rmem_tensor(count, cutlass.Float32)
        maxima.fill(0.0)
        end = rows if first < step else cutlass.Int32(0)
        for j in cutlass.range_constexpr(count):
            of_each[j], factors[j] = self.row_of(first + j * step, end, listed)
        # All loads are on their way before the first one is waited for.
        for j in cutlass.range_constexpr(count):
            inside = of_each[j] >= 0 and column < n
            load_vector_if(inside, x.iterator, cutlass.Int64(of_each[j]) * x.stride[0] + column, values[None, j], 0)
        for j in cutlass.range_constexpr(count):
            # All of a grid's threads have a row of this turn, or none has.
            if j * step < rows:
                maxima[j] = largest_of(values[None, j])
        # Each lane divides for one of the rows.
        largest = cute.arch.fmax(largest_of_lanes(maxima, lane, self.lanes), LEAST_OF_GROUP)
        found = largest / cutlass.Float32(E4M3.largest)
        inverse, own = cutlass.Float32(1.0) / found, value_of(of_each, lane)
        if lane < count and own >= 0:
            scale[own, group] = found * value_of(factors, lane)
        for j in cutlass.range_constexpr(count):
            if j * step < rows:
                of_row = inverse
                if cutlass.const_expr(count > 1):
                    of_row = cute.arch.shuffle_sync(inverse, (thread & (WARP - self.lanes)) + j)
                if of_each[j] >= 0 and column < n:
                    self.store(out, values[None, j], of_row, of_each[j], column)

    @cute.jit
    def store(
        self, out: cute.Tensor, values: cute.Tensor, inverse: cutlass.Float32, row: cutlass.Int32, column: cutlass.Int32
    ):
        """A vector in e4m3, times the inverse of its scale."""
        quotients = [value * inverse for value in wide(values)]
        words = cute.make_rmem_tensor(self.vector // 4, cutlass.Int32)
        for i in cutlass.range_constexpr(self.vector // 4):
            words[i] = f32_to_e4m3(*quotients[4 * i : 4 * i + 4])
        address = out.iterator.toint() + cutlass.Int64(row) * out.stride[0] + column
        base = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=self.vector)
        store_vector(words, base, 0)
