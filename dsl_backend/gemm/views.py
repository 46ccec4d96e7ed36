# SPDX-License-Identifier: Apache-2.0
"""How the kernels look at their operands."""

import cutlass
import torch
from cutlass import cute

# e4m3 and pairs of e2m1 go through copies as bytes.
NUMERIC = {
    torch.float32: cutlass.Float32,
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float8_e4m3fn: cutlass.Uint8,
    torch.uint8: cutlass.Uint8,
}


def parts_view(weight: cute.Tensor, parts: int, interleaved: bool) -> cute.Tensor:
    """Weights [parts * n, k] as [n, k, parts]: gate and up halves, or alternating gate and up rows."""
    n, k = weight.shape[0] // parts, weight.shape[1]
    stride = weight.stride[0]
    strides = (stride * parts, 1, stride) if interleaved else (stride, 1, n * stride)
    return cute.make_tensor(weight.iterator, cute.make_layout((n, k, parts), stride=strides))


def expert_parts_view(weight: cute.Tensor, parts: int, interleaved: bool) -> cute.Tensor:
    """Experts' weights [E, parts * n, k] as [n, k, parts, E]."""
    experts, rows, k = weight.shape
    of_one = cute.make_tensor(weight.iterator, cute.make_layout((rows, k), stride=weight.stride[1:]))
    view = parts_view(of_one, parts, interleaved)
    layout = cute.make_layout((*view.shape, experts), stride=(*view.stride, weight.stride[0]))
    return cute.make_tensor(weight.iterator, layout)


def slices_view(weight: cute.Tensor, n, k, parts: int) -> cute.Tensor:
    """Weights [parts * slices * n, k], all rows of a part side by side, as [n, k, parts, slices]."""
    slices, row = weight.shape[0] // (parts * n), weight.stride[0]
    layout = cute.make_layout((n, k, parts, slices), stride=(row, 1, slices * n * row, n * row))
    return cute.make_tensor(weight.iterator, layout)


def column_slices_view(weight: cute.Tensor, k) -> cute.Tensor:
    """Weights [n, slices * k] as [n, k, 1, slices]."""
    n, row = weight.shape[0], weight.stride[0]
    layout = cute.make_layout((n, k, 1, weight.shape[1] // k), stride=(row, 1, row, k))
    return cute.make_tensor(weight.iterator, layout)


@cute.jit
def bias_of(
    mBias: cute.Tensor,
    column: cutlass.Int32,
    part: cutlass.Constexpr[int],
    n: cutlass.Int32,
    interleaved: cutlass.Constexpr[bool],
):
    """The bias of an output column, of its gate (part 0) or its up (1), float32; any value past the last column."""
    inside = cutlass.min(column, n - 1)
    index = inside * 2 + part if cutlass.const_expr(interleaved) else inside + part * n
    return mBias[index].to(cutlass.Float32)
