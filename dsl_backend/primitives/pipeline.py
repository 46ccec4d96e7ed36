# SPDX-License-Identifier: Apache-2.0
"""Pipelines between warps: a producer fills stages of memory, consumers empty them, mbarriers tell each other.

Both sides count positions from 0 and derive stage and phase from them. A role that skips positions, or continues with
another tile, carries one number.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.ring import phase_of, stage_of


@dataclass(frozen=True)
class Role:
    """The warps or threads that arrive at an mbarrier.

    Attributes:
        arrivals: of each CTA.
        ctas: of the cluster, whose roles all arrive.
        generic: a producer that writes shared memory by the generic proxy, at least in part.
    """

    arrivals: int
    ctas: int = 1
    generic: bool = False

    @property
    def count(self) -> int:
        """Arrivals that complete a phase."""
        return self.arrivals * self.ctas


# One thread expects the bytes of the copies, which arrive with them.
TMA = Role(1)
# tcgen05.commit arrives once for all products before it.
UMMA = Role(1)


def cp_async(threads: int) -> Role:
    """Each thread arrives once its copies are there; one more expects the bytes of TMA copies."""
    return Role(threads + 1, generic=True)


def warps(count: int, ctas: int = 1) -> Role:
    """One lane of each warp arrives, at one CTA's barrier, or one lane for each CTA of the cluster."""
    return Role(count, ctas)


def warpgroups(count: int, ctas: int = 1) -> Role:
    """One thread of each warpgroup arrives at the barrier of each CTA of the cluster."""
    return Role(count, ctas)


@dataclass(frozen=True)
class Edge:
    """What connects a producer with its consumers; barriers' arrival counts follow from it."""

    name: str
    producer: Role
    consumers: Role
    stages: int

    def allocate(self, smem: SmemAllocator) -> "Pipeline":
        """The pipeline, with its barriers in shared memory."""
        mbar_full = smem.allocate_array(cutlass.Int64, self.stages)
        mbar_empty = smem.allocate_array(cutlass.Int64, self.stages)
        return Pipeline(mbar_full, mbar_empty, self)


@dataclass(frozen=True)
class Pipeline:
    """An edge's barriers.

    Attributes:
        mbar_full, mbar_empty: mbarriers in shared memory, one for each stage.
    """

    mbar_full: cute.Pointer
    mbar_empty: cute.Pointer
    edge: cutlass.Constexpr[Edge]

    def init(self):
        """Initialise the barriers: by one thread, with a fence and a barrier of all who use them after it."""
        for stage in range(self.edge.stages):
            cute.arch.mbarrier_init(self.mbar_full + stage, self.edge.producer.count)
            cute.arch.mbarrier_init(self.mbar_empty + stage, self.edge.consumers.count)

    def stage(self, position):
        return stage_of(position, self.edge.stages)

    def phase(self, position):
        return phase_of(position, self.edge.stages)

    def full(self, position) -> cute.Pointer:
        """The barrier that a position's data arrive at."""
        return self.mbar_full + self.stage(position)

    def empty(self, position) -> cute.Pointer:
        """The barrier that a position's consumers arrive at."""
        return self.mbar_empty + self.stage(position)

    def producer_acquire(self, position):
        """Wait until the position's stage is empty."""
        cute.arch.mbarrier_wait(self.empty(position), self.phase(position) ^ 1)

    def producer_expect(self, position, tx_bytes):
        """By one warp: the position's data are so many bytes of TMA copies."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(position), tx_bytes)

    def consumer_wait(self, position):
        """Wait until the position's data are there, for matrix products too."""
        cute.arch.mbarrier_wait(self.full(position), self.phase(position))
        if self.edge.producer.generic:
            cute.arch.fence_proxy("async.shared", space="cta")

    def warp_release(self, position: cutlass.Int32, lane: cutlass.Int32):
        """By each warp of the consumers: its first lanes tell the producers."""
        self.warpgroup_release(position, lane)

    @cute.jit
    def warpgroup_release(self, position: cutlass.Int32, thread: cutlass.Int32):
        """By a consumer warpgroup: its first threads each tell the producer of one CTA that the stage is empty."""
        ctas = cutlass.const_expr(self.edge.consumers.ctas)
        if thread < ctas:
            if cutlass.const_expr(ctas == 1):
                cute.arch.mbarrier_arrive(self.empty(position))
            else:
                cute.arch.mbarrier_arrive(self.empty(position), thread)
