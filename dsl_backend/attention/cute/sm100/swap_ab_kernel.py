# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM100 with swapped operands, for few query rows over many keys.

An MMA has 128 rows, of which 8 heads of one token fill 8. Here K is operand A and Q operand B: S^T = K Q^T,
O^T += V^T P^T. A thread of a softmax warpgroup has one key, and its scores with all query rows. Two softmax warpgroups
have every other key tile each, with an O of their own in tensor memory, whose lanes are columns of V. They also rescale
O, which is seldom, and store it: there is no correction role. P goes through shared memory.
"""

from collections.abc import Sequence

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.utils import blackwell_helpers

from dsl_backend.attention.cute.args import DenseLoads, Outputs, TiledMmas
from dsl_backend.attention.cute.combine import wait_for_previous
from dsl_backend.attention.cute.mbarriers import allocate_mbarriers, init_mbarriers
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sm100.dense_barriers import WARPS_PER_WARPGROUP, SwapABBarriers, swap_ab_mbar_arrays
from dsl_backend.attention.cute.sm100.dense_configs import (
    MMA_M,
    SWAP_AB_LOAD_WARP,
    SWAP_AB_MMA_WARP,
    SWAP_AB_SCHEDULER_WARP,
    SWAP_AB_STATS,
)
from dsl_backend.attention.cute.sm100.dense_kernel import DenseForward, DenseKey
from dsl_backend.attention.cute.sm100.dense_mma import AlternatingMmaWarp
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVLoadWarp, SeparateKVStages, allocate_swizzled
from dsl_backend.attention.cute.sm100.swap_ab_softmax import SwapABSoftmaxWarps
from dsl_backend.attention.cute.tiles import TiledKernel
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma


class SwapABForward(DenseForward):
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands."""

    mma_warp = SWAP_AB_MMA_WARP

    def __init__(self, key: DenseKey):
        super().__init__(key)
        self.skip_idle_warps = False

    def tiled_mmas(self) -> TiledMmas:
        mn_major, k_major = OperandMajorMode.MN, OperandMajorMode.K
        return TiledMmas(
            self.tiled_mma(k_major, (MMA_M, self.tile_m)), self.tiled_mma(mn_major, (self.dims_v, self.tile_m))
        )

    def tiled_mma(self, major: OperandMajorMode, shape: tuple[int, int]) -> cute.TiledMma:
        return blackwell_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, major, major, cutlass.Float32, self.cta_group, shape
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
        config, s_stages = self.config, self.s_stages
        allocator = SmemAllocator()
        sQ, _ = self.allocate_q(allocator)
        kv_stages = SeparateKVStages(self, allocator, self.tile_n, self.dims_v)
        # (key, query row, S stage)
        p_layout = cute.tile_to_shape(self.atom(self.tile_m), (self.tile_n, self.tile_m, s_stages), order=(0, 1, 2))
        sP = allocate_swizzled(allocator, self.dtype, p_layout)
        sStats = allocator.allocate_tensor(
            cutlass.Float32, cute.make_layout((self.tile_m, SWAP_AB_STATS, s_stages)), byte_alignment=16
        )
        sWork = allocator.allocate_tensor(cutlass.Int32, WorkTilePipeline.layout(), byte_alignment=64)
        tmem_holding_buf = allocator.allocate_array(cutlass.Int32, 1)
        barriers = SwapABBarriers(**allocate_mbarriers(allocator, swap_ab_mbar_arrays(config)))

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == SWAP_AB_LOAD_WARP:
            with cute.arch.elect_one():
                init_mbarriers(barriers, swap_ab_mbar_arrays(config))
            cute.arch.mbarrier_init_fence()
        self.clear_unused_q_rows(sQ)
        tmem_ptr = self.allocate_tmem(warp, tmem_holding_buf)
        wait_for_previous(True)

        work_pipeline = WorkTilePipeline(sWork, barriers.work_full, barriers.work_empty)
        if warp < s_stages * WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_increase(self.registers.softmax)
            SwapABSoftmaxWarps(
                self,
                work_pipeline,
                barriers,
                tmem_ptr,
                sP,
                sStats,
                kv_stages,
                outputs,
                requests,
                scoring,
                warp // WARPS_PER_WARPGROUP,
            ).run()
        else:
            cute.arch.setmaxregister_decrease(self.registers.other)
            if warp == SWAP_AB_MMA_WARP:
                SwapABMmaWarp(self, work_pipeline, mmas, barriers, tmem_ptr, sQ, sP, kv_stages).run()
            if warp == SWAP_AB_LOAD_WARP:
                sK, sV = kv_stages.sK[0], kv_stages.sV
                SeparateKVLoadWarp(self, work_pipeline, barriers, loads, sQ, sK, sV, requests).run()
            if warp == SWAP_AB_SCHEDULER_WARP:
                self.schedule(work_pipeline, requests, scheduler_workspace, outputs.partials).run()
        cute.arch.sync_threads()
        self.free_tmem(warp, tmem_holding_buf)


