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
from dsl_backend.primitives.narrow_mma import E4M3, NarrowMma
from dsl_backend.primitives.pipeline import Pipeline


@dataclass(frozen=True)
class ScaledParams(GemmParams):
    """With the scales, float32: mXScale [1] or [m], mWeightScale [1] or [parts * n]."""

    mXScale: cute.Tensor
    mWeightScale: cute.Tensor


class ScaledGemm(Gemm):
    """See `gemm/tiled.py` and `gemm/scaled.py`."""

    def __init__(self, key: ScaledKey[GemmConfig]):
        super().__init__(key)
        self.x_format, self.weight_format = key.x, key.weight
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
        return ScaledParams(*values, operands.x_scale, operands.weight_scale)

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
