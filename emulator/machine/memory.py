# SPDX-License-Identifier: Apache-2.0
"""Global and shared memory: bytes, bounds and alignment. Who may touch what when is the shadow's business."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.machine.findings import Kind
from emulator.machine.history import History
from emulator.machine.shadow import Shadow

Addresses = NDArray[np.int64]
Values = NDArray[Any]  # of unsigned integers

UNSIGNED: dict[int, np.dtype[Any]] = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# Of a region's base: offsets are aligned as addresses are.
ALIGNMENT = 16
# What memory holds before anyone writes it: a NaN in every floating type, so that a stale read shows.
POISON = 0xFF


class MemoryFault(Exception):
    """An access that the hardware would refuse or that leaves what a kernel was given.

    Attributes:
        kind: of the finding that it becomes.
        lane: index of the first address at fault.
    """

    def __init__(self, kind: Kind, message: str, lane: int) -> None:
        super().__init__(message)
        self.kind, self.lane = kind, lane


def check_alignment(addresses: Addresses, size: int, space: str) -> None:
    """Raises MemoryFault where an address is not a multiple of the access's size in bytes, a power of two."""
    low = addresses & (size - 1)
    if low.any():
        lane = int(np.flatnonzero(low)[0])
        raise MemoryFault(
            Kind.ALIGNMENT, f"{space} address {int(addresses[lane]):#x} is not aligned to {size} bytes", lane
        )


class Bytes:
    """A stretch of memory with a view for each access size."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data
        self.size = data.shape[0]
        self._views: dict[int, Values] = {1: data}

    def view(self, size: int) -> Values:
        """The memory as unsigned integers of `size` bytes; a rest that fills none is left out."""
        view = self._views.get(size)
        if view is None:
            view = self._views[size] = self.data[: self.size // size * size].view(UNSIGNED[size])
        return view

    def load(self, offsets: Addresses, size: int, count: int) -> Values:
        """[lanes, count] integers of `size` bytes from each offset, a multiple of size."""
        index = offsets // size
        if count == 1:
            return self.view(size)[index][:, None]
        return self.view(size)[index[:, None] + np.arange(count)]

    def store(self, offsets: Addresses, values: Values) -> None:
        """Write values [lanes, count] at each offset; of lanes that overlap the highest wins."""
        size = values.dtype.itemsize
        index = offsets // size
        self.view(size)[index[:, None] + np.arange(values.shape[1])] = values


@dataclass
class Region:
    """Global memory that a kernel was given.

    Attributes:
        base: address of its first byte, rounded down to a multiple of 16, so that offsets are aligned as addresses are.
        size: bytes from there to its end.
        name: of the tensor.
        lead: bytes at the base that are not the region's.
    """

    base: int
    size: int
    name: str
    bytes: Bytes = field(repr=False)
    history: History = field(repr=False)
    lead: int = 0

    @classmethod
    def at(cls, base: int, size: int, name: str, history: History | None = None) -> "Region":
        """The memory of this process at an address; its owner must outlive the region.

        Args:
            history: from its base on; a new one if there is none.
        """
        lead = base % ALIGNMENT
        base, size = base - lead, size + lead
        raw = (ctypes.c_uint8 * size).from_address(base)
        return cls(base, size, name, Bytes(np.ctypeslib.as_array(raw)), history or History(size), lead)


class GlobalMemory:
    """The regions that a launch may touch.

    Args:
        regions: in any order; where they overlap, as views of one tensor do, an address belongs to the largest.
    """

    def __init__(self, regions: list[Region]) -> None:
        self.regions = sorted(regions, key=lambda region: -region.size)

    def resolve(self, addresses: Addresses, size: int) -> list[tuple[Region, NDArray[np.intp], Addresses]]:
        """The accesses of `size` bytes by region: (region, lanes, offsets in it).

        Raises:
            MemoryFault: an access is misaligned or does not lie in one region.
        """
        check_alignment(addresses, size, "global")
        found: list[tuple[Region, NDArray[np.intp], Addresses]] = []
        left = np.arange(addresses.shape[0])
        for region in self.regions:
            offsets = addresses[left] - region.base
            inside = (offsets >= region.lead) & (offsets <= region.size - size)
            if inside.any():
                found.append((region, left[inside], offsets[inside]))
                left = left[~inside]
                if not left.size:
                    return found
        if not left.size:
            return found
        raise MemoryFault(Kind.BOUNDS, self._explain(int(addresses[left[0]]), size), int(left[0]))

    def _explain(self, address: int, size: int) -> str:
        access = f"{size} bytes at global address {address:#x}"
        if not self.regions:
            return f"{access}: the kernel was given no memory"

        def distance(region: Region) -> int:
            return max(region.base + region.lead - address, address + size - region.base - region.size)

        near = min(self.regions, key=distance)
        start, size_of = near.base + near.lead, near.size - near.lead
        where = f"{address - start} bytes from the start of {near.name}, which has {size_of}"
        return f"{access} are in nothing that the kernel was given; the nearest: {where}"

    def load(self, addresses: Addresses, size: int, count: int) -> Values:
        """[lanes, count] integers of `size` bytes; raises MemoryFault as `resolve`."""
        values = np.empty((addresses.shape[0], count), dtype=UNSIGNED[size])
        for region, lanes, offsets in self.resolve(addresses, size * count):
            values[lanes] = region.bytes.load(offsets, size, count)
        return values

    def store(self, addresses: Addresses, values: Values) -> None:
        """Write values [lanes, count]; raises MemoryFault as `resolve`."""
        for region, lanes, offsets in self.resolve(addresses, values.dtype.itemsize * values.shape[1]):
            region.bytes.store(offsets, values[lanes])


class SharedMemory:
    """A CTA's shared memory.

    Args:
        size: bytes that the kernel declared and was launched with.
    """

    def __init__(self, size: int) -> None:
        self.bytes = Bytes(np.full(-(-size // 16) * 16, POISON, dtype=np.uint8))
        self.size = size
        self.shadow = Shadow(size)

    def check(self, addresses: Addresses, size: int) -> None:
        """Raises MemoryFault where an access of `size` bytes is misaligned or out of bounds."""
        check_alignment(addresses, size, "shared")
        outside = (addresses < 0) | (addresses > self.size - size)
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            message = f"{size} bytes at shared address {int(addresses[lane]):#x}: the CTA has {self.size} bytes"
            raise MemoryFault(Kind.BOUNDS, message, lane)
