# SPDX-License-Identifier: Apache-2.0
"""From clusters to a launch: how many fit on the SMs at the same time, which ones are simulated, what that comes to."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from emulator.host.launch import Launch

SHARED_OF_SM = 228 * 1024
RESERVED = 1024  # of each CTA
THREADS, CTAS, WARP = 2048, 32, 32
# An SM's registers: each warp has its own in one partition, by so many.
PARTITIONS, OF_PARTITION, REGISTER_UNIT = 4, 16 * 1024, 256
ALIKE = 0.02  # clusters whose instructions differ by no more are of one class
MIDDLES = 3
GOLDEN = (5**0.5 - 1) / 2
SETTLED = 4  # turns of an SM's slots that are simulated before the rest is taken to go on alike


def chosen(clusters: int, count: int) -> tuple[int, ...]:
    """Places in the grid of the clusters to be simulated, one in each even share.

    Up to three are in the middle of their shares: the last clusters of a grid often have little to do, and the first
    ones what is left of it. More are at another part of each share, by the golden ratio. Under a causal mask work
    repeats with the heads; middles of shares would all meet one phase of it.
    """
    if count >= clusters:
        return tuple(range(clusters))
    if count <= MIDDLES:
        return tuple((2 * number + 1) * clusters // (2 * count) for number in range(count))
    return tuple(int((number + (0.5 + number * GOLDEN) % 1) * clusters / count) for number in range(count))


class Footprint(NamedTuple):
    """What a CTA takes of an SM.

    Attributes:
        registers: of a warp.
    """

    warps: int
    shared: int
    registers: int

    @classmethod
    def of(cls, launch: Launch, shared_bytes: int, registers: int) -> "Footprint":
        """
        Args:
            registers: of a thread.
        """
        warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // WARP)
        units = max(1, -(-registers * WARP // REGISTER_UNIT))
        return cls(warps, shared_bytes + RESERVED, units * REGISTER_UNIT)

    def fits(self, taken: "Mapping[Footprint, int] | None" = None) -> int:
        """So many of it fit on an SM, beside so many of some others."""
        warps, shared, registers, ctas = THREADS // WARP, SHARED_OF_SM, OF_PARTITION, CTAS
        for other, count in (taken or {}).items():
            warps -= count * other.warps
            shared -= count * other.shared
            # The partition with most of the others' warps counts.
            registers -= -(-count * other.warps // PARTITIONS) * other.registers
            ctas -= count
        warps = min(warps, PARTITIONS * (registers // self.registers))
        return max(0, min(warps // self.warps, shared // self.shared, ctas))


@dataclass(frozen=True)
class Layout:
    """A grid on a chip.

    Attributes:
        clusters: of the grid.
        groups: of SMs that run clusters: those that are used.
        slots: clusters that a group runs at the same time.
        members: CTAs of a cluster.
        crowd: clusters of the group that has most, where they are not spread evenly.
    """

    clusters: int
    groups: int
    slots: int
    members: int
    crowd: int = 0

    @classmethod
    def of(cls, launch: Launch, sms: int, slots: int) -> "Layout":
        members = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
        clusters = launch.grid[0] * launch.grid[1] * launch.grid[2] // members
        # With few clusters each has an SM for itself.
        return cls(clusters, min(clusters, sms // members), slots, members)

    @property
    def per_group(self) -> int:
        """Clusters of the group that has most."""
        return max(self.crowd, -(-self.clusters // self.groups))

    @property
    def first_turn(self) -> int:
        """Clusters that run at the same time."""
        return min(self.clusters, self.groups * self.slots)

    @property
    def active(self) -> float:
        """SMs at work, on average while those work that have most to do."""
        return self.clusters / self.per_group * self.members


def share_of(place: int, clusters: int, count: int) -> int:
    """In which of so many even shares of the grid a cluster is: the simulated one of that share stands for it."""
    return place * count // clusters


def weights(clusters: int, count: int) -> list[int]:
    """How many clusters of the grid each of so many simulated ones stands for."""
    found = [0] * count
    for place in range(clusters):
        found[share_of(place, clusters, count)] += 1
    return found


def at_work(layout: Layout, counts: Sequence[int], active: float) -> float:
    """SMs at work, on average while those work that have most to do: a cluster with half of it is at work half as long.

    Only where each cluster has SMs for itself, as those of a persistent kernel: elsewhere the next cluster follows.

    Args:
        counts: instructions of the simulated clusters, each of which stands for its share of the grid.
        active: SMs at work if all clusters have as much to do.
    """
    if layout.per_group > 1:
        return active
    stands_for = weights(layout.clusters, len(counts))
    busy = sum(weight * count for weight, count in zip(stands_for, counts, strict=True)) / max(counts)
    return active * busy / layout.clusters


class Span(NamedTuple):
    """A cluster that begins at 0: when it ends, and when its CTAs have let the next launch start or have ended.

    Attributes:
        late_end, late_release: the same where it has to wait for the launch before.
    """

    end: float
    release: float
    late_end: float
    late_release: float


def laid_out(layout: Layout, spans: Sequence[Span], before_ends: float = 0.0) -> tuple[float, float]:
    """When a grid of different clusters ends, and when the next one may start.

    Each cluster starts where a slot is free first, in their order.

    Args:
        before_ends: clusters that start earlier wait for the launch before until then.
    """
    free = [0.0] * min(layout.clusters, layout.groups * layout.slots)
    heapq.heapify(free)
    released = 0.0
    for place in range(layout.clusters):
        start = heapq.heappop(free)
        span = spans[share_of(place, layout.clusters, len(spans))]
        end, release = start + span.end, start + span.release
        if start < before_ends:
            end, release = max(end, span.late_end), max(release, span.late_release)
        heapq.heappush(free, end)
        released = max(released, release)
    return max(free), released
