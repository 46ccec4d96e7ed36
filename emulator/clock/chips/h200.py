# SPDX-License-Identifier: Apache-2.0
"""H200 SXM (SM90): an H100 with other memory."""

from emulator.clock.chips.h100 import HOPPER
from emulator.clock.constants import ChipClock, Known

H200 = ChipClock(
    "H200",
    "sm_90",
    sms=132,
    gigahertz=1.755,
    constants={**HOPPER, "hbm_terabytes": Known(4.8, "NVIDIA H200 data sheet")},
)