class SwapABMmaWarp(AlternatingMmaWarp):
    """S^T = K Q^T (key, query row) and O^T += V^T P^T (column, query row) of each S stage."""

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        mmas: TiledMmas,
        barriers: SwapABBarriers,
        tmem_ptr: cute.Pointer,
        sQ: cute.Tensor,  # (tile_m, head_dim, q_stage)
        sP: cute.Tensor,  # (tile_n, tile_m, S stage)
        kv_stages: SeparateKVStages,
    ):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        self.kv_stages, tile_m = kv_stages, kernel.tile_m
        self.mma_qk = Tcgen05Mma(dtype=kernel.dtype, m=MMA_M, n=tile_m)
        self.mma_pv = Tcgen05Mma(dtype=kernel.dtype, m=kernel.dims_v, n=tile_m, a_mn_major=True, b_mn_major=True)
        thr_mma_qk, thr_mma_pv = tiled_mma_qk.get_slice(0), tiled_mma_pv.get_slice(0)
        self.tSrK = tiled_mma_qk.make_fragment_A(thr_mma_qk.partition_A(kv_stages.sK[0]))
        self.tSrQ = tiled_mma_qk.make_fragment_B(thr_mma_qk.partition_B(sQ))
        sVt, sPt = (
            cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, 2]))
            for tensor in (kv_stages.sV, sP)
        )
        self.tOrV = tiled_mma_pv.make_fragment_A(thr_mma_pv.partition_A(sVt))
        self.tOrP = tiled_mma_pv.make_fragment_B(thr_mma_pv.partition_B(sPt))
        self.tmem_S = [tmem_ptr + s_stage * tile_m for s_stage in range(kernel.s_stages)]
        self.tmem_O = [tmem_ptr + (kernel.s_stages + s_stage) * tile_m for s_stage in range(kernel.s_stages)]

    def issue_qk(
        self, s_stage: int, q_stage: cutlass.Int32, kv_idx: cutlass.Int32, released: Sequence[cute.Pointer] = ()
    ) -> None:
        tSrK = self.tSrK[None, None, None, self.kv_stages.k_stages(kv_idx)[0]]
        tSrQ = self.tSrQ[None, None, None, q_stage]
        self.mma_qk.issue(self.tmem_S[s_stage], tSrK, [tSrQ], False, commit=[self.barriers.s_full + s_stage, *released])

    def issue_pv(
        self,
        s_stage: int,
        kv_idx: cutlass.Int32,
        accumulate: bool,
        released: Sequence[cute.Pointer],
        k_blocks: range | None = None,
    ) -> None:
        tOrV, tOrP = self.tOrV[None, None, None, self.kv_stages.v_stage(kv_idx)], self.tOrP[None, None, None, s_stage]
        self.mma_pv.issue(self.tmem_O[s_stage], tOrV, [tOrP], accumulate, commit=released, steps=k_blocks)

    def finish_work_tile(self, q_stage: cutlass.Int32) -> None:
        self.commit(self.barriers.q_empty + q_stage, self.barriers.o_full)
