# SPDX-License-Identifier: Apache-2.0
"""Balanced split-KV: each CTA gets a contiguous even share of all key tiles of the batch, in the manner of stream-K."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import FAR, window_right, work_tile_of
from dsl_backend.attention.cute.scheduler.persistent import StaticPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import WARP, Requests, seqlens_of, sum_through
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, no_work_tile
from dsl_backend.primitives.math import quotient

# Key tiles that a block may have beyond its share where that leaves ranges whole: a merge takes 3 to 4 us on an H200
# besides reading what the blocks left, which is worth 4 more tiles with 64 rows of MLA. A dense tile takes some 2 us,
# and one of MLA has twice the bytes.
COMBINE_TILES, COMBINE_TILES_MLA = 2, 1
# Parts of a range up to which a block may have fewer tiles than the least share, where what it leaves is no more than
# they are: as many parts as the merge kernel reads at once. MLA with shares of 1 tile instead of 2 took 10.6 us instead
# of 11.5 with 4 parts a range, and 13.1 instead of 12.1 with 128, on an H200; with 64 rows, which are 4 tiles, shares
# of 2 took 20.8 instead of 19.6 with 4.
MAX_SPLITS_BELOW_MIN = 64
# Key tiles that an item costs besides its own, where short ranges share a block: 0.4 of heads of 128, 0.6 of 64 on an
# H200, for the latency of its first tile and for its result.
ITEM_TILES = 1


class SplitRange(NamedTuple):
    """A range that begins in a block's share and goes on behind it: what the block leaves for the merge kernel.

    Attributes:
        parts: blocks that have some of it; 0 where there is no such range, and the others mean nothing.
        query: its first query row. rows: of its row tile.
    """

    parts: cutlass.Int32
    query: cutlass.Int32
    head_block: cutlass.Int32
    rows: cutlass.Int32


SPLIT_RANGE_FIELDS = len(SplitRange._fields)


class BalancedSplitKVTileScheduler(StaticPersistentTileScheduler):
    """Equal, contiguous shares of all the key tiles of the batch (stream-K: Osama et al., 2023).

    Where requests shorter than a share are beside longer ones, a range begins with ITEM_TILES places without a tile:
    else who gets many short ranges would have as many tiles to do as all others, and all their items besides. Where
    ranges are not to be cut, all have as many places as the longest.

    A key range that crosses blocks leaves partial results. A block holds two at most: that of a range which began
    before it, in slot 2b, and that of one which goes on after it, in slot 2b + 1. Blocks of a cluster have the same
    share, of neighbouring units: the first ones' slots come before all second ones'.

    A range counts all keys of its request, although a prompt's first rows see few of them, unless prompts are folded:
    then a request's row tiles lie in pairs, the last with the first and so on inwards. What the two see together
    is nearly the same for every pair, so that all pairs of a request have as many places.

    Args:
        cuts: [blocks, fields of a Cut], which blocks write.
        folds: whether prompts may be folded, which costs nothing where there is none.
    """

    def __init__(
        self,
        key,
        work_pipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        split_ranges,
        least: int,
        cluster: int = 1,
        spared: int = COMBINE_TILES,
        folds: bool = False,
    ):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.cluster, self.head_blocks = cluster, key.head_blocks // cluster
        self.split_ranges, self.least, self.spared = split_ranges, least, spared
        self.folds = folds and key.causality != "full" and not key.has_window_left

    @cute.jit
    def read(self, request, count, folded):
        """A lane's request: first query row, queries, keys, key tiles of a range or pair, and how many of these."""
        first, seqlen_q, seqlen_k = seqlens_of(self.requests, request, count)
        n_block_min = self.first_tile(seqlen_q, seqlen_k)
        # At least one tile, so that every row is written.
        tiles = cutlass.max((seqlen_k + self.tile_n - 1) // self.tile_n - n_block_min, 1)
        row_tiles = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile
        if cutlass.const_expr(self.folds):
            if folded != 0 and row_tiles > 1:
                window_size_right = window_right(self.key, self.requests, request)
                tiles = self.tiles_of_pair(seqlen_q, seqlen_k, tiles, row_tiles, window_size_right)
                row_tiles = (row_tiles + 1) // 2
        ranges = row_tiles * self.head_blocks
        if seqlen_q < self.requests.min_seqlen_q or seqlen_q > self.requests.max_seqlen_q:
            ranges = cutlass.Int32(0)
        return first, seqlen_q, seqlen_k, tiles, ranges

    @cute.jit
    def tiles_of_pair(self, seqlen_q, seqlen_k, tiles, row_tiles, window_size_right):
        """The most that two row tiles of a request see together.

        Row tile t sees as many steps of keys as 1 + t and what lies before the request's queries make up, of which
        `per_tile` are a key tile; two see `steps`. Of a + b = steps, a and b are at most (steps - 2) / per_tile + 2
        together where each is rounded up to key tiles.

        Args:
            tiles: that the last one sees.
        """
        step = self.tokens_per_tile if self.tile_n % self.tokens_per_tile == 0 else 1
        of_row_tile, per_tile = self.tokens_per_tile // step, self.tile_n // step
        # Behind its queries a request has no keys.
        before, behind = seqlen_k - seqlen_q + step - 1, cutlass.min(window_size_right, seqlen_q) + step - 1
        steps = (row_tiles + 1) * of_row_tile + 2 * (before // step) + 2 * (behind // step)
        # One that sees nothing has a tile as well.
        both = cutlass.max((steps - 2) // per_tile + 2, tiles + 1)
        return cutlass.min(both, 2 * tiles)

    @cute.jit
    def read_chunk(self, held, chunk, lane, count, folded):
        """What `read` gives of the lane's request in a chunk of WARP; held: in the first one, often the only one."""
        first, seqlen_q, seqlen_k, tiles, ranges = held
        if chunk > 0:
            first, seqlen_q, seqlen_k, tiles, ranges = self.read(chunk * WARP + lane, count, folded)
        return first, seqlen_q, seqlen_k, tiles, ranges

    @cute.jit
    def first_tile(self, seqlen_q, seqlen_k):
        """The first that any query of a request sees."""
        n_block_min = cutlass.Int32(0)
        if cutlass.const_expr(self.key.has_window_left):
            n_block_min = cutlass.max(seqlen_k - seqlen_q - self.requests.window_size_left, 0) // self.tile_n
        return n_block_min

    @cute.jit
    def run(self):
        count = cutlass.Int32(cute.size(self.requests.seqused_k))
        lane = cute.arch.lane_idx()
        place_in_grid, num_ctas = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        rank, block, num_ctas = place_in_grid % self.cluster, place_in_grid // self.cluster, num_ctas // self.cluster
        mine = rank * num_ctas + block
        folded = cutlass.Int32(0)
        held = self.read(lane, count, folded)
        total, share, lead, least_span = self.even_shares(held, count, lane, num_ctas, folded)
        if cutlass.const_expr(self.folds):
            # Where no block has two ranges, the longest one is all that counts.
            if (least_span == 0 or share > least_span) and self.requests.max_seqlen_q > self.tile_n:
                folded = cutlass.Int32(1)
                held = self.read(lane, count, folded)
                total, share, lead, least_span = self.even_shares(held, count, lane, num_ctas, folded)
        place = block * share
        share_end = cutlass.min(place + share, total)
        posted, parts, seen = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        split_ranges = self.split_ranges
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            values = self.read_chunk(held, chunk, lane, count, folded)
            through = sum_through(values[4] * self.span(values, lead, least_span, folded)) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < cutlass.min(seen, share_end):
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                of_owner = [cute.arch.shuffle_sync(value, owner) for value in values]
                behind, request = cute.arch.shuffle_sync(through, owner), chunk * WARP + owner
                span, offset, of_range, head_block, row = self.range_at(
                    of_owner, request, behind, place, lead, least_span, folded
                )
                start = place - offset + lead
                places = cutlass.min(span - offset, share_end - place)
                tile = cutlass.max(offset - lead, 0)
                taken = cutlass.min(cutlass.max(offset + places - lead, 0), of_range) - tile
                if taken > 0:
                    first_row, asked, kept, _, _ = of_owner
                    slot = cutlass.Int32(NOT_SPLIT)
                    if taken < of_range:
                        slot = 2 * mine + (1 if start >= block * share else 0)
                    rows = cutlass.min(asked - row, self.tokens_per_tile) * self.key.pack_gqa
                    head_block = head_block * self.cluster + rank
                    work = self.piece(request, first_row, asked, kept, head_block, row, rows, tile, taken, slot)
                    self.work_pipeline.produce(posted, work)
                    posted += 1
                    if taken < of_range and start >= block * share:
                        parts = quotient(start + of_range - 1, share) - block + 1
                        if lane == 0:
                            split_ranges[mine, 1], split_ranges[mine, 2], split_ranges[mine, 3] = (
                                first_row + row,
                                head_block,
                                rows,
                            )
                place += places
        if lane == 0:
            split_ranges[mine, 0] = parts
        self.work_pipeline.produce(posted, no_work_tile())

    @cute.jit
    def items_in(self, seqlen_q, folded):
        """Row tiles that lie together: those of a pair, or one."""
        items = cutlass.Int32(1)
        if cutlass.const_expr(self.folds):
            items = cutlass.Int32(2) if folded != 0 and seqlen_q > self.tokens_per_tile else items
        return items

    @cute.jit
    def span(self, of_request, lead, least_span, folded):
        """Places of a request's range or pair; of_request: what `read` gives."""
        _, seqlen_q, _, tiles, _ = of_request
        return cutlass.max(tiles + lead * self.items_in(seqlen_q, folded), least_span)

    @cute.jit
    def range_at(self, of_request, request, behind, place, lead, least_span, folded):
        """The range of a request that a place belongs to.

        Args:
            of_request: what `read` gives. behind: the place behind the request's ranges.

        Returns:
            (its places, which of them this is, its key tiles, its unit of a cluster, its first token)
        """
        _, seqlen_q, seqlen_k, tiles, ranges = of_request
        span = self.span(of_request, lead, least_span, folded)
        within = place - (behind - ranges * span)
        item = quotient(within, span)
        offset = within - item * span
        of_unit = ranges // self.head_blocks
        head_block, row_tile = item, cutlass.Int32(0)
        if of_unit > 1:
            head_block = quotient(item, of_unit)
            row_tile = item - head_block * of_unit
        if cutlass.const_expr(self.folds):
            if self.items_in(seqlen_q, folded) > 1:
                window_size_right = window_right(self.key, self.requests, request)
                later = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile - 1 - row_tile
                _, tiles = self.range_of(seqlen_q, seqlen_k, later * self.tokens_per_tile, window_size_right)
                places = tiles + lead
                if offset >= places and later > row_tile:
                    _, tiles = self.range_of(seqlen_q, seqlen_k, row_tile * self.tokens_per_tile, window_size_right)
                    span, offset = span - places, offset - places
                else:
                    if later > row_tile:
                        span = places
                    row_tile = later
        return span, offset, tiles, head_block, row_tile * self.tokens_per_tile

    @cute.jit
    def even_shares(self, held, count, lane, num_ctas, folded):
        """How all ranges, or pairs of them, are dealt out to so many blocks, or clusters.

        Args:
            held: as in `read_chunk`.

        Returns:
            (places of all ranges, of a block, of a range before its first tile, and of a range at least)
        """
        total, ranges, most_tiles, fewest_tiles = (
            cutlass.Int32(0),
            cutlass.Int32(0),
            cutlass.Int32(1),
            cutlass.Int32(FAR),
        )
        items = cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            _, seqlen_q, _, tiles, own = self.read_chunk(held, chunk, lane, count, folded)
            total += own * tiles
            ranges += own
            together = self.items_in(seqlen_q, folded)
            items += own * together
            if own > 0:
                most_tiles, fewest_tiles = (
                    cutlass.max(most_tiles, tiles),
                    cutlass.min(fewest_tiles, quotient(tiles, together)),
                )
        total, ranges = (cute.arch.warp_redux_sync(value, "add") for value in (total, ranges))
        most_tiles, fewest_tiles = (
            cute.arch.warp_redux_sync(most_tiles, "max"),
            cute.arch.warp_redux_sync(fewest_tiles, "min"),
        )
        share = quotient(total + num_ctas - 1, num_ctas)
        merged = self.merged_tiles()
        if most_tiles > MAX_SPLITS_BELOW_MIN * share or merged > share:
            share = cutlass.max(share, self.least)
        lead, least_span = cutlass.Int32(0), cutlass.Int32(0)
        whole = quotient(ranges + num_ctas - 1, num_ctas) * most_tiles
        if whole <= share + self.spared + merged:
            # Merging would cost more than blocks idle that have shorter ranges than others, or none.
            total, share, least_span = ranges * most_tiles, whole, most_tiles
        elif fewest_tiles < cutlass.min(share, most_tiles):
            lead = cutlass.Int32(ITEM_TILES)
            total += cute.arch.warp_redux_sync(items, "add") * lead
            share = cutlass.max(quotient(total + num_ctas - 1, num_ctas), share)
        return total, share, lead, least_span

    @cute.jit
    def merged_tiles(self):
        """The two partial results that a block may leave, in bytes of a key tile."""
        row, tile = cutlass.const_expr(2 * 4 * self.key.columns), cutlass.const_expr(self.tile_n * self.key.key_bytes)
        return (self.requests.rows * row + tile // 2) // tile

    @cute.jit
    def piece(self, request, first, seqlen_q, seqlen_k, head_block, row, rows, tile, taken, slot):
        position = seqlen_k - seqlen_q + row
        window_size_right = window_right(self.key, self.requests, request)
        n_block_min = self.first_tile(seqlen_q, seqlen_k) + tile
        n_block_max = n_block_min + taken
        if slot == NOT_SPLIT:
            # Of what the request's queries see, that which these do.
            n_block_min, n_block_max = self.range_of(seqlen_q, seqlen_k, row, window_size_right)
        return work_tile_of(
            self.key,
            self.requests,
            self.tile_n,
            request,
            first + row,
            rows,
            head_block,
            position,
            seqlen_k,
            n_block_min,
            n_block_max,
            window_size_right,
            slot,
        )
