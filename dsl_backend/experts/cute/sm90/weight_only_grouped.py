# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM of experts in MXFP4 under bfloat16 on SM90, for any number of tokens.

Work tiles, gathered rows and the kernel are those of `grouped.py`. It reads the packed weights that
`weight_only_decode.py` reads: operands are swapped, so that weights are wgmma's A, which may come from registers, and a
tile's rows of x its N. Stages have half of the columns of packed tiles, as in `gemm/sm90/weight_only_gemm.py`.

A consumer has two packed tiles of each CTA's tile: gate rows and the up rows of the same columns, or of the second
product rows of two places. It unpacks one of them while the products of the other are in flight.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup as wgmma

from dsl_backend.experts.cute.grouped import GroupedParams, WorkTile, gemm_key
from dsl_backend.experts.cute.key import ProductKey
from dsl_backend.experts.cute.sm90.grouped import GroupedGemm
from dsl_backend.experts.weight_only_configs import WeightOnlyGroupedTiles
from dsl_backend.gemm.mxfp4_unpacking import Mxfp4Unpacking
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm90.configs import MMA_M
from dsl_backend.gemm.sm90.gemm import CONSUMER_BARRIER, Gemm
from dsl_backend.gemm.sm90.weight_only_gemm import HALVES, WeightOnlyGemm
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives.accumulators import fence_operand, words_of
from dsl_backend.primitives.copy import bulk_load
from dsl_backend.primitives.math import fma
from dsl_backend.primitives.pipeline import TMA, Edge, Pipeline, warps
from dsl_backend.quant.mxfp4_tiles import LOWERED, TILES
from dsl_backend.quant.weight_only import TILE_COLUMNS

# Packed tiles of a consumer.
BOXES = 2


