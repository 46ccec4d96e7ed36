# SPDX-License-Identifier: Apache-2.0
"""The GEMM of e4m3 operands for few rows on SM90: sums of each k tile are promoted to float32.

Half of the bytes of 16-bit weights are streamed. `scaled_gemm` explains why sums are promoted. Products and additions
of a k tile are done while the next ones arrive.
"""

from dataclasses import dataclass, fields
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup as wgmma

from dsl_backend.gemm.args import GemmOperands, ScaledArgs, StreamKScratch
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sm90.configs import MMA_M
from dsl_backend.gemm.sm90.scaled_configs import ScaledSmallMConfig
from dsl_backend.gemm.sm90.scaled_gemm import AHEAD, as_e4m3
from dsl_backend.gemm.sm90.small_m import SmallMGemm
from dsl_backend.gemm.small_m import Received, SmallMParams, StreamKWork
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives.accumulators import fence_operand
from dsl_backend.primitives.math import f32_to_e4m3, fma
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.quant.format import GROUP


@dataclass(frozen=True)
class ScaledSmallMParams(SmallMParams):
    """With scales as in `scaled.ScaledOperands`."""

    mXScale: cute.Tensor
    mWeightScale: cute.Tensor
    mOutScale: cute.Tensor


class ScaledSmallMGemm(SmallMGemm):
    """See `gemm/small_m.py` and `gemm/scaled.py`."""

    def __init__(self, key: ScaledKey[ScaledSmallMConfig]):
        super().__init__(key)
        self.blocked, self.quantised = key.weight.blocked, key.out is not None
        self.x_rows, self.weight_rows_scaled = key.x.block_rows == 1, key.weight.block_rows == 1

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ScaledArgs, stream):
        """Launch; see `args.scaled_launch_args`. The CTAs need not run at the same time."""
        self.launch(self.params(args.operands, args.scratch), self.ctas(args), stream)

    def params(  # type: ignore[override]
        self, operands: ScaledOperands, scratch: StreamKScratch | None
    ) -> ScaledSmallMParams:
        """The kernel's, with TMA descriptors."""
        plain = GemmOperands(operands.x, operands.weight, operands.bias, None, operands.out)
        base = super().params(plain, scratch)
        scales = {
            "mXScale": operands.x_scale,
            "mWeightScale": operands.weight_scale,
            "mOutScale": operands.out_scale,
        }
        return ScaledSmallMParams(**{field.name: getattr(base, field.name) for field in fields(base)}, **scales)

    @property
    def mma_dtypes(self) -> tuple[Any, Any]:
        """E4m3: the tensors are bytes."""
        return cutlass.Float8E4M3FN, cutlass.Float8E4M3FN

    @cute.jit
    def mma(
        self,
        params: ScaledSmallMParams,
        tiled_mma: cute.TiledMma,
        sW: cute.Tensor,
        sX: cute.Tensor,
        pipeline: Pipeline,
        received: Received,
        work: StreamKWork,
        group: cutlass.Int32,
    ):
        """The same of bytes as e4m3."""
        SmallMGemm.mma(self, params, tiled_mma, as_e4m3(sW), as_e4m3(sX), pipeline, received, work, group)

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
        place: tuple[ScaledSmallMParams, StreamKWork, cutlass.Int32],
        thread: cutlass.Int32,
    ):
        """Add the products of `count` positions to what the accumulators hold if `accumulate`, or to nothing.

        All but the last position are given back.
        """
        if not accumulate:
            acc_0.fill(0.0)
            acc_1.fill(0.0)
        part_0, part_1 = (cute.make_rmem_tensor(acc_0.shape, cutlass.Float32) for _ in range(2))
        # As in `ScaledGemm.mainloop_of_blocks`.
        turns = AHEAD if self.blocked else 1
        ahead = [self.scales_of_block(place, start + cutlass.min(i, count - 1), thread) for i in range(turns)]
        for first in cutlass.range(0, count, turns, unroll=1):
            for turn in cutlass.range_constexpr(turns):
                i = first + turn
                if i < count:
                    # One that was changed in a loop could not be used behind it.
                    replacing = self.tiled_mma()
                    replacing.set(wgmma.Field.ACCUMULATE, False)
                    self.issue(replacing, part_0, part_1, *operands, pipeline, start + i)
                    wgmma.wait_group(0)
                    fence_operand(part_0)
                    fence_operand(part_1)
                    if i < count - 1:
                        pipeline.warpgroup_release(start + i, thread)
                    if cutlass.const_expr(self.blocked):
                        self.add_scaled(acc_0, part_0, ahead[turn], 0)
                        self.add_scaled(acc_1, part_1, ahead[turn], 1)
                        following = start + cutlass.min(i + turns, count - 1)
                        ahead[turn].store(self.scales_of_block(place, following, thread).load())
                    else:
                        acc_0.store(acc_0.load() + part_0.load())
                        acc_1.store(acc_1.load() + part_1.load())

    def scales_of_block(self, place: tuple, position, thread) -> cute.Tensor | None:
        """The scales of a position: of both boxes' weights, then of a thread's tokens; any past the last token.

        None where they are applied in the epilogue.
        """
        if not self.blocked:
            return None
        params, work, group = place
        iteration = work.start + position
        n_tile, row_tile, first_token = self.place_of(work, iteration // work.k_tiles, group)
        k_tile, (m, n) = iteration % work.k_tiles, params.mOut.shape
        row_blocks = params.mWeightScale.shape[0]
        scales = cute.make_rmem_tensor(2 + self.tokens // 4, cutlass.Float32)
        for box in range(2):
            row = box * n + n_tile * self.box if self.gated else (2 * n_tile + box) * self.box
            block = cutlass.min((row + row_tile * MMA_M) // GROUP, row_blocks - 1)
            scales[box] = params.mWeightScale[block, k_tile]
        for i in range(self.tokens // 4):
            token = first_token + 8 * (i // 2) + 2 * (thread % 4) + i % 2
            scales[2 + i] = params.mXScale[cutlass.min(token, m - 1), k_tile]
        return scales

    def add_scaled(self, acc: cute.Tensor, part: cute.Tensor, scales: cute.Tensor, box: int):
        """Add wgmma's sums of a box, times the product of their scales; places as in `epilogue`."""
        for i in range(self.tokens // 4):
            scale = scales[2 + i] * scales[box]
            for b in range(2):
                at = i % 2 + 2 * b + 4 * (i // 2)
                acc[at] = fma(part[at], scale, acc[at])

    def biases(self, params, column: cutlass.Int32):
        """The base's, then the scales of both boxes' columns where weights have some of rows or one."""
        found = super().biases(params, column)
        if self.blocked:
            return found
        if not self.weight_rows_scaled:
            return [*found, params.mWeightScale[0], params.mWeightScale[0]]
        n = params.mOut.shape[1]
        for box in range(2):
            part, place = (box, column) if self.gated else (0, column + box * self.box)
            found.append(bias_of(params.mWeightScale, place, part, n, self.interleaved))
        return found

    def sums(self, params, of_column: list, sum_0, sum_1, token):
        """Both boxes' sums of a token with their scales and biases."""
        if not self.blocked:
            x_scale = params.mXScale[cutlass.min(token, params.mOut.shape[0] - 1) if self.x_rows else 0]
            sum_0, sum_1 = sum_0 * of_column[2] * x_scale, sum_1 * of_column[3] * x_scale
        if params.mBias is None:
            return sum_0, sum_1
        return sum_0 + of_column[0], sum_1 + of_column[1]

    def rounded(self, params: ScaledSmallMParams, value: cutlass.Float32):  # type: ignore[override]
        """The base's, or e4m3 by the scale that is given."""
        if not self.quantised:
            return super().rounded(params, value)
        scaled = value * (cutlass.Float32(1.0) / params.mOutScale[0])
        return cutlass.Uint8(f32_to_e4m3(scaled, scaled, scaled, scaled) & 0xFF)
