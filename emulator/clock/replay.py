# SPDX-License-Identifier: Apache-2.0
"""The replay in C: clusters of a kernel, by the traces of their warps, on the SMs of one cluster (replay.c)."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator import native
from emulator.clock.constants import NAMES
from emulator.clock.order import Order
from emulator.clock.tables import STATIC, Table
from emulator.clock.traces import EVENT
from emulator.errors import EmulatorError

SOURCE = Path(__file__).with_name("replay.c")
HEADERS = (Path(__file__).with_name("replay.h"),)
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
# In the order of replay.h.
REASONS = (
    "issued", "a result of arithmetic", "a special function", "shared memory", "global memory", "a busy unit",
    "another warp's turn", "a barrier of the CTA", "a barrier of the cluster", "an mbarrier", "wgmma", "copies",
    "tensor memory", "a branch", "the launch",
)  # fmt: skip
ENGINES = ("", "tensor cores", "copy engine", "shared memory", "L2 port", "HBM", "issue slots")
SEGMENT = np.dtype(
    [("start", "u8"), ("stop", "u8"), ("index", "u4"), ("where", "u2"), ("reason", "u1"), ("engine", "u1")], align=True
)
TRACE = np.dtype([("entries", "u8"), ("events", "u8"), ("count", "u8"), ("event_count", "u8")])
MOST_SEGMENTS = 1 << 18
POINTERS = (
    "constants", "instrs", "rows", "traces", "launches", "missing", "kept", "ends", "releases", "stalls", "engines",
    "segments", "stamps", "flags",
)  # fmt: skip
SIZES = ("segment_count", "segment_room", "shortest", "flags_from", "before_ends")
COUNTS = ("instr_count", "row_count", "members", "warps", "launch_count", "slots", "region_count", "pad")


class Problem(ctypes.Structure):
    """`Problem` of replay.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_uint64) for name in SIZES),
        *((name, ctypes.c_uint32) for name in COUNTS),
    ]


class Stuck(EmulatorError):
    """Warps wait for each other in the replay: what one of them waits for is in no trace."""


@cache
def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        HostError: it cannot be built here.
    """
    loaded = ctypes.CDLL(str(native.build(SOURCE, FLAGS, HEADERS)))
    loaded.clock_replay.argtypes, loaded.clock_replay.restype = [ctypes.c_void_p], ctypes.c_uint64
    loaded.clock_reorder.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    loaded.clock_reorder.restype = None
    expected = (
        STATIC.itemsize, EVENT.itemsize, TRACE.itemsize, SEGMENT.itemsize, ctypes.sizeof(Problem), len(NAMES),
        len(REASONS), len(ENGINES),
    )  # fmt: skip
    found = tuple(loaded.clock_sizes(which) for which in range(len(expected)))
    if found != expected:
        raise AssertionError(f"replay.c and replay.py disagree about layouts: {found} and {expected}")
    return loaded


WarpData = tuple[NDArray[np.uint32], NDArray[np.void]]


@dataclass(frozen=True)
class Replayed:
    """Attributes:
    cycles: until the last cluster has ended.
    ends: uint64[launches], of each cluster.
    releases: uint64[launches]: when each CTA of a cluster has let the next launch start, or has ended.
    stalls: uint64[members * warps, instructions, reasons]: cycles that warps waited before an instruction; at
        `issued` how often it was issued.
    engines: busy cycles of the first SM, by ENGINES.
    segments: SEGMENT rows: long waits and the work of engines.
    stamps: uint64[instructions]: the last cycle in which each was issued.
    """

    cycles: int
    ends: NDArray[np.uint64]
    releases: NDArray[np.uint64]
    stalls: NDArray[np.uint64]
    engines: NDArray[np.float64]
    segments: NDArray[np.void] = field(repr=False)
    stamps: NDArray[np.uint64] = field(repr=False)


def reordered(entries: NDArray[np.uint32], order: Order) -> NDArray[np.uint32]:
    """A trace with the instructions of whole blocks in another order."""
    moved = entries.copy()
    arguments = (moved.ctypes.data, moved.size, order.order.ctypes.data, order.stops.ctypes.data)
    library().clock_reorder(*arguments)
    return moved


def replay(
    table: Table,
    classes: Sequence[Sequence[Sequence[WarpData]]],
    launches: Sequence[int],
    constants: NDArray[np.float64],
    missing: Sequence[float],
    kept: Sequence[float],
    *,
    slots: int,
    shortest: int = 1 << 62,
    flags: Sequence[int] = (),
    flags_from: int = 0,
    before_ends: int = 0,
) -> Replayed:
    """Run clusters one behind the other in some slots.

    Args:
        classes: traces: [class][CTA of the cluster][warp].
        launches: the class of each cluster, in the order in which they start.
        missing: of each region, the part of its bytes that comes from HBM.
        kept: of each region, the part of the stored bytes that goes to HBM.
        slots: clusters that run at the same time on the same SMs.
        shortest: waits of fewer cycles are kept in no segment.
        flags: instructions that load a flag which another CTA sets.
        flags_from: the cycle from which on it is set.
        before_ends: the cycle from which on a wait for the launch before returns.

    Raises:
        Stuck: warps wait for each other.
    """
    members, warps = len(classes[0]), len(classes[0][0])
    flat = [warp for of_class in classes for cta in of_class for warp in cta]
    traces = np.zeros(len(flat), TRACE)
    for row, (entries, events) in zip(traces, flat, strict=True):
        row["entries"], row["count"] = entries.ctypes.data, entries.size
        row["events"], row["event_count"] = events.ctypes.data, events.size
    room = MOST_SEGMENTS if shortest < 1 << 62 else 1
    arrays: dict[str, NDArray[Any]] = {
        "constants": np.ascontiguousarray(constants),
        "instrs": table.instrs,
        "rows": table.rows,
        "traces": traces,
        "launches": np.array(launches, np.uint32),
        "missing": np.array([*missing, 0.0]),
        "kept": np.array([*kept, 0.0]),
        "ends": np.zeros(len(launches), np.uint64),
        "releases": np.zeros(len(launches), np.uint64),
        "stalls": np.zeros((members * warps, len(table.instrs), len(REASONS)), np.uint64),
        "engines": np.zeros(len(ENGINES)),
        "segments": np.zeros(room, SEGMENT),
        "stamps": np.zeros(len(table.instrs), np.uint64),
        "flags": np.isin(np.arange(len(table.instrs)), flags).astype(np.uint8),
    }
    problem = Problem(**{name: array.ctypes.data for name, array in arrays.items()})
    problem.segment_room, problem.shortest, problem.flags_from = room, shortest, flags_from
    problem.before_ends = before_ends
    problem.instr_count, problem.row_count = len(table.instrs), table.row_count
    problem.members, problem.warps, problem.slots = members, warps, slots
    problem.launch_count, problem.region_count = len(launches), len(missing)
    cycles = library().clock_replay(ctypes.addressof(problem))
    if not cycles:
        raise Stuck("the replay of the kernel does not come to an end: what its warps wait for is in no trace")
    segments = arrays["segments"][: problem.segment_count].copy()
    ends, releases, stalls, engines = (arrays[name] for name in ("ends", "releases", "stalls", "engines"))
    return Replayed(cycles, ends, releases, stalls, engines, segments, arrays["stamps"])
