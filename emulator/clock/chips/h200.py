# SPDX-License-Identifier: Apache-2.0
"""H200 SXM (SM90): an H100 with other memory. What micro-kernels measured on an H200 stands in place of an H100's."""

from emulator.clock.chips.h100 import HOPPER
from emulator.clock.constants import ChipClock, Known

MEASURED = "measured: python -m emulator.clock.measure on an H200 (2026-11-26, 4b07e23)"
H200 = ChipClock(
    "H200",
    "sm_90",
    sms=132,
    gigahertz=1.755,
    constants={
        **HOPPER,
        "l2_latency": Known(262, f"{MEASURED} (a step of 264 has a wavefront and a sector)"),
        "hbm_latency": Known(657, f"{MEASURED} (a step of 659 has a wavefront and a sector)"),
        "distant_latency": Known(190, MEASURED),
        "gpu_fence": Known(307, f"{MEASURED}: a round trip of releasing arrivals, 862, less an H100's of others, 247"),
        "hbm_terabytes": Known(4.8, "NVIDIA H200 data sheet"),
        "l2_mebibytes": Known(60, "what its driver says"),
    },
)
