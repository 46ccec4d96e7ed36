# SPDX-License-Identifier: Apache-2.0
"""The persistent GEMM on SM90, whose epilogue has gate and up in the registers of one thread.

A CTA has a load warp and two consumer warpgroups. Both boxes of a gated tile's weights are the N of one wgmma, and a
thread finds gate and up box_n columns apart among its accumulators.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.utils import hopper_helpers

from dsl_backend.gemm.args import GemmArgs
from dsl_backend.gemm.epilogue import ScalarArithmetic
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.sm90.configs import CONSUMERS, MMA_M, ConsumerTiles
from dsl_backend.gemm.small_m import Received
from dsl_backend.gemm.tiled import GemmBase, GemmParams
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.accumulators import fence_operand
from dsl_backend.primitives.copy import load_vector
from dsl_backend.primitives.moved import LayoutEnum, SmemAllocator
from dsl_backend.primitives.pipeline import TMA, Edge, Pipeline, warpgroups

# Named barriers: one of each consumer, then those of the ping-pong order, then one of both consumers.
CONSUMER_BARRIER, ORDER_BARRIER, BOTH_BARRIER = 1, 1 + CONSUMERS, 1 + 2 * CONSUMERS


class Gemm(GemmBase):
    """See `gemm/tiled.py`."""

    # CTAs of an SM that ptxas is told of. Told of none, it ignores that warpgroups trade registers where it takes those
    # that a thread starts with to be enough, and may then spill (its C7508: "unable to determine register count").
    min_ctas = 0

    def __init__(self, key: GemmKey[ConsumerTiles]):
        super().__init__(key, ScalarArithmetic(apart=key.apart))
        config = key.config
        self.pingpong, self.consumer_m, self.mma_tiles_m = config.pingpong, config.consumer_m, config.mma_tiles_m
        self.consumers, self.consumer_registers = config.consumers, config.consumer_registers
        self.producer_registers = config.producer_registers
        self.biased, self.threads = key.bias, (self.consumers + 1) * WARPGROUP
        # Ping-pong: whole tiles alternate between consumers. Else each has an equal part of every tile.
        self.consumers_of_tile = 1 if self.pingpong else self.consumers
        self.load_edge = Edge("x and weights", TMA, warpgroups(self.consumers_of_tile, self.cluster), self.stages)
        # CTAs of a cluster, which are more than `cluster` where some share a tile.
        self.launched_together = self.cluster
        # Columns of a wgmma, and what is stored at once.
        self.mma_n, self.epi_tile = 2 * self.box_n, (MMA_M, self.columns)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: GemmArgs, stream):
        """Launch; see `args.launch_args`."""
        self.launch(args, stream)

    def launch(self, args, stream):
        """Launch with any operands that `params` takes."""
        sOut_layout = self.sOut_layout()
        tiled_mma = self.tiled_mma(self.mma_n)
        multicast = cutlass.const_expr(self.cluster > 1)
        params = self.params(
            args.operands,
            cpasync.CopyBulkTensorTileG2SOp(),
            cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp(),
            self.sOut_tile(sOut_layout),
            self.epi_tile,
        )
        self.kernel(params, tiled_mma, *self.smem_layouts(2 * self.box_n), sOut_layout).launch(
            grid=self.grid(args.operands, args.max_ctas),
            block=(self.threads, 1, 1),
            cluster=(self.launched_together, 1, 1) if self.launched_together > 1 else None,
            stream=stream,
            min_blocks_per_mp=self.min_ctas,
            use_pdl=True,
        )

    @property
    def mma_dtypes(self) -> tuple[Any, Any]:
        """Of x and of weights, as a wgmma takes them."""
        return self.x_dtype, self.weight_dtype

    def tiled_mma(self, columns: int) -> cute.TiledMma:
        """A warpgroup's products of 64 rows with so many columns."""
        return hopper_helpers.make_trivial_tiled_mma(
            *self.mma_dtypes,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            (MMA_M, columns),
        )

    def sOut_layout(self) -> cute.ComposedLayout:
        """Of the consumers' output buffers, 64 rows each."""
        columns = self.epi_tile[1]
        if columns % 16 == 0:
            return hopper_helpers.make_smem_layout_epi(self.out_dtype, LayoutEnum.ROW_MAJOR, self.epi_tile, CONSUMERS)
        # A swizzle needs rows of a multiple of 32 bytes. Eight rows of an odd number of 16 bytes lie in different banks
        # without one.
        plain = cute.make_layout((MMA_M, columns, CONSUMERS), stride=(columns, 1, MMA_M * columns))
        return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)

    def sOut_tile(self, sOut_layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """One of these buffers."""
        return cute.slice_(sOut_layout, (None, None, 0))

    def allocate_weights(self, smem: SmemAllocator, sW_layout) -> cute.Tensor:
        """Stages of weights in shared memory."""
        return smem.allocate_tensor(self.weight_dtype, sW_layout.outer, byte_alignment=1024, swizzle=sW_layout.inner)

    @cute.kernel
    def kernel(
        self,
        params: GemmParams,
        tiled_mma: cute.TiledMma,
        sX_layout: cute.ComposedLayout,
        sW_layout: cute.Layout | cute.ComposedLayout,
        sOut_layout: cute.ComposedLayout,
    ):
        smem = SmemAllocator()
        sX = smem.allocate_tensor(self.x_dtype, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        sW = self.allocate_weights(smem, sW_layout)
        sOut = None
        if cutlass.const_expr(sOut_layout is not None):
            sOut = smem.allocate_tensor(
                self.out_dtype, sOut_layout.outer, byte_alignment=1024, swizzle=sOut_layout.inner
            )
        pipeline = self.load_edge.allocate(smem)
        sScales = self.scale_stages(smem)
        received = self.received(smem)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                pipeline.init()
                self.expect_partials(received)
            cute.arch.mbarrier_init_fence()
            for atom in (params.tma_atom_x, params.tma_atom_x_tail, params.tma_atom_w, params.tma_atom_out):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        cta_rank = self.rank()
        self.zero_fill(params, sX, cta_rank, cute.arch.thread_idx()[0], self.threads)
        if cutlass.const_expr(self.launched_together > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        dependent_launch.launch_dependents()
        dependent_launch.wait()
        group = warp // (WARPGROUP // 32)
        if group == self.consumers:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == self.consumers * (WARPGROUP // 32):
                self.load(params, sX, sW, pipeline, sScales)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.mma(params, tiled_mma, sX, sW, sOut, pipeline, group, sScales, received)
        if cutlass.const_expr(self.launched_together > 1):
            # The other CTA may still arrive at this one's barriers, or copy into its memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def scale_stages(self, smem: SmemAllocator) -> cute.Tensor | None:
        """Memory for scales of operands: here they have none."""
        return None

    def received(self, smem: SmemAllocator) -> Received | None:
        """Memory for another CTA's partial sums: here there are none."""
        return None

    def expect_partials(self, received: Received | None):
        """By one thread, before the cluster's CTAs meet: what the CTA will receive."""

    def acquire(self, pipeline: Pipeline, position, cta_rank, tx_bytes) -> cute.Pointer:
        """Wait for an empty stage; the barrier of what is loaded into it."""
        pipeline.producer_acquire(position)
        pipeline.producer_expect(position, tx_bytes)
        return pipeline.full(position)

    def load_boxes(
        self, params: GemmParams, tWgW: cute.Tensor, tWsW: cute.Tensor, n_tile, k_tile, stage, cta_rank, mbar
    ):
        """Both boxes of weights, or one of them for the whole cluster."""
        if self.cluster == 1:
            self.load_both_boxes(params, tWgW, tWsW, n_tile, k_tile, stage, mbar)
        else:
            cute.copy(
                params.tma_atom_w,
                self.box(tWgW, n_tile, k_tile, cta_rank),
                tWsW[None, cta_rank, stage],
                tma_bar_ptr=mbar,
                mcast_mask=cutlass.Int16((1 << self.cluster) - 1),
            )

    @cute.jit
    def mma(
        self,
        params: GemmParams,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sOut: cute.Tensor,
        pipeline: Pipeline,
        group: cutlass.Int32,
        sScales: cute.Tensor = None,
        received: Received | None = None,
    ):
        """A consumer warpgroup: its rows of every tile, or every other tile."""
        m_tiles, n_tiles, k_tiles = self.tile_counts(params)
        first, clusters, tiles = self.schedule(m_tiles, n_tiles)
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_tile, tCrA, tCrB, acc = self.consumer_operands(tiled_mma, sX, sW, group, thread)
        start, stride = self.consumer_tiles(group)
        for i in cutlass.range(cute.ceil_div(tiles - start, stride), unroll=1):
            tile = start + i * stride
            self.await_order(tile, group)
            m_tile, n_tile = self.place(first, tile, clusters, m_tiles, n_tiles)
            if cutlass.const_expr(params.mBias is not None):
                self.init_acc(params, acc, n_tile * self.columns, row_tile, thread)
            self.mainloop(tiled_mma, acc, tCrA, tCrB, pipeline, tile * k_tiles, k_tiles, thread)
            self.finish_mainloop(pipeline, acc, tile, tiles, k_tiles, group, thread)
            self.epilogue(params, acc, sOut, group, thread, m_tile * self.cluster + cta_rank, n_tile, row_tile)
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def init_acc(
        self,
        params: GemmParams,
        acc: cute.Tensor,
        first_column: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
        thread: cutlass.Int32,
    ):
        """Accumulators start with the bias of their columns: added in the epilogue, it would need more registers."""
        n = params.mOut.shape[1]
        for j in cutlass.range_constexpr(self.box_n // 8):
            for a in cutlass.range_constexpr(2):
                for box in cutlass.range_constexpr(2):
                    column = first_column + 8 * j + 2 * (thread % 4) + a
                    if cutlass.const_expr(not self.gated):
                        column += box * self.box_n
                    value = bias_of(params.mBias, column, box if self.gated else 0, n, self.interleaved)
                    for row in cutlass.range_constexpr(2 * self.mma_tiles_m):
                        acc[(a, row % 2, j + box * (self.box_n // 8)), row // 2, 0] = value

    def consumer_operands(self, tiled_mma: cute.TiledMma, sX: cute.Tensor, sW: cute.Tensor, group, thread):
        """(row_tile, tCrA, tCrB, acc): which rows of a tile a consumer has, its operands, and its accumulators."""
        thr_mma = tiled_mma.get_slice(thread)
        # Ping-pong: all of a tile's rows.
        row_tile = 0 if self.pingpong else group
        sX_rows = cute.local_tile(sX, (self.consumer_m, self.block_k), (row_tile, 0, None))
        tCrX = tiled_mma.make_fragment_A(thr_mma.partition_A(sX_rows))
        tCrW = tiled_mma.make_fragment_B(thr_mma.partition_B(sW))
        acc_shape = tiled_mma.partition_shape_C((self.consumer_m, 2 * self.box_n))
        return row_tile, tCrX, tCrW, cute.make_rmem_tensor(acc_shape, cutlass.Float32)

    def consumer_tiles(self, group):
        """(start, stride) of a consumer's tiles among those of its CTA."""
        return (group if self.pingpong else 0), self.consumers // self.consumers_of_tile

    @cute.jit
    def await_order(self, tile: cutlass.Int32, group: cutlass.Int32):
        """Ping-pong: wait until the other consumer has issued the products of the tile before this one."""
        if cutlass.const_expr(self.pingpong):
            # The other consumer has seen all its stages full: phases of a stage cannot be confused.
            if tile > 0:
                cute.arch.barrier(barrier_id=ORDER_BARRIER + group, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def finish_mainloop(
        self,
        pipeline: Pipeline,
        acc: cute.Tensor,
        tile: cutlass.Int32,
        tiles: cutlass.Int32,
        k_tiles: cutlass.Int32,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Let the other consumer issue its products, and wait for one's own."""
        if cutlass.const_expr(self.pingpong):
            if tile + 1 < tiles:
                cute.arch.barrier_arrive(barrier_id=ORDER_BARRIER + 1 - group, number_of_threads=2 * WARPGROUP)
        wgmma.wait_group(0)
        fence_operand(acc)
        pipeline.warpgroup_release(tile * k_tiles + k_tiles - 1, thread)

    @cute.jit
    def mainloop(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        pipeline: Pipeline,
        start: cutlass.Int32,
        k_tiles: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Issue a tile's products from position `start` on; the last ones are still in flight when this returns.

        They are added to the bias, where there is one.
        """
        tiled_mma.set(wgmma.Field.ACCUMULATE, self.biased)
        for k_tile in cutlass.range(k_tiles, unroll=1):
            position = start + k_tile
            stage = pipeline.stage(position)
            pipeline.consumer_wait(position)
            wgmma.fence()
            for k_block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(tiled_mma, acc, tCrA[None, None, k_block, stage], tCrB[None, None, k_block, stage], acc)
                tiled_mma.set(wgmma.Field.ACCUMULATE, True)
            wgmma.commit_group()
            # The k tile before this one is done.
            wgmma.wait_group(1)
            if k_tile > 0:
                pipeline.warpgroup_release(position - 1, thread)

    def epilogue_copy(self, thread):
        """(copy_atom_r2s, thr_copy_r2s, tCrOut) of 64 rows of the output, from registers to shared memory."""
        matrices = 4 if self.epi_tile[1] % 16 == 0 else 2
        copy_atom_r2s = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, matrices), self.out_dtype)
        epi_mma = self.tiled_mma(self.epi_tile[1])
        thr_copy_r2s = cute.make_tiled_copy_C(copy_atom_r2s, epi_mma).get_slice(thread)
        return (
            copy_atom_r2s,
            thr_copy_r2s,
            cute.make_rmem_tensor(epi_mma.partition_shape_C(self.epi_tile), self.out_dtype),
        )

    @cute.jit
    def epilogue(
        self,
        params: GemmParams,
        acc: cute.Tensor,
        sOut: cute.Tensor,
        group: cutlass.Int32,
        thread: cutlass.Int32,
        m_tile: cutlass.Int32,
        n_tile: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
    ):
        """Accumulators of a consumer's rows of a CTA's tile to the output, 64 rows at a time."""
        copies = self.epilogue_copy(thread)
        first_row = m_tile * self.tile_m + row_tile * self.consumer_m
        stores = self.store_partition(params, sOut)
        for mma_tile in cutlass.range_constexpr(self.mma_tiles_m):
            self.convert(params, acc, copies[2], mma_tile, thread, first_row + mma_tile * MMA_M, n_tile * self.columns)
            self.store_rows(params, copies, sOut, stores, (first_row // MMA_M + mma_tile, n_tile), group, thread)

    def store_partition(self, params: GemmParams, sOut: cute.Tensor):
        """(tOsO, tOgO) of the stores of 64 rows: [copy, consumer] and [copy, 64 rows, column of tiles]."""
        gOut = cute.local_tile(params.mOut, self.epi_tile, (None, None))
        return cpasync.tma_partition(
            params.tma_atom_out, 0, cute.make_layout(1), cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2)
        )

    @cute.jit
    def store_rows(
        self,
        params: GemmParams,
        copies: tuple,
        sOut: cute.Tensor,
        stores: tuple,
        place: tuple,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Store 64 rows from the registers of `epilogue_copy` by way of the consumer's buffer.

        Args:
            stores: what `store_partition` returns.
            place: where the rows are: 64 rows, and column of tiles. The address is computed by the thread that stores,
                where it needs no register of the others: with it before the barriers 192 columns spilled 8 bytes.
        """
        tOsO, tOgO = stores
        # The TMA store that was issued last has read this buffer.
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
        self.stage_rows(copies, sOut, group, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
        if thread < 32:
            # Stores are awaited by the thread that issued them: `elect_one` elects the same one every time.
            with cute.arch.elect_one():
                cute.copy(params.tma_atom_out, tOsO[None, group], tOgO[None, place[0], place[1]])
                cute.arch.cp_async_bulk_commit_group()

    def stage_rows(self, copies, sOut: cute.Tensor, group, thread):
        """The 64 rows that `convert` left in the registers of `epilogue_copy` to the consumer's buffer."""
        copy_atom_r2s, thr_copy_r2s, tCrOut = copies
        cute.copy(copy_atom_r2s, thr_copy_r2s.retile(tCrOut), thr_copy_r2s.partition_D(sOut[None, None, group]))

    @cute.jit
    def convert(
        self,
        params: GemmParams,
        acc: cute.Tensor,
        tCrOut: cute.Tensor,
        mma_tile: cutlass.Constexpr[int],
        thread: cutlass.Int32,
        first_row: cutlass.Int32,
        first_column: cutlass.Int32,
    ):
        """64 rows of accumulators through activation and residual to the output's type.

        wgmma's accumulators: a thread has columns 8 j + 2 (lane % 4) + a of rows 16 warp + lane / 4 + 8 b.
        """
        lane = thread % 32
        row = first_row + thread // 32 * 16 + lane // 4
        m, n = params.mOut.shape
        rResidual = cute.make_rmem_tensor(2, self.out_dtype)
        column = first_column + 2 * (lane % 4)
        offsets = [cutlass.Int64(0), cutlass.Int64(0)]
        if cutlass.const_expr(params.mResidual is not None):
            offsets = [cutlass.Int64(row + 8 * b) * params.mResidual.stride[0] + column for b in range(2)]
        for j in cutlass.range_constexpr(self.columns // 8):
            all_values = [acc[(a, b, j), mma_tile, 0] for b in range(2) for a in range(2)]
            if cutlass.const_expr(self.gated):
                ups = [acc[(a, b, j + self.box_n // 8), mma_tile, 0] for b in range(2) for a in range(2)]
                all_values = self.activate(all_values, ups)
            for b in cutlass.range_constexpr(2):
                values = all_values[2 * b : 2 * b + 2]
                if cutlass.const_expr(params.mResidual is not None):
                    rResidual.fill(0.0)
                    if row + 8 * b < m and column + 8 * j < n:
                        load_vector(params.mResidual.iterator, offsets[b] + 8 * j, rResidual)
                    values = [value + rResidual[a].to(cutlass.Float32) for a, value in enumerate(values)]
                for a in cutlass.range_constexpr(2):
                    tCrOut[(a, b, j), 0, 0] = values[a].to(self.out_dtype)
