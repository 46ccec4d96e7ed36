# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM100: warp roles around tensor memory (FlashAttention-4: Zadouri et al., 2026).

One warp issues MMAs; S and O are in tensor memory. Two softmax warpgroups, each with 128 query rows, turn S into P in
place. A correction warpgroup rescales O when row_max has grown, and stores the outputs. One warp loads, one schedules.
With a quantized cache, a further warpgroup dequantizes K and V.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers

from dsl_backend.attention.cute.args import DenseLoads, DenseTensors, Nvfp4Loads, Nvfp4Tensors, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import (
    SplitKVCombine,
    cta_fold_workspace,
    wait_for_previous,
    with_fold_workspace,
)
from dsl_backend.attention.cute.dequant import DequantWarps, tma_barriers
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.scheduler.clc import ClcResponse, ClcTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sm100.dense_barriers import WARPS_PER_WARPGROUP, Barriers, mbar_arrays
from dsl_backend.attention.cute.sm100.dense_configs import (
    CORRECTION_WARP,
    DEQUANT_WARP,
    LOAD_WARP,
    MMA_M,
    MMA_WARP,
    QK_WARP,
    SCHEDULER_WARP,
    TENSOR_COLUMNS,
    DenseConfig,
)
from dsl_backend.attention.cute.sm100.dense_correction import CorrectionWarps
from dsl_backend.attention.cute.sm100.dense_mma import AlternatingMmaWarp, MmaWarp
from dsl_backend.attention.cute.sm100.dense_softmax import SoftmaxWarps
from dsl_backend.attention.cute.sm100.kv_stages import (
    SeparateKVLoadWarp,
    SeparateKVStages,
    SharedKVLoadWarp,
    SharedKVStages,
)
from dsl_backend.attention.cute.sm100.shared_s import (
    PvWarp,
    QkWarp,
    SharedSCorrectionWarps,
    SharedSSoftmaxWarps,
)
from dsl_backend.attention.cute.tiles import LayerKey, TiledKernel
from dsl_backend.errors import InvalidInput
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.moved import SmemAllocator


@dataclass(frozen=True, kw_only=True)
class DenseKey(LayerKey):
    """All that the kernel's code depends on."""

    config: DenseConfig

    def __post_init__(self) -> None:
        if self.split and self.config.use_clc:
            raise InvalidInput("cluster launch control has whole query tiles, and key ranges are split: leave it off")
        if self.split and self.config.two_cta:
            raise InvalidInput("two-CTA MMAs have whole query tiles, and key ranges are split: leave them off")

    @property
    def dynamic_scheduler(self) -> bool:
        return super().dynamic_scheduler and not self.config.use_clc


