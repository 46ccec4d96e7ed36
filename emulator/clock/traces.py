# SPDX-License-Identifier: Apache-2.0
"""What the warps of a launch did: the instructions that each issued, and the events among them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emulator.clock.notes import CP_ASYNC, GLOBAL, LOAD, STORE, WRITES, Noter, noter_of
from emulator.core.program import Program
from emulator.ptx.ir import Instr

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

EVENT = np.dtype([("index", "u4"), ("kind", "u2"), ("more", "u2"), ("a", "i8"), ("b", "i8"), ("c", "i8")], align=True)
MEMORY = (GLOBAL, LOAD, STORE, CP_ASYNC)
CAPACITY = 1 << 14  # instructions of a warp's turn, and more


@dataclass
class WarpTrace:
    """Attributes:
    entries: uint32 arrays, in order: an instruction's index, with NOT_TAKEN where its guard held for no lane.
    events: in order, as rows of EVENT.
    """

    noters: "list[Noter | None]" = field(repr=False)
    entries: list[NDArray[np.uint32]] = field(default_factory=list)
    events: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)

    def note(self, runner: "Runner", instr: Instr) -> None:
        """Keep what an instruction asks of the machine, before it executes."""
        noter = self.noters[runner.index]
        if noter is None:
            return
        index, notes = runner.index, noter(runner, instr)
        for left, note in zip(range(len(notes) - 1, -1, -1), notes, strict=True):
            self.events.append((index, note.kind, left, note.a, note.b, note.c))

    def expired(self, index: int) -> None:
        """A look at a barrier whose phase never ends, as a pipeline's for the stage behind its last: no wait."""
        if self.events and self.events[-1][0] == index:
            self.events.pop()

    def whole(self) -> tuple[NDArray[np.uint32], NDArray[np.void]]:
        entries = np.concatenate(self.entries) if self.entries else np.zeros(0, np.uint32)
        return entries, np.array(self.events, EVENT)

    @property
    def instructions(self) -> int:
        return sum(part.size for part in self.entries)


@lru_cache(maxsize=16)
def noters_of(program: Program) -> "list[Noter | None]":
    return [noter_of(instr) for instr in program.instrs]


class Recorder:
    """Keeps the traces of a launch's warps.

    Attributes:
        clusters: traces by cluster's place in the grid, then CTA's rank, then warp.
    """

    def __init__(self, program: Program) -> None:
        self.noters = noters_of(program)
        self.clusters: dict[int, list[list[WarpTrace]]] = {}

    def begin(self, runner: "Runner", cluster: int) -> WarpTrace:
        """A warp starts."""
        runner.warp.trace(CAPACITY)
        ranks = self.clusters.setdefault(cluster, [])
        while len(ranks) <= runner.cta.rank:
            ranks.append([])
        ranks[runner.cta.rank].append(WarpTrace(self.noters))
        return ranks[runner.cta.rank][-1]

    def traffic(self, weights: Iterable[tuple[int, float]], regions: int) -> tuple[list[float], list[float]]:
        """Bytes that clusters of the grid read of each region, and that they store.

        Args:
            weights: (cluster, how many clusters of the grid it stands for).
        """
        read, written = np.zeros(regions), np.zeros(regions)
        for cluster, weight in weights:
            for warps in self.clusters[cluster]:
                for warp in warps:
                    events = np.array(warp.events, EVENT)
                    events = events[np.isin(events["kind"], MEMORY) & (events["a"] >= 0)]
                    stores = (events["kind"] == STORE) | (events["kind"] == GLOBAL) & (events["c"] & WRITES == 1)
                    np.add.at(read, events["a"][~stores], weight * events["b"][~stores])
                    np.add.at(written, events["a"][stores], weight * events["b"][stores])
        return read.tolist(), written.tolist()
