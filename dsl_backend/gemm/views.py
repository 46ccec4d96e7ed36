# SPDX-License-Identifier: Apache-2.0
"""How the kernels look at their operands."""

import cutlass
from cutlass import cute

NUMERIC = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


def parts_view(weight: cute.Tensor, parts: int, interleaved: bool) -> cute.Tensor:
    """Weights [parts * n, k] as [n, k, parts]: gate and up halves, or gate and up rows in turn."""
    n, k = weight.shape[0] // parts, weight.shape[1]
    stride = weight.stride[0]
    strides = (stride * parts, 1, stride) if interleaved else (stride, 1, n * stride)
    return cute.make_tensor(weight.iterator, cute.make_layout((n, k, parts), stride=strides))


@cute.jit
def bias_of(
    bias: cute.Tensor,
    column: cutlass.Int32,
    part: cutlass.Constexpr[int],
    n: cutlass.Int32,
    interleaved: cutlass.Constexpr[bool],
):
    """An output column's bias of its gate (0) or its up (1), float32; any value past the last column."""
    inside = cutlass.min(column, n - 1)
    place = inside * 2 + part if cutlass.const_expr(interleaved) else inside + part * n
    return bias[place].to(cutlass.Float32)
