# SPDX-License-Identifier: Apache-2.0
"""The products of experts for few tokens on SM90, of MXFP4 weights that are unpacked to bfloat16 on the way to wgmma.

Operands are swapped, so that weights are wgmma's A, which may come from registers. Packed tiles arrive by bulk copies
in the order in which threads read them (`quant/mxfp4_tiles.py`). An element and its scale are one exact product: sums
are those of a layer in bfloat16, but for a power of two that the epilogue multiplies them with.

A consumer's two boxes take turns: it unpacks one while the products of the other are in flight.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup as wgmma

from dsl_backend.experts.cute.decode import DecodeParams, DecodeWork, gemm_key
from dsl_backend.experts.cute.key import ExpertsKey
from dsl_backend.experts.cute.packed_tiles import PackedTiles
from dsl_backend.experts.cute.sm90.decode import DecodeGemm
from dsl_backend.gemm.mxfp4_unpacking import PIECE_COLUMNS, WORDS
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.sm90.configs import MMA_M
from dsl_backend.gemm.sm90.small_m import SmallMGemm
from dsl_backend.gemm.sm90.weight_only_configs import WeightOnlyConfig
from dsl_backend.gemm.sm90.weight_only_small_m import WeightOnlySmallMGemm
from dsl_backend.gemm.small_m import SmallMGemmBase
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.quant.mxfp4_tiles import LOWERED, TILES
from dsl_backend.quant.weight_only import TILE_COLUMNS


class WeightOnlyDecodeGemm(PackedTiles, DecodeGemm, WeightOnlySmallMGemm):
    """See the module, and `experts/cute/decode.py`."""

    kind: Any

    def __init__(self, key: ExpertsKey, config: WeightOnlyConfig, first: bool):
        SmallMGemm.__init__(self, gemm_key(key, config, first))
        self.set_up(key)
        self.kind = TILES
        self.row_tiles, self.stage_bytes = config.row_tiles, config.packed_stage_bytes(TILES)

    @cute.jit
    def load(self, params: Any, sW: cute.Tensor, sX: cute.Tensor, pipeline: Pipeline, work: Any):
        """The load warp; places are those of the list of experts."""
        SmallMGemmBase.load(self, params, sW, sX, pipeline, work)

    # Products

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
        place: tuple[DecodeParams, DecodeWork, cutlass.Int32],
        thread: cutlass.Int32,
    ):
        """Add the products of `count` positions to what the accumulators hold if `accumulate`, or to nothing.

        All but the last position are given back. The last products are still in flight when this returns.
        """
        sW, _, tCrX = operands
        group = place[2]
        fragment = tiled_mma.partition_shape_A((MMA_M, TILE_COLUMNS))
        tCrW_0, tCrW_1 = (cute.make_rmem_tensor(fragment, self.x_dtype) for _ in range(2))
        # The first position stands alone, as in `SmallMGemm.mainloop`.
        stage = pipeline.stage(start)
        pipeline.consumer_wait(start)
        self.unpack_box(sW, stage, group, thread, tCrW_0)
        self.multiply_unpacked(self.tiled_mma(), acc_0, tCrW_0, tCrX, stage, accumulate)
        self.unpack_box(sW, stage, self.groups + group, thread, tCrW_1)
        wgmma.wait_group(0)
        self.multiply_unpacked(self.tiled_mma(), acc_1, tCrW_1, tCrX, stage, accumulate)
        for i in cutlass.range(1, count, unroll=1):
            stage = pipeline.stage(start + i)
            pipeline.consumer_wait(start + i)
            self.unpack_box(sW, stage, group, thread, tCrW_0)
            # Of box 1, and so of the position before.
            wgmma.wait_group(0)
            self.release(pipeline, start + i - 1, thread)
            self.multiply_unpacked(self.tiled_mma(), acc_0, tCrW_0, tCrX, stage, accumulate=True)
            self.unpack_box(sW, stage, self.groups + group, thread, tCrW_1)
            wgmma.wait_group(0)
            self.multiply_unpacked(self.tiled_mma(), acc_1, tCrW_1, tCrX, stage, accumulate=True)

    def unpack_box(
        self, sW: cute.Tensor, stage: cutlass.Int32, row_tile: cutlass.Int32, thread: cutlass.Int32, tCrW: cute.Tensor
    ):
        """A thread's weights of a packed tile in a stage, as the A operand."""
        tile = sW[None, row_tile, stage].iterator
        pieces = [tile + piece * (WARPGROUP * WORDS) for piece in range(TILE_COLUMNS // PIECE_COLUMNS)]
        self.unpack_tile(pieces, tile + TILES.value_words, thread, tCrW)

    @cute.jit
    def epilogue(
        self,
        params: DecodeParams,
        work: DecodeWork,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        n_tile: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
        first_token: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """As `DecodeGemm`'s, of sums that are 2^-LOWERED too small."""
        for i in cutlass.range_constexpr(cute.size(acc_0)):
            acc_0[i] = acc_0[i] * 2.0**LOWERED
            acc_1[i] = acc_1[i] * 2.0**LOWERED
        DecodeGemm.epilogue(self, params, work, acc_0, acc_1, n_tile, row_tile, first_token, thread)
