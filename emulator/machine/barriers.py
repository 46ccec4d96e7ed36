# SPDX-License-Identifier: Apache-2.0
"""Barriers: mbarriers in shared memory (PTX ISA, section Parallel Synchronization: mbarrier) and named ones."""

from dataclasses import dataclass, field

import numpy as np

from emulator.machine.clocks import Clock, Components, Knowledge, Source, Vector
from emulator.machine.phase_order import PhaseOrder

MAX_COUNT = (1 << 20) - 1  # of arrivals and, in absolute value, of outstanding bytes


class BarrierMisuse(Exception):
    """An operation that a barrier's state does not allow; the message says which state."""


@dataclass
class MBarrier:
    """An mbarrier object.

    Attributes:
        expected: arrivals that complete a phase.
        pending: arrivals still missing in the current phase.
        bytes: of asynchronous work announced by expect_tx and not yet completed; negative while work completes first.
        phase: number of the current phase, from 1; phase p - 1 and all before it are complete.
        component: whose clock is the phase that completes an asynchronous access.
        made: stamp of the initialisation.
        announced: fence.mbarrier_init followed that.
        bytes_in: the latest phase in which bytes were completed.
        order: which waits its phases come after.
        bytes_by: the one warp whose instructions completed all of those; None: asynchronous work, or several warps.
    """

    name: str
    components: Components
    expected: int
    pending: int = 0
    bytes: int = 0
    phase: int = 1
    component: int = field(init=False)
    order: PhaseOrder = field(init=False)
    made: tuple[int, int] = (0, 0)
    announced: bool = False
    bytes_in: int = 0
    bytes_by: object = None

    def __post_init__(self) -> None:
        if not 1 <= self.expected <= MAX_COUNT:
            raise BarrierMisuse(f"{self.name} initialised for {self.expected} arrivals: 1 to {MAX_COUNT} are possible")
        self.pending = self.expected
        self.component = self.components.new(Source.MBARRIER, self.name)
        self.order = PhaseOrder(self.name, self.components, self.component)
        self._gathering = Knowledge.none(self.components)
        self.released = Knowledge.none(self.components)

    def __str__(self) -> str:
        missing = f"{self.pending} of {self.expected} arrivals and {self.bytes} bytes"
        return f"{self.name}: phase {self.phase}, {missing} missing"

    def expect(self, count: int) -> None:
        """expect_tx: announce bytes of asynchronous work."""
        self.bytes += count
        if abs(self.bytes) > MAX_COUNT:
            raise BarrierMisuse(f"{self}: a transaction count is at most {MAX_COUNT}")

    def arrive(self, clock: Clock | None, after: Vector, count: int = 1, *, engine: bool = False) -> int:
        """Arrive `count` times; returns the phase that was arrived at.

        Args:
            clock: what it knows is released; None for an arrival that releases nothing.
            after: the history of who arrives, or of who issued what an engine arrives for.
            engine: it is an engine's arrival, some time behind `after`.
        """
        if not 1 <= count <= self.pending:
            raise BarrierMisuse(f"{self}: {count} more arrivals")
        self.order.arrive(after, engine=engine)
        if clock is not None:
            clock.release(self._gathering)
        phase = self.phase
        self.pending -= count
        self._complete()
        return phase

    def learn(self, component: int, clock: int, *, generic: bool = False) -> None:
        """Whoever waits for the current phase knows of a component's events up to that clock: tcgen05.commit."""
        self._gathering.learn(component, clock, generic=generic)

    def hand(self, knowledge: Knowledge) -> None:
        """Whoever waits for the current phase knows what an asynchronous arrival comes after."""
        self._gathering.join(knowledge)

    def complete_bytes(self, count: int, after: Vector, by: object = None) -> int:
        """complete_tx: asynchronous work of `count` bytes is done; returns the phase that it belongs to.

        Args:
            after: the history of who issued the work, or of the warp that says so.
            by: the warp whose instruction says so; None for an engine, some time behind `after`.
        """
        phase = self.phase
        self.order.arrive(after, engine=by is None)
        self.bytes_by = by if self.bytes_in < phase or self.bytes_by is by else None
        self.bytes_in = phase
        self.bytes -= count
        if abs(self.bytes) > MAX_COUNT:
            raise BarrierMisuse(f"{self}: a transaction count is at most {MAX_COUNT}")
        self._complete()
        return phase

    def _complete(self) -> None:
        if self.pending or self.bytes:
            return
        self.released.join(self._gathering)
        self.released.learn(self.component, self.phase)
        self.order.complete(self.phase)
        self.phase += 1
        self.pending = self.expected

    def is_complete(self, parity: int) -> bool:
        """Whether the phase of that parity, the current or the one before it, is complete."""
        return (self.phase - 1) & 1 != parity & 1

    def is_known(self, knows: Knowledge, who: object) -> bool:
        """Whether a warp that knows so much can tell that the latest phase is complete: by its parts, or by a wait."""
        if knows.seen[self.component] >= self.phase - 1:
            return True
        unknown = self.released.seen > knows.seen
        unknown[self.component] = False
        return (self.bytes_in < self.phase - 1 or self.bytes_by is who) and not unknown.any()

    @property
    def is_idle(self) -> bool:
        """Nobody has arrived in the current phase and no bytes are outstanding."""
        return self.pending == self.expected and self.bytes == 0


@dataclass
class NamedBarrier:
    """A barrier of a CTA's numbered set, or a cluster's barrier.

    Attributes:
        threads: that take part in the current round; 0 until the first arrives.
        arrived: threads that have.
        round: completed so far.
        everyone: of the current round: all threads that have not ended take part, however many that will be.
    """

    name: str
    components: Components
    threads: int = 0
    arrived: int = 0
    round: int = 0
    everyone: bool = False

    def __post_init__(self) -> None:
        self._gathering = Knowledge.none(self.components)
        self.released = Knowledge.none(self.components)
        self._gathered = self.history = self.components.zeros()

    def __str__(self) -> str:
        return f"{self.name}: round {self.round}, {self.arrived} of {self.threads or '?'} threads arrived"

    def arrive(self, clock: Clock | None, threads: int, of: int, *, everyone: bool = False) -> int:
        """`threads` threads of `of` arrive; returns the round that completes when all have.

        Args:
            clock: what it knows is released; None for an arrival that releases nothing.
            everyone: `of` are all threads that there are: fewer once some have ended.
        """
        if self.threads == 0:
            self.threads, self.everyone = of, everyone
        if of != self.threads and not self.everyone:
            raise BarrierMisuse(f"{self}: a warp arrives for {of} threads")
        if self.arrived + threads > self.threads:
            raise BarrierMisuse(f"{self}: {threads} more threads arrive")
        if clock is not None:
            clock.release(self._gathering)
        self.arrived += threads
        target = self.round + 1
        self._complete()
        return target

    def follow(self, history: Vector) -> None:
        """The current round ends after that."""
        self._gathered = np.maximum(self._gathered, history)

    def hand(self, knowledge: Knowledge) -> None:
        """Release what was known at a fence: a relaxed arrival behind it."""
        self._gathering.join(knowledge)

    def leave(self, threads: int = 32) -> None:
        """Threads have ended that a barrier for everyone may wait for."""
        if self.everyone and self.threads:
            self.threads -= threads
            self._complete()

    def _complete(self) -> None:
        if self.threads and self.arrived >= self.threads:
            self.released, self.history = self._gathering, self._gathered
            self._gathering = Knowledge.none(self.components)
            self.round, self.threads, self.arrived = self.round + 1, 0, 0
