# SPDX-License-Identifier: Apache-2.0
"""Idle warps: in decode few of a tile's 128 query rows exist, so that most warps have no row that exists.

What such rows have in S, P and O is never used: a row of an MMA's result comes from that row of A alone, and none of
these is stored. Their warps skip the key tiles of a work tile. The threads of the first warp, which always has a row
that exists, arrive at the mbarriers for them.
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import WARP


@cute.jit
def arrive_count_of(work: WorkTile, thread: cutlass.Int32) -> cutlass.Int32:
    """How often a warpgroup's thread arrives at each mbarrier for a work tile: 0 if its warp is idle."""
    warp = cute.arch.make_warp_uniform(thread // WARP)
    active_warps = (work.num_rows + WARP - 1) // WARP
    arrive_count = cutlass.Int32(1) if warp < active_warps else cutlass.Int32(0)
    if warp == 0:
        arrive_count = WARPGROUP // WARP + 1 - active_warps
    return arrive_count


def arrive(mbar: cute.Pointer, arrive_count: cute.Tensor | None) -> None:
    """By a thread of a warpgroup. `arrive_count` has one element; None where no warp is ever idle."""
    cute.arch.mbarrier_arrive(mbar, arrive_count=1 if arrive_count is None else arrive_count[0])
