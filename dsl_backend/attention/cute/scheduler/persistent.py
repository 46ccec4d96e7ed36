# SPDX-License-Identifier: Apache-2.0
"""Tile schedulers for whole key ranges: static persistent, and dynamic persistent by an atomic counter."""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import window_right, work_tile_of
from dsl_backend.attention.cute.scheduler.requests import WARP, Requests, seqlens_of, sum_through
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, no_work_tile

# Of keys and values that row tiles of the same length are taken together for: half an H200's L2.
SECTION_BYTES = 25 << 20
SHORT = 4  # key tiles of an item beside which the next one is claimed at once


class StaticPersistentTileScheduler:
    """Whole query tiles, dealt out in turn: a request's last first, which see the most keys, all heads side by side.

    Blocks of a cluster get neighbouring units of a tile.
    """

    def __init__(self, key, work_pipeline, tokens_per_tile: int, tile_n: int, requests: Requests):
        self.key, self.work_pipeline, self.requests = key, work_pipeline, requests
        self.tokens_per_tile, self.tile_n = tokens_per_tile, tile_n
        self.head_blocks = key.head_blocks

    @cute.jit
    def run(self):
        count = cutlass.Int32(cute.size(self.requests.seqused_k))
        lane = cute.arch.lane_idx()
        place, step = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        posted = cutlass.Int32(0)
        seen = cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, seqlen_q, seqlen_k = seqlens_of(self.requests, request, count)
            tiles = self.items_of(seqlen_q, seqlen_k)
            if seqlen_q < self.requests.min_seqlen_q or seqlen_q > self.requests.max_seqlen_q:
                tiles = cutlass.Int32(0)
            through = sum_through(tiles) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < seen:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                values = [cute.arch.shuffle_sync(value, owner) for value in (first, seqlen_q, seqlen_k, tiles, through)]
                self.work_pipeline.produce(posted, self.item(place, chunk * WARP + owner, *values))
                posted += 1
                place += step
        self.work_pipeline.produce(posted, no_work_tile())

    @cute.jit
    def items_of(self, seqlen_q, seqlen_k):
        return (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile * self.head_blocks

    @cute.jit
    def item(self, place, request, first, seqlen_q, seqlen_k, tiles, through):
        local = place - (through - tiles)
        row = (tiles // self.head_blocks - 1 - local // self.head_blocks) * self.tokens_per_tile
        window_size_right = window_right(self.key, self.requests, request)
        return self.tile(request, first, seqlen_q, seqlen_k, local % self.head_blocks, row, window_size_right)

    @cute.jit
    def range_of(self, seqlen_q, seqlen_k, row, window_size_right):
        """The key tiles of the row tile that begins at a token of a request: begin, end."""
        position = seqlen_k - seqlen_q + row
        n_block_min, stop = cutlass.Int32(0), seqlen_k
        if cutlass.const_expr(self.key.has_window_left):
            n_block_min = cutlass.max(position - self.requests.window_size_left, 0) // self.tile_n
        if cutlass.const_expr(self.key.has_window_right or self.key.causality != "full"):
            tokens = cutlass.min(seqlen_q - row, self.tokens_per_tile)
            stop = cutlass.min(seqlen_k, cutlass.max(position + tokens + window_size_right, 0))
        # At least one tile, so that every row is written.
        return n_block_min, cutlass.max((stop + self.tile_n - 1) // self.tile_n, n_block_min + 1)

    @cute.jit
    def tile(self, request, first, seqlen_q, seqlen_k, head_block, row, window_size_right):
        """The item of a row tile."""
        n_block_min, n_block_max = self.range_of(seqlen_q, seqlen_k, row, window_size_right)
        return self.part(
            request,
            first,
            seqlen_q,
            seqlen_k,
            head_block,
            row,
            window_size_right,
            n_block_min,
            n_block_max,
            cutlass.Int32(NOT_SPLIT),
        )

    @cute.jit
    def part(
        self, request, first, seqlen_q, seqlen_k, head_block, row, window_size_right, n_block_min, n_block_max, slot
    ):
        """The item of some key tiles of a row tile; slot: of its result, WHOLE where there is no other part."""
        rows = cutlass.min(seqlen_q - row, self.tokens_per_tile) * self.key.pack_gqa
        return work_tile_of(
            self.key,
            self.requests,
            self.tile_n,
            request,
            first + row,
            rows,
            head_block,
            seqlen_k - seqlen_q + row,
            seqlen_k,
            n_block_min,
            n_block_max,
            window_size_right,
            slot,
        )


class DynamicPersistentTileScheduler(StaticPersistentTileScheduler):
    """Whole query tiles, claimed by whoever comes to their end: those with the most key tiles first, all heads side by
    side (longest processing time first: Graham, 1969). Requests whose keys fit into L2 together come before others.

    Dealt out in turn, 16 heads of prompts of 1024 tokens give one of 132 blocks 1.44 times the average to do: 128 items
    of a request are nearly a round of the blocks, and the same ones always got the longest.

    Args:
        claims: the workspace's counters: items claimed behind the first of each block, and blocks at their end. They
            are 0 before and after a launch.
    """

    def __init__(self, key, work_pipeline, tokens_per_tile: int, tile_n: int, requests: Requests, claims):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.claims = claims
        key_bytes = key.heads_kv * (key.head_dim + key.head_dim_v) * key.kv.itemsize
        self.section_keys = max(SECTION_BYTES // key_bytes, 1)

    @cute.jit
    def run(self):
        lane, num_ctas = cute.arch.lane_idx(), cutlass.Int32(cute.arch.grid_dim()[0])
        place, posted = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(0)
        _, posted, _ = self.produce_from(place, posted, 0, lane, num_ctas)
        self.work_pipeline.produce(posted, no_work_tile())
        self.leave(num_ctas)

    @cute.jit
    def produce_from(self, place, posted, passed, lane, num_ctas):
        """Post items from a place on, as long as the next place lies behind the last one.

        Args:
            posted, passed: of the places before, those whose items were posted, and those that have none.

        Returns:
            (the first place whose item was not posted, items posted, items there are)
        """
        count, seen = cutlass.Int32(cute.size(self.requests.seqused_k)), cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, seqlen_q, seqlen_k = seqlens_of(self.requests, request, count)
            window_size_right = cutlass.Int32(0)
            if request < count:
                window_size_right = window_right(self.key, self.requests, request)
            left = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile
            if seqlen_q < self.requests.min_seqlen_q or seqlen_q > self.requests.max_seqlen_q:
                left = cutlass.Int32(0)
            section = (sum_through(seqlen_k) - seqlen_k) // self.section_keys
            largest, mine = self.foremost(seqlen_q, seqlen_k, window_size_right, left, section)
            while largest > 0:
                members = cute.arch.vote_ballot_sync(mine != 0)
                rank = cute.arch.popc(members & cute.arch.lanemask_lt())
                items = cute.arch.popc(members) * self.head_blocks
                while self.among(place, seen, items):
                    chosen = cute.arch.vote_ballot_sync(mine != 0 and rank == (place - seen) // self.head_blocks)
                    owner = cute.arch.popc(chosen - 1)
                    row = (left - 1) * self.tokens_per_tile
                    values = [cute.arch.shuffle_sync(value, owner) for value in (first, seqlen_q, seqlen_k)]
                    row, own_right = (
                        cute.arch.shuffle_sync(row, owner),
                        cute.arch.shuffle_sync(window_size_right, owner),
                    )
                    work = self.tile(chunk * WARP + owner, *values, (place - seen) % self.head_blocks, row, own_right)
                    self.work_pipeline.produce(posted, work)
                    if work.n_block_max - work.n_block_min > SHORT:
                        # What is claimed while the last item waits is a block's own for as long as both take.
                        self.work_pipeline.wait_consumed(posted)
                    posted += 1
                    place = self.next_place(posted + passed, num_ctas)
                seen += items
                left -= mine
                largest, mine = self.foremost(seqlen_q, seqlen_k, window_size_right, left, section)
        return place, posted, seen

    def among(self, place, seen, items):
        """Whether a place is that of one of so many items behind those seen. Places only grow."""
        return place < seen + items

    def next_place(self, had, num_ctas):
        """The place behind so many others that the block had; its first is its own number."""
        return self.claim() + num_ctas

    @cute.jit
    def foremost(self, seqlen_q, seqlen_k, window_size_right, left, section):
        """The most key tiles of any request's next row tile, 0 if none is left; and whether it is the lane's: 0 or 1.

        Args:
            left: row tiles of the lane's request that are not yet dealt with.
            section: of the lane's request; the first one with row tiles left counts alone.
        """
        last, tiles = cutlass.Int32(0x7FFFFFFF), cutlass.Int32(0)
        if left > 0:
            last = section
        if section == cute.arch.warp_redux_sync(last, "min"):
            if left > 0:
                n_block_min, n_block_max = self.range_of(
                    seqlen_q, seqlen_k, (left - 1) * self.tokens_per_tile, window_size_right
                )
                tiles = n_block_max - n_block_min
        largest = cute.arch.warp_redux_sync(tiles, "max")
        mine = cutlass.Int32(1) if tiles > 0 and tiles == largest else cutlass.Int32(0)
        return largest, mine

    @cute.jit
    def claim(self):
        """How many items blocks have claimed before, but for each one's first."""
        before, claims = cutlass.Int32(0), self.claims
        if cute.arch.lane_idx() == 0:
            before = cute.arch.atomic_add(claims.iterator, cutlass.Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(before, 0)

    @cute.jit
    def leave(self, num_ctas):
        """The last block to leave clears the counters for the next launch."""
        claims = self.claims
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_gpu()
            ended = cute.arch.atomic_add(claims.iterator + 1, cutlass.Int32(1), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
            if ended == num_ctas - 1:
                claims[0] = cutlass.Int32(0)
                claims[1] = cutlass.Int32(0)