class WeightOnlyGroupedGemm(Mxfp4Unpacking, GroupedGemm, WeightOnlyGemm):
    """One of the two products; see the module, and `experts/cute/grouped.py`."""

    def __init__(self, key: ProductKey):
        config = key.config
        assert isinstance(config, WeightOnlyGroupedTiles)
        Gemm.__init__(self, gemm_key(key, config))
        self.row_tiles, self.half_words = config.row_tiles, config.half_words
        self.mma_n, self.epi_tokens = config.tokens, config.epi_tokens
        self.epi_tile = (self.epi_tokens, MMA_M)
        # Every warp reads its own weights, and may be behind the others.
        self.load_edge = Edge("x and packed weights", TMA, warps(self.consumers * WARPGROUP // WARP), self.stages)
        self.set_up(key)

    def launch_kernel(self, params: GroupedParams, ctas, stream):
        """Launch so many CTAs."""
        tiled_mma = self.tiled_mma(self.mma_n)
        self.kernel(params, tiled_mma, *self.smem_layouts(self.row_tiles * MMA_M), self.sOut_layout()).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    # Loads

    def weights_copy(self, load, weight: cute.Tensor):
        """(None, packed weights [E, parts * row tiles, column tiles, words]): bulk copies have no descriptor."""
        return None, weight

    def partition_weights(self, params: GroupedParams, sW: cute.Tensor):
        """(sW, mW): bulk copies need no partition."""
        return sW, params.mW

    def load_weights(
        self, params: GroupedParams, tWgW: cute.Tensor, tWsW: cute.Tensor, work, k_tile, stage, mbar, sScales=None
    ):
        """Half of each packed tile of a work tile, and as many words behind it as scales have.

        Behind the second half those are them.
        """
        size, half = 4 * self.half_words, 4 * TILES.value_words // HALVES
        column = k_tile // HALVES * (4 * TILES.tile_words) + k_tile % HALVES * half
        of_expert = tWgW.iterator.toint() + cutlass.Int64(work.expert) * (4 * tWgW.stride[0]) + column
        of_part = tWgW.shape[1] // self.parts
        with cute.arch.elect_one():
            for i in range(self.row_tiles):
                row_tile = self.packed_row(of_part, work.n_tile, i)
                source = of_expert + cutlass.Int64(row_tile) * (4 * tWgW.stride[1])
                bulk_load(source, tWsW.iterator + tWsW.layout((0, i, stage)), size, mbar)

    # Products

    def consumer_operands(self, tiled_mma: cute.TiledMma, sX: cute.Tensor, sW: cute.Tensor, group, thread):
        """(0, sW [words, box, stage], tCrX, acc): a consumer has all rows of a tile, and its own packed tiles."""
        of_box = self.half_words * self.consumers
        layout = cute.make_layout(
            (self.half_words, BOXES, self.stages), stride=(1, of_box, of_box * self.row_tiles // self.consumers)
        )
        boxes = cute.make_tensor(sW.iterator + group * self.half_words, layout)
        tCrX = tiled_mma.make_fragment_B(tiled_mma.get_slice(thread).partition_B(sX))
        acc_shape = tiled_mma.partition_shape_C((BOXES * MMA_M, self.mma_n))
        return 0, boxes, tCrX, cute.make_rmem_tensor(acc_shape, cutlass.Float32)

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
        """A tile's products from position `start` on. All stages are given back."""
        acc.fill(0.0)
        accs = [cute.append_ones(acc[None, box, None], up_to_rank=3) for box in range(BOXES)]
        fragment = tiled_mma.partition_shape_A((MMA_M, TILE_COLUMNS))
        tCrWs = [cute.make_rmem_tensor(fragment, self.x_dtype) for _ in range(BOXES)]
        for pair in cutlass.range(k_tiles // HALVES, unroll=1):
            position = start + pair * HALVES
            stages = [pipeline.stage(position + half) for half in range(HALVES)]
            for half in cutlass.range_constexpr(HALVES):
                pipeline.consumer_wait(position + half)
            for box in cutlass.range_constexpr(BOXES):
                self.unpack_box(sW, stages, box, thread, tCrWs[box])
                # What was unpacked stays in front of the wait.
                fence_operand(words_of(tCrWs[box]))
                self.await_again(pipeline, position)
                # Of the other box; of box 1 they are the last ones of the position before.
                wgmma.wait_group(0)
                if cutlass.const_expr(box == 0):
                    if pair > 0:
                        self.release(pipeline, position - HALVES, thread)
                self.multiply_stages(self.tiled_mma(self.mma_n), accs[box], tCrWs[box], tCrX, stages, accumulate=True)
        wgmma.wait_group(0)
        fence_operand(acc)
        self.release(pipeline, start + k_tiles - HALVES, thread)

    def release(self, pipeline: Pipeline, position: cutlass.Int32, thread: cutlass.Int32):
        """Give the stages of a packed tile back, each warp for itself."""
        for half in range(HALVES):
            pipeline.warp_release(position + half, thread % WARP)

    def unpack_box(self, sW: cute.Tensor, stages: list, box: int, thread: cutlass.Int32, tCrW: cute.Tensor):
        """A thread's weights of a packed tile whose halves are in two stages, as the A operand."""
        pieces = [sW[None, box, stage].iterator for stage in stages]
        self.unpack_tile(pieces, pieces[-1] + TILES.value_words // HALVES, thread, tCrW)

    # Epilogue

    @cute.jit
    def epilogue(
        self,
        params: GroupedParams,
        acc: cute.Tensor,
        sOut: cute.Tensor,
        work: WorkTile,
        first: cutlass.Int32 | int,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Accumulators to the output, 64 columns of `epi_tokens` rows at a time, as far as there are rows."""
        for piece in cutlass.range_constexpr(self.mma_n // self.epi_tokens):
            top = piece * self.epi_tokens
            if top < work.rows:
                for box in cutlass.range_constexpr(BOXES // self.parts):
                    column = work.n_tile * self.columns + (box * self.consumers + group) * MMA_M
                    self.finish(params, acc, work, piece, box, column, thread)
                    of_box = cute.append_ones(acc[None, box, None], up_to_rank=3)
                    # All threads have read what was staged last.
                    cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
                    for b in cutlass.range_constexpr(2):
                        self.stage_out(sOut, of_box, group, thread, piece, b)
                    cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
                    self.store_rows(params, sOut[None, None, group], work, top, column, thread, self.epi_tile)

    @cute.jit
    def finish(
        self,
        params: GroupedParams,
        acc: cute.Tensor,
        work: WorkTile,
        piece: cutlass.Constexpr[int],
        box: cutlass.Constexpr[int],
        first_column: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Sums of a piece through scale, bias and activation, in place of those of `box`.

        wgmma's accumulators: a thread has rows 8 j + 2 (lane % 4) + a of x, and columns 16 warp + lane / 4 + 8 b.
        """
        column = first_column + thread // WARP * 16 + thread % WARP // 4
        n = params.mOut.shape[1]
        for b in cutlass.range_constexpr(2):
            biases = [cutlass.Float32(0.0)] * self.parts
            if cutlass.const_expr(self.has_bias):
                mBias = params.mBias[work.expert, None]
                biases = [bias_of(mBias, column + 8 * b, part, n, self.interleaved) for part in range(self.parts)]
            count = cutlass.const_expr(self.epi_tokens // 8)
            for j in cutlass.range_constexpr(piece * count, (piece + 1) * count):
                factors = [cutlass.Float32(2.0**LOWERED)] * 2
                if cutlass.const_expr(self.scaled):
                    places = [8 * j + 2 * (thread % 4) + a for a in range(2)]
                    rows = [work.first_row + cutlass.min(place, work.rows - 1) for place in places]
                    factors = [params.mScale[params.mPairs[row]] * 2.0**LOWERED for row in rows]
                values = [
                    [fma(acc[(a, b, j), box + part, 0], factors[a], biases[part]) for a in range(2)]
                    for part in range(self.parts)
                ]
                results = self.activate(*values) if cutlass.const_expr(self.gated) else values[0]
                for a in cutlass.range_constexpr(2):
                    acc[(a, b, j), box, 0] = results[a]
