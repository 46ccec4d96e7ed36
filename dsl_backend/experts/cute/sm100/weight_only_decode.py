# SPDX-License-Identifier: Apache-2.0
"""The products of experts for few tokens on SM100, of MXFP4 weights that are unpacked to bfloat16 in tensor memory.

Loads, lists and epilogue are those of `experts/cute/decode.py`. Weights are the M of products, and tcgen05 takes that
operand from tensor memory. Packed tiles arrive by bulk copies; two warpgroups, one for each box of weights, unpack them
in registers, in the order of a fragment of 16 rows, and store those to 16 lanes at a time.

A step of 256 rows and 128 columns is 17 KB of packed weights, for which an SM's share of memory needs 600 cycles.
Shared memory is busy for 270 of them: copies write packed weights, and warps read them. Weights that are unpacked to
shared memory would need another 1000, to be written and read. Integer units need 1150 by the emulator's clock: that is
what limits the kernel.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.experts.cute.decode import DecodeParams, DecodeWork
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.packed_tiles import PackedTiles
from dsl_backend.experts.cute.sm100.decode import DecodeGemm
from dsl_backend.experts.cute.sm100.unpacking import UnpackingWarps, WeightStages
from dsl_backend.experts.weight_only_sm100_configs import (
    DECODE_REGISTERS,
    UNPACKED_COLUMNS,
    UNPACKED_TMEM_STAGES,
    UnpackedSmallMConfig,
)
from dsl_backend.gemm.mxfp4_unpacking import PIECE_COLUMNS, WORDS
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import MMA_K, MMA_M
from dsl_backend.primitives import tmem
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.primitives.tcgen05_mma import Tcgen05Mma
from dsl_backend.quant.mxfp4_tiles import BLOCK_COLUMNS, LOWERED, TILES
from dsl_backend.quant.weight_only import TILE_COLUMNS, TILE_ROWS

# Packed tiles of a box, each in half of every warp's lanes.
BOX_TILES = MMA_M // TILE_ROWS
HALF_WARP = WARP // BOX_TILES
# Elements in a column of a lane.
PACKED = 2


class WeightOnlyDecodeGemm(UnpackingWarps, PackedTiles, DecodeGemm):
    """See the module, and `experts/cute/decode.py`."""

    registers = DECODE_REGISTERS

    def __init__(self, key: ExpertsKey, config: UnpackedSmallMConfig, first: bool):
        DecodeGemm.__init__(self, key, config, first)
        self.row_tiles, self.unpacked_column = config.row_tiles, config.unpacked_column
        self.mma_of_box = Tcgen05Mma(dtype=self.x_dtype, m=MMA_M, n=self.tokens, a_in_tmem=True)

    # Loads

    def allocate_weights(self, smem: SmemAllocator, sW_layout) -> WeightStages:
        """Stages of packed tiles, in place of those of `sW_layout`, and the barriers of unpacked ones."""
        return self.weight_stages(smem, TILES.tile_words, UNPACKED_TMEM_STAGES)

    def partition_weights(self, params: Any, sW: WeightStages):
        """(sPacked, mW): bulk copies need no partition."""
        return sW.sPacked, params.mW

    # From packed weights to operands

    @cute.jit
    def unpack(self, sW: WeightStages, pipeline: Pipeline, work: DecodeWork, tmem_ptr: cute.Pointer):
        """The warps that unpack: a box for each warpgroup, 16 rows of each of its packed tiles for a warp."""
        group, thread = self.unpacker()
        lanes = tmem_ptr.toint() + thread // WARP * (WARP * tmem.LANE_STRIDE)
        for position in cutlass.range(work.end - work.start, unroll=1):
            sW.unpacked.producer_acquire(position)
            tmem.after_sync()
            pipeline.consumer_wait(position)
            first = self.unpacked_column + sW.unpacked.stage(position) * UNPACKED_COLUMNS
            first += group * (TILE_COLUMNS // PACKED)
            for i in cutlass.range_constexpr(BOX_TILES):
                tile = sW.sPacked[None, group * BOX_TILES + i, pipeline.stage(position)].iterator
                exponents = self.exponents_of(tile + TILES.value_words, thread)
                for piece in cutlass.range_constexpr(TILE_COLUMNS // PIECE_COLUMNS):
                    source, block = tile + piece * (WARPGROUP * WORDS), piece * (PIECE_COLUMNS // BLOCK_COLUMNS)
                    steps = self.unpack_piece(source, exponents, thread, block)
                    column = first + piece * (PIECE_COLUMNS // PACKED)
                    words = [word for step in steps for word in step]
                    tmem.store_rows(words, lanes + i * (HALF_WARP * tmem.LANE_STRIDE) + column)
            cute.arch.fence_view_async_tmem_store()
            tmem.before_sync()
            self.hand_over(sW.unpacked, position)

    # Products

    @cute.jit
    def mma(
        self,
        tiled_mma: cute.TiledMma,
        sW: WeightStages,
        sX: cute.Tensor,
        pipeline: Pipeline,
        acc_pipeline: Pipeline,
        work: DecodeWork,
        tmem_ptr: cute.Pointer,
    ):
        """The MMA warp."""
        tCrX = tiled_mma.make_fragment_B(cute.tiled_divide(sX, (self.tokens, MMA_K)))
        # Its addresses count elements.
        of_box = cute.make_layout((1, 1, TILE_COLUMNS // MMA_K), stride=(0, 0, MMA_K))
        first_tile, tiles = self.tile_range(work)
        for tile in cutlass.range(tiles, unroll=1):
            _, _, start, end = self.iterations(work, first_tile + tile)
            acc_pipeline.producer_acquire(tile)
            tmem.after_sync()
            acc_ptr = tmem_ptr + acc_pipeline.stage(tile) * (2 * self.tokens)
            for iteration in cutlass.range(start, end, unroll=1):
                position = iteration - work.start
                stage = pipeline.stage(position)
                pipeline.consumer_wait(position)
                sW.unpacked.consumer_wait(position)
                tmem.after_sync()
                first = self.unpacked_column + sW.unpacked.stage(position) * UNPACKED_COLUMNS
                for i in cutlass.range_constexpr(2):
                    weights = cute.make_tensor(tmem_ptr + (first + i * (TILE_COLUMNS // PACKED)), of_box)
                    done = (pipeline.empty(position), sW.unpacked.empty(position)) if i else ()
                    x = tCrX[None, None, None, stage]
                    self.mma_of_box.issue(acc_ptr + i * self.tokens, weights, [x], iteration > start, commit=done)
            with cute.arch.elect_one():
                tcgen05.commit(acc_pipeline.full(tile))

    # Epilogue

    @cute.jit
    def store_columns(
        self,
        params: DecodeParams,
        work: DecodeWork,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        n_tile: cutlass.Int32,
        first_token: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """As `DecodeGemm`'s, of sums that are 2^-LOWERED too small, and of rows as `unpack` has stored them."""
        for i in cutlass.range(self.thread_tokens, unroll_full=True):
            acc_0[i] = acc_0[i] * 2.0**LOWERED
            acc_1[i] = acc_1[i] * 2.0**LOWERED
        DecodeGemm.store_columns(self, params, work, acc_0, acc_1, n_tile, first_token, row_of_lane(thread))


def row_of_lane(lane):
    """The row of a box whose sums are in a lane: warps have 16 rows of each packed tile."""
    return lane % WARP // HALF_WARP * TILE_ROWS + lane // WARP * HALF_WARP + lane % HALF_WARP
