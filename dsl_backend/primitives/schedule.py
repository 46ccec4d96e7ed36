# SPDX-License-Identifier: Apache-2.0
"""Which work is whose: tiles of a matrix in an order that the L2 cache likes, and equal shares of a list."""

import cutlass
from cutlass import cute


@cute.jit
def raster(place: cutlass.Int32, height: cutlass.Int32, width: cutlass.Int32, band: cutlass.Constexpr[int]):
    """(row, column) of a tile: bands of `band` rows one after the other, within a band column by column."""
    first = place // (band * width) * band
    rows = cutlass.min(height - first, band)
    within = place % (band * width)
    return first + within % rows, within // rows


@cute.jit
def share(total: cutlass.Int32, workers: cutlass.Int32, worker: cutlass.Int32):
    """The first item of a worker's share: shares differ by one item at most, the longer ones come first."""
    return worker * (total // workers) + cutlass.min(worker, total % workers)


@cute.jit
def owner(total: cutlass.Int32, workers: cutlass.Int32, item: cutlass.Int32):
    """The worker whose share has an item; there are at least as many items as workers."""
    least, longer = total // workers, total % workers
    return cutlass.max(item // (least + 1), (item - longer) // least)
