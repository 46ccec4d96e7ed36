# SPDX-License-Identifier: Apache-2.0
"""Launches of a stream that overlap: programmatic dependent launch.

A launch with the attribute may start once every CTA of the launch before it has executed
`griddepcontrol.launch_dependents` or has ended. That orders no access to memory. `griddepcontrol.wait` does: it returns
when the launch before has completed and what it wrote is visible. A launch in which any thread has waited completes
after the launch before it; one in which none has may complete first, and then a wait for it says nothing of the others.

Sources: PTX ISA 9.2, 9.7.13.13 (griddepcontrol); CUDA programming guide, 4.5.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from emulator.errors import Unsupported
from emulator.host.launch import Launch, Region
from emulator.machine.clocks import Vector
from emulator.machine.findings import Place
from emulator.machine.history import LAUNCH_SHIFT, MOST_LAUNCHES, History, launch_key
from emulator.machine.memory import ALIGNMENT

# What stands for all accesses of a launch that is over, in Knowledge.foreign.
ALL: Vector = np.zeros(0, np.int32)


class SharedHistories:
    """Histories of the global memory that launches share: one for each stretch of regions that overlap."""

    def __init__(self, launches: Iterable[Launch]) -> None:
        spans: list[list[int]] = []
        for region in sorted((one for launch in launches for one in launch.regions), key=lambda one: one.address):
            start = region.address // ALIGNMENT * ALIGNMENT
            if spans and start < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], region.end)
            else:
                spans.append([start, region.end])
        self._stretches = [(start, end, History(end - start, shared=True)) for start, end in spans]

    def of(self, region: Region) -> History:
        """Of a region's memory, from its base on."""
        base = region.address // ALIGNMENT * ALIGNMENT
        for start, end, history in self._stretches:
            if start <= region.address < end:
                return history.part(base - start, region.end - base)
        raise KeyError(region)


class Releasing(Protocol):
    """A CTA: whether it has executed launch_dependents or ended."""

    has_released: bool


@dataclass
class Order:
    """Where a launch stands among those that overlap.

    Sets of launches that are over are keys and values of `Knowledge.foreign`.

    Attributes:
        overlap: all of them.
        number: in the order of launches, from 0.
        holding: CTAs that have neither ended nor executed launch_dependents.
        allocates: whether the kernel allocates tensor memory.
        place_of: the place of an access by its cluster, component and instruction.
        started, complete: whether it has started; whether it has ended.
        over_at_start: launches that are over before it starts.
        over_at_release: those that are over before the next one starts; None as long as nobody has released it.
        over_at_end: those that are over once this one is.
    """

    overlap: "Overlap"
    number: int
    holding: int
    allocates: bool
    place_of: Callable[[int, int, int], Place]
    started: bool = False
    complete: bool = False
    over_at_start: dict[int, Vector] = field(default_factory=dict)
    over_at_release: dict[int, Vector] | None = None
    over_at_end: dict[int, Vector] = field(default_factory=dict)

    @property
    def before(self) -> "Order | None":
        return self.overlap.orders[self.number - 1] if self.number else None

    @property
    def is_last(self) -> bool:
        return self.number == len(self.overlap.orders) - 1

    def start(self) -> None:
        """It starts: whatever all CTAs of the launch before it knew to be over is."""
        self.started = True
        if self.before is not None:
            self.over_at_start = self.before.over_at_release or {}

    def release(self, cta: Releasing, foreign: Iterable[int]) -> bool:
        """A CTA lets the next launch start, having executed launch_dependents or ended; False if it had before.

        Args:
            foreign: keys of `Knowledge.foreign` of whoever did.
        """
        if cta.has_released:
            return False
        cta.has_released = True
        self.holding -= 1
        over = dict.fromkeys(over_in(foreign), ALL)
        known = self.over_at_release
        self.over_at_release = over if known is None else {key: ALL for key in known if key in over}
        return True

    def warp_ended(self, foreign: Iterable[int]) -> None:
        """What a warp knows to be over is over when the launch is."""
        self.over_at_end.update(dict.fromkeys(over_in(foreign), ALL))

    def over_after_wait(self) -> dict[int, Vector]:
        """What is over once griddepcontrol.wait returns."""
        assert self.before is not None
        return {launch_key(self.before.number): ALL, **self.before.over_at_end}

    def tensor_memory_at_risk(self) -> bool:
        """Whether a later launch's CTAs may hold tensor memory while they wait for this launch."""
        later = self.overlap.orders[self.number + 1 :]
        return any(one.allocates and (one.started or one.number == self.number + 1) for one in later)


def over_in(foreign: Iterable[int]) -> list[int]:
    """The keys that are launches, not clusters."""
    return [key for key in foreign if key < 0]


class Overlap:
    """Launches of which each may start while the one before it runs.

    Args:
        launches: in their order.
    """

    def __init__(self, launches: list[Launch]) -> None:
        self.histories = SharedHistories(launches)
        self.orders: list[Order] = []
        most = max(ctas_of(launch) for launch in launches)
        if len(launches) > MOST_LAUNCHES or most > 1 << LAUNCH_SHIFT:
            raise Unsupported(f"{len(launches)} launches of up to {most} CTAs overlap: too many to be told apart")

    def join(self, launch: Launch, allocates: bool, place_of: Callable[[int, int, int], Place]) -> Order:
        """Take the next launch; arguments as of `Order`."""
        order = Order(self, len(self.orders), ctas_of(launch), allocates, place_of)
        self.orders.append(order)
        return order


def ctas_of(launch: Launch) -> int:
    return launch.grid[0] * launch.grid[1] * launch.grid[2]
