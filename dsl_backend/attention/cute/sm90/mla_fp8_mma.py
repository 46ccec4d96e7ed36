# SPDX-License-Identifier: Apache-2.0
"""The MMA warpgroups of absorbed MLA for SM90 with e4m3 products.

They take turns as those of mla_mma.py do. Both load Q from global memory, quantize it, and share it in shared memory.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from dsl_backend.attention.cute.args import MlaKeyLoads, MlaTiledMmas
from dsl_backend.attention.cute.fp8_queries import mla_queries
from dsl_backend.attention.cute.fp8_smem import store_p
from dsl_backend.attention.cute.fp8_softmax import Fp8Softmax
from dsl_backend.attention.cute.mbarriers import arrive_warp
from dsl_backend.attention.cute.mla_configs import ROWS
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, reshape_acc_to_mn
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile
from dsl_backend.attention.cute.sizes import FP8_K_BLOCK, WARPGROUP
from dsl_backend.attention.cute.sm90.dense_mma import with_accumulate
from dsl_backend.attention.cute.sm90.fp8_mma import TwoLevelSums
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS
from dsl_backend.attention.cute.sm90.mla_mma import ALL_MMA, MMA_THREADS, MlaMmaConsumer
from dsl_backend.primitives.accumulators import fence_operand, words_of
from dsl_backend.primitives.ring import phase_of, stage_of


class Fp8MlaSmem(NamedTuple):
    """Shared memory of the MMA warpgroups. Elements are e4m3; `_bytes`: the same memory as bytes."""

    sQ: cute.Tensor  # (row, column, 1)
    sK: cute.Tensor  # (key, column, stage)
    sV: cute.Tensor  # (column, key, stage): transposed
    sP: cute.Tensor  # (row, key, 1), keys in the order of sV
    sStats: cute.Tensor  # (row, statistic)
    sRowSum: cute.Tensor  # (row, warpgroup, parity of the work tile)
    sQ_bytes: cute.Tensor
    sP_bytes: cute.Tensor
    sQScale: cute.Tensor  # (row)


class Fp8MlaMmaConsumer(TwoLevelSums, MlaMmaConsumer):
    """As MlaMmaConsumer. Without `value_parts`, tensor cores sum P V of all tiles of a split, with about 14 bits."""

    softmax: Fp8Softmax

    def __init__(
        self,
        kernel: Any,
        work_pipeline: Any,
        mmas: MlaTiledMmas,
        loads: MlaKeyLoads,
        barriers: Any,
        smem: Fp8MlaSmem,
        *args: Any,
    ) -> None:
        self.sQScale, self.sQ_bytes, self.sP_bytes = smem.sQScale, smem.sQ_bytes, smem.sP_bytes
        super().__init__(kernel, work_pipeline, mmas, barriers, smem, *args)
        thread = self.thread + self.group * WARPGROUP
        self.queries = mla_queries(kernel, loads, thread, MMA_THREADS)

    def partition(self, mmas: MlaTiledMmas, smem: Any, thread: cutlass.Int32) -> None:
        kernel, (sQ, sK, sV, sP) = self.kernel, smem[:4]
        thr_mma_qk, thr_mma_pv, thr_mma_pv_shared = (mma.get_slice(self.thread) for mma in mmas)
        self.k_blocks = kernel.chunk // FP8_K_BLOCK  # of a chunk
        self.tSrQ = mmas.qk.make_fragment_A(thr_mma_qk.partition_A(sQ))
        self.tSrK = mmas.qk.make_fragment_B(thr_mma_qk.partition_B(sK))
        columns = kernel.dims_v // GROUPS
        parts = self.config.value_parts
        self.acc_PV = None
        if parts:
            self.partition_values(mmas.pv, thr_mma_pv, sV, parts, self.group * parts)
            shape_PV = thr_mma_pv.partition_shape_C((ROWS, columns // parts))
            self.acc_PV = cute.make_rmem_tensor(shape_PV, cutlass.Float32)
            self.tiled_mma_pv_first = with_accumulate(mmas.pv, False)
            self.tiled_mma_pv_shared_first = with_accumulate(mmas.pv_shared, False)
        else:
            own_columns = cute.local_tile(sV, (columns, kernel.tile_n), (self.group, 0, None))
            self.tOrV = mmas.pv.make_fragment_B(thr_mma_pv.partition_B(own_columns))
        self.tOrP_shared = mmas.pv_shared.make_fragment_A(thr_mma_pv_shared.partition_A(sP[None, None, 0]))
        self.acc_S = cute.make_rmem_tensor(thr_mma_qk.partition_shape_C((ROWS, kernel.tile_n)), cutlass.Float32)
        shape_P = thr_mma_pv.partition_shape_A((ROWS, kernel.tile_n))
        self.tOrP = cute.make_rmem_tensor(shape_P, cutlass.Float8E4M3FN)
        self.acc_O = cute.make_rmem_tensor(thr_mma_pv.partition_shape_C((ROWS, columns)), cutlass.Float32)

    def make_softmax(self) -> Fp8Softmax:
        config = self.config
        return Fp8Softmax(ROWS_PER_THREAD, QUAD, self.rows.score_mod, config.p_offset, config.rescale_threshold)

    # ------------------------------------------------------------------ Q

    @cute.jit
    def begin_q(self, work: WorkTile, count: cutlass.Int32):
        """Quantize Q, by the threads of both warpgroups.

        The products of the work tile before are done: `add_row_sums` has a barrier behind them.
        """
        sQScale = self.sQScale
        self.queries.quantize(work, self.sQ_bytes[None, None, 0], sQScale)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ALL_MMA, number_of_threads=MMA_THREADS)
        for own in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.q_scale[own] = sQScale[self.row + 8 * own]

    def release_q(self) -> None:
        """Nothing: no other warp writes Q."""

    # ------------------------------------------------------------------ key tiles

    @cute.jit
    def mainloop_even(self, work: WorkTile, tiles: cutlass.Int32, releases_q: cutlass.Boolean | bool):
        """With `scores_first`, the first warpgroup also has S of its next tile ahead of PV: K has stages of its own."""
        if cutlass.const_expr(not self.config.scores_first):
            MlaMmaConsumer.mainloop_even(self, work, tiles, releases_q)
        else:
            count = work.n_block_max - work.n_block_min
            if count > 0:
                self.issue_qk(work, tiles)
                warpgroup.wait_group(0)
                self.release_k(work, 0, tiles, releases_q)
                self.online_softmax(work, 0)
                self.pv(work, 0, tiles)
                self.release_v(tiles)
            for step in cutlass.range(2, count, 2, unroll=1):
                self.mma_scores_first(work, step, tiles, releases_q)
                self.pv(work, step, tiles + step)
                self.release_v(tiles + step)
            if count > 0 and count % 2 == 0:
                self.issue_pv_shared(work, count - 1, tiles + count - 1)
                warpgroup.wait_group(0)
                self.release_v(tiles + count - 1)

    @cute.jit
    def mma_scores_first(
        self, work: WorkTile, step: cutlass.Int32, tiles: cutlass.Int32, releases_q: cutlass.Boolean | bool
    ):
        """With `value_parts`, PV ends before the softmax begins: registers have no room for both."""
        if cutlass.const_expr(not self.config.value_parts):
            MlaMmaConsumer.mma_scores_first(self, work, step, tiles, releases_q)
        else:
            self.issue_qk(work, tiles + step)
            self.begin_pv_shared(work, step - 1, tiles + step - 1)
            warpgroup.wait_group(0)
            fence_operand(self.acc_S)
            self.release_k(work, step, tiles + step, releases_q)
            self.issue_products(self.tiled_mma_pv_shared, self.tOrP_shared, tiles + step - 1)
            self.release_v(tiles + step - 1)
            self.online_softmax(work, step)

    # ------------------------------------------------------------------ QK

    @cute.jit
    def issue_qk(self, work: WorkTile, count: cutlass.Int32):
        """Issue S = Q K^T of the count-th key tile."""
        stages = cutlass.const_expr(self.config.dequant_stages)
        stage = stage_of(count, stages)
        cute.arch.mbarrier_wait(self.barriers.k_full + stage, phase_of(count, stages))
        warpgroup.fence()
        self.issue_qk_chunk(work, 0, stage, True)
        for chunk in cutlass.range(1, self.kernel.dims // self.kernel.chunk, unroll=1):
            self.issue_qk_chunk(work, chunk, stage, False)
        warpgroup.commit_group()

    def release_part(self, count: cutlass.Int32, part: int) -> None:
        """After S of a tile, of which this warpgroup alone reads K: to every CTA whose TMA writes the stage."""
        arrive_warp(self.barriers.k_empty + stage_of(count, self.config.dequant_stages), self.config.cluster)

    def release_v(self, count: cutlass.Int32) -> None:
        self.release(self.barriers.v_empty + count % self.config.stages)

    # ------------------------------------------------------------------ softmax and PV

    @cute.jit
    def online_softmax(self, work: WorkTile, step: cutlass.Int32):
        fence_operand(self.acc_S)
        acc_S_mn = self.scores(work, step)
        self.softmax.online_softmax_e4m3(acc_S_mn, words_of(self.tOrP), self.acc_scale)

    @cute.jit
    def scores(self, work: WorkTile, step: cutlass.Int32):
        acc_S = reshape_acc_to_mn(self.acc_S)
        if cutlass.const_expr(self.rows.score_mod.modifies):
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                for j in cutlass.range_constexpr(cute.size(acc_S, mode=[1])):
                    acc_S[row, j] *= self.softmax.q_scale[row]
        return MlaMmaConsumer.scores(self, work, step)

    @cute.jit
    def issue_products(self, tiled_mma: cute.TiledMma, probs: cute.Tensor, count: cutlass.Int32):
        """With `value_parts`, O is complete when this returns."""
        if cutlass.const_expr(not self.config.value_parts):
            MlaMmaConsumer.issue_products(self, tiled_mma, probs, count)
        else:
            shared = cutlass.const_expr(probs is self.tOrP_shared)
            first = self.tiled_mma_pv_shared_first if shared else self.tiled_mma_pv_first
            stage = count % self.config.stages
            # Else the compiler sets it behind the fence of the first products.
            self.acc_PV.fill(0.0)
            fence_operand(self.acc_PV)
            for part in cutlass.range_constexpr(self.config.value_parts):
                self.multiply_part(tiled_mma, first, probs, part, stage)
                self.add_part(part)

    def store_p(self) -> None:
        store_p(words_of(self.tOrP), self.sP_bytes, self.thread)

    def begin_v(self, work: WorkTile, step: cutlass.Int32, count: cutlass.Int32) -> None:
        """Wait until V of a tile is transposed; what no row sees is zero there."""
        stages = self.config.stages
        cute.arch.mbarrier_wait(self.barriers.v_full + count % stages, phase_of(count, stages))

    def row_stats(self, row: int) -> tuple[cutlass.Float32, cutlass.Float32]:
        return self.softmax.row_stats(row)
