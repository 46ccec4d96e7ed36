# SPDX-License-Identifier: Apache-2.0
"""The MMA role of two CTAs: a warp of the leader issues the MMAs of both.

Q K^T of a tile is issued before P V of the tile before it, so that it runs while the softmax of that tile works.
"""

from collections.abc import Sequence

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.attention.cute.args import TiledMmas
from dsl_backend.attention.cute.mask import first_tile_is_masked
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.sm100.dense_barriers import TwoCtaBarriers
from dsl_backend.attention.cute.sm100.dense_configs import CTA_PAIR, MMA_K, MMA_M, TWO_S_STAGES
from dsl_backend.attention.cute.sm100.dense_mma import MmaWarp, tmem_offset_O, tmem_offset_S
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVStages
from dsl_backend.attention.cute.tiles import TiledKernel
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma

BOTH_CTAS = 0b11  # multicast mask


class TwoCtaMmaWarp(MmaWarp):
    """S = Q K^T and O += P V of both CTAs. S has two stages, and O one."""

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        mmas: TiledMmas,
        barriers: TwoCtaBarriers,
        tmem_ptr: cute.Pointer,
        sQ: cute.Tensor,  # (tile_m, head_dim, q_stage)
        kv_stages: SeparateKVStages,
    ):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        self.kv_stages, self.tmem_ptr = kv_stages, tmem_ptr
        two_cta = {"dtype": kernel.dtype, "m": CTA_PAIR * MMA_M, "cta_group": CTA_PAIR, "cluster": CTA_PAIR}
        self.mma_qk = Tcgen05Mma(n=kernel.tile_n, **two_cta)
        self.mma_pv = Tcgen05Mma(n=kernel.dims_v, b_mn_major=True, a_in_tmem=True, **two_cta)
        (sK,) = kv_stages.sK
        self.tSrQ = tiled_mma_qk.make_fragment_A(cute.tiled_divide(sQ, (MMA_M, MMA_K)))
        self.tSrK = tiled_mma_qk.make_fragment_B(cute.tiled_divide(sK, (kernel.tile_n // CTA_PAIR, MMA_K)))
        sVt = cute.make_tensor(kv_stages.sV.iterator, cute.select(kv_stages.sV.layout, mode=[1, 0, 2]))
        self.tOrV = tiled_mma_pv.make_fragment_B(cute.tiled_divide(sVt, (kernel.own_v, MMA_K)))
        thr_mma_pv = tiled_mma_pv.get_slice(0)
        tOrP = tiled_mma_pv.make_fragment_A(thr_mma_pv.partition_shape_A((CTA_PAIR * MMA_M, kernel.tile_n)))
        self.tOrP_layout = tOrP.layout

    @cute.jit
    def run(self):
        work_idx, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            q_stage = stage_of(work_idx, self.config.query_stages)
            cute.arch.mbarrier_wait(self.barriers.q_full + q_stage, phase_of(work_idx, self.config.query_stages))
            num_tiles = work.n_block_max - work.n_block_min
            self.wait_k(kv_idx)
            self.issue_qk(q_stage, kv_idx)
            if work.seqlen_k < work.n_block_max * self.kernel.tile_n:
                # The correction warps of both CTAs clear V after the last key once they have this S.
                self.wait_v(kv_idx)
            if cutlass.const_expr(self.kernel.key.has_window_left):
                if num_tiles == 1 and first_tile_is_masked(work):
                    self.wait_v(kv_idx)
            self.commit(self.barriers.s_full + stage_of(kv_idx, TWO_S_STAGES))
            if num_tiles > 1:
                self.next_qk(work, q_stage, kv_idx + 1, num_tiles == 2)
            self.issue_pv(kv_idx, False)
            for tile in cutlass.range(kv_idx + 1, kv_idx + num_tiles, unroll=1):
                if tile + 1 < kv_idx + num_tiles:
                    self.next_qk(work, q_stage, tile + 1, tile + 2 == kv_idx + num_tiles)
                self.issue_pv(tile, True)
            kv_idx += num_tiles
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid

    @cute.jit
    def next_qk(self, work: WorkTile, q_stage: cutlass.Int32, kv_idx: cutlass.Int32, last: cutlass.Boolean):
        """Q K^T of a tile; `last`: of the work tile."""
        self.wait_k(kv_idx)
        if cutlass.const_expr(self.kernel.key.has_window_left):
            if last and first_tile_is_masked(work):
                # The correction warps of both CTAs clear V before the window once they have this S.
                self.wait_v(kv_idx)
        self.issue_qk(q_stage, kv_idx, [self.barriers.s_full + stage_of(kv_idx, TWO_S_STAGES)])

    @cute.jit
    def issue_qk(self, q_stage: cutlass.Int32, kv_idx: cutlass.Int32, commit: cutlass.Constexpr[Sequence] = ()):
        """S of a tile, over P of the tile two before, whose P V has been issued."""
        s_stage, k_stage = stage_of(kv_idx, TWO_S_STAGES), stage_of(kv_idx, self.config.stages)
        tSrQ, tSrK = self.tSrQ[None, None, None, q_stage], self.tSrK[None, None, None, k_stage]
        commit = [*commit, self.barriers.k_empty + k_stage]
        tmem_S = self.tmem_ptr + tmem_offset_S(self.kernel, s_stage)
        self.mma_qk.issue(tmem_S, tSrQ, [tSrK], False, commit_multicast=commit)

    @cute.jit
    def issue_pv(self, kv_idx: cutlass.Int32, accumulate: cutlass.Constexpr[bool]):
        """O (+)= P V of a tile, once P is written in both CTAs and O rescaled."""
        s_stage, v_stage = stage_of(kv_idx, TWO_S_STAGES), stage_of(kv_idx, self.config.stages)
        self.wait_v(kv_idx)
        cute.arch.mbarrier_wait(self.barriers.p_full + s_stage, phase_of(kv_idx, TWO_S_STAGES))
        tmem.after_sync()
        tmem_P = cute.recast_ptr(self.tmem_ptr + tmem_offset_S(self.kernel, s_stage), dtype=self.kernel.dtype)
        tOrP, tOrV = cute.make_tensor(tmem_P, self.tOrP_layout), self.tOrV[None, None, None, v_stage]
        tmem_O = self.tmem_ptr + tmem_offset_O(self.kernel, 0)
        self.mma_pv.issue(tmem_O, tOrP, [tOrV], accumulate, commit_multicast=[self.barriers.v_empty + v_stage])

    @cute.jit
    def commit(self, mbar: cute.Pointer):
        """Signal both CTAs' mbarriers once all MMAs so far are done."""
        with cute.arch.elect_one():
            tcgen05.commit(mbar, BOTH_CTAS, tcgen05.CtaGroup.TWO)
