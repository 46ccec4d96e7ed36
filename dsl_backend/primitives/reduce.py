# SPDX-License-Identifier: Apache-2.0
"""Reduction of a state over the threads of a row: in a warp, a CTA, or a cluster. All threads of a row get the result.

A state is a NamedTuple of one or two float32 with these methods:

    empty()         the state of no values
    tree(states)    one state from several
    lanes(count)    from the states of aligned groups of lanes, a power of two up to 32; all lanes of the warp call it
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.copy import store_shared_remote
from dsl_backend.primitives.math import exp_difference, finite_or_zero, tree_max, tree_sum
from dsl_backend.primitives.moved import SmemAllocator

WARP = 32


def add(a, b):
    return a + b


class MaxSum(NamedTuple):
    """The online-softmax state of a set of values, both float32.

    A level reduces the maxima first and then rescales every sum to the result once, so that it costs one exponential a
    thread.

    Attributes:
        maximum: of the values; -inf if the set is empty, or has only -inf and NaN.
        total: sum of exp(value - maximum); 0 if the maximum is -inf and no value is NaN. NaN if a value is NaN or +inf,
            and then of every state that it is merged into.
    """

    maximum: cutlass.Float32
    total: cutlass.Float32

    @staticmethod
    def empty() -> "MaxSum":
        return MaxSum(-cutlass.Float32.inf, cutlass.Float32(0.0))

    @staticmethod
    def tree(states: Sequence["MaxSum"]) -> "MaxSum":
        maximum = tree_max([state.maximum for state in states])
        safe = finite_or_zero(maximum)
        return MaxSum(maximum, tree_sum([state.total * exp_difference(state.maximum, safe) for state in states]))

    def lanes(self, count: int) -> "MaxSum":
        maximum = cute.arch.warp_reduction(self.maximum, cute.arch.fmax, threads_in_group=count)
        rescaled = self.total * exp_difference(self.maximum, finite_or_zero(maximum))
        return MaxSum(maximum, cute.arch.warp_reduction(rescaled, add, threads_in_group=count))


class Sum(NamedTuple):
    """A sum of float32 values."""

    total: cutlass.Float32

    @staticmethod
    def empty() -> "Sum":
        return Sum(cutlass.Float32(0.0))

    @staticmethod
    def tree(states: Sequence["Sum"]) -> "Sum":
        return Sum(tree_sum([state.total for state in states]))

    def lanes(self, count: int) -> "Sum":
        return Sum(cute.arch.warp_reduction(self.total, add, threads_in_group=count))


class Max(NamedTuple):
    """The maximum of values that are at least 0; NaN is ignored."""

    maximum: cutlass.Float32

    @staticmethod
    def empty() -> "Max":
        return Max(cutlass.Float32(0.0))

    @staticmethod
    def tree(states: Sequence["Max"]) -> "Max":
        return Max(tree_max([state.maximum for state in states]))

    def lanes(self, count: int) -> "Max":
        return Max(cute.arch.warp_reduction(self.maximum, cute.arch.fmax, threads_in_group=count))


class SumMax(NamedTuple):
    """A sum of float32 values, and the maximum of others that are at least 0; NaN is ignored by the maximum."""

    total: cutlass.Float32
    maximum: cutlass.Float32

    @staticmethod
    def empty() -> "SumMax":
        return SumMax(cutlass.Float32(0.0), cutlass.Float32(0.0))

    @staticmethod
    def tree(states: Sequence["SumMax"]) -> "SumMax":
        return SumMax(tree_sum([state.total for state in states]), tree_max([state.maximum for state in states]))

    def lanes(self, count: int) -> "SumMax":
        return SumMax(
            cute.arch.warp_reduction(self.total, add, threads_in_group=count),
            cute.arch.warp_reduction(self.maximum, cute.arch.fmax, threads_in_group=count),
        )


def warp_reduce(state, lanes: int):
    """Reduce over aligned groups of lanes, a power of two up to 32. All lanes of the warp call it."""
    return state if lanes == 1 else state.lanes(lanes)


def reduction_buffer_layout(kind: type, rows: int, warps: int, cluster: int) -> cute.Layout:
    """Float32 in shared memory for one state of every warp: [number of the state, warp of the row, row].

    Args:
        kind: of the states.
        rows: of a CTA.
        warps: of a CTA for each row.
        cluster: CTAs for each row.
    """
    return cute.make_layout((len(kind._fields), warps * cluster, rows))


@cute.jit
def reduce_buffer(kind: cutlass.Constexpr[type], buffer: cute.Tensor, row: cutlass.Int32):
    """Reduce the states that the warps of a row have written. A whole warp calls it."""
    lane = cute.arch.lane_idx()
    numbers = cutlass.const_expr(len(kind._fields))
    count = cutlass.const_expr(cute.size(buffer, mode=[1]))
    steps = cutlass.const_expr((count + WARP - 1) // WARP)
    states = cute.make_rmem_tensor((numbers, steps), cutlass.Float32)
    for step in cutlass.range_constexpr(steps):
        for number, value in enumerate(kind.empty()):
            states[number, step] = value
        warp = lane + step * WARP
        if warp < count:
            for number in cutlass.range_constexpr(numbers):
                states[number, step] = buffer[number, warp, row]
    own = kind.tree([kind(*(states[number, step] for number in range(numbers))) for step in range(steps)])
    return own.lanes(WARP)


@cute.jit
def cta_reduce(state, buffer: cute.Tensor, warps: cutlass.Constexpr[int]):
    """Reduce over consecutive warps, whose states are reduced already. All threads of the CTA call it.

    Args:
        buffer: of `reduction_buffer_layout`, not written since the last barrier.
        warps: of a row.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, warp_of_row = warp // warps, warp % warps
    if cute.arch.lane_idx() == 0:
        for number, value in enumerate(state):
            buffer[number, warp_of_row, row] = value
    cute.arch.sync_threads()
    return reduce_buffer(type(state), buffer, row)


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
    state,
    buffer: cute.Tensor,
    mbar: cute.Pointer,
    warps: cutlass.Constexpr[int],
    cluster: cutlass.Constexpr[int],
):
    """Reduce over all warps of a cluster whose CTAs share one row; once in a kernel.

    Every warp sends its state to every CTA, its own included, so that one wait is all the synchronisation. When this
    returns, the CTA has received all that is sent to it, so it may exit.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    cute.arch.cluster_wait()
    if cute.arch.thread_idx()[0] == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(mbar, warps * cluster * len(state) * 4)
    if lane < cluster:
        warp_of_row = cute.arch.block_idx_in_cluster() * warps + warp
        target = buffer.iterator + buffer.layout((0, warp_of_row, 0))
        store_shared_remote(state, target, mbar, lane)
    cute.arch.mbarrier_wait(mbar, 0)
    return reduce_buffer(type(state), buffer, cutlass.Int32(0))


def row_smem(kind: type, rows: int, warps: int, cluster: int):
    """Allocate shared memory for the state of each warp, and the mbarrier of their exchange; None if not needed.

    Args: as `reduction_buffer_layout`.
    """
    if warps == 1 and cluster == 1:
        return None, None
    allocator = SmemAllocator()
    mbar = allocator.allocate_array(cutlass.Int64, 1) if cluster > 1 else None
    layout = reduction_buffer_layout(kind, rows, warps, cluster)
    return allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=8), mbar


def row_reduce(state, buffer, mbar, threads: int, cluster: int):
    """The state of a row from those of its threads; buffer and mbar of `row_smem`; once in a kernel.

    Args:
        threads: of a CTA for each row.
        cluster: CTAs for each row.
    """
    state = warp_reduce(state, min(threads, WARP))
    warps = max(1, threads // WARP)
    if cluster > 1:
        return cluster_reduce(state, buffer, mbar, warps, cluster)
    return state if warps == 1 else cta_reduce(state, buffer, warps)
