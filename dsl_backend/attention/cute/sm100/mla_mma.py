# SPDX-License-Identifier: Apache-2.0
"""The MMA warp of absorbed MLA for SM100: one warp issues all MMAs.

S of a tile is issued before PV of the tile before it, so that it is computed during that tile's softmax.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.attention.cute.args import TiledMmas
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.scheduler.split_kv import num_splits_of, split_of
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.sm100.mla_configs import DV_TILE, S_STAGES
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tcgen05_mma import K_BLOCK_BYTES, Tcgen05Mma


class MlaMmaWarp:
    """S = Q K^T, and transposed, O^T += V^T P^T.

    Args:
        kernel: the `MlaForward`.
        barriers: `Barriers`, or `TwoCtaBarriers`.
        tmem_base: address of the CTA's tensor memory.
        sQ: [row, column, 1]; sK, sV: [key, column, stage]; sP: [row, key].
    """

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        mmas: TiledMmas,
        barriers: Any,
        tmem_base: cute.Pointer,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sP: cute.Tensor,
    ) -> None:
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        # Every CTA of a cluster writes to a stage of K, and is signalled when it was read. Stages that are dequantized
        # into belong to one CTA.
        cluster = 1 if kernel.dequantizes else self.config.cluster
        self.tiled_mma_qk = Tcgen05Mma(dtype=kernel.mma_dtype, m=ROWS, n=kernel.tile_n, cluster=cluster)
        self.tiled_mma_pv = Tcgen05Mma(dtype=kernel.mma_dtype, m=DV_TILE, n=ROWS, a_mn_major=True, cluster=cluster)
        thr_mma_qk, thr_mma_pv = mmas.qk.get_slice(0), mmas.pv.get_slice(0)
        self.tSrQ = mmas.qk.make_fragment_A(thr_mma_qk.partition_A(sQ))
        self.tSrK = mmas.qk.make_fragment_B(thr_mma_qk.partition_B(sK))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        sVt = cute.local_tile(sVt, (DV_TILE, kernel.tile_n), (None, 0, None))  # [column, key, dv_tile, stage]
        self.tOrV = [
            mmas.pv.make_fragment_A(thr_mma_pv.partition_A(sVt[None, None, dv_tile, None]))
            for dv_tile in range(kernel.dims_v // DV_TILE)
        ]
        self.tOrP = mmas.pv.make_fragment_B(thr_mma_pv.partition_B(sP))
        self.tmem_base = tmem_base

    @cute.jit
    def run(self):
        work_tiles, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            cute.arch.mbarrier_wait(self.barriers.q_full, work_tiles & 1)
            if cutlass.const_expr(self.kernel.key.tiles_per_split):
                num_splits = num_splits_of(self.kernel.key, work)
                for index in cutlass.range(num_splits, unroll=1):
                    split = split_of(self.kernel.key, work, index)
                    tiles = self.mma_tiles(split, tiles, index + 1 == num_splits)
            else:
                tiles = self.mma_tiles(work, tiles, True)
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid

    @cute.jit
    def mma_tiles(self, work: WorkTile, tiles: cutlass.Int32, releases_q: cutlass.Boolean | bool):
        """All MMAs of a work tile, or of a split; return `tiles`, the key tiles so far.

        Args:
            releases_q: Q is not read after it.
        """
        count = work.n_block_max - work.n_block_min
        self.issue_qk(work, tiles, True, count == 1, releases_q)
        for step in cutlass.range(count, unroll=1):
            if step + 1 < count:
                self.issue_qk(work, tiles + step + 1, False, step + 2 == count, releases_q)
            self.issue_pv(tiles + step, step > 0)
            if step + 2 == count:
                self.commit_last_s(work, tiles + step + 1)
        return tiles + count

    def commit_last_s(self, work: WorkTile, tile: cutlass.Int32) -> None:
        """Signal S of a work tile's last key tile, where `issue_qk` did not: only CTA pairs do so."""

    @cute.jit
    def issue_qk(
        self,
        work: WorkTile,
        tile: cutlass.Int32,
        first: cutlass.Constexpr[bool],
        last: cutlass.Boolean,
        releases_q: cutlass.Boolean | bool,
    ):
        """S of a key tile, part by part as they arrive; first, last: of its work tile, or split.

        Its S stage is empty: S of two tiles before was read before P of that tile was signalled.
        """
        stage, phase = stage_of(tile, self.config.stages), phase_of(tile, self.config.stages)
        s_stage = stage_of(tile, S_STAGES)
        acc_S = self.tmem_base + s_stage * self.kernel.tile_n
        tSrQ, tSrK = self.tSrQ[None, None, None, 0], self.tSrK[None, None, None, stage]
        for part in cutlass.range_constexpr(PARTS):
            cute.arch.mbarrier_wait(self.barriers.k_full + stage * PARTS + part, phase)
            is_last_part = part == PARTS - 1
            self.tiled_mma_qk.issue(
                acc_S,
                tSrQ,
                [tSrK],
                part > 0,
                commit=[self.barriers.s_full + s_stage] if is_last_part else [],
                # Of the stage, the rope part: PV reads the rest.
                commit_multicast=[self.barriers.k_empty + stage * PARTS] if is_last_part else [],
                steps=k_blocks_of(self.kernel, part),
            )
        if last and releases_q:
            self.commit(self.barriers.q_empty)

    @cute.jit
    def issue_pv(self, tile: cutlass.Int32, accumulate: cutlass.Boolean):
        """Add P V of a key tile to O, once P is in shared memory and O is rescaled; else O becomes P V."""
        stage = stage_of(tile, self.config.stages)
        cute.arch.mbarrier_wait(self.barriers.p_full, tile & 1)
        tmem.after_sync()
        dv_tiles = cutlass.const_expr(len(self.tOrV))
        for dv_tile in cutlass.range_constexpr(dv_tiles):
            half_done, done = (dv_tile + 1) % (dv_tiles // 2) == 0, dv_tile == dv_tiles - 1
            part = 1 + dv_tile // (dv_tiles // 2)
            self.tiled_mma_pv.issue(
                self.tmem_base + o_offset(self.kernel, dv_tile),
                self.tOrV[dv_tile][None, None, None, stage],
                [self.tOrP],
                accumulate,
                commit=[self.barriers.o_full] if done else [],
                commit_multicast=[self.barriers.k_empty + stage * PARTS + part] if half_done else [],
            )

    @cute.jit
    def commit(self, mbar: cute.Pointer):
        """Signal a barrier once all MMAs so far are done."""
        with cute.arch.elect_one():
            tcgen05.commit(mbar)


def k_blocks_of(kernel: Any, part: int) -> range:
    """The k-blocks of QK that a part of a row has."""
    chunks, steps = kernel.parts[part], kernel.chunk * kernel.mma_dtype.width // 8 // K_BLOCK_BYTES
    return range(chunks.start * steps, chunks.stop * steps)


def o_offset(kernel: Any, dv_tile: int) -> int:
    """The first tensor-memory column of O of a PV MMA: behind the S stages."""
    return S_STAGES * kernel.tile_n + dv_tile * ROWS
