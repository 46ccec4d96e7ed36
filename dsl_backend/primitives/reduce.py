# SPDX-License-Identifier: Apache-2.0
"""Softmax states of threads merged into one for a row: in a warp, a block, or a cluster.

The merge takes the largest maximum first and weighs every sum against it once, so that each level costs one exponential
a thread. All threads of a row get the result.
"""

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

from dsl_backend.primitives.math import MaxSum, finite_or_zero, largest, total, weight

WARP = 32
PAIR_BYTES = 8


def in_warp(state: MaxSum, lanes: int) -> MaxSum:
    """Merge over aligned groups of lanes. All lanes of the warp take part.

    Args:
        lanes: of a group; a power of two up to 32.
    """
    if lanes == 1:
        return state
    maximum = cute.arch.warp_reduction(state.maximum, cute.arch.fmax, threads_in_group=lanes)
    weighed = state.total * weight(state.maximum, finite_or_zero(maximum))
    return MaxSum(maximum, cute.arch.warp_reduction(weighed, lambda a, b: a + b, threads_in_group=lanes))


def slots_layout(rows: int, warps: int, cluster: int) -> cute.Layout:
    """Float32 in shared memory for the states of every warp that works on a block's rows: [pair, slot, row].

    Args:
        warps: of a block, for each row.
        cluster: blocks for each row.
    """
    return cute.make_layout((2, warps * cluster, rows))


@cute.jit
def from_slots(slots: cute.Tensor, row: cutlass.Int32) -> MaxSum:
    """The states of a row's slots merged by a whole warp."""
    lane = cute.arch.lane_idx()
    count = cutlass.const_expr(cute.size(slots, mode=[1]))
    steps = cutlass.const_expr((count + WARP - 1) // WARP)
    found = cute.make_rmem_tensor((2, steps), cutlass.Float32)
    for step in cutlass.range_constexpr(steps):
        found[0, step] = -cutlass.Float32.inf
        found[1, step] = cutlass.Float32(0.0)
        slot = lane + step * WARP
        if slot < count:
            found[0, step] = slots[0, slot, row]
            found[1, step] = slots[1, slot, row]
    maximum = largest([found[0, step] for step in range(steps)])
    safe = finite_or_zero(maximum)
    merged = total([found[1, step] * weight(found[0, step], safe) for step in range(steps)])
    return in_warp(MaxSum(maximum, merged), WARP)


@cute.jit
def in_block(state: MaxSum, slots: cute.Tensor, warps: cutlass.Constexpr[int]) -> MaxSum:
    """Merge the states of neighbouring warps, each one's already merged. All threads of the block take part.

    Args:
        slots: of `slots_layout`, written by nobody since the last barrier.
        warps: that work on one row.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, place = warp // warps, warp % warps
    if cute.arch.lane_idx() == 0:
        slots[0, place, row] = state.maximum
        slots[1, place, row] = state.total
    cute.arch.sync_threads()
    return from_slots(slots, row)


@dsl_user_op
def send_pair(first, second, place, barrier, block, *, loc=None, ip=None):
    """st.async of two float32 to the same place of another block of the cluster; its mbarrier counts their bytes."""
    there = cute.arch.map_dsmem_ptr(place, block, loc=loc, ip=ip)
    signal = cute.arch.map_dsmem_ptr(barrier, block, loc=loc, ip=ip)
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], { {$r1}, {$r2} }, [{$r3}];",
        read_only_args=[
            cutlass.Int32(there.toint(loc=loc, ip=ip)),
            first,
            second,
            cutlass.Int32(signal.toint(loc=loc, ip=ip)),
        ],
        loc=loc,
        ip=ip,
    )


@cute.jit
def open_exchange(barrier: cute.Pointer):
    """Make the mbarrier of `in_cluster`; `in_cluster` waits until every block has done so.

    All threads of the cluster call both, in this order, with what takes time between them.
    """
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def in_cluster(
    state: MaxSum,
    slots: cute.Tensor,
    barrier: cute.Pointer,
    warps: cutlass.Constexpr[int],
    cluster: cutlass.Constexpr[int],
) -> MaxSum:
    """Merge the states of all warps of a cluster whose blocks work on one row; once in a kernel.

    Every warp sends its state to every block, itself included, so that one wait is the only step between them. A block
    has received all that is sent to it when this returns, so it may exit.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    cute.arch.cluster_wait()
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, warps * cluster * PAIR_BYTES)
    if lane < cluster:
        slot = cute.arch.block_idx_in_cluster() * warps + warp
        place = slots.iterator + slots.layout((0, slot, 0))
        send_pair(state.maximum, state.total, place, barrier, lane)
    cute.arch.mbarrier_wait(barrier, 0)
    return from_slots(slots, cutlass.Int32(0))
