# SPDX-License-Identifier: Apache-2.0
"""The GEMM for few rows on SM100: one MMA warp with accumulators in tensor memory, one or two epilogue warpgroups.

An epilogue thread has a row of each box of weights: the lanes of a warp have neighbouring columns of the output.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers

from dsl_backend.gemm.args import GemmArgs
from dsl_backend.gemm.epilogue import ScalarArithmetic
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import (
    EPILOGUE_REGISTERS,
    LOAD_WARP,
    MMA_K,
    MMA_M,
    MMA_WARP,
    OTHER_REGISTERS,
    SmallMConfig,
)
from dsl_backend.gemm.small_m import Received, SmallMGemmBase, SmallMParams, StreamKWork
from dsl_backend.primitives import dependent_launch, tmem
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import TMA, UMMA, Edge, Pipeline, warps


class SmallMGemm(SmallMGemmBase):
    """See `gemm/small_m.py`."""

    # Of the epilogue's threads, and of others, where registers are traded.
    registers = (EPILOGUE_REGISTERS, OTHER_REGISTERS)
    # The last warps of a CTA, which unpack weights.
    unpacking_warps = 0

    def __init__(self, key: GemmKey[SmallMConfig]):
        # Packed arithmetic needs registers beside a thread's up to 128 accumulators: ptxas spilled up to 32 bytes (64
        # tokens, residual).
        super().__init__(key, ScalarArithmetic(apart=key.apart))
        self.tmem_columns, self.threads = key.config.tmem_columns, key.config.threads
        self.thread_tokens, self.trades_registers = self.accumulators // 2, key.config.trades_registers
        self.load_edge = Edge("x and weights", TMA, UMMA, self.stages)
        self.acc_edge = Edge("accumulators", UMMA, warps(self.groups * WARPGROUP // WARP), key.config.acc_stages)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: GemmArgs, stream):
        """Launch; see `args.launch_args`. The CTAs need not run at the same time."""
        self.launch(self.params(args.operands, args.scratch), self.ctas(args), stream)

    def launch(self, params: SmallMParams, ctas, stream):
        """Launch so many CTAs."""
        self.kernel(params, self.tiled_mma(), *self.smem_layouts()).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def tiled_mma(self):
        """Products of a box of weights with the tokens."""
        return blackwell_helpers.make_trivial_tiled_mma(
            self.weight_dtype,
            self.x_dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            tcgen05.CtaGroup.ONE,
            (MMA_M, self.tokens),
        )

    @cute.kernel
    def kernel(
        self,
        params: SmallMParams,
        tiled_mma: cute.TiledMma,
        sW_layout: cute.ComposedLayout,
        sX_layout: cute.ComposedLayout,
    ):
        smem = SmemAllocator()
        sW = self.allocate_weights(smem, sW_layout)
        sX = smem.allocate_tensor(self.x_dtype, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        pipeline = self.load_edge.allocate(smem)
        acc_pipeline = self.acc_edge.allocate(smem)
        received = self.received(smem)
        tmem_address = smem.allocate_array(cutlass.Int32, 1)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        role = warp - self.groups * (WARPGROUP // WARP)
        if role == LOAD_WARP:
            with cute.arch.elect_one():
                pipeline.init()
                acc_pipeline.init()
                self.expect_partials(received)
                self.init_stages(sW)
            cute.arch.mbarrier_init_fence()
            for atom in (params.tma_atom_w, params.tma_atom_x):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        if role == MMA_WARP:
            cute.arch.alloc_tmem(self.tmem_columns, tmem_address)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tmem_ptr = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, tmem_address)
        self.meet_begin()
        # The next kernel's CTAs may start once this one has its tensor memory: they would take it away.
        work = self.begin(params, smem)
        if role < 0:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_increase(self.registers[0])
            self.epilogue(params, acc_pipeline, received, work, tmem_ptr, warp // (WARPGROUP // WARP))
        else:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_decrease(self.registers[1])
            if role == LOAD_WARP:
                self.load(params, sW, sX, pipeline, work)
            if role == MMA_WARP:
                self.mma(tiled_mma, sW, sX, pipeline, acc_pipeline, work, tmem_ptr)
            if cutlass.const_expr(self.unpacking_warps > 0):
                if warp >= self.threads // WARP - self.unpacking_warps:
                    self.unpack(sW, pipeline, work, tmem_ptr)
            self.meet_end()
        cute.arch.sync_threads()
        if role == MMA_WARP:
            cute.arch.dealloc_tmem(tmem_ptr, self.tmem_columns)

    def allocate_weights(self, smem: SmemAllocator, sW_layout) -> Any:
        """Stages of weights, as `load`, `mma` and `unpack` take them."""
        return smem.allocate_tensor(self.weight_dtype, sW_layout.outer, byte_alignment=1024, swizzle=sW_layout.inner)

    def init_stages(self, sW):
        """By one thread: initialise the barriers of what `allocate_weights` returned, which has none here."""

    def unpack(self, sW, pipeline: Pipeline, work: StreamKWork, tmem_ptr: cute.Pointer):
        """The warps that unpack weights: here there are none."""

    def iterations(self, work: StreamKWork, tile):
        """(first, end) of a tile's iterations, (first, end) of those in the CTA's range."""
        tile_start = tile * work.k_tiles
        tile_end = tile_start + work.k_tiles
        return tile_start, tile_end, cutlass.max(work.start, tile_start), cutlass.min(work.end, tile_end)

    @cute.jit
    def mma(
        self,
        tiled_mma: cute.TiledMma,
        sW: cute.Tensor,
        sX: cute.Tensor,
        pipeline: Pipeline,
        acc_pipeline: Pipeline,
        work: StreamKWork,
        tmem_ptr: cute.Pointer,
    ):
        """The MMA warp."""
        boxes = cute.local_tile(sW, (self.box, self.tile_k), (None, 0, None))
        tCrW = [
            tiled_mma.make_fragment_A(cute.tiled_divide(boxes[None, None, i, None], (MMA_M, MMA_K))) for i in range(2)
        ]
        tCrX = tiled_mma.make_fragment_B(cute.tiled_divide(sX, (self.tokens, MMA_K)))
        shape = tiled_mma.get_slice(0).partition_shape_C((MMA_M, self.tokens))
        acc_layout = tiled_mma.make_fragment_C(shape).layout
        first_tile, tiles = self.tile_range(work)
        for tile in cutlass.range(tiles, unroll=1):
            _, _, start, end = self.iterations(work, first_tile + tile)
            acc_pipeline.producer_acquire(tile)
            tmem.after_sync()
            acc_ptr = tmem_ptr + acc_pipeline.stage(tile) * (2 * self.tokens)
            tCtAcc = [cute.make_tensor(acc_ptr + i * self.tokens, acc_layout) for i in range(2)]
            for iteration in cutlass.range(start, end, unroll=1):
                stage = pipeline.stage(iteration - work.start)
                pipeline.consumer_wait(iteration - work.start)
                with_accumulate = tiled_mma.with_()
                for k in cutlass.range_constexpr(self.tile_k // MMA_K):
                    with_accumulate.set(
                        tcgen05.Field.ACCUMULATE, iteration > start if cutlass.const_expr(k == 0) else True
                    )
                    for i in cutlass.range_constexpr(2):
                        cute.gemm(
                            with_accumulate,
                            tCtAcc[i],
                            tCrW[i][None, None, k, stage],
                            tCrX[None, None, k, stage],
                            tCtAcc[i],
                        )
                with cute.arch.elect_one():
                    tcgen05.commit(pipeline.mbar_empty + stage)
            with cute.arch.elect_one():
                tcgen05.commit(acc_pipeline.full(tile))

    @cute.jit
    def epilogue(
        self,
        params: SmallMParams,
        acc_pipeline: Pipeline,
        received: Received,
        work: StreamKWork,
        tmem_ptr: cute.Pointer,
        group: cutlass.Int32,
    ):
        """An epilogue warpgroup: some tokens' accumulators of every tile in the CTA's range."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        acc_0, acc_1 = (cute.make_rmem_tensor(self.thread_tokens, cutlass.Float32) for _ in range(2))
        # A kernel before this one may write the residual, or read what this one writes.
        dependent_launch.wait()
        self.meet_end()
        first_tile, tiles = self.tile_range(work)
        for i in cutlass.range(tiles, unroll=1):
            tile = first_tile + i
            tile_start, tile_end, start, end = self.iterations(work, tile)
            self.collect(params, acc_pipeline, work, tmem_ptr, i, acc_0, acc_1, group, thread)
            token = tile // work.n_tiles * self.tokens + group * self.thread_tokens
            if cutlass.const_expr(not self.stream_k):
                sum_0, sum_1 = self.sum_splits(received, acc_0, acc_1, group * WARPGROUP + thread)
                first = token + self.first_finished(cute.arch.block_idx_in_cluster())
                self.store_columns(params, work, sum_0, sum_1, tile % work.n_tiles, first, thread)
            elif start > tile_start:
                self.store_partials(params, acc_0, acc_1, work.worker, group, thread)
            else:
                if end < tile_end:
                    self.add_partials(params, acc_0, acc_1, work, tile_end, group, thread)
                self.store_columns(params, work, acc_0, acc_1, tile % work.n_tiles, token, thread)

    @cute.jit
    def collect(
        self,
        params: SmallMParams,
        acc_pipeline: Pipeline,
        work: StreamKWork,
        tmem_ptr: cute.Pointer,
        i: cutlass.Int32,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """A thread's accumulators of the CTA's i-th tile, of both boxes, from tensor memory."""
        acc_pipeline.consumer_wait(i)
        tmem.after_sync()
        tmem_column = acc_pipeline.stage(i) * (2 * self.tokens) + group * self.thread_tokens
        tmem.load(tmem_ptr, tmem_column, acc_0, thread)
        tmem.load(tmem_ptr, tmem_column + self.tokens, acc_1, thread)
        cute.arch.fence_view_async_tmem_load()
        self.release(acc_pipeline, i)

    def release(self, acc_pipeline: Pipeline, position):
        """By each epilogue warp, once it has its part of an accumulator in registers."""
        tmem.before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(acc_pipeline.empty(position))

    @cute.jit
    def store_columns(
        self,
        params: SmallMParams,
        work: StreamKWork,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        n_tile: cutlass.Int32,
        first_token: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """A thread's accumulators to the output: to one column, or without an activation to two, a box apart."""
        column = n_tile * self.columns + thread
        biases = self.biases(params, column)
        for j in cutlass.range_constexpr(cute.size(acc_0)):
            token = first_token + j if self.stream_k else self.finished_token(first_token + j, j)
            self.finish(params, acc_0[j] + biases[0], acc_1[j] + biases[1], token, column)
