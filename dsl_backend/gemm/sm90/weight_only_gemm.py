# SPDX-License-Identifier: Apache-2.0
"""The persistent GEMM of weights of 4 or 8 bits on SM90, for any number of rows.

It reads the packed weights that `weight_only_small_m.py` reads: operands are swapped, products are exact but for their
float32 sums, and the sums of each 128 columns are multiplied by their rows' scales when they are added up.

A tile has 128 rows of weights, 64 of each of two consumers, and up to 128 tokens. A stage has half of the columns of a
packed tile: each consumer unpacks one half while the products of the other are in flight. What it adds up is not hidden
behind its own products, but behind those of the other consumer.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu import warpgroup as wgmma

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.sizes import BLOCK_K, WARP, WARPGROUP
from dsl_backend.gemm.sm90.configs import MMA_M
from dsl_backend.gemm.sm90.gemm import CONSUMER_BARRIER, Gemm
from dsl_backend.gemm.sm90.unpacking import Unpacking
from dsl_backend.gemm.sm90.weight_only_configs import WeightOnlyGemmConfig
from dsl_backend.gemm.tiled import GemmParams
from dsl_backend.gemm.views import bias_of
from dsl_backend.gemm.weight_only import WeightOnlyKey
from dsl_backend.primitives.accumulators import cvt_f16x2, fence_operand, words_of
from dsl_backend.primitives.copy import bulk_load, store_matrices_transposed
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import TMA, Edge, Pipeline, warps
from dsl_backend.quant.weight_only import TILE_COLUMNS

HALVES = TILE_COLUMNS // BLOCK_K


class WeightOnlyGemm(Unpacking, Gemm):
    """See `gemm/tiled.py`, whose tile_m are tokens here; a row in memory of the output is a column of accumulators."""

    def __init__(self, key: WeightOnlyKey[WeightOnlyGemmConfig]):
        super().__init__(key)
        self.set_format(key)
        config = key.config
        self.half_words, self.weight_bytes = config.half_words(key.kind), config.packed_bytes(key.kind)
        self.mma_n, self.epi_tokens = config.tokens, config.epi_tokens
        self.epi_tile = (self.epi_tokens, MMA_M)
        # Every warp reads its own weights, and may be behind the others.
        readers = warps(self.consumers * WARPGROUP // WARP)
        self.load_edge = Edge("x and packed weights", TMA, readers, self.stages)

    def tiled_mma(self, columns: int) -> cute.TiledMma:
        """A warpgroup's products of 64 rows of weights in registers with its tokens."""
        return self.unpacked_mma(columns)

    def weight_copy(self, operands: GemmOperands, weight_op):
        """(None, packed weights): bulk copies have no descriptor."""
        return None, operands.weight

    def weight_partition(self, params: GemmParams, sW: cute.Tensor):
        """(sW, mW): bulk copies need no partition."""
        return sW, params.mW

    def smem_layouts(self, weight_rows: int):
        """(sX_layout, sW_layout): stages of x, and of halves of packed tiles."""
        sX_layout, _ = super().smem_layouts(weight_rows)
        return sX_layout, cute.make_layout((self.half_words, weight_rows // MMA_M, self.stages))

    def allocate_weights(self, smem: SmemAllocator, sW_layout: cute.Layout) -> cute.Tensor:
        """Stages of halves of packed tiles in shared memory."""
        return smem.allocate_tensor(cutlass.Int32, sW_layout, byte_alignment=128)

    def k_tiles(self, params):
        """They come in pairs, those of a packed tile."""
        return HALVES * cute.ceil_div(params.mX.shape[1], TILE_COLUMNS)

    def load_boxes(
        self, params: GemmParams, tWgW: cute.Tensor, tWsW: cute.Tensor, n_tile, k_tile, stage, cta_rank, mbar
    ):
        """Each consumer's half of a packed tile, and as many bytes behind it as scales and zero points have.

        Behind the second half those are them. One copy for each is what the load warp has time for. Past the last row
        the last tile is loaded.
        """
        size, half = 4 * self.half_words, 4 * self.kind.value_words // HALVES
        column = k_tile // HALVES * (4 * self.kind.tile_words) + k_tile % HALVES * half
        with cute.arch.elect_one():
            for i in range(self.consumers):
                row_tile = cutlass.min(n_tile * self.consumers + i, tWgW.shape[0] - 1)
                rows = tWgW.iterator.toint() + cutlass.Int64(row_tile) * (4 * tWgW.stride[0])
                bulk_load(rows + column, tWsW.iterator + tWsW.layout((0, i, stage)), size, mbar)

    def consumer_operands(self, tiled_mma: cute.TiledMma, sX: cute.Tensor, sW: cute.Tensor, group, thread):
        """(row_tile, packed weights, tCrX, acc): which 64 rows of a tile's weights a consumer has, and its operands."""
        tCrX = tiled_mma.make_fragment_B(tiled_mma.get_slice(thread).partition_B(sX))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((MMA_M, self.mma_n)), cutlass.Float32)
        return group, sW[None, group, None], tCrX, acc

    @cute.jit
    def init_acc(
        self,
        params: GemmParams,
        acc: cute.Tensor,
        first_column: cutlass.Int32,
        row_tile: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Accumulators start with the bias of their rows."""
        column = first_column + row_tile * MMA_M + thread // WARP * 16 + thread % WARP // 4
        for b in cutlass.range_constexpr(2):
            value = bias_of(params.mBias, column + 8 * b, 0, params.mOut.shape[1], False)
            for j in cutlass.range_constexpr(self.mma_n // 8):
                for a in cutlass.range_constexpr(2):
                    acc[(a, b, j), 0, 0] = value

    @cute.jit
    def mainloop(
        self,
        tiled_mma: cute.TiledMma,
        acc: cute.Tensor,
        sW: cute.Tensor,
        tCrX: cute.Tensor,
        pipeline: Pipeline,
        start: cutlass.Int32,
        k_tiles: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """A tile's products from position `start` on, added to the bias if there is one. All stages are given back."""
        if cutlass.const_expr(not self.biased):
            acc.fill(0.0)
        part = cute.make_rmem_tensor(acc.shape, cutlass.Float32)
        tCrW = cute.make_rmem_tensor(tiled_mma.partition_shape_A((MMA_M, TILE_COLUMNS)), self.x_dtype)
        words = cute.make_rmem_tensor(self.kind.value_words // WARPGROUP, cutlass.Int32)
        scales, next_scales = (cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(2))
        offsets = cute.make_rmem_tensor(2, cutlass.Int32)
        self.read(sW, pipeline, start, thread, words, offsets, next_scales)
        pairs = k_tiles // HALVES
        for pair in cutlass.range(pairs, unroll=1):
            position = start + pair * HALVES
            self.unpack_words(words, [offsets[0], offsets[1]], tCrW)
            for i in range(2):
                scales[i] = next_scales[i]
            fence_operand(words_of(tCrW))
            self.await_again(pipeline, position)
            stages = [pipeline.stage(position + i) for i in range(HALVES)]
            self.multiply_stages(self.tiled_mma(self.mma_n), part, tCrW, tCrX, stages, accumulate=False)
            if pair + 1 < pairs:
                self.read(sW, pipeline, position + HALVES, thread, words, offsets, next_scales)
            wgmma.wait_group(0)
            fence_operand(part)
            for i in range(HALVES):
                pipeline.warp_release(position + i, thread % WARP)
            self.add_scaled(acc, part, scales)

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
        """Nothing is in flight behind the mainloop."""

    def read(
        self,
        sW: cute.Tensor,
        pipeline: Pipeline,
        position: cutlass.Int32,
        thread: cutlass.Int32,
        words: cute.Tensor,
        offsets: cute.Tensor,
        scales: cute.Tensor,
    ):
        """A thread's words of a packed tile, whose halves are at this position and the next one, and of its rows."""
        values, count = self.kind.value_words // HALVES, cute.size(words) // HALVES
        for i in range(HALVES):
            pipeline.consumer_wait(position + i)
            half = sW[None, pipeline.stage(position + i)].iterator
            self.read_words(half, thread, cute.make_tensor(words.iterator + i * count, cute.make_layout(count)))
            if i == HALVES - 1:
                offsets[0], offsets[1] = self.read_rows(half + values, thread, scales)

    def sOut_layout(self) -> cute.ComposedLayout:
        """Of the consumers' output buffers: [epi_tokens, 64 columns, consumer], rows of 128 bytes."""
        plain = cute.make_ordered_layout((*self.epi_tile, self.consumers), order=(1, 0, 2))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, plain)

    def sOut_tile(self, sOut_layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """One of these buffers; see `SwapABGemm.sOut_tile`."""
        return cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout(self.epi_tile, stride=(MMA_M, 1))
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
        row_tile: cutlass.Int32,
    ):
        """Accumulators of a consumer's rows of a CTA's tile to the output, `epi_tokens` tokens at a time."""
        gOut = cute.local_tile(params.mOut, self.epi_tile, (None, None))
        tOsO, tOgO = cpasync.tma_partition(
            params.tma_atom_out, 0, cute.make_layout(1), cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        pieces = cutlass.const_expr(self.mma_n // self.epi_tokens)
        for piece in cutlass.range_constexpr(pieces):
            # The TMA store that was issued last has read this buffer.
            if thread < WARP:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
            for b in cutlass.range_constexpr(2):
                self.stage_out(sOut, acc, group, thread, piece, b)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
            if thread < WARP:
                # Stores are awaited by the thread that issued them: `elect_one` elects the same one every time.
                with cute.arch.elect_one():
                    cute.copy(
                        params.tma_atom_out,
                        tOsO[None, group],
                        tOgO[None, m_tile * pieces + piece, n_tile * self.consumers + row_tile],
                    )
                    cute.arch.cp_async_bulk_commit_group()

    def stage_out(self, sOut: cute.Tensor, acc: cute.Tensor, group, thread, piece: int, b: int):
        """A thread's accumulators of row lane / 4 + 8 b of its warp's 16 to a buffer, in pairs of neighbouring tokens.

        wgmma's accumulators: a thread has tokens 8 j + 2 (lane % 4) + a of rows 16 warp + lane / 4 + 8 b.
        """
        row_bytes = MMA_M * 2
        count = self.epi_tokens // 8
        words = [
            cvt_f16x2(acc[(0, b, j), 0, 0], acc[(1, b, j), 0, 0], self.out_dtype)
            for j in range(piece * count, (piece + 1) * count)
        ]
        lane, vector = thread % WARP, thread // WARP * 2 + b
        row = cutlass.Int32(sOut.iterator.toint()) + (group * self.epi_tokens + lane) * row_bytes
        # Each store begins at a multiple of 8 rows, as the swizzle does.
        address = row + (vector ^ (lane % 8)) * 16
        done = 0
        while done < len(words):
            together = next(together for together in (4, 2, 1) if done + together <= len(words))
            store_matrices_transposed(address + done * 8 * row_bytes, words[done : done + together])
            done += together
