# SPDX-License-Identifier: Apache-2.0
"""The arrays of mbarriers of a kernel: their stages, and the arrivals that complete a phase."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
from cutlass import cute


class MbarArray(NamedTuple):
    """An array of mbarriers: one for each stage, and the arrivals that complete a phase."""

    stages: int
    arrivals: int | cutlass.Int32


def allocate_mbarriers(
    allocator: cutlass.utils.SmemAllocator, arrays: Mapping[str, MbarArray]
) -> dict[str, cute.Pointer]:
    """Allocate the arrays in their order; the pointers by name."""
    return {name: allocator.allocate_array(cutlass.Int64, array.stages) for name, array in arrays.items()}


def init_mbarriers(barriers: Any, arrays: Mapping[str, MbarArray]) -> None:
    """Initialise all mbarriers. One thread calls it; a fence and a barrier of the CTA follow.

    Args:
        barriers: a named tuple of the arrays' pointers.
    """
    for name, (stages, arrivals) in arrays.items():
        for stage in range(stages):
            cute.arch.mbarrier_init(getattr(barriers, name) + stage, arrivals)
