# SPDX-License-Identifier: Apache-2.0
"""Causal attention in TileLang, whose compiler chooses TMA, wgmma and the roles of warps."""

from typing import NamedTuple

import tilelang
import tilelang.language as T  # noqa: N812 - its documentation's name

# Scores are powers of 2.
LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """Queries and keys of a tile; steps in flight; threads that multiply."""

    queries: int
    keys: int
    stages: int
    threads: int


TILES = (Tile(128, 128, 2, 256), Tile(128, 128, 1, 256), Tile(128, 64, 2, 128))


@tilelang.jit
def causal(requests, tokens, heads, heads_kv, dim, scale, dtype, tile):
    """Of q, keys, values and out [requests, tokens, heads, dim]; tokens are a multiple of the tile's."""
    rows, columns, stages, threads = tile
    shape, shape_kv = (requests, tokens, heads, dim), (requests, tokens, heads_kv, dim)
    factor = scale * LOG2_E

    @T.prim_func
    def main(
        q: T.Tensor(shape, dtype),
        keys: T.Tensor(shape_kv, dtype),
        values: T.Tensor(shape_kv, dtype),
        out: T.Tensor(shape, dtype),
    ):
        with T.Kernel(tokens // rows, heads, requests, threads=threads) as (place, head, request):
            q_tile = T.alloc_shared((rows, dim), dtype)
            key_tile = T.alloc_shared((columns, dim), dtype)
            value_tile = T.alloc_shared((columns, dim), dtype)
            scores = T.alloc_fragment((rows, columns), "float32")
            weights = T.alloc_fragment((rows, columns), dtype)
            result = T.alloc_fragment((rows, dim), "float32")
            top = T.alloc_fragment((rows,), "float32")
            before = T.alloc_fragment((rows,), "float32")
            kept = T.alloc_fragment((rows,), "float32")
            part = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            # The longest first.
            first = (tokens // rows - 1 - place) * rows
            T.copy(q[request, first : first + rows, head, :], q_tile)
            T.fill(result, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            for step in T.Pipelined(T.ceildiv(first + rows, columns), num_stages=stages):
                at = step * columns
                T.copy(keys[request, at : at + columns, head // (heads // heads_kv), :], key_tile)
                for i, j in T.Parallel(rows, columns):
                    scores[i, j] = T.if_then_else(first + i >= at + j, 0, -T.infinity("float32"))
                T.gemm(q_tile, key_tile, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(top, before)
                T.reduce_max(scores, top, dim=1, clear=False)
                for i in T.Parallel(rows):
                    kept[i] = T.exp2((before[i] - top[i]) * factor)
                for i, j in T.Parallel(rows, columns):
                    scores[i, j] = T.exp2(scores[i, j] * factor - top[i] * factor)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * kept[i] + part[i]
                T.copy(scores, weights)
                for i, j in T.Parallel(rows, dim):
                    result[i, j] *= kept[i]
                T.copy(values[request, at : at + columns, head // (heads // heads_kv), :], value_tile)
                T.gemm(weights, value_tile, result, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(rows, dim):
                result[i, j] /= total[i]
            T.copy(result, q_tile)
            T.copy(q_tile, out[request, first : first + rows, head, :])

    return main
