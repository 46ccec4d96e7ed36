# SPDX-License-Identifier: Apache-2.0
"""B200 (SM100). Sources by their short names:

- data sheet: NVIDIA B200 data sheet (2.25 PFLOP/s of dense bf16, 8 TB/s).
- umma: github.com microbench-blackwell, `umma_throughput/tput_results_max.csv` and `umma_latency/fit_results.csv`.
- tma: the same, `tma2d_lat_results.csv` and `compare_mem_throughput`.
- as H100: no source for this chip; the H100's number stands here.
"""

from emulator.clock.chips.h100 import HOPPER
from emulator.clock.constants import ChipClock, Known

BLACKWELL = {name: Known(known.value, f"as H100: {known.source}") for name, known in HOPPER.items()} | {
    "matrix_flops": Known(8192, "umma: m128n256k16 every 128 cycles"),
    "hbm_latency": Known(1150, "tma: 1100 to 1200 by LDGSTS, all SMs loaded"),
    "tensor_move_bytes": Known(128, "assumed: 32 lanes of 4 bytes for each of an SM's four parts; no source was found"),
    "tensor_move_latency": Known(20, "assumed; no source was found"),
    "commit_latency": Known(16, "derived from umma: what a chain takes beyond its intervals, less what an MMA takes"),
    "hbm_terabytes": Known(8.0, "data sheet"),
    "hbm_efficiency": Known(0.9, "tma: 7.1 to 7.2 TB/s from 64 KB in flight for each SM"),
    "l2_terabytes": Known(
        11.4, "DeepGEMM plans with 6.15 KB a cycle; at this chip's clock, where DeepGEMM has 1.3 GHz"
    ),
}
B200 = ChipClock("B200", "sm_100", sms=148, gigahertz=1.85, constants=BLACKWELL)
