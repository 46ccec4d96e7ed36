# SPDX-License-Identifier: Apache-2.0
"""H100 SXM (SM90).

Sources by their short names:

- data sheet: NVIDIA H100 Tensor Core GPU data sheet (SXM: 989 TFLOP/s of dense bf16, 3.35 TB/s).
- guide: CUDA C++ Programming Guide, "Arithmetic Instructions", and "Shared Memory".
- HPMLL: github.com/HPMLL/NVIDIA-Hopper-Benchmark, logs of an H800 PCIe at 1755 MHz.
- derived: from other numbers, as the entry says.
- assumed: no source was found; `python -m emulator.clock.measure` times it on a GPU.
- fitted: to rows of docs/performance.md that docs/emulator-clock.md names.
"""

from emulator.clock.constants import ChipClock, Known

ASSUMED = "assumed"
HOPPER = {
    "alu_latency": Known(5, "assumed: 4 to 6 on chips since Volta"),
    "fma_latency": Known(4, "assumed: 4 on chips since Volta"),
    "special_latency": Known(23, "assumed: MUFU's result comes by the same way as a shuffle's"),
    "mma_latency": Known(33, "HPMLL: mma.sync m16n8k16"),
    "special_rate": Known(16, "guide: 16 results a cycle"),
    "matrix_flops": Known(4096, "data sheet: 989 TFLOP/s, 132 SMs, 1.83 GHz"),
    "branch": Known(8, ASSUMED),
    "shared_latency": Known(29, "HPMLL: 29 to 33"),
    "shuffle_latency": Known(23, "assumed: a little less than a load from shared memory"),
    "lsu_queue": Known(32, "assumed: wavefronts that wait before a warp cannot issue another access"),
    "l2_latency": Known(262, "HPMLL: 260 to 264"),
    "hbm_latency": Known(570, "HPMLL: 483 to 638, 570 by pointer chase"),
    "tma_latency": Known(105, "HPMLL: a load by TMA takes 105 longer than an ordinary one"),
    "tma_issue": Known(20, ASSUMED),
    "port_bytes": Known(64, "assumed: 64 bytes a cycle from L2 into an SM"),
    "shared_bytes": Known(128, "guide: 32 banks of 4 bytes"),
    "barrier": Known(20, ASSUMED),
    "cluster_barrier": Known(190, "derived: a round trip to another SM, HPMLL: 181 to 207"),
    "mbarrier_arrive": Known(20, "assumed: less than a load from shared memory"),
    "mbarrier_wake": Known(25, "assumed: a load from shared memory, as try_wait is one"),
    "wgmma_latency": Known(32, "assumed: about mma.sync's"),
    "store_latency": Known(500, "assumed: about a load from HBM, there and back"),
    "distant_latency": Known(200, "HPMLL: 181 within a TPC, 202 to 207 beyond"),
    "dispatch": Known(300, "assumed: cycles from the end of a CTA to the first instruction of the next"),
    "tensor_move_bytes": Known(128, "not on this chip"),
    "tensor_move_latency": Known(20, "not on this chip"),
    "commit_latency": Known(20, "not on this chip"),
    "store_cost": Known(1.12, "fitted: bytes of HBM that a stored byte takes the time of"),
    "launch_us": Known(1.4, "fitted: from one kernel of a graph to the next, and its first instructions"),
    "overlapped_us": Known(0.96, "pegainfer issue 569: what programmatic dependent launch recovers at most"),
    "matrix_clock": Known(0.78, "fitted: the clock's part that is left where tensor cores never rest"),
    "hbm_efficiency": Known(0.92, "fitted"),
    "l2_terabytes": Known(9.0, "fitted: NVIDIA A100 whitepaper: 5120 bytes a cycle; taken to be the same here"),
}
H100 = ChipClock(
    "H100", "sm_90", sms=132, gigahertz=1.755, constants={**HOPPER, "hbm_terabytes": Known(3.35, "data sheet")}
)
