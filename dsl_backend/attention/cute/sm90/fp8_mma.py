# SPDX-License-Identifier: Apache-2.0
"""The MMA warpgroups of the SM90 kernel with e4m3 products.

Q is quantized in registers, and O is summed in two levels.
Tensor cores add up 8-bit products with about 14 bits (DeepSeek-V3's report, 3.3.2). So they sum P V of a few key tiles
only, which float32 additions then add to O.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.cute.fp8_queries import LARGEST, LEAST_MAXIMUM, Queries
from dsl_backend.attention.cute.fp8_softmax import Fp8Softmax
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, reshape_acc_to_mn
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sizes import WARPGROUP
from dsl_backend.attention.cute.sm90.dense_configs import WGMMA_M
from dsl_backend.attention.cute.sm90.dense_mma import MmaConsumer, move_operand, rescale_rows, with_accumulate
from dsl_backend.attention.cute.transpose import TRANSPOSE_BARRIER
from dsl_backend.primitives.accumulators import fence_operand, fence_register, words_of
from dsl_backend.primitives.math import f32_to_e4m3, fma
from dsl_backend.primitives.ring import stage_of

OWN_GROUP = TRANSPOSE_BARRIER + 1  # a named barrier of each warpgroup


def e4m3_mma(
    columns: int, a_source: warpgroup.OperandSource, warpgroups: tuple[int, int, int] = (1, 1, 1)
) -> cute.TiledMma:
    """Products of 64 rows a warpgroup in e4m3; both operands have the elements of a sum one after the other."""
    e4m3, k_major = cutlass.Float8E4M3FN, OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        e4m3, e4m3, k_major, k_major, cutlass.Float32, warpgroups, (64, columns), a_source
    )


class TwoLevelSums:
    """O = acc_scale O + P V of a key tile, whose sum the tensor cores begin at 0.

    One part of V's columns is computed after another.

    Attributes:
        acc_O: of all columns of a warpgroup. acc_PV: of a part of them.
        tOrV_parts: V, by part.
        acc_scale: [row].
    """

    acc_O: cute.Tensor
    acc_PV: cute.Tensor
    tOrV_parts: list[cute.Tensor]
    acc_scale: cute.Tensor

    def partition_values(
        self,
        tiled_mma: cute.TiledMma,
        thr_mma: cute.ThrMma,
        sV: cute.Tensor,
        parts: int,
        first: cutlass.Int32 | int = 0,
    ) -> None:
        """Set the parts of V and their accumulator.

        Args:
            sV: (column, key, stage), transposed. first: of its parts, this warpgroup's first one.
        """
        columns, tile_n = cute.size(tiled_mma.shape_mnk[1]), cute.size(sV, mode=[1])
        tiles = [cute.local_tile(sV, (columns, tile_n), (first + part, 0, None)) for part in range(parts)]
        self.tOrV_parts = [tiled_mma.make_fragment_B(thr_mma.partition_B(tile)) for tile in tiles]

    @cute.jit
    def multiply_part(
        self,
        tiled_mma: cute.TiledMma,
        tiled_mma_first: cute.TiledMma,
        probs: cute.Tensor,
        part: cutlass.Constexpr[int],
        stage: cutlass.Int32,
    ):
        """acc_PV = P V of a part of the columns."""
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(probs, mode=[2])):
            tOrP, tOrV = probs[None, None, k], self.tOrV_parts[part][None, None, k, stage]
            cute.gemm(tiled_mma if cutlass.const_expr(k > 0) else tiled_mma_first, self.acc_PV, tOrP, tOrV, self.acc_PV)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        fence_operand(self.acc_PV)

    @cute.jit
    def add_part(self, part: cutlass.Constexpr[int]):
        """Add acc_PV to its part of O."""
        acc_O, acc_PV = reshape_acc_to_mn(self.acc_O), reshape_acc_to_mn(self.acc_PV)
        columns = cutlass.const_expr(cute.size(acc_PV, mode=[1]))
        last = cutlass.const_expr(part == len(self.tOrV_parts) - 1)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            for j in cutlass.range_constexpr(columns):
                total = fma(acc_O[row, part * columns + j], self.acc_scale[row], acc_PV[row, j])
                # Before the next part's products: else the compiler keeps the sums of all parts.
                acc_O[row, part * columns + j] = total if cutlass.const_expr(last) else fence_register(total)
        if cutlass.const_expr(not last):
            fence_operand(self.acc_PV)


class Fp8MmaConsumer(TwoLevelSums, MmaConsumer):
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
        self.tSrQ = self.query_operand(tiled_mma_qk, thr_mma_qk)
        self.tSrK = tiled_mma_qk.make_fragment_B(thr_mma_qk.partition_B(sK))
        self.tOrV = tiled_mma_pv.make_fragment_B(thr_mma_pv.partition_B(sV))
        self.partition_values(tiled_mma_pv, thr_mma_pv, sV, self.config.value_parts)
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
        shape_PV = thr_mma_pv.partition_shape_C((kernel.tile_m, kernel.dims_v // self.config.value_parts))
        self.acc_PV = None if overlaps else cute.make_rmem_tensor(shape_PV, cutlass.Float32)
        self.tiled_mma_pv_first = with_accumulate(tiled_mma_pv, False)

    def query_operand(self, tiled_mma: cute.TiledMma, thr_mma: cute.ThrMma) -> cute.Tensor:
        """Q as the A operand of Q K^T."""
        shape = thr_mma.partition_shape_A((self.kernel.tile_m, self.kernel.dims))
        return cute.make_rmem_tensor(shape, cutlass.Float8E4M3FN)

    @property
    def passes_over(self) -> bool:
        """Each class has its own way to take Q."""
        return False

    def make_softmax(self) -> Fp8Softmax:
        config = self.config
        return Fp8Softmax(ROWS_PER_THREAD, QUAD, self.rows.score_mod, config.p_offset, config.rescale_threshold)

    # ------------------------------------------------------------------ Q

    @cute.jit
    def begin_q(self, work: WorkTile, q_stage: cutlass.Int32, tile_count: cutlass.Int32):
        """Quantize the thread's part of Q, each row by its own maximum."""
        MmaConsumer.begin_q(self, work, q_stage, tile_count)
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

    def end_first_qk(self, q_stage: cutlass.Int32) -> None:
        """After the first Q K^T of a work tile.

        Q is released here, and not directly behind its loads, which an arrival may overtake (see DequantTiles): the
        product needed them.
        """
        self.release_q(q_stage)

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
        self.end_first_qk(q_stage)
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
        """O = acc_scale O + P V of one key tile."""
        stage = stage_of(kv_idx, self.config.stages)
        self.wait_kv(self.barriers.v_full, kv_idx)
        for part in cutlass.range_constexpr(self.config.value_parts):
            self.multiply_part(self.tiled_mma_pv, self.tiled_mma_pv_first, self.tOrP, part, stage)
            if cutlass.const_expr(part == self.config.value_parts - 1):
                self.release_kv(self.barriers.v_empty, kv_idx)
            self.add_part(part)

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
    def begin_q(self, work: WorkTile, q_stage: cutlass.Int32, tile_count: cutlass.Int32):
        """Load the thread's part of Q; sQ has bytes."""
        MmaConsumer.begin_q(self, work, q_stage, tile_count)
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


