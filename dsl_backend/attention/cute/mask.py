# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees: causality, a window, and the end of its request's keys."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile

FAR = 1 << 30  # a window that ends nowhere


@cute.jit
def window_right(key: cutlass.Constexpr, requests: Requests, request):
    """How many keys after its own position a query of the request sees."""
    window_size_right = cutlass.Int32(FAR)
    if cutlass.const_expr(key.has_window_right):
        window_size_right = requests.window_size_right
    if cutlass.const_expr(key.causality == "causal"):
        window_size_right = cutlass.Int32(0)
    if cutlass.const_expr(key.causality == "per_request"):
        window_size_right = cutlass.Int32(0) if requests.causal[request] != 0 else window_size_right
    return window_size_right


@cute.jit
def work_tile_of(
    key: cutlass.Constexpr,
    requests: Requests,
    tile_n: cutlass.Constexpr[int],
    request,
    query,
    rows,
    head_block,
    position,
    seqlen_k,
    n_block_min,
    n_block_max,
    window_size_right,
    slot,
):
    """The item of a row tile and the key tiles begin ... end, with those of them that every row sees whole."""
    n_block_full_min, whole_stop = n_block_min, seqlen_k
    if cutlass.const_expr(key.has_window_left):
        last = position + rows // key.pack_gqa - 1
        n_block_full_min = (cutlass.max(last - requests.window_size_left, 0) + tile_n - 1) // tile_n
    if cutlass.const_expr(key.has_window_right or key.causality != "full"):
        whole_stop = cutlass.min(seqlen_k, cutlass.max(position + window_size_right + 1, 0))
    n_block_full_max = cutlass.max(cutlass.min(whole_stop // tile_n, n_block_max), n_block_min)
    n_block_full_min = cutlass.min(cutlass.max(n_block_full_min, n_block_min), n_block_full_max)
    source = request
    if cutlass.const_expr(key.page_size == 0):
        source = requests.cu_seqlens_k[request]
    return WorkTile(
        valid=cutlass.Int32(1),
        q_offset=query,
        num_rows=rows,
        head_block=head_block,
        q_position=position,
        seqlen_k=seqlen_k,
        n_block_min=n_block_min,
        n_block_max=n_block_max,
        n_block_full_min=n_block_full_min,
        n_block_full_max=n_block_full_max,
        window_size_right=window_size_right,
        kv_source=source,
        partial_idx=slot,
    )


@cute.jit
def keys_before_window(key: cutlass.Constexpr, work: WorkTile, requests, tile_n: cutlass.Constexpr[int], tile):
    """Keys of a tile that lie below the windows of all of an item's rows; 0 or less where there are none.

    Their page may be another request's by now: they are anything, and a weight of 0 does not take away a NaN.
    """
    below = cutlass.Int32(0)
    if cutlass.const_expr(key.has_window_left):
        below = cutlass.min(work.q_position - requests.window_size_left - tile * tile_n, tile_n)
    return below


@cute.jit
def first_tile_is_masked(work: WorkTile):
    """Whether there may be such keys: some row does not see all of the item's first tile."""
    return work.n_block_full_min > work.n_block_min or work.n_block_full_max <= work.n_block_min
