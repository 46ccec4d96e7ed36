# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM on SM90; consumers, pipeline and staging of the output are those of `gemm/sm90/gemm.py`."""

from copy import copy

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup as wgmma

from dsl_backend.experts.cute.grouped import VECTOR_BYTES, GroupedParams, GroupedProduct, WorkTile, gemm_key
from dsl_backend.experts.cute.key import ProductKey
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.sm90.configs import MMA_M, GemmConfig
from dsl_backend.gemm.sm90.gemm import CONSUMER_BARRIER, Gemm
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import Pipeline


class GroupedGemm(GroupedProduct, Gemm):
    """See `experts/cute/grouped.py`."""

    # Where rows of the output go is loaded before they are computed. Products in 16 bits leave no registers for it.
    looks_up_early = False

    def __init__(self, key: ProductKey):
        assert isinstance(key.config, GemmConfig)
        Gemm.__init__(self, gemm_key(key, key.config))
        self.set_up(key)

    def launch_kernel(self, params: GroupedParams, ctas, stream):
        """Launch so many CTAs."""
        tiled_mma = self.tiled_mma(self.mma_n)
        self.kernel(params, tiled_mma, *self.smem_layouts(self.side * 2 * self.box_n), self.sOut_layout()).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        params: GroupedParams,
        tiled_mma: cute.TiledMma,
        sX_layout: cute.ComposedLayout,
        sW_layout: cute.Layout | cute.ComposedLayout,
        sOut_layout: cute.ComposedLayout,
    ):
        smem = SmemAllocator()
        sX = smem.allocate_tensor(self.x_dtype, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        sW = self.allocate_weights(smem, sW_layout)
        sOut = smem.allocate_tensor(self.out_dtype, sOut_layout.outer, byte_alignment=1024, swizzle=sOut_layout.inner)
        sMaxima = self.allocate_maxima(smem)
        pipeline = self.load_edge.allocate(smem)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                pipeline.init()
            cute.arch.mbarrier_init_fence()
            self.prefetch_descriptors(params)
        self.clear_stages(sX, self.threads)
        cute.arch.sync_threads()
        self.wait_for_rows()
        group = warp // (WARPGROUP // 32)
        if group == self.consumers:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if cutlass.const_expr(self.gathers):
                thread = cute.arch.thread_idx()[0] % WARPGROUP
                self.gather(params, sX, sW, pipeline, thread, warp == self.consumers * (WARPGROUP // 32))
            else:
                if warp == self.consumers * (WARPGROUP // 32):
                    self.load(params, sX, sW, pipeline)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            if cutlass.const_expr(self.prefetches):
                dependent_launch.wait()
            if cutlass.const_expr(self.clears):
                self.clear_output(params, cute.arch.thread_idx()[0], self.consumers * WARPGROUP)
            self.mma(params, tiled_mma, sX, sW, sOut, pipeline, group, sMaxima)

    def allocate_maxima(self, smem: SmemAllocator) -> cute.Tensor | None:
        """What consumers with parts of a group of columns tell each other of its rows, for an output in 8 bits."""
        return None

    @cute.jit
    def mma(
        self,
        params: GroupedParams,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sOut: cute.Tensor,
        pipeline: Pipeline,
        group: cutlass.Int32,
        sMaxima: cute.Tensor = None,
    ):
        """A consumer warpgroup: its rows of every tile, or every other tile."""
        schedule = self.tiles_of_cta(params)
        k_tiles = self.k_tiles(params)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_tile, tCrX, tCrW, acc = self.consumer_operands(tiled_mma, sX, sW, group, thread)
        start, stride = self.consumer_tiles(group)
        for i in cutlass.range(cute.ceil_div(schedule.count - start, stride), unroll=1):
            tile = start + i * stride
            self.await_order(tile, group)
            work = self.work_tile(params, schedule, tile)
            operands = (acc, tCrX, tCrW)
            if cutlass.const_expr(self.trims):
                rows = work.rows - row_tile * self.consumer_m
                self.trimmed_mainloop(tiled_mma, operands, pipeline, tile * k_tiles, k_tiles, rows, thread)
            else:
                self.mainloop(tiled_mma, *operands, pipeline, tile * k_tiles, k_tiles, thread)
            self.finish_mainloop(pipeline, acc, tile, schedule.count, k_tiles, group, thread)
            self.epilogue(params, acc, sOut, work, row_tile * self.consumer_m, group, thread)

    @cute.jit
    def trimmed_mainloop(
        self,
        tiled_mma: cute.TiledMma,
        operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        pipeline: Pipeline,
        start: cutlass.Int32,
        k_tiles: cutlass.Int32,
        rows: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Products of those blocks of 64 of a consumer's rows that have some of `rows`; there may be none."""
        for blocks in cutlass.range_constexpr(1, self.mma_tiles_m + 1):
            # Each way has its own: issuing products changes it.
            of_blocks = copy(tiled_mma)
            count = k_tiles
            if rows <= (blocks - 1) * MMA_M:
                count = cutlass.Int32(0)
            if cutlass.const_expr(blocks < self.mma_tiles_m):
                if rows > blocks * MMA_M:
                    count = cutlass.Int32(0)
            self.row_blocks_mainloop(of_blocks, operands, pipeline, start, count, thread, blocks)
        if rows <= 0:
            self.pass_stages(pipeline, start, cutlass.Int32(0), k_tiles, thread)

    @cute.jit
    def row_blocks_mainloop(
        self,
        tiled_mma: cute.TiledMma,
        operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        pipeline: Pipeline,
        start: cutlass.Int32,
        k_tiles: cutlass.Int32,
        thread: cutlass.Int32,
        blocks: cutlass.Constexpr[int],
    ):
        """As `Gemm.mainloop`, for the first blocks of 64 rows alone."""
        acc, tCrX, tCrW = operands
        tiled_mma.set(wgmma.Field.ACCUMULATE, False)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            position = start + k_tile
            stage = pipeline.stage(position)
            pipeline.consumer_wait(position)
            wgmma.fence()
            for k_block in cutlass.range_constexpr(cute.size(tCrX, mode=[2])):
                for block in cutlass.range_constexpr(blocks):
                    of_block = cute.append_ones(tCrX[None, block, k_block, stage], up_to_rank=2)
                    acc_block = cute.append_ones(acc[None, block, None], up_to_rank=3)
                    cute.gemm(tiled_mma, acc_block, of_block, tCrW[None, None, k_block, stage], acc_block)
                tiled_mma.set(wgmma.Field.ACCUMULATE, True)
            wgmma.commit_group()
            # The k tile before this one is done.
            wgmma.wait_group(1)
            if k_tile > 0:
                pipeline.warpgroup_release(position - 1, thread)

    @cute.jit
    def pass_stages(
        self,
        pipeline: Pipeline,
        start: cutlass.Int32,
        first: cutlass.Int32,
        k_tiles: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Release the stages of a tile from k tile `first` on, unread; the last one stays, as `mainloop` leaves it."""
        for k_tile in cutlass.range(first, k_tiles, unroll=1):
            pipeline.consumer_wait(start + k_tile)
            # No product holds the warps together: one that is behind would miss the phase that it waits for.
            group = cute.arch.thread_idx()[0] // WARPGROUP
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
            if k_tile > 0:
                pipeline.warpgroup_release(start + k_tile - 1, thread)

    @cute.jit
    def epilogue(
        self,
        params: GroupedParams,
        acc: cute.Tensor,
        sOut: cute.Tensor,
        work: WorkTile,
        first: cutlass.Int32,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Accumulators to the output, 64 rows at a time, from row `first` of the tile on, as far as there are rows.

        Of these rows, the columns of one buffer after the other.
        """
        copy_atom_r2s, thr_copy_r2s, tCrOut = self.epilogue_copy(thread)
        buffers = cutlass.const_expr(self.columns // self.epi_tile[1])
        rTargets = None
        for i in cutlass.range_constexpr(self.mma_tiles_m * buffers):
            mma_tile, turn = cutlass.const_expr(i // buffers), cutlass.const_expr(i % buffers)
            top = first + mma_tile * MMA_M
            if cutlass.const_expr(self.looks_up_early and turn == 0):
                rTargets = self.load_targets(params, work, top, thread, self.epi_tile)
            if top < work.rows:
                column = work.n_tile * self.columns + turn * self.epi_tile[1]
                self.convert(params, acc, tCrOut, mma_tile, turn, thread, work, top, column)
                # All threads have read what was staged last.
                cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
                cute.copy(copy_atom_r2s, thr_copy_r2s.retile(tCrOut), thr_copy_r2s.partition_D(sOut[None, None, group]))
                cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
                self.store_rows(params, sOut[None, None, group], work, top, column, thread, self.epi_tile, rTargets)

    @cute.jit
    def convert(
        self,
        params: GroupedParams,
        acc: cute.Tensor,
        tCrOut: cute.Tensor,
        mma_tile: cutlass.Constexpr[int],
        turn: cutlass.Constexpr[int],
        thread: cutlass.Int32,
        work: WorkTile,
        top: cutlass.Int32,
        first_column: cutlass.Int32,
    ):
        """64 rows of accumulators through scale, bias and activation to the output's type.

        wgmma's accumulators: a thread has columns 8 j + 2 (lane % 4) + a of rows 16 warp + lane / 4 + 8 b.

        Args:
            turn: which buffer's columns; 0 here, where one holds all.
        """
        lane = thread % 32
        n = params.mOut.shape[1]
        column = first_column + 2 * (lane % 4)
        scales = [cutlass.Float32(1.0), cutlass.Float32(1.0)]
        if cutlass.const_expr(self.scaled or self.weighted):
            row = top + thread // 32 * 16 + lane // 4
            places = [cutlass.min(row + 8 * b, work.rows - 1) for b in range(2)]
            scales = [params.mScale[params.mPairs[work.first_row + place]] for place in places]
        for j in cutlass.range_constexpr(self.columns // 8):
            parts = []
            for part in cutlass.range_constexpr(self.parts):
                block = j + part * (self.box_n // 8)
                values = [acc[(a, b, block), mma_tile, 0] for b in range(2) for a in range(2)]
                if cutlass.const_expr(self.scaled):
                    values = [value * scales[i // 2] for i, value in enumerate(values)]
                if cutlass.const_expr(self.has_bias):
                    mBias = params.mBias[work.expert, None]
                    biases = [bias_of(mBias, column + 8 * j + a, part, n, self.interleaved) for a in range(2)]
                    values = [value + biases[i % 2] for i, value in enumerate(values)]
                parts.append(values)
            results = self.activate(*parts) if cutlass.const_expr(self.gated) else parts[0]
            if cutlass.const_expr(self.weighted):
                results = [value * scales[i // 2] for i, value in enumerate(results)]
            for b in cutlass.range_constexpr(2):
                for a in cutlass.range_constexpr(2):
                    tCrOut[(a, b, j), 0, 0] = results[2 * b + a].to(self.out_dtype)

    @cute.jit
    def store_rows(
        self,
        params: GroupedParams,
        sOut: cute.Tensor,
        work: WorkTile,
        top: cutlass.Int32,
        first_column: cutlass.Int32,
        thread: cutlass.Int32,
        shape: cutlass.Constexpr[tuple[int, int]],
        rTargets: cute.Tensor = None,
    ):
        """Staged rows to the output, 16 bytes a thread; all are loaded before the first one is stored.

        Args:
            top: the tile's row that is staged first. shape: rows and columns that are staged.
            rTargets: of `load_targets`, if they were loaded before.
        """
        if cutlass.const_expr(rTargets is None):
            rTargets = self.load_targets(params, work, top, thread, shape)
        elements = cutlass.const_expr(VECTOR_BYTES * 8 // self.out_dtype.width)
        rOut = cute.make_rmem_tensor((elements, cute.size(rTargets)), self.out_dtype)
        row, vector = self.place_of_vector(thread, 0, shape)
        staged = cute.group_modes(cute.local_tile(sOut, (1, elements), (row, vector)), 0, 2)
        step = cutlass.const_expr(self.rows_apart(shape))
        for i in cutlass.range_constexpr(cute.size(rTargets)):
            if cutlass.const_expr(step % 8 == 0 and step > 0):
                # A multiple of a swizzle's rows: one address for all, and none of divisions.
                distance = cute.crd2idx((i * step, 0), sOut.layout)
                cute.autovec_copy(cute.make_tensor(staged.iterator + distance, staged.layout), rOut[None, i])
            else:
                row, vector = self.place_of_vector(thread, i, shape)
                place = (cutlass.min(row, shape[0] - 1), vector)
                cute.autovec_copy(cute.group_modes(cute.local_tile(sOut, (1, elements), place), 0, 2), rOut[None, i])
        whole = cutlass.const_expr(shape[0] * shape[1] == cute.size(rOut) * WARPGROUP)
        for i in cutlass.range_constexpr(cute.size(rTargets)):
            row, vector = self.place_of_vector(thread, i, shape)
            column = first_column + vector * elements
            if cutlass.const_expr(not whole):
                # No row of the tile.
                row = row if row < shape[0] else work.rows
            if top + row < work.rows and column < params.mOut.shape[1]:
                self.put_vector(params, rOut[None, i], rTargets[i], column)

    def row_vectors(self, shape: tuple[int, int]) -> int:
        """Of so many staged rows and columns."""
        return shape[1] * self.out_dtype.width // (VECTOR_BYTES * 8)

    def rows_apart(self, shape: tuple[int, int]) -> int:
        """Rows between a thread's staged vectors; 0 where these differ, because rows end between threads."""
        vectors = self.row_vectors(shape)
        return WARPGROUP // vectors if WARPGROUP % vectors == 0 else 0

    def place_of_vector(self, thread, i: int, shape: tuple[int, int]):
        """(row, vector of it) of a thread's i-th vector of so many staged rows and columns."""
        vectors = self.row_vectors(shape)
        if step := self.rows_apart(shape):
            return thread // vectors + i * step, thread % vectors
        return (thread + i * WARPGROUP) // vectors, (thread + i * WARPGROUP) % vectors

    def load_targets(self, params: GroupedParams, work: WorkTile, top, thread, shape: tuple[int, int]) -> cute.Tensor:
        """Rows of the output that a thread's staged vectors belong to; of rows that are not there, the last one's."""
        vectors = shape[0] * self.row_vectors(shape)
        rTargets = cute.make_rmem_tensor((vectors + WARPGROUP - 1) // WARPGROUP, cutlass.Int32)
        for i in range(cute.size(rTargets)):
            row, _ = self.place_of_vector(thread, i, shape)
            target = work.first_row + cutlass.min(top + row, work.rows - 1)
            rTargets[i] = target if self.gathers else self.target_row(params, target)
        return rTargets
