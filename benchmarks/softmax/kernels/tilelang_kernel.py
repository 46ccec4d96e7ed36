# SPDX-License-Identifier: Apache-2.0
"""Softmax in TileLang: a block has a row, which stays in registers."""

import tilelang
import tilelang.language as T  # noqa: N812 - its documentation's name


@tilelang.jit
def softmax(rows, width, dtype, out_dtype, log, threads):
    @T.prim_func
    def main(x: T.Tensor((rows, width), dtype), out: T.Tensor((rows, width), out_dtype)):
        with T.Kernel(rows, threads=threads) as row:
            values = T.alloc_fragment((1, width), "float32")
            powers = T.alloc_fragment((1, width), "float32")
            top = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(x[row, 0], values)
            T.reduce_max(values, top, dim=1)
            for _, column in T.Parallel(1, width):
                values[0, column] = values[0, column] - top[0]
                powers[0, column] = T.exp(values[0, column])
            T.reduce_sum(powers, total, dim=1)
            for _, column in T.Parallel(1, width):
                if log:
                    values[0, column] = values[0, column] - T.log(total[0])
                else:
                    values[0, column] = powers[0, column] / total[0]
            T.copy(values, out[row, 0])

    return main
