# SPDX-License-Identifier: Apache-2.0
"""Causal attention in cuTile, whose compiler chooses copies, products and the roles of warps."""

import math
from functools import cache
from typing import NamedTuple

import cuda.tile as ct


class Tile(NamedTuple):
    """Queries and keys of a tile; the keys divide the queries. Warps that multiply it on SM90."""

    queries: int
    keys: int
    warps: int


# With the compiler's choice, 4 warps, the first one spills registers (tileiras 13.4.92).
TILES = (Tile(128, 128, 8), Tile(128, 64, 8), Tile(64, 64, 4))
# Scores are powers of 2.
LOG2_E = math.log2(math.e)


def causal(
    q,
    keys,
    values,
    out,
    factor: float,
    shared: ct.Constant[int],
    dim: ct.Constant[int],
    rows: ct.Constant[int],
    columns: ct.Constant[int],
):
    """All are [requests, tokens, heads, dim], whose tokens are a multiple of `rows`.

    Args:
        factor: of a score, with `LOG2_E`.
        shared: heads of q that share one of keys.
        rows, columns: those of `Tile`.
    """
    # The longest first.
    tile = ct.num_blocks(0) - 1 - ct.bid(0)
    head, request = ct.bid(1), ct.bid(2)
    query = ct.reshape(ct.load(q, (request, tile, head, 0), (1, rows, 1, dim)), (rows, dim))
    place = tile * rows + ct.arange(rows, dtype=ct.int32)[:, None]
    top = ct.full((rows, 1), -math.inf, ct.float32)
    total = ct.zeros((rows, 1), ct.float32)
    result = ct.zeros((rows, dim), ct.float32)
    whole = tile * rows // columns
    for step in range(whole + rows // columns):
        turned = ct.load(keys, (request, 0, head // shared, step), (1, dim, 1, columns), order=(0, 3, 2, 1))
        scores = ct.mma(query, ct.reshape(turned, (dim, columns)), ct.zeros((rows, columns), ct.float32)) * factor
        if step >= whole:
            column = step * columns + ct.arange(columns, dtype=ct.int32)[None, :]
            scores = ct.where(place >= column, scores, -math.inf)
        higher = ct.maximum(top, ct.max(scores, 1, keepdims=True))
        powers = ct.exp2(scores - higher)
        kept = ct.exp2(top - higher)
        total = total * kept + ct.sum(powers, 1, keepdims=True)
        value = ct.reshape(ct.load(values, (request, step, head // shared, 0), (1, columns, 1, dim)), (columns, dim))
        result = ct.mma(ct.astype(powers, value.dtype), value, result * kept)
        top = higher
    ct.store(out, (request, tile, head, 0), ct.reshape(ct.astype(result / total, out.dtype), (1, rows, 1, dim)))


@cache
def kernel(warps: int) -> ct.kernel:
    return ct.kernel(causal, num_worker_warps=ct.ByTarget(sm_90=warps))
