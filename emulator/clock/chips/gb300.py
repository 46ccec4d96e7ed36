# SPDX-License-Identifier: Apache-2.0
"""GB300's GPU (SM103): a B300 with a GB200's SMs and clock, since GB300 NVL72's data sheet has as many PFLOP/s."""

from emulator.clock.chips.b300 import B300
from emulator.clock.chips.gb200 import GIGAHERTZ, SUPERCHIP
from emulator.clock.constants import ChipClock

GB300 = ChipClock("GB300", "sm_103", sms=152, gigahertz=GIGAHERTZ, constants={**B300.constants, **SUPERCHIP})
