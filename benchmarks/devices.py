# SPDX-License-Identifier: Apache-2.0
"""Measured peak rates of devices, and the shortest time that a case can take on a device."""

from dataclasses import dataclass

from .case import Case


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The rates that simple programs reached on a device. They are below the datasheet's.

    Attributes:
        bytes_per_second: reads of device memory.
        flops_per_second: bf16 matrix products of random data.
    """

    bytes_per_second: float
    flops_per_second: float


# H200: a read of 8 GB runs at 4.4 TB/s; an 8192³ bf16 product of random data at 769 to 798 TFLOP/s (2026-11).
# H100: a read of 8.6 GB by torch's max runs at 3.02 TB/s, by its sum at 2.96; the same product at 754 TFLOP/s alone and
# at 707 in a row of 300 (2026-11-26).
CEILINGS = {
    "NVIDIA H200": Ceilings(bytes_per_second=4.4e12, flops_per_second=790e12),
    "NVIDIA H100 80GB HBM3": Ceilings(bytes_per_second=3.0e12, flops_per_second=750e12),
}
# 8-bit products for a bf16 one in the same time, by the datasheet.
EIGHT_BIT = 2


def floor_us(case: Case, device_name: str) -> float | None:
    """The roofline time of a case in microseconds; None if the device is not in the table."""
    ceilings = CEILINGS.get(device_name)
    if ceilings is None:
        return None
    rate = ceilings.flops_per_second * (EIGHT_BIT if case.eight_bit else 1)
    return 1e6 * max(case.traffic_bytes / ceilings.bytes_per_second, case.flops / rate)
