# SPDX-License-Identifier: Apache-2.0
"""Split-KV tile schedulers for batch-invariant layers: how a request is split does not depend on the other requests."""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.persistent import StaticPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import (
    WARP,
    Requests,
    SeqlenInfo,
    from_lane,
    seqlen_info_of,
    warp_prefix_sum,
    zero_unless_served,
)
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WorkTilePipeline, no_work_tile


@cute.jit
def even_splits_of(
    mask: Mask, min_split_tiles: cutlass.Constexpr[int], seqlen_q: cutlass.Int32, seqlen_k: cutlass.Int32
):
    """(a request's first key tile, its key tiles, key tiles of a split): from the lengths of the request alone."""
    n_block_min = mask.n_block_min(seqlen_k - seqlen_q)
    # At least one tile, so that every row is written.
    key_tiles = cutlass.max((seqlen_k + mask.tile_n - 1) // mask.tile_n - n_block_min, 1)
    max_splits = mask.key.max_splits
    return n_block_min, key_tiles, cutlass.max((key_tiles + max_splits - 1) // max_splits, min_split_tiles)


@cute.jit
def row_tile_idx_of(
    offset_q: cutlass.Int32, request: cutlass.Int32, row_tile: cutlass.Int32, tokens_per_tile: cutlass.Constexpr
):
    """An index that only this row tile of the batch has, from its own request alone; below `max_row_tiles`.

    Args:
        offset_q: the request's first row of q.
        tokens_per_tile: None where a row tile has all tokens of a request.
    """
    idx = request
    if cutlass.const_expr(tokens_per_tile == 1):
        idx = offset_q + row_tile
    elif cutlass.const_expr(tokens_per_tile is not None):
        idx = request + offset_q // tokens_per_tile + row_tile
    return idx


def max_row_tiles(num_requests: int, num_tokens: int, tokens_per_tile: int | None) -> int:
    """Bound of a batch's row tiles."""
    if tokens_per_tile is None:
        return num_requests
    return num_tokens if tokens_per_tile == 1 else num_requests + -(-num_tokens // tokens_per_tile)


class SplitKVTileScheduler(StaticPersistentTileScheduler):
    """Each request's keys in even splits, at most `key.max_splits`: CTA i processes work tiles i, i + grid size, ...

    The splits and the order in which they are combined depend on the request's lengths alone. A split's partial result
    has index (row tile * head blocks + head block) * max_splits + split.

    Args:
        min_split_tiles: key tiles of a split at least.
        several_row_tiles: whether a request may have more than one row tile.
    """

    def __init__(
        self,
        key: Any,
        work_pipeline: WorkTilePipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        min_split_tiles: int,
        several_row_tiles: bool = False,
    ) -> None:
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.min_split_tiles = min_split_tiles
        self.partial_tile_tokens = tokens_per_tile if several_row_tiles else None

    @cute.jit
    def num_tiles(self, info: SeqlenInfo):
        _, key_tiles, split_tiles = even_splits_of(self.mask, self.min_split_tiles, info.seqlen_q, info.seqlen_k)
        row_tiles = self.num_row_tiles(info.seqlen_q)
        return row_tiles * ((key_tiles + split_tiles - 1) // split_tiles) * self.head_blocks

    @cute.jit
    def work_tile(self, request: cutlass.Int32, info: SeqlenInfo, local_idx: cutlass.Int32, num_tiles: cutlass.Int32):
        first_tile, key_tiles, split_tiles = even_splits_of(
            self.mask, self.min_split_tiles, info.seqlen_q, info.seqlen_k
        )
        num_splits = (key_tiles + split_tiles - 1) // split_tiles
        head_block, local_idx = local_idx % self.head_blocks, local_idx // self.head_blocks
        split, row_tile = local_idx % num_splits, local_idx // num_splits
        n_block_min = first_tile + split * split_tiles
        n_block_max = cutlass.min(n_block_min + split_tiles, first_tile + key_tiles)
        partial_idx = cutlass.Int32(NOT_SPLIT)
        if num_splits > 1:
            row_tile_idx = row_tile_idx_of(info.offset_q, request, row_tile, self.partial_tile_tokens)
            partial_idx = (row_tile_idx * self.head_blocks + head_block) * self.key.max_splits + split
        token = row_tile * self.tokens_per_tile
        window_size_right = self.mask.window_size_right(request)
        tile = self.row_tile(request, info, head_block, token, window_size_right)
        return self.mask.work_tile(tile, n_block_min, n_block_max, partial_idx)


@cute.jit
def fixed_splits_of(mask: Mask, seqlen_q: cutlass.Int32, seqlen_k: cutlass.Int32):
    """(a request's first split, its number of splits): those that any of its queries may see."""
    n_block_min = mask.n_block_min(seqlen_k - seqlen_q)
    key_tiles = cutlass.max((seqlen_k + mask.tile_n - 1) // mask.tile_n, n_block_min + 1)
    first_split = n_block_min // mask.key.tiles_per_split
    return first_split, (key_tiles - 1) // mask.key.tiles_per_split - first_split + 1


class FixedSplitKVTileScheduler(StaticPersistentTileScheduler):
    """Splits that begin at fixed keys, whatever the batch and the queries are: every sum has the same keys always.

    While the workspace has room for partial results, a work tile has one split of a row tile. The row tiles of requests
    beyond that are not split: the CTA itself combines the splits, in the order of the combine kernel, to the same bits.
    Work tiles of a request are ordered by row tile, then split, then head block.

    Args:
        partial_bases: [num_reqs], receives the index of each request's first partial result; -1 where it has none.
        max_partials: how many partial results the workspace holds.
    """

    def __init__(
        self,
        key: Any,
        work_pipeline: WorkTilePipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        partial_bases: cute.Tensor,
        max_partials: cutlass.Int32,
    ) -> None:
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.partial_bases, self.max_partials = partial_bases, max_partials

    @cute.jit
    def run(self):
        num_requests, partial_bases = cutlass.Int32(cute.size(self.requests.seqused_k)), self.partial_bases
        lane = cute.arch.lane_idx()
        tile_idx, grid_size = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        num_produced, chunk_end, chunk_partials_end = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        is_first_cta = tile_idx == 0
        for chunk in cutlass.range(cute.ceil_div(num_requests, WARP), unroll=1):
            request = chunk * WARP + lane
            info = seqlen_info_of(self.requests, request, num_requests)
            _, num_splits = fixed_splits_of(self.mask, info.seqlen_q, info.seqlen_k)
            row_tiles = zero_unless_served(self.requests, info.seqlen_q, self.num_row_tiles(info.seqlen_q))
            num_partials = row_tiles * num_splits * self.head_blocks
            if num_splits == 1:
                num_partials = cutlass.Int32(0)
            partials_end = warp_prefix_sum(num_partials) + chunk_partials_end
            chunk_partials_end = cute.arch.shuffle_sync(partials_end, WARP - 1)
            base = partials_end - num_partials
            if num_partials == 0 or partials_end > self.max_partials:
                base, num_splits = cutlass.Int32(-1), cutlass.Int32(1)
            if is_first_cta and request < num_requests:
                partial_bases[request] = base
            num_tiles = row_tiles * num_splits * self.head_blocks
            tile_end = warp_prefix_sum(num_tiles) + chunk_end
            chunk_end = cute.arch.shuffle_sync(tile_end, WARP - 1)
            while tile_idx < chunk_end:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(tile_end <= tile_idx))
                own_info = from_lane(info, owner)
                own_splits, own_base = (cute.arch.shuffle_sync(value, owner) for value in (num_splits, base))
                local_idx = tile_idx - cute.arch.shuffle_sync(tile_end - num_tiles, owner)
                work = self.split_tile(chunk * WARP + owner, own_info, local_idx, own_splits, own_base)
                self.work_pipeline.produce(num_produced, work)
                num_produced += 1
                tile_idx += grid_size
        self.work_pipeline.produce(num_produced, no_work_tile())

    @cute.jit
    def split_tile(
        self,
        request: cutlass.Int32,
        info: SeqlenInfo,
        local_idx: cutlass.Int32,
        num_splits: cutlass.Int32,
        partial_base: cutlass.Int32,
    ):
        """The request's `local_idx`-th work tile, where each row tile has `num_splits`."""
        head_block, local_tile = local_idx % self.head_blocks, local_idx // self.head_blocks
        split, row_tile = local_tile % num_splits, local_tile // num_splits
        token, window_size_right = row_tile * self.tokens_per_tile, self.mask.window_size_right(request)
        n_block_min, n_block_max = self.n_block_range(info, token, window_size_right)
        partial_idx = cutlass.Int32(NOT_SPLIT)
        if partial_base >= 0:
            partial_idx = partial_base + local_idx
            first_split, _ = fixed_splits_of(self.mask, info.seqlen_q, info.seqlen_k)
            split_begin = (first_split + split) * self.key.tiles_per_split
            n_block_min = cutlass.max(n_block_min, split_begin)
            n_block_max = cutlass.min(n_block_max, split_begin + self.key.tiles_per_split)
            if n_block_min >= n_block_max:
                # No row of the tile sees the split: one fully masked key tile gives an empty partial result.
                n_block_min, n_block_max = split_begin, split_begin + 1
        tile = self.row_tile(request, info, head_block, token, window_size_right)
        return self.mask.work_tile(tile, n_block_min, n_block_max, partial_idx)
