# SPDX-License-Identifier: Apache-2.0
"""A timeline for Perfetto or Chrome's viewer: warps and engines as rows, waits by what they wait for.

Source: "Trace Event Format", the JSON that chrome://tracing and ui.perfetto.dev read: complete events (ph "X") and
names of rows (ph "M"); times are microseconds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emulator.clock.machine import LaunchTime, time_of
from emulator.clock.replay import ENGINES, REASONS
from emulator.ptx.printer import show_instr

SHORTEST = 16  # cycles: shorter waits are not drawn
# Names that both viewers know colours by.
COLOURS = {
    "global memory": "terrible",
    "an mbarrier": "bad",
    "wgmma": "thread_state_iowait",
    "shared memory": "yellow",
    "a special function": "olive",
    "a busy unit": "rail_animation",
    "another warp's turn": "grey",
    "a barrier of the CTA": "rail_load",
}


def events(time: LaunchTime) -> list[dict[str, Any]]:
    """Of the clusters that were simulated, in the stream's time."""
    chip, recorded = time.chip, time.recorded
    drawn = time_of(recorded, chip, shortest=SHORTEST, before=time.before).replayed
    warps, program = len(recorded.classes[0][0]), recorded.program
    found: list[dict[str, Any]] = []
    rows: set[tuple[int, int]] = set()
    for first, last, index, where, reason, engine in drawn.segments.tolist():
        cta, warp = divmod(where, warps)
        row = (cta, 1000 + engine if engine else warp)
        rows.add(row)
        instr = program.instrs[index]
        event = {
            "ph": "X",
            "name": ENGINES[engine] if engine else f"waits for {REASONS[reason]}",
            "pid": row[0],
            "tid": row[1],
            "ts": time.begin + chip.microseconds(first),
            "dur": chip.microseconds(last - first),
            "args": {"ptx": show_instr(instr), "at": program.module.where(instr), "cycles": last - first},
        }
        found.append(event | ({} if engine else {"cname": COLOURS.get(REASONS[reason], "generic_work")}))
    return [*_names(rows), *found]


def _names(rows: set[tuple[int, int]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": cta, "args": {"name": f"CTA {cta} of those at a time"}}
        for cta in sorted({cta for cta, _ in rows})
    ]
    for cta, row in sorted(rows):
        name = ENGINES[row - 1000] if row >= 1000 else f"warp {row}"
        found.append({"ph": "M", "name": "thread_name", "pid": cta, "tid": row, "args": {"name": name}})
    return found


def write(times: Sequence[LaunchTime], file: Path) -> None:
    """All launches of a stream."""
    every = [event for time in times for event in events(time)]
    file.write_text(json.dumps({"traceEvents": every, "displayTimeUnit": "ns"}))
