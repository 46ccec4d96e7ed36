# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM90 with products in 8 bits, over an e4m3 cache: for long queries, and for many rows.

As in FlashAttention-3's fp8 forward (Shah et al., 2024): K is used as it is stored, V is transposed in shared memory,
and P is rounded to e4m3. Q arrives in 16 bits, and MMA warps quantize it; or in e4m3, and they take it as it is. Two
warps beside the load warp transpose V.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from dsl_backend.attention.cute.args import DenseKeyLoads, DenseLoads, DenseTensors, Outputs, TiledMmas
from dsl_backend.attention.cute.dequant import tma_barriers
from dsl_backend.attention.cute.fp8_smem import Fp8Tiles, fp8_tensors
from dsl_backend.attention.cute.loader.dense import KeyLoadWarp, LoadWarp
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, fp8_chunk
from dsl_backend.attention.cute.sm90.dense_barriers import WARPS_PER_WARPGROUP, Barriers, fp8_mbar_arrays
from dsl_backend.attention.cute.sm90.dense_kernel import LOAD_WARP, SCHEDULER_WARP, DenseForward
from dsl_backend.attention.cute.sm90.fp8_configs import Fp8Config
from dsl_backend.attention.cute.sm90.fp8_mma import (
    Fp8MmaConsumer,
    QuantizedQueryMmaConsumer,
    QuantizingMmaConsumer,
    SharedQueryMmaConsumer,
    e4m3_mma,
)
from dsl_backend.attention.cute.tiles import LayerKey
from dsl_backend.attention.cute.transpose import TransposeWarps
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.moved import SmemAllocator

FIRST_TRANSPOSE_WARP = 2


@dataclass(frozen=True, kw_only=True)
class Fp8Key(LayerKey):
    """All that the kernel's code depends on."""

    reads_fp8_q = True

    config: Fp8Config


class Fp8Forward(Fp8Tiles, DenseForward):
    """As DenseForward; keys and values are e4m3. Late claims of it are not timed."""

    late_claims = False

    def tiled_mmas(self) -> TiledMmas:
        groups, registers = (self.config.groups, 1, 1), warpgroup.OperandSource.RMEM
        queries = warpgroup.OperandSource.SMEM if self.config.shared_q else registers
        columns = self.dims_v // self.config.value_parts
        return TiledMmas(e4m3_mma(self.tile_n, queries, groups), e4m3_mma(columns, registers, groups))

    @property
    def loads_q(self) -> bool:
        """Whether the load warp loads Q, rather than MMA warps."""
        return self.key.fp8_q or not self.config.shared_q

    def loads(self, tensors: DenseTensors) -> Any:
        """`DenseLoads`, or `DenseKeyLoads` where MMA warps load Q."""
        return super().loads(tensors) if self.loads_q else self.key_loads(tensors)

    def consumer(self, shared_q: tuple[Any, Any, Any], *args: Any) -> Fp8MmaConsumer:
        """What the MMA warps do.

        Args:
            shared_q: Q in shared memory as e4m3, the scales of its rows, and Q as it is in global memory. args: of an
                `MmaConsumer`.
        """
        if not self.config.shared_q:
            return (QuantizedQueryMmaConsumer if self.key.fp8_q else Fp8MmaConsumer)(*args)
        return SharedQueryMmaConsumer(shared_q[0], *args) if self.key.fp8_q else QuantizingMmaConsumer(*shared_q, *args)

    @cute.kernel
    def kernel(
        self,
        mmas: TiledMmas,
        loads: DenseKeyLoads | DenseLoads,
        outputs: Outputs,
        scheduler_workspace: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
    ):
        config = self.config
        q_layout = self.query_tiles(self.dims)
        allocator = SmemAllocator()
        sQ_e4m3, sQScale = None, None
        if cutlass.const_expr(self.key.fp8_q or config.shared_q):
            sQ, sQ_e4m3 = fp8_tensors(allocator, self.tile_m, self.dims, config.query_stages)
            if cutlass.const_expr(not self.loads_q):
                sQScale = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(self.tile_m), byte_alignment=16)
        else:
            q_elements = config.query_stages * self.tile_m * max(self.dims, self.dims_v)
            sQ = self.swizzled(allocator.allocate(q_elements * 2, byte_alignment=1024), q_layout)
        sK_tma, sK = fp8_tensors(allocator, self.tile_n, self.dims, config.stages)
        sV_tma, _ = fp8_tensors(allocator, self.tile_n, self.dims_v, config.stages)
        sVt_bytes, sVt = fp8_tensors(allocator, self.dims_v, self.tile_n, config.stages)
        work_tiles = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        arrays = fp8_mbar_arrays(config)
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
            # As in DenseForward.
            dependent_launch.launch_dependents()
        work_pipeline = WorkTilePipeline(work_tiles, barriers.work_full, barriers.work_empty)
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.load_registers)
            if warp == LOAD_WARP:
                load_warp: Any = LoadWarp if self.loads_q else KeyLoadWarp
                load_warp(self, work_pipeline, tma_barriers(barriers), loads, sQ, sK_tma, sV_tma, requests).run()
            if warp == SCHEDULER_WARP:
                self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
            if warp >= FIRST_TRANSPOSE_WARP:
                widths = fp8_chunk(self.dims_v), fp8_chunk(self.tile_n)
                transposer = thread - FIRST_TRANSPOSE_WARP * 32
                TransposeWarps(self, work_pipeline, barriers, sV_tma, sVt_bytes, widths, requests, transposer).run()
        else:
            cute.arch.setmaxregister_increase(self.mma_registers)
            self.consumer(
                (sQ_e4m3, sQScale, loads.mQ),
                self,
                work_pipeline,
                mmas,
                barriers,
                sQ,
                sK,
                sVt,
                outputs,
                requests,
                scoring,
                thread - WARPGROUP,
            ).run()
