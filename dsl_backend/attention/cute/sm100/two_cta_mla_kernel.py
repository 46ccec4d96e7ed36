# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM100 by pairs of CTAs, whose tensor cores multiply together (cta_group::2).

Each CTA has 64 query rows, with their S, P and O. Its shared memory has half of a tile's keys, for S = Q K^T, and half
of V's columns, for O += P V; the MMAs of the pair read both halves. In tensor memory a row is cut in two: lanes from 64
on have the second half of the keys, and of V's columns.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from dsl_backend.attention.cute.args import MlaLoads, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import cta_fold_workspace, wait_for_previous
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_configs import CTA_PAIR, TENSOR_COLUMNS
from dsl_backend.attention.cute.sm100.mla_barriers import SOFTMAX_WARPS, TwoCtaBarriers, two_cta_mbar_arrays
from dsl_backend.attention.cute.sm100.mla_configs import DV_TILE, LOAD_WARP, MMA_WARP, SCHEDULER_WARP, TWO_CTA_STATS
from dsl_backend.attention.cute.sm100.mla_kernel import MlaForward
from dsl_backend.attention.cute.sm100.two_cta_mla_load import TwoCtaMlaLoadWarp
from dsl_backend.attention.cute.sm100.two_cta_mla_mma import TwoCtaMlaMmaWarp
from dsl_backend.attention.cute.sm100.two_cta_mla_softmax import TwoCtaMlaSoftmaxWarps
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.moved import SmemAllocator


class TwoCtaMlaForward(MlaForward):
    """out = softmax(q k^T) k[:, :head_dim_v] for the requests of a batch; see `api.run` for the operands."""

    group = tcgen05.CtaGroup.TWO

    @property
    def dv_tiles(self) -> int:
        """PV MMAs that make the CTA's columns of O."""
        return self.dims_v // CTA_PAIR // DV_TILE

    def tiled_mmas(self) -> TiledMmas:
        return TiledMmas(
            self.tiled_mma(OperandMajorMode.K, OperandMajorMode.K, (CTA_PAIR * ROWS, self.tile_n)),
            self.tiled_mma(OperandMajorMode.K, OperandMajorMode.MN, (CTA_PAIR * ROWS, CTA_PAIR * DV_TILE)),
        )

    def load_ops(self):
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        return load, load

    def layouts(self):
        """Of Q, K and P: the CTA's share."""
        atom, stages = self.atom(self.chunk), self.config.stages
        sQ_layout, _, sP_layout = super().layouts()
        sK_layout = cute.tile_to_shape(atom, (self.tile_n // CTA_PAIR, self.dims, stages), order=(0, 1, 2))
        return sQ_layout, sK_layout, sP_layout

    @cute.kernel
    def kernel(
        self,
        mmas: TiledMmas,
        loads: MlaLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        sQ_layout, sK_layout, sP_layout = self.layouts()
        sV_layout = cute.tile_to_shape(
            self.atom(self.chunk), (self.tile_n, self.dims_v // CTA_PAIR, config.stages), order=(0, 1, 2)
        )
        allocator = SmemAllocator()
        sQ, sK, sV, sP = (
            allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (sQ_layout, sK_layout, sV_layout, sP_layout)
        )
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        sStats = allocator.allocate_tensor(
            cutlass.Float32, cute.make_layout((WARPGROUP, TWO_CTA_STATS)), byte_alignment=16
        )
        tmem_address = allocator.allocate_array(cutlass.Int32, 1)
        # Both lists name the same arrays: the rank is known after shared memory has been allocated.
        arrays = two_cta_mbar_arrays(config, self.dv_tiles, 0)
        barriers = TwoCtaBarriers(**allocate_mbarriers(allocator, arrays))

        cta_rank = cute.arch.block_idx_in_cluster()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_mbarriers(barriers, two_cta_mbar_arrays(config, self.dv_tiles, cta_rank))
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.rows_loaded < ROWS):
            # Rows that TMA does not write.
            clear_rows(sQ[None, None, 0], self.rows_loaded, ROWS, cute.arch.thread_idx()[0], config.threads)
            cute.arch.fence_proxy("async.shared", space="cta")
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, tmem_address, is_two_cta=True)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        cute.arch.sync_threads()
        tmem_base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_address)
        self.cluster_sync()
        wait_for_previous(self.key.split)

        work_pipeline = WorkTilePipeline(sWork, barriers.work_full, barriers.work_empty)
        if warp < SOFTMAX_WARPS:
            own_outputs = outputs._replace(fold_workspace=cta_fold_workspace(outputs.fold_workspace, ROWS, self.dims_v))
            TwoCtaMlaSoftmaxWarps(
                self, work_pipeline, barriers, tmem_base, sStats, sV, sP, own_outputs, requests, scoring
            ).run()
        if warp == MMA_WARP and cta_rank == 0:
            TwoCtaMlaMmaWarp(self, work_pipeline, mmas, barriers, tmem_base, sQ, sK, sV, sP).run()
        if warp == LOAD_WARP:
            TwoCtaMlaLoadWarp(self, work_pipeline, barriers, loads, sQ, sK, sV, requests, cta_rank).run()
        if warp == SCHEDULER_WARP:
            self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
        # The peer's MMAs and arrivals access this CTA's shared memory until here.
        self.cluster_sync()
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(tmem_base, TENSOR_COLUMNS, is_two_cta=True)
