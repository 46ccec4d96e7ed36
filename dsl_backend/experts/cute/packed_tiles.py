# SPDX-License-Identifier: Apache-2.0
"""Loads of MXFP4 weights for few tokens: whole packed tiles, by bulk copies (`quant/mxfp4_tiles.py`)."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import hopper_helpers

from dsl_backend.gemm.mxfp4_unpacking import Mxfp4Unpacking
from dsl_backend.primitives.copy import bulk_load
from dsl_backend.primitives.moved import LayoutEnum
from dsl_backend.quant.mxfp4_tiles import TILES


class PackedTiles(Mxfp4Unpacking):
    """What a `DecodeProduct` of packed weights does otherwise; stages have [words, packed tile, stage]."""

    box: int
    tile_tokens: int
    tile_k: int
    x_dtype: Any

    def weights_view(self, weight: cute.Tensor) -> cute.Tensor:
        """Packed tiles [E, parts * row tiles, column tiles, words] as they are."""
        return weight

    def tma_atoms(self, weights: cute.Tensor, x: cute.Tensor):
        """(None, weights, tma_atom_x, mX): packed tiles are copied without a descriptor."""
        tile = (self.box, self.tile_tokens, self.tile_k)
        sX_box = hopper_helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tile, self.x_dtype, 1)
        tma_atom_x, mX = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            x,
            cute.slice_(sX_box, (None, None, 0)),
            (self.tile_tokens, self.tile_k),
        )
        return None, weights, tma_atom_x, mX

    def partition_weights(self, params: Any, sW: cute.Tensor):
        """(sW, mW): bulk copies need no partition."""
        return sW, params.mW

    @cute.jit
    def copy_of(self, tma_atom_w, tWgW: cute.Tensor, expert, tWsW: cute.Tensor, n_tile, k_tile, stage, mbar):
        """Both boxes of an expert: gate and up rows, or rows in order; past the last row the last tile again."""
        of_part = tWgW.shape[1] // self.parts
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.row_tiles):
                row_tile = self.packed_row(of_part, n_tile, i)
                source = tWgW.iterator.toint() + 4 * (
                    cutlass.Int64(expert) * tWgW.stride[0]
                    + cutlass.Int64(row_tile) * tWgW.stride[1]
                    + k_tile * TILES.tile_words
                )
                target = tWsW.iterator + tWsW.layout((0, i, stage))
                bulk_load(source, target, 4 * TILES.tile_words, mbar)
