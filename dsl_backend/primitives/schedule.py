# SPDX-License-Identifier: Apache-2.0
"""Which work is whose: tiles of a matrix in an order that the L2 cache likes, and equal shares of a list."""

import cutlass
from cutlass import cute


@cute.jit
def raster(
    place: cutlass.Int32,
    height: cutlass.Int32,
    width: cutlass.Int32,
    band: cutlass.Constexpr[int],
    serpentine: cutlass.Constexpr[bool] = False,
):
    """(row, column) of a tile: bands of `band` rows one after the other, within a band column by column.

    Args:
        serpentine: every other band begins with the last column, which the band before it ended with.
    """
    bands = place // (band * width)
    first = bands * band
    rows = cutlass.min(height - first, band)
    within = place % (band * width)
    column = within // rows
    if cutlass.const_expr(serpentine):
        column = width - 1 - column if bands % 2 == 1 else column
    return first + within % rows, column


@cute.jit
def share(total: cutlass.Int32, workers: cutlass.Int32, worker: cutlass.Int32):
    """The first item of a worker's share: shares differ by one item at most, the longer ones come first."""
    return worker * (total // workers) + cutlass.min(worker, total % workers)
