# SPDX-License-Identifier: Apache-2.0
"""Split-KV tile schedulers that cut each request's keys by that request alone: batch-invariant."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import window_right
from dsl_backend.attention.cute.scheduler.persistent import StaticPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import WARP, Requests, seqlens_of, sum_through
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, no_work_tile


@cute.jit
def own_range(key: cutlass.Constexpr, tile_n: cutlass.Constexpr[int], requests: Requests, least, seqlen_q, seqlen_k):
    """A request's first key tile, how many it has, and how many one of its shares: nothing else counts."""
    n_block_min = cutlass.Int32(0)
    if cutlass.const_expr(key.has_window_left):
        n_block_min = cutlass.max(seqlen_k - seqlen_q - requests.window_size_left, 0) // tile_n
    # At least one tile, so that every row is written.
    tiles = cutlass.max((seqlen_k + tile_n - 1) // tile_n - n_block_min, 1)
    return n_block_min, tiles, cutlass.max((tiles + key.max_splits - 1) // key.max_splits, least)


@cute.jit
def row_tile_of(first, request, tile, tile_tokens: cutlass.Constexpr):
    """A number for a request's row tile that no other tile of the batch has, whatever lies before it.

    Below `row_tiles` of the batch.

    Args:
        first: the request's first query row.
        tile_tokens: tokens of a row tile; None where one has all of a request.
    """
    number = request
    if cutlass.const_expr(tile_tokens == 1):
        number = first + tile
    elif cutlass.const_expr(tile_tokens is not None):
        number = request + first // tile_tokens + tile
    return number


def max_row_tiles(requests: int, tokens: int, tile_tokens: int | None) -> int:
    """Bound of a batch's row tiles."""
    if tile_tokens is None:
        return requests
    return tokens if tile_tokens == 1 else requests + -(-tokens // tile_tokens)


class SplitKVTileScheduler(StaticPersistentTileScheduler):
    """Shares of each request's own key range, dealt out in turn, all heads of a share side by side.

    What is summed in one piece, and what is merged in which order, then depends on the request's lengths alone. Share
    `part` of a unit's row tile leaves its partial result in slot (row tile * units + unit) * shares + part.

    Args:
        several: whether a request may have several row tiles.
    """

    def __init__(
        self,
        key,
        work_pipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        least: int,
        several: bool = False,
    ):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.least, self.tile_tokens = least, tokens_per_tile if several else None

    @cute.jit
    def items_of(self, seqlen_q, seqlen_k):
        _, tiles, share = own_range(self.key, self.tile_n, self.requests, self.least, seqlen_q, seqlen_k)
        row_tiles = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile
        return row_tiles * ((tiles + share - 1) // share) * self.head_blocks

    @cute.jit
    def item(self, place, request, first, seqlen_q, seqlen_k, items, through):
        local = place - (through - items)
        first_tile, tiles, share = own_range(self.key, self.tile_n, self.requests, self.least, seqlen_q, seqlen_k)
        parts = (tiles + share - 1) // share
        head_block, local = local % self.head_blocks, local // self.head_blocks
        part, tile = local % parts, local // parts
        n_block_min = first_tile + part * share
        n_block_max = cutlass.min(n_block_min + share, first_tile + tiles)
        slot = cutlass.Int32(NOT_SPLIT)
        if parts > 1:
            number = row_tile_of(first, request, tile, self.tile_tokens)
            slot = (number * self.head_blocks + head_block) * self.key.max_splits + part
        row = tile * self.tokens_per_tile
        window_size_right = window_right(self.key, self.requests, request)
        return self.part(
            request, first, seqlen_q, seqlen_k, head_block, row, window_size_right, n_block_min, n_block_max, slot
        )


@cute.jit
def splits_of(key: cutlass.Constexpr, tile_n: cutlass.Constexpr[int], requests: Requests, seqlen_q, seqlen_k):
    """A request's first split, and how many it has: those that any of its queries may see."""
    n_block_min = cutlass.Int32(0)
    if cutlass.const_expr(key.has_window_left):
        n_block_min = cutlass.max(seqlen_k - seqlen_q - requests.window_size_left, 0) // tile_n
    tiles = cutlass.max((seqlen_k + tile_n - 1) // tile_n, n_block_min + 1)
    first = n_block_min // key.tiles_per_split
    return first, (tiles - 1) // key.tiles_per_split - first + 1


class FixedSplitKVTileScheduler(StaticPersistentTileScheduler):
    """Splits that begin at fixed keys, whatever the batch and the queries: what is summed in one piece never changes.

    A request's row tiles are processed split by split where there are slots for the partial results. Requests for which
    none are left are processed row tile by row tile, and their splits are folded where they are made: the same bits.
    The order of work tiles is: part of the range, row tile, unit.

    Args:
        bases: [requests], receives each request's first slot; -1 where there is nothing to combine.
        slots: how many partial results there is room for.
    """

    def __init__(self, key, work_pipeline, tokens_per_tile: int, tile_n: int, requests: Requests, bases, slots):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.bases, self.slots = bases, slots

    @cute.jit
    def run(self):
        count, bases = cutlass.Int32(cute.size(self.requests.seqused_k)), self.bases
        lane = cute.arch.lane_idx()
        place, step = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        posted, seen, seen_slots = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        writes = place == 0
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, seqlen_q, seqlen_k = seqlens_of(self.requests, request, count)
            _, parts = splits_of(self.key, self.tile_n, self.requests, seqlen_q, seqlen_k)
            row_tiles = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile
            if seqlen_q < self.requests.min_seqlen_q or seqlen_q > self.requests.max_seqlen_q:
                row_tiles = cutlass.Int32(0)
            wanted = row_tiles * parts * self.head_blocks
            if parts == 1:
                wanted = cutlass.Int32(0)
            slots_through = sum_through(wanted) + seen_slots
            seen_slots = cute.arch.shuffle_sync(slots_through, WARP - 1)
            base = slots_through - wanted
            if wanted == 0 or slots_through > self.slots:
                base, parts = cutlass.Int32(-1), cutlass.Int32(1)
            if writes and request < count:
                bases[request] = base
            items = row_tiles * parts * self.head_blocks
            through = sum_through(items) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < seen:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                mine = [cute.arch.shuffle_sync(value, owner) for value in (first, seqlen_q, seqlen_k, parts, base)]
                local = place - cute.arch.shuffle_sync(through - items, owner)
                self.work_pipeline.produce(posted, self.item_of(chunk * WARP + owner, local, *mine))
                posted += 1
                place += step
        self.work_pipeline.produce(posted, no_work_tile())

    @cute.jit
    def item_of(self, request, local, first, seqlen_q, seqlen_k, parts, base):
        """The work tile at a place among those of a request."""
        head_block, rest = local % self.head_blocks, local // self.head_blocks
        part, tile = rest % parts, rest // parts
        row, window_size_right = tile * self.tokens_per_tile, window_right(self.key, self.requests, request)
        n_block_min, n_block_max = self.range_of(seqlen_q, seqlen_k, row, window_size_right)
        slot = cutlass.Int32(NOT_SPLIT)
        if base >= 0:
            slot = base + local
            split, _ = splits_of(self.key, self.tile_n, self.requests, seqlen_q, seqlen_k)
            from_tile = (split + part) * self.key.tiles_per_split
            n_block_min = cutlass.max(n_block_min, from_tile)
            n_block_max = cutlass.min(n_block_max, from_tile + self.key.tiles_per_split)
            if n_block_min >= n_block_max:
                # No row of the tile sees the split: one tile of it, wholly masked, leaves an empty partial result.
                n_block_min, n_block_max = from_tile, from_tile + 1
        return self.part(
            request, first, seqlen_q, seqlen_k, head_block, row, window_size_right, n_block_min, n_block_max, slot
        )
