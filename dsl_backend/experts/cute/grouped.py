# SPDX-License-Identifier: Apache-2.0
"""What the grouped GEMMs of experts share: work tiles from a list on the device, gathered x, and weights by TMA.

The first product gathers each row of x by its pair's token, with cp.async by four warps, and writes the activation's
result for the rows in order. The second one loads these rows by TMA and writes each row to its pair's place, or adds it
to its token's row of the output, which the first one has cleared. Weights come by TMA.

Rows of a tile beyond those of its expert hold what was there before: rows do not mix, and they are not stored.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.cute.args import RECORD, ExpertsArgs
from dsl_backend.experts.cute.key import ProductKey
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.sizes import BLOCK_BYTES, TAIL_ROWS, WARPGROUP
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.gemm.tiled import GemmBase
from dsl_backend.gemm.tiles import GemmTiles
from dsl_backend.gemm.views import column_slices_view, expert_parts_view, slices_view
from dsl_backend.primitives import dependent_launch
from dsl_backend.primitives.copy import add_vector, clear_rows, cp_async_zfill, load_vector, store_vector
from dsl_backend.primitives.pipeline import Edge, Pipeline, cp_async
from dsl_backend.primitives.schedule import raster

VECTOR_BYTES = 16
# Copies of so many bytes of a row in a stage.
ROW_VECTORS = BLOCK_BYTES // VECTOR_BYTES


@dataclass(frozen=True)
class GroupedParams:
    """What the kernel's warps work with.

    Attributes:
        tma_atom_x, tma_atom_x_tail: copies of [tile_m, block_k] and [TAIL_ROWS, block_k]; missing where x is gathered.
        mX: [tokens, k], or coordinates [rows, k].
        tma_atom_w, mW: copies of [box_n, block_k]; coordinates [n, k, parts, E].
        mBias: [E, parts * n]. mScale: float32 [pairs]. Either may be missing.
        mOut: [pairs, n], or [tokens, n] that rows are added to.
        mPairs, mTiles, mTileCount: see `args.ExpertsScratch`.
        mCleared: [tokens, columns] that the next product adds to, or missing.
        tma_atom_shared, mShared: as those of mW, of S shared experts, or missing; coordinates [n, k, parts, S].
    """

    tma_atom_x: cute.CopyAtom
    tma_atom_x_tail: cute.CopyAtom
    mX: cute.Tensor
    tma_atom_w: cute.CopyAtom
    mW: cute.Tensor
    mBias: cute.Tensor
    mScale: cute.Tensor
    mOut: cute.Tensor
    mPairs: cute.Tensor
    mTiles: cute.Tensor
    mTileCount: cute.Tensor
    mCleared: cute.Tensor
    tma_atom_shared: cute.CopyAtom
    mShared: cute.Tensor


@dataclass(frozen=True)
class WorkTile:
    """Up to tile_m rows of an expert, and a tile of columns; m_tile is its place in the list of work tiles."""

    expert: cutlass.Int32
    first_row: cutlass.Int32
    rows: cutlass.Int32
    n_tile: cutlass.Int32
    m_tile: cutlass.Int32


@dataclass(frozen=True)
class Schedule:
    """A CTA's tiles: every `stride`th of m_tiles x n_tiles from `first` on, `count` of them."""

    m_tiles: cutlass.Int32
    n_tiles: cutlass.Int32
    first: cutlass.Int32
    stride: cutlass.Int32
    count: cutlass.Int32


TilesT = TypeVar("TilesT", bound=GemmTiles)


def shared_view(operands: ExpertsOperands, first: bool) -> cute.Tensor:
    """Weights of shared experts as [n, k, parts, S], of the first product or of the second one."""
    width = operands.w2.shape[2]
    if first:
        return slices_view(operands.shared_w13, width, operands.x.shape[1], 2)
    return column_slices_view(operands.shared_w2, width)


def gemm_key(key: ProductKey, config: TilesT) -> GemmKey[TilesT]:
    """Of a product; the experts' biases are added here."""
    return GemmKey(
        dtypes=Dtypes.of(key.dtype),
        activation=key.activation,
        interleaved=key.interleaved,
        bias=False,
        residual=False,
        config=config,
    )


