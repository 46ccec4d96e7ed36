# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM90 with products in 8 bits, over an e4m3 cache.

As mla_kernel.py, but K is multiplied as it is stored, two warps beside the load warp transpose V, and MMA warps
quantize Q, which they load themselves.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from dsl_backend.attention.cute.args import MlaKeyLoads, MlaTensors, MlaTiledMmas, Outputs
from dsl_backend.attention.cute.fp8_smem import fp8_tensors
from dsl_backend.attention.cute.loader.mla import MlaKeyLoadWarp
from dsl_backend.attention.cute.mbarriers import WARPS_PER_WARPGROUP, allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.mla import Fp8MlaKey, TiledMla
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, fp8_chunk
from dsl_backend.attention.cute.sm90.dense_kernel import LOAD_WARP, SCHEDULER_WARP
from dsl_backend.attention.cute.sm90.fp8_kernel import FIRST_TRANSPOSE_WARP
from dsl_backend.attention.cute.sm90.fp8_mma import e4m3_mma
from dsl_backend.attention.cute.sm90.mla_barriers import Fp8Barriers, fp8_mbar_arrays
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS
from dsl_backend.attention.cute.sm90.mla_fp8_mma import Fp8MlaMmaConsumer, Fp8MlaSmem
from dsl_backend.attention.cute.sm90.mla_kernel import MlaForward
from dsl_backend.attention.cute.sm90.mla_mma import ACC_SCALE
from dsl_backend.attention.cute.transpose import LatentTransposeWarps
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.moved import SmemAllocator


class Fp8MlaForward(MlaForward):
    """As MlaForward; the cache is e4m3."""

    def __init__(self, key: Fp8MlaKey):
        TiledMla.__init__(self, key)
        self.chunk = fp8_chunk(key.head_dim)
        self.parts = (range(self.dims // self.chunk),)
        self.math_clears, self.dequantizes = False, False
        self.loaded_stages = self.config.dequant_stages

    def tiled_mmas(self) -> MlaTiledMmas:
        smem, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        columns = self.dims_v // GROUPS // max(self.config.value_parts, 1)
        return MlaTiledMmas(e4m3_mma(self.tile_n, smem), e4m3_mma(columns, registers), e4m3_mma(columns, smem))

    def loads(self, tensors: MlaTensors) -> Any:
        """`MlaKeyLoads`."""
        return self.key_loads(tensors)

    @cute.kernel
    def kernel(
        self,
        mmas: MlaTiledMmas,
        loads: MlaKeyLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        allocator = SmemAllocator()
        sQ_bytes, sQ = fp8_tensors(allocator, ROWS, self.dims, 1)
        sK_bytes, sK = fp8_tensors(allocator, self.tile_n, self.dims, config.dequant_stages)
        sVt_bytes, sVt = fp8_tensors(allocator, self.dims_v, self.tile_n, config.stages)
        sP_bytes, sP = fp8_tensors(allocator, ROWS, self.tile_n, 1)
        sZeros = allocator.allocate_tensor(cutlass.Int32, cute.make_layout(4), byte_alignment=16)
        sStats = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, ACC_SCALE + 1)), byte_alignment=16)
        sRowSum = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, GROUPS, 2)), byte_alignment=16)
        sQScale = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(ROWS), byte_alignment=16)
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        arrays = fp8_mbar_arrays(config)
        barriers = Fp8Barriers(**allocate_mbarriers(allocator, arrays))

        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                init_mbarriers(barriers, arrays)
                for i in cutlass.range_constexpr(4):
                    sZeros[i] = 0
            cute.arch.mbarrier_init_fence()
        self.cluster_sync()

        # Until here, nothing was accessed that the kernels before this one read or write.
        dependent_launch.wait()
        if cutlass.const_expr(self.key.split):
            # The combine kernel may be launched beside this one: it waits for this one's end.
            dependent_launch.launch_dependents()
        work_pipeline = WorkTilePipeline(sWork, barriers.work_full, barriers.work_empty)
        mma_registers, other_registers, _ = config.registers
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == LOAD_WARP:
                MlaKeyLoadWarp(self, work_pipeline, barriers, loads, sQ, sK_bytes, requests).run()
            if warp == SCHEDULER_WARP:
                self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
            if warp >= FIRST_TRANSPOSE_WARP:
                LatentTransposeWarps(
                    self,
                    work_pipeline,
                    barriers._replace(v_loaded=barriers.k_full, v_taken=barriers.k_empty),
                    sK_bytes,
                    sVt_bytes,
                    (self.chunk, fp8_chunk(self.tile_n)),
                    requests,
                    thread - FIRST_TRANSPOSE_WARP * 32,
                    config.cluster,
                    sZeros=sZeros,
                ).run()
        else:
            cute.arch.setmaxregister_increase(mma_registers)
            smem = Fp8MlaSmem(sQ, sK, sVt, sP, sStats, sRowSum, sQ_bytes, sP_bytes, sQScale)
            Fp8MlaMmaConsumer(
                self, work_pipeline, mmas, loads, barriers, smem, outputs, requests, scoring, thread - WARPGROUP
            ).run()
        if cutlass.const_expr(config.cluster > 1):
            # Peers access this CTA's shared memory until here.
            self.cluster_sync()
