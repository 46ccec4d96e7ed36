# SPDX-License-Identifier: Apache-2.0
"""Prefix sums over the lanes of a warp."""

import cutlass
from cutlass import cute


@cute.jit
def warp_inclusive_sum(value):
    """The sum of the values of lane 0 to this lane."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        value = value + below if lane >= (1 << step) else value
    return value
