# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM100: a scheduler warp, a load warp, an MMA warp and a softmax warpgroup.

A row of the cache is a key, and its first elements are the value: it is loaded once. O of 128 rows and 512 columns
would fill tensor memory, which must hold S too: a tile has 64 query rows, tokens times packed heads (pack_gqa). O is
transposed, O^T += V^T P^T, in MMAs of 128 columns of V: an MMA of 128 rows has twice the rate of one of 64, and
O^T needs no more than a store of neighbouring columns. One more warpgroup dequantizes fp8 keys.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers

from dsl_backend.attention.cute.args import MlaLoads, MlaTensors, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import (
    SplitKVCombine,
    cta_fold_workspace,
    wait_for_previous,
    with_fold_workspace,
)
from dsl_backend.attention.cute.dequant import MlaDequantWarps, tma_barriers
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.mla import MlaKey, TiledMla
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sm100.dense_configs import TENSOR_COLUMNS
from dsl_backend.attention.cute.sm100.mla_barriers import SOFTMAX_WARPS, Barriers, mbar_arrays
from dsl_backend.attention.cute.sm100.mla_configs import (
    DEQUANT_WARP,
    DV_TILE,
    LOAD_WARP,
    MMA_WARP,
    ROW_STATS,
    SCHEDULER_WARP,
)
from dsl_backend.attention.cute.sm100.mla_load import PagesAhead
from dsl_backend.attention.cute.sm100.mla_mma import MlaMmaWarp
from dsl_backend.attention.cute.sm100.mla_softmax import MlaSoftmaxWarps
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.moved import SmemAllocator


class MlaForward(TiledMla):
    """out = softmax(q k^T) k[:, :head_dim_v] for the requests of a batch; see `api.run` for the operands."""

    group = tcgen05.CtaGroup.ONE
    mma_commits_late = True

    def __init__(self, key: MlaKey):
        super().__init__(key)
        self.mma_dtype: type[cutlass.Numeric] = self.dtype

    @cute.jit
    def __call__(
        self,
        tensors: MlaTensors,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        partials: cute.Tensor | None,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
        num_ctas: cutlass.Int32,
        stream,
    ):
        key, config = self.key, self.config
        outputs = with_fold_workspace(key, Outputs(out, lse, partials), num_ctas, ROWS, self.dims_v)
        self.kernel(self.tiled_mmas(), self.loads(tensors), outputs, scheduler_workspace, requests, scoring).launch(
            grid=(num_ctas, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(key.split):
            early = not key.tiles_per_split
            combine = SplitKVCombine(key, self.dims_v, early_dependents=early, whole_rows=True)
            combine(outputs, scheduler_workspace, requests, scoring, num_ctas, stream)

    def tiled_mmas(self) -> TiledMmas:
        """S of 64 rows, and O^T of some columns of V."""
        return TiledMmas(
            self.tiled_mma(OperandMajorMode.K, OperandMajorMode.K, (ROWS, self.tile_n)),
            self.tiled_mma(OperandMajorMode.MN, OperandMajorMode.K, (DV_TILE, ROWS)),
        )

    def tiled_mma(self, a_major: OperandMajorMode, b_major: OperandMajorMode, shape: tuple[int, int]) -> cute.TiledMma:
        return blackwell_helpers.make_trivial_tiled_mma(
            self.mma_dtype, self.mma_dtype, a_major, b_major, cutlass.Float32, self.group, shape
        )

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
        allocator = SmemAllocator()
        sQ, sK, sP = (
            allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in self.layouts()
        )
        sV, sK_tma = self.values(sK), self.tma_target(allocator, sK)
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        row_stats = ROW_STATS + (1 if self.key.tiles_per_split else 0)
        sStats = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, row_stats)), byte_alignment=16)
        tmem_address = allocator.allocate_array(cutlass.Int32, 1)
        arrays = mbar_arrays(config)
        barriers = Barriers(**allocate_mbarriers(allocator, arrays))

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_mbarriers(barriers, arrays)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.rows_loaded < ROWS):
            # Rows that TMA does not write.
            clear_rows(sQ[None, None, 0], self.rows_loaded, ROWS, cute.arch.thread_idx()[0], config.threads)
            cute.arch.fence_proxy("async.shared", space="cta")
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, tmem_address)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tmem_base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_address)
        if cutlass.const_expr(config.cluster > 1):
            # Peers' TMA and MMAs signal mbarriers of this CTA, which must be initialised.
            self.cluster_sync()
        wait_for_previous(self.key.split)

        work_pipeline = WorkTilePipeline(sWork, barriers.work_full, barriers.work_empty)
        if warp < SOFTMAX_WARPS:
            own_outputs = outputs._replace(fold_workspace=cta_fold_workspace(outputs.fold_workspace, ROWS, self.dims_v))
            MlaSoftmaxWarps(
                self, work_pipeline, barriers, tmem_base, sStats, sV, sP, own_outputs, requests, scoring
            ).run()
        if warp == MMA_WARP:
            MlaMmaWarp(self, work_pipeline, mmas, barriers, tmem_base, sQ, sK, sV, sP).run()
        if warp == LOAD_WARP:
            PagesAhead(self, work_pipeline, tma_barriers(barriers), loads, sQ, sK_tma, requests).run()
        if warp == SCHEDULER_WARP:
            self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
        if cutlass.const_expr(self.key.kv.fp8):
            if warp >= DEQUANT_WARP:
                MlaDequantWarps(self, work_pipeline, barriers, sK_tma, sK).run()
        # Peers access this CTA's shared memory until here.
        self.cluster_sync()
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(tmem_base, TENSOR_COLUMNS)
