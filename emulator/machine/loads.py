# SPDX-License-Identifier: Apache-2.0
"""Loads from shared memory that are under way when their warp arrives somewhere (`emulator.ptx.overtaken`).

To writes by the generic proxy they happen where they stand: shared memory serves that proxy in order. A copy by the
async proxy writes whenever it is let in. To such a write a load that an arrival overtook happens when something first
uses what it loaded, by the clock that the warp has then: an arrival before that does not cover it.

When that is, the machine hears from how often each instruction was executed: at the warp's next event that others could
know of, at a write that it matters for, and at the end. What is written over a load that nothing has used yet is a race
only if something does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emulator.machine.clocks import Vector
from emulator.machine.findings import Kind

if TYPE_CHECKING:
    from emulator.machine.cluster import Cta
    from emulator.machine.runner import Runner

Words = NDArray[np.int64]
NEVER = np.iinfo(np.int32).max  # later than all clocks
FULL_WORD = 0xF


@dataclass
class Load:
    """A load that nothing has used yet.

    Attributes:
        uses: instructions that may be the first to.
        before: how often these had been executed.
        moment: instructions that its warp had executed.
        parts: words of shared memory, by their CTA.
        arrival: the first one that overtook it; -1 before that.
        report: a write over its words while nobody had used them.
    """

    index: int
    uses: list[int]
    before: int
    moment: int
    parts: "list[tuple[Cta, Words]]" = field(default_factory=list)
    arrival: int = -1
    report: Callable[[], None] | None = None


class Overtaken:
    """The latest reads of a CTA's shared memory by one warp that arrivals overtook.

    Attributes:
        clock: of each word, when the first use of it came; NEVER before that, 0 for no read.
        load, arrival: instructions.
    """

    def __init__(self, loads: "Loads", words: int) -> None:
        self.loads = loads
        self.clock = np.zeros(words, np.int32)
        self.load = np.zeros(words, np.int32)
        self.arrival = np.zeros(words, np.int32)


class Loads:
    """A warp's loads that an arrival may overtake."""

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.under_way: dict[int, Load] = {}
        runner.at_end.append(self._end)

    def begin(self, cta: "Cta", words: Words) -> None:
        """The current instruction loads words, perhaps not the first ones."""
        runner = self.runner
        index, moment = runner.index, runner.warp.executed
        load = self.under_way.get(index)
        if load is not None and load.moment != moment:
            self._finish(load, used=self._is_used(load))
            load = None
        if load is None:
            uses = list(runner.run.program.overtaken.uses[index])
            load = self.under_way[index] = Load(index, uses, self._executed(uses), moment)
            if not self.under_way.keys() - {index}:
                runner.clock.before_tick.append(self._tick)
        load.parts.append((cta, words))

    def settle(self) -> None:
        """Find out which loads have been used by now."""
        for load in [load for load in self.under_way.values() if self._is_used(load)]:
            self._finish(load, used=True)

    def _executed(self, uses: list[int]) -> int:
        return int(self.runner.warp.counts[uses].sum())

    def _is_used(self, load: Load) -> bool:
        # An instruction that the machine executes is counted behind it.
        return self.runner.index in load.uses or self._executed(load.uses) != load.before

    def _tick(self) -> None:
        """The current instruction may let others know what happened so far."""
        self.settle()
        static, at = self.runner.run.program.overtaken, self.runner.index
        if at in static.fences:
            for load in list(self.under_way.values()):
                self._finish(load, used=None)
        elif at in static.arrivals:
            for load in self.under_way.values():
                if load.arrival < 0:
                    self._overtake(load)

    def _overtake(self, load: Load) -> None:
        load.arrival = self.runner.index
        component = self.runner.clock.component
        for cta, words in load.parts:
            reads = cta.overtaken.get(component)
            if reads is None:
                reads = cta.overtaken[component] = Overtaken(self, cta.shared.shadow.reader.size)
            reads.clock[words], reads.load[words], reads.arrival[words] = NEVER, load.index, load.arrival

    def _finish(self, load: Load, *, used: bool | None) -> None:
        """What a load brought is used, or never will be; None: it is there, whoever uses it."""
        component, now = self.runner.clock.component, self.runner.clock.now
        if load.arrival >= 0:
            for cta, words in load.parts:
                reads = cta.overtaken[component]
                own = words[(reads.clock[words] == NEVER) & (reads.load[words] == load.index)]
                reads.clock[own] = 0 if used is False else now
        if used and load.report is not None:
            load.report()
        if used is None and load.report is not None:
            return
        del self.under_way[load.index]
        if not self.under_way:
            self.runner.clock.before_tick.remove(self._tick)

    def _end(self) -> None:
        for load in list(self.under_way.values()):
            self._finish(load, used=self._is_used(load))


def begin(runner: "Runner", cta: "Cta", words: "Words | slice") -> None:
    """Record that the current instruction, which an arrival may overtake, loads words of shared memory."""
    if runner.loads is None:
        runner.loads = Loads(runner)
    assert not isinstance(words, slice)
    runner.loads.begin(cta, words)


def overwrite(
    runner: "Runner", cta: "Cta", words: "Words | slice", mask: int | NDArray[np.uint8], order: Vector, index: int
) -> None:
    """Report the loads that a write by the async proxy may have changed.

    Args:
        order: clocks of the reads that are ordered before it.
        index: of its instruction.
    """
    every = np.arange(words.start, words.stop, dtype=np.int64) if isinstance(words, slice) else words
    if not isinstance(mask, int):
        every = every[mask == FULL_WORD]
    for component, reads in cta.overtaken.items():
        late = every[reads.clock[every] > order[component]]
        if late.size:
            reads.loads.settle()
            late = late[reads.clock[late] > order[component]]
        for index_of_load in np.unique(reads.load[late]).tolist():
            word = int(late[(reads.load[late] == index_of_load).argmax()])
            report = _report(runner, cta, reads, word, index)
            if reads.clock[word] != NEVER:
                report()
            elif reads.loads.under_way[index_of_load].report is None:
                reads.loads.under_way[index_of_load].report = report
        reads.clock[every] = 0


def _report(runner: "Runner", cta: "Cta", reads: Overtaken, word: int, index: int) -> Callable[[], None]:
    reader = reads.loads.runner
    message = (
        f"shared address {4 * word:#x} of {cta.name} is written, and an earlier load may still be under way: nothing "
        f"had used what it loads when its warp arrived, {reader.place(int(reads.arrival[word]))}"
    )
    other = reader.place(int(reads.load[word]))
    return partial(runner.report, Kind.RACE, message, other=other, index=index)
