# SPDX-License-Identifier: Apache-2.0
"""The schedule role of a pair of blocks: the first one claims query tiles, and tells the second."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import work_tile_of
from dsl_backend.attention.cute.scheduler.persistent import DynamicPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, no_work_tile
from dsl_backend.attention.cute.sm100.dense_configs import PAIR
from dsl_backend.primitives.copy import send_word

WORD_BYTES = 4


class TileIdxMessage(NamedTuple):
    """How the second block is told of what the first one claims.

    Attributes:
        word: the place of the next item, in the second block's shared memory.
        told: mbarrier that counts its bytes, there.
        heard: mbarrier in the first block's: the word was read.
    """

    word: cute.Pointer
    told: cute.Pointer
    heard: cute.Pointer

    @staticmethod
    def allocate(allocator) -> "TileIdxMessage":
        word = allocator.allocate_array(cutlass.Int32, 1)
        return TileIdxMessage(word, *(allocator.allocate_array(cutlass.Int64, 1) for _ in range(2)))


class TwoCtaTileScheduler(DynamicPersistentTileScheduler):
    """Those of ClaimedTiles, the same ones for both blocks: each has half of a tile's rows, which may be nobody's."""

    def __init__(
        self, key, work_pipeline, tokens_per_tile: int, tile_n: int, requests, counters, claims: TileIdxMessage, rank
    ):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests, counters)
        self.told_of, self.rank = claims, rank

    @cute.jit
    def run(self):
        pairs = cutlass.Int32(cute.arch.grid_dim()[0]) // PAIR
        place = cutlass.Int32(cute.arch.block_idx()[0]) // PAIR
        _, posted, _ = self.produce_from(place, cutlass.Int32(0), 0, cute.arch.lane_idx(), pairs)
        self.work_pipeline.produce(posted, no_work_tile())
        if self.rank == 0:
            self.leave(pairs)

    @cute.jit
    def next_place(self, had, num_ctas):
        word, told, heard = self.told_of
        place, phase = cutlass.Int32(0), (had - 1) & 1
        if self.rank == 0:
            place = self.claim() + num_ctas
            self.wait_read(phase)
            if cute.arch.lane_idx() == 0:
                send_word(place, word, told, 1)
        else:
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(told, WORD_BYTES)
            cute.arch.mbarrier_wait(told, phase)
            place = cute.arch.make_warp_uniform(cute.make_tensor(word, cute.make_layout(1))[0])
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(heard, 0)
        return place

    @cute.jit
    def wait_read(self, phase):
        """Until the word before was read."""
        cute.arch.mbarrier_wait(self.told_of.heard, phase ^ 1)

    @cute.jit
    def tile(self, request, first, seqlen_q, seqlen_k, head_block, row, window_size_right):
        """The block's rows of a tile, against the key tiles that any row of the pair sees."""
        n_block_min, n_block_max = self.range_of(seqlen_q, seqlen_k, row, window_size_right)
        tokens = cutlass.const_expr(self.tokens_per_tile // PAIR)
        row += self.rank * tokens
        rows = cutlass.max(cutlass.min(seqlen_q - row, tokens), 0) * self.key.pack_gqa
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
            cutlass.Int32(NOT_SPLIT),
        )
