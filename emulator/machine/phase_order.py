# SPDX-License-Identifier: Apache-2.0
"""Whether a wait by parity can mean one phase alone, in every order of events that a kernel allows.

A parity tells a phase from its neighbours only. A warp that waits for phase n gets the right answer if phase n - 1 ends
before it asks, and phase n + 1 does not end before it has its answer. Otherwise it goes on too early, or waits for a
phase that may never come. Both conditions are asked of what orders the events (`Clock.history`), not of the order that
a schedule happens to choose.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from emulator.machine.clocks import Clock, Components, Vector


class Answer(NamedTuple):
    """A wait that is over.

    Attributes:
        phase: that it was for.
        event: its number among its warp's events.
        report: of the wait's place.
    """

    phase: int
    event: int
    report: Callable[[str], None]


class End(NamedTuple):
    """What comes before the end of a phase.

    Attributes:
        history: of all who have arrived, and of those who issued what an engine completes.
        by_engines: not only warps have arrived: to have seen all arrivals is not to know of the end.
    """

    history: Vector
    by_engines: bool


class PhaseOrder:
    """What orders the phases of one mbarrier and the waits for them."""

    def __init__(self, name: str, components: Components, component: int) -> None:
        self._name, self._component = name, component
        self._gathered, self._by_engines = components.zeros(), False
        self._latest = self._earlier = End(components.zeros(), False)
        self._answers: dict[int, Answer] = {}

    def arrive(self, history: Vector, *, engine: bool = False) -> None:
        """The current phase ends after a history.

        Args:
            engine: it is that of an issue; the arrival itself, or the bytes, come at some later time.
        """
        np.maximum(self._gathered, history, out=self._gathered)
        self._by_engines |= engine

    def complete(self, phase: int) -> None:
        """A phase ends: whoever waits for the one before it has its answer by then, or may never get it."""
        for component, answer in self._answers.items():
            if answer.phase == phase - 1 and self._gathered[component] < answer.event:
                answer.report(
                    f"{self._name}: a wait for phase {phase - 1}, whose answer nothing orders before the end of phase "
                    f"{phase}: behind that it would wait for phase {phase + 1}"
                )
        self._gathered[self._component] = phase
        self._earlier, self._latest = self._latest, End(self._gathered.copy(), self._by_engines)
        self._by_engines = False

    def answer(self, clock: Clock, phase: int, report: Callable[[str], None]) -> None:
        """A warp's wait for the latest complete phase is over.

        Args:
            report: reports at the place of the wait.
        """
        if not self._knows_earlier(clock.history, phase - 1):
            report(
                f"{self._name}: a wait for phase {phase}, before which nothing orders the end of phase {phase - 1}: "
                f"until then it would not wait at all, since phase {phase - 2} has the same parity"
            )
        clock.follow(self._latest.history)
        self._answers[clock.component] = Answer(phase, clock.count_event(), report)

    def _knows_earlier(self, history: Vector, phase: int) -> bool:
        """Whether a warp knows of the end of a phase, the one before the latest complete one.

        It does if it waited for the end, or follows somebody who did, or follows all that had to come before the end.
        """
        if phase < 1 or history[self._component] >= phase:
            return True
        behind = self._earlier.history > history
        behind[self._component] = False
        return not (self._earlier.by_engines or behind.any())
