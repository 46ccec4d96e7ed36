# SPDX-License-Identifier: Apache-2.0
"""The activation of a gate and up projection's output, and its quantisation: 16 bits are read once or twice.

An output whose rows have one scale each has a program for each row, which reads the row a second time from L2.
"""

import torch
import triton
import triton.language as tl

from dsl_backend.gemm.activation import Activation
from dsl_backend.gemm.triton.tiles import activated, kind_of
from dsl_backend.linear.scaled.triton.gemm import LARGEST, LEAST_GROUP, LEAST_ROW, as_bits
from dsl_backend.quant.format import GROUP, ScaledFormat
from dsl_backend.quant.triton.convert import quantize
from dsl_backend.quant.triton.scales import exponent_of, magnitude, scale_of
from dsl_backend.runtime.target import Target

# Columns of a row that a program takes at once, and those that share a scale.
BLOCK, OF_GROUP = tl.constexpr(1024), tl.constexpr(GROUP)
NONE, TENSOR, ROWS, GROUPS = (tl.constexpr(number) for number in range(4))


@triton.jit
def columns_of(row, column, n, INTERLEAVED: tl.constexpr, KIND: tl.constexpr, ALPHA, BETA, LIMIT):
    """The activation of some columns of a row, in float32; of those past the last any."""
    inside = column < n
    gate_at = 2 * column if INTERLEAVED else column
    gate = tl.load(row + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + (gate_at + 1 if INTERLEAVED else column + n), mask=inside, other=0.0).to(tl.float32)
    return activated(gate, up, KIND, ALPHA, BETA, LIMIT)


@triton.jit(do_not_specialize=["scale_column"])
def activated_kernel(
    both,
    out,
    scale,
    n,
    both_stride,
    scale_column,
    OUT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Grid (rows, blocks of columns); (rows, 1) for an output with a scale for each row."""
    row = tl.program_id(0).to(tl.int64)
    of_row, of_out = both + row * both_stride, out + row * n
    if OUT == ROWS:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, n, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = columns_of(of_row, column, n, INTERLEAVED, KIND, ALPHA, BETA, LIMIT)
            largest = tl.maximum(largest, magnitude(x, column < n))
        divisor = tl.maximum(tl.max(largest, 0), LEAST_ROW) / LARGEST
        tl.store(scale + row, divisor)
        for start in range(0, n, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = columns_of(of_row, column, n, INTERLEAVED, KIND, ALPHA, BETA, LIMIT)
            tl.store(of_out + column, quantize(x / divisor, out.dtype.element_ty, False), mask=column < n)
    else:
        block = tl.program_id(1)
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = columns_of(of_row, column, n, INTERLEAVED, KIND, ALPHA, BETA, LIMIT)
        if OUT == TENSOR:
            x = x / tl.load(scale)
        elif OUT == GROUPS:
            groups: tl.constexpr = BLOCK // OF_GROUP
            largest = tl.max(tl.reshape(magnitude(x, column < n), (groups, OF_GROUP)), 1)
            divisor = tl.maximum(largest, LEAST_GROUP) / LARGEST
            group = block * groups + tl.arange(0, groups)
            inside = group < tl.cdiv(n, OF_GROUP)
            if scale.dtype.element_ty == tl.uint8:
                byte = exponent_of(divisor)
                tl.store(scale + row + group * scale_column, byte, mask=inside)
                divisor = scale_of(byte)
            else:
                tl.store(scale + row + group * scale_column, divisor, mask=inside)
            x = tl.reshape(tl.reshape(x, (groups, OF_GROUP)) / divisor[:, None], (BLOCK,))
        tl.store(of_out + column, quantize(x, out.dtype.element_ty, False), mask=column < n)


def launch(
    both: torch.Tensor,
    activation: Activation,
    interleaved: bool,
    kind: ScaledFormat | None,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    target: Target,
) -> None:
    """Writes out [rows, n] and a computed scale. At least one row."""
    rows, n = out.shape
    written = NONE
    if kind is not None:
        written = GROUPS if kind.blocked else (TENSOR if kind.block_rows is None else ROWS)
    of_kind, alpha, beta, limit = kind_of(activation)
    scales = out if scale is None else as_bits(scale, target)
    activated_kernel[(rows, 1 if written.value == ROWS.value else triton.cdiv(n, BLOCK.value))](
        both,
        as_bits(out, target),
        scales,
        n,
        both.stride(0),
        scale.stride(1) if scale is not None and scale.dim() == 2 else 0,
        OUT=written.value,
        INTERLEAVED=interleaved,
        KIND=of_kind,
        ALPHA=alpha,
        BETA=beta,
        LIMIT=limit,
        num_warps=8 if written.value == ROWS.value else 4,
    )
