# SPDX-License-Identifier: Apache-2.0
"""A linear layer in cuTile, whose compiler chooses copies, products and the roles of warps."""

from functools import cache
from typing import NamedTuple

import cuda.tile as ct

# Tiles of rows that share their weights in the L2 cache.
GROUP = 8


class Tile(NamedTuple):
    """Rows, columns (of each accumulator) and depth of a tile; warps that multiply it on SM90."""

    rows: int
    columns: int
    depth: int
    warps: int


# With the compiler's choice, 4 warps, the first two of each spill registers (tileiras 13.4.92).
PLAIN = (Tile(128, 256, 64, 8), Tile(256, 128, 64, 8), Tile(128, 128, 64, 4))
GATED = (Tile(128, 128, 64, 8), Tile(256, 64, 64, 8), Tile(128, 64, 64, 4))


def place(tile, rows, columns):
    """The tile's row and column: groups of `GROUP` tiles of rows, along the columns."""
    group = tile // (GROUP * columns)
    height = ct.minimum(rows - group * GROUP, GROUP)
    inside = tile % (GROUP * columns)
    return group * GROUP + inside % height, inside // height


def product(x, weight, out, rows: ct.Constant[int], columns: ct.Constant[int], depth: ct.Constant[int]):
    """Of x [m, k], weight [n, k] and out [m, n]; rows, columns, depth: of a `Tile`."""
    sizes = ct.num_tiles(out, 0, (rows, columns)), ct.num_tiles(out, 1, (rows, columns))
    row, column = place(ct.bid(0), sizes[0], sizes[1])
    zero = ct.PaddingMode.ZERO
    total = ct.zeros((rows, columns), ct.float32)
    for step in range(ct.num_tiles(x, 1, (rows, depth))):
        part = ct.load(x, (row, step), (rows, depth), padding_mode=zero)
        # The array is turned before it is cut into tiles.
        turned = ct.load(weight, (step, column), (depth, columns), order=(1, 0), padding_mode=zero)
        total = ct.mma(part, turned, total)
    ct.store(out, (row, column), ct.astype(total, out.dtype))


def swiglu(x, gate, up, out, rows: ct.Constant[int], columns: ct.Constant[int], depth: ct.Constant[int]):
    """Of x [m, k], gate and up [n, k] and out [m, n]; rows, columns, depth: of a `Tile`."""
    sizes = ct.num_tiles(out, 0, (rows, columns)), ct.num_tiles(out, 1, (rows, columns))
    row, column = place(ct.bid(0), sizes[0], sizes[1])
    zero = ct.PaddingMode.ZERO
    gates = ct.zeros((rows, columns), ct.float32)
    ups = ct.zeros((rows, columns), ct.float32)
    for step in range(ct.num_tiles(x, 1, (rows, depth))):
        part = ct.load(x, (row, step), (rows, depth), padding_mode=zero)
        turned = ct.load(gate, (step, column), (depth, columns), order=(1, 0), padding_mode=zero)
        gates = ct.mma(part, turned, gates)
        turned = ct.load(up, (step, column), (depth, columns), order=(1, 0), padding_mode=zero)
        ups = ct.mma(part, turned, ups)
    result = gates / (1 + ct.exp(-gates)) * ups
    ct.store(out, (row, column), ct.astype(result, out.dtype))


@cache
def kernel(gated: bool, warps: int) -> ct.kernel:
    return ct.kernel(swiglu if gated else product, num_worker_warps=ct.ByTarget(sm_90=warps))
