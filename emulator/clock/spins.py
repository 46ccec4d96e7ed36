# SPDX-License-Identifier: Apache-2.0
"""Loops that read a flag in global memory until another CTA has set it.

How often such a loop turns on the emulator says nothing of a chip: that depends on the order in which the emulator runs
CTAs. So a trace keeps its last turn alone, which finds the flag set, and the replay makes that turn wait until the
flag's writers have run.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import Program
from emulator.ptx.ir import Instr, Label

INDEX, NOT_TAKEN = np.uint32(0x3FFFFFFF), np.uint32(0x80000000)  # of an entry of a trace, as replay.h has them
LONGEST = 16  # instructions of a loop that does nothing but wait
# What such a loop may not do beside its load: it would be work.
WORK = ("st", "red", "atom", "bar", "mbarrier", "cp", "wgmma", "tcgen05", "mma", "exit", "ret", "call", "brx")
SEEN = frozenset({"acquire", "relaxed", "volatile"})  # loads that see what other CTAs store
RELEASES = frozenset({"release", "acq_rel"})


class Spin(NamedTuple):
    """A loop.

    Attributes:
        first, last: its instructions; the last one is the branch back.
        load: of the flag.
    """

    first: int
    last: int
    load: int


@lru_cache(maxsize=16)
def spins_of(program: Program) -> tuple[Spin, ...]:
    """The loops of a program that only wait for a flag."""
    found = []
    for last, instr in enumerate(program.instrs):
        target = instr["target"] if instr.op.name == "bra" else None
        if not isinstance(target, Label) or instr.guard is None:
            continue
        first = program.labels[target.name]
        body = program.instrs[first:last]
        if not 0 < len(body) < LONGEST or any(one.op.name.split(".")[0] in WORK for one in body):
            continue
        loads = [first + number for number, one in enumerate(body) if one.op.name == "ld"]
        branches = [one for one in body if one.op.name == "bra"]
        if len(loads) == 1 and not branches and _of_all(program.instrs[loads[0]], SEEN):
            found.append(Spin(first, last, loads[0]))
    return tuple(found)


def releases_of(program: Program) -> list[int]:
    """The instructions that may set a flag."""
    stores = ("st", "red", "atom")
    return [n for n, one in enumerate(program.instrs) if one.op.name in stores and _of_all(one, RELEASES)]


def _of_all(instr: Instr, orders: frozenset[str]) -> bool:
    """Whether an access is ordered so and may be to memory that all CTAs see."""
    return instr.op["sem"] in orders and not (instr.op["space"] or "").startswith("shared")


def last_turns(
    entries: NDArray[np.uint32], events: NDArray[np.void], spins: tuple[Spin, ...]
) -> tuple[NDArray[np.uint32], NDArray[np.void]]:
    """A warp's trace without the turns of loops that did not find their flag set."""
    for spin in spins:
        length, indices = spin.last - spin.first + 1, entries & INDEX
        starts = np.flatnonzero(indices == spin.first)
        starts = starts[starts + length <= entries.size]
        turns = starts[:, None] + np.arange(length)
        # The branch back was taken, and nothing but the loop's instructions came before.
        again = (indices[turns] == np.arange(spin.first, spin.last + 1)).all(1) & (entries[turns[:, -1]] < NOT_TAKEN)
        if not again.any():
            continue
        gone = turns[again].ravel()
        loads = np.flatnonzero((indices == spin.load) & (entries < NOT_TAKEN))
        events = events[~_of_loads(events, spin.load, np.isin(loads, gone))]
        entries = np.delete(entries, gone)
    return entries, events


def _of_loads(events: NDArray[np.void], index: int, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which events are those of chosen ones among an instruction's executions."""
    found = np.zeros(events.size, bool)
    those = np.flatnonzero(events["index"] == index)
    ends = events["more"][those] == 0
    found[those] = chosen[np.cumsum(ends) - ends]
    return found