class DenseForward(TiledKernel):
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands.

    Attributes:
        cta_group, num_ctas: CTAs that multiply together, as MMAs and sizes name them; cluster: as launches do.
        mma_warp: which allocates tensor memory.
        load_warp, dequant_warps: the classes of these roles, where K and V have stages of their own.
        mma_dtype, mma_dtype_v: of the operands of Q K^T, and of P V.
        s_stages: S of 128 rows in tensor memory, which P overwrites.
        threads: of a CTA.
        skip_idle_warps: warps whose rows do not exist skip the key tiles of a work tile; see idle_warps.py.
    """

    cta_group, num_ctas = tcgen05.CtaGroup.ONE, 1
    cluster: tuple[int, int, int] | None = None
    mma_warp = MMA_WARP
    load_warp: Any = SeparateKVLoadWarp
    dequant_warps: Any = DequantWarps

    def __init__(self, key: DenseKey):
        super().__init__(key, key.config)
        self.alternate, self.s_stages = key.config.alternate, key.config.s_stages
        self.skip_idle_warps = self.tile_m == MMA_M
        self.registers, self.threads = key.config.registers, key.config.threads
        self.mma_dtype, self.mma_dtype_v = self.dtype, self.dtype_v

    def takes_page_boxes(self) -> bool:
        # Shared stages have K in two parts where it has more columns than V.
        return not (self.config.shared_kv_stages and self.dims > self.dims_v)

    @cute.jit
    def __call__(
        self,
        tensors: DenseTensors | Nvfp4Tensors,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        partials: cute.Tensor | None,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
        num_ctas: cutlass.Int32,
        stream,
    ):
        key = self.key
        outputs = with_fold_workspace(key, Outputs(out, lse, partials), num_ctas, self.tile_m, self.dims_v)
        self.kernel(self.tiled_mmas(), self.loads(tensors), outputs, scheduler_workspace, requests, scoring).launch(
            grid=(num_ctas, 1, 1),
            block=(self.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(key.split):
            combine = SplitKVCombine(key, self.dims_v, early_dependents=not key.tiles_per_split)
            combine(outputs, scheduler_workspace, requests, scoring, num_ctas, stream)

    def tiled_mmas(self) -> TiledMmas:
        tiled_mma_qk = blackwell_helpers.make_trivial_tiled_mma(
            self.mma_dtype,
            self.mma_dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            self.cta_group,
            (self.num_ctas * MMA_M, self.tile_n),
        )
        tiled_mma_pv = blackwell_helpers.make_trivial_tiled_mma(
            self.mma_dtype_v,
            self.mma_dtype_v,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            self.cta_group,
            (self.num_ctas * MMA_M, self.dims_v),
            tcgen05.OperandSource.TMEM,
        )
        return TiledMmas(tiled_mma_qk, tiled_mma_pv)

    @cute.kernel
    def kernel(
        self,
        mmas: TiledMmas,
        loads: DenseLoads | Nvfp4Loads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        allocator = SmemAllocator()
        sQ, sO = self.allocate_q(allocator)
        if cutlass.const_expr(config.shared_kv_stages):
            kv_stages: Any = SharedKVStages(self, allocator)
        else:
            kv_stages = SeparateKVStages(self, allocator, self.tile_n, self.dims_v)
        loaded_k, loaded_v = self.loaded(allocator, kv_stages.sK[0], kv_stages.sV)
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        sStats = allocator.allocate_tensor(
            cutlass.Float32, cute.make_layout((MMA_M, 2, config.stats_stages)), byte_alignment=16
        )
        tmem_holding_buf = allocator.allocate_array(cutlass.Int32, 1)
        barriers = Barriers(**allocate_mbarriers(allocator, mbar_arrays(config)))
        clc_response: Any = ClcResponse.allocate(allocator) if config.use_clc else None

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_mbarriers(barriers, mbar_arrays(config))
                if cutlass.const_expr(config.use_clc):
                    cute.arch.mbarrier_init(clc_response.full, 1)
            cute.arch.mbarrier_init_fence()
        self.clear_unused_q_rows(sQ)
        tmem_ptr = self.allocate_tmem(warp, tmem_holding_buf)
        wait_for_previous(self.key.split)

        work_pipeline = WorkTilePipeline(sWork, barriers.work_full, barriers.work_empty)
        if warp < config.softmax_warpgroups * WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_increase(self.registers.softmax)
            # S stage 0 comes first, and of two warps that could issue a scheduler is said to take the younger one
            # (arXiv 2503.20481): the second warpgroup has it. By the clock 1 to 10 % of the time.
            s_stage = config.softmax_warpgroups - 1 - warp // WARPS_PER_WARPGROUP
            softmax = SharedSSoftmaxWarps if config.shared_s else SoftmaxWarps
            softmax(self, work_pipeline, barriers, tmem_ptr, sStats, requests, scoring, s_stage).run()
        elif warp >= CORRECTION_WARP and warp < CORRECTION_WARP + WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.registers.correction)
            own_outputs = outputs._replace(
                fold_workspace=cta_fold_workspace(outputs.fold_workspace, self.tile_m, self.dims_v)
            )
            correction = SharedSCorrectionWarps if config.shared_s else CorrectionWarps
            correction(
                self, work_pipeline, barriers, tmem_ptr, sStats, kv_stages, sO, own_outputs, requests, scoring
            ).run()
        elif warp >= DEQUANT_WARP:
            if cutlass.const_expr(self.key.kv.quantized):
                cute.arch.setmaxregister_decrease(self.registers.dequant)
                self.dequant_warps(
                    self, work_pipeline, barriers, loaded_k, kv_stages.sK[0], loaded_v, kv_stages.sV
                ).run()
        else:
            cute.arch.setmaxregister_decrease(self.registers.other)
            if cutlass.const_expr(config.shared_s):
                if warp == QK_WARP:
                    QkWarp(self, work_pipeline, mmas, barriers, tmem_ptr, sQ, kv_stages).run()
            if warp == MMA_WARP:
                role = PvWarp if config.shared_s else AlternatingMmaWarp if self.alternate else MmaWarp
                role(self, work_pipeline, mmas, barriers, tmem_ptr, sQ, kv_stages).run()
            if warp == LOAD_WARP:
                load_barriers = tma_barriers(barriers)
                if cutlass.const_expr(config.shared_kv_stages):
                    SharedKVLoadWarp(self, work_pipeline, load_barriers, loads, sQ, kv_stages, requests).run()
                else:
                    self.load_warp(self, work_pipeline, load_barriers, loads, sQ, loaded_k, loaded_v, requests).run()
            if warp == SCHEDULER_WARP:
                if cutlass.const_expr(config.use_clc):
                    ClcTileScheduler(
                        self.key, work_pipeline, self.tokens_per_tile, self.tile_n, requests, clc_response
                    ).run()
                else:
                    self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
        cute.arch.sync_threads()
        self.free_tmem(warp, tmem_holding_buf)

    def allocate_q(self, allocator: SmemAllocator) -> tuple[cute.Tensor, cute.Tensor]:
        """SQ and sO, (tile_m, dim, q_stage), in the same memory: an output leaves through the stage of its Q."""
        q_layout, o_layout = self.query_tiles(self.dims), self.query_tiles(self.dims_v)
        elements = self.config.query_stages * self.tile_m * max(self.dims, self.dims_v)
        smem_ptr = allocator.allocate(elements * 2, byte_alignment=1024)
        return self.swizzled(smem_ptr, q_layout), self.swizzled(smem_ptr, o_layout)

    @cute.jit
    def clear_unused_q_rows(self, sQ: cute.Tensor):
        """Zero the rows of Q that TMA never writes, by all threads."""
        used_rows = self.tokens_per_tile * self.key.pack_gqa
        if cutlass.const_expr(used_rows < self.tile_m):
            for q_stage in cutlass.range_constexpr(self.config.query_stages):
                clear_rows(sQ[None, None, q_stage], used_rows, self.tile_m, cute.arch.thread_idx()[0], self.threads)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def allocate_tmem(self, warp: cutlass.Int32, tmem_holding_buf: cute.Pointer):
        """All of tensor memory, by all threads of the CTA; its address."""
        two_cta = cutlass.const_expr(self.num_ctas > 1)
        if warp == self.mma_warp:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, tmem_holding_buf, is_two_cta=two_cta)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=two_cta)
        cute.arch.sync_threads()
        return cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_holding_buf)

    @cute.jit
    def free_tmem(self, warp: cutlass.Int32, tmem_holding_buf: cute.Pointer):
        two_cta = cutlass.const_expr(self.num_ctas > 1)
        if warp == self.mma_warp:
            # Read again: kept, the address was one register too many for the roles in between (ptxas 13.0).
            tmem_ptr = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_holding_buf)
            cute.arch.dealloc_tmem(tmem_ptr, TENSOR_COLUMNS, is_two_cta=two_cta)
