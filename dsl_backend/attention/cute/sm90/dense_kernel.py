# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM90, persistent and warp-specialized, as FlashAttention-3 (Shah et al., 2024).

Warp roles: a tile scheduler warp, a TMA load warp, one to three MMA warpgroups, and for an fp8 cache a dequantization
warpgroup. K and V tiles pass through smem stages; S and P stay in registers. The rows of a query tile are tokens of one
head, or with pack_gqa tokens times the query heads that share a KV head.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.cute.args import DenseLoads, DenseTensors, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import SplitKVCombine, cta_fold_workspace, with_fold_workspace
from dsl_backend.attention.cute.dequant import DequantWarps, tma_barriers
from dsl_backend.attention.cute.loader.dense import LoadWarp, RolledLoadWarp
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, fold_workspace_size
from dsl_backend.attention.cute.sm90.dense_barriers import WARPS_PER_WARPGROUP, Barriers, mbar_arrays
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_mma import MmaConsumer
from dsl_backend.attention.cute.tiles import LayerKey, TiledKernel
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import VECTOR_BYTES
from dsl_backend.primitives.moved import SmemAllocator

LOAD_WARP, SCHEDULER_WARP = 0, 1
# TMA boxes of a query tile in split-KV: most work tiles have few tokens, and TMA takes 2 to 3 ns to zero-fill a row
# beyond the end of the batch (H200).
MAX_Q_BOXES = 8


@dataclass(frozen=True, kw_only=True)
class DenseKey(LayerKey):
    """All that the kernel's code depends on."""

    config: DenseConfig

    @property
    def has_fold_workspace(self) -> bool:
        return super().has_fold_workspace and not self.config.fold_in_smem

    @property
    def smem_fold_rows(self) -> int:
        return self.config.smem_fold_rows if self.tiles_per_split else 0


class DenseForward(TiledKernel):
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands.

    Args:
        key: a `DenseKey`, or the key of a subclass.
    """

    exact_pairs = True
    late_claims = True

    def __init__(self, key: Any):
        self.most_boxes = MAX_Q_BOXES if key.split else 1
        super().__init__(key, key.config)
        self.mma_registers, self.load_registers, self.dequant_registers = self.config.registers
        self.pair_row_tiles = self.config.pair_row_tiles

    @cute.jit
    def __call__(
        self,
        tensors: DenseTensors,
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
        outputs = with_fold_workspace(key, Outputs(out, lse, partials), num_ctas, self.tile_m, self.dims_v)
        self.kernel(self.tiled_mmas(), self.loads(tensors), outputs, scheduler_workspace, requests, scoring).launch(
            grid=(num_ctas, 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,
        )
        if cutlass.const_expr(key.split):
            combine = SplitKVCombine(key, self.dims_v, config.ctas_per_sm, early_dependents=config.early_dependents)
            combine(outputs, scheduler_workspace, requests, scoring, num_ctas, stream)

    def tiled_mmas(self) -> TiledMmas:
        groups = (self.config.groups, 1, 1)
        return TiledMmas(
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype,
                self.dtype,
                OperandMajorMode.K,
                OperandMajorMode.K,
                cutlass.Float32,
                groups,
                (64, self.tile_n),
            ),
            hopper_helpers.make_trivial_tiled_mma(
                self.dtype_v,
                self.dtype_v,
                OperandMajorMode.K,
                OperandMajorMode.MN,
                cutlass.Float32,
                groups,
                (64, self.dims_v),
                warpgroup.OperandSource.RMEM,
            ),
        )

    def with_cta_fold_workspace(self, outputs: Outputs, allocator: SmemAllocator) -> Outputs:
        """Outputs with the CTA's own fold workspace, in shared or in global memory."""
        if not (self.key.tiles_per_split and self.config.fold_in_smem):
            return outputs._replace(fold_workspace=cta_fold_workspace(outputs.fold_workspace, self.tile_m, self.dims_v))
        layout = cute.make_layout(fold_workspace_size(self.tile_m, self.dims_v))
        return outputs._replace(
            fold_workspace=allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=VECTOR_BYTES)
        )

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
        q_layout = self.query_tiles(self.dims)
        k_layout = self.key_tiles(self.tile_n, self.dims, config.stages)
        v_layout = self.key_tiles(self.tile_n, self.dims_v, config.stages)
        allocator = SmemAllocator()
        q_elements = config.query_stages * self.tile_m * max(self.dims, self.dims_v)
        sQ = self.swizzled(allocator.allocate(q_elements * 2, byte_alignment=1024), q_layout)
        sK = allocator.allocate_tensor(self.dtype, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner)
        sV = allocator.allocate_tensor(self.dtype_v, v_layout.outer, byte_alignment=1024, swizzle=v_layout.inner)
        sK_tma, sV_tma = self.loaded(allocator, sK, sV)
        outputs = self.with_cta_fold_workspace(outputs, allocator)
        few_rows_workspace = None
        if cutlass.const_expr(self.key.smem_fold_rows):
            layout = cute.make_layout(fold_workspace_size(self.key.smem_fold_rows, self.dims_v))
            few_rows_workspace = allocator.allocate_tensor(cutlass.Float32, layout, byte_alignment=VECTOR_BYTES)
        work_tiles = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        arrays = mbar_arrays(config)
        barriers = Barriers(**allocate_mbarriers(allocator, arrays))

        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                init_mbarriers(barriers, arrays)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # Nothing before this point depends on the kernels before this one (programmatic dependent launch).
        dependent_launch.wait()
        if cutlass.const_expr(self.key.split):
            # The next kernel, often the combine kernel, may start on free SMs; it waits for the end of this one.
            dependent_launch.launch_dependents()
        work_pipeline = WorkTilePipeline(work_tiles, barriers.work_full, barriers.work_empty)
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.load_registers)
            if warp == LOAD_WARP:
                load_warp = RolledLoadWarp if self.dims > 256 else LoadWarp
                load_warp(self, work_pipeline, tma_barriers(barriers), loads, sQ, sK_tma, sV_tma, requests).run()
            if warp == SCHEDULER_WARP:
                self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
        elif warp >= (1 + config.groups) * WARPS_PER_WARPGROUP:
            if cutlass.const_expr(self.key.kv.fp8):
                cute.arch.setmaxregister_decrease(self.dequant_registers)
                DequantWarps(self, work_pipeline, barriers, sK_tma, sK, sV_tma, sV).run()
        else:
            cute.arch.setmaxregister_increase(self.mma_registers)
            MmaConsumer(
                self,
                work_pipeline,
                mmas,
                barriers,
                sQ,
                sK,
                sV,
                outputs,
                requests,
                scoring,
                thread - WARPGROUP,
                few_rows_workspace,
            ).run()
