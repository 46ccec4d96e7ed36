# SPDX-License-Identifier: Apache-2.0
"""What the kernels for many rows share: which tiles are a block's, and the producer that copies them.

A tile's weights are two boxes of rows. With a gated activation they are gate rows and up rows of the same output
columns, so that one matrix product makes both; else they are neighbours.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import LayoutEnum, hopper_helpers

from dsl_backend.gemm.epilogue import Arithmetic, epilogue_of
from dsl_backend.gemm.key import LinearKey
from dsl_backend.gemm.sizes import BLOCK_K, ELEMENT_BYTES, PIECE
from dsl_backend.gemm.views import NUMERIC, parts_view
from dsl_backend.linear.configs import Gemms
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.ring import Ring
from dsl_backend.primitives.schedule import raster

ROW_BYTES = BLOCK_K * ELEMENT_BYTES  # of a row of a stage


@dataclass(frozen=True)
class GemmArgs:
    """What the kernel's roles work with.

    Attributes:
        x_load, piece_load, weight_load, out_store: copies of [rows, 64], [PIECE, 64], [box_n, 64] and of a piece of the
            output.
        x, weight, out: coordinates [m, k], [n, k, parts], [m, n].
        bias: [parts * n]. residual: [m, n]. Either may be missing.
    """

    x_load: cute.CopyAtom
    piece_load: cute.CopyAtom
    x: cute.Tensor
    weight_load: cute.CopyAtom
    weight: cute.Tensor
    out_store: cute.CopyAtom
    out: cute.Tensor
    bias: cute.Tensor
    residual: cute.Tensor


def box_layout(rows: int) -> cute.ComposedLayout:
    """Of so many rows of a stage, 64 columns in the widest swizzle.

    It is a stage of what `hopper_helpers` make; CuTe DSL 4.6.0 aborts the process where it is to take one of 8 times an
    odd number of rows.
    """
    return cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((rows, BLOCK_K), stride=(BLOCK_K, 1))
    )


class TiledGemm:
    """out [m, n] = activation(x [m, k] @ weight [parts * n, k]^T + bias) + residual; m, n, k > 0.

    A kernel adds `acquire`, `load_boxes`, and who multiplies.

    Of x's last tile only the rows that are there are copied, with some to the end of a piece. TMA fills a box's rows
    behind the end of a tensor with zeros, at 2 to 3 ns each for a step of an H200's SM: a tile of 64 rows took up to
    1.35 times as long with 32 of them, and one of 128 rows 1.65 times with 64.
    """

    def __init__(self, key: LinearKey[Gemms], arithmetic: Arithmetic):
        config = key.config
        self.tile_m, self.box_n, self.stages = config.tile_m, config.box_n, config.stages
        self.cluster, self.band = config.cluster, config.band
        self.gated, self.interleaved = key.activation is not None, key.interleaved
        self.activate = epilogue_of(key.activation, arithmetic)
        self.parts = 2 if self.gated else 1
        self.columns = config.columns(self.parts)
        self.dtype = NUMERIC[key.dtype]
        self.weight_bytes = config.stage_bytes - config.tile_m * ROW_BYTES

    def arguments(
        self, x, weight, bias, residual, out, x_op, weight_op, out_staged: cute.ComposedLayout, piece: tuple[int, int]
    ) -> GemmArgs:
        """Of host code's tensors.

        Args:
            x_op, weight_op: copies.
            out_staged, piece: of the output, how it lies in shared memory and the size of what is copied at once.
        """
        weights = parts_view(weight, self.parts, self.interleaved)
        x_load, mX = cpasync.make_tiled_tma_atom(x_op, x, box_layout(self.tile_m), (self.tile_m, BLOCK_K))
        piece_load, _ = cpasync.make_tiled_tma_atom(x_op, x, box_layout(PIECE), (PIECE, BLOCK_K))
        weight_load, mW = cpasync.make_tiled_tma_atom(weight_op, weights, box_layout(self.box_n), (self.box_n, BLOCK_K))
        store = cpasync.CopyBulkTensorTileS2GOp()
        out_store, mOut = cpasync.make_tiled_tma_atom(store, out, cute.slice_(out_staged, (None, None, 0)), piece)
        return GemmArgs(x_load, piece_load, mX, weight_load, mW, out_store, mOut, bias, residual)

    def layouts(self, rows: int):
        """Of the stages of x and of a block's `rows` of weights."""
        tile = (self.tile_m, rows, BLOCK_K)
        return (
            hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.stages),
            hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.stages),
        )

    def grid(self, x: cute.Tensor, out: cute.Tensor, blocks: cutlass.Int32):
        """One block for each tile, and at most `blocks`, a multiple of the cluster's."""
        tiles = cute.ceil_div(x.shape[0], self.tile_m * self.cluster) * cute.ceil_div(out.shape[1], self.columns)
        return cutlass.min(tiles * self.cluster, blocks), 1, 1

    def extent(self, args: GemmArgs):
        """(rows of clusters' tiles, columns of tiles, blocks of k)."""
        return (
            cute.ceil_div(args.x.shape[0], self.tile_m * self.cluster),
            cute.ceil_div(args.out.shape[1], self.columns),
            cute.ceil_div(args.x.shape[1], BLOCK_K),
        )

    def turns(self, height, width):
        """(this cluster, all clusters, tiles that this cluster makes)."""
        first = cute.arch.block_idx()[0] // self.cluster
        clusters = cute.arch.grid_dim()[0] // self.cluster
        return first, clusters, cute.ceil_div(height * width - first, clusters)

    def copied(self, args: GemmArgs, row):
        """Rows of a tile of x that are copied: those that are there, and some to the end of a piece."""
        there = args.x.shape[0] - row * self.tile_m
        return cutlass.min(cutlass.max(cute.ceil_div(there, PIECE) * PIECE, 0), self.tile_m)

    def arriving(self, args: GemmArgs, row, rank):
        """Bytes of a stage that the block's barrier counts, in a row of clusters' tiles."""
        return self.weight_bytes + self.copied(args, row * self.cluster + rank) * ROW_BYTES

    @cute.jit
    def clear(self, args: GemmArgs, sX: cute.Tensor, rank, thread, threads: cutlass.Constexpr[int]):
        """Rows that nothing is copied to before they are multiplied; in front of a barrier of all threads."""
        height, _, _ = self.extent(args)
        copied = self.copied(args, (height - 1) * self.cluster + rank)
        if copied < self.tile_m:
            for stage in cutlass.range_constexpr(self.stages):
                clear_rows(sX[None, None, stage], copied, self.tile_m, thread, threads)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def load(self, args: GemmArgs, sX: cute.Tensor, sW: cute.Tensor, ring: Ring):
        """The producer's warp: x's tile, and the boxes of weights that this block is to load."""
        height, width, blocks = self.extent(args)
        first, clusters, turns = self.turns(height, width)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        one = cute.make_layout(1)
        gX = cute.local_tile(args.x, (self.tile_m, BLOCK_K), (None, None))
        gW = cute.local_tile(args.weight, (self.box_n, BLOCK_K), (None, None, None))
        boxes = cute.local_tile(sW, (self.box_n, BLOCK_K), (None, 0, None))
        sXIn, gXIn = cpasync.tma_partition(args.x_load, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2))
        gPiece = cute.local_tile(args.x, (PIECE, BLOCK_K), (None, None))
        pieces = cute.local_tile(sX, (PIECE, BLOCK_K), (None, 0, None))
        sPieceIn, gPieceIn = cpasync.tma_partition(
            args.piece_load, 0, one, cute.group_modes(pieces, 0, 2), cute.group_modes(gPiece, 0, 2)
        )
        sWIn, gWIn = cpasync.tma_partition(
            args.weight_load, 0, one, cute.group_modes(boxes, 0, 2), cute.group_modes(gW, 0, 2)
        )
        for turn in cutlass.range(turns, unroll=1):
            row, column = raster(first + turn * clusters, height, width, self.band)
            arriving = self.arriving(args, row, rank)
            row = row * self.cluster + rank
            copied = self.copied(args, row)
            for block in cutlass.range(blocks, unroll=1):
                position = turn * blocks + block
                stage = ring.stage(position)
                arrived = self.acquire(ring, position, rank, arriving)
                if copied == self.tile_m:
                    cute.copy(args.x_load, gXIn[None, row, block], sXIn[None, stage], tma_bar_ptr=arrived)
                else:
                    for piece in cutlass.range(copied // PIECE, unroll=1):
                        there = gPieceIn[None, row * (self.tile_m // PIECE) + piece, block]
                        cute.copy(args.piece_load, there, sPieceIn[None, piece, stage], tma_bar_ptr=arrived)
                self.load_boxes(args, gWIn, sWIn, column, block, stage, rank, arrived)

    def box(self, gWIn: cute.Tensor, column, block, index):
        """Box 0 or 1 of a column of tiles: gate or up rows, or the first or second half of its rows."""
        if self.gated:
            return gWIn[None, column, block, index]
        return gWIn[None, 2 * column + index, block, 0]

    def load_both(self, args: GemmArgs, gWIn: cute.Tensor, sWIn: cute.Tensor, column, block, stage, arrived):
        """Both boxes, for this block alone."""
        for i in range(2):
            cute.copy(args.weight_load, self.box(gWIn, column, block, i), sWIn[None, i, stage], tma_bar_ptr=arrived)
