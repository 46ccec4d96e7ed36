# SPDX-License-Identifier: Apache-2.0
"""The order in which an assembler would put instructions: PTX has each behind what it needs, and waits for all of it.

List scheduling of basic blocks: of the next instructions that could come and whose unit is free, the one at the head of
the longest chain of latencies comes first. What the machine sees - memory, barriers, engines - keeps its order, and
nothing passes wgmma or a wait for it. How far an instruction moves up is limited: values that live long need registers.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from emulator.clock.constants import ChipClock
from emulator.clock.tables import (
    BRANCH,
    EXIT,
    FREE,
    LSU,
    PLAIN,
    TENSOR_WAIT,
    WGMMA,
    WGMMA_COMMIT,
    WGMMA_WAIT,
    Table,
    table_of,
)
from emulator.core.program import Program
from emulator.ptx.flow import graph

WINDOW = 32  # instructions that one may pass on its way up, without those that the assembler makes none of
WALLS = frozenset((BRANCH, EXIT, WGMMA, WGMMA_COMMIT, WGMMA_WAIT, TENSOR_WAIT))


class Order(NamedTuple):
    """Attributes:
    order: uint32[instructions]: what comes at each place, within its block.
    stops: uint32[instructions]: at the first instruction of a block the index behind its last one; else 0.
    """

    order: NDArray[np.uint32]
    stops: NDArray[np.uint32]


@lru_cache(maxsize=64)
def order_of(program: Program, chip: ChipClock) -> Order:
    table = table_of(program, chip)
    count = len(program.instrs)
    order, stops = np.arange(count, dtype=np.uint32), np.zeros(count, np.uint32)
    for block in graph(program.function, ()).blocks:
        stops[block.start] = block.stop
        start = block.start
        for index in range(block.start, block.stop + 1):
            if index == block.stop or table.instrs["kind"][index] in WALLS:
                order[start:index] = _scheduled(table, start, index)
                start = index + 1
    return Order(order, stops)


def _scheduled(table: Table, start: int, stop: int) -> list[int]:
    """The instructions of a stretch in their new order."""
    needs, followers = _dependencies(table, start, stop)
    latency = table.instrs["latency"][start:stop].astype(int)
    is_free = table.instrs["kind"][start:stop] == FREE
    latency[is_free] = 0
    units = table.instrs["unit"][start:stop].tolist()
    busy = np.where(is_free | (table.instrs["unit"][start:stop] >= LSU), 0, table.instrs["busy"][start:stop]).tolist()
    free: list[bool] = is_free.tolist()
    unit_free = [0] * LSU
    height = _heights(followers, latency.tolist())
    left = [len(one) for one in needs]
    ready = [0] * (stop - start)
    waiting, order, now = list(range(stop - start)), [], 0
    while waiting:
        able = [one for one in _window(waiting, free) if not left[one]]
        times = [max(ready[one], unit_free[units[one]]) if busy[one] else ready[one] for one in able]
        soon = [one for one, time in zip(able, times, strict=True) if time <= now]
        if not soon:
            now = min(times)
            continue
        best = max(soon, key=lambda one: (height[one], -one))
        waiting.remove(best)
        order.append(start + best)
        if busy[best]:
            unit_free[units[best]] = now + busy[best]
        now += not free[best]
        for follower, delayed in followers[best]:
            left[follower] -= 1
            ready[follower] = max(ready[follower], now - 1 + int(latency[best]) if delayed else now)
    return order


def _window(waiting: list[int], free: list[bool]) -> list[int]:
    """The first of those that wait, up to WINDOW that take a cycle."""
    counted = 0
    for place, one in enumerate(waiting):
        counted += not free[one]
        if counted > WINDOW:
            return waiting[:place]
    return waiting


def _dependencies(table: Table, start: int, stop: int) -> tuple[list[set[int]], list[list[tuple[int, bool]]]]:
    """(What each instruction has to follow; who follows it, and whether only when its result is there)."""
    needs: list[set[int]] = [set() for _ in range(stop - start)]
    followers: list[list[tuple[int, bool]]] = [[] for _ in range(stop - start)]
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    fixed = -1

    def follow(later: int, earlier: int, delayed: bool) -> None:
        if earlier >= 0 and earlier not in needs[later] and earlier != later:
            needs[later].add(earlier)
            followers[earlier].append((later, delayed))

    for index in range(start, stop):
        one, record = index - start, table.instrs[index]
        first, sources, results = int(record["rows"]), int(record["sources"]), int(record["results"])
        for row in table.rows[first : first + sources].tolist():
            follow(one, writer.get(row, -1), True)
            readers.setdefault(row, []).append(one)
        for row in table.rows[first + sources : first + sources + results].tolist():
            follow(one, writer.get(row, -1), False)
            for reader in readers.pop(row, ()):
                follow(one, reader, False)
            writer[row] = one
        if record["kind"] not in (PLAIN, FREE):
            follow(one, fixed, False)
            fixed = one
    return needs, followers


def _heights(followers: list[list[tuple[int, bool]]], latency: list[int]) -> list[int]:
    """Of each instruction the latencies of the longest chain that begins with it."""
    height = [0] * len(followers)
    for one in range(len(followers) - 1, -1, -1):
        delays = (height[later] + (latency[one] if delayed else 0) for later, delayed in followers[one])
        height[one] = max(delays, default=latency[one])
    return height
