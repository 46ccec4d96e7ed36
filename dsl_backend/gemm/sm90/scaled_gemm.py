# SPDX-License-Identifier: Apache-2.0
"""The persistent GEMM of e4m3 operands on SM90: sums of few blocks of k are promoted to float32.

wgmma keeps 14 bits of a sum of 8-bit products (emulator/machine/narrow_sums.py): sums over all of k would drift.
Each consumer warpgroup therefore has two sets of accumulators: wgmma's, for one block of k or a few, and float32 sums.
Scales of blocks are multiplied in there. While one consumer adds, the other's products run: both have half of every
tile, and neither waits for the other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.nvgpu import warpgroup as wgmma

from dsl_backend.gemm.args import GemmOperands, ScaledArgs
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.sizes import WARP, WARPGROUP
from dsl_backend.gemm.sm90.configs import CONSUMERS, MMA_M
from dsl_backend.gemm.sm90.gemm import CONSUMER_BARRIER, Gemm
from dsl_backend.gemm.sm90.scaled_configs import ScaledGemmConfig
from dsl_backend.gemm.small_m import Received
from dsl_backend.gemm.tiled import GemmParams
from dsl_backend.gemm.views import bias_of
from dsl_backend.primitives.accumulators import fence_operand, fence_pointer, fence_register
from dsl_backend.primitives.copy import store_shared_remote, store_vector
from dsl_backend.primitives.math import f32_to_e4m3, fma, tree_max
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.pipeline import Pipeline, warps
from dsl_backend.primitives.schedule import raster, share
from dsl_backend.quant.format import E4M3, GROUP
from dsl_backend.quant.reference import LEAST_OF_GROUP

E4M3_MAX = E4M3.largest
# Blocks of k whose scales a thread has or awaits, where x's are row-major.
AHEAD = 2


@dataclass(frozen=True)
class ScaledParams(GemmParams):
    """With scales as in `scaled.ScaledOperands`.

    Attributes:
        tma_atom_x_scale: copies of a tile's rows of a group of x's columns; None where `mXScale` is read by threads.
        rRows, sScales: a consumer's own, of a tile: scales of a thread's rows, two of each 64, in registers, and of the
            weights' rows in shared memory. Missing where scales are those of blocks.
    """

    mXScale: cute.Tensor
    mWeightScale: cute.Tensor
    mOutScale: cute.Tensor
    tma_atom_x_scale: cute.CopyAtom = None
    rRows: cute.Tensor = None
    sScales: cute.Tensor = None


class Place(NamedTuple):
    """Where a consumer's thread is: its tile, the tile's stages, and scales of blocks.

    Attributes:
        sScales: x's scales of each stage.
        of_lanes: the weights' scales of WARP blocks of k, one in each lane; at first those of the first WARP blocks.
        start: the tile's first position in the pipeline.
        row: the first of the thread's rows of the tile.
        first_rows: of both boxes of weights.
    """

    params: ScaledParams
    pipeline: Pipeline
    sScales: cute.Tensor
    of_lanes: cute.Tensor
    start: cutlass.Int32
    row: cutlass.Int32
    first_rows: list
    n_tile: cutlass.Int32
    thread: cutlass.Int32


def as_e4m3(stages: cute.Tensor) -> cute.Tensor:
    """Stages of bytes in the widest swizzle, as a wgmma takes them."""
    pointer = cute.recast_ptr(stages.iterator, cute.make_swizzle(3, 4, 3), cutlass.Float8E4M3FN)
    return cute.make_tensor(pointer, stages.layout)


class ScaledGemm(Gemm):
    """See `gemm/tiled.py` and `gemm/scaled.py`."""

    min_ctas = 1

    def __init__(self, key: ScaledKey[ScaledGemmConfig]):
        super().__init__(key)
        config = key.config
        self.promotion, self.blocked = config.promotion, key.weight.blocked
        self.copies_scales = key.weight.blocked and key.column_major
        if self.copies_scales:
            # A wgmma is done for all of a warpgroup, a thread's loads of scales for its warp alone.
            readers = warps(self.consumers_of_tile * (WARPGROUP // WARP), self.cluster)
            self.load_edge = replace(self.load_edge, consumers=readers)
        self.x_rows, self.weight_rows_scaled = key.x.block_rows == 1, key.weight.block_rows == 1
        self.out_format, self.wide = key.out, key.dtypes.out == torch.float32
        self.group_tiles = config.tiles_of_group(key.out, self.parts)
        self.turns, self.mma_n, self.overlap = config.turns, self.mma_n // config.turns, config.overlap
        # Of scales that threads load: a stage is awaited beside products of the block before. Between the turns no warp
        # has given its own stage back yet, so that it may be awaited again.
        self.waits_early = self.turns > 1
        self.stored_columns = config.stored_columns(self.parts)
        self.epi_tile = (MMA_M, self.stored_columns)
        # The bias is added in the epilogue, behind the scales.
        self.biased = False
        # Boxes that may begin in one block of a weight's rows and end in the next one have two scales.
        self.splits = config.splits
        self.launched_together = self.cluster * self.splits
        self.box_blocks = 1 if GROUP % self.box_n == 0 else 2
        # Neighbouring columns of a box that are in the same block, wherever it begins.
        self.same_scale = math.gcd(self.box_n, GROUP)

    @cute.jit
    def __call__(self, x: cute.Tensor, args: ScaledArgs, stream):
        """Launch; see `args.scaled_launch_args`."""
        self.launch(args, stream)

    def params(  # type: ignore[override]
        self, operands: ScaledOperands, x_op, weight_op, sOut_tile, epi_tile
    ) -> ScaledParams:
        """The kernel's, with TMA descriptors; arguments as the base's."""
        plain = GemmOperands(operands.x, operands.weight, operands.bias, None, operands.out)
        base = super().params(plain, x_op, weight_op, sOut_tile, epi_tile)
        scales = {
            "mXScale": operands.x_scale,
            "mWeightScale": operands.weight_scale,
            "mOutScale": operands.out_scale,
        }
        if self.copies_scales:
            box = cute.make_layout((self.tile_m, 1))
            atom, mXScale = cpasync.make_tiled_tma_atom(x_op, operands.x_scale, box, (self.tile_m, 1))
            scales |= {"tma_atom_x_scale": atom, "mXScale": mXScale}
        return ScaledParams(**{field.name: getattr(base, field.name) for field in fields(base)}, **scales)

    def scale_stages(self, smem: SmemAllocator) -> cute.Tensor | None:
        """X's scales of each stage's groups, or those of a tile's rows of weights, for each consumer."""
        if not (self.copies_scales or self.weight_rows_scaled):
            return None
        shape = (self.tile_m, self.stages) if self.copies_scales else (2 * self.box_n, CONSUMERS)
        return smem.allocate_tensor(cutlass.Float32, cute.make_layout(shape), byte_alignment=128)

    def tx_bytes(self, params: ScaledParams, m_tile, cta_rank):  # type: ignore[override]
        """With those of scales."""
        return super().tx_bytes(params, m_tile, cta_rank) + (4 * self.tile_m if self.copies_scales else 0)

    def load_scales(self, params: ScaledParams, sScales, m_tile, n_tile, k_tile, stage, mbar):  # type: ignore[override]
        """X's scales of a stage's groups; those past the last row are 0."""
        if not self.copies_scales:
            return
        gScales = cute.local_tile(params.mXScale, (self.tile_m, 1), (None, None))
        target, source = cpasync.tma_partition(
            params.tma_atom_x_scale,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.local_tile(sScales, (self.tile_m, 1), (0, None)), 0, 2),
            cute.group_modes(gScales, 0, 2),
        )
        cute.copy(params.tma_atom_x_scale, source[None, m_tile, k_tile], target[None, stage], tma_bar_ptr=mbar)

    @property
    def mma_dtypes(self) -> tuple[Any, Any]:
        """E4m3: the tensors are bytes."""
        return cutlass.Float8E4M3FN, cutlass.Float8E4M3FN

    def consumer_operands(self, tiled_mma: cute.TiledMma, sX: cute.Tensor, sW: cute.Tensor, group, thread):
        """The same of bytes as e4m3, with a list of the weights of each turn and the accumulators of one."""
        sW = as_e4m3(sW)
        boxes = [cute.local_tile(sW, (self.mma_n, self.block_k), (turn, 0, None)) for turn in range(self.turns)]
        found = [super(ScaledGemm, self).consumer_operands(tiled_mma, as_e4m3(sX), box, group, thread) for box in boxes]
        row_tile, tCrX, _, _ = found[0]
        acc_shape = tiled_mma.partition_shape_C((self.consumer_m, self.mma_n))
        acc = cute.make_rmem_tensor(acc_shape, cutlass.Float32)
        return row_tile, tCrX, [weights for _, _, weights, _ in found], acc

    def rank(self):
        """0 where a cluster's CTAs have the same tile."""
        return super().rank() if self.splits == 1 else cutlass.Int32(0)

    def k_part(self, k_tiles):
        """A part of k where a cluster shares a tile."""
        if self.splits == 1:
            return super().k_part(k_tiles)
        split = super().rank()
        first = share(k_tiles, self.splits, split)
        return first, share(k_tiles, self.splits, split + 1) - first

    def k_part_of(self, params: ScaledParams):
        """The same of all of x's columns."""
        return self.k_part(cute.ceil_div(params.mX.shape[1], self.block_k))

    def grid(self, operands, max_ctas: cutlass.Int32):
        """With a cluster for each tile, all of them: what a CTA receives is one tile's."""
        if self.splits == 1:
            return super().grid(operands, max_ctas)
        n_tiles = cute.ceil_div(operands.out.shape[1], self.columns)
        return cute.ceil_div(operands.x.shape[0], self.tile_m) * n_tiles * self.splits, 1, 1

    def received(self, smem: SmemAllocator) -> Received | None:
        """Of one consumer's rows, each thread's partial sums."""
        if self.splits == 1:
            return None
        sums = self.consumer_m * 2 * self.box_n // WARPGROUP
        # Neighbouring threads store 16 bytes side by side.
        layout = cute.make_layout(((4, sums // 4), WARPGROUP), stride=((1, 4 * WARPGROUP), 4))
        sPartials = smem.allocate_tensor(cutlass.Float32, layout, byte_alignment=16)
        return Received(sPartials, smem.allocate_array(cutlass.Int64, 1))

    def expect_partials(self, received: Received | None):
        """See the base's."""
        if received is not None:
            cute.arch.mbarrier_init(received.mbar, 1)
            cute.arch.mbarrier_arrive_and_expect_tx(received.mbar, 4 * cute.size(received.sPartials.layout))

    @cute.jit
    def sum_splits(self, received: Received, total: cute.Tensor, group: cutlass.Int32, thread: cutlass.Int32):
        """Send the sums of rows that the cluster's other CTA finishes, or add its sums to those of one's own rows."""
        split = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        flat = cute.make_tensor(total.iterator, cute.make_layout(cute.size(total)))
        if group != split:
            for i in cutlass.range_constexpr(cute.size(total) // 4):
                words = [flat[4 * i + j] for j in range(4)]
                target = received.sPartials.iterator + received.sPartials.layout((4 * i, thread))
                store_shared_remote(words, target, received.mbar, 1 - split)
        else:
            cute.arch.mbarrier_wait(received.mbar, 0)
            for i in cutlass.range_constexpr(cute.size(total)):
                flat[i] = flat[i] + received.sPartials[i, thread]

    def place(self, first, tile, clusters, m_tiles, n_tiles):
        """(m_tile, n_tile) of the CTA's tile; tiles of a group of the output's columns follow one another."""
        if self.group_tiles == 1:
            return super().place(first, tile, clusters, m_tiles, n_tiles)
        n_groups = cute.ceil_div(n_tiles, self.group_tiles)
        m_tile, n_group = raster(first + tile // self.group_tiles * clusters, m_tiles, n_groups, self.band)
        return m_tile, n_group * self.group_tiles + tile % self.group_tiles

    def schedule(self, m_tiles, n_tiles):
        """The same of groups of tiles, of which all are counted."""
        if self.splits > 1:
            return cute.arch.block_idx()[0] // self.splits, cute.arch.grid_dim()[0] // self.splits, 1
        first, clusters, groups = super().schedule(m_tiles, cute.ceil_div(n_tiles, self.group_tiles))
        return first, clusters, groups * self.group_tiles

    @cute.jit
    def mma(
        self,
        params: ScaledParams,
        tiled_mma: cute.TiledMma,
        sX: cute.Tensor,
        sW: cute.Tensor,
        sOut: cute.Tensor,
        pipeline: Pipeline,
        group: cutlass.Int32,
        sScales: cute.Tensor = None,
        received: Received | None = None,
    ):
        """A consumer warpgroup: its rows of every tile."""
        m_tiles, n_tiles, _ = self.tile_counts(params)
        _, k_tiles = self.k_part_of(params)
        first, clusters, tiles = self.schedule(m_tiles, n_tiles)
        cta_rank = self.rank()
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row_tile, tCrX, tCrW, acc = self.consumer_operands(tiled_mma, sX, sW, group, thread)
        accs = [acc, cute.make_rmem_tensor(acc.shape, cutlass.Float32)] if self.overlap else [acc]
        total_shape = self.tiled_mma(2 * self.box_n).partition_shape_C((self.consumer_m, 2 * self.box_n))
        total = cute.make_rmem_tensor(total_shape, cutlass.Float32)
        held = cute.make_rmem_tensor((self.columns // 2, self.mma_tiles_m, self.group_tiles), cutlass.Float32)
        of_lanes = cute.make_rmem_tensor(2 * self.box_blocks, cutlass.Float32)
        next_m, next_n = self.place(first, 0, clusters, m_tiles, n_tiles)
        if cutlass.const_expr(self.copies_scales):
            self.scales_of_lanes(params, of_lanes, next_n, 0, thread)
        for i in cutlass.range(tiles // self.group_tiles, unroll=1):
            for part in cutlass.range_constexpr(self.group_tiles):
                tile = i * self.group_tiles + part
                m_tile, n_tile = next_m * self.cluster + cta_rank, next_n
                row = m_tile * self.tile_m + row_tile * self.consumer_m + self.thread_row(thread)
                total.fill(0.0)
                mine = self.scales_of_tile(params, row, n_tile, thread)
                if cutlass.const_expr(self.overlap or self.copies_scales):
                    start, first_row = tile * k_tiles, row_tile * self.consumer_m + self.thread_row(thread)
                    first_rows = [self.first_weight_row(params, n_tile, box) for box in range(2)]
                    place = Place(params, pipeline, sScales, of_lanes, start, first_row, first_rows, n_tile, thread)
                    if cutlass.const_expr(self.overlap):
                        self.overlapped_mainloop(accs, total, tCrX, tCrW, place)
                    else:
                        self.mainloop_of_copied(acc, total, tCrX, tCrW, place)
                elif cutlass.const_expr(self.blocked):
                    start = tile * k_tiles
                    self.mainloop_of_blocks(params, acc, total, tCrX, tCrW, pipeline, start, row, n_tile, thread)
                else:
                    self.promoted_mainloop(acc, total, tCrX, tCrW, pipeline, tile * k_tiles, k_tiles, thread)
                next_m, next_n = self.place(first, cutlass.min(tile + 1, tiles - 1), clusters, m_tiles, n_tiles)
                if cutlass.const_expr(self.copies_scales):
                    # They arrive beside the epilogue.
                    self.scales_of_lanes(params, of_lanes, next_n, 0, thread)
                if cutlass.const_expr(self.splits > 1):
                    self.sum_splits(received, total, group, thread)
                # What the epilogue computes from it in front of the loop over tiles spills: 32 addresses did.
                late = fence_register(thread)
                # Where a cluster shares a tile, each CTA finishes one consumer's rows.
                if self.splits == 1 or group == cute.arch.block_idx_in_cluster():
                    tile_params = self.share_scales(params, mine, sScales, group, thread)
                    if cutlass.const_expr(self.out_format is not None and self.out_format.blocked):
                        self.hold(tile_params, total, held, part, late, row, n_tile)
                    elif cutlass.const_expr(self.wide):
                        self.store_wide(tile_params, total, row, n_tile, late)
                    else:
                        self.epilogue(tile_params, total, sOut, group, late, m_tile, n_tile, row_tile)
            if cutlass.const_expr(self.out_format is not None and self.out_format.blocked):
                self.epilogue_of_groups(params, held, sOut, group, fence_register(thread), m_tile, n_tile, row_tile)
        if cutlass.const_expr(not self.wide):
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def scales_of_tile(self, params: ScaledParams, row, n_tile, thread) -> tuple:
        """(rRows, columns) in registers, before a tile's products: of the thread's rows, and of its share of columns.

        Args:
            row: the first of the thread's rows.
        """
        if self.blocked:
            return None, None
        n = params.mOut.shape[1]
        rRows = cute.make_rmem_tensor(2 * self.mma_tiles_m, cutlass.Float32)
        for i in range(2 * self.mma_tiles_m):
            rRows[i] = params.mXScale[self.scale_row(params, row, i) if self.x_rows else 0]
        shared = []
        for first in range(0, 2 * self.box_n if self.weight_rows_scaled else 0, WARPGROUP):
            of_tile = cutlass.min(first + thread, 2 * self.box_n - 1)
            part, column = (of_tile // self.box_n, of_tile % self.box_n) if self.gated else (0, of_tile)
            shared.append(bias_of(params.mWeightScale, n_tile * self.columns + column, part, n, self.interleaved))
        return rRows, shared

    @cute.jit
    def share_scales(
        self, params: ScaledParams, mine: tuple, sScales: cute.Tensor, group: cutlass.Int32, thread: cutlass.Int32
    ):
        """The parameters with a tile's scales, behind its products: a consumer's threads get those of all columns."""
        rRows, shared = mine
        if cutlass.const_expr(self.weight_rows_scaled):
            sScales = sScales[None, group]
            # All have read those of the tile before.
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
            for i in cutlass.range_constexpr(len(shared)):
                if thread + i * WARPGROUP < 2 * self.box_n:
                    sScales[thread + i * WARPGROUP] = shared[i]
            cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)
        return replace(params, rRows=rRows, sScales=sScales)

    def thread_row(self, thread):
        """The first of a thread's rows among 64 of accumulators; the other one is 8 below."""
        return thread // 32 * 16 + thread % 32 // 4

    @cute.jit
    def issue(
        self,
        acc: cute.Tensor,
        tCrX: cute.Tensor,
        tCrW: cute.Tensor,
        pipeline: Pipeline,
        position: cutlass.Int32,
        accumulate: cutlass.Constexpr[bool],
        turn: cutlass.Constexpr[int] = 0,
    ):
        """Issue a turn's products of a block of k, which are added to `acc` or replace it."""
        # One that was changed in a loop could not be used behind it.
        tiled_mma = self.tiled_mma(self.mma_n)
        tiled_mma.set(wgmma.Field.ACCUMULATE, accumulate)
        stage = pipeline.stage(position)
        wgmma.fence()
        for k_block in cutlass.range_constexpr(cute.size(tCrX, mode=[2])):
            cute.gemm(tiled_mma, acc, tCrX[None, None, k_block, stage], tCrW[turn][None, None, k_block, stage], acc)
            tiled_mma.set(wgmma.Field.ACCUMULATE, True)
        wgmma.commit_group()

    @cute.jit
    def promoted_mainloop(
        self,
        acc: cute.Tensor,
        total: cute.Tensor,
        tCrX: cute.Tensor,
        tCrW: cute.Tensor,
        pipeline: Pipeline,
        start: cutlass.Int32,
        k_tiles: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Add a tile's products from position `start` on to `total`; scales follow in the epilogue."""
        whole = k_tiles // self.promotion * self.promotion
        for first in cutlass.range(0, whole, self.promotion, unroll=1):
            self.promote(acc, total, tCrX, tCrW, pipeline, start + first, self.promotion, thread)
        if cutlass.const_expr(self.promotion > 1):
            for k_tile in cutlass.range(whole, k_tiles, unroll=1):
                self.promote(acc, total, tCrX, tCrW, pipeline, start + k_tile, 1, thread)

    @cute.jit
    def promote(
        self,
        acc: cute.Tensor,
        total: cute.Tensor,
        tCrX: cute.Tensor,
        tCrW: cute.Tensor,
        pipeline: Pipeline,
        start: cutlass.Int32,
        count: cutlass.Constexpr[int],
        thread: cutlass.Int32,
    ):
        """Add the products of `count` blocks of k, from position `start` on, to `total`."""
        for turn in cutlass.range_constexpr(self.turns):
            for i in cutlass.range_constexpr(count):
                if cutlass.const_expr(turn == 0):
                    pipeline.consumer_wait(start + i)
                self.issue(acc, tCrX, tCrW, pipeline, start + i, i > 0, turn)
                if cutlass.const_expr(i > 0):
                    # The block of k before this one is done.
                    wgmma.wait_group(1)
                    pipeline.warpgroup_release(start + i - 1, thread)
            wgmma.wait_group(0)
            fence_operand(acc)
            if cutlass.const_expr(turn == self.turns - 1):
                pipeline.warpgroup_release(start + count - 1, thread)
            self.add(acc, total, turn)

    def add(self, acc: cute.Tensor, total: cute.Tensor, turn: int):
        """Add wgmma's sums of a turn to float32 sums."""
        part = self.part_of_turn(acc, total, turn)
        part.store(part.load() + acc.load())

    def part_of_turn(self, acc: cute.Tensor, total: cute.Tensor, turn: int) -> cute.Tensor:
        """A turn's part of float32 sums, with the shape of a wgmma's."""
        layout = cute.make_layout(acc.shape, stride=((1, 2, 4), self.box_n, 0))
        return cute.make_tensor(total.iterator + turn * (self.mma_n // 2), layout)

    @cute.jit
    def mainloop_of_blocks(
        self,
        params: ScaledParams,
        acc: cute.Tensor,
        total: cute.Tensor,
        tCrX: cute.Tensor,
        tCrW: cute.Tensor,
        pipeline: Pipeline,
        start: cutlass.Int32,
        row: cutlass.Int32,
        n_tile: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Add a tile's products, each block of k with its scales, to `total`.

        Args:
            start: the tile's first position.
            row: the first of the thread's rows of x.
        """
        k_tiles = self.k_tiles(params)
        first_rows = [self.first_weight_row(params, n_tile, box) for box in range(2)]
        # Of two blocks: one's are loaded while the other is multiplied. Without a move from one to the other, nothing
        # waits for them before the block that they are of.
        rows = self.rows_of_scales(params, row, first_rows)
        ahead = [self.scales_of_block(rows, cutlass.min(i, k_tiles - 1)) for i in range(AHEAD)]
        if cutlass.const_expr(self.waits_early):
            pipeline.consumer_wait(start)
        for first in cutlass.range(0, k_tiles, AHEAD, unroll=1):
            for i in cutlass.range_constexpr(AHEAD):
                k_tile = first + i
                if k_tile < k_tiles:
                    if cutlass.const_expr(not self.waits_early):
                        pipeline.consumer_wait(start + k_tile)
                    products = None
                    for turn in cutlass.range_constexpr(self.turns):
                        self.issue(acc, tCrX, tCrW, pipeline, start + k_tile, False, turn)
                        if cutlass.const_expr(turn == 0):
                            # All of it beside products, and not behind the additions. The wait comes before loads:
                            # where x is gathered, it has a fence, whose MEMBAR waits for loads in flight. Behind the
                            # last block it is for the stage that the warps have. With a branch in place of that, ptxas
                            # (CUDA 13.0) put more instructions between products.
                            if cutlass.const_expr(self.waits_early):
                                pipeline.consumer_wait(start + cutlass.min(k_tile + 1, k_tiles - 1))
                            products = self.scale_products(ahead[i])
                            following = cutlass.min(k_tile + AHEAD, k_tiles - 1)
                            ahead[i].store(self.scales_of_block(rows, following).load())
                        wgmma.wait_group(0)
                        fence_operand(acc)
                        if cutlass.const_expr(turn == self.turns - 1):
                            pipeline.warpgroup_release(start + k_tile, thread)
                        self.add_scaled(acc, total, products, first_rows, turn)

    def scale_row(self, params: ScaledParams, row, i: int):
        """Which of x's scales row `i` of a thread's has: 8 below the one before it, or the next 64 rows' first."""
        return cutlass.min(row + 8 * (i % 2) + MMA_M * (i // 2), params.mX.shape[0] - 1)

    @cute.jit
    def mainloop_of_copied(self, acc: cute.Tensor, total: cute.Tensor, tCrX: cute.Tensor, tCrW: list, place: Place):
        """The same with scales of x that come with a stage; those of weights of WARP blocks are in as many lanes."""
        _, k_tiles = self.k_part_of(place.params)
        # A loop carries the object whose method it calls: of `place`, all members.
        pipeline, start = place.pipeline, place.start
        for k_tile in cutlass.range(k_tiles, unroll=1):
            pipeline.consumer_wait(start + k_tile)
            products = None
            for turn in cutlass.range_constexpr(self.turns):
                self.issue(acc, tCrX, tCrW, pipeline, start + k_tile, False, turn)
                if cutlass.const_expr(turn == 0):
                    products = self.products_of(place, k_tile)
                wgmma.wait_group(0)
                self.take(acc, total, place, products, k_tile, turn)

    @cute.jit
    def overlapped_mainloop(self, accs: list, total: cute.Tensor, tCrX: cute.Tensor, tCrW: list, place: Place):
        """Add a tile's products to `total`: one set of accumulators while the other one's products run.

        Args:
            accs: both sets: of the turns of a block of k, or of blocks of k in turns.
        """
        _, k_tiles = self.k_part_of(place.params)
        operands = (accs, total, tCrX, tCrW)
        place.pipeline.consumer_wait(place.start)
        self.issue(accs[0], tCrX, tCrW, place.pipeline, place.start, False, 0)
        pairs = (k_tiles - 1) // 2
        for i in cutlass.range(pairs, unroll=1):
            self.overlapped_blocks(operands, place, 2 * i, 2, True)
        # Two ends, of which a value chooses: behind a single one, ptxas lets the loop's products run one at a time.
        if 2 * pairs + 1 < k_tiles:
            self.overlapped_blocks(operands, place, 2 * pairs, 2, False)
        else:
            self.overlapped_blocks(operands, place, 2 * pairs, 1, False)

    @cute.jit
    def overlapped_blocks(
        self,
        operands: tuple,
        place: Place,
        k_tile: cutlass.Int32,
        blocks: cutlass.Constexpr[int],
        more: cutlass.Constexpr[bool],
    ):
        """Add so many blocks' products from `k_tile` on, whose first turn is issued, and issue the next block's.

        Args:
            more: whether there is a next block.
        """
        accs, total, tCrX, tCrW = operands
        pipeline, first = place.pipeline, place.start + k_tile
        steps = cutlass.const_expr(blocks * self.turns)
        products = None
        for step in cutlass.range_constexpr(steps):
            block, turn = cutlass.const_expr(step // self.turns), cutlass.const_expr(step % self.turns)
            following, next_turn = (
                cutlass.const_expr((step + 1) // self.turns),
                cutlass.const_expr((step + 1) % self.turns),
            )
            if cutlass.const_expr(more or step + 1 < steps):
                if cutlass.const_expr(next_turn == 0):
                    pipeline.consumer_wait(first + following)
                self.issue(accs[(step + 1) % 2], tCrX, tCrW, pipeline, first + following, False, next_turn)
            if cutlass.const_expr(turn == 0):
                products = self.products_of(place, k_tile + block)
            wgmma.wait_group(1 if cutlass.const_expr(more or step + 1 < steps) else 0)
            self.take(accs[step % 2], total, place, products, k_tile + block, turn)

    @cute.jit
    def products_of(self, place: Place, k_tile: cutlass.Int32):
        """What `scale_products` returns of a block of k, in registers behind this; None without scales of blocks."""
        products = None
        if cutlass.const_expr(self.copies_scales):
            if k_tile > 0 and k_tile % WARP == 0:
                self.scales_of_lanes(place.params, place.of_lanes, place.n_tile, k_tile, place.thread)
            scales = cute.make_rmem_tensor(2 * self.mma_tiles_m + 2 * self.box_blocks, cutlass.Float32)
            stage = place.pipeline.stage(place.start + k_tile)
            for i in cutlass.range_constexpr(2 * self.mma_tiles_m):
                scales[i] = place.sScales[place.row + 8 * (i % 2) + MMA_M * (i // 2), stage]
            for i in cutlass.range_constexpr(2 * self.box_blocks):
                scales[2 * self.mma_tiles_m + i] = cute.arch.shuffle_sync(place.of_lanes[i], k_tile % WARP)
            # What the stage's scales are for is there before it is given back.
            products = [
                [[fence_register(product) for product in of_box] for of_box in of_row]
                for of_row in self.scale_products(scales)
            ]
        return products

    @cute.jit
    def take(
        self,
        acc: cute.Tensor,
        total: cute.Tensor,
        place: Place,
        products: list | None,
        k_tile: cutlass.Int32,
        turn: cutlass.Constexpr[int],
    ):
        """Add a turn's accumulators, whose products are done, to `total`; give the stage back behind its last turn."""
        fence_operand(acc)
        if cutlass.const_expr(turn == self.turns - 1):
            if cutlass.const_expr(self.copies_scales):
                place.pipeline.warp_release(place.start + k_tile, place.thread % WARP)
            else:
                place.pipeline.warpgroup_release(place.start + k_tile, place.thread)
        if cutlass.const_expr(self.blocked):
            self.add_scaled(acc, total, products, place.first_rows, turn)
        else:
            self.add(acc, total, turn)
        # Added behind the next products, sums would need registers of their own.
        fence_operand(self.part_of_turn(acc, total, turn))

    def scales_of_lanes(self, params: ScaledParams, of_lanes: cute.Tensor, n_tile, first_block, thread):
        """Weights' scales of WARP blocks of k, of which each lane has one."""
        last = cute.ceil_div(params.mX.shape[1], self.block_k) - 1
        first_rows = [self.first_weight_row(params, n_tile, box) for box in range(2)]
        first, _ = self.k_part_of(params)
        self.weight_scales(params, of_lanes, first_rows, cutlass.min(first + first_block + thread % WARP, last))

    def first_weight_row(self, params: ScaledParams, n_tile, box: int):
        """The first row of weights of a box of a tile."""
        if self.gated:
            return box * params.mOut.shape[1] + n_tile * self.box_n
        return (2 * n_tile + box) * self.box_n

    def rows_of_scales(self, params: ScaledParams, row, first_rows: list) -> list[cute.Tensor]:
        """Scales by block of k: of a thread's rows of x, then of both boxes.

        Of a box that may lie in two blocks of rows there are two.
        """
        found = [params.mXScale[self.scale_row(params, row, i), None] for i in range(2 * self.mma_tiles_m)]
        found += [params.mWeightScale[block, None] for block in self.scale_blocks(params, first_rows)]
        if not self.waits_early:
            return found
        # In registers: ptxas (CUDA 13.0) computed where rows begin anew for each block of k, in 60 instructions between
        # a stage's arrival and its first product. Other tiles have no registers left.
        return [cute.make_tensor(fence_pointer(one.iterator), one.layout) for one in found]

    def scales_of_block(self, rows: list[cute.Tensor], k_tile) -> cute.Tensor:
        """The scales of a block of k, of what `rows_of_scales` returns."""
        scales = cute.make_rmem_tensor(len(rows), cutlass.Float32)
        for i, of_row in enumerate(rows):
            scales[i] = of_row[k_tile]
        return scales

    def scale_blocks(self, params: ScaledParams, first_rows: list) -> Iterator:
        """The blocks of a weight's rows that both boxes, or parts of them, lie in; the last one behind it."""
        for row in first_rows:
            for part in range(self.box_blocks):
                yield cutlass.min(row // GROUP + part, params.mWeightScale.shape[0] - 1)

    def weight_scales(self, params: ScaledParams, scales: cute.Tensor, first_rows: list, k_tile):
        """Those of both boxes in a block of k; any outside."""
        for i, block in enumerate(self.scale_blocks(params, first_rows)):
            scales[i] = params.mWeightScale[block, k_tile]

    def scale_products(self, scales: cute.Tensor) -> list:
        """Products of an x's scale and a weight's: [row of a thread][box][block of rows of weights]."""
        rows, blocks = 2 * self.mma_tiles_m, self.box_blocks
        return [
            [[scales[i] * scales[rows + box * blocks + part] for part in range(blocks)] for box in range(2)]
            for i in range(rows)
        ]

    @cute.jit
    def add_scaled(
        self,
        acc: cute.Tensor,
        total: cute.Tensor,
        products: list,
        first_rows: list,
        turn: cutlass.Constexpr[int],
    ):
        """Add wgmma's sums of a turn's block of k, times what `scale_products` returns."""
        of_turn = cutlass.const_expr(2 // self.turns)
        for i in cutlass.range_constexpr(2 * self.mma_tiles_m):
            for box in cutlass.range_constexpr(turn * of_turn, (turn + 1) * of_turn):
                of_box = products[i][box]
                for j in cutlass.range_constexpr(self.box_n // 8):
                    if cutlass.const_expr(8 * j % self.same_scale == 0):
                        scale = of_box[0]
                        if cutlass.const_expr(self.box_blocks == 2):
                            inside = first_rows[box] % GROUP + 8 * j < GROUP
                            scale = of_box[0] if inside else of_box[1]
                    for a in cutlass.range_constexpr(2):
                        at = (a, i % 2, j + box * (self.box_n // 8))
                        of_acc = (a, i % 2, j + box % of_turn * (self.box_n // 8))
                        total[at, i // 2, 0] = fma(acc[of_acc, i // 2, 0], scale, total[at, i // 2, 0])

    def outputs(
        self, params: ScaledParams, total: cute.Tensor, mma_tile: int, row, first_column, thread, turn: int = 0
    ) -> list:
        """Sums of 64 rows through scales, bias and activation: [column pair j][row b][column a].

        wgmma's accumulators: a thread has columns 8 j + 2 (lane % 4) + a of rows 16 warp + lane / 4 + 8 b.

        Args:
            row: the first of the thread's rows.
            turn: whose columns, where those of two are stored one after the other.
        """
        x_scales = None if self.blocked else self.row_scales(params, row, mma_tile)
        found = []
        for j in range(self.stored_columns // 8):
            columns = [first_column + 8 * j + 2 * (thread % 4) + a for a in range(2)]
            boxes = []
            for box in range(self.parts):
                at = j + (box + turn) * (self.box_n // 8)
                sums = [total[(a, b, at), mma_tile, 0] for b in range(2) for a in range(2)]
                boxes.append(self.with_scales(params, sums, columns, box, x_scales, 8 * at + 2 * (thread % 4)))
            values = boxes[0] if not self.gated else self.activate(*boxes)
            found.append([values[:2], values[2:]])
        return found

    def row_scales(self, params: ScaledParams, row, mma_tile: int) -> list:
        """X's scales of a thread's two rows of 64, the first of which is `row`."""
        return [params.rRows[2 * mma_tile + b] for b in range(2)]

    def column_scales(self, params: ScaledParams, columns: list, part: int, place) -> list:
        """The weights' scales of two neighbouring columns; arguments as `with_scales` has them."""
        if not self.weight_rows_scaled:
            return [params.mWeightScale[0]] * 2
        pair = cute.make_rmem_tensor(2, cutlass.Float32)
        address = cutlass.Int32(params.sScales.iterator.toint()) + 4 * place
        pointer = cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.smem, assumed_align=8)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(2)), pair)
        return [pair[0], pair[1]]

    def with_scales(
        self, params: ScaledParams, sums: list, columns: list, part: int, x_scales: list | None, place
    ) -> list:
        """Four sums, of two rows and two columns each, with their scales and the bias.

        Args:
            x_scales: of both rows; None where sums have their scales.
            place: of the first column's row of weights in the tile.
        """
        n = params.mOut.shape[1]
        if x_scales is not None:
            by_column = self.column_scales(params, columns, part, place)
            sums = [sums[2 * b + a] * by_column[a] * x_scales[b] for b in range(2) for a in range(2)]
        if params.mBias is not None:
            biases = [bias_of(params.mBias, column, part, n, self.interleaved) for column in columns]
            sums = [sums[2 * b + a] + biases[a] for b in range(2) for a in range(2)]
        return sums

    @cute.jit
    def hold(
        self,
        params: ScaledParams,
        total: cute.Tensor,
        held: cute.Tensor,
        part: cutlass.Constexpr[int],
        thread: cutlass.Int32,
        row: cutlass.Int32,
        n_tile: cutlass.Int32,
    ):
        """Keep a tile's outputs until those of its group are complete; 0 past the last column.

        Args:
            held: [outputs of a thread's 64 rows, 64 rows, tile of the group].
        """
        first_column = n_tile * self.columns
        for mma_tile in cutlass.range_constexpr(self.mma_tiles_m):
            values = self.outputs(params, total, mma_tile, row + mma_tile * MMA_M, first_column, thread)
            for j in cutlass.range_constexpr(self.columns // 8):
                for a in cutlass.range_constexpr(2):
                    inside = first_column + 8 * j + 2 * (thread % 4) + a < params.mOut.shape[1]
                    for b in cutlass.range_constexpr(2):
                        value = values[j][b][a]
                        # The columns of a gated layer with scales of blocks are whole groups.
                        if cutlass.const_expr(not (self.blocked and self.gated)):
                            value = value if inside else cutlass.Float32(0.0)
                        held[4 * j + 2 * b + a, mma_tile, part] = value

    @cute.jit
    def epilogue_of_groups(
        self,
        params: ScaledParams,
        held: cute.Tensor,
        sOut: cute.Tensor,
        group: cutlass.Int32,
        thread: cutlass.Int32,
        m_tile: cutlass.Int32,
        n_tile: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
    ):
        """What is held, a group of 128 columns of each row, quantised with a scale of its own to the output.

        Args:
            n_tile: the last one of the group.
        """
        copies = self.epilogue_copy(thread)
        first_row = m_tile * self.tile_m + row_tile * self.consumer_m
        stores = self.store_partition(params, sOut)
        column_group = n_tile // self.group_tiles
        for mma_tile in cutlass.range_constexpr(self.mma_tiles_m):
            inverses = []
            for b in cutlass.range_constexpr(2):
                row = first_row + mma_tile * MMA_M + self.thread_row(thread) + 8 * b
                scale = self.scale_of_group(self.largest_of_row(held, mma_tile, b))
                inverses.append(cutlass.Float32(1.0) / scale)
                if thread % 4 == 0:
                    if row < params.mX.shape[0]:
                        params.mOutScale[row, column_group] = scale
            for part in cutlass.range_constexpr(self.group_tiles):
                for j in cutlass.range_constexpr(self.columns // 8):
                    values = [held[4 * j + 2 * b + a, mma_tile, part] * inverses[b] for b in range(2) for a in range(2)]
                    copies[2][j] = f32_to_e4m3(*values)
                place = first_row // MMA_M + mma_tile, column_group * self.group_tiles + part
                self.store_rows(params, copies, sOut, stores, place, group, thread)

    def largest_of_row(self, held: cute.Tensor, mma_tile: int, b: int):
        """Largest magnitude of one of a thread's rows; NaN is left out. Four lanes have the row."""
        values = [
            held[4 * j + 2 * b + a, mma_tile, part]
            for part in range(self.group_tiles)
            for j in range(self.columns // 8)
            for a in range(2)
        ]
        largest = tree_max([cute.arch.fmax(value, -value) for value in values])
        for lanes in (1, 2):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=lanes))
        return largest

    def scale_of_group(self, largest: cutlass.Float32) -> cutlass.Float32:
        """Of a row's group of columns with this largest magnitude."""
        return cute.arch.fmax(largest, LEAST_OF_GROUP) / cutlass.Float32(E4M3_MAX)

    @cute.jit
    def store_wide(
        self,
        params: ScaledParams,
        total: cute.Tensor,
        row: cutlass.Int32,
        n_tile: cutlass.Int32,
        thread: cutlass.Int32,
    ):
        """Sums in float32 from registers to the output: four lanes store 32 neighbouring bytes, a sector.

        Args:
            row: the first of the thread's rows.
        """
        pair = cute.make_rmem_tensor(2, cutlass.Float32)
        m, n = params.mOut.shape
        stores = cutlass.const_expr(self.columns // self.stored_columns)
        for i in cutlass.range_constexpr(self.mma_tiles_m * stores):
            mma_tile, turn = cutlass.const_expr(i // stores), cutlass.const_expr(i % stores)
            first_row, first_column = row + mma_tile * MMA_M, n_tile * self.columns + turn * self.stored_columns
            values = self.outputs(params, total, mma_tile, first_row, first_column, thread, turn)
            for b in cutlass.range_constexpr(2):
                start = cutlass.Int64(first_row + 8 * b) * params.mOut.stride[0]
                for j in cutlass.range_constexpr(self.stored_columns // 8):
                    column = first_column + 8 * j + 2 * (thread % 4)
                    if first_row + 8 * b < m and column < n:
                        pair[0], pair[1] = values[j][b]
                        store_vector(pair, params.mOut.iterator, start + column)

    def sOut_layout(self) -> cute.ComposedLayout | None:
        """Of the consumers' output buffers. In 8 bits a row's 16-byte vectors are permuted by its place among others.

        Rows of 32, 64 and 128 bytes have TMA's swizzles of as many bytes, all others none. None where threads store
        what they have.
        """
        if self.wide:
            return None
        if self.out_format is None:
            return super().sOut_layout()
        columns = self.stored_columns
        plain = cute.make_layout((MMA_M, columns, CONSUMERS), stride=(columns, 1, MMA_M * columns))
        return cute.make_composed_layout(cute.make_swizzle(self.swizzle_bits, 4, 3), 0, plain)

    def sOut_tile(self, sOut_layout: cute.ComposedLayout | None) -> cute.ComposedLayout | None:
        """One of these buffers."""
        return None if sOut_layout is None else super().sOut_tile(sOut_layout)

    @property
    def swizzle_bits(self) -> int:
        """Of an output buffer in 8 bits."""
        return {32: 1, 64: 2, 128: 3}.get(self.stored_columns, 0)

    def epilogue_copy(self, thread):
        """As the base's; in 8 bits (None, None, tCrOut), which has a word for each pair of columns of both rows."""
        if self.out_format is None:
            return super().epilogue_copy(thread)
        return None, None, cute.make_rmem_tensor(self.stored_columns // 8, cutlass.Int32)

    @cute.jit
    def epilogue(
        self,
        params: ScaledParams,
        acc: cute.Tensor,
        sOut: cute.Tensor,
        group: cutlass.Int32,
        thread: cutlass.Int32,
        m_tile: cutlass.Int32,
        n_tile: cutlass.Int32,
        row_tile: cutlass.Int32 | int,
    ):
        """As the base's, what is stored at once after the other."""
        copies = self.epilogue_copy(thread)
        first_row = m_tile * self.tile_m + row_tile * self.consumer_m
        partition = self.store_partition(params, sOut)
        stores = cutlass.const_expr(self.columns // self.stored_columns)
        for i in cutlass.range_constexpr(self.mma_tiles_m * stores):
            mma_tile, turn = cutlass.const_expr(i // stores), cutlass.const_expr(i % stores)
            column_tile = n_tile * stores + turn
            first = first_row + mma_tile * MMA_M
            self.convert_turn(params, acc, copies[2], mma_tile, thread, first, column_tile, turn)
            place = (first_row // MMA_M + mma_tile, column_tile)
            self.store_rows(params, copies, sOut, partition, place, group, thread)

    @cute.jit
    def convert_turn(
        self,
        params: ScaledParams,
        acc: cute.Tensor,
        tCrOut: cute.Tensor,
        mma_tile: cutlass.Constexpr[int],
        thread: cutlass.Int32,
        first_row: cutlass.Int32,
        column_tile: cutlass.Int32,
        turn: cutlass.Constexpr[int],
    ):
        """64 rows of sums to the output's type, with a scale that is given where it is quantised."""
        row = first_row + self.thread_row(thread)
        values = self.outputs(params, acc, mma_tile, row, column_tile * self.stored_columns, thread, turn)
        inverse = None
        if cutlass.const_expr(self.out_format is not None):
            inverse = cutlass.Float32(1.0) / params.mOutScale[0]
        for j in cutlass.range_constexpr(self.stored_columns // 8):
            if cutlass.const_expr(self.out_format is not None):
                tCrOut[j] = f32_to_e4m3(*(value * inverse for of_row in values[j] for value in of_row))
            else:
                for b in cutlass.range_constexpr(2):
                    for a in cutlass.range_constexpr(2):
                        tCrOut[(a, b, j), 0, 0] = values[j][b][a].to(self.out_dtype)

    def stage_rows(self, copies, sOut: cute.Tensor, group, thread):
        """As the base's; in 8 bits two neighbouring columns at a time."""
        if self.out_format is None:
            super().stage_rows(copies, sOut, group, thread)
            return
        base = cutlass.Int32(sOut.iterator.toint()) + group * (MMA_M * self.stored_columns)
        mask = ((1 << self.swizzle_bits) - 1) << 4
        for j in range(self.stored_columns // 8):
            for b in range(2):
                offset = (self.thread_row(thread) + 8 * b) * self.stored_columns + 8 * j + 2 * (thread % 4)
                address = base + (offset ^ ((offset >> 3) & mask))
                pointer = cute.make_ptr(cutlass.Int16, address, cute.AddressSpace.smem, assumed_align=2)
                half = cutlass.Int16(copies[2][j] >> 16 * b)
                cute.make_tensor(pointer, cute.make_layout(1))[0] = half
