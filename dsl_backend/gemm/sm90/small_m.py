# SPDX-License-Identifier: Apache-2.0
"""The GEMM for few rows on SM90: wgmma in one or two consumer warpgroups, with the accumulators in registers."""

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
from dsl_backend.gemm.sm90.configs import CONSUMER_REGISTERS, MMA_M, PRODUCER_REGISTERS, SmallMConfig
from dsl_backend.gemm.small_m import Received, SmallMGemmBase, SmallMParams, StreamKWork
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.accumulators import fence_operand
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import TMA, Edge, Pipeline, Role, warpgroups

# Iterations that a CTA is behind its peers, so that their partial sums are there.
HEAD_START = 4


class SmallMGemm(SmallMGemmBase):
    """See `gemm/small_m.py`."""

    def __init__(self, key: GemmKey[SmallMConfig]):
        super().__init__(key, ScalarArithmetic(apart=key.apart))
        config = key.config
        self.split_tokens, self.threads = config.split_tokens, config.threads
        self.trades_registers = config.trades_registers
        self.load_edge = Edge("x and weights", TMA, self.consumers, self.stages)

    @property
    def consumers(self) -> Role:
        """Who gives a stage back: products of a warpgroup read it, and one thread knows when they are done."""
        return warpgroups(self.groups)

    def release(self, pipeline: Pipeline, position, thread):
        """By a consumer's threads: give a position's stage back."""
        pipeline.warpgroup_release(position, thread)

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
            use_pdl=True,
        )

    @property
    def mma_dtypes(self) -> tuple[Any, Any]:
        """Of weights and of x, as a wgmma takes them."""
        return self.weight_dtype, self.x_dtype

    def tiled_mma(self) -> cute.TiledMma:
        """A warpgroup's products of 64 rows of weights with its tokens."""
        return hopper_helpers.make_trivial_tiled_mma(
            *self.mma_dtypes,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (1, 1, 1),
            (MMA_M, self.tokens),
        )

    def allocate_weights(self, smem: SmemAllocator, sW_layout) -> cute.Tensor:
        """Stages of weights in shared memory."""
        return smem.allocate_tensor(self.weight_dtype, sW_layout.outer, byte_alignment=1024, swizzle=sW_layout.inner)

    @cute.kernel
    def kernel(
        self,
        params: SmallMParams,
        tiled_mma: cute.TiledMma,
        sW_layout: cute.Layout | cute.ComposedLayout,
        sX_layout: cute.ComposedLayout,
    ):
        smem = SmemAllocator()
        sW = self.allocate_weights(smem, sW_layout)
        sX = smem.allocate_tensor(self.x_dtype, sX_layout.outer, byte_alignment=1024, swizzle=sX_layout.inner)
        pipeline = self.load_edge.allocate(smem)
        received = self.received(smem)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                pipeline.init()
                self.expect_partials(received)
            cute.arch.mbarrier_init_fence()
            for atom in (params.tma_atom_w, params.tma_atom_x):
                if cutlass.const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        self.meet_begin()
        work = self.begin(params, smem)
        group = warp // (WARPGROUP // 32)
        if group == self.groups:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == self.groups * (WARPGROUP // 32):
                self.load(params, sW, sX, pipeline, work)
            self.meet_end()
        else:
            if cutlass.const_expr(self.trades_registers):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.mma(params, tiled_mma, sW, sX, pipeline, received, work, group)

    def weight_operands(self, tiled_mma: cute.TiledMma, thr_mma: cute.TiledMma, sW: cute.Tensor, row_tile):
        """What the products of both boxes have of the weights: descriptors of 64 rows of all stages."""
        boxes = cute.local_tile(sW, (MMA_M, self.tile_k), (None, 0, None))
        return tuple(
            tiled_mma.make_fragment_A(thr_mma.partition_A(boxes[None, None, first + row_tile, None]))
            for first in (0, self.box // MMA_M)
        )

    @cute.jit
    def mma(
        self,
        params: SmallMParams,
        tiled_mma: cute.TiledMma,
        sW: cute.Tensor,
        sX: cute.Tensor,
        pipeline: Pipeline,
        received: Received,
        work: StreamKWork,
        group: cutlass.Int32,
    ):
        """A consumer warpgroup: 64 rows of each box and some tokens, of every tile in the CTA's range."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        thr_mma = tiled_mma.get_slice(thread)
        row_tile = 0 if cutlass.const_expr(self.split_tokens) else group
        token_tile = group if cutlass.const_expr(self.split_tokens) else 0
        tCrW_0, tCrW_1 = self.weight_operands(tiled_mma, thr_mma, sW, row_tile)
        tCrX = tiled_mma.make_fragment_B(
            thr_mma.partition_B(cute.local_tile(sX, (self.tokens, self.tile_k), (token_tile, 0, None)))
        )
        shape = tiled_mma.partition_shape_C((MMA_M, self.tokens))
        acc_0, acc_1 = (cute.make_rmem_tensor(shape, cutlass.Float32) for _ in range(2))
        # A kernel before this one may write the residual, or read what this one writes.
        dependent_launch.wait()
        operands = (tCrW_0, tCrW_1, tCrX)
        if cutlass.const_expr(self.stream_k):
            self.mma_stream_k(params, tiled_mma, acc_0, acc_1, operands, pipeline, work, group, thread)
        else:
            self.meet_end()
            self.mma_split_k(params, tiled_mma, acc_0, acc_1, operands, pipeline, received, work, group, thread)

    def place_of(self, work: StreamKWork, tile: cutlass.Int32, group: cutlass.Int32):
        """(tile of the output's columns, 64 rows of each box, first token) of a warpgroup in a tile."""
        row_tile, token_tile = (0, group) if self.split_tokens else (group, 0)
        token = tile // work.n_tiles * self.tile_tokens + token_tile * self.tokens
        return tile % work.n_tiles, row_tile, token

    @cute.jit
    def mma_stream_k(
        self,
        params: SmallMParams,
        tiled_mma: cute.TiledMma,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        pipeline: Pipeline,
        work: StreamKWork,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Each tile of the CTA's range; `operands`: fragments of both boxes and of x."""
        first_tile, tiles = self.tile_range(work)
        for tile in cutlass.range(first_tile, first_tile + tiles, unroll=1):
            tile_start = tile * work.k_tiles
            start = cutlass.max(work.start, tile_start)
            end = cutlass.min(work.end, tile_start + work.k_tiles)
            missing = tile_start + work.k_tiles - end
            # The next CTA began with the missing iterations. Once it is done with them, its sums are added before this
            # CTA's products, and nothing is left to wait for behind the last weights.
            early = start == tile_start and missing > 0 and missing + HEAD_START <= start - work.start
            if early:
                acc_0.fill(0.0)
                acc_1.fill(0.0)
                self.add_partials(params, acc_0, acc_1, work, tile_start + work.k_tiles, group, thread)
            place = (params, work, group)
            first, count = start - work.start, end - start
            self.mainloop(tiled_mma, acc_0, acc_1, operands, pipeline, first, count, early, place, thread)
            wgmma.wait_group(0)
            fence_operand(acc_0)
            fence_operand(acc_1)
            self.release(pipeline, end - 1 - work.start, thread)
            if start > tile_start:
                self.store_partials(params, acc_0, acc_1, work.worker, group, thread)
            else:
                if missing > 0 and not early:
                    self.add_partials(params, acc_0, acc_1, work, tile_start + work.k_tiles, group, thread)
                self.epilogue(params, work, acc_0, acc_1, *self.place_of(work, tile, group), thread)

    @cute.jit
    def mma_split_k(
        self,
        params: SmallMParams,
        tiled_mma: cute.TiledMma,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        pipeline: Pipeline,
        received: Received,
        work: StreamKWork,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """The CTA's part of a tile, and the epilogue of what the CTA finishes."""
        count = work.end - work.start
        place = (params, work, group)
        accumulate = cutlass.Boolean(False)
        self.mainloop(tiled_mma, acc_0, acc_1, operands, pipeline, cutlass.Int32(0), count, accumulate, place, thread)
        wgmma.wait_group(0)
        fence_operand(acc_0)
        fence_operand(acc_1)
        sum_0, sum_1 = self.sum_splits(received, acc_0, acc_1, group * WARPGROUP + thread)
        place = self.place_of(work, work.start // work.k_tiles, group)
        self.epilogue_of_split(params, sum_0, sum_1, *place, thread)

    @cute.jit
    def mainloop(
        self,
        tiled_mma: cute.TiledMma,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        operands: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        pipeline: Pipeline,
        start: cutlass.Int32,
        count: cutlass.Int32,
        accumulate: cutlass.Boolean,
        place: tuple[SmallMParams, StreamKWork, cutlass.Int32],
        thread: cutlass.Int32,
    ):
        """Issue the products of `count` positions, added to what the accumulators hold if `accumulate`.

        The last ones are still in flight when this returns.

        Args:
            place: parameters, the CTA's range and the warpgroup, for kernels whose sums have scales.
        """
        tiled_mma.set(wgmma.Field.ACCUMULATE, accumulate)
        # The first position stands alone: in the loop, accumulators then come from products only, and not from another
        # CTA's partial sums. Otherwise ptxas waits for each product before the next one.
        self.issue(tiled_mma, acc_0, acc_1, *operands, pipeline, start)
        for i in cutlass.range(1, count, unroll=1):
            self.issue(tiled_mma, acc_0, acc_1, *operands, pipeline, start + i)
            # The position before this one is done.
            wgmma.wait_group(1)
            self.release(pipeline, start + i - 1, thread)

    @cute.jit
    def issue(
        self,
        tiled_mma: cute.TiledMma,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        tCrW_0: cute.Tensor,
        tCrW_1: cute.Tensor,
        tCrX: cute.Tensor,
        pipeline: Pipeline,
        position: cutlass.Int32,
    ):
        """Issue the products of one position."""
        stage = pipeline.stage(position)
        pipeline.consumer_wait(position)
        wgmma.fence()
        for k_block in cutlass.range_constexpr(cute.size(tCrX, mode=[2])):
            coord = (None, None, k_block, stage)
            cute.gemm(tiled_mma, acc_0, tCrW_0[coord], tCrX[coord], acc_0)
            cute.gemm(tiled_mma, acc_1, tCrW_1[coord], tCrX[coord], acc_1)
            tiled_mma.set(wgmma.Field.ACCUMULATE, True)
        wgmma.commit_group()

    def sums(self, params: SmallMParams, of_column: list, sum_0, sum_1, token):
        """Both boxes' sums of a token with what `biases` has of their columns."""
        return sum_0 + of_column[0], sum_1 + of_column[1]

    def thread_column(self, row_tile, thread):
        """The first of a thread's columns in a tile; the other one is 8 behind it."""
        return row_tile * MMA_M + thread // 32 * 16 + thread % 32 // 4

    @cute.jit
    def epilogue(
        self,
        params: SmallMParams,
        work: StreamKWork,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        n_tile: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
        first_token: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Accumulators through bias, activation and residual to the output.

        Accumulators are transposed: a thread has tokens 8 j + 2 (lane % 4) + a of columns 16 warp + lane / 4 + 8 b.

        Args:
            n_tile: of the output's columns. row_tile: 64 rows of each box.
        """
        lane = thread % 32
        for b in cutlass.range_constexpr(2):
            column = n_tile * self.columns + self.thread_column(row_tile, thread) + 8 * b
            biases = self.biases(params, column)
            for j in cutlass.range_constexpr(self.tokens // 8):
                for a in cutlass.range_constexpr(2):
                    token = first_token + 8 * j + 2 * (lane % 4) + a
                    i = a + 2 * b + 4 * j
                    self.finish(params, *self.sums(params, biases, acc_0[i], acc_1[i], token), token, column)

    @cute.jit
    def epilogue_of_split(
        self,
        params: SmallMParams,
        sum_0: cute.Tensor,
        sum_1: cute.Tensor,
        n_tile: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
        first_token: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """The same for a thread's accumulators that this CTA of the cluster finishes."""
        first = self.first_finished(cute.arch.block_idx_in_cluster())
        for i in cutlass.range_constexpr(self.finished):
            # As a + 2 b + 4 j above.
            place = first + i
            token = self.finished_token(first_token + 8 * (place // 4) + 2 * (thread % 4) + place % 2, i)
            column = n_tile * self.columns + self.thread_column(row_tile, thread) + 8 * (place // 2 % 2)
            biases = self.biases(params, column)
            self.finish(params, *self.sums(params, biases, sum_0[i], sum_1[i], token), token, column)
