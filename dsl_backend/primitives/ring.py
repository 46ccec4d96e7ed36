# SPDX-License-Identifier: Apache-2.0
"""Stage and phase of a position in a ring of stages; positions count from 0."""

import cutlass


def stage_of(position, stages: int):
    """Of a position from 0 on. Unsigned, since a signed remainder of a power of two is ten instructions, not one."""
    return cutlass.Int32(cutlass.Uint32(position) % stages)


def phase_of(position, stages: int):
    """The parity of the round of a position."""
    return cutlass.Int32(cutlass.Uint32(position) // stages & 1)
