# SPDX-License-Identifier: Apache-2.0
"""Who last touched each word of global memory, over all clusters of a launch.

As `shadow.Shadow` for shared memory, with two differences: clusters come and go, so a stamp names its cluster as well;
and of the reads since the last write only the latest is kept, which finds fewer races of a write with reads.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.clocks import Vector

Words = NDArray[np.int64]
Mask = int | NDArray[np.uint8]


@dataclass(frozen=True)
class Access:
    """An access to global memory.

    Attributes:
        cluster: number of the cluster, from 0.
        component, clock: its stamp.
        where: index of the instruction.
        order: what is ordered before it, of its own cluster.
        foreign: the same of other clusters.
        atomic: needs no order with other atomic ones.
        read_order: as `order`, for what is ordered before it of reads, where that differs.
    """

    cluster: int
    component: int
    clock: int
    where: int
    order: Vector
    foreign: dict[int, Vector]
    atomic: bool = False
    read_order: Vector | None = None


@dataclass(frozen=True)
class Clash:
    """Two accesses that nothing orders: the earlier one with its clock, and the first word in question."""

    word: int
    cluster: int
    component: int
    where: int
    earlier: str
    clock: int


# An access in two integers: who made it, which is 0 for nobody, and the rest.
COMPONENT, CLUSTER = 24, 40  # first bits, behind the clock's
ATOMIC, WHERE = 4, 5  # behind a bit for each byte


class _Side:
    """The latest write, or read, of each word. Zeroed pages cost nothing until they are touched."""

    def __init__(self, words: int) -> None:
        self.who = np.zeros(words, np.int64)
        self.rest = np.zeros(words, np.int32)

    def put(self, words: Words, access: Access, mask: Mask) -> None:
        if access.clock >> COMPONENT or access.component >> CLUSTER - COMPONENT or access.cluster >> 62 - CLUSTER:
            raise Unsupported("so long a launch: its events or clusters cannot be told apart any more")
        self.who[words] = access.cluster + 1 << CLUSTER | access.component << COMPONENT | access.clock
        rest = access.where << WHERE | access.atomic << ATOMIC
        self.rest[words] = rest | mask if isinstance(mask, int) else rest | mask.astype(np.int32)

    def clash(self, words: Words, access: Access, order: Vector, mask: Mask, earlier: str) -> Clash | None:
        who = self.who[words]
        if not who.any():
            return None
        if (who == who[0]).all() and self.known(int(who[0]), access, order):
            return None
        different, place_of = np.unique(who, return_inverse=True)
        unknown = np.array([one != 0 and not self.known(one, access, order) for one in different.tolist()])
        late = unknown[place_of]
        rest = self.rest[words]
        late &= (rest & mask) != 0
        if access.atomic:
            late &= rest >> ATOMIC & 1 == 0
        if not late.any():
            return None
        place = int(late.argmax())
        cluster, component, clock = split(int(who[place]))
        return Clash(int(words[place]), cluster, component, int(rest[place]) >> WHERE, earlier, clock)

    @staticmethod
    def known(who: int, access: Access, order: Vector) -> bool:
        """Whether an earlier access is ordered before this one."""
        cluster, component, clock = split(who)
        known = order if cluster == access.cluster else access.foreign.get(cluster)
        return known is not None and bool(known[component] >= clock)


def split(who: int) -> tuple[int, int, int]:
    """Cluster, component and clock."""
    return (who >> CLUSTER) - 1, who >> COMPONENT & (1 << CLUSTER - COMPONENT) - 1, who & (1 << COMPONENT) - 1


class History:
    """The accesses to `size` bytes."""

    def __init__(self, size: int) -> None:
        words = -(-size // 4)
        self._writes, self._reads = _Side(words), _Side(words)

    def read(self, words: Words, access: Access, mask: Mask) -> Clash | None:
        """Record a read; the write that is not ordered before it, if there is one."""
        clash = self._writes.clash(words, access, access.order, mask, "write")
        self._reads.put(words, access, mask)
        return clash

    def write(self, words: Words, access: Access, mask: Mask) -> Clash | None:
        """Record a write; the write or read that is not ordered before it, if there is one."""
        reads = access.order if access.read_order is None else access.read_order
        clash = self._writes.clash(words, access, access.order, mask, "write") or self._reads.clash(
            words, access, reads, mask, "read"
        )
        self._writes.put(words, access, mask)
        return clash
