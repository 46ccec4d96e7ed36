# SPDX-License-Identifier: Apache-2.0
"""What kernels did, by role, class of instruction and unit of an SM, and a simple cycle model of it.

with emulator.device("sm_100a") as device:
    compiled(q, k, v)
print(emulator.profile.summary(device.profile, tiles=16).table())
"""

from emulator.profile.classes import Class, Unit, classify, cost
from emulator.profile.rates import B200, B300, H200, Rates, rates
from emulator.profile.report import compare
from emulator.profile.summary import KernelSummary, Role, Site, Summary, summary

__all__ = [
    "B200",
    "B300",
    "H200",
    "Class",
    "KernelSummary",
    "Rates",
    "Role",
    "Site",
    "Summary",
    "Unit",
    "classify",
    "compare",
    "cost",
    "rates",
    "summary",
]