class SharedQueryMmaConsumer(Fp8MmaConsumer):
    """As Fp8MmaConsumer, of wide heads, which leave no registers for Q: MMAs read it from shared memory.

    Queries arrive in e4m3, by TMA.

    Args:
        sQ_e4m3: (tile_m, head_dim, 1), the memory of sQ.
    """

    def __init__(self, sQ_e4m3: cute.Tensor, *args: Any) -> None:
        self.sQ_e4m3 = sQ_e4m3
        super().__init__(*args)

    def query_operand(self, tiled_mma: cute.TiledMma, thr_mma: cute.ThrMma) -> cute.Tensor:
        return tiled_mma.make_fragment_A(thr_mma.partition_A(self.sQ_e4m3))

    def q_block(self, k: int, q_stage: cutlass.Int32) -> cute.Tensor:
        return MmaConsumer.q_block(self, k, q_stage)

    @cute.jit
    def begin_q(self, work: WorkTile, q_stage: cutlass.Int32, tile_count: cutlass.Int32):
        MmaConsumer.begin_q(self, work, q_stage, tile_count)
        # As in QuantizedQueryMmaConsumer.
        self.softmax.q_scale.fill(1.0)

    def end_first_qk(self, q_stage: cutlass.Int32) -> None:
        """Nothing: all products of the work tile read Q."""

    def end_q(self, q_stage: cutlass.Int32) -> None:
        self.release_q(q_stage)


class QuantizingMmaConsumer(SharedQueryMmaConsumer):
    """As SharedQueryMmaConsumer, of queries in 16 bits: a warpgroup loads and quantizes its own rows.

    No stage of them in 16 bits would fit beside K and V.

    Args:
        sQScale: (tile_m), the scale of each row.
        mQ: as it is in global memory.
    """

    def __init__(self, sQ_e4m3: cute.Tensor, sQScale: cute.Tensor, mQ: cute.Tensor, *args: Any) -> None:
        super().__init__(sQ_e4m3, *args)
        self.sQScale = sQScale
        rows = self.warpgroup * WGMMA_M
        self.queries = Queries(self.kernel, mQ, WGMMA_M, self.thread % WARPGROUP, WARPGROUP, first_row=rows)

    def clear_q(self) -> None:
        """Nothing: rows that do not exist are stored as zeros."""

    @cute.jit
    def begin_q(self, work: WorkTile, q_stage: cutlass.Int32, tile_count: cutlass.Int32):
        sQScale = self.sQScale
        # All warps have waited for the products of the work tile before. The emulator's warps make a product together,
        # so that it does not miss this barrier; those of a chip need not.
        self.sync_warpgroup()
        self.queries.quantize(work, self.sQ[None, None, 0], sQScale)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.sync_warpgroup()
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.q_scale[row] = sQScale[self.row + 8 * row]

    def end_q(self, q_stage: cutlass.Int32) -> None:
        """Nothing: no other warp writes Q."""

    def sync_warpgroup(self) -> None:
        cute.arch.barrier(barrier_id=OWN_GROUP + self.warpgroup, number_of_threads=WARPGROUP)
