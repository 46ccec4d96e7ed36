# SPDX-License-Identifier: Apache-2.0
"""The MMA warpgroups of the SM90 kernel with e4m3 products.

Q is quantized in registers, and O is summed in two levels.
Tensor cores add up 8-bit products with about 14 bits (DeepSeek-V3's report, 3.3.2). So they sum P V of a few key tiles
only, which float32 additions then add to O.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.cute.fp8_queries import LARGEST, LEAST_MAXIMUM
from dsl_backend.attention.cute.fp8_softmax import Fp8Softmax
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, reshape_acc_to_mn
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sm90.dense_mma import MmaConsumer, move_operand, rescale_rows, with_accumulate
from dsl_backend.primitives.accumulators import fence_operand, words_of
from dsl_backend.primitives.math import f32_to_e4m3, fma
from dsl_backend.primitives.ring import phase_of, stage_of


def e4m3_mma(
    columns: int, a_source: warpgroup.OperandSource, warpgroups: tuple[int, int, int] = (1, 1, 1)
) -> cute.TiledMma:
    """Products of 64 rows a warpgroup in e4m3; both operands have the elements of a sum one after the other."""
    e4m3, k_major = cutlass.Float8E4M3FN, OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        e4m3, e4m3, k_major, k_major, cutlass.Float32, warpgroups, (64, columns), a_source
    )


class Fp8MmaConsumer(MmaConsumer):
    """As MmaConsumer. Q is read once for a work tile: its stage is empty after the first product."""

    softmax: Fp8Softmax

    def partition(
        self,
        tiled_mma_qk: cute.TiledMma,
        tiled_mma_pv: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,  # (head_dim_v, tile_n, stage), transposed
    ) -> None:
        kernel = self.kernel
        thr_mma_qk, thr_mma_pv = tiled_mma_qk.get_slice(self.thread), tiled_mma_pv.get_slice(self.thread)
        e4m3 = cutlass.Float8E4M3FN
        self.tSrQ = cute.make_rmem_tensor(thr_mma_qk.partition_shape_A((kernel.tile_m, kernel.dims)), e4m3)
        self.tSrK = tiled_mma_qk.make_fragment_B(thr_mma_qk.partition_B(sK))
        self.tOrV = tiled_mma_pv.make_fragment_B(thr_mma_pv.partition_B(sV))
        self.acc_S = cute.make_rmem_tensor(
            thr_mma_qk.partition_shape_C((kernel.tile_m, kernel.tile_n)), cutlass.Float32
        )
        shape_P = thr_mma_pv.partition_shape_A((kernel.tile_m, kernel.tile_n))
        shape_O = thr_mma_pv.partition_shape_C((kernel.tile_m, kernel.dims_v))
        overlaps, levels = self.config.intra_warpgroup_overlap, self.config.accumulate_period
        self.tOrP = cute.make_rmem_tensor(shape_P, e4m3)
        self.tOrP_next = cute.make_rmem_tensor(shape_P, e4m3) if overlaps else None
        self.acc_O = cute.make_rmem_tensor(shape_O, cutlass.Float32)
        self.acc_O_total = cute.make_rmem_tensor(shape_O, cutlass.Float32) if overlaps and levels else None
        # P V of a tile, from 0 on: its registers can be those of S, which is P by then.
        self.acc_PV = None if overlaps else cute.make_rmem_tensor(shape_O, cutlass.Float32)
        self.tiled_mma_pv_first = with_accumulate(tiled_mma_pv, False)

    def make_softmax(self) -> Fp8Softmax:
        config = self.config
        return Fp8Softmax(ROWS_PER_THREAD, QUAD, self.rows.score_mod, config.p_offset, config.rescale_threshold)

    # ------------------------------------------------------------------ Q

    @cute.jit
    def begin_q(self, q_stage: cutlass.Int32):
        """Quantize the thread's part of Q, each row by its own maximum."""
        if cutlass.const_expr(self.acc_O_total is not None):
            self.acc_O_total.fill(0.0)
        words, sQ = words_of(self.tSrQ), self.sQ[None, None, q_stage]
        count = cutlass.const_expr(self.kernel.dims // 16)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            values = cute.make_rmem_tensor((4, count), self.kernel.dtype)
            for i in cutlass.range_constexpr(count):
                block = cute.local_tile(sQ, (1, 4), (self.row + 8 * row, self.column // 2 + 4 * i))
                cute.autovec_copy(cute.group_modes(block, 0, 2), values[None, i])
            row_max = cutlass.Float32(LEAST_MAXIMUM)
            for i in cutlass.range_constexpr(cute.size(values)):
                value = values[i].to(cutlass.Float32)
                row_max = cute.arch.fmax(row_max, cute.arch.fmax(value, -value))
            row_max = self.softmax.reduce_max(row_max)
            self.softmax.q_scale[row] = row_max * (1.0 / LARGEST)
            inverse = LARGEST / row_max
            for i in cutlass.range_constexpr(count):
                scaled = [values[j, i].to(cutlass.Float32) * inverse for j in range(4)]
                words[i // 2 * 4 + i % 2 * 2 + row] = f32_to_e4m3(*scaled)

    def end_q(self, q_stage: cutlass.Int32) -> None:
        """Nothing: the stage is released behind the first Q K^T."""

    def q_block(self, k: int, q_stage: cutlass.Int32) -> cute.Tensor:
        return self.tSrQ[None, None, k]

    # ------------------------------------------------------------------ key tiles

    @cute.jit
    def mma_first_n_block(self, work: WorkTile, n_block: cutlass.Int32, q_stage: cutlass.Int32, kv_idx: cutlass.Int32):
        self.warp_scheduler_barrier_sync()
        self.issue_qk(q_stage, kv_idx)
        self.warp_scheduler_barrier_arrive()
        warpgroup.wait_group(0)
        fence_operand(self.acc_S)
        self.release_kv(self.barriers.k_empty, kv_idx)
        # Not directly behind the loads of Q, which an arrival may overtake (see DequantTiles): the product needed them.
        self.release_q(q_stage)
        self.softmax.online_softmax_e4m3(self.scores(work, n_block, True), words_of(self.tOrP), self.acc_scale)
        if cutlass.const_expr(self.acc_PV is None):
            fence_operand(self.acc_O)

    @cute.jit
    def mma_n_block(
        self,
        work: WorkTile,
        n_block: cutlass.Int32,
        q_stage: cutlass.Int32,
        kv_idx: cutlass.Int32,
        masked: cutlass.Constexpr[bool],
    ):
        if cutlass.const_expr(self.acc_PV is not None):
            self.mma_n_block_in_turn(work, n_block, q_stage, kv_idx, masked)
        else:
            self.mma_n_block_overlapped(work, n_block, q_stage, kv_idx, masked)

    @cute.jit
    def mma_n_block_in_turn(
        self,
        work: WorkTile,
        n_block: cutlass.Int32,
        q_stage: cutlass.Int32,
        kv_idx: cutlass.Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """P V of the tile before, then Q K^T and softmax: only the other warpgroup's softmax overlaps these MMAs."""
        self.warp_scheduler_barrier_sync()
        self.add_pv(kv_idx - 1)
        self.issue_qk(q_stage, kv_idx)
        self.warp_scheduler_barrier_arrive()
        warpgroup.wait_group(0)
        fence_operand(self.acc_S)
        self.release_kv(self.barriers.k_empty, kv_idx)
        scores = self.scores(work, n_block, masked)
        self.softmax.online_softmax_e4m3(scores, words_of(self.tOrP), self.acc_scale)

    @cute.jit
    def add_pv(self, kv_idx: cutlass.Int32):
        """O = acc_scale O + P V of one key tile, whose sum the tensor cores begin at 0."""
        stage = stage_of(kv_idx, self.config.stages)
        cute.arch.mbarrier_wait(self.barriers.v_full + stage, phase_of(kv_idx, self.config.stages))
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.tOrP, mode=[2])):
            tiled_mma = self.tiled_mma_pv if cutlass.const_expr(k > 0) else self.tiled_mma_pv_first
            tOrP, tOrV = self.tOrP[None, None, k], self.tOrV[None, None, k, stage]
            cute.gemm(tiled_mma, self.acc_PV, tOrP, tOrV, self.acc_PV)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        fence_operand(self.acc_PV)
        self.release_kv(self.barriers.v_empty, kv_idx)
        acc_O, acc_PV = reshape_acc_to_mn(self.acc_O), reshape_acc_to_mn(self.acc_PV)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            for j in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                acc_O[row, j] = fma(acc_O[row, j], self.acc_scale[row], acc_PV[row, j])

    @cute.jit
    def mma_n_block_overlapped(
        self,
        work: WorkTile,
        n_block: cutlass.Int32,
        q_stage: cutlass.Int32,
        kv_idx: cutlass.Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """Q K^T and softmax, overlapped with P V of the tile before."""
        self.warp_scheduler_barrier_sync()
        self.issue_qk(q_stage, kv_idx)
        self.issue_pv(kv_idx - 1)
        self.warp_scheduler_barrier_arrive()
        warpgroup.wait_group(1)
        fence_operand(self.acc_S)
        self.release_kv(self.barriers.k_empty, kv_idx)
        scores = self.scores(work, n_block, masked)
        self.softmax.online_softmax_e4m3(scores, words_of(self.tOrP_next), self.acc_scale)
        self.wait_pv(kv_idx - 1)
        if cutlass.const_expr(self.acc_O_total is not None):
            if (n_block + 1) % self.config.accumulate_period == 0:
                self.add_to_total()
            rescale_rows(self.acc_O_total, self.acc_scale)
        rescale_rows(self.acc_O, self.acc_scale)
        # Else the compiler moves what sets O to 0 behind the fence of the next P V.
        fence_operand(self.acc_O)
        move_operand(self.tOrP_next, self.tOrP, self.rows.requests.rows >> 31)

    @cute.jit
    def mma_last_pv(self, work: WorkTile, kv_idx: cutlass.Int32):
        if cutlass.const_expr(self.acc_PV is not None):
            self.add_pv(kv_idx)
        else:
            self.issue_pv(kv_idx)
            self.wait_pv(kv_idx)
        if cutlass.const_expr(self.acc_O_total is not None):
            for i in cutlass.range_constexpr(cute.size(self.acc_O)):
                self.acc_O[i] += self.acc_O_total[i]

    @cute.jit
    def add_to_total(self):
        """Add O of the key tiles since the last call to that of the tiles before, in float32."""
        for i in cutlass.range_constexpr(cute.size(self.acc_O)):
            self.acc_O_total[i] += self.acc_O[i]
            self.acc_O[i] = 0.0

    @cute.jit
    def scores(self, work: WorkTile, n_block: cutlass.Int32, masked: cutlass.Constexpr[bool]):
        acc_S = reshape_acc_to_mn(self.acc_S)
        if cutlass.const_expr(self.rows.score_mod.modifies):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                for j in cutlass.range_constexpr(cute.size(acc_S, mode=[1])):
                    acc_S[row, j] *= self.softmax.q_scale[row]
        self.rows.apply_score_mod(acc_S, work, n_block)
        if cutlass.const_expr(masked):
            self.rows.apply_mask(acc_S, work, n_block)
        return acc_S

    # ------------------------------------------------------------------ epilogue

    def row_stats(self, row: int) -> tuple[cutlass.Float32, cutlass.Float32]:
        return self.softmax.row_stats(row)


class QuantizedQueryMmaConsumer(Fp8MmaConsumer):
    """As Fp8MmaConsumer, of queries that arrive in e4m3. Their scale is a factor of the softmax scale.

    Q stays in registers: read from shared memory, it would be a seventh more of what MMAs read there.
    """

    @cute.jit
    def begin_q(self, q_stage: cutlass.Int32):
        """Load the thread's part of Q; sQ has bytes."""
        if cutlass.const_expr(self.acc_O_total is not None):
            self.acc_O_total.fill(0.0)
        # Scores are multiplied by it: a factor that the compiler leaves out.
        self.softmax.q_scale.fill(1.0)
        words, sQ = words_of(self.tSrQ), self.sQ[None, None, q_stage]
        quad = cute.make_rmem_tensor(4, cutlass.Uint8)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            for i in cutlass.range_constexpr(self.kernel.dims // 16):
                block = cute.local_tile(sQ, (1, 4), (self.row + 8 * row, self.column // 2 + 4 * i))
                cute.autovec_copy(cute.group_modes(block, 0, 2), quad)
                words[i // 2 * 4 + i % 2 * 2 + row] = cute.recast_tensor(quad, cutlass.Int32)[0]