class GroupedProduct(GemmBase):
    """One of the two products of experts. The first one has an activation, and gathers; the second one scatters.

    A class of an SM adds its `Gemm`, `launch_kernel` and an epilogue.
    """

    # Of an SM's class.
    load_edge: Edge
    # Tiles of columns next to each other that a stage has weights of.
    side = 1

    def set_up(self, key: ProductKey) -> None:
        self.gathers, self.has_bias, self.scaled = self.gated, key.bias, key.scaled
        self.pairs_per_row, self.experts, self.shared = key.pairs_per_row, key.experts, key.shared
        self.prefetches, self.trims = key.prefetches and not self.gated, key.trims
        self.waits_first = key.prefetches and self.gated
        self.clears, self.adds, self.weighted = key.adds > 0 and self.gated, 0 if self.gated else key.adds, key.weighted
        if self.gathers:
            self.load_edge = Edge("gathered x, and weights", cp_async(WARPGROUP), self.load_edge.consumers, self.stages)

    @cute.jit
    def launch(self, args: ExpertsArgs, stream):
        """Launch at most the given number of CTAs."""
        operands, scratch = args.operands, args.scratch
        first = cutlass.const_expr(self.gathers)
        bias, ctas = (operands.w13_bias, args.first_ctas) if first else (operands.w2_bias, args.second_ctas)
        x, weight, out = self.matrices(args)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_atom_w, mW = self.weights_copy(load, weight)
        tma_atom_shared, mShared = None, None
        if cutlass.const_expr(self.shared):
            tma_atom_shared, mShared = self.boxes_copy(load, shared_view(operands, first))
        tma_atom_x, tma_atom_x_tail, mX = None, None, x
        if cutlass.const_expr(not first):
            tma_atom_x_tail, _ = self.x_copy(load, x, TAIL_ROWS)
            tma_atom_x, mX = self.x_copy(load, x, self.tile_m)
        scale = None
        if cutlass.const_expr(self.scaled or self.weighted):
            scale = cute.make_tensor(operands.topk_weights.iterator, cute.make_layout(cute.size(operands.topk_weights)))
        params = GroupedParams(
            tma_atom_x,
            tma_atom_x_tail,
            mX,
            tma_atom_w,
            mW,
            bias if cutlass.const_expr(self.has_bias) else None,
            scale,
            out,
            scratch.pairs,
            scratch.tiles,
            scratch.tile_count,
            operands.out if cutlass.const_expr(self.clears) else None,
            tma_atom_shared,
            mShared,
        )
        self.launch_kernel(self.extended(params, args), ctas, stream)

    def matrices(self, args: Any) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """(x, weight, out) of the product."""
        operands, hidden = args.operands, args.scratch.hidden
        if self.gathers:
            return operands.x, operands.w13, hidden
        return hidden, operands.w2, operands.out if self.adds else args.scratch.made

    def weights_copy(self, load, weight: cute.Tensor):
        """(atom, coordinates) of TMA copies of a box of weights."""
        return self.boxes_copy(load, expert_parts_view(weight, self.parts, self.interleaved))

    def x_copy(self, load, x: cute.Tensor, rows: int):
        """(atom, coordinates) of TMA copies of so many rows of a stage."""
        return cpasync.make_tiled_tma_atom(load, x, self.box_layout(rows), (rows, self.block_k))

    def boxes_copy(self, load, weights: cute.Tensor):
        """The same of weights [n, k, parts, experts]."""
        return cpasync.make_tiled_tma_atom(load, weights, self.box_layout(self.box_n), (self.box_n, self.block_k))

    def extended(self, params: GroupedParams, args: Any) -> GroupedParams:
        """The parameters with what a kernel has beside them."""
        return params

    def prefetch_descriptors(self, params: GroupedParams):
        """Of all TMA copies."""
        for atom in (params.tma_atom_w, params.tma_atom_shared, params.tma_atom_x, params.tma_atom_x_tail):
            if atom is not None:
                cpasync.prefetch_descriptor(atom)

    @cute.jit
    def clear_stages(self, sX: cute.Tensor, threads: cutlass.Constexpr[int]):
        """By all threads, before a barrier of them.

        Rows of tiles that no expert fills are multiplied too. Products of what was never written would be NaN at best;
        a launch does this while the one before it ends.
        """
        for stage in cutlass.range_constexpr(self.stages):
            clear_rows(sX[None, None, stage], 0, self.tile_m, cute.arch.thread_idx()[0], threads)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_output(self, params: GroupedParams, thread: cutlass.Int32, threads: cutlass.Constexpr[int]):
        """A CTA's rows of what the next product adds to; by so many threads, after the wait for the kernel before."""
        elements = cutlass.const_expr(VECTOR_BYTES * 8 // params.mCleared.element_type.width)
        zeros = cute.make_rmem_tensor(elements, params.mCleared.element_type)
        zeros.fill(0.0)
        rows, columns = params.mCleared.shape
        for row in cutlass.range(cute.arch.block_idx()[0], rows, cute.arch.grid_dim()[0], unroll=1):
            for vector in cutlass.range(thread, columns // elements, threads, unroll=1):
                place = cutlass.Int64(row) * params.mCleared.stride[0] + vector * elements
                store_vector(zeros, params.mCleared.iterator, place)

    def target_row(self, params: GroupedParams, row):
        """The row of the output that a row of the second product is written or added to."""
        return params.mPairs[row] // self.adds if self.adds else params.mPairs[row]

    @cute.jit
    def put_vector(self, params: GroupedParams, rOut: cute.Tensor, row: cutlass.Int32, column: cutlass.Int32):
        """8 neighbouring columns of a row of the output are written, or added to it."""
        place = cutlass.Int64(row) * params.mOut.stride[0] + column
        if cutlass.const_expr(self.adds > 0):
            add_vector(rOut, params.mOut.iterator, place)
        else:
            store_vector(rOut, params.mOut.iterator, place)

    def tiles_of_cta(self, params: GroupedParams) -> Schedule:
        """Static persistent scheduler over tiles whose number the device knows."""
        m_tiles = params.mTileCount[0]
        n_tiles = cute.ceil_div(self.width(params), self.columns)
        first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        count = cute.ceil_div(cutlass.max(m_tiles * n_tiles - first, 0), stride)
        return Schedule(m_tiles, n_tiles, first, stride, count)

    def work_tile(self, params: GroupedParams, schedule: Schedule, tile) -> WorkTile:
        """A CTA's tile of a place in its list: bands of rows of tiles share weights in the L2 cache."""
        rRecord = cute.make_rmem_tensor(RECORD, cutlass.Int32)
        self.load_record(params, schedule, tile, rRecord)
        return self.tile_of(schedule, tile, rRecord)

    def place_of(self, schedule: Schedule, tile):
        """(m_tile, n_tile) of a place in a CTA's list."""
        return raster(schedule.first + tile * schedule.stride, schedule.m_tiles, schedule.n_tiles, self.band)

    def load_record(self, params: GroupedParams, schedule: Schedule, tile, rRecord: cute.Tensor):
        """What the list of work tiles has of a tile, to registers that nothing waits for before `tile_of`."""
        m_tile, _ = self.place_of(schedule, tile)
        load_vector(params.mTiles.iterator, cutlass.Int64(m_tile) * RECORD, rRecord)

    def tile_of(self, schedule: Schedule, tile, rRecord: cute.Tensor) -> WorkTile:
        """The tile whose record was loaded."""
        m_tile, n_tile = self.place_of(schedule, tile)
        expert, first_row, rows = (cute.arch.make_warp_uniform(rRecord[i]) for i in range(3))
        return WorkTile(expert, first_row, rows, n_tile, m_tile)

    def partition_weights(self, params: GroupedParams, sW: cute.Tensor):
        """(tWsW, tWgW) of TMA copies: [copy, box, stage] and [copy, n, k, part, expert].

        With shared experts there are two of the latter, of routed and of shared ones.
        """
        tWsW, of_routed = self.partition_boxes(params.tma_atom_w, params.mW, sW)
        if not self.shared:
            return tWsW, of_routed
        return tWsW, (of_routed, self.partition_boxes(params.tma_atom_shared, params.mShared, sW)[1])

    def partition_boxes(self, tma_atom_w, mW: cute.Tensor, sW: cute.Tensor):
        """The same of an atom."""
        gW = cute.local_tile(mW, (self.box_n, self.block_k), (None, None, None, None))
        boxes = cute.local_tile(sW, (self.box_n, self.block_k), (None, 0, None))
        return cpasync.tma_partition(
            tma_atom_w, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(gW, 0, 2)
        )

    def load_weights(
        self, params: GroupedParams, tWgW: Any, tWsW: cute.Tensor, work, k_tile, stage, mbar, sScales=None
    ):
        """Both boxes of a tile's weights, or of each of the tiles side by side; with them their scale factors."""
        if self.shared:
            self.load_either(params, tWgW, tWsW, work, k_tile, stage, mbar)
        else:
            self.copy_boxes(params.tma_atom_w, tWgW, work.expert, tWsW, work, k_tile, stage, mbar)

    @cute.jit
    def load_either(self, params: GroupedParams, tWgW: Any, tWsW: cute.Tensor, work, k_tile, stage, mbar):
        """The same of a routed expert or of a shared one, each by its own TMA descriptor."""
        if work.expert < self.experts:
            self.copy_boxes(params.tma_atom_w, tWgW[0], work.expert, tWsW, work, k_tile, stage, mbar)
        else:
            self.copy_boxes(
                params.tma_atom_shared, tWgW[1], work.expert - self.experts, tWsW, work, k_tile, stage, mbar
            )

    def copy_boxes(self, tma_atom_w, tWgW: cute.Tensor, expert, tWsW: cute.Tensor, work, k_tile, stage, mbar):
        """The same, of an expert of sources [copy, n, k, part, experts]."""
        of_expert = tWgW[None, None, None, None, expert]
        for i in range(2 * self.side):
            box = self.box(of_expert, self.side * work.n_tile + i // 2, k_tile, i % 2)
            cute.copy(tma_atom_w, box, tWsW[None, i, stage], tma_bar_ptr=mbar)

    def factor_source(self, params: GroupedParams, work: WorkTile, thread):
        """Where scale factors of the x row of a gathering thread begin; 0 where matrix products have none."""
        return cutlass.Int64(0)

    def gather_factors(self, params: GroupedParams, sScales, source, k_tile, stage, thread):
        """Copy a stage's scale factors of a gathering thread's row of x: here there are none."""

    def load_row_factors(self, params: GroupedParams, sScales, work: WorkTile, k_tile, stage, mbar):
        """Copy a stage's scale factors of rows that lie in order: here there are none."""

    @cute.jit
    def gather(
        self,
        params: GroupedParams,
        sX: cute.Tensor,
        sW: cute.Tensor,
        pipeline: Pipeline,
        thread: cutlass.Int32,
        loads_weights: cutlass.Boolean,
        sScales: cute.Tensor = None,
    ):
        """Four load warps: each thread copies the same 16 bytes of every 16th row; one warp loads the weights too."""
        schedule = self.tiles_of_cta(params)
        vector, row = thread % ROW_VECTORS, thread // ROW_VECTORS
        step = cutlass.const_expr(WARPGROUP // ROW_VECTORS)
        copies = cutlass.const_expr(self.tile_m // step)
        k_tiles = self.k_tiles(params)
        tWsW, tWgW = self.partition_weights(params, sW)
        # The widest swizzle: vectors of a row of 128 bytes are permuted by the row's place among 8. Rows of a thread
        # are 16 apart, which leaves its vector where it is.
        target = sX.iterator.toint() + row * BLOCK_BYTES + (vector ^ (row % 8)) * VECTOR_BYTES
        itemsize = cutlass.const_expr(BLOCK_BYTES // self.block_k)
        elements = cutlass.const_expr(VECTOR_BYTES // itemsize)
        sources = cute.make_rmem_tensor(copies, cutlass.Int64)
        for tile in cutlass.range(schedule.count, unroll=1):
            work = self.work_tile(params, schedule, tile)
            for i in cutlass.range_constexpr(copies):
                place = cutlass.min(row + i * step, work.rows - 1)
                token = params.mPairs[work.first_row + place] // self.pairs_per_row
                element = cutlass.Int64(token) * params.mX.stride[0] + vector * elements
                sources[i] = params.mX.iterator.toint() + element * itemsize
            factors = self.factor_source(params, work, thread)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                position = tile * k_tiles + k_tile
                stage = pipeline.stage(position)
                pipeline.producer_acquire(position)
                if loads_weights:
                    pipeline.producer_expect(position, self.weight_bytes)
                    self.load_weights(params, tWgW, tWsW, work, k_tile, stage, pipeline.full(position), sScales)
                self.gather_factors(params, sScales, factors, k_tile, stage, thread)
                inside = k_tile * self.block_k + vector * elements < params.mX.shape[1]
                count = cutlass.Int32(VECTOR_BYTES) if inside else cutlass.Int32(0)
                to = target + stage * (self.tile_m * BLOCK_BYTES)
                offset = cutlass.Int64(k_tile * BLOCK_BYTES) if inside else cutlass.Int64(0)
                for i in cutlass.range_constexpr(copies):
                    if row + i * step < work.rows:
                        cp_async_zfill(to + i * (step * BLOCK_BYTES), sources[i] + offset, count)
                cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full(position))

    @cute.jit
    def wait_for_rows(self):
        """Let the next kernel start, and wait for the one before this one; by all threads.

        Of two products that overlap, the first one waits before it lets the second one start: work tiles are there for
        both. The load warp of the second one waits later.
        """
        if cutlass.const_expr(self.waits_first):
            dependent_launch.wait()
        dependent_launch.launch_dependents()
        if cutlass.const_expr(not self.waits_first and not self.prefetches):
            dependent_launch.wait()

    @cute.jit
    def prefetch_weights(
        self,
        params: GroupedParams,
        sW: cute.Tensor,
        pipeline: Pipeline,
        schedule: Schedule,
        sScales: cute.Tensor = None,
    ):
        """Request the weights of the first tile, as far as stages go, and wait for the rows; the number of k tiles."""
        early = cutlass.Int32(0)
        if schedule.count > 0:
            work = self.work_tile(params, schedule, 0)
            tWsW, tWgW = self.partition_weights(params, sW)
            tx_bytes = self.bytes_of_stage(work)
            early = cutlass.min(self.k_tiles(params), self.stages)
            for k_tile in cutlass.range(early, unroll=1):
                pipeline.producer_expect(k_tile, tx_bytes)
                self.load_weights(params, tWgW, tWsW, work, k_tile, k_tile, pipeline.full(k_tile), sScales)
        dependent_launch.wait()
        return early

    def bytes_of_stage(self, work: WorkTile):
        """Bytes that TMA copies into a stage."""
        return self.weight_bytes + cute.ceil_div(work.rows, TAIL_ROWS) * (TAIL_ROWS * self.x_row_bytes)

    @cute.jit
    def load(
        self,
        params: GroupedParams,
        sX: cute.Tensor,
        sW: cute.Tensor,
        pipeline: Pipeline,
        sScales: cute.Tensor = None,
    ):
        """The load warp: rows that lie in order, and weights."""
        schedule, one = self.tiles_of_cta(params), cute.make_layout(1)
        k_tiles = self.k_tiles(params)
        tWsW, tWgW = self.partition_weights(params, sW)
        sX_tail = cute.local_tile(sX, (TAIL_ROWS, self.block_k), (None, 0, None))
        early = cutlass.Int32(0)
        if cutlass.const_expr(self.prefetches):
            early = self.prefetch_weights(params, sW, pipeline, schedule, sScales)
        for tile in cutlass.range(schedule.count, unroll=1):
            work = self.work_tile(params, schedule, tile)
            mX = cute.domain_offset((work.first_row, 0), params.mX)
            gX = cute.local_tile(mX, (self.tile_m, self.block_k), (None, None))
            gX_tail = cute.local_tile(mX, (TAIL_ROWS, self.block_k), (None, None))
            tXsX, tXgX = cpasync.tma_partition(
                params.tma_atom_x, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
            )
            tXsX_tail, tXgX_tail = cpasync.tma_partition(
                params.tma_atom_x_tail, 0, one, cute.group_modes(sX_tail, 0, 2), cute.group_modes(gX_tail, 0, 2)
            )
            boxes = cute.ceil_div(work.rows, TAIL_ROWS)
            tx_bytes = self.bytes_of_stage(work)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                position = tile * k_tiles + k_tile
                stage = pipeline.stage(position)
                mbar_full = pipeline.full(position)
                if position >= early:
                    pipeline.producer_acquire(position)
                    pipeline.producer_expect(position, tx_bytes)
                    self.load_weights(params, tWgW, tWsW, work, k_tile, stage, mbar_full, sScales)
                self.load_row_factors(params, sScales, work, k_tile, stage, mbar_full)
                if boxes == self.tile_m // TAIL_ROWS:
                    cute.copy(params.tma_atom_x, tXgX[None, 0, k_tile], tXsX[None, stage], tma_bar_ptr=mbar_full)
                else:
                    for i in cutlass.range(boxes, unroll=1):
                        cute.copy(
                            params.tma_atom_x_tail,
                            tXgX_tail[None, i, k_tile],
                            tXsX_tail[None, i, stage],
                            tma_bar_ptr=mbar_full,
                        )
