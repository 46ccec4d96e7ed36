# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMM of e4m3 operands on SM90: work tiles and loads of `experts/cute/grouped.py`, promoted sums of
`gemm/sm90/scaled_gemm.py`.

With scales of groups, the first product's CTA finishes tiles side by side until it has 128 columns of the activation's
result, and quantises them. Consumers that have half of these columns each tell each other their rows' largest
magnitudes. With a scale for each row, and where that is chosen, the CTA writes them in 16 bits.
"""

from dataclasses import replace
from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.experts.cute.args import RECORD
from dsl_backend.experts.cute.grouped import GroupedParams, Schedule, WorkTile
from dsl_backend.experts.cute.key import ProductKey
from dsl_backend.experts.cute.scaled_grouped import ScaledGroupedParams, ScaledProduct
from dsl_backend.experts.cute.sm90.grouped import GroupedGemm
from dsl_backend.experts.scaled_configs import SideBySideConfig
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sizes import WARPGROUP
from dsl_backend.gemm.sm90.configs import CONSUMERS, MMA_M
from dsl_backend.gemm.sm90.gemm import BOTH_BARRIER, CONSUMER_BARRIER
from dsl_backend.gemm.sm90.scaled_gemm import ScaledGemm
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives.accumulators import fence_register
from dsl_backend.primitives.math import f32_to_e4m3
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import Pipeline

# Of consumers and of the producer's four warps where these gather: with 40 they spilled 8 to 16 bytes.
GATHERING_REGISTERS = 224, 56


class ScaledGroupedGemm(ScaledProduct, GroupedGemm, ScaledGemm):
    """One of the two products; see `experts/cute/grouped.py`.

    Args:
        key: of the product.
        scaled: of its arithmetic.
        beside: the first product's output is in 16 bits, and another launch quantises it.
    """

    looks_up_early = True

    def __init__(self, key: ProductKey, scaled: ScaledKey[Any], beside: bool):
        ScaledGemm.__init__(self, scaled)
        self.set_up(key)
        self.beside = beside
        if isinstance(scaled.config, SideBySideConfig):
            # Those of a consumer.
            self.side, self.columns = CONSUMERS, self.columns // CONSUMERS
            self.stored_columns = self.columns
            self.epi_tile = (MMA_M, self.columns)
        if self.gathers:
            self.consumer_registers, self.producer_registers = GATHERING_REGISTERS

    def tiles_of_cta(self, params: GroupedParams) -> Schedule:
        """As the base's, of groups of tiles side by side, of which all are counted."""
        m_tiles = params.mTileCount[0]
        groups = cute.ceil_div(params.mOut.shape[1], self.columns * self.side * self.group_tiles)
        first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        count = cute.ceil_div(cutlass.max(m_tiles * groups - first, 0), stride)
        return Schedule(m_tiles, groups, first, stride, count * self.group_tiles)

    def place_of(self, schedule: Schedule, tile):
        """As the base's; tiles of a group follow one another."""
        if self.group_tiles == 1:
            return super().place_of(schedule, tile)
        m_tile, n_tile = super().place_of(schedule, tile // self.group_tiles)
        return m_tile, n_tile * self.group_tiles + tile % self.group_tiles

    def consumer_operands(self, tiled_mma: cute.TiledMma, sX: cute.Tensor, sW: cute.Tensor, group, thread):
        """As the base's; side by side, a consumer has all rows and its own weights."""
        if self.side == 1:
            return super().consumer_operands(tiled_mma, sX, sW, group, thread)
        sW_columns = cute.local_tile(sW, (2 * self.box_n, self.block_k), (group, 0, None))
        _, *operands = super().consumer_operands(tiled_mma, sX, sW_columns, 0, thread)
        return 0, *operands

    def allocate_maxima(self, smem: SmemAllocator) -> cute.Tensor | None:
        """Side by side: [row, consumer, parity of the tile], the largest magnitude of its columns of a row.

        While one consumer writes a tile's, the other one may still read those of the tile before.
        """
        if self.side == 1 or not self.quantises:
            return None
        return smem.allocate_tensor(cutlass.Float32, cute.make_layout((self.tile_m, CONSUMERS, 2)), byte_alignment=16)

    def columns_of(self, work: WorkTile, group) -> WorkTile:
        """A consumer's tile of columns."""
        return work if self.side == 1 else replace(work, n_tile=work.n_tile * self.side + group)

    def scale_row(self, params, row, i: int):
        """Which of x's scales row `i` of a thread's has; `row` are those of all its rows."""
        return row[i]

    def row_scales(self, params, row, mma_tile: int) -> list:
        """As the base's; `row` are two rows."""
        return [params.mXScale[self.scale_row(params, row, b)] for b in range(2)]

    def column_scales(self, params, columns: list, part: int, place) -> list:
        """As the base's, from memory."""
        n = params.mOut.shape[1]
        return [bias_of(params.mWeightScale, column, part, n, self.interleaved) for column in columns]

    def rows_of(self, params: ScaledGroupedParams, work: WorkTile, first, thread, count: int) -> list:
        """Tokens, or rows in order, of `count` of a thread's rows from row `first` of a work tile on.

        Where there is no such row it is the last one's.
        """
        found = []
        for i in range(count):
            place = first + self.thread_row(thread) + 8 * (i % 2) + MMA_M * (i // 2)
            row = work.first_row + cutlass.min(place, work.rows - 1)
            found.append(params.mPairs[row] // self.pairs_per_row if self.gathers else row)
        return found

    def load_rows(self, params: ScaledGroupedParams, work: WorkTile, first, thread, rRows: cute.Tensor):
        """Rows of x's scales of a thread's rows from row `first` on, where scales are added with sums."""
        if self.blocked:
            for i, row in enumerate(self.rows_of(params, work, first, thread, 2 * self.mma_tiles_m)):
                rRows[i] = row

    @cute.jit
    def mma(
        self,
        params: ScaledGroupedParams,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sOut: cute.Tensor,
        pipeline: Pipeline,
        group: cutlass.Int32,
        sMaxima: cute.Tensor = None,
    ):
        """A consumer warpgroup: its rows of every tile."""
        schedule = self.tiles_of_cta(params)
        k_tiles = self.k_tiles(params)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_tile, tCrX, tCrW, acc = self.consumer_operands(tiled_mma, sX, sW, group, thread)
        first = row_tile * self.consumer_m
        total_shape = self.tiled_mma(2 * self.box_n).partition_shape_C((self.consumer_m, 2 * self.box_n))
        total = cute.make_rmem_tensor(total_shape, cutlass.Float32)
        held = cute.make_rmem_tensor((self.columns // 2, self.mma_tiles_m, self.group_tiles), cutlass.Float32)
        # Of the next tile: nothing waits for them where a tile begins.
        rRecord = cute.make_rmem_tensor(RECORD, cutlass.Int32)
        rRows = cute.make_rmem_tensor(2 * self.mma_tiles_m, cutlass.Int32)
        rRecord.fill(0)
        rRows.fill(0)
        if schedule.count > 0:
            self.load_record(params, schedule, 0, rRecord)
            self.load_rows(params, self.tile_of(schedule, 0, rRecord), first, thread, rRows)
        for i in cutlass.range(schedule.count // self.group_tiles, unroll=1):
            for part in cutlass.range_constexpr(self.group_tiles):
                tile = i * self.group_tiles + part
                work = self.columns_of(self.tile_of(schedule, tile, rRecord), group)
                following = cutlass.min(tile + 1, schedule.count - 1)
                self.load_record(params, schedule, following, rRecord)
                if first < work.rows:
                    self.multiply(params, acc, total, tCrX, tCrW, pipeline, tile * k_tiles, work, rRows, thread)
                    self.load_rows(params, self.tile_of(schedule, following, rRecord), first, thread, rRows)
                    # Addresses of the epilogue, computed in front of the loop, would spill where sums are many.
                    late = fence_register(thread)
                    if cutlass.const_expr(self.quantises):
                        self.hold(params, total, held, part, late, cutlass.Int32(0), work.n_tile)
                    else:
                        self.epilogue(params.of_expert(work.expert), total, sOut, work, first, group, late)
                else:
                    self.load_rows(params, self.tile_of(schedule, following, rRecord), first, thread, rRows)
                    self.pass_stages(pipeline, tile * k_tiles, 0, k_tiles, thread)
                    pipeline.warpgroup_release(tile * k_tiles + k_tiles - 1, thread)
            if cutlass.const_expr(self.quantises):
                late, of_group = fence_register(thread), replace(work, n_tile=work.n_tile - (self.group_tiles - 1))
                sMaxima_tile = None
                if cutlass.const_expr(self.side > 1):
                    sMaxima_tile = sMaxima[None, None, i % 2]
                self.quantised_epilogue(params, held, sOut, of_group, first, group, late, sMaxima_tile)

    @cute.jit
    def multiply(
        self,
        params: ScaledGroupedParams,
        acc: cute.Tensor,
        total: cute.Tensor,
        tCrX: cute.Tensor,
        tCrW: cute.Tensor,
        pipeline: Pipeline,
        start: cutlass.Int32,
        work: WorkTile,
        rRows: cute.Tensor,
        thread: cutlass.Int32,
    ):
        """A tile's sums of products from position `start` on to `total`; `rRows` are of `load_rows`."""
        total.fill(0.0)
        if cutlass.const_expr(self.blocked):
            rows = [rRows[i] for i in range(2 * self.mma_tiles_m)]
            of_expert = params.of_expert(work.expert)
            self.mainloop_of_blocks(of_expert, acc, total, tCrX, tCrW, pipeline, start, rows, work.n_tile, thread)
        else:
            k_tiles = self.k_tiles(params)
            self.promoted_mainloop(acc, total, tCrX, tCrW, pipeline, start, k_tiles, thread)

    @cute.jit
    def convert(
        self,
        params: ScaledGroupedParams,
        acc: cute.Tensor,
        tCrOut: cute.Tensor,
        mma_tile: cutlass.Constexpr[int],
        turn: cutlass.Constexpr[int],
        thread: cutlass.Int32,
        work: WorkTile,
        top: cutlass.Int32,
        first_column: cutlass.Int32,
    ):
        """64 rows of sums through their scales and the activation to the output's type; params are of the expert."""
        rows = [] if cutlass.const_expr(self.blocked) else self.rows_of(params, work, top, thread, 2)
        of_expert: Any = params
        values = self.outputs(of_expert, acc, mma_tile, rows, first_column, thread, turn)
        for j in cutlass.range_constexpr(self.stored_columns // 8):
            for b in cutlass.range_constexpr(2):
                for a in cutlass.range_constexpr(2):
                    tCrOut[(a, b, j), 0, 0] = values[j][b][a].to(self.out_dtype)

    @cute.jit
    def quantised_epilogue(
        self,
        params: ScaledGroupedParams,
        held: cute.Tensor,
        sOut: cute.Tensor,
        work: WorkTile,
        first: cutlass.Int32,
        group: cutlass.Int32,
        thread: cutlass.Int32,
        sMaxima: cute.Tensor | None,
    ):
        """What is held, 128 columns of each row, quantised with a scale of its own, as far as there are rows.

        Args:
            work: the first tile of the group; side by side, the consumer's.
            first: row of the tile that is the first one held.
            sMaxima: of a tile as in `allocate_maxima`.
        """
        copies = self.epilogue_copy(thread)
        for mma_tile in cutlass.range_constexpr(self.mma_tiles_m):
            top = first + mma_tile * MMA_M
            if top < work.rows:
                inverses = []
                largest = [self.largest_of_row(held, mma_tile, b) for b in range(2)]
                writes = thread % 4 == 0
                if cutlass.const_expr(self.side > 1):
                    largest = self.largest_of_both(largest, sMaxima, group, thread)
                    writes = writes and group == 0
                for b in cutlass.range_constexpr(2):
                    place = top + self.thread_row(thread) + 8 * b
                    scale = self.scale_of_group(largest[b])
                    inverses.append(cutlass.Float32(1.0) / scale)
                    if writes and place < work.rows:
                        column_group = work.n_tile // (self.group_tiles * self.side)
                        params.mOutScale[work.first_row + place, column_group] = scale
                for part in cutlass.range_constexpr(self.group_tiles):
                    for j in cutlass.range_constexpr(self.columns // 8):
                        values = [
                            held[4 * j + 2 * b + a, mma_tile, part] * inverses[b] for b in range(2) for a in range(2)
                        ]
                        copies[2][j] = f32_to_e4m3(*values)
                    # All threads have read what was staged last. Side by side both consumers have met since.
                    if cutlass.const_expr(self.side == 1):
                        cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
                    self.stage_rows(copies, sOut, group, thread)
                    cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
                    column = (work.n_tile + part) * self.columns
                    self.store_rows(params, sOut[None, None, group], work, top, column, thread, (MMA_M, self.columns))

    @cute.jit
    def largest_of_both(self, largest: list, sMaxima: cute.Tensor, group: cutlass.Int32, thread: cutlass.Int32):
        """The larger one of both consumers' magnitudes of a thread's two rows."""
        rows = [self.thread_row(thread) + 8 * b for b in range(2)]
        if thread % 4 == 0:
            for b in cutlass.range_constexpr(2):
                sMaxima[rows[b], group] = largest[b]
        cute.arch.barrier(barrier_id=BOTH_BARRIER, number_of_threads=CONSUMERS * WARPGROUP)
        return [cute.arch.fmax(largest[b], sMaxima[rows[b], 1 - group]) for b in range(2)]


def product(key: ProductKey, scaled: ScaledKey[Any], beside: bool) -> ScaledGroupedGemm:
    """The kernel of a product."""
    return ScaledGroupedGemm(key, scaled, beside)
