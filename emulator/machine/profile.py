# SPDX-License-Identifier: Apache-2.0
"""What a kernel did: executed instructions by warp and by place in the PTX, and bytes and events by engine."""

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import Program
from emulator.machine.watch import BLOCKED, WAITS, watchers_of

if TYPE_CHECKING:
    from emulator.machine.runner import Runner


class KernelProfile:
    """Counts of all launches of one kernel.

    Attributes:
        executed: by number of the warp in its CTA, how often each instruction ran.
        events: bytes of copy engines and memories, waits, conflicts: whatever is counted by name.
        amounts: what is counted by place as well: (name, number of the warp in its CTA, index of the instruction).
        watchers: of each instruction what counts it while it executes.
        ctas: that ran.
    """

    def __init__(self, kernel: str, program: Program) -> None:
        self.kernel = kernel
        self.program = program
        self.executed: dict[int, NDArray[np.int64]] = {}
        self.events: Counter[str] = Counter()
        self.amounts: Counter[tuple[str, int, int]] = Counter()
        self.watchers = watchers_of(program)
        self.ctas = 0

    def add(self, runner: "Runner") -> None:
        """Take over a warp's counts."""
        counts = runner.warp.counts[: len(self.program.instrs)]
        mine = self.executed.setdefault(runner.number, np.zeros(counts.size, np.int64))
        mine += counts
        self.ctas += runner.number == 0

    def count(self, event: str, amount: int = 1) -> None:
        self.events[event] += amount

    def count_at(self, what: str, warp: int, index: int, amount: int = 1) -> None:
        self.amounts[what, warp, index] += amount

    def waited(self, warp: int, index: int, ready: bool) -> None:
        """A warp came to an instruction that may wait; whether it could continue at once."""
        self.amounts[WAITS, warp, index] += 1
        if not ready:
            self.amounts[BLOCKED, warp, index] += 1


class Profile:
    """The kernels that a machine has run, by name; a second program of a name is "NAME (2)"."""

    def __init__(self) -> None:
        self.kernels: dict[str, KernelProfile] = {}

    def of(self, kernel: str, program: Program) -> KernelProfile:
        name, number = kernel, 1
        while name in self.kernels and self.kernels[name].program is not program:
            number += 1
            name = f"{kernel} ({number})"
        if name not in self.kernels:
            self.kernels[name] = KernelProfile(name, program)
        return self.kernels[name]
