# SPDX-License-Identifier: Apache-2.0
"""B300 (SM103): a B200 with exponentials at twice the rate."""

from emulator.clock.chips.b200 import BLACKWELL
from emulator.clock.constants import ChipClock, Known

B300 = ChipClock(
    "B300",
    "sm_103",
    sms=148,
    gigahertz=1.85,
    constants={
        **BLACKWELL,
        "special_rate": Known(32, "NVIDIA Blackwell Ultra: exponentials at twice the rate; of others nothing is told"),
    },
)
