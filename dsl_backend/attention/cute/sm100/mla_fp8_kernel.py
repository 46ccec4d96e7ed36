# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM100 with products in 8 bits, over an e4m3 cache.

As mla_kernel.py, but keys and values are multiplied as they are stored (`kind::f8f6f4` reads V column by column), and
a warpgroup, in place of that which dequantizes keys, loads Q and quantizes it.
"""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.args import MlaKeyLoads, MlaTensors, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import wait_for_previous
from dsl_backend.attention.cute.fp8_queries import mla_queries
from dsl_backend.attention.cute.fp8_smem import fp8_atom, fp8_tensors
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.mla import Fp8MlaKey
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, fp8_chunk
from dsl_backend.attention.cute.sm100.dense_configs import TENSOR_COLUMNS
from dsl_backend.attention.cute.sm100.mla_barriers import SOFTMAX_WARPS, Barriers, fp8_mbar_arrays
from dsl_backend.attention.cute.sm100.mla_configs import LOAD_WARP, MMA_WARP, ROW_STATS, SCHEDULER_WARP
from dsl_backend.attention.cute.sm100.mla_fp8_configs import Q_SCALE_STAGES, QUERY_WARP
from dsl_backend.attention.cute.sm100.mla_fp8_softmax import Fp8MlaSoftmaxWarps
from dsl_backend.attention.cute.sm100.mla_kernel import MlaForward
from dsl_backend.attention.cute.sm100.mla_load import PagesAheadMlaKeyLoadWarp
from dsl_backend.attention.cute.sm100.mla_mma import MlaMmaWarp
from dsl_backend.attention.cute.sm100.query_warps import QueryWarps
from dsl_backend.primitives.moved import SmemAllocator


class Fp8MlaForward(MlaForward):
    """As MlaForward; the cache is e4m3."""

    def __init__(self, key: Fp8MlaKey):
        super().__init__(key)
        self.mma_dtype = cutlass.Float8E4M3FN
        self.chunk = fp8_chunk(key.head_dim)
        self.parts = self.three_parts()
        self.dequantizes, self.loaded_stages = False, self.config.stages

    def key_atom(self) -> cute.ComposedLayout:
        return fp8_atom(self.dims)

    def loads(self, tensors: MlaTensors) -> Any:
        """`MlaKeyLoads`."""
        return self.key_loads(tensors)

    @cute.kernel
    def kernel(
        self,
        mmas: TiledMmas,
        loads: MlaKeyLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        allocator = SmemAllocator()
        sQ_bytes, sQ = fp8_tensors(allocator, ROWS, self.dims, 1)
        sK_bytes, sK = fp8_tensors(allocator, self.tile_n, self.dims, config.stages)
        sP_bytes, sP = fp8_tensors(allocator, ROWS, self.tile_n, 1)
        sV_bytes, sV = self.values(sK_bytes), self.values(sK)
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        sStats = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, ROW_STATS)), byte_alignment=16)
        scales = cute.make_layout((ROWS, Q_SCALE_STAGES))
        sQScale = allocator.allocate_tensor(cutlass.Float32, scales, byte_alignment=16)
        tmem_address = allocator.allocate_array(cutlass.Int32, 1)
        arrays = fp8_mbar_arrays(config)
        barriers = Barriers(**allocate_mbarriers(allocator, arrays))

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_mbarriers(barriers, arrays)
            cute.arch.mbarrier_init_fence()
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
            softmax = Fp8MlaSoftmaxWarps(
                self, work_pipeline, barriers, tmem_base, sStats, sV_bytes, sP_bytes, outputs, requests, scoring
            )
            softmax.sQScale = sQScale
            softmax.run()
        if warp == MMA_WARP:
            MlaMmaWarp(self, work_pipeline, mmas, barriers, tmem_base, sQ, sK, sV, sP[None, None, 0]).run()
        if warp == LOAD_WARP:
            PagesAheadMlaKeyLoadWarp(self, work_pipeline, barriers, loads, sQ, sK_bytes, requests).run()
        if warp == SCHEDULER_WARP:
            self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
        if warp >= QUERY_WARP:
            queries = mla_queries(self, loads, cute.arch.thread_idx()[0] % WARPGROUP, WARPGROUP)
            QueryWarps(queries, work_pipeline, barriers, sQ_bytes, sQScale).run()
        # Peers access this CTA's shared memory until here.
        self.cluster_sync()
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(tmem_base, TENSOR_COLUMNS)
