# SPDX-License-Identifier: Apache-2.0
"""Persistent tile schedulers whose work tiles have all key tiles of a row tile: static, and dynamic by a counter."""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.requests import (
    WARP,
    Requests,
    SeqlenInfo,
    from_lane,
    seqlen_info_of,
    warp_prefix_sum,
    zero_unless_served,
)
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, RowTile, WorkTilePipeline, no_work_tile
from dsl_backend.attention.cute.sizes import section_keys

# A work tile of at most so many key tiles is short: the next tile index is claimed before the consumers have read it.
SHORT_KEY_TILES = 4


class StaticPersistentTileScheduler:
    """CTA i processes tiles i, i + grid size, ...: of each request the last row tile first, which sees the most keys.

    The head blocks of a row tile are neighbours, so that the CTAs of a cluster have the same row tile.

    Args:
        key: the `LayerKey`.
        tokens_per_tile: tokens of a row tile. tile_n: keys of a key tile.
    """

    def __init__(
        self, key: Any, work_pipeline: WorkTilePipeline, tokens_per_tile: int, tile_n: int, requests: Requests
    ) -> None:
        self.key, self.work_pipeline, self.requests = key, work_pipeline, requests
        self.tokens_per_tile, self.tile_n = tokens_per_tile, tile_n
        self.head_blocks = key.head_blocks
        self.mask = Mask(key, tile_n, requests)

    @cute.jit
    def run(self):
        """By all lanes of the scheduler warp: lanes read a request each, then all of them find the CTA's tiles."""
        num_requests = cutlass.Int32(cute.size(self.requests.seqused_k))
        lane = cute.arch.lane_idx()
        tile_idx, grid_size = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        num_produced = cutlass.Int32(0)
        chunk_end = cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(num_requests, WARP), unroll=1):
            info = seqlen_info_of(self.requests, chunk * WARP + lane, num_requests)
            num_tiles = zero_unless_served(self.requests, info.seqlen_q, self.num_tiles(info))
            tile_end = warp_prefix_sum(num_tiles) + chunk_end
            chunk_end = cute.arch.shuffle_sync(tile_end, WARP - 1)
            while tile_idx < chunk_end:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(tile_end <= tile_idx))
                own_info = from_lane(info, owner)
                own_tiles, own_end = (cute.arch.shuffle_sync(value, owner) for value in (num_tiles, tile_end))
                request, local_idx = chunk * WARP + owner, tile_idx - (own_end - own_tiles)
                work = self.work_tile(request, own_info, local_idx, own_tiles)
                self.work_pipeline.produce(num_produced, work)
                num_produced += 1
                tile_idx += grid_size
        self.work_pipeline.produce(num_produced, no_work_tile())

    @cute.jit
    def num_row_tiles(self, seqlen_q: cutlass.Int32):
        """Row tiles of a request."""
        return (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile

    @cute.jit
    def num_tiles(self, info: SeqlenInfo):
        """Work tiles of a request."""
        return self.num_row_tiles(info.seqlen_q) * self.head_blocks

    @cute.jit
    def work_tile(self, request: cutlass.Int32, info: SeqlenInfo, local_idx: cutlass.Int32, num_tiles: cutlass.Int32):
        """The request's `local_idx`-th work tile of `num_tiles`."""
        token = (num_tiles // self.head_blocks - 1 - local_idx // self.head_blocks) * self.tokens_per_tile
        window_size_right = self.mask.window_size_right(request)
        return self.unsplit(request, info, local_idx % self.head_blocks, token, window_size_right)

    @cute.jit
    def n_block_range(self, info: SeqlenInfo, token: cutlass.Int32, window_size_right: cutlass.Int32):
        """(n_block_min, n_block_max) of the row tile that begins at a token of the request."""
        return self.mask.n_block_range(info.seqlen_q, info.seqlen_k, token, window_size_right, self.tokens_per_tile)

    @cute.jit
    def row_tile(
        self,
        request: cutlass.Int32,
        info: SeqlenInfo,
        head_block: cutlass.Int32,
        token: cutlass.Int32,
        window_size_right: cutlass.Int32,
    ):
        """The row tile that begins at a token of the request."""
        return RowTile(
            request=request,
            num_rows=cutlass.min(info.seqlen_q - token, self.tokens_per_tile) * self.key.pack_gqa,
            q_offset=info.offset_q + token,
            head_block=head_block,
            q_position=info.seqlen_k - info.seqlen_q + token,
            seqlen_k=info.seqlen_k,
            window_size_right=window_size_right,
        )

    @cute.jit
    def unsplit(
        self,
        request: cutlass.Int32,
        info: SeqlenInfo,
        head_block: cutlass.Int32,
        token: cutlass.Int32,
        window_size_right: cutlass.Int32,
    ):
        """A row tile against all key tiles that it sees."""
        n_block_min, n_block_max = self.n_block_range(info, token, window_size_right)
        tile = self.row_tile(request, info, head_block, token, window_size_right)
        return self.mask.work_tile(tile, n_block_min, n_block_max, cutlass.Int32(NOT_SPLIT))


class DynamicPersistentTileScheduler(StaticPersistentTileScheduler):
    """CTAs claim tiles by an atomic counter when they finish one: longest processing time first (Graham, 1969).

    Tiles are sorted by their key tiles, the head blocks of a row tile side by side. Requests whose keys fit into L2
    together (a section) come before others.

    A static order of 16 heads and prompts of 1024 tokens gave one of 132 CTAs 1.44 times the average work: the 128
    tiles of a request are nearly as many as CTAs, so that the same CTAs always got the longest ones.

    Args:
        tile_count_semaphore: [2] in the workspace: tiles claimed after the first one of each CTA, and CTAs that have
            finished. Both are 0 before and after a launch.
    """

    def __init__(
        self,
        key: Any,
        work_pipeline: WorkTilePipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        tile_count_semaphore: cute.Tensor | None,
    ) -> None:
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.tile_count_semaphore: Any = tile_count_semaphore
        self.section_keys = section_keys(
            key.heads_kv * (key.kv.row_bytes(key.head_dim) + key.kv.row_bytes(key.head_dim_v))
        )

    @cute.jit
    def run(self):
        lane, num_ctas = cute.arch.lane_idx(), cutlass.Int32(cute.arch.grid_dim()[0])
        tile_idx, num_produced = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(0)
        _, num_produced, _ = self.produce_from(tile_idx, num_produced, 0, lane, num_ctas)
        self.work_pipeline.produce(num_produced, no_work_tile())
        self.reset_semaphore(num_ctas)

    @cute.jit
    def produce_from(
        self,
        tile_idx: cutlass.Int32,
        num_produced: cutlass.Int32,
        num_skipped: cutlass.Int32 | int,
        lane: cutlass.Int32,
        num_ctas: cutlass.Int32 | None,
    ):
        """Produce the tile, and then the next ones as long as their indices grow.

        Args:
            num_produced, num_skipped: earlier tile indices of this CTA that were a work tile, and that were none.

        Returns:
            (the first tile index that was not produced, work tiles produced, tiles of the batch)
        """
        num_requests, tiles_before = cutlass.Int32(cute.size(self.requests.seqused_k)), cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(num_requests, WARP), unroll=1):
            request = chunk * WARP + lane
            info = seqlen_info_of(self.requests, request, num_requests)
            window_size_right = cutlass.Int32(0)
            if request < num_requests:
                window_size_right = self.mask.window_size_right(request)
            row_tiles_left = zero_unless_served(self.requests, info.seqlen_q, self.num_row_tiles(info.seqlen_q))
            section = (warp_prefix_sum(info.seqlen_k) - info.seqlen_k) // self.section_keys
            most_key_tiles, is_longest = self.longest(info, window_size_right, row_tiles_left, section)
            while most_key_tiles > 0:
                longest = cute.arch.vote_ballot_sync(is_longest != 0)
                rank = cute.arch.popc(longest & cute.arch.lanemask_lt())
                num_tiles = cute.arch.popc(longest) * self.head_blocks
                while self.is_among(tile_idx, tiles_before, num_tiles):
                    local_idx = tile_idx - tiles_before
                    chosen = cute.arch.vote_ballot_sync(is_longest != 0 and rank == local_idx // self.head_blocks)
                    owner = cute.arch.popc(chosen - 1)
                    token = (row_tiles_left - 1) * self.tokens_per_tile
                    own_info = from_lane(info, owner)
                    token, own_right = (cute.arch.shuffle_sync(value, owner) for value in (token, window_size_right))
                    head_block = local_idx % self.head_blocks
                    work = self.unsplit(chunk * WARP + owner, own_info, head_block, token, own_right)
                    self.work_pipeline.produce(num_produced, work)
                    if work.n_block_max - work.n_block_min > SHORT_KEY_TILES:
                        # A tile that is claimed while this one waits belongs to this CTA for as long as both take.
                        self.work_pipeline.wait_consumed(num_produced)
                    num_produced += 1
                    tile_idx = self.next_tile_idx(num_produced + num_skipped, num_ctas)
                tiles_before += num_tiles
                row_tiles_left -= is_longest
                most_key_tiles, is_longest = self.longest(info, window_size_right, row_tiles_left, section)
        return tile_idx, num_produced, tiles_before

    def is_among(self, tile_idx: cutlass.Int32, tiles_before: cutlass.Int32, num_tiles: cutlass.Int32) -> Any:
        """Whether a tile is one of the `num_tiles` after `tiles_before`. Tile indices only grow."""
        return tile_idx < tiles_before + num_tiles

    def next_tile_idx(self, count: cutlass.Int32, num_ctas: cutlass.Int32 | None) -> Any:
        """The CTA's next tile index after `count` others. Its first one is its index in the grid."""
        return self.claim_tile() + num_ctas

    @cute.jit
    def longest(
        self,
        info: SeqlenInfo,
        window_size_right: cutlass.Int32,
        row_tiles_left: cutlass.Int32,
        section: cutlass.Int32,
    ):
        """(the most key tiles of any request's next row tile, whether this lane's request has such a one: 0 or 1).

        Only requests of the first section that has row tiles left count; the most is 0 where none is left.
        """
        first_section, key_tiles = cutlass.Int32(0x7FFFFFFF), cutlass.Int32(0)
        if row_tiles_left > 0:
            first_section = section
        if section == cute.arch.warp_redux_sync(first_section, "min"):
            if row_tiles_left > 0:
                token = (row_tiles_left - 1) * self.tokens_per_tile
                n_block_min, n_block_max = self.n_block_range(info, token, window_size_right)
                key_tiles = n_block_max - n_block_min
        most_key_tiles = cute.arch.warp_redux_sync(key_tiles, "max")
        is_longest = cutlass.Int32(1) if key_tiles > 0 and key_tiles == most_key_tiles else cutlass.Int32(0)
        return most_key_tiles, is_longest

    @cute.jit
    def claim_tile(self):
        """How many tiles all CTAs have claimed before, without the first one of each."""
        num_claimed, semaphore = cutlass.Int32(0), self.tile_count_semaphore
        if cute.arch.lane_idx() == 0:
            num_claimed = cute.arch.atomic_add(semaphore.iterator, cutlass.Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(num_claimed, 0)

    @cute.jit
    def reset_semaphore(self, num_ctas: cutlass.Int32):
        """The last CTA to finish clears the counters for the next launch."""
        semaphore = self.tile_count_semaphore
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_gpu()
            num_finished = cute.arch.atomic_add(semaphore.iterator + 1, cutlass.Int32(1), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
            if num_finished == num_ctas - 1:
                semaphore[0] = cutlass.Int32(0)
                semaphore[1] = cutlass.Int32(0)
