# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMMs of e4m3 operands on SM100.

Work tiles, loads and stores are those of `experts/cute/sm100/grouped.py`, products and scales those of
`gemm/sm100/scaled_gemm.py` and `gemm/sm100/promoted_gemm.py`.

The first product writes the activation's result in 16 bits, and another launch quantises it.
"""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.grouped import WorkTile
from dsl_backend.experts.cute.key import ProductKey
from dsl_backend.experts.cute.scaled_grouped import ScaledGroupedParams, ScaledProduct
from dsl_backend.experts.cute.sm100.grouped import GroupedGemm
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm100.promoted_gemm import PromotedGemm
from dsl_backend.gemm.sm100.scaled_gemm import ScaledGemm
from dsl_backend.primitives.pipeline import Pipeline


class ScaledGroupedGemm(ScaledProduct, GroupedGemm, ScaledGemm):
    """With scales of x's rows and of the weights' rows."""

    def __init__(self, key: ProductKey, scaled: ScaledKey[Any], beside: bool):
        assert beside == (key.activation is not None)
        ScaledGemm.__init__(self, scaled)
        self.prepare(key, beside)

    def prepare(self, key: ProductKey, beside: bool) -> None:
        """What all of them have beside their arithmetic."""
        self.set_up(key)
        self.beside = beside
        if self.gathers:
            self.threads += WARPGROUP - WARP

    def x_row(self, params: ScaledGroupedParams, row):
        """The row of x, and of its scales, of one of the expert's rows in order."""
        return params.mPairs[row] // self.pairs_per_row if self.gathers else row

    def row_factor(self, params, row, work):
        return params.mXScale[self.x_row(params, row)]

    def factored(self, params, values: list, work: WorkTile, factor, column) -> list:
        return self.with_scales(params.of_expert(work.expert), values, factor, column)


class PromotedGroupedGemm(ScaledGroupedGemm, PromotedGemm):
    """With scales of 128 columns of x's rows, and of 128 x 128 of the weights."""

    def __init__(self, key: ProductKey, scaled: ScaledKey[Any], beside: bool):
        PromotedGemm.__init__(self, scaled)
        self.prepare(key, beside)
        if self.gathers:
            # With an equal share of 168 ptxas spilled 32 bytes.
            self.trades_registers, self.threads = True, 3 * WARPGROUP

    def factored(self, params, values: list, work: WorkTile, factor, column) -> list:
        """The sums as they are: their parts were multiplied with the scales."""
        return values

    @cute.jit
    def epilogue(
        self, params: ScaledGroupedParams, acc_pipeline: Pipeline, tmem_ptr: cute.Pointer, warp: cutlass.Int32
    ):
        """An epilogue warp: sums its 32 rows of every tile, and stores those that exist."""
        schedule = self.tiles_of_cta(params)
        k_tiles = self.k_tiles(params)
        place = warp * WARP + cute.arch.lane_idx()
        chunk = cutlass.const_expr(self.register_columns)
        sums = [cute.make_rmem_tensor(chunk, cutlass.Float32) for _ in range(2 * self.box_n // chunk)]
        for tile in cutlass.range(schedule.count, unroll=1):
            work = self.work_tile(params, schedule, tile)
            # A row of the output, or any where there is none: nothing is stored there.
            row = work.first_row + cutlass.min(place, work.rows - 1)
            x_row = self.x_row(params, row)
            of_expert: Any = params.of_expert(work.expert)
            for part in cutlass.range_constexpr(len(sums)):
                sums[part].fill(0.0)
            scale_0, scale_1 = self.group_scales(of_expert, x_row, work.n_tile, 0)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                # The next group's scales are on their way while this one's products are awaited.
                following = cutlass.min(k_tile + 1, k_tiles - 1)
                next_0, next_1 = self.group_scales(of_expert, x_row, work.n_tile, following)
                self.add(acc_pipeline, tile * k_tiles + k_tile, tmem_ptr, sums, (scale_0, scale_1))
                scale_0, scale_1 = next_0, next_1
            if cutlass.const_expr(not self.gathers):
                row = params.mPairs[row]
            for start in cutlass.range_constexpr(0, self.columns, chunk):
                of_parts = [sums[(start + part * self.box_n) // chunk] for part in range(self.parts)]
                self.store_values(params, of_parts, work, row, start, None, place)


def product(key: ProductKey, scaled: ScaledKey[Any], beside: bool) -> ScaledGroupedGemm:
    """The kernel of a product."""
    return (PromotedGroupedGemm if scaled.x.blocked else ScaledGroupedGemm)(key, scaled, beside)
