# SPDX-License-Identifier: Apache-2.0
"""A linear layer in TileLang, whose compiler chooses TMA, wgmma and the roles of warps."""

from typing import NamedTuple

import tilelang
import tilelang.language as T  # noqa: N812 - its documentation's name


class Tile(NamedTuple):
    """Rows, columns (of each accumulator) and depth of a tile; steps in flight; threads that multiply."""

    rows: int
    columns: int
    depth: int
    stages: int
    threads: int


PLAIN = (Tile(128, 256, 64, 3, 256), Tile(128, 256, 64, 2, 256), Tile(128, 128, 64, 4, 256), Tile(128, 128, 64, 3, 128))
GATED = (Tile(128, 128, 64, 3, 256), Tile(128, 128, 64, 2, 256), Tile(128, 64, 64, 4, 128))
# Tiles of rows that share their weights in the L2 cache.
GROUP = 8


@tilelang.jit
def product(m, n, k, dtype, tile):
    rows, columns, depth, stages, threads = tile

    @T.prim_func
    def main(x: T.Tensor((m, k), dtype), weight: T.Tensor((n, k), dtype), out: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, columns), T.ceildiv(m, rows), threads=threads) as (column, row):
            x_tile = T.alloc_shared((rows, depth), dtype)
            weight_tile = T.alloc_shared((columns, depth), dtype)
            staged = T.alloc_shared((rows, columns), dtype)
            total = T.alloc_fragment((rows, columns), "float32")
            T.use_swizzle(GROUP)
            T.clear(total)
            for step in T.Pipelined(T.ceildiv(k, depth), num_stages=stages):
                T.copy(x[row * rows, step * depth], x_tile)
                T.copy(weight[column * columns, step * depth], weight_tile)
                T.gemm(x_tile, weight_tile, total, transpose_B=True)
            T.copy(total, staged)
            T.copy(staged, out[row * rows, column * columns])

    return main


@tilelang.jit
def swiglu(m, n, k, dtype, tile):
    rows, columns, depth, stages, threads = tile

    @T.prim_func
    def main(x: T.Tensor((m, k), dtype), weight: T.Tensor((2 * n, k), dtype), out: T.Tensor((m, n), dtype)):
        with T.Kernel(T.ceildiv(n, columns), T.ceildiv(m, rows), threads=threads) as (column, row):
            x_tile = T.alloc_shared((rows, depth), dtype)
            gate_tile = T.alloc_shared((columns, depth), dtype)
            up_tile = T.alloc_shared((columns, depth), dtype)
            staged = T.alloc_shared((rows, columns), dtype)
            gates = T.alloc_fragment((rows, columns), "float32")
            ups = T.alloc_fragment((rows, columns), "float32")
            T.use_swizzle(GROUP)
            T.clear(gates)
            T.clear(ups)
            for step in T.Pipelined(T.ceildiv(k, depth), num_stages=stages):
                T.copy(x[row * rows, step * depth], x_tile)
                T.copy(weight[column * columns, step * depth], gate_tile)
                T.copy(weight[n + column * columns, step * depth], up_tile)
                T.gemm(x_tile, gate_tile, gates, transpose_B=True)
                T.gemm(x_tile, up_tile, ups, transpose_B=True)
            for i, j in T.Parallel(rows, columns):
                gates[i, j] = gates[i, j] / (1 + T.exp(-gates[i, j])) * ups[i, j]
            T.copy(gates, staged)
            T.copy(staged, out[row * rows, column * columns])

    return main
