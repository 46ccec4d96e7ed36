# SPDX-License-Identifier: Apache-2.0
"""The GEMM of e4m3 operands for few rows on SM90: sums of each k tile are promoted to float32.

Half of the bytes of 16-bit weights are streamed. `scaled_gemm` explains why sums are promoted. Products and additions
of a k tile are done while the next ones arrive.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup as wgmma

from dsl_backend.gemm.args import ScaledArgs
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.scaled_small_m import ScaledSmallMBase, ScaledSmallMParams
from dsl_backend.gemm.sm90.configs import MMA_M
from dsl_backend.gemm.sm90.scaled_configs import ScaledSmallMConfig
from dsl_backend.gemm.sm90.scaled_gemm import AHEAD, as_e4m3
from dsl_backend.gemm.sm90.small_m import SmallMGemm
from dsl_backend.gemm.small_m import Received, StreamKWork
from dsl_backend.primitives.accumulators import fence_operand
from dsl_backend.primitives.math import fma
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.quant.format import GROUP


class ScaledSmallMGemm(ScaledSmallMBase, SmallMGemm):
    """See `gemm/small_m.py` and `gemm/scaled.py`."""

    def __init__(self, key: ScaledKey[ScaledSmallMConfig]):
        super().__init__(key)
        self.scaled_by(key)
        # Scales of a thread's two rows of a box: the same one, or one for each.
        self.box_scales = 1

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ScaledArgs, stream):
        """Launch; see `args.scaled_launch_args`. The CTAs need not run at the same time."""
        self.launch(self.params(args.operands, args.scratch), self.ctas(args), stream)

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
        turns = AHEAD if self.scaled_by_tile else 1
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
                    if cutlass.const_expr(self.scaled_by_tile):
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
        if not self.scaled_by_tile:
            return None
        params, work, group = place
        iteration = work.start + position
        tile, row_tile, first_token = self.place_of(work, iteration // work.k_tiles, group)
        scales = cute.make_rmem_tensor(2 * self.box_scales + self.tokens // 4, cutlass.Float32)
        self.load_scales(params, work, scales, tile, iteration % work.k_tiles, row_tile, first_token, thread)
        return scales

    def load_scales(self, params: Any, work: Any, scales: cute.Tensor, n_tile, k_tile, row_tile, first_token, thread):
        """Fill the scales of a k tile."""
        m, n = params.mOut.shape
        self.load_block_scales(params.mWeightScale, scales, n_tile, k_tile, row_tile, n)
        for i in range(self.tokens // 4):
            token = cutlass.min(self.thread_token(first_token, i, thread), m - 1)
            scales[2 + i] = params.mXScale[token, k_tile]

    def load_block_scales(self, mScale: cute.Tensor, scales: cute.Tensor, n_tile, k_tile, row_tile, n):
        """Fill those of both boxes' weights, of scales [blocks of rows, blocks of k]."""
        for box in range(2):
            row = box * n + n_tile * self.box if self.gated else (2 * n_tile + box) * self.box
            block = cutlass.min((row + row_tile * MMA_M) // GROUP, mScale.shape[0] - 1)
            scales[box] = mScale[block, k_tile]

    def thread_token(self, first_token, i: int, thread):
        """The i-th token of a thread's accumulators."""
        return first_token + 8 * (i // 2) + 2 * (thread % 4) + i % 2

    def add_scaled(self, acc: cute.Tensor, part: cute.Tensor, scales: cute.Tensor, box: int):
        """Add wgmma's sums of a box, times the product of their scales; places as in `epilogue`."""
        for i in range(self.tokens // 4):
            for b in range(2):
                at = i % 2 + 2 * b + 4 * (i // 2)
                scale = scales[2 * self.box_scales + i] * scales[box * self.box_scales + b % self.box_scales]
                acc[at] = fma(part[at], scale, acc[at])
