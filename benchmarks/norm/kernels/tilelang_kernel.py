# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in TileLang: a block has a row, which stays in registers."""

import tilelang
import tilelang.language as T  # noqa: N812 - its documentation's name


@tilelang.jit
def rms_norm(rows, width, dtype, eps, threads):
    @T.prim_func
    def main(x: T.Tensor((rows, width), dtype), weight: T.Tensor((width,), dtype), out: T.Tensor((rows, width), dtype)):
        with T.Kernel(rows, threads=threads) as row:
            values = T.alloc_fragment((1, width), "float32")
            squares = T.alloc_fragment((1, width), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(x[row, 0], values)
            for _, column in T.Parallel(1, width):
                squares[0, column] = values[0, column] * values[0, column]
            T.reduce_sum(squares, total, dim=1)
            for _, column in T.Parallel(1, width):
                values[0, column] = values[0, column] * T.rsqrt(total[0] / width + eps) * weight[column]
            T.copy(values, out[row, 0])

    return main


@tilelang.jit
def rms_norm_of_sum(rows, width, dtype, eps, threads):
    @T.prim_func
    def main(
        x: T.Tensor((rows, width), dtype),
        residual: T.Tensor((rows, width), dtype),
        weight: T.Tensor((width,), dtype),
        out: T.Tensor((rows, width), dtype),
        residual_out: T.Tensor((rows, width), dtype),
    ):
        with T.Kernel(rows, threads=threads) as row:
            rounded = T.alloc_fragment((1, width), dtype)
            values = T.alloc_fragment((1, width), "float32")
            squares = T.alloc_fragment((1, width), "float32")
            total = T.alloc_fragment((1,), "float32")
            for _, column in T.Parallel(1, width):
                rounded[0, column] = T.cast(x[row, column], "float32") + T.cast(residual[row, column], "float32")
                values[0, column] = rounded[0, column]
                squares[0, column] = values[0, column] * values[0, column]
            T.copy(rounded, residual_out[row, 0])
            T.reduce_sum(squares, total, dim=1)
            for _, column in T.Parallel(1, width):
                values[0, column] = values[0, column] * T.rsqrt(total[0] / width + eps) * weight[column]
            T.copy(values, out[row, 0])

    return main
