# SPDX-License-Identifier: Apache-2.0
"""SM100's GEMMs of quantised operands as kernels whose mutants are judged. In their problems rings go round twice."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from judge import Kernel
from suite import Rows, Suite

sys.path.append(str(Path(__file__).resolve().parent))

import scaled_cases_sm100

BY_ID = {one.id: one for one in scaled_cases_sm100.CASES}
NVFP4_FEW = BY_ID["few-nvfp4"]
SUBJECTS = {
    # All tiles by one cluster or one CTA: each ring goes on from tile to tile, and a store follows another.
    "SM100 rows, two CTAs": replace(BY_ID["two-cta"], sms=2),
    "SM100 blocks": replace(BY_ID["blocks-gated"], sms=1),
    "SM100 MXFP8": replace(BY_ID["mxfp8-gated"], sms=1),
    "SM100 NVFP4, two CTAs": BY_ID["nvfp4-two-cta-64"],
    "SM100 NVFP4 to NVFP4": replace(BY_ID["nvfp4-to-nvfp4"], sms=1),
    "SM100 rows, few rows, clusters": BY_ID["few-split"],
    # A CTA has six tiles, of which it shares one: accumulators go round twice.
    "SM100 NVFP4, few rows": replace(NVFP4_FEW, case=replace(NVFP4_FEW.case, rows=330, n=240, k=544), sms=2),
    # An accumulator for each block of k: a CTA has nine, of a tile and a half.
    "SM100 blocks, few rows": replace(BY_ID["few-blocks"], sms=2),
}


def subject(name: str, one: scaled_cases_sm100.Emulated) -> Kernel:
    """A kernel of one launch, with its call built when it is judged."""
    calls: list[Callable[[], None]] = []

    def run() -> bool:
        if not calls:
            calls.append(scaled_cases_sm100.prepared(one))
        try:
            calls[0]()
        except AssertionError:
            return False
        return True

    return Kernel(name, scaled_cases_sm100.ARCH, run, sms=one.sms, most=1, by_instruction=True)


KERNELS = {name: subject(name, one) for name, one in SUBJECTS.items()}
# (pattern of the kernel, pattern of `kind: what`, reason)
EQUIVALENT: Rows = [
    (
        "SM100",
        "drop: .*relinquish_alloc_permit",
        "nobody else allocates: the permit is given back at the end of the CTA",
    ),
    (
        "SM100",
        r"drop: .*fence.mbarrier_init.*\(gemm.py",
        "the same thread fences for the async proxy behind it, before barriers of all who use the mbarriers",
    ),
    (
        "SM100",
        "swap: .*fence.proxy.async.*behind `bar.warp.sync .*in end_store",
        "the lane that stores the rows fences behind the barrier, and so behind the other lanes' writes",
    ),
    (
        "SM100",
        r"relaxed: .*mbarrier.arrive.*releases nothing \(.* in release\)",
        "tcgen05.fence::before_thread_sync before it hands on what was loaded from tensor memory, and that alone is",
    ),
    (
        "SM100",
        "swap: .*tcgen05.wait::ld.*behind `ld.global",
        "what is loaded from memory does not come from tensor memory",
    ),
    (
        "SM100 .*two CTAs",
        "swap: .*tcgen05.fence::after_thread_sync;`: behind `cp.async.bulk.wait_group.read",
        "the wait for a store to memory between them is no access to tensor memory",
    ),
    (
        "SM100 .*two CTAs",
        r"(drop|swap): .*`bar.sync 0;`.*\(gemm.py:\d+ in kernel\)",
        "all threads of both CTAs meet at the cluster's barrier behind it",
    ),
    (
        "SM100 .*two CTAs",
        "relaxed: .*barrier.cluster.arrive;`: releases nothing .*in cluster_sync",
        "nothing is read behind the last barrier; it only keeps shared memory alive",
    ),
    (
        "SM100 .*few rows",
        r"(drop wait|wrong barrier|relaxed): .*mbarrier.try_wait.*in producer_acquire\)",
        "in the ring's first round all stages are empty, and nobody has read one",
    ),
    (
        "SM100 .*few rows, clusters",
        r"(drop: .*mbarrier.init.*pipeline.py|(drop|swap): .*in collect|(drop|arrivals): .*in release\))",
        "a CTA of a cluster has one tile: nobody waits for its accumulator's place, and nobody uses the second one",
    ),
    (
        "SM100 .*few rows, clusters",
        "relaxed: .*barrier.cluster.arrive;`: releases nothing .*in meet_begin",
        "fence.mbarrier_init.release.cluster before it releases the barriers' initialisation, and that alone is needed",
    ),
]
UNSEEN: Rows = [
    (
        "SM100",
        "(drop: .*bar.warp.sync|swap: .*behind `bar.warp.sync)",
        "order between lanes of a warp: a warp has one clock",
    ),
]
HEAD = """# Mutants of SM100's GEMMs of quantised operands

This page shows which mistakes in SM100's GEMMs of e4m3, MXFP8 and NVFP4, for many rows and for few, the emulator finds.
The mistakes are those of [emulator-mutants.md](emulator-mutants.md), one at a time in the PTX of a kernel. Tiles are
small, and problems are long enough for each ring of stages to wrap around more than twice.
[scaled-gemm-mutants.md](scaled-gemm-mutants.md) has those of SM90's.

- Of each kind of mistake and each instruction one mutant is taken, by a fixed seed.
- A mutant is found by "check" if one of the emulator's checks reports it, and by "value" if no check does and the
  error of the result is above the computed budget.
- Kernels run on a strict device, where a warning is a finding.
- The schedules lazy, eager and random run in this order until one finds the mutant.
- Files, functions and lines are those of the commit at which the page was made.

Made by `python tests/emulator/mutants/report.py --suite tests.gemm.mutants_sm100 > docs/scaled-gemm-sm100-mutants.md`.
The same mutants are tests: `pytest tests/gemm/test_scaled_ptx_mutants_sm100.py` runs all of them, `-m 'not full'` one.
"""

SUITE = Suite([*KERNELS], KERNELS.__getitem__, EQUIVALENT, UNSEEN, HEAD)
