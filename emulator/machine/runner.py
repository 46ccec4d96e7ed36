# SPDX-License-Identifier: Apache-2.0
"""A warp of a CTA: runs from trap to trap, and executes what the interpreter hands over."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emulator.core.warp import Fault, FaultKind, Kind, Warp
from emulator.machine import findings
from emulator.machine.barriers import BarrierMisuse
from emulator.machine.clocks import Clock, Knowledge, Source
from emulator.machine.findings import Finding, Place
from emulator.machine.memory import MemoryFault
from emulator.ptx.ir import Instr

if TYPE_CHECKING:
    from emulator.machine.cluster import Cta
    from emulator.machine.launch import Run
    from emulator.machine.loads import Loads
    from emulator.machine.recording import Trace

TURN = 4096  # instructions that a warp runs before others get their turn
# Turns of all warps in which nothing changed, after which a kernel is stuck in a loop.
PATIENCE = 2000


KINDS = {
    FaultKind.UNWRITTEN: findings.Kind.UNINITIALISED,
    FaultKind.BUSY: findings.Kind.MATRIX_ORDER,
    FaultKind.MEMBERS: findings.Kind.ALIGNED,
    FaultKind.DIVISION: findings.Kind.DIVISION,
}


class Abort(Exception):
    """The launch cannot continue: the finding says why."""


@dataclass(frozen=True)
class Wait:
    """What a warp waits for.

    Attributes:
        what: for the report of a deadlock.
        then: what is left of the instruction once it is ready.
        expire: what happens instead when time is up; without it the wait has no limit.
    """

    what: str
    ready: Callable[[], bool]
    then: Callable[[], None] = field(default=lambda: None)
    expire: Callable[[], None] | None = None


# Executes an instruction for the lanes of the runner's event, or says what it waits for.
Handler: TypeAlias = "Callable[[Runner, Instr], Wait | None]"


class Runner:
    """A warp with its place, its clock and what it waits for.

    Attributes:
        number: in its CTA.
        mask: lanes that the current instruction executes for.
        index: of that instruction.
        groups: asynchronous groups: committed so far and open, by source; see `component`.
        fence: what was known at the last fence: a relaxed store behind it releases that.
        unfenced: what relaxed loads have seen of flags, and relaxed waits of mbarriers: a fence behind acquires that.
        state: whatever a family of instructions keeps for this warp.
        at_end: checks once all lanes have ended.
        loads: that an arrival may overtake; None before the first.
        on_busy: reports the use of a register that asynchronous work has; None for wgmma's.
        trace: keeps what the warp does; None where nobody asks for it.
    """

    def __init__(self, run: "Run", cta: "Cta", number: int, warp: Warp) -> None:
        self.run = run
        self.cta = cta
        self.number = number
        self.warp = warp
        components = cta.cluster.components
        self.name = f"{cta.name} warp {number}"
        self.clock = Clock(components, components.new(Source.WARP, self.name))
        self.wait: Wait | None = None
        self.done = False
        self.mask = 0
        self.index = 0
        self.fence: Knowledge | None = None
        self.unfenced: Knowledge | None = None
        self.state: dict[str, object] = {}
        self.at_end: list[Callable[[], None]] = []
        self.loads: Loads | None = None
        self.on_busy: Callable[[Fault], None] | None = None
        self.trace: Trace | None = None
        self._components: dict[Source, int] = {}

    def component(self, source: Source) -> int:
        """The warp's component for a kind of asynchronous work."""
        found = self._components.get(source)
        if found is None:
            found = self._components[source] = self.cta.cluster.components.new(source, f"{self.name}, {source.value}")
        return found

    # Running.

    def step(self) -> bool:
        """Run until the warp waits or its turn is over; False if it could not go on at all."""
        if self.wait is not None:
            if not self.wait.ready():
                return False
            self._finish(self.wait.then)
        warp, handlers, instrs = self.warp, self.run.handlers, self.run.program.instrs
        profile, trace = self.run.profile, self.trace
        if trace is not None:
            trace.entries.append(warp.traced())
        left = TURN
        while left > 0:
            before = warp.executed
            event = warp.run(left)
            ran = warp.executed - before + 1
            left -= ran
            self.run.left -= ran
            if event.kind is Kind.TRAP:
                self.index, self.mask = event.index, event.mask
                instr = instrs[event.index]
                watch = profile.watchers[event.index]
                try:
                    # Before the instruction overwrites its own operands.
                    if watch is not None:
                        watch(self, instr)
                    if trace is not None:
                        trace.note(self, instr)
                    wait = handlers[event.index](self, instr)
                except (MemoryFault, BarrierMisuse, ValueError) as error:
                    self.abort(error)
                if wait is not None:
                    ready = wait.ready()
                    profile.waited(self.number, event.index, ready)
                    if not ready:
                        self.wait = wait
                        return True
                    wait.then()
                warp.advance()
            elif event.kind is Kind.DONE:
                self.end()
                return True
            elif event.kind is Kind.STUCK:
                self.index = event.index
                self.report(findings.Kind.DEADLOCK, f"lanes {event.mask:#010x} wait for other lanes of their warp")
                raise Abort
            else:
                break
        self.run.progress += 1
        return True

    def expire(self) -> bool:
        """End a wait that has a limit; False if there is none."""
        if self.wait is None or self.wait.expire is None:
            return False
        if self.trace is not None:
            self.trace.expired(self.index)
        self._finish(self.wait.expire)
        return True

    def _finish(self, then: Callable[[], None]) -> None:
        self.wait = None
        self.guarded(self.index, then)
        self.warp.advance()

    def guarded(self, index: int, do: Callable[[], None]) -> None:
        """Do what an instruction asked for, perhaps long after; what it may not do is that instruction's finding."""
        try:
            do()
        except (MemoryFault, BarrierMisuse, ValueError) as error:
            self.abort(error, index)

    def end(self) -> None:
        """All lanes have ended."""
        self.done = True
        self.run.progress += 1
        if self.trace is not None:
            self.trace.entries.append(self.warp.traced())
        self.drain_faults()
        for check in self.at_end:
            check()
        self.run.ended(self)

    # Reports.

    def place(self, index: int | None = None) -> Place:
        return self.run.place(self.name, self.index if index is None else index)

    def report(
        self, kind: findings.Kind, message: str, *, other: Place | None = None, index: int | None = None,
        warning: bool = False,
    ) -> None:  # fmt: skip
        self.run.findings.add(Finding(kind, message, self.place(index), other, warning))

    def abort(self, error: Exception, index: int | None = None) -> None:
        """Report what an instruction may not do, and end the launch; an error without a kind of finding is raised."""
        kind = findings.Kind.BARRIER if isinstance(error, BarrierMisuse) else getattr(error, "kind", None)
        if kind is None:
            raise error
        self.report(kind, str(error), index=index)
        raise Abort from error

    def drain_faults(self) -> None:
        for fault in self.warp.faults():
            if fault.kind is FaultKind.BUSY and self.on_busy is not None:
                self.on_busy(fault)
                continue
            register = (
                f"{fault.register}, lanes {fault.lanes:#010x}" if fault.register else f"lanes {fault.lanes:#010x}"
            )
            # The ISA leaves the quotient open: kernels divide before they find out that they need not.
            harmless = fault.kind is FaultKind.DIVISION
            self.report(KINDS[fault.kind], f"{fault.kind.value}: {register}", index=fault.index, warning=harmless)

    # Lanes.

    @property
    def lanes(self) -> NDArray[np.int64]:
        """Numbers of the lanes that execute."""
        return lanes_in(self.mask)

    @property
    def count(self) -> int:
        return self.mask.bit_count()


@lru_cache(maxsize=4096)
def lanes_in(mask: int) -> NDArray[np.int64]:
    """Numbers of the lanes in a mask; not to be written into."""
    return np.array([lane for lane in range(32) if mask >> lane & 1], np.int64)
