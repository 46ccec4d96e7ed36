# SPDX-License-Identifier: Apache-2.0
"""Where the CTAs of a stream's launches go: onto the SMs with most room, and into places that earlier launches leave.

While several launches wait, a GPU has no place left, and the next launch gets those of the launch that ends. An SM with
many CTAs of a launch ends last, so that its places go to one launch again: CTAs pack onto few SMs
(docs/dependent-launch.md).
"""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from emulator.clock.grid import GOLDEN, Footprint


class Left(NamedTuple):
    """A cluster that leaves its places.

    Attributes:
        us: when, in the stream's time.
        group: of SMs, by the number of its first one.
    """

    us: float
    group: int
    members: int
    footprint: Footprint


@dataclass(frozen=True)
class Placed:
    """A launch's clusters on the chip.

    Attributes:
        counts: of each group of SMs, by the number of its first one.
        order: the group of each cluster.
        last: when all had found room, in microseconds of the stream.
    """

    counts: Mapping[int, int]
    order: tuple[int, ...]
    last: float

    @property
    def most(self) -> int:
        return max(self.counts.values())


@dataclass
class Places:
    """What runs or waits on a chip's SMs.

    Attributes:
        taken: of each SM, how many CTAs of each kind it holds.
        leaving: a heap of the clusters that hold places.
        next: the SM from which on the next one is looked for.
    """

    sms: int
    cycle_us: float
    taken: list[Counter[Footprint]] = field(default_factory=list)
    leaving: list[Left] = field(default_factory=list)
    next: int = 0

    def __post_init__(self) -> None:
        self.taken = [Counter(one) for one in self.taken] or [Counter() for _ in range(self.sms)]
        self.leaving = list(self.leaving)

    def copy(self) -> "Places":
        return Places(self.sms, self.cycle_us, self.taken, self.leaving, self.next)

    def place(self, footprint: Footprint, clusters: int, members: int, eligible: float) -> Placed:
        """Place so many clusters one after the other, one in a cycle, each where there is most room.

        Args:
            eligible: when the first one may start, in microseconds of the stream.
        """
        groups = range(0, self.sms - members + 1, members)

        def room_of(group: int) -> int:
            return min(footprint.fits(self.taken[sm]) for sm in range(group, group + members))

        rooms, order, now = [room_of(group) for group in groups], [], eligible
        free = [eligible] * len(rooms)
        for _ in range(clusters):
            while self.leaving and (self.leaving[0].us <= now or not any(rooms)):
                left = heapq.heappop(self.leaving)
                now = max(now, left.us)
                for sm in range(left.group, left.group + left.members):
                    self.taken[sm][left.footprint] -= 1
                    if sm // members < len(rooms):
                        rooms[sm // members] = room_of(sm // members * members)
                        free[sm // members] = max(eligible, left.us)
            most = max(rooms)
            start = self.next // members % len(rooms)
            place = rooms.index(most, start) if most in rooms[start:] else rooms.index(most)
            group = groups[place]
            for sm in range(group, group + members):
                self.taken[sm][footprint] += 1
            rooms[place] = room_of(group)
            order.append(group)
            self.next = (group + members) % self.sms
            now += self.cycle_us
        return Placed(Counter(order), tuple(order), max(free[group // members] for group in order))

    def leave(
        self, placed: Placed, footprint: Footprint, members: int, ends: Mapping[int, float], spread: float
    ) -> None:
        """Say when the clusters of a launch end.

        Args:
            ends: of a group's clusters, by how many of them it has; in microseconds of the stream.
            spread: clusters that do the same end at times that differ by up to so much.
        """
        for number, group in enumerate(placed.order):
            us = ends[placed.counts[group]] - spread * (number * GOLDEN % 1)
            heapq.heappush(self.leaving, Left(us, group, members, footprint))
