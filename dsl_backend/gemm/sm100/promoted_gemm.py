# SPDX-License-Identifier: Apache-2.0
"""The persistent GEMM on SM100 for e4m3 with a scale for each 128 columns of x's rows and 128 x 128 of the weights.

A stage is 128 columns. The products of each are an accumulator of their own in tensor memory, of which there are four;
an epilogue thread has a row of the tile in registers, and adds each accumulator times the scales to it in float32. All
else is `scaled_gemm.ScaledGemm`.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sizes import BLOCK_BYTES, WARP, WARPGROUP
from dsl_backend.gemm.sm100.configs import PromotedConfig
from dsl_backend.gemm.sm100.scaled_gemm import ScaledGemm, ScaledParams
from dsl_backend.primitives import tmem
from dsl_backend.primitives.math import e8m0_to_f32, fma_pair, in_pairs
from dsl_backend.primitives.pipeline import UMMA, Edge, Pipeline, warps
from dsl_backend.primitives.schedule import raster
from dsl_backend.quant.format import GROUP


class PromotedGemm(ScaledGemm):
    """See `gemm/tiled.py` and `gemm/scaled.py`."""

    def __init__(self, key: ScaledKey[PromotedConfig]):
        super().__init__(key)
        self.acc_edge = Edge("accumulators", UMMA, warps(WARPGROUP // WARP, self.cluster), key.config.acc_stages)

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
        """Issue the products of so many tiles, an accumulator for each stage."""
        x_address, w_address = sX.iterator.toint(), sW.iterator.toint()
        for position in cutlass.range(tiles * k_tiles, unroll=1):
            acc_pipeline.producer_acquire(position)
            tmem.after_sync()
            stage = pipeline.stage(position)
            pipeline.consumer_wait(position)
            self.narrow_mma.issue(
                tmem_ptr.toint() + self.acc_column(acc_pipeline, position),
                x_address + stage * (self.tile_m * BLOCK_BYTES),
                w_address + stage * (self.weight_rows * BLOCK_BYTES),
                False,
            )
            self.commit(pipeline.mbar_empty + stage)
            self.commit(acc_pipeline.full(position))

    @cute.jit
    def epilogue(
        self,
        params: ScaledParams,
        sOut: cute.Tensor,
        acc_pipeline: Pipeline,
        tmem_ptr: cute.Pointer,
        cta_rank: cutlass.Int32,
    ):
        """An epilogue warp: sums its 32 rows of every tile, and stores them `epilogue_n` columns at a time."""
        m_tiles, n_tiles, k_tiles = self.tile_counts(params)
        first, clusters, tiles = self.schedule(m_tiles, n_tiles)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        gOut = cute.local_tile(params.mOut, (WARP, self.epilogue_n // self.out_packed), (None, None))
        tOsO, tOgO = cpasync.tma_partition(
            params.tma_atom_out, 0, cute.make_layout(1), cute.group_modes(sOut, 0, 2), cute.group_modes(gOut, 0, 2)
        )
        epi_tiles = cutlass.const_expr(self.columns // self.epilogue_n)
        chunk = cutlass.const_expr(self.register_columns)
        sums = [cute.make_rmem_tensor(chunk, cutlass.Float32) for _ in range(2 * self.box_n // chunk)]
        for tile in cutlass.range(tiles, unroll=1):
            m_tile, n_tile = raster(first + tile * clusters, m_tiles, n_tiles, self.band)
            first_row = (m_tile * self.cluster + cta_rank) * self.tile_m + warp * WARP
            row = first_row + cute.arch.lane_idx()
            for part in cutlass.range_constexpr(len(sums)):
                sums[part].fill(0.0)
            scale_0, scale_1 = self.group_scales(params, row, n_tile, 0)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                # The next group's scales are on their way while this one's products are awaited.
                next_0, next_1 = self.group_scales(params, row, n_tile, cutlass.min(k_tile + 1, k_tiles - 1))
                self.add(acc_pipeline, tile * k_tiles + k_tile, tmem_ptr, sums, (scale_0, scale_1))
                scale_0, scale_1 = next_0, next_1
            for epi in cutlass.range_constexpr(epi_tiles):
                first_column = n_tile * self.columns + epi * self.epilogue_n
                stage = warp * 2 + (tile * epi_tiles + epi) % 2
                row_address = self.begin_store(sOut, stage)
                for start in cutlass.range_constexpr(0, self.epilogue_n, chunk):
                    at = cutlass.const_expr((epi * self.epilogue_n + start) // chunk)
                    of_parts = [sums[at + part * self.box_n // chunk] for part in range(self.parts)]
                    self.finish(params, row_address ^ self.out_bytes(start), of_parts, row, first_column + start)
                self.end_store(
                    params, tOsO[None, stage], tOgO[None, first_row // WARP, first_column // self.epilogue_n]
                )
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def add(self, acc_pipeline: Pipeline, position, tmem_ptr: cute.Pointer, sums: list, scales: tuple):
        """Add the products of a stage times the scales of their boxes to a row's sums."""
        acc_pipeline.consumer_wait(position)
        tmem.after_sync()
        column, thread = self.acc_column(acc_pipeline, position), cute.arch.thread_idx()[0]
        chunk = self.register_columns
        loaded = [cute.make_rmem_tensor(chunk, cutlass.Float32) for _ in sums]
        for i, (target, acc) in enumerate(zip(sums, loaded, strict=True)):
            tmem.load(tmem_ptr, column + i * chunk, acc, thread)
            cute.arch.fence_view_async_tmem_load()
            if i == len(sums) - 1:
                self.release(acc_pipeline, position)
            scale = scales[i * chunk // self.box_n]
            added = in_pairs(
                fma_pair, [acc[j] for j in range(chunk)], [scale] * chunk, [target[j] for j in range(chunk)]
            )
            for j in range(chunk):
                target[j] = added[j]

    def group_scales(self, params: ScaledParams, row, n_tile, k_tile):
        """The product of the scales of a row of x and of each box of weights, for a k tile; any past the last row."""
        of_x = self.scale_of(params.mXScale, cutlass.min(row, params.mOut.shape[0] - 1), k_tile)
        first = n_tile * (2 * self.box_n // self.parts) * (2 if self.interleaved else 1)
        second = first if self.interleaved else first + (self.width(params) if self.gated else self.box_n)
        last = params.mWeightScale.shape[0] - 1
        return tuple(
            of_x * self.scale_of(params.mWeightScale, cutlass.min(begin // GROUP, last), k_tile)
            for begin in (first, second)
        )

    def scale_of(self, scales: cute.Tensor, block, k_tile):
        """A scale as float32."""
        found = scales[block, k_tile]
        return found if scales.element_type is cutlass.Float32 else e8m0_to_f32(found)

    def row_scale(self, params, row):
        """None: scales were multiplied into the parts of the sums."""

    def with_scales(self, params, values, row_scale, column):
        """The sums as they are."""
        return values
