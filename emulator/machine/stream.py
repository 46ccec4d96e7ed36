# SPDX-License-Identifier: Apache-2.0
"""Turns of launches that overlap. What is found does not depend on them; what a mistake leaves in memory does.

- `eager`: a launch starts when the one before has completed.
- `lazy`: the latest launch runs as far as it can without those before it.
- `random`: a launch is drawn for each turn.
"""

import random
from collections import deque
from contextlib import suppress

from emulator.machine.launch import Run
from emulator.machine.overlap import Order
from emulator.machine.runner import PATIENCE, Abort

# Turns without a change after which a launch lets others have theirs.
IDLE = 2
# Turns of the latest launch, in the lazy schedule, for one of the first: the latest may poll memory for ever.
LATEST = 64


class Stream:
    """Launches that overlap, in their order.

    Args:
        schedule, seed: as of the machine.
    """

    def __init__(self, runs: list[Run], schedule: str, seed: int) -> None:
        self.waiting = deque(runs)
        self.live: list[Run] = []
        self.schedule = schedule
        self._random = random.Random(seed)
        self._turns = 0

    def execute(self) -> None:
        """Run the launches to their ends, or to what makes it impossible; findings say what."""
        stuck: dict[Run, bool] = {}  # launches that wait for others, and whether they moved in their last turn
        rounds = 0
        try:
            while self.waiting or self.live:
                if self.waiting and self._may_start(order_of(self.waiting[0])):
                    self._start(self.waiting.popleft())
                    stuck.clear()
                able = [run for run in self.live if run not in stuck]
                if not able:
                    rounds += 1
                    if rounds > PATIENCE or not any(stuck.values()):
                        self._deadlock()
                    stuck.clear()
                    continue
                run = self._next(able)
                try:
                    moved = run.turn()
                except Abort:
                    self._drop(run)
                    stuck.clear()
                    continue
                if not run.idle:
                    stuck.clear()
                    rounds = 0
                elif not moved or run.idle > IDLE:
                    stuck[run] = moved
                if not run.clusters:
                    order_of(run).complete = True
                    self.live.remove(run)
        except Abort:
            pass
        for run in self.live:
            with suppress(Abort):
                run.collect_rest()

    def _may_start(self, order: Order) -> bool:
        before = order.before
        if before is None:
            return True
        return before.complete if self.schedule == "eager" else before.started and not before.holding

    def _start(self, run: Run) -> None:
        self.live.append(run)
        order_of(run).start()
        run.begin()

    def _drop(self, aborted: Run) -> None:
        """End a launch and those behind it. Launches before it go on: they may write what it has read too early."""
        self.waiting.clear()
        for run in [run for run in self.live if run.number >= aborted.number]:
            self.live.remove(run)
            run.collect_rest()

    def _next(self, able: list[Run]) -> Run:
        """Whose turn it is."""
        self._turns += 1
        if self.schedule == "random":
            return self._random.choice(able)
        return able[0] if self.schedule == "eager" or self._turns % LATEST == 0 else able[-1]

    def _deadlock(self) -> None:
        for run in self.live:
            run.report_deadlock("every warp waits, and launches wait for each other")
        raise Abort


def order_of(run: Run) -> Order:
    assert run.order is not None
    return run.order
