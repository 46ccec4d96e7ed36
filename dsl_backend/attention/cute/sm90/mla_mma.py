# SPDX-License-Identifier: Apache-2.0
"""The MMA warpgroups of absorbed MLA for SM90: QK, softmax, PV, epilogue.

Each of the two warpgroups has half of O's columns. They take turns with S and softmax: the first has tiles 0, 2, 4 of a
work tile, the second has tiles 1, 3, 5. A warpgroup keeps its P in registers, and stores a copy to shared memory with
the new row_max. The other one multiplies the copy with its columns of V, and continues from that row_max with the next
tile. One copy is enough: the warpgroup that writes it next is the one that has read it last.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cute.nvgpu import warpgroup

from dsl_backend.attention.cute.args import MlaTiledMmas, Outputs
from dsl_backend.attention.cute.mbarriers import arrive_warp
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, AccumulatorRows, reshape_acc_to_mn, store_acc_row
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import FOLDED_PARTIAL, num_splits_of, split_of
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, partial_size
from dsl_backend.attention.cute.sm90.dense_mma import RESCALE_THRESHOLD, rescale_rows, with_accumulate
from dsl_backend.attention.cute.sm90.mla_configs import GROUPS
from dsl_backend.attention.cute.sm90.speculative_softmax import SpeculativeSoftmax
from dsl_backend.attention.cute.sm90.split_fold import VECTOR, FoldWorkspace, SplitFold
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.attention.cute.tiles import row_offset
from dsl_backend.primitives.accumulators import downcast, fence_operand, fence_register
from dsl_backend.primitives.copy import clear_rows, store_vector

# Named barriers; 0 is that of the CTA. P_READY + g: P of warpgroup g is in shared memory.
P_READY, ALL_MMA, OWN_GROUP = 1, 3, 4
MMA_THREADS = GROUPS * WARPGROUP
ROW_MAX, ACC_SCALE = 0, 1  # statistics of a row that the warpgroups exchange


class MlaSmem(NamedTuple):
    """Shared memory of the MMA warpgroups."""

    sQ: cute.Tensor  # (row, column, 1)
    sK: cute.Tensor  # (key, column, stage)
    sV: cute.Tensor  # (key, column, stage): the first columns of sK
    sP: cute.Tensor  # (row, key)
    sStats: cute.Tensor  # (row, statistic)
    sRowSum: cute.Tensor  # (row, warpgroup, parity of the work tile)


class MlaMmaConsumer:
    """A thread's registers, and what it does with a work tile.

    Args:
        kernel: the `MlaForward`.
        barriers: `Barriers`; smem: `MlaSmem`.
        thread: of both warpgroups.
    """

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        mmas: MlaTiledMmas,
        barriers: Any,
        smem: Any,
        outputs: Outputs,
        requests: Requests,
        scoring: ScoreModArgs,
        thread: cutlass.Int32,
    ) -> None:
        self.sQ, self.sV, self.sP, self.sStats, self.sRowSum = smem.sQ, smem.sV, smem.sP, smem.sStats, smem.sRowSum
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers = work_pipeline, barriers
        self.tiled_mma_qk = with_accumulate(mmas.qk, False)
        self.tiled_mma_qk_accumulate = with_accumulate(mmas.qk, True)
        self.tiled_mma_pv = with_accumulate(mmas.pv, True)
        self.tiled_mma_pv_shared = with_accumulate(mmas.pv_shared, True)
        self.out, self.lse, self.partials, fold_workspace = outputs
        self.thread = thread % WARPGROUP
        self.group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        lane = thread % 32
        # The accumulator's elements in a thread: PTX ISA, wgmma .m64nNk16, matrix D.
        self.row = self.thread // 32 * 16 + lane // QUAD
        self.column = lane % QUAD * 2
        self.rows = AccumulatorRows(kernel.key, kernel.tile_n, requests, scoring, self.row, self.column)
        self.partition(mmas, smem, thread)
        self.acc_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        self.softmax = self.make_softmax()
        self.split_fold = None
        if kernel.key.tiles_per_split:
            few_rows = self.key.smem_fold_rows
            few_rows_workspace = self.few_rows_workspace(thread) if few_rows else None
            self.split_fold = SplitFold(
                self.acc_O,
                self.softmax,
                fold_workspace,
                thread,
                MMA_THREADS,
                self.row,
                few_rows,
                few_rows_workspace,
            )

    def partition(self, mmas: MlaTiledMmas, smem: Any, thread: cutlass.Int32) -> None:
        """Set the operands and accumulators; `thread` is of both warpgroups."""
        kernel, (sQ, sK, sV, sP) = self.kernel, smem[:4]
        thr_mma_qk, thr_mma_pv = mmas.qk.get_slice(self.thread), mmas.pv.get_slice(thread)
        thr_mma_pv_shared = mmas.pv_shared.get_slice(thread)
        self.k_blocks = kernel.chunk // 16  # of a chunk
        self.tSrQ = mmas.qk.make_fragment_A(thr_mma_qk.partition_A(sQ))
        self.tSrK = mmas.qk.make_fragment_B(thr_mma_qk.partition_B(sK))
        sVt = cute.make_tensor(sV.iterator, kernel.by_group(cute.select(sV.layout, mode=[1, 0, 2])))
        self.tOrV = mmas.pv.make_fragment_B(thr_mma_pv.partition_B(sVt))
        self.tOrP_shared = mmas.pv_shared.make_fragment_A(thr_mma_pv_shared.partition_A(sP))
        self.acc_S = cute.make_rmem_tensor(thr_mma_qk.partition_shape_C((ROWS, kernel.tile_n)), cutlass.Float32)
        self.tOrP = cute.make_rmem_tensor(thr_mma_pv.partition_shape_A((ROWS, kernel.tile_n)), kernel.dtype)
        self.acc_O = cute.make_rmem_tensor(thr_mma_pv.partition_shape_C((ROWS, kernel.dims_v)), cutlass.Float32)

    def make_softmax(self) -> Any:
        in_order = self.key.tiles_per_split > 0
        return SpeculativeSoftmax(ROWS_PER_THREAD, QUAD, self.rows.score_mod, RESCALE_THRESHOLD, in_order=in_order)

    def few_rows_workspace(self, thread: cutlass.Int32) -> FoldWorkspace:
        """Of the first warps of both warpgroups, whose rows a work tile of few rows has; `thread` is of both."""
        workspace = self.kernel.smem_fold_workspace(self.sQ)
        return FoldWorkspace(workspace, cute.size(self.acc_O) // VECTOR, self.group * 32 + thread % 32, GROUPS * 32)

    @cute.jit
    def run(self):
        if cutlass.const_expr(self.kernel.math_clears):
            # Rows of Q that TMA may not write; the load warp waits for this. It costs nothing while the first work tile
            # is being found: before the roles it took 0.7 us.
            first, thread = self.kernel.rows_loaded, self.thread + self.group * WARPGROUP
            clear_rows(self.sQ[None, None, 0], first, ROWS, thread, MMA_THREADS)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.release(self.barriers.q_empty)
        work_tiles, tiles, splits = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            self.softmax.reset()
            self.acc_O.fill(0.0)
            self.rows.start(work)
            self.begin_q(work, work_tiles)
            if cutlass.const_expr(self.key.tiles_per_split):
                splits = self.mma_splits(work, tiles, splits)
            else:
                self.mma_tiles(work, tiles, work_tiles, True)
                self.epilogue(work)
            tiles += work.n_block_max - work.n_block_min
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid

    @cute.jit
    def begin_q(self, work: WorkTile, count: cutlass.Int32):
        """Wait for Q of a work tile; `count` were processed before."""
        cute.arch.mbarrier_wait(self.barriers.q_full, count & 1)

    def release_q(self) -> None:
        """Signal, for this warp, that Q was read."""
        self.release(self.barriers.q_empty)

    @cute.jit
    def mma_splits(self, work: WorkTile, tiles: cutlass.Int32, splits: cutlass.Int32):
        """The splits of a batch-invariant layer's work tile; return `splits`, those of all work tiles so far."""
        num_splits, partial_idx = num_splits_of(self.key, work), work.partial_idx
        folds, keeps_q = partial_idx == NOT_SPLIT, cutlass.Boolean(False)
        if cutlass.const_expr(self.key.smem_fold_rows > 0):
            if partial_idx >= FOLDED_PARTIAL:
                folds, partial_idx = cutlass.Boolean(True), partial_idx - FOLDED_PARTIAL
            # The next Q may be larger, and be loaded to where the fold waits.
            keeps_q = folds and num_splits > 1 and work.num_rows <= self.key.smem_fold_rows
        work = work._replace(partial_idx=partial_idx)
        for index in cutlass.range(num_splits, unroll=1):
            split = split_of(self.key, work, index)
            is_last = index + 1 == num_splits
            releases_q = is_last and not keeps_q
            self.mma_tiles(split, tiles + work.n_block_max - split.n_block_max, splits + index, releases_q)
            # Also resets row_max and row_sum.
            self.split_fold.end_split()
            if folds:
                if index > 0:
                    self.split_fold.load(work.num_rows)
                if not is_last:
                    self.split_fold.store(work.num_rows)
            if cutlass.const_expr(self.key.smem_fold_rows > 0):
                if is_last and keeps_q:
                    cute.arch.fence_proxy("async.shared", space="cta")
                    self.release_q()
            if is_last or not folds:
                # Else the addresses of all outputs would be computed before the loop, and take the registers that a
                # fold loads into.
                self.epilogue(split._replace(q_offset=fence_register(split.q_offset)))
            self.acc_O.fill(0.0)
            # Not read again. Else they would take the registers that a fold loads into as well.
            self.acc_S.fill(0.0)
            self.tOrP.fill(0.0)
        return splits + num_splits

    @cute.jit
    def mma_tiles(self, work: WorkTile, tiles: cutlass.Int32, count: cutlass.Int32, releases_q: cutlass.Boolean | bool):
        """O, row_max and row_sum of a work tile, or of a split.

        Args:
            tiles: key tiles before it. count: work tiles, or splits, before it.
            releases_q: Q is not read after it.
        """
        if self.group == 0:
            self.mainloop_even(work, tiles, releases_q)
        else:
            self.mainloop_odd(work, tiles, releases_q)
        self.add_row_sums(count)

    @cute.jit
    def mainloop_even(self, work: WorkTile, tiles: cutlass.Int32, releases_q: cutlass.Boolean | bool):
        """The first warpgroup's work tile, with S of the even key tiles; `tiles`: key tiles before it."""
        count = work.n_block_max - work.n_block_min
        for step in cutlass.range(0, count, 2, unroll=1):
            self.issue_qk(work, tiles + step)
            warpgroup.wait_group(0)
            self.release_k(work, step, tiles + step, releases_q)
            self.online_softmax(work, step)
            self.pv(work, step, tiles + step)
            self.release_v(tiles + step)
            if step + 1 < count:
                self.issue_pv_shared(work, step + 1, tiles + step + 1)
                warpgroup.wait_group(0)
                self.release_v(tiles + step + 1)

    @cute.jit
    def mainloop_odd(self, work: WorkTile, tiles: cutlass.Int32, releases_q: cutlass.Boolean | bool):
        """The second warpgroup's work tile, with S of the odd key tiles."""
        count = work.n_block_max - work.n_block_min
        if count == 1 and releases_q:
            self.release_q()
        for pair in cutlass.range(count // 2, unroll=1):
            step = 2 * pair
            if cutlass.const_expr(self.config.scores_first):
                self.mma_scores_first(work, step + 1, tiles, releases_q)
            else:
                self.issue_pv_shared(work, step, tiles + step)
                warpgroup.wait_group(0)
                self.release_v(tiles + step)
                self.issue_qk(work, tiles + step + 1)
                warpgroup.wait_group(0)
                self.release_k(work, step + 1, tiles + step + 1, releases_q)
                self.online_softmax(work, step + 1)
            self.pv(work, step + 1, tiles + step + 1)
            self.release_v(tiles + step + 1)
        if count % 2 == 1:
            self.issue_pv_shared(work, count - 1, tiles + count - 1)
            warpgroup.wait_group(0)
            self.release_v(tiles + count - 1)

    @cute.jit
    def mma_scores_first(
        self, work: WorkTile, step: cutlass.Int32, tiles: cutlass.Int32, releases_q: cutlass.Boolean | bool
    ):
        """S and P of this warpgroup's tile `step`, with PV of the other one's tile before it during the softmax."""
        self.issue_qk(work, tiles + step)
        self.issue_pv_shared(work, step - 1, tiles + step - 1)
        warpgroup.wait_group(1)
        self.release_k(work, step, tiles + step, releases_q)
        self.online_softmax(work, step)
        warpgroup.wait_group(0)
        self.release_v(tiles + step - 1)

    # ------------------------------------------------------------------ QK

    @cute.jit
    def issue_qk(self, work: WorkTile, count: cutlass.Int32):
        """Issue S = Q K^T of the count-th key tile, part by part as they arrive."""
        stage, phase = count % self.config.stages, (count // self.config.stages) & 1
        rope = cutlass.const_expr(self.kernel.parts[0])
        for part in cutlass.range_constexpr(PARTS):
            cute.arch.mbarrier_wait(self.barriers.k_full + stage * PARTS + part, phase)
            warpgroup.fence()
            if cutlass.const_expr(part == 0):
                for chunk in cutlass.range_constexpr(rope.start, rope.stop):
                    self.issue_qk_chunk(work, chunk, stage, chunk == rope.start)
            else:
                # A loop: ptxas would keep the addresses of all WGMMAs in registers.
                chunks = cutlass.const_expr(self.kernel.parts[part])
                for chunk in cutlass.range(chunks.start, chunks.stop, unroll=1):
                    self.issue_qk_chunk(work, chunk, stage, False)
        warpgroup.commit_group()

    @cute.jit
    def issue_qk_chunk(
        self, work: WorkTile, chunk: cutlass.Int32, stage: cutlass.Int32, first: cutlass.Constexpr[bool]
    ):
        """Add a chunk of Q K^T to S; the first one overwrites S."""
        for k_block in cutlass.range_constexpr(self.k_blocks):
            overwrite = cutlass.const_expr(first and k_block == 0)
            tiled_mma_qk = self.tiled_mma_qk if overwrite else self.tiled_mma_qk_accumulate
            tSrQ = self.q_operand(work, k_block, chunk)
            tSrK = self.tSrK[None, None, self.k_of(k_block, chunk), stage]
            cute.gemm(tiled_mma_qk, self.acc_S, tSrQ, tSrK, self.acc_S)

    def k_of(self, k_block: int, chunk: cutlass.Int32) -> Any:
        """The coordinate of a k-block in the operands of Q K^T."""
        return (k_block, chunk) if self.k_blocks > 1 else chunk

    @cute.jit
    def q_operand(self, work: WorkTile, k_block: cutlass.Constexpr[int], chunk: cutlass.Int32):
        """A k-block of a chunk of Q, (row, 1). Chunks of few rows lie close together."""
        tSrQ = self.tSrQ[None, None, self.k_of(k_block, chunk), 0]
        if cutlass.const_expr(self.key.smem_fold_rows > 0):
            kernel, (k_blocks, chunks) = self.kernel, self.tSrQ.shape[2]
            # In chunks of few rows, of which one of all rows is a multiple.
            wide = cutlass.const_expr(ROWS * kernel.chunk // kernel.few_rows_chunk)
            stride, wide_stride = self.tSrQ.stride[2]
            layout = cute.make_layout((1, 1, (k_blocks, chunks * wide)), stride=(0, 0, (stride, wide_stride // wide)))
            few_rows_chunk = chunk if work.num_rows <= self.key.smem_fold_rows else chunk * wide
            tSrQ = cute.make_tensor(self.tSrQ.iterator, layout)[None, None, (k_block, few_rows_chunk)]
        return tSrQ

    @cute.jit
    def release_k(self, work: WorkTile, step: cutlass.Int32, count: cutlass.Int32, releases_q: cutlass.Boolean | bool):
        """After S of a tile: signal that its rope part was read, and after the warpgroup's last S, that Q was read."""
        self.release_part(count, 0)
        if step + 2 >= work.n_block_max - work.n_block_min and releases_q:
            self.release_q()

    @cute.jit
    def release_v(self, count: cutlass.Int32):
        """After PV of a tile: signal that the warpgroup's half of the latent part was read."""
        self.release_part(count, 1 + self.group)

    @cute.jit
    def release_part(self, count: cutlass.Int32, part: cutlass.Int32 | int):
        """Signal, for this warp, that a part of the count-th tile was read: to every CTA whose TMA writes the stage."""
        mbar_empty = self.barriers.k_empty + count % self.config.stages * PARTS + part
        arrive_warp(mbar_empty, 1 if self.key.kv.fp8 else self.config.cluster)

    def release(self, mbar_empty: cute.Pointer) -> None:
        """Arrive once for this warp."""
        arrive_warp(mbar_empty)

    # ------------------------------------------------------------------ softmax and PV

    @cute.jit
    def online_softmax(self, work: WorkTile, step: cutlass.Int32):
        """Turn S into P, in registers."""
        fence_operand(self.acc_S)
        acc_S_mn = self.scores(work, step)
        if cutlass.const_expr(self.config.speculative_max):
            self.softmax.online_softmax_speculative(acc_S_mn, self.acc_S, self.tOrP, self.acc_scale, step > 0)
        else:
            self.softmax.online_softmax(acc_S_mn, self.acc_scale)
            downcast(self.acc_S, self.tOrP)

    @cute.jit
    def scores(self, work: WorkTile, step: cutlass.Int32):
        """S as [row, column], after score modification and mask."""
        n_block = work.n_block_max - 1 - step
        acc_S_mn = reshape_acc_to_mn(self.acc_S)
        self.rows.apply_score_mod(acc_S_mn, work, n_block)
        if n_block >= work.n_block_full_max or n_block < work.n_block_full_min:
            self.rows.apply_mask(acc_S_mn, work, n_block)
        return acc_S_mn

    @cute.jit
    def pv(self, work: WorkTile, step: cutlass.Int32, count: cutlass.Int32):
        """Give P and row_max to the other warpgroup, and add P V to this one's columns of O.

        A warp may overwrite its rows of sP: only its own WGMMAs read them, and it has waited for these.
        """
        self.store_p()
        sStats = self.sStats
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                sStats[self.row + 8 * row, ROW_MAX] = self.softmax.row_max[row]
                sStats[self.row + 8 * row, ACC_SCALE] = self.acc_scale[row]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=P_READY + self.group, number_of_threads=MMA_THREADS)
        self.begin_v(work, step, count)
        self.issue_products(self.tiled_mma_pv, self.tOrP, count)
        warpgroup.wait_group(0)

    def store_p(self) -> None:
        """Store P to shared memory."""
        tiled_copy = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(num_matrices=4), self.kernel.dtype), self.tiled_mma_qk
        )
        thr_copy = tiled_copy.get_slice(self.thread)
        probs = cute.make_tensor(self.tOrP.iterator, self.acc_S.layout)
        cute.copy(tiled_copy, tiled_copy.retile(probs), thr_copy.partition_D(self.sP))

    @cute.jit
    def issue_pv_shared(self, work: WorkTile, step: cutlass.Int32, count: cutlass.Int32):
        """Issue O += P V with P of the other warpgroup, from shared memory."""
        self.begin_pv_shared(work, step, count)
        self.issue_products(self.tiled_mma_pv_shared, self.tOrP_shared, count)

    @cute.jit
    def begin_pv_shared(self, work: WorkTile, step: cutlass.Int32, count: cutlass.Int32):
        """Before P V of the other warpgroup's P: wait for it, and take its row_max."""
        cute.arch.barrier(barrier_id=P_READY + 1 - self.group, number_of_threads=MMA_THREADS)
        self.begin_v(work, step, count)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.row_max[row] = self.sStats[self.row + 8 * row, ROW_MAX]
            self.acc_scale[row] = self.sStats[self.row + 8 * row, ACC_SCALE]
            self.softmax.row_sum[row] *= self.acc_scale[row]

    @cute.jit
    def issue_products(self, tiled_mma: cute.TiledMma, probs: cute.Tensor, count: cutlass.Int32):
        """Issue O = acc_scale O + P V of the count-th tile."""
        rescale_rows(self.acc_O, self.acc_scale)
        stage = count % self.config.stages
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(probs, mode=[2])):
            cute.gemm(tiled_mma, self.acc_O, probs[None, None, k], self.tOrV[None, None, k, stage], self.acc_O)
        warpgroup.commit_group()

    @cute.jit
    def begin_v(self, work: WorkTile, step: cutlass.Int32, count: cutlass.Int32):
        """Before PV of a tile: zero this warpgroup's half of V beyond the last key, and before the first row's window.

        Both may hold anything, and P = 0 does not remove a NaN. QK of the tile is done, so that nothing reads these
        rows as K any more.
        """
        tile_n = cutlass.const_expr(self.kernel.tile_n)
        first_key = (work.n_block_max - 1 - step) * tile_n
        keys = work.seqlen_k - first_key
        if keys < tile_n:
            self.zero_v(count, cutlass.max(keys, 0), tile_n)
        if cutlass.const_expr(self.key.has_window_left):
            before = cutlass.min(work.q_position - self.rows.requests.window_size_left - first_key, tile_n)
            if before > 0:
                self.zero_v(count, 0, before)

    @cute.jit
    def zero_v(self, count: cutlass.Int32, first: cutlass.Int32 | int, end: cutlass.Int32 | int):
        """Zero rows of this warpgroup's half of V of the count-th tile."""
        half = (self.kernel.tile_n, self.kernel.dims_v // GROUPS)
        sV = cute.local_tile(self.sV[None, None, count % self.config.stages], half, (0, self.group))
        clear_rows(sV, first, end, self.thread, WARPGROUP)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=OWN_GROUP + self.group, number_of_threads=WARPGROUP)

    # ------------------------------------------------------------------ epilogue

    @cute.jit
    def add_row_sums(self, count: cutlass.Int32):
        """Add the other warpgroup's row_sum, which is of its key tiles.

        Work tiles, or splits, alternate between two buffers in shared memory: that of the one before may still be read.
        """
        self.softmax.reduce_row_sum()
        parity, sRowSum = count & 1, self.sRowSum
        if self.column == 0:
            for row in cutlass.range_constexpr(ROWS_PER_THREAD):
                sRowSum[self.row + 8 * row, self.group, parity] = self.softmax.row_sum[row]
        cute.arch.barrier(barrier_id=ALL_MMA, number_of_threads=MMA_THREADS)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            self.softmax.row_sum[row] += sRowSum[self.row + 8 * row, 1 - self.group, parity]

    @cute.jit
    def epilogue(self, work: WorkTile):
        """Write O of a work tile."""
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                self.store_partial(work)
            else:
                self.store_out(work)
        else:
            self.store_out(work)

    @cute.jit
    def store_partial(self, work: WorkTile):
        """Store O as it is, row_max and row_sum, in float32, for the combine kernel."""
        rows, columns = self.rows.requests.rows, cutlass.const_expr(self.kernel.dims_v)
        acc_O = reshape_acc_to_mn(self.acc_O)
        partial = self.partials.iterator + cutlass.Int64(work.partial_idx) * partial_size(rows, columns)
        pair = cute.make_rmem_tensor(2, cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            m = self.row + 8 * row
            if m < work.num_rows:
                first = m * columns + self.group * (columns // GROUPS) + self.column
                for j in cutlass.range(0, cute.size(acc_O, mode=[1]), 2, unroll_full=True):
                    pair[0], pair[1] = acc_O[row, j], acc_O[row, j + 1]
                    store_vector(pair, partial, first + j * 4)
                if self.column == 0 and self.group == 0:
                    stats = partial + rows * columns + m
                    row_max, row_sum = self.row_stats(row)
                    cute.make_tensor(stats, cute.make_layout(1))[0] = row_max
                    cute.make_tensor(stats + rows, cute.make_layout(1))[0] = row_sum

    def row_stats(self, row: int) -> tuple[cutlass.Float32, cutlass.Float32]:
        """(row_max in base 2, row_sum)."""
        if self.split_fold is not None:
            return self.split_fold.row_max[row], self.split_fold.row_sum[row]
        return self.softmax.row_max[row] * self.softmax.softmax_scale_log2, self.softmax.row_sum[row]

    @cute.jit
    def store_out(self, work: WorkTile):
        """Store O divided by row_sum, rounded, and the LSE; from registers, as Q's stage has the next work tile."""
        columns = cutlass.const_expr(self.kernel.dims_v)
        acc_O = reshape_acc_to_mn(self.acc_O)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max, row_sum = self.row_stats(row)
            out_scale, lse = finalize(row_max, row_sum, self.rows.sink(work, row), self.rows.out_factor(work))
            for j in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                acc_O[row, j] *= out_scale
            m, mLSE = self.row + 8 * row, self.lse
            offset = row_offset(self.out, work, self.key, m) + self.group * (columns // GROUPS)
            store_acc_row(acc_O, row, self.out, offset, self.thread, m < work.num_rows, columns)
            if cutlass.const_expr(self.key.lse):
                if m < work.num_rows and self.column == 0 and self.group == 0:
                    mLSE[work.q_offset + m // self.key.pack_gqa, self.rows.head(work, row)] = lse
