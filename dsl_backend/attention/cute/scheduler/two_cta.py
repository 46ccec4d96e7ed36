# SPDX-License-Identifier: Apache-2.0
"""The tile scheduler of two CTAs that multiply together (cta_group::2): the leader claims tiles, its peer gets them."""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.persistent import DynamicPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests, SeqlenInfo
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, RowTile, WorkTilePipeline, no_work_tile
from dsl_backend.primitives.copy import store_shared_remote

CTAS_PER_CLUSTER = 2
TILE_IDX_BYTES = 4


class TileIdxMessage(NamedTuple):
    """The tile index that the leader sends to its peer.

    Attributes:
        tile_idx: in the peer's shared memory.
        mbar_full: the peer's mbarrier, which counts the message's bytes.
        mbar_empty: the leader's mbarrier: the peer has read the message.
    """

    tile_idx: cute.Pointer
    mbar_full: cute.Pointer
    mbar_empty: cute.Pointer

    @staticmethod
    def allocate(allocator: Any) -> "TileIdxMessage":
        tile_idx = allocator.allocate_array(cutlass.Int32, 1)
        return TileIdxMessage(tile_idx, *(allocator.allocate_array(cutlass.Int64, 1) for _ in range(2)))


class TwoCtaTileScheduler(DynamicPersistentTileScheduler):
    """Both CTAs process the same row tile, half of its rows each; the rows of one may be beyond the end of the batch.

    Args:
        tokens_per_tile: of both CTAs together.
        cta_rank: 0 for the leader, 1 for its peer.
    """

    def __init__(
        self,
        key: Any,
        work_pipeline: WorkTilePipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        tile_count_semaphore: cute.Tensor,
        message: TileIdxMessage,
        cta_rank: cutlass.Int32,
    ) -> None:
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests, tile_count_semaphore)
        self.message, self.cta_rank = message, cta_rank

    @cute.jit
    def run(self):
        num_clusters = cutlass.Int32(cute.arch.grid_dim()[0]) // CTAS_PER_CLUSTER
        tile_idx = cutlass.Int32(cute.arch.block_idx()[0]) // CTAS_PER_CLUSTER
        _, num_produced, _ = self.produce_from(tile_idx, cutlass.Int32(0), 0, cute.arch.lane_idx(), num_clusters)
        self.work_pipeline.produce(num_produced, no_work_tile())
        if self.cta_rank == 0:
            self.reset_semaphore(num_clusters)

    @cute.jit
    def next_tile_idx(self, count: cutlass.Int32, num_clusters: cutlass.Int32):
        sent, mbar_full, mbar_empty = self.message
        tile_idx, phase = cutlass.Int32(0), (count - 1) & 1
        if self.cta_rank == 0:
            tile_idx = self.claim_tile() + num_clusters
            self.wait_message_read(phase)
            if cute.arch.lane_idx() == 0:
                store_shared_remote((tile_idx,), sent, mbar_full, 1)
        else:
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(mbar_full, TILE_IDX_BYTES)
            cute.arch.mbarrier_wait(mbar_full, phase)
            tile_idx = cute.arch.make_warp_uniform(cute.make_tensor(sent, cute.make_layout(1))[0])
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(mbar_empty, 0)
        return tile_idx

    @cute.jit
    def wait_message_read(self, phase: cutlass.Int32):
        """Until the peer has read the message before."""
        cute.arch.mbarrier_wait(self.message.mbar_empty, phase ^ 1)

    @cute.jit
    def unsplit(
        self,
        request: cutlass.Int32,
        info: SeqlenInfo,
        head_block: cutlass.Int32,
        token: cutlass.Int32,
        window_size_right: cutlass.Int32,
    ):
        """This CTA's half of a row tile, against the key tiles that any row of both halves sees."""
        n_block_min, n_block_max = self.n_block_range(info, token, window_size_right)
        num_tokens = cutlass.const_expr(self.tokens_per_tile // CTAS_PER_CLUSTER)
        token += self.cta_rank * num_tokens
        tile = RowTile(
            request=request,
            num_rows=cutlass.max(cutlass.min(info.seqlen_q - token, num_tokens), 0) * self.key.pack_gqa,
            q_offset=info.offset_q + token,
            head_block=head_block,
            q_position=info.seqlen_k - info.seqlen_q + token,
            seqlen_k=info.seqlen_k,
            window_size_right=window_size_right,
        )
        return self.mask.work_tile(tile, n_block_min, n_block_max, cutlass.Int32(NOT_SPLIT))
