# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM100 with two-CTA MMAs (cta_group::2), for whole query tiles of wide values.

Each CTA has 128 of a tile's 256 query rows, with their S, P and O in tensor memory. For Q K^T it holds half of a tile's
keys, for P V half of the columns of V. The MMAs read both halves where they are, so that a CTA loads and holds half of
what it would alone. S has two stages: the next S is made while the softmax works.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from dsl_backend.attention.cute.args import DenseLoads, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import wait_for_previous
from dsl_backend.attention.cute.loader.dense import box_rows
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.two_cta import TileIdxMessage, TwoCtaTileScheduler
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import chunk
from dsl_backend.attention.cute.sm100.dense_barriers import WARPS_PER_WARPGROUP, TwoCtaBarriers, two_cta_mbar_arrays
from dsl_backend.attention.cute.sm100.dense_configs import (
    CTA_PAIR,
    MMA_M,
    TWO_CTA_CORRECTION_WARP,
    TWO_CTA_LOAD_WARP,
    TWO_CTA_MMA_WARP,
    TWO_CTA_SCHEDULER_WARP,
)
from dsl_backend.attention.cute.sm100.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVStages
from dsl_backend.attention.cute.sm100.two_cta_correction import TwoCtaCorrectionWarps
from dsl_backend.attention.cute.sm100.two_cta_load import TwoCtaLoadWarp
from dsl_backend.attention.cute.sm100.two_cta_mma import TwoCtaMmaWarp
from dsl_backend.attention.cute.sm100.two_cta_softmax import TwoCtaSoftmaxWarps
from dsl_backend.primitives.moved import SmemAllocator


class TwoCtaForward(DenseForward):
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands.

    Attributes:
        box, value_rows: keys of a TMA box of K, and of V.
        own_v: columns of V that a CTA holds.
    """

    cta_group, num_ctas = tcgen05.CtaGroup.TWO, CTA_PAIR
    cluster = (CTA_PAIR, 1, 1)
    mma_warp = TWO_CTA_MMA_WARP

    def __init__(self, key: DenseKey):
        super().__init__(key)
        self.skip_idle_warps = False
        self.own_v = self.dims_v // CTA_PAIR
        self.chunk_v = self.copied_v = chunk(self.own_v)
        self.box, self.value_rows = box_rows(key.page_size, self.tile_n // CTA_PAIR), self.box

    def takes_page_boxes(self) -> bool:
        # A CTA has half of V's columns.
        return False

    def value_box(self) -> tuple[cute.ComposedLayout, tuple[int, int]]:
        return self.boxed(self.value_rows, self.chunk_v), (self.value_rows, self.chunk_v)

    def load_op(self) -> cpasync.CopyBulkTensorTileG2SOp:
        return cpasync.CopyBulkTensorTileG2SOp(self.cta_group)

    @cute.kernel
    def kernel(
        self,
        mmas: TiledMmas,
        loads: DenseLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        allocator = SmemAllocator()
        sQ, sO = self.allocate_q(allocator)
        kv_stages = SeparateKVStages(self, allocator, self.tile_n // CTA_PAIR, self.own_v)
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        sStats = allocator.allocate_tensor(
            cutlass.Float32, cute.make_layout((MMA_M, 2, self.s_stages)), byte_alignment=16
        )
        tmem_holding_buf = allocator.allocate_array(cutlass.Int32, 1)
        barriers = TwoCtaBarriers(**allocate_mbarriers(allocator, two_cta_mbar_arrays(config, 0)))
        tile_idx_message = TileIdxMessage.allocate(allocator)

        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == TWO_CTA_LOAD_WARP:
            with cute.arch.elect_one():
                init_mbarriers(barriers, two_cta_mbar_arrays(config, cta_rank))
                cute.arch.mbarrier_init(tile_idx_message.mbar_full, 1)
                cute.arch.mbarrier_init(tile_idx_message.mbar_empty, 1)
            cute.arch.mbarrier_init_fence()
        tmem_ptr = self.allocate_tmem(warp, tmem_holding_buf)
        # The peer's copies, MMAs and arrivals need the mbarriers.
        self.cluster_sync()
        wait_for_previous(False)

        work_pipeline = WorkTilePipeline(sWork, barriers.work_full, barriers.work_empty)
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_increase(self.registers.softmax)
            TwoCtaSoftmaxWarps(self, work_pipeline, barriers, tmem_ptr, sStats, requests, scoring, 0).run()
        elif warp < TWO_CTA_CORRECTION_WARP + WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.registers.correction)
            TwoCtaCorrectionWarps(
                self, work_pipeline, barriers, tmem_ptr, sStats, kv_stages, sO, outputs, requests, scoring
            ).run()
        else:
            cute.arch.setmaxregister_decrease(self.registers.other)
            if warp == TWO_CTA_MMA_WARP and cta_rank == 0:
                TwoCtaMmaWarp(self, work_pipeline, mmas, barriers, tmem_ptr, sQ, kv_stages).run()
            if warp == TWO_CTA_LOAD_WARP:
                TwoCtaLoadWarp(self, work_pipeline, barriers, loads, sQ, kv_stages, requests, cta_rank).run()
            if warp == TWO_CTA_SCHEDULER_WARP:
                TwoCtaTileScheduler(
                    self.key,
                    work_pipeline,
                    CTA_PAIR * self.tokens_per_tile,
                    self.tile_n,
                    requests,
                    scheduler_workspace,
                    tile_idx_message,
                    cta_rank,
                ).run()
        # A CTA keeps its shared memory and mbarriers until its peer has finished with them.
        self.cluster_sync()
        self.free_tmem(warp, tmem_holding_buf)

    @cute.jit
    def cluster_sync(self):
        """By all threads of both CTAs."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
