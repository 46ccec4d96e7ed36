# SPDX-License-Identifier: Apache-2.0
"""Warps that rest: in a tile of 128 query rows of which few are there, as in decode, most warps' rows are nobody's.

What scores, weights and sums such rows have is of no interest: a row of a product comes from that row alone, and none
of these is stored. Their warps pass over an item's tiles. The threads of the first warp, which always has a row that is
there, arrive for them.
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sizes import WARPGROUP

WARP = 32


@cute.jit
def arrivals_of(work: WorkTile, thread: cutlass.Int32) -> cutlass.Int32:
    """How often a warpgroup's thread arrives wherever it does for an item: 0 if its warp rests."""
    warp = cute.arch.make_warp_uniform(thread // WARP)
    awake = (work.num_rows + WARP - 1) // WARP
    arrivals = cutlass.Int32(1) if warp < awake else cutlass.Int32(0)
    if warp == 0:
        arrivals = WARPGROUP // WARP + 1 - awake
    return arrivals


def arrive(barrier: cute.Pointer, arrivals: cute.Tensor | None) -> None:
    """By a thread of a warpgroup; arrivals: as often as [0] says, once where no warp rests."""
    cute.arch.mbarrier_arrive(barrier, arrive_count=1 if arrivals is None else arrivals[0])
