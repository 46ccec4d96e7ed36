# SPDX-License-Identifier: Apache-2.0
"""The persistent GEMM on SM100, with two stages of accumulators in tensor memory.

One warp loads by TMA, one issues products, and a warpgroup runs a tile's epilogue during the next tile's mainloop. An
epilogue thread has a row of the tile: gate and up of a column are box_n columns apart in its tmem lane. With two_cta,
two CTAs execute one tcgen05.mma: each has 128 rows of x and of the accumulators, and one box of the weights for both.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers, hopper_helpers

from dsl_backend.gemm.args import GemmArgs
from dsl_backend.gemm.epilogue import PackedArithmetic
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.sizes import BLOCK_K, WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import ACC_STAGES, LOAD_WARP, MMA_K, MMA_M, MMA_WARP, GemmConfig
from dsl_backend.gemm.tiled import GemmBase, GemmParams
from dsl_backend.primitives import dependent_launch, tmem
from dsl_backend.primitives.copy import load_vector
from dsl_backend.primitives.math import add_pair, in_pairs
from dsl_backend.primitives.moved import LayoutEnum, SmemAllocator
from dsl_backend.primitives.pipeline import TMA, UMMA, Edge, Pipeline, warps
from dsl_backend.primitives.schedule import raster

VECTOR = 8  # elements
VECTOR_BYTES = 16


def swizzled(address: cutlass.Int32, row_bytes: int):
    """Where a row begins, whose vectors are swizzled over 32 to 128 bytes."""
    mask = row_bytes // VECTOR_BYTES - 1
    return address ^ (address >> 7 & mask) * VECTOR_BYTES


class Gemm(GemmBase):
    """See `gemm/tiled.py`."""

    # Whether the next tile's accumulators may overwrite what of a tile's is stored first, and nothing else of them.
    releases_early = False

    def __init__(self, key: GemmKey[GemmConfig]):
        super().__init__(key, PackedArithmetic())
        config = key.config
        self.weight_rows, self.tmem_columns, self.threads = config.weight_rows, config.tmem_columns, config.threads
        self.epilogue_n = config.epilogue_n(self.parts, key.dtypes.out.itemsize)
        self.register_columns = config.register_columns(self.parts)
        self.out_group = VECTOR  # columns that are converted together
        self.two_cta = config.two_cta
        self.cta_group = tcgen05.CtaGroup.TWO if self.two_cta else tcgen05.CtaGroup.ONE
        self.load_edge = Edge("x and weights", TMA, UMMA, self.stages)
        # The epilogue warps of both CTAs arrive at the leader's barrier.
        self.acc_edge = Edge("accumulators", UMMA, warps(WARPGROUP // WARP, self.cluster), ACC_STAGES)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: GemmArgs, stream):
        """Launch; see `args.launch_args`."""
        self.launch(args.operands, args.max_ctas, stream)

    def launch(self, operands, max_ctas: cutlass.Int32, stream):
        """Launch so many CTAs at most."""
        epi_tile = cutlass.const_expr((WARP, self.epilogue_n // self.out_packed))
        sOut_layout = hopper_helpers.make_smem_layout_epi(
            self.out_dtype, LayoutEnum.ROW_MAJOR, epi_tile, 2 * WARPGROUP // WARP
        )
        load = cpasync.CopyBulkTensorTileG2SOp(self.cta_group)
        params = self.params(operands, load, load, cute.slice_(sOut_layout, (None, None, 0)), epi_tile)
        self.kernel(params, self.tiled_mma(), *self.smem_layouts(self.weight_rows), sOut_layout).launch(
            grid=self.grid(operands, max_ctas),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.two_cta else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def tiled_mma(self):
        """What `issue` multiplies with."""
        return blackwell_helpers.make_trivial_tiled_mma(
            self.x_dtype,
            self.weight_dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            self.cta_group,
            (MMA_M * self.cluster, 2 * self.box_n),
        )

    @cute.kernel
    def kernel(
        self,
        params: GemmParams,
        tiled_mma: cute.TiledMma,
        sX_layout: cute.ComposedLayout,
        sW_layout: cute.ComposedLayout,
        sOut_layout: cute.ComposedLayout,
    ):
        smem = SmemAllocator()
        sX = smem.allocate_tensor(self.x_dtype, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        sW = smem.allocate_tensor(self.weight_dtype, sW_layout.outer, byte_alignment=1024, swizzle=sW_layout.inner)
        sOut = smem.allocate_tensor(self.out_dtype, sOut_layout.outer, byte_alignment=1024, swizzle=sOut_layout.inner)
        sScales = self.scale_stages(smem)
        pipeline = self.load_edge.allocate(smem)
        acc_pipeline = self.acc_edge.allocate(smem)
        tmem_address = smem.allocate_array(cutlass.Int32, 1)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        role = warp - WARPGROUP // WARP
        if role == LOAD_WARP:
            with cute.arch.elect_one():
                pipeline.init()
                acc_pipeline.init()
            cute.arch.mbarrier_init_fence()
            for atom in (params.tma_atom_x, params.tma_atom_x_tail, params.tma_atom_w, params.tma_atom_out):
                cpasync.prefetch_descriptor(atom)
        if role == MMA_WARP:
            cute.arch.alloc_tmem(self.tmem_columns, tmem_address, is_two_cta=self.two_cta)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.two_cta)
        self.zero_fill(params, sX, cta_rank, cute.arch.thread_idx()[0], self.threads)
        cute.arch.sync_threads()
        tmem_ptr = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_address)
        self.cluster_sync()
        # The next kernel's CTAs may start once this one has its tensor memory: they would take it away.
        dependent_launch.launch_dependents()
        dependent_launch.wait()
        if role == LOAD_WARP:
            self.load(params, sX, sW, pipeline, sScales)
        if role == MMA_WARP and cta_rank == 0:
            self.mma(params, tiled_mma, sX, sW, pipeline, acc_pipeline, tmem_ptr, sScales)
        if role < 0:
            self.epilogue(params, sOut, acc_pipeline, tmem_ptr, cta_rank)
        # A CTA's memory and barriers stay until its peer is done with them.
        cute.arch.sync_threads()
        self.cluster_sync()
        if role == MMA_WARP:
            cute.arch.dealloc_tmem(tmem_ptr, self.tmem_columns, is_two_cta=self.two_cta)

    def scale_stages(self, smem: SmemAllocator):
        """Stages of scale factors for matrix products: here there are none."""

    def cluster_sync(self):
        """All threads of both CTAs."""
        if self.two_cta:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def tx_bytes(self, params: GemmParams, m_tile, cta_rank):
        """With two_cta the leader's barrier counts the bytes of both CTAs."""
        if self.two_cta:
            return sum(super(Gemm, self).tx_bytes(params, m_tile, rank) for rank in range(self.cluster))
        return super().tx_bytes(params, m_tile, cta_rank)

    @cute.jit
    def acquire(self, pipeline: Pipeline, position, cta_rank, tx_bytes):
        """Wait for an empty stage; the barrier of what is loaded into it. The leader expects the bytes."""
        pipeline.producer_acquire(position)
        if cta_rank == 0:
            pipeline.producer_expect(position, tx_bytes)
        return pipeline.full(position)

    def load_boxes(
        self, params: GemmParams, tWgW: cute.Tensor, tWsW: cute.Tensor, n_tile, k_tile, stage, cta_rank, mbar
    ):
        """Both boxes of weights, or with two_cta this CTA's."""
        if self.two_cta:
            box = self.box(tWgW, n_tile, k_tile, cta_rank)
            cute.copy(params.tma_atom_w, box, tWsW[None, 0, stage], tma_bar_ptr=mbar)
        else:
            self.load_both_boxes(params, tWgW, tWsW, n_tile, k_tile, stage, mbar)

    @cute.jit
    def mma(
        self,
        params: GemmParams,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        pipeline: Pipeline,
        acc_pipeline: Pipeline,
        tmem_ptr: cute.Pointer,
        sScales: cute.Tensor,
    ):
        """The MMA warp, with two_cta that of the leader."""
        m_tiles, n_tiles, k_tiles = self.tile_counts(params)
        _, _, tiles = self.schedule(m_tiles, n_tiles)
        self.issue(tiled_mma, sX, sW, pipeline, acc_pipeline, tmem_ptr, tiles, k_tiles, sScales)

    @cute.jit
    def issue(
        self,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        pipeline: Pipeline,
        acc_pipeline: Pipeline,
        tmem_ptr: cute.Pointer,
        tiles: cutlass.Int32,
        k_tiles: cutlass.Int32,
        sScales: cute.Tensor = None,
    ):
        """Issue the products of so many tiles."""
        tCrX = tiled_mma.make_fragment_A(cute.tiled_divide(sX, (MMA_M, MMA_K)))
        tCrW = tiled_mma.make_fragment_B(cute.tiled_divide(sW, (self.weight_rows, MMA_K)))
        shape = tiled_mma.get_slice(0).partition_shape_C((MMA_M * self.cluster, 2 * self.box_n))
        acc_layout = tiled_mma.make_fragment_C(shape).layout
        for tile in cutlass.range(tiles, unroll=1):
            acc_pipeline.producer_acquire(tile)
            tmem.after_sync()
            tCtAcc = cute.make_tensor(tmem_ptr + self.acc_column(acc_pipeline, tile), acc_layout)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                position = tile * k_tiles + k_tile
                stage = pipeline.stage(position)
                pipeline.consumer_wait(position)
                of_weights = self.await_weights(sScales, position, stage)
                with_accumulate = tiled_mma.with_()
                for k in cutlass.range_constexpr(BLOCK_K // MMA_K):
                    with_accumulate.set(tcgen05.Field.ACCUMULATE, k_tile > 0 if cutlass.const_expr(k == 0) else True)
                    weights = tCrW[None, None, k, of_weights]
                    cute.gemm(with_accumulate, tCtAcc, tCrX[None, None, k, stage], weights, tCtAcc)
                self.commit(pipeline.mbar_empty + stage)
                self.give_weights_back(sScales, position)
            self.commit(acc_pipeline.full(tile))

    def await_weights(self, beside, position, stage):
        """The stage of a position's weights, once they are there: here those of x, which arrived with them."""
        return stage

    def give_weights_back(self, beside, position):
        """A position's weights may be overwritten once its products are done: here they are given back with x."""

    @cute.jit
    def commit(self, mbar: cute.Pointer):
        """All products so far arrive at the barrier when they are done; with two_cta at both CTAs' barriers."""
        with cute.arch.elect_one():
            if cutlass.const_expr(self.two_cta):
                tcgen05.commit(mbar, (1 << self.cluster) - 1, self.cta_group)
            else:
                tcgen05.commit(mbar)

    @cute.jit
    def epilogue(
        self,
        params: GemmParams,
        sOut: cute.Tensor,
        acc_pipeline: Pipeline,
        tmem_ptr: cute.Pointer,
        cta_rank: cutlass.Int32,
    ):
        """An epilogue warp: its 32 rows of every tile, `epilogue_n` columns at a time."""
        m_tiles, n_tiles, _ = self.tile_counts(params)
        first, clusters, tiles = self.schedule(m_tiles, n_tiles)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        gOut = cute.local_tile(params.mOut, (WARP, self.epilogue_n // self.out_packed), (None, None))
        tOsO, tOgO = cpasync.tma_partition(
            params.tma_atom_out, 0, cute.make_layout(1), cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        epi_tiles = cutlass.const_expr(self.columns // self.epilogue_n)
        for tile in cutlass.range(tiles, unroll=1):
            m_tile, n_tile = raster(first + tile * clusters, m_tiles, n_tiles, self.band)
            first_row = (m_tile * self.cluster + cta_rank) * self.tile_m + warp * WARP
            acc_pipeline.consumer_wait(tile)
            tmem.after_sync()
            tmem_column = self.acc_column(acc_pipeline, tile)
            for i in cutlass.range(epi_tiles, unroll=1):
                epi = self.epi_tile(tile, i, epi_tiles)
                first_column = n_tile * self.columns + epi * self.epilogue_n
                stage = warp * 2 + (tile * epi_tiles + i) % 2
                row_address = self.begin_store(sOut, stage)
                # Of 64 columns whose halves were unrolled, ptxas spilled 40 bytes (erf, bias, residual).
                for start in cutlass.range(0, self.epilogue_n, self.register_columns, unroll=1):
                    columns = tmem_column + epi * self.epilogue_n + start
                    self.convert(
                        params,
                        row_address ^ self.out_bytes(start),
                        tmem_ptr,
                        columns,
                        first_row + lane,
                        first_column + start,
                    )
                self.end_store(
                    params, tOsO[None, stage], tOgO[None, first_row // WARP, first_column // self.epilogue_n]
                )
                if cutlass.const_expr(self.releases_early):
                    if i == 0:
                        self.release(acc_pipeline, tile)
            if cutlass.const_expr(not self.releases_early):
                self.release(acc_pipeline, tile)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def begin_store(self, sOut: cute.Tensor, stage: cutlass.Int32):
        """Where in shared memory the thread's row of an epilogue tile goes, once it is free."""
        # The TMA store from this stage, the last but one, has read it.
        cute.arch.cp_async_bulk_wait_group(1, read=True)
        cute.arch.sync_warp()
        row = stage * WARP + cute.arch.lane_idx()
        row_bytes = cutlass.const_expr(self.out_bytes(self.epilogue_n))
        return swizzled(sOut.iterator.toint() + row * row_bytes, row_bytes)

    @cute.jit
    def end_store(self, params: GemmParams, source: cute.Tensor, target: cute.Tensor):
        """Store an epilogue tile that the warp has written."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.copy(params.tma_atom_out, source, target)
            cute.arch.cp_async_bulk_commit_group()

    def acc_column(self, acc_pipeline: Pipeline, tile):
        """The first column of a tile's accumulators in tensor memory."""
        return acc_pipeline.stage(tile) * (2 * self.box_n)

    def epi_tile(self, tile, i, epi_tiles: int):
        """Which columns of a tile are stored i-th."""
        return i

    @cute.jit
    def release(self, acc_pipeline: Pipeline, tile: cutlass.Int32):
        """By a warp: it has read the accumulators."""
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if cutlass.const_expr(self.two_cta):
                cute.arch.mbarrier_arrive(acc_pipeline.empty(tile), 0)
            else:
                cute.arch.mbarrier_arrive(acc_pipeline.empty(tile))

    @cute.jit
    def convert(
        self,
        params: GemmParams,
        smem_address: cutlass.Int32,
        tmem_ptr: cute.Pointer,
        tmem_column: cutlass.Int32,
        row: cutlass.Int32,
        first_column: cutlass.Int32,
    ):
        """Neighbouring columns of a row through bias, activation and residual, into shared memory.

        Args:
            smem_address: of the first of them.
            tmem_ptr, tmem_column: tensor memory, and the first column there, of the first box.
            row, first_column: of the whole output.
        """
        thread = cute.arch.thread_idx()[0]
        acc = [cute.make_rmem_tensor(self.register_columns, cutlass.Float32) for _ in range(self.parts)]
        for part in cutlass.range_constexpr(self.parts):
            tmem.load(tmem_ptr, tmem_column + part * self.box_n, acc[part], thread)
        cute.arch.fence_view_async_tmem_load()
        self.finish(params, smem_address, acc, row, first_column)

    def finish(self, params: GemmParams, smem_address, acc: list, row, first_column):
        """The same of accumulators in registers, a tensor for each part."""
        row_scale = self.row_scale(params, row)
        for first in range(0, self.register_columns, self.out_group):
            found: list = []
            for start in range(first, first + self.out_group, VECTOR):
                values = [[of_part[start + j] for j in range(VECTOR)] for of_part in acc]
                found += self.results(params, values, row_scale, row, first_column + start)
            self.stage_out(params, smem_address, first, found, row, first_column + first)

    def results(self, params: GemmParams, values: list, row_scale, row, column) -> list:
        """8 neighbouring columns of the output from the accumulators of each part."""
        values = self.with_scales(params, values, row_scale, column)
        if params.mBias is not None:
            self.add_bias(params, values, column)
        found = self.activate(*values) if self.gated else values[0]
        return found if params.mResidual is None else self.with_residual(params, found, row, column)

    def stage_out(self, params: GemmParams, smem_address, first: int, values: list, row, column):
        """Neighbouring columns of the output into shared memory.

        Args:
            smem_address: of a row's columns, of which these are the `first` and following.
        """
        width = VECTOR_BYTES * 8 // self.out_dtype.width
        for start in range(0, len(values), width):
            vector = values[start : start + width]
            rOut = cute.make_rmem_tensor(len(vector), self.out_dtype)
            for j, value in enumerate(vector):
                rOut[j] = value.to(self.out_dtype)
            self.store_vector(rOut, smem_address, self.out_bytes(first + start))

    def store_vector(self, vector: cute.Tensor, smem_address, offset: int):
        """4 to 16 bytes into a row in shared memory; the swizzle flips bits of a 16-byte vector's place in its row."""
        size = cute.size(vector) * vector.element_type.width // 8
        address = (smem_address ^ offset // VECTOR_BYTES * VECTOR_BYTES) + offset % VECTOR_BYTES
        target = cute.make_ptr(vector.element_type, address, cute.AddressSpace.smem, assumed_align=size)
        cute.autovec_copy(vector, cute.make_tensor(target, cute.make_layout(cute.size(vector))))

    def out_bytes(self, columns):
        """Bytes of so many columns of a row of the output."""
        return columns * (self.out_dtype.width // 8) // self.out_packed

    def row_scale(self, params: GemmParams, row):
        """What `with_scales` needs to know of a row."""

    def with_scales(self, params: GemmParams, values: list, row_scale, column) -> list:
        """8 accumulators of neighbouring columns of each part, with the operands' scales: here they have none."""
        return values

    def add_bias(self, params: GemmParams, values: list, column):
        """Add the bias to 8 neighbouring columns of each part; any values past the last column."""
        for part, biases in enumerate(self.of_columns(params, params.mBias, column)):
            values[part] = in_pairs(add_pair, values[part], biases)

    def of_columns(self, params: GemmParams, vector: cute.Tensor, column) -> list:
        """Of a vector [parts * n], in float32, the elements of 8 neighbouring columns of each part; any past the last.

        The elements of 16 bytes are loaded at once.
        """
        n, dtype = self.width(params), vector.element_type
        width = VECTOR_BYTES * 8 // dtype.width
        inside = cutlass.min(column, n - VECTOR)
        loaded: list = []
        for first in range(0, self.parts * VECTOR, width):
            # Gate and up of some columns, or some columns of one part.
            start = inside * 2 + first if self.interleaved else inside + first // VECTOR * n + first % VECTOR
            some = cute.make_rmem_tensor(width, dtype)
            load_vector(vector.iterator, start, some)
            loaded += [some[j].to(cutlass.Float32) for j in range(width)]
        if self.interleaved:
            return [loaded[part :: self.parts] for part in range(self.parts)]
        return [loaded[part * VECTOR : (part + 1) * VECTOR] for part in range(self.parts)]

    @cute.jit
    def load_residual(self, params: GemmParams, row: cutlass.Int32, column: cutlass.Int32, rResidual: cute.Tensor):
        """8 neighbouring columns of the residual; zeros outside."""
        m, n = params.mOut.shape
        rResidual.fill(0.0)
        if row < m and column < n:
            load_vector(params.mResidual.iterator, cutlass.Int64(row) * params.mResidual.stride[0] + column, rResidual)

    def with_residual(self, params: GemmParams, values: list, row, column) -> list:
        """8 values plus the residual."""
        rResidual = cute.make_rmem_tensor(VECTOR, self.out_dtype)
        self.load_residual(params, row, column, rResidual)
        return in_pairs(add_pair, values, [rResidual[j].to(cutlass.Float32) for j in range(VECTOR)])
