# SPDX-License-Identifier: Apache-2.0
"""The MMA warp of a CTA pair, for absorbed MLA: the leader's warp issues the MMAs of both CTAs."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.attention.cute.args import TiledMmas
from dsl_backend.attention.cute.mask import first_tile_is_masked
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.sm100.dense_configs import CTA_PAIR
from dsl_backend.attention.cute.sm100.mla_barriers import TwoCtaBarriers
from dsl_backend.attention.cute.sm100.mla_configs import DV_TILE, S_STAGES
from dsl_backend.attention.cute.sm100.mla_mma import MlaMmaWarp, k_blocks_of
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma

BOTH_CTAS = 0b11  # multicast mask


class TwoCtaMlaMmaWarp(MlaMmaWarp):
    """S = Q K^T and O += P V of both CTAs.

    Args:
        kernel: the `TwoCtaMlaForward`.
        tmem_base: address of the CTA's tensor memory.
    """

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        mmas: TiledMmas,
        barriers: TwoCtaBarriers,
        tmem_base: cute.Pointer,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sP: cute.Tensor,
    ) -> None:
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        both = {"dtype": kernel.dtype, "m": CTA_PAIR * ROWS, "cta_group": CTA_PAIR, "cluster": CTA_PAIR}
        self.tiled_mma_qk = Tcgen05Mma(n=kernel.tile_n, **both)
        self.tiled_mma_pv = Tcgen05Mma(n=CTA_PAIR * DV_TILE, b_mn_major=True, **both)
        self.tmem_base = tmem_base
        self.tSrQ = mmas.qk.make_fragment_A(cute.tiled_divide(sQ, (ROWS, 16)))
        self.tSrK = mmas.qk.make_fragment_B(cute.tiled_divide(sK, (kernel.tile_n // CTA_PAIR, 16)))
        self.tOrP = mmas.pv.make_fragment_A(cute.tiled_divide(sP, (ROWS, 16)))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        sVt = cute.local_tile(sVt, (DV_TILE, kernel.tile_n), (None, 0, None))  # [column, key, dv_tile, stage]
        self.tOrV = [
            mmas.pv.make_fragment_B(cute.tiled_divide(sVt[None, None, dv_tile, None], (DV_TILE, 16)))
            for dv_tile in range(kernel.dv_tiles)
        ]

    @cute.jit
    def issue_qk(
        self,
        work: WorkTile,
        tile: cutlass.Int32,
        first: cutlass.Constexpr[bool],
        last: cutlass.Boolean,
        releases_q: cutlass.Boolean | bool,
    ):
        stage, phase = stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        s_stage = stage_of(tile, S_STAGES)
        acc_S = self.tmem_base + s_stage * (self.kernel.tile_n // CTA_PAIR)
        s_full = self.barriers.s_full + s_stage
        tSrQ, tSrK = self.tSrQ[None, None, None, 0], self.tSrK[None, None, None, stage]
        windowed = cutlass.const_expr(self.kernel.key.has_window_left)
        for part in cutlass.range_constexpr(PARTS):
            cute.arch.mbarrier_wait(self.barriers.k_full + stage * PARTS + part, phase)
            done = [s_full] if part == PARTS - 1 and not first and not windowed else []
            done.append(self.barriers.k_empty + stage * PARTS + part)
            steps = k_blocks_of(self.kernel, part)
            self.tiled_mma_qk.issue(acc_S, tSrQ, [tSrK], part > 0, commit_multicast=done, steps=steps)
        if cutlass.const_expr(first):
            if work.seqlen_k < work.n_block_max * self.kernel.tile_n:
                # The softmax warps zero V beyond the last key once they have S: V must have been loaded.
                self.wait_v(stage, phase)
            if cutlass.const_expr(windowed):
                if last and first_tile_is_masked(work):
                    self.wait_v(stage, phase)
            self.commit(s_full)
        elif cutlass.const_expr(windowed):
            if last and first_tile_is_masked(work):
                # The softmax warps zero V before the window once they have S, so V must have been loaded. With one
                # stage it is loaded after the next PV MMA: `commit_last_s` signals S.
                pass
            else:
                self.commit(s_full)
        if last and releases_q:
            self.commit(self.barriers.q_empty)

    @cute.jit
    def issue_pv(self, tile: cutlass.Int32, accumulate: cutlass.Boolean):
        stage, phase = stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        cute.arch.mbarrier_wait(self.barriers.p_full, tile & 1)
        tmem.after_sync()
        for dv_tile in cutlass.range_constexpr(self.kernel.dv_tiles):
            mbar_idx = stage * self.kernel.dv_tiles + dv_tile
            self.wait_v_tile(mbar_idx, phase)
            done = [self.barriers.v_empty + mbar_idx]
            if cutlass.const_expr(dv_tile == self.kernel.dv_tiles - 1):
                done.append(self.barriers.o_full)
            acc_O, tOrV = self.tmem_base + o_offset(self.kernel) + dv_tile * DV_TILE, self.tOrV[dv_tile]
            tOrV = tOrV[None, None, None, stage]
            self.tiled_mma_pv.issue(acc_O, self.tOrP, [tOrV], accumulate, commit_multicast=done)

    @cute.jit
    def commit_last_s(self, work: WorkTile, tile: cutlass.Int32):
        if cutlass.const_expr(self.kernel.key.has_window_left):
            if first_tile_is_masked(work):
                self.wait_v(stage_of(tile, self.config.stages), phase_of(tile, self.config.stages))
                self.commit(self.barriers.s_full + stage_of(tile, S_STAGES))

    @cute.jit
    def wait_v(self, stage: cutlass.Int32, phase: cutlass.Int32):
        """Until all columns of V have been loaded, in both CTAs."""
        for dv_tile in cutlass.range_constexpr(self.kernel.dv_tiles):
            self.wait_v_tile(stage * self.kernel.dv_tiles + dv_tile, phase)

    @cute.jit
    def wait_v_tile(self, mbar_idx: cutlass.Int32, phase: cutlass.Int32):
        cute.arch.mbarrier_wait(self.barriers.v_full + mbar_idx, phase)

    @cute.jit
    def commit(self, mbar: cute.Pointer):
        """Signal a barrier in both CTAs once all MMAs so far are done."""
        with cute.arch.elect_one():
            tcgen05.commit(mbar, BOTH_CTAS, tcgen05.CtaGroup.TWO)


def o_offset(kernel: Any) -> int:
    """The first tensor-memory column of O: behind the S stages, of which a lane has half of the columns."""
    return S_STAGES * kernel.tile_n // CTA_PAIR
