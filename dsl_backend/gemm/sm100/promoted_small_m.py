# SPDX-License-Identifier: Apache-2.0
"""The GEMM for few rows on SM100 for e4m3 with a scale for each 128 columns of x's rows and 128 x 128 of the weights.

The products of each stage, which is 128 columns, are an accumulator of their own in tensor memory. An epilogue thread
has sums of a row of each box in registers, and adds each accumulator times the scales to them in float32, as in
`promoted_gemm`. All else is `scaled_small_m.ScaledSmallMGemm`.

A thread needs the scales of all its tokens, which all threads of its warpgroup share: the lanes of a warp load one or
two each, and read them from shared memory.
"""

from dataclasses import dataclass, fields

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.scaled_small_m import ScaledSmallMParams
from dsl_backend.gemm.sizes import BLOCK_BYTES, WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import PROMOTED_TOKENS, SCALE_BUFFERS, PromotedSmallMConfig
from dsl_backend.gemm.sm100.scaled_small_m import ScaledSmallMGemm
from dsl_backend.gemm.small_m import StreamKWork
from dsl_backend.primitives import tmem
from dsl_backend.primitives.math import e8m0_to_f32, fma_pair, in_pairs, mul_pair
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.quant.format import GROUP


@dataclass(frozen=True)
class PromotedWork(StreamKWork):
    """With the scales of x of a stage and the one before: float32 [token of a warp's, buffer, epilogue warp]."""

    sXScales: cute.Tensor


