# SPDX-License-Identifier: Apache-2.0
"""Reduction of online-softmax states over the threads of a row: in a warp, a CTA, or a cluster.

A level reduces the maxima first and then rescales every sum to the result once, so that it costs one exponential a
thread. All threads of a row get the result.
"""

import cutlass
from cutlass import cute
from cutlass.cutlass_dsl import dsl_user_op

from dsl_backend.primitives.math import MaxSum, exp_difference, finite_or_zero, tree_max, tree_sum

WARP = 32
PAIR_BYTES = 8


def warp_reduce(state: MaxSum, lanes: int) -> MaxSum:
    """Reduce over aligned groups of lanes, a power of two up to 32. All lanes of the warp call it."""
    if lanes == 1:
        return state
    maximum = cute.arch.warp_reduction(state.maximum, cute.arch.fmax, threads_in_group=lanes)
    rescaled = state.total * exp_difference(state.maximum, finite_or_zero(maximum))
    return MaxSum(maximum, cute.arch.warp_reduction(rescaled, lambda a, b: a + b, threads_in_group=lanes))


def reduction_buffer_layout(rows: int, warps: int, cluster: int) -> cute.Layout:
    """Float32 in shared memory for one state of every warp: [pair, warp of the row, row].

    Args:
        rows: of a CTA.
        warps: of a CTA for each row.
        cluster: CTAs for each row.
    """
    return cute.make_layout((2, warps * cluster, rows))


@cute.jit
def reduce_buffer(buffer: cute.Tensor, row: cutlass.Int32) -> MaxSum:
    """Reduce the states that the warps of a row have written. A whole warp calls it."""
    lane = cute.arch.lane_idx()
    count = cutlass.const_expr(cute.size(buffer, mode=[1]))
    steps = cutlass.const_expr((count + WARP - 1) // WARP)
    states = cute.make_rmem_tensor((2, steps), cutlass.Float32)
    for step in cutlass.range_constexpr(steps):
        states[0, step] = -cutlass.Float32.inf
        states[1, step] = cutlass.Float32(0.0)
        warp = lane + step * WARP
        if warp < count:
            states[0, step] = buffer[0, warp, row]
            states[1, step] = buffer[1, warp, row]
    maximum = tree_max([states[0, step] for step in range(steps)])
    safe = finite_or_zero(maximum)
    total = tree_sum([states[1, step] * exp_difference(states[0, step], safe) for step in range(steps)])
    return warp_reduce(MaxSum(maximum, total), WARP)


@cute.jit
def cta_reduce(state: MaxSum, buffer: cute.Tensor, warps: cutlass.Constexpr[int]) -> MaxSum:
    """Reduce over consecutive warps, whose states are reduced already. All threads of the CTA call it.

    Args:
        buffer: of `reduction_buffer_layout`, not written since the last barrier.
        warps: of a row.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, warp_of_row = warp // warps, warp % warps
    if cute.arch.lane_idx() == 0:
        buffer[0, warp_of_row, row] = state.maximum
        buffer[1, warp_of_row, row] = state.total
    cute.arch.sync_threads()
    return reduce_buffer(buffer, row)


@dsl_user_op
def store_state_remote(
    state: MaxSum, target: cute.Pointer, mbar: cute.Pointer, cta_rank: cutlass.Int32, *, loc=None, ip=None
) -> None:
    """st.async of a state to the same shared-memory address of another CTA; that CTA's mbarrier counts the bytes."""
    there = cute.arch.map_dsmem_ptr(target, cta_rank, loc=loc, ip=ip)
    signal = cute.arch.map_dsmem_ptr(mbar, cta_rank, loc=loc, ip=ip)
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], { {$r1}, {$r2} }, [{$r3}];",
        read_only_args=[
            cutlass.Int32(there.toint(loc=loc, ip=ip)),
            state.maximum,
            state.total,
            cutlass.Int32(signal.toint(loc=loc, ip=ip)),
        ],
        loc=loc,
        ip=ip,
    )


@cute.jit
def init_cluster_reduce(mbar: cute.Pointer):
    """Initialise the mbarrier of `cluster_reduce`, which waits until every CTA has done so.

    All threads of the cluster call both, in this order. Work between them hides the wait.
    """
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_init(mbar, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()


@cute.jit
def cluster_reduce(
    state: MaxSum,
    buffer: cute.Tensor,
    mbar: cute.Pointer,
    warps: cutlass.Constexpr[int],
    cluster: cutlass.Constexpr[int],
) -> MaxSum:
    """Reduce over all warps of a cluster whose CTAs share one row; once in a kernel.

    Every warp sends its state to every CTA, its own included, so that one wait is all the synchronisation. When this
    returns, the CTA has received all that is sent to it, so it may exit.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    cute.arch.cluster_wait()
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(mbar, warps * cluster * PAIR_BYTES)
    if lane < cluster:
        warp_of_row = cute.arch.block_idx_in_cluster() * warps + warp
        target = buffer.iterator + buffer.layout((0, warp_of_row, 0))
        store_state_remote(state, target, mbar, lane)
    cute.arch.mbarrier_wait(mbar, 0)
    return reduce_buffer(buffer, cutlass.Int32(0))
