# SPDX-License-Identifier: Apache-2.0
"""Who last touched each word of global memory, over all clusters of a launch.

As `shadow.Shadow` for shared memory, with two differences: clusters come and go, so a stamp names its cluster as well;
and of the reads since the last write only the latest is kept, which finds fewer races of a write with reads.

Launches that overlap share their histories. The upper bits of a cluster's number are the launch's then.
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
CLUSTER_BITS = 62 - CLUSTER
# Of launches that overlap: where a cluster's number has the launch's.
LAUNCH_SHIFT = 16
MOST_LAUNCHES = (1 << CLUSTER_BITS - LAUNCH_SHIFT) - 1
ATOMIC, WHERE = 4, 5  # behind a bit for each byte


def launch_key(launch: int) -> int:
    """What stands for all clusters of a launch in Knowledge.foreign."""
    return -1 - launch


class _Side:
    """The latest write, or read, of each word.

    Args:
        who, rest: arrays of words.
        shift: of a cluster's number to its launch's.
    """

    def __init__(self, who: NDArray[np.int64], rest: NDArray[np.int32], shift: int) -> None:
        self.who, self.rest, self.shift = who, rest, shift

    @classmethod
    def new(cls, words: int, shift: int) -> "_Side":
        # Zeroed pages cost nothing until they are touched.
        return cls(np.zeros(words, np.int64), np.zeros(words, np.int32), shift)

    def part(self, words: slice) -> "_Side":
        return _Side(self.who[words], self.rest[words], self.shift)

    def put(self, words: Words, access: Access, mask: Mask) -> None:
        if access.clock >> COMPONENT or access.component >> CLUSTER - COMPONENT or access.cluster >> CLUSTER_BITS:
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
            # Atomics of another launch need an order: that launch may count on what it finds.
            others = (who >> CLUSTER) - 1 >> self.shift != access.cluster >> self.shift
            late &= (rest >> ATOMIC & 1 == 0) | others
        if not late.any():
            return None
        place = int(late.argmax())
        cluster, component, clock = split(int(who[place]))
        return Clash(int(words[place]), cluster, component, int(rest[place]) >> WHERE, earlier, clock)

    def known(self, who: int, access: Access, order: Vector) -> bool:
        """Whether an earlier access is ordered before this one."""
        cluster, component, clock = split(who)
        known = order if cluster == access.cluster else access.foreign.get(cluster)
        if known is not None and known[component] >= clock:
            return True
        return launch_key(cluster >> self.shift) in access.foreign


def split(who: int) -> tuple[int, int, int]:
    """Cluster, component and clock."""
    return (who >> CLUSTER) - 1, who >> COMPONENT & (1 << CLUSTER - COMPONENT) - 1, who & (1 << COMPONENT) - 1


class History:
    """The accesses to `size` bytes.

    Args:
        shared: by launches that overlap.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        words, shift = -(-size // 4), LAUNCH_SHIFT if shared else CLUSTER_BITS
        self._writes, self._reads = _Side.new(words, shift), _Side.new(words, shift)

    def part(self, start: int, size: int) -> "History":
        """That of `size` bytes from `start`, a multiple of 4, in the same arrays."""
        words = slice(start // 4, -(-(start + size) // 4))
        made = object.__new__(History)
        made._writes, made._reads = self._writes.part(words), self._reads.part(words)
        return made

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
