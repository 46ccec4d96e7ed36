# SPDX-License-Identifier: Apache-2.0
"""The arrays of mbarriers of a kernel: their stages, and the arrivals that complete a phase."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.primitives.moved import SmemAllocator

# Arrivals of a role. TMA arrives once, with its bytes, and tcgen05.commit (UMMA) once, when all MMAs so far are done;
# warps arrive once each.
TMA = UMMA = LOAD_WARPS = MMA_WARPS = SCHEDULER_WARPS = 1
WARPS_PER_WARPGROUP = WARPGROUP // 32


class MbarArray(NamedTuple):
    """An array of mbarriers: one for each stage, and the arrivals that complete a phase."""

    stages: int
    arrivals: int | cutlass.Int32


def dequant_mbar_arrays(tensors: str, stages: int, consumer: int) -> dict[str, MbarArray]:
    """Full and empty of fp8 stages, for each letter of `tensors`; consumer: arrivals of the warps that empty them."""
    arrays = {}
    for tensor in tensors:
        arrays[f"{tensor}_loaded"] = MbarArray(stages, TMA)
        arrays[f"{tensor}_taken"] = MbarArray(stages, consumer)
    return arrays


def allocate_mbarriers(allocator: SmemAllocator, arrays: Mapping[str, MbarArray]) -> dict[str, cute.Pointer]:
    """Allocate the arrays in their order; the pointers by name."""
    return {name: allocator.allocate_array(cutlass.Int64, array.stages) for name, array in arrays.items()}


@cute.jit
def arrive_warp(mbar: cute.Pointer, num_ctas: cutlass.Constexpr[int] = 1):
    """Arrive, once for the warp, at the mbarrier of each CTA of the cluster."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if cutlass.const_expr(num_ctas == 1):
            cute.arch.mbarrier_arrive(mbar)
        else:
            for cta_rank in cutlass.range_constexpr(num_ctas):
                cute.arch.mbarrier_arrive(mbar, cta_rank)


def init_mbarriers(barriers: Any, arrays: Mapping[str, MbarArray]) -> None:
    """Initialise all mbarriers. One thread calls it; a fence and a barrier of the CTA follow.

    Args:
        barriers: a named tuple of the arrays' pointers.
    """
    for name, (stages, arrivals) in arrays.items():
        for stage in range(stages):
            cute.arch.mbarrier_init(getattr(barriers, name) + stage, arrivals)
