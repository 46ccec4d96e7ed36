# SPDX-License-Identifier: Apache-2.0
"""Mutants that are no mistake, each with the reason; and mistakes that the emulator is known not to see."""

from suite import Rows

# Lines are those of the PTX of nvidia-cutlass-dsl 4.6.0 and flash-attn-4 4.0.0b20; another compiler's need a new look.

EQUIVALENT: Rows = [
    (
        "gemm",
        "descriptor leading: ",
        "the leading dimension's offset has no meaning for K-major operands with a swizzle (9.7.15.5.1.2, 9.7.16.4.1)",
    ),
    (
        "(tma|gemm wgmma)",
        "drop: .*setmaxnreg",
        "all warps together ask for fewer registers than the SM has, in either order; values do not depend on it",
    ),
    (
        "(tma|gemm)",
        "swap: .*fence.proxy.async.*behind `bar.sync 1, 128",
        "the warp that issues the store fences after the barrier, when it knows of all writes: as good",
    ),
    (
        "(gemm wgmma|cluster)",
        "rank: .*mapa.shared::cluster.u32 %r\\d+, %r\\d+, %r",
        "a thread arrives at each CTA of the cluster: here they take each other's turn",
    ),
    (
        "(gemm|cluster)",
        "relaxed: .*barrier.cluster.arrive;`: releases nothing",
        "nothing is read behind the last barrier; it only keeps shared memory alive",
    ),
    (
        "gemm tcgen05",
        r"relaxed: .*mbarrier.arrive.shared::cluster.*`: releases nothing \(gemm_kernels.py",
        "tcgen05.fence::before_thread_sync before it hands on what was loaded from tensor memory, and that alone is",
    ),
    (
        "gemm tcgen05",
        "drop: .*relinquish_alloc_permit",
        "nobody else allocates: the permit is given back at the end of the CTA",
    ),
    (
        "gemm tcgen05, one CTA",
        "drop: .*`bar.sync 0;`",
        "barrier 1 behind the last tcgen05.ld orders all loads before the warp that gives the columns back",
    ),
    (
        "gemm tcgen05, two CTAs",
        "swap: .*barrier.cluster.wait;`: behind `bar.sync 0;`",
        "two barriers of all threads, one behind the other, in the other order",
    ),
    (
        "cp.async groups",
        "swap: .*cp.async.commit_group;`: behind `cp.async",
        "both copies are in the first group: the wait for it waits for more than is needed",
    ),
    (
        "FlashAttention-4 sm_90a",
        "drop wait: line 201,",
        "the first wait of a round for a buffer that is empty from the start (parity 1): it never blocks at this size",
    ),
    (
        "FlashAttention-4 sm_90a",
        "wrong barrier: line 1519,",
        "a first attempt, which fails; the loop behind it waits for the right barrier: slower, and right",
    ),
    (
        "FlashAttention-4 sm_90a",
        "parity: line 2521,",
        "the register holds 1 there: the last of four blocks is in the second lap of two buffers",
    ),
    (
        "FlashAttention-4 sm_90a",
        "descriptor (swizzle|stride): line 2550,",
        "the compiler takes only the low half of this descriptor; its high half is another constant",
    ),
    (
        "FlashAttention-4 sm_90a",
        "swap: line 2855,",
        "what the stmatrix overwrites only wgmma of its own warpgroup have read, and it has waited for them",
    ),
    (
        "FlashAttention-4 sm_100a",
        "drop wait: line 528,",
        "the wait for the buffer of the next tile's first keys, before it, already orders all reads of the queries",
    ),
    (
        "FlashAttention-4 sm_100a",
        "drop wait: line 7856,",
        "the tail of a producer: it keeps the CTA until the last arrival, and other warps live longer",
    ),
]
UNSEEN: Rows = [
    (
        "(tma|cluster)",
        "drop: .*bar.warp.sync",
        "order between lanes of a warp: a warp has one clock",
    ),
]
