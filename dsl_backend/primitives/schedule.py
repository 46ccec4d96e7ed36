# SPDX-License-Identifier: Apache-2.0
"""Rasterisation of output tiles for L2 reuse, and even contiguous shares of a list, as in stream-K."""

import cutlass
from cutlass import cute


@cute.jit
def raster(tile_idx: cutlass.Int32, height: cutlass.Int32, width: cutlass.Int32, band: cutlass.Constexpr[int]):
    """(row, column) of a tile: bands of `band` rows follow one another, within a band columns do."""
    first = tile_idx // (band * width) * band
    rows = cutlass.min(height - first, band)
    within = tile_idx % (band * width)
    return first + within % rows, within // rows


@cute.jit
def share(total: cutlass.Int32, workers: cutlass.Int32, worker: cutlass.Int32):
    """First item of a worker's even share. Shares differ by one item at most, and the longer ones come first."""
    return worker * (total // workers) + cutlass.min(worker, total % workers)


@cute.jit
def owner(total: cutlass.Int32, workers: cutlass.Int32, item: cutlass.Int32):
    """The worker whose share holds an item; `total` is at least `workers`."""
    least, longer = total // workers, total % workers
    return cutlass.max(item // (least + 1), (item - longer) // least)
