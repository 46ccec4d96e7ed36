# SPDX-License-Identifier: Apache-2.0
"""B200 (SM100). Sources by their short names:

- data sheet: NVIDIA B200 data sheet (2.25 PFLOP/s of dense bf16, 8 TB/s).
- umma: github.com microbench-blackwell, `umma_throughput/tput_results_max.csv` and `umma_latency/fit_results.csv`.
- tma: the same, `tma2d_lat_results.csv` and `compare_mem_throughput`.
- as H100: no source for this chip; the H100's number stands here.
- before: what stood for the H100 until it was measured: docs/emulator-clock.md's table was made with these numbers.
"""

from emulator.clock.chips.h100 import HOPPER
from emulator.clock.constants import ChipClock, Known

BLACKWELL = {name: Known(known.value, f"as H100: {known.source}") for name, known in HOPPER.items()} | {
    "youngest_first": Known(1, "before: Huerta et al., Analyzing Modern NVIDIA GPU Cores (arXiv 2503.20481)"),
    "alu_latency": Known(5, "before: assumed, 4 to 6 on chips since Volta; an H100 has 5"),
    "fma_latency": Known(4, "before: assumed, 4 on chips since Volta; an H100 has 4"),
    "special_latency": Known(23, "before: assumed; an H100 has 17"),
    "shared_latency": Known(29, "before: HPMLL, 29 to 33 on an H800; an H100 has 22"),
    "shuffle_latency": Known(23, "before: assumed; an H100 has 24"),
    "l2_latency": Known(262, "before: HPMLL, 260 to 264 on an H800; an H100 has 298"),
    "bulk_latency": Known(105, "before: tma_latency; an H100 has 12 less than nothing"),
    "port_bytes": Known(64, "before: assumed; an H100 has 53"),
    "async_store": Known(105, "before: tma_latency"),
    "barrier": Known(20, "before: assumed; an H100 has 28"),
    "mbarrier_wake": Known(25, "before: assumed; an H100 has 24"),
    "distant_arrive": Known(20, "before: assumed to be mbarrier_arrive"),
    "distant_bytes": Known(64, "before: port_bytes; an H200 has 20.4"),
    "distant_latency": Known(200, "before: HPMLL, 181 to 207 on an H800; an H100 has 192"),
    "cluster_barrier": Known(190, "before: derived from distant_latency; an H100 has 72"),
    "overlapped_us": Known(0.96, "before: pegainfer issue 569; an H100 has 0.82"),
    "dependent_us": Known(0.41, "derived, at most: what an H100 has is 0.03 less than launch_us less overlapped_us"),
    "matrix_flops": Known(8192, "umma: m128n256k16 every 128 cycles"),
    "hbm_latency": Known(1150, "tma: 1100 to 1200 by LDGSTS, all SMs loaded"),
    "tensor_move_bytes": Known(128, "assumed: 32 lanes of 4 bytes for each of an SM's four parts; no source was found"),
    "tensor_move_latency": Known(20, "assumed; no source was found"),
    "commit_latency": Known(16, "derived from umma: what a chain takes beyond its intervals, less what an MMA takes"),
    "hbm_terabytes": Known(8.0, "data sheet"),
    "hbm_efficiency": Known(0.9, "tma: 7.1 to 7.2 TB/s from 64 KB in flight for each SM"),
    "l2_mebibytes": Known(126, "published size of a B200's L2; not checked on one"),
    "l2_terabytes": Known(
        11.4, "DeepGEMM plans with 6.15 KB a cycle; at this chip's clock, where DeepGEMM has 1.3 GHz"
    ),
}
B200 = ChipClock("B200", "sm_100", sms=148, gigahertz=1.85, constants=BLACKWELL)
