# SPDX-License-Identifier: Apache-2.0
"""What the persistent GEMMs share: the tile scheduler, and the load warp.

A tile's weights are two boxes of rows. With a gated activation they are gate rows and up rows of the same output
columns, so that one matrix product computes both; else they are neighbours.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.epilogue import Arithmetic, epilogue_of
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.sizes import BLOCK_K, TAIL_ROWS
from dsl_backend.gemm.tiles import GemmTiles, block_k
from dsl_backend.gemm.views import NUMERIC, parts_view
from dsl_backend.primitives.copy import clear_rows
from dsl_backend.primitives.moved import LayoutEnum
from dsl_backend.primitives.pipeline import Pipeline
from dsl_backend.primitives.schedule import raster


@dataclass(frozen=True)
class GemmParams:
    """What the kernel's warps work with.

    Attributes:
        tma_atom_x, tma_atom_x_tail, tma_atom_w: copies of [tile_m, block_k], [TAIL_ROWS, block_k] and [box_n, block_k].
        tma_atom_out: copies of an epilogue tile of the output; None where threads store what they have.
        mX, mW, mOut: coordinates [m, k], [n, k, parts], [m, n].
        mBias: [parts * n]. mResidual: [m, n]. Either may be missing.
    """

    tma_atom_x: cute.CopyAtom
    tma_atom_x_tail: cute.CopyAtom
    mX: cute.Tensor
    tma_atom_w: cute.CopyAtom
    mW: cute.Tensor
    tma_atom_out: cute.CopyAtom
    mOut: cute.Tensor
    mBias: cute.Tensor
    mResidual: cute.Tensor


def box_layout(rows: int, columns: int = BLOCK_K) -> cute.ComposedLayout:
    """Of so many rows of a stage, 128 bytes each in the widest swizzle.

    It is a stage of what `hopper_helpers` make; CuTe DSL 4.6.0 aborts the process where it is to take one of 8 times an
    odd number of rows.
    """
    return cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout((rows, columns), stride=(columns, 1))
    )


class GemmBase:
    """out [m, n] = activation(x [m, k] @ weight [parts * n, k]^T + bias) + residual; m, n, k > 0.

    A kernel adds `__call__`, `kernel`, `acquire`, `load_boxes`, `mma` and the epilogue.

    Of x's last row of tiles only the rows that exist are loaded, rounded up to TAIL_ROWS. TMA fills a box's rows beyond
    the end of a tensor with zeros, at 2 to 3 ns each for a k tile on an H200's SM: a tile of 64 rows took up to 1.35
    times as long with 32 of them, and one of 128 rows 1.65 times with 64.
    """

    # Columns of the output in an element of its tensor.
    out_packed = 1

    def __init__(self, key: GemmKey[GemmTiles], arithmetic: Arithmetic):
        config = key.config
        self.tile_m, self.box_n, self.stages = config.tile_m, config.box_n, config.stages
        self.cluster, self.band = config.cluster, config.band
        self.gated, self.interleaved = key.activation is not None, key.interleaved
        self.activate = epilogue_of(key.activation, arithmetic)
        self.parts = 2 if self.gated else 1
        self.columns = config.columns(self.parts)
        self.x_dtype, self.weight_dtype = NUMERIC[key.dtypes.x], NUMERIC[key.dtypes.weight]
        self.out_dtype = NUMERIC[key.dtypes.out]
        self.block_k = block_k(key.dtypes)
        self.x_row_bytes = self.block_k * key.dtypes.x.itemsize
        self.weight_bytes = config.stage_bytes(key.dtypes) - config.tile_m * self.x_row_bytes

    def params(
        self, operands: GemmOperands, x_op, weight_op, sOut_tile: cute.ComposedLayout | None, epi_tile: tuple[int, int]
    ) -> GemmParams:
        """The kernel's, with TMA descriptors.

        Args:
            x_op, weight_op: kinds of TMA copies.
            sOut_tile, epi_tile: what is stored at once, in shared memory and its shape; sOut_tile is None where
                registers are stored.
        """
        x, out = operands.x, operands.out
        tma_atom_x, mX = cpasync.make_tiled_tma_atom(
            x_op, x, box_layout(self.tile_m, self.block_k), (self.tile_m, self.block_k)
        )
        tma_atom_x_tail, _ = cpasync.make_tiled_tma_atom(
            x_op, x, box_layout(TAIL_ROWS, self.block_k), (TAIL_ROWS, self.block_k)
        )
        tma_atom_w, mW = self.weight_copy(operands, weight_op)
        tma_atom_out, mOut = None, out
        if sOut_tile is not None:
            store = cpasync.CopyBulkTensorTileS2GOp()
            tma_atom_out, mOut = cpasync.make_tiled_tma_atom(store, out, sOut_tile, epi_tile)
        return GemmParams(
            tma_atom_x, tma_atom_x_tail, mX, tma_atom_w, mW, tma_atom_out, mOut, operands.bias, operands.residual
        )

    def box_layout(self, rows: int) -> cute.ComposedLayout:
        """Of so many rows of a stage."""
        return box_layout(rows, self.block_k)

    def weight_copy(self, operands: GemmOperands, weight_op):
        """(tma_atom_w, mW): the copy of a box of weights, and their coordinates."""
        weights = parts_view(operands.weight, self.parts, self.interleaved)
        return cpasync.make_tiled_tma_atom(weight_op, weights, self.box_layout(self.box_n), (self.box_n, self.block_k))

    def weight_partition(self, params: GemmParams, sW: cute.Tensor):
        """(tWsW, tWgW) of the copies of weights: [copy, box, stage], and what `box` finds one in."""
        gW = cute.local_tile(params.mW, (self.box_n, self.block_k), (None, None, None))
        boxes = cute.local_tile(sW, (self.box_n, self.block_k), (None, 0, None))
        return cpasync.tma_partition(
            params.tma_atom_w, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(gW, 0, 2)
        )

    def smem_layouts(self, weight_rows: int):
        """(sX_layout, sW_layout): stages of x and of a CTA's weights."""
        tile = (self.tile_m, weight_rows, self.block_k)
        return (
            hopper_helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.x_dtype, self.stages),
            hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.weight_dtype, self.stages),
        )

    def grid(self, operands: GemmOperands, max_ctas: cutlass.Int32):
        """One CTA for each tile, and at most `max_ctas`."""
        x, out = operands.x, operands.out
        n_tiles = cute.ceil_div(out.shape[1] * self.out_packed, self.columns)
        tiles = cute.ceil_div(x.shape[0], self.tile_m * self.cluster) * n_tiles
        return cutlass.min(tiles * self.cluster, max_ctas), 1, 1

    def width(self, params):
        """Columns of the output."""
        return params.mOut.shape[1] * self.out_packed

    def k_tiles(self, params):
        """Stages that a tile's columns of x and of the weights come in."""
        return cute.ceil_div(params.mX.shape[1], self.block_k)

    def tile_counts(self, params: GemmParams):
        """(m_tiles, n_tiles, k_tiles), of clusters' tiles."""
        return (
            cute.ceil_div(params.mX.shape[0], self.tile_m * self.cluster),
            cute.ceil_div(self.width(params), self.columns),
            self.k_tiles(params),
        )

    def schedule(self, m_tiles, n_tiles):
        """Static persistent scheduler: (first tile of this cluster, clusters, number of this cluster's tiles)."""
        first = cute.arch.block_idx()[0] // self.cluster
        clusters = cute.arch.grid_dim()[0] // self.cluster
        return first, clusters, cute.ceil_div(m_tiles * n_tiles - first, clusters)

    def place(self, first, tile, clusters, m_tiles, n_tiles):
        """(m_tile, n_tile) of a cluster's tile; arguments as `schedule` and `tile_counts` return them."""
        return raster(first + tile * clusters, m_tiles, n_tiles, self.band)

    def rank(self):
        """Of the CTA among those of a cluster that have neighbouring tiles."""
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def k_part(self, k_tiles):
        """(first, number) of the k tiles that the CTA multiplies: here all."""
        return 0, k_tiles

    def rows_loaded(self, params: GemmParams, m_tile):
        """Rows of a CTA's tile of x that are loaded: those that exist, rounded up to TAIL_ROWS."""
        rows = params.mX.shape[0] - m_tile * self.tile_m
        return cutlass.min(cutlass.max(cute.ceil_div(rows, TAIL_ROWS) * TAIL_ROWS, 0), self.tile_m)

    def tx_bytes(self, params: GemmParams, m_tile, cta_rank):
        """Bytes of a stage that the CTA's barrier counts, in a row of clusters' tiles."""
        return self.weight_bytes + self.rows_loaded(params, m_tile * self.cluster + cta_rank) * self.x_row_bytes

    @cute.jit
    def zero_fill(self, params: GemmParams, sX: cute.Tensor, cta_rank, thread, threads: cutlass.Constexpr[int]):
        """Zero the rows of all stages that the last row of tiles does not load; before a barrier of all threads."""
        m_tiles, _, _ = self.tile_counts(params)
        rows = self.rows_loaded(params, (m_tiles - 1) * self.cluster + cta_rank)
        if rows < self.tile_m:
            for stage in cutlass.range_constexpr(self.stages):
                clear_rows(sX[None, None, stage], rows, self.tile_m, thread, threads)
            cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def load(
        self, params: GemmParams, sX: cute.Tensor, sW: cute.Tensor, pipeline: Pipeline, sScales: cute.Tensor = None
    ):
        """The load warp: x's tile, and the boxes of weights that this CTA loads."""
        m_tiles, n_tiles, k_tiles = self.tile_counts(params)
        first, clusters, tiles = self.schedule(m_tiles, n_tiles)
        cta_rank = self.rank()
        first_k, k_tiles = self.k_part(k_tiles)
        one = cute.make_layout(1)
        gX = cute.local_tile(params.mX, (self.tile_m, self.block_k), (None, None))
        tXsX, tXgX = cpasync.tma_partition(
            params.tma_atom_x, 0, one, cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        gX_tail = cute.local_tile(params.mX, (TAIL_ROWS, self.block_k), (None, None))
        sX_tail = cute.local_tile(sX, (TAIL_ROWS, self.block_k), (None, 0, None))
        tXsX_tail, tXgX_tail = cpasync.tma_partition(
            params.tma_atom_x_tail, 0, one, cute.group_modes(sX_tail, 0, 2), cute.group_modes(gX_tail, 0, 2)
        )
        tWsW, tWgW = self.weight_partition(params, sW)
        for tile in cutlass.range(tiles, unroll=1):
            m_tile, n_tile = self.place(first, tile, clusters, m_tiles, n_tiles)
            tx_bytes = self.tx_bytes(params, m_tile, cta_rank)
            m_tile = m_tile * self.cluster + cta_rank
            rows = self.rows_loaded(params, m_tile)
            for i_k in cutlass.range(k_tiles, unroll=1):
                position = tile * k_tiles + i_k
                k_tile = first_k + i_k
                stage = pipeline.stage(position)
                mbar_full = self.acquire(pipeline, position, cta_rank, tx_bytes)
                if rows == self.tile_m:
                    cute.copy(params.tma_atom_x, tXgX[None, m_tile, k_tile], tXsX[None, stage], tma_bar_ptr=mbar_full)
                else:
                    for i in cutlass.range(rows // TAIL_ROWS, unroll=1):
                        source = tXgX_tail[None, m_tile * (self.tile_m // TAIL_ROWS) + i, k_tile]
                        cute.copy(params.tma_atom_x_tail, source, tXsX_tail[None, i, stage], tma_bar_ptr=mbar_full)
                self.load_boxes(params, tWgW, tWsW, n_tile, k_tile, stage, cta_rank, mbar_full)
                self.load_scales(params, sScales, m_tile, n_tile, k_tile, stage, mbar_full)

    def load_scales(self, params: GemmParams, sScales: cute.Tensor, m_tile, n_tile, k_tile, stage, mbar):
        """The operands' scale factors for matrix products: here there are none."""

    def box(self, tWgW: cute.Tensor, n_tile, k_tile, index):
        """Box 0 or 1 of a tile's weights: gate or up rows, or the first or second half of its rows."""
        if self.gated:
            return tWgW[None, n_tile, k_tile, index]
        return tWgW[None, 2 * n_tile + index, k_tile, 0]

    def load_both_boxes(self, params: GemmParams, tWgW: cute.Tensor, tWsW: cute.Tensor, n_tile, k_tile, stage, mbar):
        """Both boxes, for this CTA alone."""
        for i in range(2):
            cute.copy(params.tma_atom_w, self.box(tWgW, n_tile, k_tile, i), tWsW[None, i, stage], tma_bar_ptr=mbar)
