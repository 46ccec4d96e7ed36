# SPDX-License-Identifier: Apache-2.0
"""GB200's GPU (SM100): a B200 with more power, 152 SMs in use and a higher clock.

GB200 NVL72 data sheet: 360 PFLOP/s of sparse bf16 for 72 GPUs, which is 2.5 PFLOP/s of dense bf16 for one. At 8192 FLOP
a cycle and SM that is 2.0 GHz, as a B200's 2.25 PFLOP/s are 1.85 GHz.
"""

from emulator.clock.chips.b200 import BLACKWELL
from emulator.clock.constants import ChipClock, Known

GIGAHERTZ = 2.0
SUPERCHIP = {
    "l2_terabytes": Known(12.3, "DeepGEMM plans with 6.15 KB a cycle, at this chip's clock"),
}
GB200 = ChipClock("GB200", "sm_100", sms=152, gigahertz=GIGAHERTZ, constants={**BLACKWELL, **SUPERCHIP})
