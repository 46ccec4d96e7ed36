# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees: causality, a window, and the end of its request's keys."""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import RowTile, WorkTile

UNBOUNDED = 1 << 30  # window size of a window that ends nowhere


class Mask:
    """The mask of a layer, as tile schedulers, loaders, MMA, softmax and correction warps ask for it.

    A query at position p among the keys of its request sees keys p - window_size_left ... p + window_size_right, as far
    as the request has them. Causal attention is a window with window_size_right = 0.

    Args:
        key: the `LayerKey`: which of the limits the layer has.
        tile_n: keys of a key tile.
    """

    def __init__(self, key: Any, tile_n: int, requests: Requests) -> None:
        self.key, self.tile_n, self.requests = key, tile_n, requests
        self.has_left: bool = key.has_window_left
        self.has_right: bool = key.has_window_right or key.causality != "full"

    # ------------------------------------------------------------------ tile schedulers

    @cute.jit
    def window_size_right(self, request: cutlass.Int32):
        """How many keys after its own position a query of the request sees."""
        window_size_right = cutlass.Int32(UNBOUNDED)
        if cutlass.const_expr(self.key.has_window_right):
            window_size_right = self.requests.window_size_right
        if cutlass.const_expr(self.key.causality == "causal"):
            window_size_right = cutlass.Int32(0)
        if cutlass.const_expr(self.key.causality == "per_request"):
            window_size_right = cutlass.Int32(0) if self.requests.causal[request] != 0 else window_size_right
        return window_size_right

    @cute.jit
    def n_block_min(self, q_position: cutlass.Int32):
        """The first key tile that a query at the position, or any query after it, sees."""
        n_block_min = cutlass.Int32(0)
        if cutlass.const_expr(self.has_left):
            n_block_min = cutlass.max(q_position - self.requests.window_size_left, 0) // self.tile_n
        return n_block_min

    @cute.jit
    def n_block_range(
        self,
        seqlen_q: cutlass.Int32,
        seqlen_k: cutlass.Int32,
        token: cutlass.Int32,
        window_size_right: cutlass.Int32,
        tokens_per_tile: cutlass.Constexpr[int],
    ):
        """(n_block_min, n_block_max): the key tiles that a row tile sees; `token`: its first one within the request."""
        q_position = seqlen_k - seqlen_q + token
        n_block_min, end = self.n_block_min(q_position), seqlen_k
        if cutlass.const_expr(self.has_right):
            num_tokens = cutlass.min(seqlen_q - token, tokens_per_tile)
            end = cutlass.min(seqlen_k, cutlass.max(q_position + num_tokens + window_size_right, 0))
        # At least one tile, so that every row is written.
        return n_block_min, cutlass.max((end + self.tile_n - 1) // self.tile_n, n_block_min + 1)

    @cute.jit
    def work_tile(
        self, tile: RowTile, n_block_min: cutlass.Int32, n_block_max: cutlass.Int32, partial_idx: cutlass.Int32
    ):
        """A row tile against key tiles, and which of them need no mask because every row sees all of their keys."""
        n_block_full_min, full_end = n_block_min, tile.seqlen_k
        if cutlass.const_expr(self.has_left):
            last_position = tile.q_position + tile.num_rows // self.key.pack_gqa - 1
            first_key = cutlass.max(last_position - self.requests.window_size_left, 0)
            n_block_full_min = (first_key + self.tile_n - 1) // self.tile_n
        if cutlass.const_expr(self.has_right):
            full_end = cutlass.min(tile.seqlen_k, cutlass.max(tile.q_position + tile.window_size_right + 1, 0))
        n_block_full_max = cutlass.max(cutlass.min(full_end // self.tile_n, n_block_max), n_block_min)
        n_block_full_min = cutlass.min(cutlass.max(n_block_full_min, n_block_min), n_block_full_max)
        kv_source = tile.request
        if cutlass.const_expr(self.key.page_size == 0):
            kv_source = self.requests.cu_seqlens_k[tile.request]
        return WorkTile(
            valid=cutlass.Int32(1),
            q_offset=tile.q_offset,
            num_rows=tile.num_rows,
            head_block=tile.head_block,
            q_position=tile.q_position,
            seqlen_k=tile.seqlen_k,
            n_block_min=n_block_min,
            n_block_max=n_block_max,
            n_block_full_min=n_block_full_min,
            n_block_full_max=n_block_full_max,
            window_size_right=tile.window_size_right,
            kv_source=kv_source,
            partial_idx=partial_idx,
        )

    # ------------------------------------------------------------------ MMA and correction warps

    @cute.jit
    def keys_before_window(self, q_position: cutlass.Int32, n_block: cutlass.Int32):
        """How many keys of a tile lie before the windows of a query at the position and all after it; 0 or less: none.

        Their page may belong to another request by now, so that their values can be NaN, which P = 0 does not remove.
        """
        before = cutlass.Int32(0)
        if cutlass.const_expr(self.has_left):
            before = cutlass.min(q_position - self.requests.window_size_left - n_block * self.tile_n, self.tile_n)
        return before

    # ------------------------------------------------------------------ softmax

    @cute.jit
    def col_limit_right(self, work: WorkTile, q_position: cutlass.Int32, first_key: cutlass.Int32):
        """A query sees only columns below this one, counted from `first_key`."""
        limit = work.seqlen_k
        if cutlass.const_expr(self.has_right):
            limit = cutlass.min(limit, q_position + work.window_size_right + 1)
        return limit - first_key

    @cute.jit
    def col_limit_left(self, q_position: cutlass.Int32, first_key: cutlass.Int32):
        """A query of a layer with a left window sees only columns from this one on, counted from `first_key`."""
        return q_position - self.requests.window_size_left - first_key


@cute.jit
def first_tile_is_masked(work: WorkTile):
    """Whether some row does not see all of the first key tile, so that it may hold keys before the window."""
    return work.n_block_full_min > work.n_block_min or work.n_block_full_max <= work.n_block_min
