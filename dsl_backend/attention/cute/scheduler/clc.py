# SPDX-License-Identifier: Apache-2.0
"""Query tiles by cluster launch control: the grid has a block for each, and running blocks take those that wait.

PTX ISA 9.7.13.18. In which order blocks leave the grid is nobody's promise; by their numbers, tiles are taken longest
first.
"""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import FAR
from dsl_backend.attention.cute.scheduler.persistent import DynamicPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.work_tile import no_work_tile
from dsl_backend.attention.cute.sm100.dense_configs import RESPONSE_BYTES
from dsl_backend.primitives.ring import phase_of

REFUSED = 0x7FFFFFFF  # the place of a block that was not there to take: behind all others


class ClcResponse(NamedTuple):
    """What a block is told of the one that it took off the grid.

    Attributes:
        response: 16 bytes of shared memory.
        full: mbarrier that counts them.
    """

    response: cute.Pointer
    full: cute.Pointer

    @staticmethod
    def allocate(allocator) -> "ClcResponse":
        words = allocator.allocate_tensor(cutlass.Int32, cute.make_layout(RESPONSE_BYTES // 4), byte_alignment=16)
        return ClcResponse(words.iterator, allocator.allocate_array(cutlass.Int64, 1))


class ClcTileScheduler(DynamicPersistentTileScheduler):
    """Those of ClaimedTiles in their order, of which a block has the item of its own place in the grid, and then those
    of the blocks that it takes off the grid.

    A block that is behind the last item takes others off as well: that is less than to launch them.
    """

    def __init__(self, key, work_pipeline, tokens_per_tile: int, tile_n: int, requests, control: ClcResponse):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests, None)
        self.control = control

    @cute.jit
    def run(self):
        place, posted, passed = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(0), cutlass.Int32(0)
        items = cutlass.Int32(FAR)
        while place != REFUSED:
            if place < items:
                # Begins anew if a block's place was before the last one's.
                place, posted, items = self.produce_from(place, posted, passed, cute.arch.lane_idx(), None)
            else:
                passed += 1
                place = self.next_place(posted + passed, None)
        self.work_pipeline.produce(posted, no_work_tile())

    def among(self, place, seen, items):
        # Places before those seen are far behind them.
        return cutlass.Uint32(place - seen) < cutlass.Uint32(items)

    @cute.jit
    def next_place(self, had, num_ctas):
        """Of a block that is taken off the grid; REFUSED, after which nobody asks again, where none is left."""
        response, full = self.control
        # All lanes have read the last response, and fenced: the async proxy writes the next one.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, RESPONSE_BYTES)
            cute.arch.issue_clc_query(full, response, multicast=False)
        # One lane that waits and shares what it reads cost softmax with fp8 keys a spill of 8 bytes (ptxas 13.0).
        cute.arch.mbarrier_wait(full, phase_of(had - 1, 1))
        place, _, _, taken = cute.arch.clc_response(response)
        cute.arch.fence_proxy("async.shared", space="cta")
        return place if taken != 0 else cutlass.Int32(REFUSED)
