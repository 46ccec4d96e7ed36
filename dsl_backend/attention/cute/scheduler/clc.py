# SPDX-License-Identifier: Apache-2.0
"""The tile scheduler by cluster launch control (CLC): the grid has a CTA for each tile, and running CTAs cancel others.

PTX ISA 9.7.13.18. A running CTA takes a waiting one off the grid and processes its tile. PTX does not say in which
order CTAs leave the grid; in the order of their indices, the longest tiles come first.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.persistent import DynamicPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline, no_work_tile
from dsl_backend.attention.cute.sizes import CLC_RESPONSE_BYTES
from dsl_backend.primitives.ring import phase_of

NO_TILE = 0x7FFFFFFF  # the tile index when no CTA was left to cancel
NOT_COUNTED = 1 << 30  # the number of tiles before the first scan of the batch


class ClcResponse(NamedTuple):
    """What a CTA learns of the CTA that it cancelled.

    Attributes:
        response: 16 bytes of shared memory.
        full: mbarrier that counts them.
    """

    response: cute.Pointer
    full: cute.Pointer

    @staticmethod
    def allocate(allocator: Any) -> "ClcResponse":
        words = allocator.allocate_tensor(cutlass.Int32, cute.make_layout(CLC_RESPONSE_BYTES // 4), byte_alignment=16)
        return ClcResponse(words.iterator, allocator.allocate_array(cutlass.Int64, 1))


class ClcTileScheduler(DynamicPersistentTileScheduler):
    """The tiles of DynamicPersistentTileScheduler in their order: a CTA has the one of its own index in the grid first,
    then those of the CTAs that it cancels.

    A CTA whose index is beyond the last tile cancels others as well: that takes less time than to launch them.
    """

    def __init__(
        self,
        key: Any,
        work_pipeline: WorkTilePipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        clc: ClcResponse,
    ) -> None:
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests, None)
        self.clc = clc

    @cute.jit
    def run(self):
        tile_idx, num_produced = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(0)
        num_skipped, num_tiles = cutlass.Int32(0), cutlass.Int32(NOT_COUNTED)
        while tile_idx != NO_TILE:
            if tile_idx < num_tiles:
                # Starts at the first request again if the tile comes before the last one.
                tile_idx, num_produced, num_tiles = self.produce_from(
                    tile_idx, num_produced, num_skipped, cute.arch.lane_idx(), None
                )
            else:
                num_skipped += 1
                tile_idx = self.next_tile_idx(num_produced + num_skipped, None)
        self.work_pipeline.produce(num_produced, no_work_tile())

    def is_among(self, tile_idx: cutlass.Int32, tiles_before: cutlass.Int32, num_tiles: cutlass.Int32) -> Any:
        """As the base; a tile index below `tiles_before` wraps around."""
        return cutlass.Uint32(tile_idx - tiles_before) < cutlass.Uint32(num_tiles)

    @cute.jit
    def next_tile_idx(self, count: cutlass.Int32, num_ctas: None):
        """The index of a CTA that this one cancels. NO_TILE where none is left; nothing may be asked after that."""
        response, full = self.clc
        # All lanes have read the last response, and fenced: the async proxy writes the next one.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, CLC_RESPONSE_BYTES)
            cute.arch.issue_clc_query(full, response, multicast=False)
        # One lane that waits and shares what it reads cost softmax with fp8 keys a spill of 8 bytes (ptxas 13.0).
        cute.arch.mbarrier_wait(full, phase_of(count - 1, 1))
        tile_idx, _, _, is_valid = cute.arch.clc_response(response)
        cute.arch.fence_proxy("async.shared", space="cta")
        return tile_idx if is_valid != 0 else cutlass.Int32(NO_TILE)
