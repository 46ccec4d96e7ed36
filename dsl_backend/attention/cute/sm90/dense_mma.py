# SPDX-License-Identifier: Apache-2.0
"""The MMA warpgroups of the SM90 kernel: S = Q K^T, softmax, O += P V, epilogue.

As in FlashAttention-3 (Shah et al., 2024), Q K^T of a key tile is issued before P V of the tile before it, so that the
tensor cores are busy during a warpgroup's softmax; and several warpgroups take turns at issuing (ping-pong).
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from dsl_backend.attention.cute.args import Outputs, TiledMmas
from dsl_backend.attention.cute.rows import QUAD, ROWS_PER_THREAD, AccumulatorRows, reshape_acc_to_mn, store_acc_row
from dsl_backend.attention.cute.scheduler.requests import WARP, Requests
from dsl_backend.attention.cute.scheduler.split_kv import FOLDED_PARTIAL
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WorkTile, WorkTilePipeline, lse_rows
from dsl_backend.attention.cute.score_mod import ScoreModArgs
from dsl_backend.attention.cute.sizes import WARPGROUP, partial_size
from dsl_backend.attention.cute.sm90.dense_barriers import Barriers
from dsl_backend.attention.cute.sm90.dense_configs import WGMMA_M
from dsl_backend.attention.cute.sm90.speculative_softmax import SpeculativeSoftmax
from dsl_backend.attention.cute.sm90.split_fold import VECTOR, FoldWorkspace, SplitFold
from dsl_backend.attention.cute.softmax import OnlineSoftmax, finalize
from dsl_backend.attention.cute.tiles import TiledKernel, row_offset
from dsl_backend.primitives.accumulators import downcast, fence_operand, fence_register, keep_alive, words_of
from dsl_backend.primitives.copy import clear_rows, store_vector
from dsl_backend.primitives.ring import phase_of, stage_of

# Named barriers; 0 is that of all threads. Warpgroup g waits for its turn at WARP_SCHEDULER_BARRIER + g.
WARP_SCHEDULER_BARRIER, MMA_BARRIER = 1, 4
# O is rescaled when a row's maximum has grown by a factor of 2^RESCALE_THRESHOLD.
RESCALE_THRESHOLD = 8.0


class MmaConsumer:
    """A thread of the MMA warpgroups: its fragments, and its loop over work tiles.

    K and V tiles are counted over all work tiles (`kv_idx`), which gives their stage and phase.
    """

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        mmas: TiledMmas,
        barriers: Barriers,
        sQ: cute.Tensor,  # (tile_m, head_dim, q_stage)
        sK: cute.Tensor,  # (tile_n, head_dim, stage)
        sV: cute.Tensor,  # (tile_n, head_dim_v, stage)
        outputs: Outputs,
        requests: Requests,
        scoring: ScoreModArgs,
        thread: cutlass.Int32,
        few_rows_workspace: cute.Tensor | None = None,
    ):
        tiled_mma_qk, tiled_mma_pv = mmas
        self.kernel, self.config, self.key = kernel, kernel.config, kernel.key
        self.work_pipeline, self.barriers, self.thread = work_pipeline, barriers, thread
        self.sQ, self.sV = sQ, sV
        self.out, self.lse, self.partials, fold_workspace = outputs
        # The first k-block of Q K^T overwrites S.
        self.tiled_mma_qk_first = with_accumulate(tiled_mma_qk, False)
        self.tiled_mma_qk = with_accumulate(tiled_mma_qk, True)
        self.tiled_mma_pv = with_accumulate(tiled_mma_pv, True)
        self.warpgroup = cute.arch.make_warp_uniform(thread // WARPGROUP)
        lane = thread % 32
        # Row and column of the thread's first accumulator element (PTX ISA, wgmma .m64nNk16, matrix D).
        self.row = self.warpgroup * WGMMA_M + thread % WARPGROUP // 32 * 16 + lane // QUAD
        self.column = lane % QUAD * 2
        self.rows = AccumulatorRows(kernel.key, kernel.tile_n, requests, scoring, self.row, self.column)
        self.partition(tiled_mma_qk, tiled_mma_pv, sQ, sK, sV)
        self.acc_scale = cute.make_rmem_tensor(ROWS_PER_THREAD, cutlass.Float32)
        self.softmax = self.make_softmax()
        self.split_fold = None
        if kernel.key.tiles_per_split:
            threads = kernel.config.groups * WARPGROUP
            few_rows = None
            if few_rows_workspace is not None:
                # The first warp has these rows.
                few_rows = FoldWorkspace(few_rows_workspace, cute.size(self.acc_O) // VECTOR, thread % WARP, WARP)
            self.split_fold = SplitFold(
                self.acc_O,
                self.softmax,
                fold_workspace,
                thread,
                threads,
                self.row,
                self.key.smem_fold_rows,
                few_rows,
            )

    def partition(
        self,
        tiled_mma_qk: cute.TiledMma,
        tiled_mma_pv: cute.TiledMma,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
    ) -> None:
        """Make the thread's operands and accumulators."""
        kernel = self.kernel
        thr_mma_qk, thr_mma_pv = tiled_mma_qk.get_slice(self.thread), tiled_mma_pv.get_slice(self.thread)
        self.tSrQ = tiled_mma_qk.make_fragment_A(thr_mma_qk.partition_A(sQ))
        self.tSrK = tiled_mma_qk.make_fragment_B(thr_mma_qk.partition_B(sK))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        self.tOrV = tiled_mma_pv.make_fragment_B(thr_mma_pv.partition_B(sVt))
        self.acc_S = cute.make_rmem_tensor(
            thr_mma_qk.partition_shape_C((kernel.tile_m, kernel.tile_n)), cutlass.Float32
        )
        self.tOrP = cute.make_rmem_tensor(thr_mma_pv.partition_shape_A((kernel.tile_m, kernel.tile_n)), kernel.dtype_v)
        self.acc_O = cute.make_rmem_tensor(
            thr_mma_pv.partition_shape_C((kernel.tile_m, kernel.dims_v)), cutlass.Float32
        )
        # The next P, while P V of the tile before still reads tOrP.
        self.tOrP_next = cute.make_rmem_tensor(self.tOrP.shape, kernel.dtype_v) if self.config.speculative_max else None

    def make_softmax(self) -> OnlineSoftmax:
        return SpeculativeSoftmax(
            ROWS_PER_THREAD,
            QUAD,
            self.rows.score_mod,
            RESCALE_THRESHOLD,
            in_order=self.key.tiles_per_split > 0,
        )

    @cute.jit
    def run(self):
        self.mma_init()
        tile_count, kv_idx = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(tile_count)
        valid = work.valid
        while valid != 0:
            q_stage = stage_of(tile_count, self.config.query_stages)
            if cutlass.const_expr(self.passes_over):
                if self.warpgroup * WGMMA_M < work.num_rows:
                    self.mma(work, q_stage, tile_count, kv_idx)
                else:
                    self.pass_over(work, q_stage, tile_count, kv_idx)
            else:
                self.mma(work, q_stage, tile_count, kv_idx)
            kv_idx += work.n_block_max - work.n_block_min
            tile_count += 1
            work = self.work_pipeline.consume(tile_count)
            valid = work.valid
        if cutlass.const_expr(self.config.ping_pong):
            # The last warp_scheduler_barrier_arrive of the others.
            if self.warpgroup == 0:
                cute.arch.barrier(barrier_id=WARP_SCHEDULER_BARRIER, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def mma_init(self):
        warpgroups = cutlass.const_expr(self.config.groups)
        if cutlass.const_expr(self.config.ping_pong):
            # Warpgroup 0 issues first.
            if self.warpgroup == warpgroups - 1:
                cute.arch.barrier_arrive(barrier_id=WARP_SCHEDULER_BARRIER, number_of_threads=2 * WARPGROUP)
        self.clear_q()

    @cute.jit
    def clear_q(self):
        """Zero-fill the rows of Q that TMA never writes, or not for every work tile."""
        q_stages = cutlass.const_expr(self.config.query_stages)
        rows_loaded = cutlass.const_expr(self.kernel.rows_loaded)
        if cutlass.const_expr(rows_loaded < self.config.tile_m):
            threads = cutlass.const_expr(self.config.groups * WARPGROUP)
            for stage in cutlass.range_constexpr(q_stages):
                clear_rows(self.sQ[None, None, stage], rows_loaded, self.config.tile_m, self.thread, threads)
            if cutlass.const_expr(self.kernel.math_clears):
                cute.arch.fence_proxy("async.shared", space="cta")
                for stage in cutlass.range_constexpr(q_stages):
                    self.release_q(stage)
            else:
                self.sync_smem_writes()

    @cute.jit
    def mma(self, work: WorkTile, q_stage: cutlass.Int32, tile_count: cutlass.Int32, kv_idx: cutlass.Int32):
        """Process one work tile, from its last key tile to its first; kv_idx is that of the last one."""
        self.softmax.reset()
        self.acc_O.fill(0.0)
        self.rows.start(work)
        self.begin_q(work, q_stage, tile_count)
        n_block = work.n_block_max - 1
        self.mma_first_n_block(work, n_block, q_stage, kv_idx)
        kv_idx += 1
        # Key tiles that the causal mask or the end of the keys cuts.
        n_block_full_max = cutlass.min(work.n_block_full_max, n_block)
        for i in cutlass.range(n_block - n_block_full_max, unroll=1):
            self.mma_n_block(work, n_block - 1 - i, q_stage, kv_idx, True)
            kv_idx += 1
        # Key tiles that need no mask.
        n_block_full_min = cutlass.min(work.n_block_full_min, n_block_full_max)
        for i in cutlass.range(n_block_full_max - n_block_full_min, unroll=1):
            self.mma_n_block(work, n_block_full_max - 1 - i, q_stage, kv_idx, False)
            kv_idx += 1
        # Key tiles that the window cuts at its left.
        if cutlass.const_expr(self.key.has_window_left):
            for i in cutlass.range(n_block_full_min - work.n_block_min, unroll=1):
                self.mma_n_block(work, n_block_full_min - 1 - i, q_stage, kv_idx, True)
                kv_idx += 1
        self.end_q(q_stage)
        self.mma_last_pv(work, kv_idx - 1)
        self.epilogue(work)

    @property
    def passes_over(self) -> bool:
        """Whether a warpgroup leaves work tiles in which it has no row to the others."""
        return self.config.groups > 1

    @cute.jit
    def pass_over(self, work: WorkTile, q_stage: cutlass.Int32, tile_count: cutlass.Int32, kv_idx: cutlass.Int32):
        """Of a work tile in which this warpgroup has no row: take part in what all do, and leave the tensor cores."""
        self.begin_q(work, q_stage, tile_count)
        self.release_q(q_stage)
        last = kv_idx + work.n_block_max - work.n_block_min - 1
        for i in cutlass.range(kv_idx, last + 1, unroll=1):
            self.warp_scheduler_barrier_sync()
            self.warp_scheduler_barrier_arrive()
            # A stage may be given back once for each time that it is filled.
            self.wait_kv(self.barriers.k_full, i)
            self.release_kv(self.barriers.k_empty, i)
            if i == kv_idx:
                self.zero_fill_v_end(work, work.n_block_max - 1, i)
            if cutlass.const_expr(self.key.has_window_left):
                if i == last:
                    self.zero_fill_v_begin(work, i)
            self.wait_kv(self.barriers.v_full, i)
            self.release_kv(self.barriers.v_empty, i)

    @cute.jit
    def begin_q(self, work: WorkTile, q_stage: cutlass.Int32, tile_count: cutlass.Int32):
        """Before the first Q K^T of a work tile: wait for Q; `tile_count` work tiles were before it."""
        cute.arch.mbarrier_wait(self.barriers.q_full + q_stage, phase_of(tile_count, self.config.query_stages))

    def end_q(self, q_stage: cutlass.Int32) -> None:
        """After the last Q K^T of a work tile."""
        self.release_q(q_stage)

    # ------------------------------------------------------------------ key tiles

    @cute.jit
    def mma_first_n_block(self, work: WorkTile, n_block: cutlass.Int32, q_stage: cutlass.Int32, kv_idx: cutlass.Int32):
        """Q K^T and softmax of a work tile's first key tile, the one at the end of its keys."""
        self.warp_scheduler_barrier_sync()
        self.issue_qk(q_stage, kv_idx)
        self.warp_scheduler_barrier_arrive()
        warpgroup.wait_group(0)
        fence_operand(self.acc_S)
        self.release_kv(self.barriers.k_empty, kv_idx)
        self.zero_fill_v_end(work, n_block, kv_idx)
        self.softmax.online_softmax(self.scores(work, n_block, True), self.acc_scale)
        downcast(self.acc_S, self.tOrP)

    @cute.jit
    def mma_n_block(
        self,
        work: WorkTile,
        n_block: cutlass.Int32,
        q_stage: cutlass.Int32,
        kv_idx: cutlass.Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """Q K^T and softmax of a key tile, overlapped with P V of the tile before."""
        self.warp_scheduler_barrier_sync()
        self.issue_qk(q_stage, kv_idx)
        self.issue_pv(kv_idx - 1)
        self.warp_scheduler_barrier_arrive()
        warpgroup.wait_group(1)
        fence_operand(self.acc_S)
        self.release_kv(self.barriers.k_empty, kv_idx)
        has_row_max, is_split_end = None, False
        if cutlass.const_expr(self.key.tiles_per_split):
            is_split_end = (n_block + 1) % self.key.tiles_per_split == 0
            if is_split_end:
                self.softmax.reduce_row_sum()
                self.split_fold.end_split()
            has_row_max = (n_block + 1) % self.key.tiles_per_split != 0
        if cutlass.const_expr(self.config.speculative_max):
            self.softmax.online_softmax_speculative(
                self.scores(work, n_block, masked), self.acc_S, self.tOrP_next, self.acc_scale, has_row_max
            )
        else:
            self.softmax.online_softmax(self.scores(work, n_block, masked), self.acc_scale)
        self.wait_pv(kv_idx - 1)
        if cutlass.const_expr(not self.key.tiles_per_split):
            rescale_rows(self.acc_O, self.acc_scale)
        if cutlass.const_expr(self.config.speculative_max):
            move_operand(self.tOrP_next, self.tOrP, self.rows.requests.rows >> 31)
        else:
            downcast(self.acc_S, self.tOrP)
        if cutlass.const_expr(self.key.tiles_per_split):
            if is_split_end:
                # After the downcast of P, which frees the registers that the fold loads into.
                self.keep_split(work, n_block + 1)
                self.acc_O.fill(0.0)
            else:
                rescale_rows(self.acc_O, self.acc_scale)

    @cute.jit
    def mma_last_pv(self, work: WorkTile, kv_idx: cutlass.Int32):
        """P V of a work tile's last key tile, the one at the beginning of its keys."""
        if cutlass.const_expr(self.key.has_window_left):
            self.zero_fill_v_begin(work, kv_idx)
        self.issue_pv(kv_idx)
        self.wait_pv(kv_idx)

    @cute.jit
    def scores(self, work: WorkTile, n_block: cutlass.Int32, masked: cutlass.Constexpr[bool]):
        """S as [row, column], after score modification and mask."""
        acc_S = reshape_acc_to_mn(self.acc_S)
        self.rows.apply_score_mod(acc_S, work, n_block)
        if cutlass.const_expr(masked):
            self.rows.apply_mask(acc_S, work, n_block)
        return acc_S

    # ------------------------------------------------------------------ MMAs

    @cute.jit
    def issue_qk(self, q_stage: cutlass.Int32, kv_idx: cutlass.Int32):
        """Issue S = Q K^T; in flight until wait_group."""
        stage = stage_of(kv_idx, self.config.stages)
        self.wait_kv(self.barriers.k_full, kv_idx)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.tSrQ, mode=[2])):
            tiled_mma = self.tiled_mma_qk if cutlass.const_expr(k > 0) else self.tiled_mma_qk_first
            tSrQ, tSrK = self.q_block(k, q_stage), self.tSrK[None, None, k, stage]
            cute.gemm(tiled_mma, self.acc_S, tSrQ, tSrK, self.acc_S)
        warpgroup.commit_group()

    def q_block(self, k: int, q_stage: cutlass.Int32) -> cute.Tensor:
        """The A operand of a k-block of Q K^T."""
        return self.tSrQ[None, None, k, q_stage]

    @cute.jit
    def issue_pv(self, kv_idx: cutlass.Int32):
        """Issue O += P V; in flight until wait_group."""
        stage = stage_of(kv_idx, self.config.stages)
        self.wait_kv(self.barriers.v_full, kv_idx)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(self.tOrP, mode=[2])):
            tOrP, tOrV = self.tOrP[None, None, k], self.tOrV[None, None, k, stage]
            cute.gemm(self.tiled_mma_pv, self.acc_O, tOrP, tOrV, self.acc_O)
        warpgroup.commit_group()

    @cute.jit
    def wait_pv(self, kv_idx: cutlass.Int32):
        warpgroup.wait_group(0)
        fence_operand(self.acc_O)
        self.release_kv(self.barriers.v_empty, kv_idx)

    @cute.jit
    def warp_scheduler_barrier_sync(self):
        """Wait for this warpgroup's turn to issue MMAs."""
        if cutlass.const_expr(self.config.ping_pong):
            cute.arch.barrier(barrier_id=WARP_SCHEDULER_BARRIER + self.warpgroup, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def warp_scheduler_barrier_arrive(self):
        """Give the next warpgroup its turn."""
        if cutlass.const_expr(self.config.ping_pong):
            following = (self.warpgroup + 1) % self.config.groups
            cute.arch.barrier_arrive(barrier_id=WARP_SCHEDULER_BARRIER + following, number_of_threads=2 * WARPGROUP)

    # ------------------------------------------------------------------ shared memory

    @cute.jit
    def wait_kv(self, mbar_full: cute.Pointer, kv_idx: cutlass.Int32):
        """Wait until the stage of a key tile is filled."""
        cute.arch.mbarrier_wait(mbar_full + stage_of(kv_idx, self.config.stages), phase_of(kv_idx, self.config.stages))

    @cute.jit
    def release_kv(self, mbar_empty: cute.Pointer, kv_idx: cutlass.Int32):
        """Arrive, once for the warp: it has read the stage."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(mbar_empty + stage_of(kv_idx, self.config.stages))

    @cute.jit
    def release_q(self, q_stage: cutlass.Int32):
        """Arrive, once for the warp: it has read the stage of Q."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.barriers.q_empty + q_stage)

    @cute.jit
    def zero_fill_v_end(self, work: WorkTile, n_block: cutlass.Int32, kv_idx: cutlass.Int32):
        """Zero-fill the rows of V beyond the last key. They may hold anything, and P = 0 times NaN is NaN."""
        num_keys = work.seqlen_k - n_block * self.kernel.tile_n
        if num_keys < self.kernel.tile_n:
            stage = stage_of(kv_idx, self.config.stages)
            self.wait_kv(self.barriers.v_full, kv_idx)
            sV, threads = self.sV[None, None, stage], self.config.groups * WARPGROUP
            clear_rows(sV, cutlass.max(num_keys, 0), self.kernel.tile_n, self.thread, threads)
            self.sync_smem_writes()

    @cute.jit
    def zero_fill_v_begin(self, work: WorkTile, kv_idx: cutlass.Int32):
        """Zero-fill the rows of V before the first query's window, whose page may belong to another request by now.

        Only the tile in which that window begins has such rows and is loaded: the first one in memory.
        """
        num_keys = self.rows.mask.keys_before_window(work.q_position, work.n_block_min)
        if num_keys > 0:
            stage = stage_of(kv_idx, self.config.stages)
            self.wait_kv(self.barriers.v_full, kv_idx)
            clear_rows(self.sV[None, None, stage], 0, num_keys, self.thread, self.config.groups * WARPGROUP)
            self.sync_smem_writes()

    @cute.jit
    def sync_smem_writes(self):
        """Make what the MMA threads wrote to shared memory visible to the MMAs of all of them."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=MMA_BARRIER, number_of_threads=self.config.groups * WARPGROUP)

    # ------------------------------------------------------------------ epilogue

    @cute.jit
    def epilogue(self, work: WorkTile):
        self.softmax.reduce_row_sum()
        if cutlass.const_expr(self.key.tiles_per_split):
            self.split_fold.end_split()
        if cutlass.const_expr(self.key.split):
            if work.partial_idx != NOT_SPLIT:
                if cutlass.const_expr(self.key.smem_fold_rows > 0):
                    if self.folds_to_partial(work):
                        self.fold_split(work, work.n_block_min)
                self.store_partial(work, work.n_block_min)
            else:
                self.store_out(work)
        else:
            self.store_out(work)

    @cute.jit
    def row_stats(self, row: cutlass.Constexpr[int]):
        """(row_max in base 2, row_sum)."""
        if cutlass.const_expr(self.key.tiles_per_split):
            row_max, row_sum = self.split_fold.row_max[row], self.split_fold.row_sum[row]
        else:
            row_max = self.softmax.row_max[row] * self.softmax.softmax_scale_log2
            row_sum = self.softmax.row_sum[row]
        return row_max, row_sum

    @cute.jit
    def keep_split(self, work: WorkTile, n_block: cutlass.Int32):
        """The split that begins at a key tile has ended, and is not the work tile's last one: store it, or fold it."""
        if cutlass.const_expr(self.key.split):
            if work.partial_idx == NOT_SPLIT or self.folds_to_partial(work):
                self.fold_split(work, n_block)
                self.split_fold.store(work.num_rows)
            else:
                self.store_partial(work, n_block)
        else:
            self.fold_split(work, n_block)
            self.split_fold.store(work.num_rows)

    @cute.jit
    def folds_to_partial(self, work: WorkTile):
        """Whether a work tile's splits are folded to one partial result."""
        folds = cutlass.Boolean(False)
        if cutlass.const_expr(self.key.smem_fold_rows > 0):
            folds = work.partial_idx >= FOLDED_PARTIAL
        return folds

    @cute.jit
    def fold_split(self, work: WorkTile, n_block: cutlass.Int32):
        """Fold the splits before into the one that has a key tile, unless that is the first."""
        tiles_per_split = cutlass.const_expr(self.key.tiles_per_split)
        if n_block // tiles_per_split != (work.n_block_max - 1) // tiles_per_split:
            self.split_fold.load(work.num_rows)

    @cute.jit
    def store_partial(self, work: WorkTile, n_block: cutlass.Int32):
        """Store O as it is, row_max and row_sum, in float32, for the combine kernel.

        Args:
            n_block: a key tile of the split.
        """
        rows, columns = self.rows.requests.rows, cutlass.const_expr(self.kernel.dims_v)
        acc_O, partial_idx = reshape_acc_to_mn(self.acc_O), work.partial_idx
        if cutlass.const_expr(self.key.tiles_per_split):
            if cutlass.const_expr(self.key.smem_fold_rows > 0):
                partial_idx %= FOLDED_PARTIAL
            tiles_per_split = cutlass.const_expr(self.key.tiles_per_split)
            partial_idx += (work.n_block_max - 1) // tiles_per_split - n_block // tiles_per_split
        partial = self.partials.iterator + cutlass.Int64(partial_idx) * partial_size(rows, columns)
        pair = cute.make_rmem_tensor(2, cutlass.Float32)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            m = self.row + 8 * row
            if m < work.num_rows:
                for j in cutlass.range_constexpr(0, cute.size(acc_O, mode=[1]), 2):
                    pair[0], pair[1] = acc_O[row, j], acc_O[row, j + 1]
                    store_vector(pair, partial, m * columns + self.column + j * 4)
                if self.column == 0:
                    stats = partial + rows * columns + m
                    row_max, row_sum = self.row_stats(row)
                    cute.make_tensor(stats, cute.make_layout(1))[0] = row_max
                    cute.make_tensor(stats + rows, cute.make_layout(1))[0] = row_sum

    @cute.jit
    def store_out(self, work: WorkTile):
        """Normalize O by row_sum, and store it and the LSE."""
        if cutlass.const_expr(self.key.tiles_per_split):
            self.fold_split(work, work.n_block_min)
        acc_O = reshape_acc_to_mn(self.acc_O)
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            row_max, row_sum = self.row_stats(row)
            out_scale, lse = finalize(row_max, row_sum, self.rows.sink(work, row), self.rows.out_factor(work))
            for j in cutlass.range_constexpr(cute.size(acc_O, mode=[1])):
                acc_O[row, j] *= out_scale
            m = self.row + 8 * row
            if cutlass.const_expr(self.key.lse):
                mLSE = self.lse
                if m < lse_rows(self.key, work) and self.column == 0:
                    mLSE[work.q_offset + m // self.key.pack_gqa, self.rows.head(work, row)] = lse
            offset = row_offset(self.out, work, self.key, m)
            columns = cutlass.const_expr(self.key.columns)
            store_acc_row(acc_O, row, self.out, offset, self.thread, m < work.num_rows, columns)


def with_accumulate(tiled_mma: cute.TiledMma, accumulate: bool) -> cute.TiledMma:
    """An MMA that adds to its accumulator, or overwrites it. Made once: a `set` inside a loop would persist."""
    made = tiled_mma.with_()
    made.set(warpgroup.Field.ACCUMULATE, accumulate)
    return made


def move_operand(source: cute.Tensor, target: cute.Tensor, zero: cutlass.Int32) -> None:
    """Copy an A operand into the registers that the MMAs so far have read.

    Args:
        zero: 0, which ptxas must not know. It sees through plain copies, finds that the operand of an MMA was defined
            between the MMAs before it, and then serialises them (C7513: CUDA 13.0).
    """
    words, moved = words_of(source), words_of(target)
    for i in range(cute.size(words)):
        # Else `source` would get the same registers: the compiler does not know that MMAs still read them.
        keep_alive(moved[i])
    for i in range(cute.size(words)):
        moved[i] = fence_register(words[i] | zero)


@cute.jit
def rescale_rows(accumulator: cute.Tensor, acc_scale: cute.Tensor):
    """Multiply a thread's rows by acc_scale [row], unless that is 1 for all rows of the warp."""
    acc = reshape_acc_to_mn(accumulator)
    if cute.arch.vote_any_sync(acc_scale[0] != 1.0 or acc_scale[1] != 1.0):
        for row in cutlass.range_constexpr(ROWS_PER_THREAD):
            for j in cutlass.range(cute.size(acc, mode=[1]), unroll_full=True):
                acc[row, j] *= acc_scale[row]
