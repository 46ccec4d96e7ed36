# SPDX-License-Identifier: Apache-2.0
"""GB200's GPU (SM100): a B200 with more power, of which the model knows nothing, and 152 SMs in use."""

from emulator.clock.chips.b200 import BLACKWELL
from emulator.clock.constants import ChipClock

GB200 = ChipClock("GB200", "sm_100", sms=152, gigahertz=1.85, constants=BLACKWELL)
