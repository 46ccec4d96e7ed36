# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM on SM100: roles, tensor memory and arithmetic are those of `gemm/sm100/gemm.py`.

An epilogue thread has a row of the tile, and writes it where it belongs by itself: rows of a tile beyond those of its
expert are the next expert's, which a TMA store of the tile would overwrite.
"""

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.grouped import VECTOR_BYTES, GroupedParams, GroupedProduct, WorkTile, gemm_key
from dsl_backend.experts.cute.key import ProductKey
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import EPILOGUE_REGISTERS, LOAD_WARP, MMA_WARP, OTHER_REGISTERS, GemmConfig
from dsl_backend.gemm.sm100.gemm import Gemm
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives import dependent_launch, tmem
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import Pipeline

# Elements of the output in one access.
VECTOR = VECTOR_BYTES // 2


class GroupedGemm(GroupedProduct, Gemm):
    """See `experts/cute/grouped.py`. Where x is gathered, the load warp is the first of four."""

    # Whether the epilogue needs more registers than an equal share, which setmaxnreg moves between whole warpgroups.
    trades_registers = False
    # Of the epilogue's threads, and of others.
    registers = (EPILOGUE_REGISTERS, OTHER_REGISTERS)
    # The last warps of a CTA, which unpack weights.
    unpacking_warps = 0

    def __init__(self, key: ProductKey):
        assert isinstance(key.config, GemmConfig)
        Gemm.__init__(self, gemm_key(key, key.config))
        self.set_up(key)
        if self.gathers:
            self.threads += WARPGROUP - WARP

    def launch_kernel(self, params: GroupedParams, ctas, stream):
        """Launch so many CTAs."""
        self.kernel(params, self.tiled_mma(), *self.smem_layouts(self.weight_rows)).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        params: GroupedParams,
        tiled_mma: cute.TiledMma,
        sX_layout: cute.ComposedLayout,
        sW_layout: cute.ComposedLayout,
    ):
        smem = SmemAllocator()
        sX = smem.allocate_tensor(self.x_dtype, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        sW = smem.allocate_tensor(self.weight_dtype, sW_layout.outer, byte_alignment=1024, swizzle=sW_layout.inner)
        sScales = self.scale_stages(smem)
        pipeline = self.load_edge.allocate(smem)
        acc_pipeline = self.acc_edge.allocate(smem)
        tmem_address = smem.allocate_array(cutlass.Int32, 1)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        role = warp - WARPGROUP // WARP
        if role == LOAD_WARP:
            with cute.arch.elect_one():
                pipeline.init()
                acc_pipeline.init()
                self.init_stages(sScales)
            cute.arch.mbarrier_init_fence()
            self.prefetch_descriptors(params)
        if role == MMA_WARP:
            cute.arch.alloc_tmem(self.tmem_columns, tmem_address)
            cute.arch.relinquish_tmem_alloc_permit()
        self.clear_stages(sX, self.threads)
        cute.arch.sync_threads()
        tmem_ptr = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_address)
        # The next kernel's CTAs may start once this one has its tensor memory: they would take it away.
        self.wait_for_rows()
        if cutlass.const_expr(self.prefetches):
            if role != LOAD_WARP:
                dependent_launch.wait()
        if role < 0:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_increase(self.registers[0])
            if cutlass.const_expr(self.clears):
                self.clear_output(params, cute.arch.thread_idx()[0], WARPGROUP)
            self.epilogue(params, acc_pipeline, tmem_ptr, warp)
        if cutlass.const_expr(self.trades_registers):
            if role >= 0:
                cute.arch.setmaxregister_decrease(self.registers[1])
        if role == MMA_WARP:
            self.mma(params, tiled_mma, sX, sW, pipeline, acc_pipeline, tmem_ptr, sScales)
        if self.loads(role):
            if cutlass.const_expr(self.gathers):
                thread = cute.arch.thread_idx()[0] - WARPGROUP - LOAD_WARP * WARP
                # Where registers are traded, idle warps fill a warpgroup.
                if role < LOAD_WARP + WARPGROUP // WARP:
                    self.gather(params, sX, sW, pipeline, thread, role == LOAD_WARP, sScales)
            else:
                self.load(params, sX, sW, pipeline, sScales)
        if cutlass.const_expr(self.unpacking_warps > 0):
            if warp >= self.threads // WARP - self.unpacking_warps:
                self.unpack(params, sW, pipeline, sScales)
        cute.arch.sync_threads()
        if role == MMA_WARP:
            cute.arch.dealloc_tmem(tmem_ptr, self.tmem_columns)

    def loads(self, role):
        """Whether a warp is one of those that load; some that stay idle may be among them."""
        return role >= LOAD_WARP

    def init_stages(self, beside):
        """By one thread: initialise the barriers of what `scale_stages` returned, which are none here."""

    def unpack(self, params: GroupedParams, sW: cute.Tensor, pipeline: Pipeline, beside):
        """The warps that unpack weights: here there are none."""

    @cute.jit
    def mma(
        self,
        params: GroupedParams,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        pipeline: Pipeline,
        acc_pipeline: Pipeline,
        tmem_ptr: cute.Pointer,
        sScales: cute.Tensor,
    ):
        """The MMA warp."""
        tiles = self.tiles_of_cta(params).count
        k_tiles = self.k_tiles(params)
        self.issue(tiled_mma, sX, sW, pipeline, acc_pipeline, tmem_ptr, tiles, k_tiles, sScales)

    @cute.jit
    def epilogue(self, params: GroupedParams, acc_pipeline: Pipeline, tmem_ptr: cute.Pointer, warp: cutlass.Int32):
        """An epilogue warp: its 32 rows of every tile, as far as there are any."""
        schedule = self.tiles_of_cta(params)
        place = warp * WARP + cute.arch.lane_idx()
        for tile in cutlass.range(schedule.count, unroll=1):
            work = self.work_tile(params, schedule, tile)
            # A row of the output, or any where there is none: nothing is stored there.
            row = work.first_row + cutlass.min(place, work.rows - 1)
            factor = self.row_factor(params, row, work)
            if cutlass.const_expr(not self.gathers):
                row = self.target_row(params, row)
            acc_pipeline.consumer_wait(tile)
            tmem.after_sync()
            tmem_column = self.acc_column(acc_pipeline, tile)
            steps = cutlass.const_expr(self.columns // self.register_columns)
            # Of accumulators that overlap the next tile's, what is read before these are free.
            early = cutlass.const_expr(self.epilogue_n // self.register_columns)
            for i in cutlass.range(steps, unroll=1):
                start = self.epi_tile(tile, i, steps) * self.register_columns
                self.store_columns(params, tmem_ptr, tmem_column + start, work, row, start, factor, place)
                if cutlass.const_expr(self.releases_early):
                    if i == early - 1:
                        self.release(acc_pipeline, tile)
            if cutlass.const_expr(not self.releases_early):
                self.release(acc_pipeline, tile)

    @cute.jit
    def store_columns(
        self,
        params: GroupedParams,
        tmem_ptr: cute.Pointer,
        tmem_column: cutlass.Int32,
        work: WorkTile,
        row: cutlass.Int32,
        start: cutlass.Int32,
        factor: cutlass.Float32,
        place: cutlass.Int32,
    ):
        """Neighbouring columns of a row, from `start` of the tile on, through factor, bias and activation to memory.

        The thread has the tile's row `place`, of which there may be none.
        """
        thread = cute.arch.thread_idx()[0]
        acc = [cute.make_rmem_tensor(self.register_columns, cutlass.Float32) for _ in range(self.parts)]
        for part in cutlass.range_constexpr(self.parts):
            tmem.load(tmem_ptr, tmem_column + part * self.box_n, acc[part], thread)
        cute.arch.fence_view_async_tmem_load()
        self.store_values(params, acc, work, row, start, factor, place)

    def store_values(self, params: GroupedParams, acc: list, work: WorkTile, row, start, factor, place):
        """The same of accumulators in registers, a tensor for each part."""
        for i in range(self.register_columns // VECTOR):
            column = work.n_tile * self.columns + start + i * VECTOR
            found = self.finished(params, acc, work, factor, column, i * VECTOR)
            rOut = cute.make_rmem_tensor(VECTOR, self.out_dtype)
            for j in range(VECTOR):
                rOut[j] = found[j].to(self.out_dtype)
            self.store_row_vector(params, rOut, row, column, place < work.rows)

    def finished(self, params: GroupedParams, acc: list, work: WorkTile, factor, column, first: int) -> list:
        """8 columns of the output; `first` is their place in the accumulators."""
        values = [[of_part[first + j] for j in range(VECTOR)] for of_part in acc]
        values = self.factored(params, values, work, factor, column)
        if self.has_bias:
            values = self.with_expert_bias(params, values, work.expert, column)
        if self.weighted:
            return [value * factor for value in values[0]]
        return self.activate(*values) if self.gated else values[0]

    @cute.jit
    def store_row_vector(
        self,
        params: GroupedParams,
        rOut: cute.Tensor,
        row: cutlass.Int32,
        column: cutlass.Int32,
        exists: cutlass.Boolean,
    ):
        """8 neighbouring columns of a row of the output, if there are such."""
        if exists:
            if column < params.mOut.shape[1]:
                self.put_vector(params, rOut, row, column)

    def row_factor(self, params: GroupedParams, row, work: WorkTile):
        """What `factored` multiplies a row's accumulators with; `row` is that of the expert's rows in order."""
        return params.mScale[params.mPairs[row]] if self.scaled or self.weighted else cutlass.Float32(1.0)

    def factored(self, params: GroupedParams, values: list, work: WorkTile, factor, column) -> list:
        """8 accumulators of neighbouring columns of each part."""
        return [[value * factor for value in of_part] for of_part in values] if self.scaled else values

    def with_expert_bias(self, params: GroupedParams, values: list, expert, column) -> list:
        """8 neighbouring columns of each part plus the bias of an expert; any values past the last column."""
        mBias, n = params.mBias[expert, None], self.width(params)
        return [
            [value + bias_of(mBias, column + j, part, n, self.interleaved) for j, value in enumerate(of_part)]
            for part, of_part in enumerate(values)
        ]