class PromotedSmallMGemm(ScaledSmallMGemm):
    """See `gemm/small_m.py` and `gemm/scaled.py`."""

    def __init__(self, key: ScaledKey[PromotedSmallMConfig]):
        super().__init__(key)
        self.warp_scales = key.config.warp_scales

    def begin(self, params, smem):
        """The base's, with room for the scales of x."""
        work = super().begin(params, smem)
        warps = self.groups * WARPGROUP // WARP
        layout = cute.make_layout((self.warp_scales, SCALE_BUFFERS, warps))
        values = [getattr(work, field.name) for field in fields(work)]
        return PromotedWork(*values, smem.allocate_tensor(cutlass.Float32, layout, byte_alignment=16))

    @cute.jit
    def mma(
        self,
        tiled_mma,
        sW: cute.Tensor,
        sX: cute.Tensor,
        pipeline: Pipeline,
        acc_pipeline: Pipeline,
        work: PromotedWork,
        tmem_ptr: cute.Pointer,
    ):
        """The MMA warp: an accumulator for each position."""
        box_bytes = cutlass.const_expr(self.box * BLOCK_BYTES)
        w_address, x_address = sW.iterator.toint(), sX.iterator.toint()
        for position in cutlass.range(work.end - work.start, unroll=1):
            acc_pipeline.producer_acquire(position)
            tmem.after_sync()
            accumulator = tmem_ptr.toint() + acc_pipeline.stage(position) * (2 * self.tokens)
            stage = pipeline.stage(position)
            pipeline.consumer_wait(position)
            for i in cutlass.range_constexpr(2):
                self.narrow_mma.issue(
                    accumulator + i * self.tokens,
                    w_address + stage * (2 * box_bytes) + i * box_bytes,
                    x_address + stage * (self.tokens * BLOCK_BYTES),
                    False,
                )
            with cute.arch.elect_one():
                tcgen05.commit(pipeline.mbar_empty + stage)
                tcgen05.commit(acc_pipeline.full(position))

    @cute.jit
    def collect(
        self,
        params: ScaledSmallMParams,
        acc_pipeline: Pipeline,
        work: PromotedWork,
        tmem_ptr: cute.Pointer,
        i: cutlass.Int32,
        acc_0: cute.Tensor,
        acc_1: cute.Tensor,
        group: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """A thread's part of the sums of the CTA's i-th tile: of each position the products times their scales."""
        first_tile, _ = self.tile_range(work)
        tile = first_tile + i
        _, _, start, end = self.iterations(work, tile)
        first_token = tile // work.n_tiles * self.tokens + group * self.thread_tokens
        blocks = self.weight_blocks(params, tile % work.n_tiles * self.columns + thread)
        acc_0.fill(0.0)
        acc_1.fill(0.0)
        # Scales are on their way while the products of two groups are awaited.
        scales, following = (
            self.load_scales(params, blocks, first_token, cutlass.min(start + ahead, end - 1) % work.k_tiles)
            for ahead in range(2)
        )
        for iteration in cutlass.range(start, end, unroll=1):
            k_tile = cutlass.min(iteration + 2, end - 1) % work.k_tiles
            last = self.load_scales(params, blocks, first_token, k_tile)
            self.add(acc_pipeline, work, iteration - work.start, tmem_ptr, (acc_0, acc_1), scales, group, thread)
            scales.store(following.load())
            following.store(last.load())

    def weight_blocks(self, params: ScaledSmallMParams, column):
        """Of a thread's row of each box, the block of rows of its scales; any past the last row."""
        n, last = params.mOut.shape[1], params.mWeightScale.shape[0] - 1
        rows = (column, column + self.box)
        if self.gated:
            rows = (2 * column, 2 * column + 1) if self.interleaved else (column, n + column)
        return [cutlass.min(row // GROUP, last) for row in rows]

    def load_scales(self, params: ScaledSmallMParams, blocks: list, first_token, k_tile) -> cute.Tensor:
        """Of a k tile: the scales of the thread's row of each box, then of tokens of its lane; any past the last."""
        scales = cute.make_rmem_tensor(len(blocks) + self.warp_scales // WARP, cutlass.Float32)
        for i, block in enumerate(blocks):
            scales[i] = self.as_float32(params.mWeightScale[block, k_tile])
        for i in range(self.warp_scales // WARP):
            token = cutlass.min(first_token + i * WARP + cute.arch.lane_idx(), params.mOut.shape[0] - 1)
            scales[len(blocks) + i] = self.as_float32(params.mXScale[token, k_tile])
        return scales

    def as_float32(self, scale):
        """A scale as float32."""
        return scale if scale.dtype is cutlass.Float32 else e8m0_to_f32(scale)

    def add(
        self, acc_pipeline: Pipeline, work: PromotedWork, position, tmem_ptr, sums: tuple, scales, group, thread
    ) -> None:
        """Add the products of a position times the products of their scales to both boxes' sums."""
        warp = cute.arch.thread_idx()[0] // WARP
        # Two buffers: lanes that still read the last position's have not passed the barrier.
        of_x = work.sXScales[None, position % SCALE_BUFFERS, warp]
        for i in range(self.warp_scales // WARP):
            of_x[i * WARP + cute.arch.lane_idx()] = scales[len(sums) + i]
        cute.arch.sync_warp()
        acc_pipeline.consumer_wait(position)
        tmem.after_sync()
        column = acc_pipeline.stage(position) * (2 * self.tokens) + group * self.thread_tokens
        count = PROMOTED_TOKENS
        for first in range(0, self.thread_tokens, count):
            parts = [cute.make_rmem_tensor(count, cutlass.Float32) for _ in sums]
            for box, part in enumerate(parts):
                tmem.load(tmem_ptr, column + box * self.tokens + first, part, thread)
            x_scales = cute.make_rmem_tensor(count, cutlass.Float32)
            cute.autovec_copy(cute.local_tile(of_x, (count,), (first // count,)), x_scales)
            cute.arch.fence_view_async_tmem_load()
            if first + count == self.thread_tokens:
                self.release(acc_pipeline, position)
            for box, (total, part) in enumerate(zip(sums, parts, strict=True)):
                scaled = in_pairs(mul_pair, [x_scales[j] for j in range(count)], [scales[box]] * count)
                before = [total[first + j] for j in range(count)]
                for j, value in enumerate(in_pairs(fma_pair, [part[j] for j in range(count)], scaled, before)):
                    total[first + j] = value
