# SPDX-License-Identifier: Apache-2.0
"""Roles of a kernel's warps, told from what they execute.

Two warps have the same role if what only one of them executes is little: a tenth of all that either does, or a fifth of
what is left without the instructions that every warp of the CTA executes (the prologue that roles share).
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from emulator.profile.classes import FREE, Class, classify
from emulator.ptx.ir import Instr

Counts = NDArray[np.int64]
OF_ALL, OF_OWN = 0.1, 0.2
# Shares of a role's instructions from which on a kind of work names it.
EXPONENTIALS, ARITHMETIC = 0.01, 0.1
LOADS = frozenset(
    {"cp.async.bulk.tensor#load", "cp.async.bulk#load", "cp.async.bulk#cluster", "cp.async", "cp.async#ignore"}
)
STORES = frozenset(
    {
        "cp.async.bulk.tensor#store",
        "cp.async.bulk#store",
        "cp.reduce.async.bulk.tensor",
        "cp.reduce.async.bulk#store",
        "cp.reduce.async.bulk#cluster",
    }
)
MULTIPLIES = ("mma", "wgmma.mma_async", "tcgen05.mma")
COMPUTES = (Class.FP32, Class.FP32X2, Class.HALF, Class.FP64)


def group(executed: Mapping[int, Counts]) -> list[tuple[int, ...]]:
    """Numbers of the warps of each role, in the order of their first warps.

    Args:
        executed: by number of a warp in its CTA, how often it ran each instruction; all of one length.
    """
    shared = np.logical_and.reduce([counts > 0 for counts in executed.values()])
    found: list[list[int]] = []
    for number, counts in sorted(executed.items()):
        for role in found:
            if alike(executed[role[0]], counts, shared):
                role.append(number)
                break
        else:
            found.append([number])
    return [tuple(role) for role in found]


def alike(one: Counts, other: Counts, shared: NDArray[np.bool_]) -> bool:
    """Whether two warps have the same role; `shared` are the instructions that every warp executes."""
    apart = int(one[other == 0].sum() + other[one == 0].sum())
    whole = int(min(one.sum(), other.sum()))
    own = int(one[~shared].sum() + other[~shared].sum())
    return apart <= OF_ALL * whole or apart <= OF_OWN * own


def name(instrs: tuple[Instr, ...], counts: Counts) -> str:
    """What a role does most notably, such as "load", "mma + softmax" or "correction + store"."""
    ran = [(instrs[index], int(counts[index])) for index in np.flatnonzero(counts)]
    total = sum(count for instr, count in ran if classify(instr.op) not in FREE) or 1
    forms = {instr.op.form.id for instr, _ in ran}
    opcodes = {instr.op.name for instr, _ in ran}

    def share(*classes: Class) -> float:
        return sum(count for instr, count in ran if classify(instr.op) in classes) / total

    words = []
    if forms & LOADS:
        words.append("load")
    if opcodes.intersection(MULTIPLIES):
        words.append("mma")
    exponentials = sum(count for instr, count in ran if instr.op.name == "ex2") / total
    if exponentials >= EXPONENTIALS:
        words.append("softmax")
    elif {"tcgen05.ld", "tcgen05.st"} <= opcodes:
        words.append("correction")
    elif "tcgen05.ld" in opcodes:
        words.append("epilogue")
    elif share(*COMPUTES) >= ARITHMETIC and "mma" not in words:
        words.append("compute")
    if forms & STORES or any(instr.op.name == "st" and classify(instr.op) is Class.GLOBAL for instr, _ in ran):
        words.append("store")
    if not words and "clusterlaunchcontrol.try_cancel" in opcodes:
        words.append("scheduler")
    return " + ".join(words) or "other"
