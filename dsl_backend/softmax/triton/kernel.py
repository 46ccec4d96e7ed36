# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows in Triton. A program has several narrow rows, or one row, which is read once or, if wide, twice."""

import torch
import triton
import triton.language as tl

from dsl_backend.rows import power_of_2
from dsl_backend.runtime.target import Target
from dsl_backend.softmax.spec import SoftmaxSpec

# The widest row that is read once: 64 elements for each thread of 8 warps.
MAX_ONE_PASS = 16 * 1024
TWO_PASS_BLOCK = 4 * 1024
MIN_ELEMENTS = 1024
ELEMENTS_PER_WARP = 1024


@triton.jit
def load_tile(row_ptr, column, width):
    """A tile [rows, columns] in float32; -inf past the row's end."""
    return tl.load(row_ptr[:, None] + column[None, :], mask=(column < width)[None, :], other=-float("inf")).to(
        tl.float32
    )


@triton.jit
def finite_or_zero(row_max):
    return tl.where(row_max == -float("inf"), 0.0, row_max)


@triton.jit
def result(x, row_max, row_sum, LOG: tl.constexpr):
    """Outputs of a tile [rows, columns] from row_max and row_sum [rows]; NaN where a row is all -inf."""
    if LOG:
        return (x - row_max[:, None]) - tl.log(row_sum)[:, None]
    else:
        return tl.exp(x - row_max[:, None]) / row_sum[:, None]


@triton.jit(do_not_specialize=["rows"])
def softmax_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    rows,
    width,
    LOG: tl.constexpr,
    TWO_PASS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    # Rows beyond the end read the last row.
    row_ptr = x_ptr + tl.minimum(row, rows - 1) * x_stride
    to_ptr = out_ptr + row * out_stride
    column = tl.arange(0, BLOCK)
    if TWO_PASS:
        row_max = tl.full((ROWS,), -float("inf"), tl.float32)
        row_sum = tl.zeros((ROWS,), tl.float32)
        for start in range(0, width, BLOCK):
            x = load_tile(row_ptr, start + column, width)
            new_max = tl.maximum(row_max, tl.max(x, 1))
            safe = finite_or_zero(new_max)
            row_sum = row_sum * tl.exp(row_max - safe) + tl.sum(tl.exp(x - safe[:, None]), 1)
            row_max = new_max
        for start in range(0, width, BLOCK):
            x = load_tile(row_ptr, start + column, width)
            y = result(x, row_max, row_sum, LOG).to(out_ptr.dtype.element_ty)
            mask = in_rows[:, None] & (start + column < width)[None, :]
            tl.store(to_ptr[:, None] + (start + column)[None, :], y, mask=mask)
    else:
        x = load_tile(row_ptr, column, width)
        row_max = tl.max(x, 1)
        row_sum = tl.sum(tl.exp(x - finite_or_zero(row_max)[:, None]), 1)
        y = result(x, row_max, row_sum, LOG).to(out_ptr.dtype.element_ty)
        tl.store(to_ptr[:, None] + column[None, :], y, mask=in_rows[:, None] & (column < width)[None, :])


def softmax(x: torch.Tensor, out: torch.Tensor, spec: SoftmaxSpec, target: Target) -> None:
    """Write out [rows, width] from x [rows, width]; rows may be 0."""
    rows, width = x.shape
    if rows == 0:
        return
    padded_width = power_of_2(width)
    two_pass = padded_width > MAX_ONE_PASS
    block = TWO_PASS_BLOCK if two_pass else padded_width
    rows_per_program = max(1, MIN_ELEMENTS // block)
    softmax_kernel[(-(-rows // rows_per_program),)](
        x,
        out,
        x.stride(0),
        out.stride(0),
        rows,
        width,
        LOG=spec.log,
        TWO_PASS=two_pass,
        ROWS=rows_per_program,
        BLOCK=block,
        num_warps=max(1, min(8, rows_per_program * block // ELEMENTS_PER_WARP)),
    )
