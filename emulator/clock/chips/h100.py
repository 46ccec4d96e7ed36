# SPDX-License-Identifier: Apache-2.0
"""H100 SXM (SM90).

Sources by their short names:

- data sheet: NVIDIA H100 Tensor Core GPU data sheet (SXM: 989 TFLOP/s of dense bf16, 3.35 TB/s).
- guide: CUDA C++ Programming Guide, "Arithmetic Instructions", and "Shared Memory".
- HPMLL: github.com/HPMLL/NVIDIA-Hopper-Benchmark, logs of an H800 PCIe at 1755 MHz.
- derived: from other numbers, as the entry says.
- measured: by a micro-kernel on an H100 SXM; docs/emulator-clock.md has all of its figures.
- assumed: no source was found; `python -m emulator.clock.measure` times some of these on a GPU.
- fitted: to rows of docs/performance.md that docs/emulator-clock.md names.
"""

from emulator.clock.constants import ChipClock, Known

ASSUMED = "assumed"
MEASURED = "measured: python -m emulator.clock.measure on an H100 (2026-11-26, b38abec)"
AGAIN = "measured: the same on another H100 (2026-11-27, 73a7cc6)"
HOPPER = {
    "alu_latency": Known(5, MEASURED),
    "fma_latency": Known(4, MEASURED),
    "special_latency": Known(17, MEASURED),
    "mma_latency": Known(33, "HPMLL: mma.sync m16n8k16"),
    "special_rate": Known(16, "guide: 16 results a cycle; measured as well"),
    "matrix_flops": Known(4096, "data sheet: 989 TFLOP/s, 132 SMs, 1.83 GHz"),
    "branch": Known(8, ASSUMED),
    "shared_latency": Known(22, f"{MEASURED} (a step of 23 has a wavefront)"),
    "shuffle_latency": Known(24, MEASURED),
    "lsu_queue": Known(32, "assumed: wavefronts that wait before a warp cannot issue another access"),
    "l2_latency": Known(260, f"{AGAIN} (a step of 261 has a wavefront and a sector); 298 on the first one"),
    "hbm_latency": Known(694, f"{AGAIN} (a step of 695 has a wavefront and a sector)"),
    "tma_latency": Known(105, "HPMLL: a load by TMA takes 105 longer than an ordinary one"),
    "bulk_latency": Known(-12, f"{MEASURED} (333 cycles with tma_issue, an ordinary load and a wake; not by L1's way)"),
    "async_store": Known(0, "assumed: st.async takes distant_latency, as it is no work of the copy engine's loads"),
    "tma_issue": Known(20, ASSUMED),
    "port_bytes": Known(53, "52.73: dsl_backend/gemm/cost.py's fit to 16-bit GEMMs that an H100 timed"),
    "shared_bytes": Known(128, "guide: 32 banks of 4 bytes"),
    "barrier": Known(28, f"{MEASURED}, 256 threads"),
    "cluster_barrier": Known(72, AGAIN),
    "mbarrier_arrive": Known(20, "assumed: less than a load from shared memory"),
    "mbarrier_wake": Known(24, f"{MEASURED}: 44 with an arrival; how much of it is the arrival's is assumed"),
    "distant_arrive": Known(98, f"{AGAIN}: a round trip of 247, less two wakes and branches"),
    "distant_bytes": Known(20.4, f"{AGAIN}: 512 bytes of a warp take 25, 2048 of four warps 100, both ways at once"),
    "gpu_fence": Known(669, AGAIN),
    "youngest_first": Known(
        0,
        "chosen, by an H200's times of FlashAttention-4's heads of 64: 0, the oldest warp comes first (Rogers et al., "
        "Cache-Conscious Wavefront Scheduling); Huerta et al. (arXiv 2503.20481) found the youngest on other chips",
    ),
    "wgmma_latency": Known(
        53, f"{AGAIN}: chains of four products take 181 and 310, of which 128 and 256 are arithmetic"
    ),
    "store_latency": Known(500, "assumed: about a load from HBM, there and back"),
    "distant_latency": Known(192, AGAIN),
    "dispatch": Known(300, "assumed: cycles from the end of a CTA to the first instruction of the next"),
    "tensor_move_bytes": Known(128, "not on this chip"),
    "tensor_move_latency": Known(20, "not on this chip"),
    "commit_latency": Known(20, "not on this chip"),
    "store_cost": Known(1.12, "fitted: bytes of HBM that a stored byte takes the time of"),
    "launch_us": Known(1.4, "fitted: from one kernel of a graph to the next, and its first instructions"),
    "overlapped_us": Known(0.82, f"{AGAIN}: a dependent launch takes 0.58; launch_us less that"),
    "dependent_us": Known(
        0.55,
        f"{AGAIN}, at most: from a launch's end to the return of the next one's wait; a launch that waits takes 0.58",
    ),
    "l2_halves": Known(
        39,
        f"{MEASURED} and {AGAIN}: loads take 300 and 261 cycles, by which half of L2 has the line; CTAs that do the "
        "same end at times that differ by up to so much",
    ),
    "matrix_clock": Known(0.78, "fitted: the clock's part that is left where tensor cores never rest"),
    "hbm_efficiency": Known(0.92, "fitted"),
    "l2_mebibytes": Known(50, "data sheet"),
    "l2_terabytes": Known(
        12.3, "derived, at least: 352 MB in 28.7 us by an 8-bit GEMM of docs/data/h200-scaled-configs.jsonl"
    ),
}
H100 = ChipClock(
    "H100", "sm_90", sms=132, gigahertz=1.755, constants={**HOPPER, "hbm_terabytes": Known(3.35, "data sheet")}
)
