# SPDX-License-Identifier: Apache-2.0
"""A ring of shared-memory stages between a producer that copies and consumers that compute.

Everybody counts positions from 0 and finds stage and phase from them, so that who skips positions, or comes back to the
loop for another tile, carries nothing but a number.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute


def stage_of(position, stages: int):
    """Of a position from 0 on. Unsigned, since a signed remainder of a power of two is ten instructions, not one."""
    return cutlass.Int32(cutlass.Uint32(position) % stages)


def phase_of(position, stages: int):
    """The parity of the round of a position."""
    return cutlass.Int32(cutlass.Uint32(position) // stages & 1)


@dataclass(frozen=True)
class Ring:
    """Barriers of the ring: `full` counts a producer and its bytes, `empty` the consumers of every block it writes to.

    Attributes:
        full, empty: mbarriers in shared memory, one for each stage.
        consumers: arrivals that make a stage empty.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: cutlass.Constexpr[int]
    consumers: cutlass.Constexpr[int]

    def open(self):
        """Initialise the barriers: one thread, with a fence and a barrier of all who use them behind it."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, self.consumers)

    def stage(self, position):
        return stage_of(position, self.stages)

    def phase(self, position):
        return phase_of(position, self.stages)

    def acquire(self, position, size: int):
        """The producer's warp: wait until the stage is empty, expect so many bytes, and return what counts them."""
        stage = self.stage(position)
        cute.arch.mbarrier_wait(self.empty + stage, self.phase(position) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, size)
        return self.full + stage

    def wait(self, position):
        """A consumer: wait until the stage is full."""
        cute.arch.mbarrier_wait(self.full + self.stage(position), self.phase(position))

    @cute.jit
    def release(self, position: cutlass.Int32, thread: cutlass.Int32, blocks: cutlass.Constexpr[int]):
        """A consumer group: its first threads tell a producer each, in every block of the cluster, that it is done."""
        if thread < blocks:
            if cutlass.const_expr(blocks == 1):
                cute.arch.mbarrier_arrive(self.empty + self.stage(position))
            else:
                cute.arch.mbarrier_arrive(self.empty + self.stage(position), thread)
