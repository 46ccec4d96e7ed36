# SPDX-License-Identifier: Apache-2.0
"""Linear layers of many rows for SM90: a persistent GEMM whose epilogue has gate and up in the same registers.

A block has a producer warp, which copies tiles by TMA, and two consumer warp groups, which multiply. A gated tile's two
boxes of weights are one wgmma's, and a thread finds gate and up box_n columns apart among its accumulators.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.cute.nvgpu import warpgroup as wgmma
from cutlass.utils import LayoutEnum, hopper_helpers

from dsl_backend.gemm.epilogue import Singles
from dsl_backend.gemm.key import LinearKey
from dsl_backend.gemm.sizes import BLOCK_K, WARPGROUP
from dsl_backend.gemm.tiled import GemmArgs, TiledGemm
from dsl_backend.gemm.views import bias_of
from dsl_backend.linear.configs import CONSUMER_REGISTERS, GROUPS, MMA_M, PRODUCER_REGISTERS, GemmConfig
from dsl_backend.primitives.accumulators import settle
from dsl_backend.primitives.copy import load_vector
from dsl_backend.primitives.ring import Ring
from dsl_backend.primitives.schedule import raster

# Named barriers: the consumers' own, then those that give a consumer its turn.
OWN, TURN = 1, 1 + GROUPS


class Gemm(TiledGemm):
    """See `gemm/tiled.py`."""

    def __init__(self, key: LinearKey[GemmConfig]):
        super().__init__(key, Singles())
        config = key.config
        self.pingpong, self.rows, self.repeats = config.pingpong, config.rows, config.repeats
        self.biased, self.threads = key.bias, (GROUPS + 1) * WARPGROUP
        # Whole tiles in turn, or halves of every tile.
        self.consumers = 1 if self.pingpong else GROUPS

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        out: cute.Tensor,
        blocks: cutlass.Int32,
        stream,
    ):
        """At most `blocks` blocks, a multiple of the cluster's."""
        width = 2 * self.box_n
        out_staged = self.out_staged()
        product = hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, cutlass.Float32, (1, 1, 1), (MMA_M, width)
        )
        shared = cutlass.const_expr(self.cluster > 1)
        args = self.arguments(
            x,
            weight,
            bias,
            residual,
            out,
            cpasync.CopyBulkTensorTileG2SOp(),
            cpasync.CopyBulkTensorTileG2SMulticastOp() if shared else cpasync.CopyBulkTensorTileG2SOp(),
            out_staged,
            (MMA_M, self.columns),
        )
        self.kernel(args, product, *self.layouts(width), out_staged).launch(
            grid=self.grid(x, out, blocks),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if shared else None,
            stream=stream,
            use_pdl=True,
        )

    def out_staged(self) -> cute.ComposedLayout:
        """Of the consumers' output buffers, 64 rows each."""
        if self.columns % 16 == 0:
            return hopper_helpers.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, (MMA_M, self.columns), GROUPS)
        # A swizzle wants rows of 32 bytes. Eight rows of an odd number of 16 bytes lie in all banks without one.
        shape = (MMA_M, self.columns, GROUPS)
        plain = cute.make_layout(shape, stride=(self.columns, 1, MMA_M * self.columns))
        return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)

    @cute.kernel
    def kernel(
        self,
        args: GemmArgs,
        product: cute.TiledMma,
        x_staged: cute.ComposedLayout,
        weight_staged: cute.ComposedLayout,
        out_staged: cute.ComposedLayout,
    ):
        shared = cutlass.utils.SmemAllocator()
        sX = shared.allocate_tensor(self.dtype, x_staged.outer, byte_alignment=1024, swizzle=x_staged.inner)
        sW = shared.allocate_tensor(self.dtype, weight_staged.outer, byte_alignment=1024, swizzle=weight_staged.inner)
        sOut = shared.allocate_tensor(self.dtype, out_staged.outer, byte_alignment=1024, swizzle=out_staged.inner)
        full = shared.allocate_array(cutlass.Int64, self.stages)
        empty = shared.allocate_array(cutlass.Int64, self.stages)
        ring = Ring(full, empty, self.stages, self.consumers * self.cluster)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                ring.open()
            cute.arch.mbarrier_init_fence()
            for atom in (args.x_load, args.piece_load, args.weight_load, args.out_store):
                cpasync.prefetch_descriptor(atom)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        self.clear(args, sX, rank, cute.arch.thread_idx()[0], self.threads)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        group = warp // (WARPGROUP // 32)
        if group == GROUPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == GROUPS * (WARPGROUP // 32):
                self.load(args, sX, sW, ring)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.multiply(args, product, sX, sW, sOut, ring, group)
        if cutlass.const_expr(self.cluster > 1):
            # The other block may still arrive here, or copy.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def acquire(self, ring: Ring, position, rank, arriving):
        return ring.acquire(position, arriving)

    def load_boxes(self, args: GemmArgs, gWIn: cute.Tensor, sWIn: cute.Tensor, column, block, stage, rank, arrived):
        """Both boxes of weights, or one of them for the whole cluster."""
        if self.cluster == 1:
            self.load_both(args, gWIn, sWIn, column, block, stage, arrived)
        else:
            cute.copy(
                args.weight_load,
                self.box(gWIn, column, block, rank),
                sWIn[None, rank, stage],
                tma_bar_ptr=arrived,
                mcast_mask=cutlass.Int16((1 << self.cluster) - 1),
            )

    @cute.jit
    def multiply(
        self,
        args: GemmArgs,
        product: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sOut: cute.Tensor,
        ring: Ring,
        group: cutlass.Int32,
    ):
        """A consumer warp group: all tiles' rows that are its, or every other tile."""
        height, width, blocks = self.extent(args)
        first, clusters, turns = self.turns(height, width)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        mine = product.get_slice(thread)
        # Ping-pong: all of a tile's rows.
        part = 0 if cutlass.const_expr(self.pingpong) else group
        fX = product.make_fragment_A(mine.partition_A(cute.local_tile(sX, (self.rows, BLOCK_K), (part, 0, None))))
        fW = product.make_fragment_B(mine.partition_B(sW))
        sums = cute.make_rmem_tensor(product.partition_shape_C((self.rows, 2 * self.box_n)), cutlass.Float32)
        stride = cutlass.const_expr(GROUPS // self.consumers)
        start = group if cutlass.const_expr(self.pingpong) else 0
        for i in cutlass.range(cute.ceil_div(turns - start, stride), unroll=1):
            turn = start + i * stride
            if cutlass.const_expr(self.pingpong):
                # The other consumer has seen all its stages full: phases of a stage cannot be confused.
                if turn > 0:
                    cute.arch.barrier(barrier_id=TURN + group, number_of_threads=2 * WARPGROUP)
            row, column = raster(first + turn * clusters, height, width, self.band)
            if cutlass.const_expr(args.bias is not None):
                self.begin(args, sums, column * self.columns, thread)
            self.products(product, sums, fX, fW, ring, turn * blocks, blocks, thread)
            if cutlass.const_expr(self.pingpong):
                if turn + 1 < turns:
                    cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=2 * WARPGROUP)
            wgmma.wait_group(0)
            settle(sums)
            ring.release(turn * blocks + blocks - 1, thread, self.cluster)
            top = (row * self.cluster + rank) * self.tile_m + part * self.rows
            self.finish(args, sums, sOut, group, thread, top, column)
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def begin(self, args: GemmArgs, sums: cute.Tensor, left: cutlass.Int32, thread: cutlass.Int32):
        """Sums begin with the bias of their columns: added behind them, it would need registers of its own."""
        n = args.out.shape[1]
        for j in cutlass.range_constexpr(self.box_n // 8):
            for a in cutlass.range_constexpr(2):
                for box in cutlass.range_constexpr(2):
                    column = left + 8 * j + 2 * (thread % 4) + a
                    if cutlass.const_expr(not self.gated):
                        column += box * self.box_n
                    value = bias_of(args.bias, column, box if self.gated else 0, n, self.interleaved)
                    for row in cutlass.range_constexpr(2 * self.repeats):
                        sums[(a, row % 2, j + box * (self.box_n // 8)), row // 2, 0] = value

    @cute.jit
    def products(
        self,
        product: cute.TiledMma,
        sums: cute.Tensor,
        fX: cute.Tensor,
        fW: cute.Tensor,
        ring: Ring,
        start: cutlass.Int32,
        blocks: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Issue a tile's products from position `start`; the last ones are still under way when this returns.

        They are added to the bias, where there is one.
        """
        product.set(wgmma.Field.ACCUMULATE, self.biased)
        for block in cutlass.range(blocks, unroll=1):
            position = start + block
            stage = ring.stage(position)
            ring.wait(position)
            wgmma.fence()
            for i in cutlass.range_constexpr(cute.size(fX, mode=[2])):
                cute.gemm(product, sums, fX[None, None, i, stage], fW[None, None, i, stage], sums)
                product.set(wgmma.Field.ACCUMULATE, True)
            wgmma.commit_group()
            # The block before this one is done.
            wgmma.wait_group(1)
            if block > 0:
                ring.release(position - 1, thread, self.cluster)

    @cute.jit
    def finish(
        self,
        args: GemmArgs,
        sums: cute.Tensor,
        sOut: cute.Tensor,
        group: cutlass.Int32,
        thread: cutlass.Int32,
        top: cutlass.Int32,
        column: cutlass.Int32,
    ):
        """Sums to the output, 64 rows at a time, from row `top` on."""
        matrices = cutlass.const_expr(4 if self.columns % 16 == 0 else 2)
        store = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, matrices), self.dtype)
        shape = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            (MMA_M, self.columns),
        )
        to_shared = cute.make_tiled_copy_C(store, shape).get_slice(thread)
        gOut = cute.local_tile(args.out, (MMA_M, self.columns), (None, None))
        sOutOut, gOutOut = cpasync.tma_partition(
            args.out_store, 0, cute.make_layout(1), cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        rounded = cute.make_rmem_tensor(shape.partition_shape_C((MMA_M, self.columns)), self.dtype)
        for repeat in cutlass.range_constexpr(self.repeats):
            self.results(args, sums, rounded, repeat, thread, top + repeat * MMA_M, column * self.columns)
            # The copy out of this buffer that was issued last has read it.
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
            cute.copy(store, to_shared.retile(rounded), to_shared.partition_D(sOut[None, None, group]))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=OWN + group, number_of_threads=WARPGROUP)
            if thread < 32:
                # Copies are waited for by the thread that made them, which is the same one every time.
                with cute.arch.elect_one():
                    cute.copy(args.out_store, sOutOut[None, group], gOutOut[None, top // MMA_M + repeat, column])
                    cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def results(
        self,
        args: GemmArgs,
        sums: cute.Tensor,
        rounded: cute.Tensor,
        repeat: cutlass.Constexpr[int],
        thread: cutlass.Int32,
        top: cutlass.Int32,
        left: cutlass.Int32,
    ):
        """64 rows of sums through activation and residual.

        wgmma's accumulators: a thread has columns 8 j + 2 (lane % 4) + a of rows 16 warp + lane / 4 + 8 b.
        """
        lane = thread % 32
        row = top + thread // 32 * 16 + lane // 4
        m, n = args.out.shape
        pair = cute.make_rmem_tensor(2, self.dtype)
        first = left + 2 * (lane % 4)
        starts = [cutlass.Int64(0), cutlass.Int64(0)]
        if cutlass.const_expr(args.residual is not None):
            starts = [cutlass.Int64(row + 8 * b) * args.residual.stride[0] + first for b in range(2)]
        for j in cutlass.range_constexpr(self.columns // 8):
            all_values = [sums[(a, b, j), repeat, 0] for b in range(2) for a in range(2)]
            if cutlass.const_expr(self.gated):
                ups = [sums[(a, b, j + self.box_n // 8), repeat, 0] for b in range(2) for a in range(2)]
                all_values = self.activate(all_values, ups)
            for b in cutlass.range_constexpr(2):
                values = all_values[2 * b : 2 * b + 2]
                if cutlass.const_expr(args.residual is not None):
                    pair.fill(0.0)
                    if row + 8 * b < m and first + 8 * j < n:
                        load_vector(args.residual.iterator, starts[b] + 8 * j, pair)
                    values = [value + pair[a].to(cutlass.Float32) for a, value in enumerate(values)]
                for a in cutlass.range_constexpr(2):
                    rounded[(a, b, j), 0, 0] = values[a].to(self.dtype)
