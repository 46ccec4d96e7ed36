# SPDX-License-Identifier: Apache-2.0
"""What a GPU says of itself that the times of kernels depend on.

Two products of one architecture differ in these: an H100 has two thirds of an H200's memory bandwidth and the same SMs.
Cost models and tuning records use them instead of the product's name.
"""

import ctypes
from dataclasses import dataclass

# CUdevice_attribute of the driver API. torch has these in some versions only.
CLOCK_KHZ, SM_COUNT, MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS, L2_BYTES = 13, 16, 36, 37, 38
# Parts of one product differ by less in what they say, and products by more.
TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A GPU's size and rates.

    Attributes:
        sm_count: streaming multiprocessors.
        memory_gb_s: 10^9 bytes of device memory in a second, by the memory's clock and width. Kernels reach 90 %.
        clock_mhz: the highest clock of the SMs. Matrix products are throttled below it.
        l2_bytes: the size of the L2 cache.
    """

    sm_count: int
    memory_gb_s: int
    clock_mhz: int
    l2_bytes: int

    def is_like(self, other: "Chip") -> bool:
        """Whether times that were measured on one hold for the other: equally many SMs, and about the same rates."""
        pairs = (
            (self.memory_gb_s, other.memory_gb_s),
            (self.clock_mhz, other.clock_mhz),
            (self.l2_bytes, other.l2_bytes),
        )
        return self.sm_count == other.sm_count and all(abs(a - b) <= TOLERANCE * max(a, b) for a, b in pairs)


def from_attributes(sm_count: int, memory_khz: int, bus_bits: int, clock_khz: int, l2_bytes: int) -> Chip | None:
    """The chip of a driver's attributes; None if the driver does not know one of them."""
    if min(sm_count, memory_khz, bus_bits, clock_khz, l2_bytes) <= 0:
        return None
    # Two transfers in a clock, of bus_bits / 8 bytes each.
    memory_gb_s = round(2 * memory_khz * bus_bits / 8 / 1e6)
    return Chip(sm_count=sm_count, memory_gb_s=memory_gb_s, clock_mhz=round(clock_khz / 1000), l2_bytes=l2_bytes)


def of_device(index: int) -> Chip | None:
    """The chip of a CUDA device by its index, as torch counts; None where the driver cannot be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return None

    def attribute(number: int) -> int:
        failed = driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return 0 if failed else value.value

    return from_attributes(*map(attribute, (SM_COUNT, MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS, CLOCK_KHZ, L2_BYTES)))
