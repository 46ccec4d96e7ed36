# SPDX-License-Identifier: Apache-2.0
"""The batch as tile schedulers read it from device memory: one request for each lane."""

from typing import NamedTuple

import cutlass
from cutlass import cute

WARP = 32


class Requests(NamedTuple):
    """A batch as `spec.Batch` has it, the windows of a layer, and the query lengths that the kernel serves.

    Attributes:
        cu_seqlens_q: [num_reqs + 1].
        seqused_k: [num_reqs].
        page_table: [num_reqs, pages]; None where keys are packed.
        cu_seqlens_k: [num_reqs + 1]; None where keys are paged.
        causal: [num_reqs]; None unless causality is by request.
        min_seqlen_q, max_seqlen_q: requests with fewer or more queries are left to another kernel.
        rows: of a partial result; no row tile has more.
        row_group: clusters of a row group (scheduler/balanced.py), where these pay; 1 for none.
        row_group_iters: percent of the iterations without row groups that a CTA may have with them.
    """

    cu_seqlens_q: cute.Tensor
    seqused_k: cute.Tensor
    page_table: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    causal: cute.Tensor | None
    window_size_left: cutlass.Int32
    window_size_right: cutlass.Int32
    min_seqlen_q: cutlass.Int32
    max_seqlen_q: cutlass.Int32
    rows: cutlass.Int32
    row_group: cutlass.Int32
    row_group_iters: cutlass.Int32


class SeqlenInfo(NamedTuple):
    """A request: its first row of q, and how many queries and keys it has."""

    offset_q: cutlass.Int32
    seqlen_q: cutlass.Int32
    seqlen_k: cutlass.Int32


@cute.jit
def seqlen_info_of(requests: Requests, request: cutlass.Int32, num_requests: cutlass.Int32):
    """The SeqlenInfo of a lane's request; all 0 for lanes beyond the last request."""
    offset_q, seqlen_q, seqlen_k = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    if request < num_requests:
        offset_q = requests.cu_seqlens_q[request]
        seqlen_q = requests.cu_seqlens_q[request + 1] - offset_q
        seqlen_k = requests.seqused_k[request]
    return SeqlenInfo(offset_q, seqlen_q, seqlen_k)


@cute.jit
def lengths_of(requests: Requests, request: cutlass.Int32, num_requests: cutlass.Int32):
    """A lane's request as it lies in memory: its first row of q, that of the next one, its keys; 0 beyond the last one.

    Nothing is computed of them, so that the loads of several requests are in flight together.
    """
    begin, end, keys = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    if request < num_requests:
        begin, end, keys = (
            requests.cu_seqlens_q[request],
            requests.cu_seqlens_q[request + 1],
            requests.seqused_k[request],
        )
    return begin, end, keys


@cute.jit
def request_of(requests: Requests, q_offset: cutlass.Int32):
    """The request that has a row of q: the last one that begins at the row or before it."""
    first, end = cutlass.Int32(0), cutlass.Int32(cute.size(requests.seqused_k))
    while end - first > 1:
        middle = (first + end) // 2
        begins_before = requests.cu_seqlens_q[middle] <= q_offset
        first = middle if begins_before else first
        end = end if begins_before else middle
    return first


@cute.jit
def zero_unless_served(requests: Requests, seqlen_q: cutlass.Int32, count: cutlass.Int32):
    """A request's count; 0 where the kernel does not serve requests of that many queries."""
    if seqlen_q < requests.min_seqlen_q or seqlen_q > requests.max_seqlen_q:
        count = cutlass.Int32(0)
    return count


def from_lane(values: tuple, lane: cutlass.Int32):
    """A lane's value, in all lanes: for each member of a NamedTuple."""
    return type(values)(*(cute.arch.shuffle_sync(value, lane) for value in values))


@cute.jit
def warp_prefix_sum(value: cutlass.Int32):
    """Inclusive: the sum over this lane and those before it."""
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << bit, mask_and_clamp=0)
        value += other if cute.arch.lane_idx() >= (1 << bit) else 0
    return value
