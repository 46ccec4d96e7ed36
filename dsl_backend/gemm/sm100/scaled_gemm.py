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
from dsl_backend.primitives.math import in_pairs, mul_pair
from dsl_backend.primitives.narrow_mma import E4M3, SCALE_ATOM_BYTES, NarrowMma
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.quant.cute.blocks import block_scale, converted
from dsl_backend.quant.format import SWIZZLED_ROWS


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
            inverse = 1.0 / params.mOutScale[0]
        else:
            global_scale = None if params.mOutGlobalScale is None else params.mOutGlobalScale[0]
            code, inverse = block_scale(self.out_format, values, global_scale)
            self.store_scale(params, code, row, column // self.out_group)
        words = converted(self.out_format, in_pairs(mul_pair, values, [inverse] * len(values)))
        for i in range(0, len(words), 2):
            vector = cute.make_rmem_tensor(2, cutlass.Int32)
            vector[0], vector[1] = words[i], words[i + 1]
            self.store_vector(vector, smem_address, self.out_bytes(first) + 4 * i)

    @cute.jit
    def store_scale(self, params: ScaledParams, scale: cutlass.Int32, row: cutlass.Int32, block: cutlass.Int32):
        """A byte to where `quant.reference.swizzled` has it, 0 to the padding of rows, none to that of columns.

        The tile that has the last row has all rows of padding.
        """
        rows, blocks = params.mOutScale.shape
        if row < rows and block * self.out_group < self.width(params):
            within = row % 32 * 16 + row % SWIZZLED_ROWS // 32 * 4 + block % 4
            offset = (row // SWIZZLED_ROWS * (blocks // 4) + block // 4) * SCALE_ATOM_BYTES + within
            scales = cute.make_tensor(params.mOutScale.iterator, cute.make_layout(cute.size(params.mOutScale)))
            scales[offset] = cutlass.Uint8(scale if row < params.mOut.shape[0] else cutlass.Int32(0))
