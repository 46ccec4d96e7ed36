# SPDX-License-Identifier: Apache-2.0
"""The persistent GEMM of e4m3 operands on SM100, whose scales are those of tensors, rows of x and rows of weights.

The products are those of kind::f8f6f4, summed in float32; the epilogue multiplies by the scales. All else is
`gemm.Gemm`.
"""

from dataclasses import dataclass, fields

import cutlass
from cutlass import cute

from dsl_backend.gemm.args import GemmOperands, ScaledArgs
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sizes import BLOCK_BYTES
from dsl_backend.gemm.sm100.configs import MMA_M, GemmConfig
from dsl_backend.gemm.sm100.gemm import VECTOR, Gemm
from dsl_backend.gemm.tiled import GemmParams
from dsl_backend.primitives import tmem
from dsl_backend.primitives.math import e4m3_of, e8m0_of, f32_to_e2m1, f32_to_e4m3, in_pairs, mul_pair, tree_max
from dsl_backend.primitives.narrow_mma import E4M3, SCALE_ATOM_BYTES, NarrowMma
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.quant.format import E2M1_MAX, MXFP8, SWIZZLED_ROWS


@dataclass(frozen=True)
class ScaledParams(GemmParams):
    """With the scales, float32: mXScale [1] or [m], mWeightScale [1] or [parts * n]; and the output's.

    mOutScale: float32 [1], or swizzled bytes that are written. mOutGlobalScale: float32 [1]. Either may be missing.
    """

    mXScale: cute.Tensor
    mWeightScale: cute.Tensor
    mOutScale: cute.Tensor
    mOutGlobalScale: cute.Tensor


class ScaledGemm(Gemm):
    """See `gemm/tiled.py` and `gemm/scaled.py`."""

    def __init__(self, key: ScaledKey[GemmConfig]):
        super().__init__(key)
        self.x_format, self.weight_format, self.out_format = key.x, key.weight, key.out
        if key.out is not None:
            self.out_packed, self.out_group = key.out.packed, key.out.block_columns or VECTOR
        self.narrow_mma = NarrowMma(
            kind=E4M3, m=MMA_M * self.cluster, n=2 * self.box_n, cta_group=2 if self.two_cta else 1
        )

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ScaledArgs, stream):
        """Launch; see `args.scaled_launch_args`."""
        self.launch(args.operands, args.max_ctas, stream)

    def params(self, operands, x_op, weight_op, sOut_tile, epi_tile):
        """The kernel's, with TMA descriptors; arguments as the base's."""
        plain = GemmOperands(operands.x, operands.weight, operands.bias, None, operands.out)
        base = super().params(plain, x_op, weight_op, sOut_tile, epi_tile)
        values = [getattr(base, field.name) for field in fields(base)]
        scales = operands.x_scale, operands.weight_scale, operands.out_scale, operands.out_global_scale
        return ScaledParams(*values, *scales)

    def tiled_mma(self):
        """None: `issue` needs the addresses of stages alone."""

    @cute.jit
    def issue(
        self,
        tiled_mma,
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
        x_address, w_address = sX.iterator.toint(), sW.iterator.toint()
        for tile in cutlass.range(tiles, unroll=1):
            acc_pipeline.producer_acquire(tile)
            tmem.after_sync()
            accumulator = tmem_ptr.toint() + acc_pipeline.stage(tile) * (2 * self.box_n)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                position = tile * k_tiles + k_tile
                stage = pipeline.stage(position)
                pipeline.consumer_wait(position)
                self.narrow_mma.issue(
                    accumulator,
                    x_address + stage * (self.tile_m * BLOCK_BYTES),
                    w_address + stage * (self.weight_rows * BLOCK_BYTES),
                    k_tile > 0,
                )
                self.commit(pipeline.mbar_empty + stage)
            self.commit(acc_pipeline.full(tile))

    @cute.jit
    def row_scale(self, params: ScaledParams, row: cutlass.Int32):
        """The scale of a row of x; any past the last."""
        if cutlass.const_expr(self.x_format.block_rows is None):
            return params.mXScale[0]
        return params.mXScale[cutlass.min(row, params.mOut.shape[0] - 1)]

    def with_scales(self, params, values, row_scale, column):
        """8 accumulators of neighbouring columns of each part times the weights' scales, then x's."""
        if self.weight_format.block_rows is None:
            by_part = [[params.mWeightScale[0]] * VECTOR] * self.parts
        else:
            by_part = self.of_columns(params, params.mWeightScale, column)
        rows = [row_scale] * VECTOR
        return [
            in_pairs(mul_pair, in_pairs(mul_pair, part, scales), rows)
            for part, scales in zip(values, by_part, strict=True)
        ]

    def stage_out(self, params, smem_address, first: int, values: list, row, column):
        """Neighbouring columns of the output, quantised where it is, into shared memory."""
        if self.out_format is None:
            super().stage_out(params, smem_address, first, values, row, column)
            return
        if self.out_format.block_columns is None:
            scale = 1.0 / params.mOutScale[0]
        else:
            scale = self.block_scale(params, values, row, column)
        scaled = in_pairs(mul_pair, values, [scale] * len(values))
        words = []
        if self.out_packed > 1:
            words = [f32_to_e2m1(*scaled[i : i + 8]) for i in range(0, len(scaled), 8)]
        else:
            words = [f32_to_e4m3(*scaled[i : i + 4]) for i in range(0, len(scaled), 4)]
        for i in range(0, len(words), 2):
            vector = cute.make_rmem_tensor(2, cutlass.Int32)
            vector[0], vector[1] = words[i], words[i + 1]
            self.store_vector(vector, smem_address, self.out_bytes(first) + 4 * i)

    def block_scale(self, params, values: list, row, column):
        """What a block's values are multiplied by. The scale itself goes to the consumer's layout."""
        largest = tree_max([cute.math.absf(value) for value in values])
        if self.out_format == MXFP8:
            exponent, scale = e8m0_of(largest / self.out_format.largest)
        else:
            global_scale = params.mOutGlobalScale[0]
            exponent, scale = e4m3_of(largest / (E2M1_MAX * global_scale), global_scale)
        self.store_scale(params, exponent, row, column // self.out_group)
        return scale

    @cute.jit
    def store_scale(self, params: ScaledParams, scale: cutlass.Int32, row: cutlass.Int32, block: cutlass.Int32):
        """A byte to where `quant.reference.swizzled` has it, none to padding."""
        blocks = params.mOutScale.shape[1]
        if row < params.mOut.shape[0] and block * self.out_group < self.width(params):
            within = row % 32 * 16 + row % SWIZZLED_ROWS // 32 * 4 + block % 4
            offset = (row // SWIZZLED_ROWS * (blocks // 4) + block // 4) * SCALE_ATOM_BYTES + within
            scales = cute.make_tensor(params.mOutScale.iterator, cute.make_layout(cute.size(params.mOutScale)))
            scales[offset] = cutlass.Uint8(scale)
