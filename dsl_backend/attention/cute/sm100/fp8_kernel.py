# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM100 with products in 8 bits, over an e4m3 cache: for long queries, and for many rows.

As dense_kernel.py, but K and V are multiplied as they are stored: the tensor cores read V column by column
(`kind::f8f6f4`), so that nothing is transposed. P is rounded to e4m3. Q arrives in 16 bits: a warpgroup, in place of
that which dequantizes keys, loads it and quantizes it, work tiles ahead; of a CTA's first work tile the softmax warps
do. Q that arrives in e4m3 is loaded by TMA.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.args import DenseKeyLoads, DenseLoads, DenseTensors, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import wait_for_previous
from dsl_backend.attention.cute.fp8_smem import Fp8Tiles, fp8_tensors
from dsl_backend.attention.cute.loader.dense import KeyLoads
from dsl_backend.attention.cute.mbarriers import WARPS_PER_WARPGROUP, allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm100.dense_barriers import Barriers, fp8_mbar_arrays, mbar_arrays
from dsl_backend.attention.cute.sm100.dense_configs import (
    CORRECTION_WARP,
    LOAD_WARP,
    MMA_M,
    MMA_WARP,
    ONE_SOFTMAX_WARPGROUP_REGISTERS,
    REGISTERS,
    SCHEDULER_WARP,
    WARP,
)
from dsl_backend.attention.cute.sm100.dense_correction import CorrectionWarps
from dsl_backend.attention.cute.sm100.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm100.dense_mma import AlternatingMmaWarp, MmaWarp
from dsl_backend.attention.cute.sm100.fp8_configs import (
    QUERY_VECTOR,
    QUERY_WARP,
    Fp8DenseConfig,
    query_batch,
    query_lanes,
)
from dsl_backend.attention.cute.sm100.fp8_softmax import (
    Fp8SoftmaxWarps,
    QuantizedQuerySoftmaxWarps,
    TwoSFp8SoftmaxWarps,
    TwoSQuantizedQuerySoftmaxWarps,
)
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVLoadWarp
from dsl_backend.attention.cute.sm100.query_warps import CopiedQueries, DenseQueryWarps, PairedQueries
from dsl_backend.attention.cute.sm100.two_s import TwoSCorrectionWarps, TwoSMmaWarp
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.ring import stage_of

FIRST_VECTORS = 16  # of Q that a softmax thread loads ahead


def power_of_two(number: int) -> int:
    """The largest one up to a number."""
    return 1 << number.bit_length() - 1


@dataclass(frozen=True, kw_only=True)
class Fp8Key(DenseKey):
    """All that the kernel's code depends on."""

    reads_fp8_q = True

    config: Fp8DenseConfig


class Fp8KVStages:
    """Stages of K, and stages of V, as TMA fills them.

    Attributes:
        sK: tensors (key, dim, stage), one; sV: (key, dim, stage), as e4m3.
        sK_bytes, sV_bytes: the same memory as bytes.
    """

    def __init__(self, kernel: "Fp8DenseForward", allocator: SmemAllocator) -> None:
        self.stages = kernel.config.stages
        self.sK_bytes, sK = fp8_tensors(allocator, kernel.tile_n, kernel.dims, self.stages)
        self.sV_bytes, self.sV = fp8_tensors(allocator, kernel.tile_n, kernel.dims_v, self.stages)
        self.sK = [sK]

    def k_stages(self, kv_idx: cutlass.Int32) -> list[cutlass.Int32]:
        """The stage of each tensor of sK."""
        return [stage_of(kv_idx, self.stages)]

    def v_stage(self, kv_idx: cutlass.Int32) -> cutlass.Int32:
        return stage_of(kv_idx, self.stages)


class Fp8LoadWarp(KeyLoads, SeparateKVLoadWarp):
    """Loads K and V, as they are stored; QueryWarps load Q."""


class QuantizedQueryLoadWarp(SeparateKVLoadWarp):
    """Loads Q, K and V, all of e4m3."""

    def set_queries(self, kernel: Any, loads: DenseLoads, sQ: cute.Tensor) -> None:
        super().set_queries(kernel, loads, sQ)
        self.stages = self.config.stages


class Fp8CorrectionWarps(CorrectionWarps):
    """As CorrectionWarps. V is cleared as bytes."""

    def v_rows(self, kv_idx: cutlass.Int32) -> cute.Tensor:
        return self.kv_stages.sV_bytes[None, None, self.kv_stages.v_stage(kv_idx)]


class TwoSFp8CorrectionWarps(Fp8CorrectionWarps, TwoSCorrectionWarps):
    """As Fp8CorrectionWarps, with two S stages of the same rows, and one O; see two_s.py."""


