# SPDX-License-Identifier: Apache-2.0
"""The C interpreter of ordinary PTX instructions: a `Program` is encoded once, a `Warp` runs it up to each trap."""

from emulator.core.program import LOCAL_BASE, PARAM_BASE, SHARED_BASE, Program
from emulator.core.warp import Event, Fault, FaultKind, Kind, Warp

__all__ = [
    "LOCAL_BASE",
    "PARAM_BASE",
    "SHARED_BASE",
    "Event",
    "Fault",
    "FaultKind",
    "Kind",
    "Program",
    "Warp",
]
