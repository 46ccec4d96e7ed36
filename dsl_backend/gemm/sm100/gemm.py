# SPDX-License-Identifier: Apache-2.0
"""Linear layers of many rows for SM100: a persistent GEMM whose sums live twice in tensor memory.

One warp copies tiles by TMA, one issues products, and a warpgroup takes a tile's sums through the epilogue while the
next tile's are made. A thread has a row of the tile: gate and up of a column are box_n columns apart in its lane. With
pairs, two blocks multiply as one: each has 128 rows of x and of the sums, and a box of the weights for both.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import LayoutEnum, blackwell_helpers, hopper_helpers

from dsl_backend.gemm.epilogue import Pairs
from dsl_backend.gemm.key import LinearKey
from dsl_backend.gemm.sizes import BLOCK_K, WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import BUFFERS, LOAD, MMA_K, MULTIPLY, ROWS, GemmConfig
from dsl_backend.gemm.tiled import GemmArgs, TiledGemm
from dsl_backend.primitives import tensor_memory
from dsl_backend.primitives.copy import load_vector
from dsl_backend.primitives.math import add_pair, in_pairs
from dsl_backend.primitives.ring import Ring
from dsl_backend.primitives.schedule import raster

VECTOR = 8  # elements
VECTOR_BYTES = 16
MOST_HELD = 32  # columns of each box in a thread's registers at a time


def swizzled(address: cutlass.Int32, width: int):
    """Where a row of `width` elements of 16 bits begins, whose vectors are swizzled over 32 to 128 bytes."""
    mask = width // VECTOR - 1
    return address ^ (address >> 7 & mask) * VECTOR_BYTES


class Gemm(TiledGemm):
    """See `gemm/tiled.py`."""

    def __init__(self, key: LinearKey[GemmConfig]):
        super().__init__(key, Pairs())
        config = key.config
        self.weight_rows, self.tensor_columns, self.threads = config.weight_rows, config.tensor_columns, config.threads
        self.piece = config.piece(self.parts)
        self.held = min(self.piece, MOST_HELD)
        self.pair = config.pair
        self.group = tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE

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
        product = blackwell_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            self.group,
            (ROWS * self.cluster, 2 * self.box_n),
        )
        out_staged = hopper_helpers.make_smem_layout_epi(
            self.dtype, LayoutEnum.ROW_MAJOR, (WARP, self.piece), 2 * WARPGROUP // WARP
        )
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        args = self.arguments(x, weight, bias, residual, out, load, load, out_staged, (WARP, self.piece))
        self.kernel(args, product, *self.layouts(self.weight_rows), out_staged).launch(
            grid=self.grid(x, out, blocks),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.pair else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

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
        full, empty = (shared.allocate_array(cutlass.Int64, self.stages) for _ in range(2))
        made, stored = (shared.allocate_array(cutlass.Int64, BUFFERS) for _ in range(2))
        place = shared.allocate_array(cutlass.Int32, 1)
        # Products arrive once; who stores, by a lane of each warp, at the block that multiplies.
        ring = Ring(full, empty, self.stages, 1)
        sums = Ring(made, stored, BUFFERS, self.cluster * WARPGROUP // WARP)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        role = warp - WARPGROUP // WARP
        if role == LOAD:
            with cute.arch.elect_one():
                ring.open()
                sums.open()
            cute.arch.mbarrier_init_fence()
            for atom in (args.x_load, args.piece_load, args.weight_load, args.out_store):
                cpasync.prefetch_descriptor(atom)
        if role == MULTIPLY:
            cute.arch.alloc_tmem(self.tensor_columns, place, is_two_cta=self.pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.pair)
        self.clear(args, sX, rank, cute.arch.thread_idx()[0], self.threads)
        cute.arch.sync_threads()
        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, place)
        self.meet()
        # The next kernel's blocks may come once this one has its tensor memory: they would keep it from it.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if role == LOAD:
            self.load(args, sX, sW, ring)
        if role == MULTIPLY and rank == 0:
            self.multiply(args, product, sX, sW, ring, sums, base)
        if role < 0:
            self.store(args, sOut, sums, base, rank)
        # A block's memory and barriers are there until the other has done with them.
        cute.arch.sync_threads()
        self.meet()
        if role == MULTIPLY:
            cute.arch.dealloc_tmem(base, self.tensor_columns, is_two_cta=self.pair)

    def meet(self):
        """All threads of a pair."""
        if self.pair:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def arriving(self, args: GemmArgs, row, rank):
        """Of pairs, the first block counts both blocks' bytes."""
        if self.pair:
            return sum(super(Gemm, self).arriving(args, row, one) for one in range(self.cluster))
        return super().arriving(args, row, rank)

    @cute.jit
    def acquire(self, ring: Ring, position, rank, arriving):
        stage = ring.stage(position)
        cute.arch.mbarrier_wait(ring.empty + stage, ring.phase(position) ^ 1)
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, arriving)
        return ring.full + stage

    def load_boxes(self, args: GemmArgs, gWIn: cute.Tensor, sWIn: cute.Tensor, column, block, stage, rank, arrived):
        """Both boxes of weights, or of a pair the block's."""
        if self.pair:
            box = self.box(gWIn, column, block, rank)
            cute.copy(args.weight_load, box, sWIn[None, 0, stage], tma_bar_ptr=arrived)
        else:
            self.load_both(args, gWIn, sWIn, column, block, stage, arrived)

    @cute.jit
    def multiply(
        self,
        args: GemmArgs,
        product: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        ring: Ring,
        sums: Ring,
        base: cute.Pointer,
    ):
        """The warp that issues products, of pairs in the first block."""
        height, width, blocks = self.extent(args)
        _, _, turns = self.turns(height, width)
        fX = product.make_fragment_A(cute.tiled_divide(sX, (ROWS, MMA_K)))
        fW = product.make_fragment_B(cute.tiled_divide(sW, (self.weight_rows, MMA_K)))
        shape = product.get_slice(0).partition_shape_C((ROWS * self.cluster, 2 * self.box_n))
        layout = product.make_fragment_C(shape).layout
        for turn in cutlass.range(turns, unroll=1):
            cute.arch.mbarrier_wait(sums.empty + sums.stage(turn), sums.phase(turn) ^ 1)
            tensor_memory.after_sync()
            tile = cute.make_tensor(base + sums.stage(turn) * (2 * self.box_n), layout)
            for block in cutlass.range(blocks, unroll=1):
                position = turn * blocks + block
                stage = ring.stage(position)
                ring.wait(position)
                adding = product.with_()
                for i in cutlass.range_constexpr(BLOCK_K // MMA_K):
                    adding.set(tcgen05.Field.ACCUMULATE, block > 0 if cutlass.const_expr(i == 0) else True)
                    cute.gemm(adding, tile, fX[None, None, i, stage], fW[None, None, i, stage], tile)
                self.commit(ring.empty + stage)
            self.commit(sums.full + sums.stage(turn))

    @cute.jit
    def commit(self, barrier: cute.Pointer):
        """Products so far arrive at the barrier when they are done, of pairs in both blocks."""
        with cute.arch.elect_one():
            if cutlass.const_expr(self.pair):
                tcgen05.commit(barrier, (1 << self.cluster) - 1, self.group)
            else:
                tcgen05.commit(barrier)

    @cute.jit
    def store(self, args: GemmArgs, sOut: cute.Tensor, sums: Ring, base: cute.Pointer, rank: cutlass.Int32):
        """A warp of those that store: its 32 rows of every tile, a piece of columns at a time."""
        height, width, _ = self.extent(args)
        first, clusters, turns = self.turns(height, width)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        gOut = cute.local_tile(args.out, (WARP, self.piece), (None, None))
        sOutOut, gOutOut = cpasync.tma_partition(
            args.out_store, 0, cute.make_layout(1), cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        pieces = cutlass.const_expr(self.columns // self.piece)
        for turn in cutlass.range(turns, unroll=1):
            row, column = raster(first + turn * clusters, height, width, self.band)
            top = (row * self.cluster + rank) * self.tile_m + warp * WARP
            sums.wait(turn)
            tensor_memory.after_sync()
            tile = sums.stage(turn) * (2 * self.box_n)
            for piece in cutlass.range(pieces, unroll=1):
                left = column * self.columns + piece * self.piece
                place = warp * 2 + (turn * pieces + piece) % 2
                # The copy out of this place, the last but one, has read it.
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                cute.arch.sync_warp()
                at = swizzled(sOut.iterator.toint() + (place * WARP + lane) * (2 * self.piece), self.piece)
                # Of a piece of 64 columns whose halves were unrolled, ptxas spilled 40 bytes (erf, bias, residual).
                for start in cutlass.range(0, self.piece, self.held, unroll=1):
                    columns = tile + piece * self.piece + start
                    self.results(args, at ^ start * 2, base, columns, top + lane, left + start)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.copy(args.out_store, sOutOut[None, place], gOutOut[None, top // WARP, left // self.piece])
                    cute.arch.cp_async_bulk_commit_group()
            tensor_memory.before_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                if cutlass.const_expr(self.pair):
                    cute.arch.mbarrier_arrive(sums.empty + sums.stage(turn), 0)
                else:
                    cute.arch.mbarrier_arrive(sums.empty + sums.stage(turn))
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def results(
        self,
        args: GemmArgs,
        first: cutlass.Int32,
        base: cute.Pointer,
        sums: cutlass.Int32,
        row: cutlass.Int32,
        left: cutlass.Int32,
    ):
        """Neighbours of a row through bias, activation and residual, into shared memory.

        Args:
            first: where the first of them lies in shared memory.
            base, sums: tensor memory and the first column there, of the first box.
            row, left: in the whole output.
        """
        thread = cute.arch.thread_idx()[0]
        boxes = [cute.make_rmem_tensor(self.held, cutlass.Float32) for _ in range(self.parts)]
        for part in cutlass.range_constexpr(self.parts):
            tensor_memory.load(base, sums + part * self.box_n, boxes[part], thread)
        cute.arch.fence_view_async_tmem_load()
        rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(self.held // VECTOR):
            column = left + i * VECTOR
            values = [[box[i * VECTOR + j] for j in range(VECTOR)] for box in boxes]
            if cutlass.const_expr(args.bias is not None):
                self.add_bias(args, values, column)
            found = values[0]
            if cutlass.const_expr(self.gated):
                found = self.activate(*values)
            if cutlass.const_expr(args.residual is not None):
                found = self.with_residual(args, found, row, column)
            for j in cutlass.range_constexpr(VECTOR):
                rounded[j] = found[j].to(self.dtype)
            # Vectors of a swizzled row differ from its first in some bits of their places.
            place = first ^ (i * VECTOR_BYTES)
            to = cute.make_ptr(self.dtype, place, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
            cute.autovec_copy(rounded, cute.make_tensor(to, cute.make_layout(VECTOR)))

    def add_bias(self, args: GemmArgs, values: list, column):
        """To 8 neighbours of each part, the bias; any values past the last column."""
        n = args.out.shape[1]
        inside = cutlass.min(column, n - VECTOR)
        held = [cute.make_rmem_tensor(VECTOR, self.dtype) for _ in values]
        for part, vector in enumerate(held):
            # Gate and up of 4 columns in a vector, or one part of 8.
            start = inside * 2 + part * VECTOR if self.interleaved else inside + part * n
            load_vector(args.bias.iterator, start, vector)
        for part in range(self.parts):
            places = [2 * j + part if self.interleaved else part * VECTOR + j for j in range(VECTOR)]
            biases = [held[place // VECTOR][place % VECTOR].to(cutlass.Float32) for place in places]
            values[part] = in_pairs(add_pair, values[part], biases)

    @cute.jit
    def residual_of(self, args: GemmArgs, row: cutlass.Int32, column: cutlass.Int32, held: cute.Tensor):
        """8 neighbours of the residual; zeros outside."""
        m, n = args.out.shape
        held.fill(0.0)
        if row < m and column < n:
            load_vector(args.residual.iterator, cutlass.Int64(row) * args.residual.stride[0] + column, held)

    def with_residual(self, args: GemmArgs, values: list, row, column) -> list:
        held = cute.make_rmem_tensor(VECTOR, self.dtype)
        self.residual_of(args, row, column, held)
        return in_pairs(add_pair, values, [held[j].to(cutlass.Float32) for j in range(VECTOR)])
