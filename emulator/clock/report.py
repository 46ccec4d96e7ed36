# SPDX-License-Identifier: Apache-2.0
"""What the clock found, as text: the time, what bounded it, and where warps waited longest."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from emulator.clock.machine import LaunchTime
from emulator.clock.replay import ENGINES, REASONS
from emulator.profile.report import WIDTH, columns, cut, number
from emulator.ptx.printer import show_instr

MODEL = "A model of a chip, held against measurements in docs/emulator-clock.md. No measurement."
LONGEST = 5
BOUND = 0.75  # busy part of the time from which on an engine is what bounds a launch


@dataclass(frozen=True)
class Wait:
    """Where warps wait.

    Attributes:
        cycles: of all of them together, of one CTA of the cluster.
        where: lines of the source.
    """

    reason: str
    cycles: float
    where: str
    instruction: str


def utilisation(time: LaunchTime) -> dict[str, float]:
    """Busy part of each engine of the simulated SM."""
    cycles = max(1, time.replayed.cycles)
    return {name: float(busy) / cycles for name, busy in zip(ENGINES, time.replayed.engines, strict=True) if name}


def bound(time: LaunchTime) -> str:
    """The engine that is busy most of the time; what warps wait for most where there is none."""
    engine, part = max(utilisation(time).items(), key=lambda item: item[1])
    if part >= BOUND:
        return f"{engine}, busy {part:.0%} of the time"
    waits = time.replayed.stalls.sum(axis=(0, 1))[1:]
    reason = REASONS[1 + int(waits.argmax())]
    return f"latencies: warps wait most for {reason}; the busiest engine, {engine}, is busy {part:.0%} of the time"


def longest_waits(time: LaunchTime, count: int = LONGEST) -> list[Wait]:
    """The places where all warps together wait longest, the turns of other warps left out."""
    program, stalls = time.recorded.program, time.replayed.stalls.sum(axis=0)
    stalls[:, [0, REASONS.index("another warp's turn")]] = 0
    order = np.argsort(stalls, axis=None)[::-1][:count]
    clusters = max(1, len(time.replayed.ends))
    found = []
    for flat in order.tolist():
        index, reason = divmod(flat, len(REASONS))
        if stalls[index, reason]:
            instr = program.instrs[index]
            cycles = float(stalls[index, reason]) / clusters
            found.append(Wait(REASONS[reason], cycles, program.module.where(instr), show_instr(instr)))
    return found


def launch_text(time: LaunchTime) -> str:
    layout, recorded = time.layout, time.recorded
    ran = f"{len(recorded.places)} of {layout.clusters} clusters of {layout.members} simulated"
    lines = [
        cut(recorded.launch.kernel, WIDTH),
        f"  {time.microseconds:.2f} us on an {time.chip.name}, with what it takes to start:"
        f" {number(time.cycles)} cycles at {time.chip.gigahertz} GHz",
        f"  {ran}, {layout.slots} at a time on an SM",
        *([f"  {stream_text(time)}"] if time.before is not None else []),
        f"  bound by {bound(time)}",
        columns([["engine", "busy"], *([name, f"{part:.0%}"] for name, part in utilisation(time).items())]),
        "  longest waits, cycles of all warps of a cluster:",
    ]
    rows = [[wait.reason, number(wait.cycles), cut(wait.instruction, 60), wait.where] for wait in longest_waits(time)]
    return "\n".join([*lines, *([columns([["for", "cycles", "before", "at"], *rows], left=1)] if rows else [])])


def stream_text(time: LaunchTime) -> str:
    """Where a launch is in its stream."""
    assert time.before is not None
    overlap = max(0.0, time.before.complete - time.begin)
    beside = f", {overlap:.2f} us of it beside the launch before" if overlap else ""
    return f"begins at {time.begin:.2f} us, ends at {time.end:.2f} us{beside}"


def text(times: Sequence[LaunchTime]) -> str:
    """All launches, and their times together."""
    parts = [launch_text(time) for time in times]
    total = sum(time.microseconds for time in times)
    return "\n".join([*parts, f"{len(times)} launches of a stream, {total:.2f} us. {MODEL}"])