class Fp8DenseForward(Fp8Tiles, DenseForward):
    """As DenseForward; keys and values are e4m3. No warp skips rows that do not exist: rows are many.

    Attributes:
        two_s: one softmax warpgroup has two S stages of the same rows.
    """

    def __init__(self, key: Fp8Key):
        super().__init__(key)
        self.skip_idle_warps = False
        self.mma_dtype = self.mma_dtype_v = cutlass.Float8E4M3FN
        self.two_s = key.config.softmax_warpgroups == 1
        if self.two_s:
            self.softmax_warps: Any = TwoSQuantizedQuerySoftmaxWarps if key.fp8_q else TwoSFp8SoftmaxWarps
        else:
            self.softmax_warps = QuantizedQuerySoftmaxWarps if key.fp8_q else Fp8SoftmaxWarps
        if key.fp8_q:
            # Without the warpgroup that quantizes Q, the last of a CTA, and with its registers.
            self.threads = QUERY_WARP * WARP
            self.registers = ONE_SOFTMAX_WARPGROUP_REGISTERS if self.two_s else REGISTERS

    def loads(self, tensors: DenseTensors) -> Any:
        """`DenseKeyLoads`, or `DenseLoads` of quantised queries."""
        return super().loads(tensors) if self.key.fp8_q else self.key_loads(tensors)

    def queries_of_softmax_warps(self, mQ: cute.Tensor) -> PairedQueries:
        """Q of a work tile, by all softmax warps: these are the first of a CTA."""
        threads, lanes = self.config.softmax_warpgroups * WARPGROUP, query_lanes(self.dims)
        most = min(FIRST_VECTORS // (self.dims // QUERY_VECTOR // lanes), self.tile_m * lanes // threads)
        return PairedQueries(self, mQ, self.tile_m, cute.arch.thread_idx()[0], threads, lanes, power_of_two(most))

    def copied_queries(self, mQ: cute.Tensor, place: cute.Pointer) -> CopiedQueries:
        """Q of a work tile, by the warpgroup that quantizes it."""
        thread, (ahead, batch_bytes) = cute.arch.thread_idx()[0] % WARPGROUP, query_batch(self.dims)
        batches = min(self.config.copied_q_bytes, self.tile_m * self.dims * 2) // batch_bytes
        args = self, mQ, self.tile_m, thread, WARPGROUP, query_lanes(self.dims), ahead
        return CopiedQueries(*args, place=place, batches=batches)

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
        allocator = SmemAllocator()
        sQ_bytes, sQ = fp8_tensors(allocator, self.tile_m, self.dims, config.query_stages)
        kv_stages: Any = Fp8KVStages(self, allocator)
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        sStats = allocator.allocate_tensor(
            cutlass.Float32, cute.make_layout((MMA_M, 2, config.stats_stages)), byte_alignment=16
        )
        sQScale = None
        if cutlass.const_expr(not self.key.fp8_q):
            scales = cute.make_layout((self.tile_m, config.scale_stages))
            sQScale = allocator.allocate_tensor(cutlass.Float32, scales, byte_alignment=16)
            copied_q = allocator.allocate(config.copied_q_bytes, byte_alignment=16)
        tmem_holding_buf = allocator.allocate_array(cutlass.Int32, 1)
        arrays = mbar_arrays(config) if self.key.fp8_q else fp8_mbar_arrays(config)
        barriers = Barriers(**allocate_mbarriers(allocator, arrays))

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_mbarriers(barriers, arrays)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.key.fp8_q):
            self.clear_unused_q_rows(sQ_bytes)
        tmem_ptr = self.allocate_tmem(warp, tmem_holding_buf)
        wait_for_previous(self.key.split)

        work_pipeline = WorkTilePipeline(sWork, barriers.work_full, barriers.work_empty)
        if warp < config.softmax_warpgroups * WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_increase(self.registers.softmax)
            # As in DenseForward: the younger warpgroup has S stage 0.
            s_stage = config.softmax_warpgroups - 1 - warp // WARPS_PER_WARPGROUP
            queries = None if self.key.fp8_q else self.queries_of_softmax_warps(loads.mQ)
            self.softmax_warps(
                *(queries, sQ_bytes, sQScale),
                *(self, work_pipeline, barriers, tmem_ptr, sStats, requests, scoring, s_stage),
            ).run()
        elif warp >= CORRECTION_WARP and warp < CORRECTION_WARP + WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.registers.correction)
            correction = TwoSFp8CorrectionWarps if self.two_s else Fp8CorrectionWarps
            correction(self, work_pipeline, barriers, tmem_ptr, sStats, kv_stages, sQ, outputs, requests, scoring).run()
        elif warp >= QUERY_WARP:
            if cutlass.const_expr(not self.key.fp8_q):
                cute.arch.setmaxregister_decrease(self.registers.dequant)
                queries = self.copied_queries(loads.mQ, copied_q)
                DenseQueryWarps(queries, work_pipeline, barriers, sQ_bytes, sQScale, config.softmax_warpgroups).run()
        else:
            cute.arch.setmaxregister_decrease(self.registers.other)
            if warp == MMA_WARP:
                mma_warp = TwoSMmaWarp if self.two_s else AlternatingMmaWarp if self.alternate else MmaWarp
                mma_warp(self, work_pipeline, mmas, barriers, tmem_ptr, sQ, kv_stages).run()
            if warp == LOAD_WARP:
                load_warp = QuantizedQueryLoadWarp if self.key.fp8_q else Fp8LoadWarp
                load_warp(
                    self, work_pipeline, barriers, loads, sQ_bytes, kv_stages.sK_bytes, kv_stages.sV_bytes, requests
                ).run()
            if warp == SCHEDULER_WARP:
                self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
        cute.arch.sync_threads()
        self.free_tmem(warp, tmem_holding_buf)
