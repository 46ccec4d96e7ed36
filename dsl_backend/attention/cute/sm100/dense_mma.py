# SPDX-License-Identifier: Apache-2.0
"""The MMA role: one warp issues all MMAs.

After P V of an S stage, the next Q K^T of the same S stage follows, so that the tensor cores work for one S stage while
the softmax warps work on the other. The MMAs of one thread execute in order, so S may overwrite P that was just read.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.attention.cute.args import TiledMmas
from dsl_backend.attention.cute.scheduler.split_kv import num_splits_of, split_of
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.sm100.dense_barriers import AnyBarriers
from dsl_backend.attention.cute.sm100.dense_configs import MMA_M
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVStages, SharedKVStages
from dsl_backend.attention.cute.tiles import TiledKernel
from dsl_backend.primitives import tmem
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tcgen05_mma import K_BLOCK_BYTES, Tcgen05Mma


class MmaWarp:
    """S = Q K^T and O += P V of each S stage.

    K and V tiles are counted over all work tiles (`kv_idx`), which gives their stage and phase.
    """

    barriers: AnyBarriers
    tSrQ: Any
    tSrK: Any
    tOrP: Any

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        mmas: TiledMmas,
        barriers: AnyBarriers,
        tmem_ptr: cute.Pointer,
        sQ: cute.Tensor,  # (tile_m, head_dim, q_stage)
        kv_stages: SeparateKVStages | SharedKVStages,
    ):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.work_pipeline, self.barriers = kernel, kernel.config, work_pipeline, barriers
        self.kv_stages = kv_stages
        self.mma_qk = Tcgen05Mma(dtype=kernel.mma_dtype, m=MMA_M, n=kernel.tile_n)
        self.mma_pv = Tcgen05Mma(dtype=kernel.mma_dtype_v, m=MMA_M, n=kernel.dims_v, b_mn_major=True, a_in_tmem=True)
        thr_mma_qk, thr_mma_pv = tiled_mma_qk.get_slice(0), tiled_mma_pv.get_slice(0)
        sQ_tiles = cute.local_tile(sQ, (MMA_M, kernel.dims), (None, 0, None))  # (row, dim, row tile, q_stage)
        row_tiles = range(kernel.tile_m // MMA_M)
        self.tSrQ = [
            tiled_mma_qk.make_fragment_A(thr_mma_qk.partition_A(sQ_tiles[None, None, i, None])) for i in row_tiles
        ]
        self.tSrK = [tiled_mma_qk.make_fragment_B(thr_mma_qk.partition_B(sK)) for sK in kv_stages.sK]
        sVt = cute.make_tensor(kv_stages.sV.iterator, cute.select(kv_stages.sV.layout, mode=[1, 0, 2]))
        self.tOrV = tiled_mma_pv.make_fragment_B(thr_mma_pv.partition_B(sVt))
        tOrP = tiled_mma_pv.make_fragment_A(thr_mma_pv.partition_shape_A((MMA_M, kernel.tile_n)))
        self.tmem_S = [tmem_ptr + tmem_offset_S(kernel, s_stage) for s_stage in range(kernel.s_stages)]
        self.tmem_O = [tmem_ptr + tmem_offset_O(kernel, s_stage) for s_stage in range(kernel.s_stages)]
        self.tOrP = [
            cute.make_tensor(
                cute.recast_ptr(tmem_ptr + tmem_offset_P(kernel, s_stage), dtype=kernel.mma_dtype_v), tOrP.layout
            )
            for s_stage in range(kernel.s_stages)
        ]

    @cute.jit
    def run(self):
        work_idx, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            q_stage = self.wait_q(work_idx)
            if cutlass.const_expr(self.kernel.key.tiles_per_split):
                for index in cutlass.range(num_splits_of(self.kernel.key, work), unroll=1):
                    kv_idx = self.mma_tiles(split_of(self.kernel.key, work, index), q_stage, kv_idx)
            else:
                kv_idx = self.mma_tiles(work, q_stage, kv_idx)
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid

    @cute.jit
    def mma_tiles(self, work: WorkTile, q_stage: cutlass.Int32, kv_idx: cutlass.Int32):
        """All MMAs of a work tile, or of a split; return kv_idx of the next one."""
        num_tiles = work.n_block_max - work.n_block_min
        self.wait_k(kv_idx)
        for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
            self.issue_qk(s_stage, q_stage, kv_idx)
        self.release(self.barriers.k_empty, kv_idx)
        self.release_q(q_stage, num_tiles == 1)
        self.wait_v(kv_idx)
        for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
            self.pv(s_stage, kv_idx, kv_idx, False, self.v_released(s_stage, kv_idx))
            if num_tiles > 1:
                self.next_qk(s_stage, q_stage, kv_idx)
        for step in cutlass.range(1, num_tiles, unroll=1):
            tile = kv_idx + step
            self.release_q(q_stage, step == num_tiles - 1)
            self.wait_v(tile)
            for s_stage in cutlass.range_constexpr(self.kernel.s_stages):
                self.pv(s_stage, tile, tile, True, self.v_released(s_stage, tile))
                if step < num_tiles - 1:
                    self.next_qk(s_stage, q_stage, tile)
        self.commit(self.barriers.o_full)
        return kv_idx + num_tiles

    @cute.jit
    def next_qk(self, s_stage: cutlass.Constexpr[int], q_stage: cutlass.Int32, kv_idx: cutlass.Int32):
        """Q K^T of the tile after this one. That of the last S stage releases the K stage."""
        if cutlass.const_expr(s_stage == 0):
            self.wait_k(kv_idx + 1)
        released = []
        if cutlass.const_expr(s_stage == self.kernel.s_stages - 1):
            released = [self.barriers.k_empty + stage_of(kv_idx + 1, self.config.stages)]
        self.issue_qk(s_stage, q_stage, kv_idx + 1, released)

    def v_released(self, s_stage: int, kv_idx: cutlass.Int32) -> list[cute.Pointer]:
        """The mbarrier of the V stage, if P V of this S stage is the last to read it."""
        last = self.kernel.s_stages - 1
        return [self.barriers.v_empty + stage_of(kv_idx, self.config.stages)] if s_stage == last else []

    @cute.jit
    def wait_q(self, work_idx: cutlass.Int32):
        """Wait for Q of a work tile; its stage."""
        q_stage = stage_of(work_idx, self.config.query_stages)
        cute.arch.mbarrier_wait(self.barriers.q_full + q_stage, phase_of(work_idx, self.config.query_stages))
        return q_stage

    @cute.jit
    def wait_k(self, kv_idx: cutlass.Int32):
        cute.arch.mbarrier_wait(
            self.barriers.k_full + stage_of(kv_idx, self.config.stages), phase_of(kv_idx, self.config.stages)
        )

    @cute.jit
    def wait_v(self, kv_idx: cutlass.Int32):
        cute.arch.mbarrier_wait(
            self.barriers.v_full + stage_of(kv_idx, self.config.stages), phase_of(kv_idx, self.config.stages)
        )

    @cute.jit
    def release(self, mbar_empty: cute.Pointer, kv_idx: cutlass.Int32):
        """Signal that the stage is empty once all MMAs so far are done."""
        self.commit(mbar_empty + stage_of(kv_idx, self.config.stages))

    @cute.jit
    def release_q(self, q_stage: cutlass.Int32, last: cutlass.Boolean):
        """Signal that the Q stage is empty, after the `last` Q K^T of a work tile, if the output does not need it."""
        if cutlass.const_expr(self.config.direct_output):
            if last:
                self.commit(self.barriers.q_empty + q_stage)

    @cute.jit
    def commit(self, *mbars: cute.Pointer):
        with cute.arch.elect_one():
            for mbar in mbars:
                tcgen05.commit(mbar)

    @cute.jit
    def issue_qk(
        self,
        s_stage: cutlass.Constexpr[int],
        q_stage: cutlass.Int32,
        kv_idx: cutlass.Int32,
        released: cutlass.Constexpr[Sequence] = (),
    ):
        """S = Q K^T. `released`: mbarriers to signal when it is done."""
        tSrQ = self.tSrQ[min(s_stage, len(self.tSrQ) - 1)][None, None, None, q_stage]
        k_stages = self.kv_stages.k_stages(kv_idx)
        tSrK = [part[None, None, None, k_stage] for part, k_stage in zip(self.tSrK, k_stages, strict=True)]
        self.mma_qk.issue(self.tmem_S[s_stage], tSrQ, tSrK, False, commit=[self.barriers.s_full + s_stage, *released])

    @cute.jit
    def pv(
        self,
        s_stage: cutlass.Constexpr[int],
        kv_idx: cutlass.Int32,
        p_idx: cutlass.Int32,
        accumulate: bool | cutlass.Boolean,
        released: cutlass.Constexpr[Sequence] = (),
    ):
        """O (+)= P V, once P of the S stage is written and its O rescaled. `p_idx` counts the tiles of the S stage."""
        cute.arch.mbarrier_wait(self.barriers.p_full + s_stage, p_idx & 1)
        tmem.after_sync()
        if cutlass.const_expr(self.config.late_p_keys > 0):
            mma_k = K_BLOCK_BYTES * 8 // self.mma_pv.dtype.width
            k_blocks = self.kernel.tile_n // mma_k
            early = k_blocks - self.config.late_p_keys // mma_k
            self.issue_pv(s_stage, kv_idx, accumulate, [], range(early))
            cute.arch.mbarrier_wait(self.barriers.late_p_full + s_stage, p_idx & 1)
            tmem.after_sync()
            self.issue_pv(s_stage, kv_idx, True, released, range(early, k_blocks))
        else:
            self.issue_pv(s_stage, kv_idx, accumulate, released)

    def issue_pv(
        self,
        s_stage: int,
        kv_idx: cutlass.Int32,
        accumulate: bool | cutlass.Boolean,
        released: Sequence[cute.Pointer],
        k_blocks: range | None = None,
    ) -> None:
        """The MMAs of P V, of some k-blocks or all."""
        tOrV = self.tOrV[None, None, None, self.kv_stages.v_stage(kv_idx)]
        self.mma_pv.issue(self.tmem_O[s_stage], self.tOrP[s_stage], [tOrV], accumulate, commit=released, steps=k_blocks)


class AlternatingMmaWarp(MmaWarp):
    """Both S stages have the same query rows: stage 0 the even key tiles of a work tile, stage 1 the odd ones."""

    @cute.jit
    def run(self):
        work_idx, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        even_idx, odd_idx = cutlass.Int32(0), cutlass.Int32(0)  # key tiles of S stage 0 and of S stage 1
        work = self.work_pipeline.consume(work_idx)
        valid = work.valid
        while valid != 0:
            q_stage = self.wait_q(work_idx)
            num_tiles = work.n_block_max - work.n_block_min
            self.qk_if_exists(0, q_stage, kv_idx, 0, num_tiles)
            self.qk_if_exists(1, q_stage, kv_idx, 1, num_tiles)
            self.pv_then_qk(0, q_stage, kv_idx, 0, num_tiles, even_idx, False)
            self.pv_then_qk(1, q_stage, kv_idx, 1, num_tiles, odd_idx, False)
            for pair in cutlass.range(1, (num_tiles + 1) // 2, unroll=1):
                self.pv_then_qk(0, q_stage, kv_idx, 2 * pair, num_tiles, even_idx + pair, True)
                self.pv_then_qk(1, q_stage, kv_idx, 2 * pair + 1, num_tiles, odd_idx + pair, True)
            self.finish_work_tile(q_stage)
            kv_idx += num_tiles
            even_idx += (num_tiles + 1) // 2
            odd_idx += num_tiles // 2
            work_idx += 1
            work = self.work_pipeline.consume(work_idx)
            valid = work.valid

    def finish_work_tile(self, q_stage: cutlass.Int32) -> None:
        """Signal the end of all MMAs of a work tile; and that the Q stage is empty, as `release_q` does."""
        self.commit(self.barriers.o_full)
        self.release_q(q_stage, cutlass.Boolean(True))

    @cute.jit
    def qk_if_exists(
        self,
        s_stage: cutlass.Constexpr[int],
        q_stage: cutlass.Int32,
        kv_idx: cutlass.Int32,
        tile: cutlass.Int32 | int,
        num_tiles: cutlass.Int32,
    ):
        """Q K^T of a tile of the work tile, if it has that tile; `kv_idx`: tiles before the work tile."""
        if tile < num_tiles:
            self.wait_k(kv_idx + tile)
            self.issue_qk(
                s_stage, q_stage, kv_idx + tile, [self.barriers.k_empty + stage_of(kv_idx + tile, self.config.stages)]
            )

    @cute.jit
    def pv_then_qk(
        self,
        s_stage: cutlass.Constexpr[int],
        q_stage: cutlass.Int32,
        kv_idx: cutlass.Int32,
        tile: cutlass.Int32 | int,
        num_tiles: cutlass.Int32,
        p_idx: cutlass.Int32,
        accumulate: cutlass.Constexpr[bool],
    ):
        """P V of a tile of the work tile, if it has that tile; then Q K^T of the S stage's next tile."""
        if tile < num_tiles:
            self.wait_v(kv_idx + tile)
            released = [self.barriers.v_empty + stage_of(kv_idx + tile, self.config.stages)]
            self.pv(s_stage, kv_idx + tile, p_idx, accumulate, released)
        self.qk_if_exists(s_stage, q_stage, kv_idx, tile + 2, num_tiles)


def tmem_offset_S(kernel: TiledKernel, s_stage: int | cutlass.Int32) -> int | cutlass.Int32:
    """First column of S, which P overwrites if it has none of its own."""
    return 0 if kernel.config.shared_s else s_stage * kernel.tile_n


def tmem_offset_P(kernel: TiledKernel, s_stage: int | cutlass.Int32) -> int | cutlass.Int32:
    if kernel.config.shared_s:
        return kernel.tile_n + s_stage * kernel.config.p_columns
    return tmem_offset_S(kernel, s_stage)


def tmem_offset_O(kernel: TiledKernel, s_stage: int | cutlass.Int32) -> int | cutlass.Int32:
    scores = (1 if kernel.config.shared_s else kernel.s_stages) * kernel.tile_n
    return scores + kernel.s_stages * kernel.config.p_columns + s_stage * kernel.dims_v
