# SPDX-License-Identifier: Apache-2.0
"""The batch as a scheduler reads it from device memory."""

from typing import NamedTuple

import cutlass
from cutlass import cute

WARP = 32


class Requests(NamedTuple):
    """A batch, as `spec.Batch` has it; windows of a layer; the query lengths that are served.

    `rows` are those of a partial result: no row tile has more.
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


@cute.jit
def sum_through(value: cutlass.Int32):
    """Sum over this lane and those before it."""
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << bit, mask_and_clamp=0)
        value += other if cute.arch.lane_idx() >= (1 << bit) else 0
    return value


@cute.jit
def seqlens_of(requests: Requests, request, count):
    """A lane's request: first query row, queries, keys; all 0 behind the last one."""
    first, seqlen_q, seqlen_k = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    if request < count:
        first = requests.cu_seqlens_q[request]
        seqlen_q = requests.cu_seqlens_q[request + 1] - first
        seqlen_k = requests.seqused_k[request]
    return first, seqlen_q, seqlen_k
