# SPDX-License-Identifier: Apache-2.0
"""Softmax of rows: several narrow ones a program, or one that is held, or one that is read twice in a loop."""

import torch
import triton
import triton.language as tl

from dsl_backend.runtime.target import Target
from dsl_backend.softmax.configs import power_of_2
from dsl_backend.softmax.spec import SoftmaxSpec

# Elements of a program: 8 warps hold 64 a thread.
MOST_HELD = 16 * 1024
LOOPED = 4 * 1024
FEW = 1024
ELEMENTS_PER_WARP = 1024


@triton.jit
def load_tile(row_ptr, column, width):
    """[rows, columns] float32; -inf past the row's end."""
    return tl.load(row_ptr[:, None] + column[None, :], mask=(column < width)[None, :], other=-float("inf")).to(
        tl.float32
    )


@triton.jit
def finite_or_zero(maximum):
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@triton.jit
def result(x, maximum, total, LOG: tl.constexpr):
    """Outputs of a tile [rows, columns] from its rows' states [rows]; all -inf gives NaN."""
    if LOG:
        return (x - maximum[:, None]) - tl.log(total)[:, None]
    else:
        return tl.exp(x - maximum[:, None]) / total[:, None]


@triton.jit
def softmax_kernel(
    x_ptr,
    out_ptr,
    x_stride,
    out_stride,
    rows,
    width,
    LOG: tl.constexpr,
    LOOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    # Rows that are not there follow the last one.
    row_ptr = x_ptr + tl.minimum(row, rows - 1) * x_stride
    to_ptr = out_ptr + row * out_stride
    column = tl.arange(0, BLOCK)
    if LOOP:
        maximum = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for start in range(0, width, BLOCK):
            x = load_tile(row_ptr, start + column, width)
            larger = tl.maximum(maximum, tl.max(x, 1))
            safe = finite_or_zero(larger)
            total = total * tl.exp(maximum - safe) + tl.sum(tl.exp(x - safe[:, None]), 1)
            maximum = larger
        for start in range(0, width, BLOCK):
            x = load_tile(row_ptr, start + column, width)
            y = result(x, maximum, total, LOG).to(out_ptr.dtype.element_ty)
            mask = in_rows[:, None] & (start + column < width)[None, :]
            tl.store(to_ptr[:, None] + (start + column)[None, :], y, mask=mask)
    else:
        x = load_tile(row_ptr, column, width)
        maximum = tl.max(x, 1)
        total = tl.sum(tl.exp(x - finite_or_zero(maximum)[:, None]), 1)
        y = result(x, maximum, total, LOG).to(out_ptr.dtype.element_ty)
        tl.store(to_ptr[:, None] + column[None, :], y, mask=in_rows[:, None] & (column < width)[None, :])


def softmax(x: torch.Tensor, out: torch.Tensor, spec: SoftmaxSpec, target: Target) -> None:
    """Out [rows, width] from x [rows, width]; any rows."""
    rows, width = x.shape
    if rows == 0:
        return
    held = power_of_2(width)
    loop = held > MOST_HELD
    block = LOOPED if loop else held
    rows_per_program = max(1, FEW // block)
    softmax_kernel[(-(-rows // rows_per_program),)](
        x,
        out,
        x.stride(0),
        out.stride(0),
        rows,
        width,
        LOG=spec.log,
        LOOP=loop,
        ROWS=rows_per_program,
        BLOCK=block,
        num_warps=max(1, min(8, rows_per_program * block // ELEMENTS_PER_WARP)),
    )
