# SPDX-License-Identifier: Apache-2.0
"""Order by words of memory: strong stores and atomics release, strong loads and atomics acquire (PTX ISA, section 8).

A relaxed store behind a fence releases what was known at the fence; a relaxed load in front of a fence acquires at it.
"""

from typing import TYPE_CHECKING

import numpy as np

from emulator.core.program import RANK_SHIFT
from emulator.machine.access import Addresses
from emulator.machine.clocks import Knowledge

if TYPE_CHECKING:
    from emulator.machine.runner import Runner
    from emulator.ptx.ir import Instr

RELEASING = frozenset({"release", "acq_rel"})
ACQUIRING = frozenset({"acquire", "acq_rel"})
STRONG = RELEASING | ACQUIRING | {"relaxed", "volatile"}


def strong(instr: "Instr") -> bool:
    """Whether a load or store is one that others may wait for, without a race."""
    return instr.op["sem"] in STRONG


def keys(runner: "Runner", space: str, addresses: Addresses) -> list[tuple[int, int]]:
    """Names of the words: those of shared memory belong to their cluster."""
    place = -1 if space == "global" else runner.cta.cluster.number
    if space == "shared" and (addresses >> RANK_SHIFT == 0).all():
        addresses = addresses | runner.cta.rank << RANK_SHIFT
    return [(place, int(address)) for address in np.unique(addresses & ~np.int64(3))]


def portable(runner: "Runner", knowledge: Knowledge) -> Knowledge:
    """Knowledge that other clusters understand as well."""
    made = knowledge.copy()
    made.join_foreign({runner.cta.cluster.number: made.seen})
    return made


def release(runner: "Runner", instr: "Instr", space: str, addresses: Addresses, *, atomic: bool = False) -> None:
    """What a strong store, or an atomic, hands on."""
    sem = instr.op["sem"] or ("relaxed" if atomic else None)
    if sem not in STRONG or space == "local":
        return
    if sem in RELEASING:
        given = Knowledge.none(runner.clock.components)
        runner.clock.release(given)
    elif runner.fence is not None:
        given = runner.fence
    else:
        return
    given = portable(runner, given)
    for key in keys(runner, space, addresses):
        flag = runner.run.flags.get(key)
        if flag is None:
            flag = runner.run.flags[key] = Knowledge(given.seen * 0, given.fenced * 0)
            flag.owner = runner.cta.cluster.number
        learn(flag, given, flag.owner == runner.cta.cluster.number)


def learn(known: Knowledge, given: Knowledge, same_cluster: bool) -> None:
    if same_cluster:
        known.join(given)
    else:
        known.join_foreign(given.foreign)


def acquire(runner: "Runner", instr: "Instr", space: str, addresses: Addresses, *, atomic: bool = False) -> None:
    """What a strong load, or an atomic, learns."""
    sem = instr.op["sem"] or ("relaxed" if atomic else None)
    if sem not in STRONG or space == "local" or not runner.run.flags:
        return
    for key in keys(runner, space, addresses):
        flag = runner.run.flags.get(key)
        if flag is None:
            continue
        mine = flag.owner == runner.cta.cluster.number
        if sem in ACQUIRING:
            learn(runner.clock.knows, flag, mine)
        else:
            if runner.unfenced is None:
                runner.unfenced = Knowledge.none(runner.clock.components)
            learn(runner.unfenced, flag, mine)
