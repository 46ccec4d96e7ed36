# SPDX-License-Identifier: Apache-2.0
"""Matrices to MXFP8 and NVFP4, with a scale for each 32 or 16 columns of a row."""

from collections.abc import Sequence

import cutlass
import torch
from cutlass import cute

from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import load_vector
from dsl_backend.primitives.math import (
    e4m3_of,
    e8m0_of,
    f32_to_e2m1,
    f32_to_e4m3,
    fmax_nan,
    tree_max,
    tree_reduce,
)
from dsl_backend.primitives.reduce import Max, warp_reduce
from dsl_backend.quant.format import E2M1_MAX, MXFP8, ScaledFormat
from dsl_backend.quant.reference import LEAST_OF_GROUP

THREADS = 128
# Columns of a thread: 16 bytes of 16-bit elements.
VECTOR = 8
NAN_E8M0 = 255


@cute.jit
def mx_scale(largest: cutlass.Float32):
    """(the exponent of a block's scale plus 127, its inverse), by the block's largest magnitude, NaN left out.

    The scale of a block with an infinity is NaN.
    """
    exponent, inverse = e8m0_of(cute.arch.fmax(largest, LEAST_OF_GROUP) / cutlass.Float32(MXFP8.largest))
    if largest == cutlass.Float32.inf:
        exponent = cutlass.Int32(NAN_E8M0)
    return exponent, inverse


def block_scale(kind: ScaledFormat, values: Sequence, global_scale, lanes: int = 1):
    """(the code of a block's scale, what its values are multiplied by); `lanes` neighbours have parts of a block.

    e2m1 has no NaN: in NVFP4 the scale of a block with one is NaN.
    """
    magnitudes = [cute.arch.fmax(value, -value) for value in values]
    if kind.packed > 1:
        largest = tree_reduce(magnitudes, fmax_nan)
        if lanes > 1:
            largest = cute.arch.warp_reduction(largest, fmax_nan, threads_in_group=lanes)
        return e4m3_of(largest / (E2M1_MAX * global_scale), global_scale)
    return mx_scale(warp_reduce(Max(tree_max(magnitudes)), lanes).maximum)


def converted(kind: ScaledFormat, values: Sequence) -> list:
    """Words of 32 bits of scaled values: four e4m3 or eight e2m1."""
    convert, count = (f32_to_e2m1, 8) if kind.packed > 1 else (f32_to_e4m3, 4)
    return [convert(*values[i : i + count]) for i in range(0, len(values), count)]


def words_at(tensor: cute.Tensor, offset, count: int) -> cute.Tensor:
    """So many neighbouring words of a matrix of bytes, from a byte on that they are aligned to."""
    address = tensor.iterator.toint() + offset
    pointer = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


class QuantiseBlocks:
    """out [rows, n] as bytes, scale [rows, blocks] bytes, padded to fours with 0, of x [rows, n] in 16 bits.

    Columns are a multiple of a block's; rows of x start at multiples of 16 bytes, those of out at multiples of 8.

    Args:
        kind: MXFP8 or NVFP4.
        waits_last: see `kernel.Quantise`.
    """

    def __init__(self, kind: ScaledFormat, dtype: torch.dtype, waits_last: bool = False):
        assert kind.block_columns is not None
        self.kind, self.dtype, self.waits_last = kind, dtype, waits_last
        self.block, self.lanes = kind.block_columns, kind.block_columns // VECTOR

    @cute.jit
    def launch(self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, mGlobal: cute.Tensor, stream):
        """Launch; mGlobal: float32 [1], NVFP4's scale of the matrix, or missing."""
        vectors = cutlass.Int64(x.shape[0]) * (scale.shape[1] * self.lanes)
        ctas = cutlass.Int32((vectors + (THREADS - 1)) // THREADS)
        self.kernel(x, out, scale, mGlobal).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, mGlobal: cute.Tensor):
        dependent_launch.launch_dependents()
        if cutlass.const_expr(not self.waits_last):
            dependent_launch.wait()
        of_row = scale.shape[1] * self.lanes
        vector = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        row, place = vector // of_row, vector % of_row
        column = place * VECTOR
        exists = row < x.shape[0]
        inside = exists and column < x.shape[1]
        rX = cute.make_rmem_tensor(VECTOR, x.element_type)
        rX.fill(0.0)
        if inside:
            load_vector(x.iterator, cutlass.Int64(row) * x.stride[0] + column, rX)
        values = [rX[i].to(cutlass.Float32) for i in range(VECTOR)]
        global_scale = mGlobal[0] if cutlass.const_expr(mGlobal is not None) else None
        code, inverse = block_scale(self.kind, values, global_scale, self.lanes)
        words = converted(self.kind, [value * inverse for value in values])
        if inside:
            offset = cutlass.Int64(row) * out.stride[0] + column // self.kind.packed
            target = words_at(out, offset, len(words))
            for i in cutlass.range_constexpr(len(words)):
                target[i] = words[i]
        if exists and place % self.lanes == 0:
            scale[row, place // self.lanes] = cutlass.Uint8(code if inside else cutlass.Int32(0))
        if cutlass.const_expr(self.waits_last):
            dependent_launch.wait()
