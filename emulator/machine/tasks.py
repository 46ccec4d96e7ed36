# SPDX-License-Identifier: Apache-2.0
"""Asynchronous work that was issued and is not done: when it is done is up to the schedule.

The schedules are adversaries of a kernel's synchronization: `eager` does everything at once, `lazy` does a piece of
work only when no warp can continue without one, `random` draws between the two at every turn. `late` does everything at
once too, and lets one warp of each CTA continue only when no other warp can.
"""

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One piece of work.

    Attributes:
        what: for the report of a deadlock.
        run: does it.
    """

    what: str
    run: Callable[[], None]


class Tasks:
    """The work of all CTAs that run. Of one queue the first comes first; queues have no order among them.

    Args:
        schedule: eager, lazy, random or late.
        seed: of the random schedule; of late, the warp that is held back.
    """

    def __init__(self, schedule: str, seed: int) -> None:
        self._eager = schedule in ("eager", "late")
        self._late = seed if schedule == "late" else None
        self._random = random.Random(seed) if schedule == "random" else None
        self._queues: dict[Hashable, deque[Task]] = {}
        self._loose = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def submit(self, task: Task, queue: Hashable | None = None) -> None:
        """Issue work; without a queue it is in order with nothing."""
        if self._eager:
            task.run()
            return
        if queue is None:
            self._loose += 1
            queue = self._loose
        self._queues.setdefault(queue, deque()).append(task)

    def turn(self) -> None:
        """Between two turns of warps: the random schedule may do some of the work."""
        while self._random is not None and self._queues and self._random.random() < 0.4:
            self.run_one()

    def run_one(self) -> bool:
        """Do one piece of work; False if there is none."""
        if not self._queues:
            return False
        queues = list(self._queues)
        queue = queues[0] if self._random is None else self._random.choice(queues)
        waiting = self._queues[queue]
        task = waiting.popleft()
        if not waiting:
            del self._queues[queue]
        task.run()
        return True

    def shuffled(self, count: int) -> list[int]:
        """The order in which warps take their turn."""
        order = list(range(count))
        if self._random is not None:
            self._random.shuffle(order)
        return order

    def holds_back(self, warp: int, warps: int) -> bool:
        """Whether a warp, of so many of its CTA, continues only when others cannot."""
        return self._late is not None and self._late % warps == warp

    @property
    def is_random(self) -> bool:
        return self._random is not None

    def gives_up(self) -> bool:
        """Whether a wait that may end without success does so: in the random schedule, now and then."""
        return self._random is not None and self._random.random() < 0.25

    def describe(self) -> list[str]:
        return [task.what for queue in self._queues.values() for task in queue]
