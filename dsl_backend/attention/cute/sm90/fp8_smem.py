# SPDX-License-Identifier: Apache-2.0
"""Tiles of e4m3 in shared memory, as WGMMA reads them: rows of up to 128 bytes, swizzled."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.cute.sizes import fp8_chunk
from dsl_backend.attention.cute.tiles import SWIZZLES


def fp8_atom(width: int) -> cute.ComposedLayout:
    """The swizzled layout atom of rows of `width` bytes."""
    return warpgroup.make_smem_layout_atom(SWIZZLES[fp8_chunk(width) // 2], cutlass.Uint8)


def fp8_box(rows: int, width: int) -> tuple[cute.ComposedLayout, tuple[int, int]]:
    """The layout in shared memory of one TMA box of rows of `width` bytes, and the box's shape."""
    box = (rows, fp8_chunk(width))
    return cute.tile_to_shape(fp8_atom(width), box, order=(0, 1)), box


def fp8_tensors(allocator: cutlass.utils.SmemAllocator, rows: int, width: int, stages: int) -> list[cute.Tensor]:
    """(row, byte, stage): chunks of columns, each (row, chunk).

    The same memory as bytes, which TMA and threads write, and as e4m3, which MMAs read.
    """
    layout = cute.tile_to_shape(fp8_atom(width), (rows, width, stages), order=(0, 1, 2))
    place = allocator.allocate(cute.cosize(layout.outer), byte_alignment=1024)
    types = cutlass.Uint8, cutlass.Float8E4M3FN
    return [cute.make_tensor(cute.recast_ptr(place, layout.inner, dtype=kind), layout.outer) for kind in types]


def e4m3_mma(
    columns: int, a_source: warpgroup.OperandSource, warpgroups: tuple[int, int, int] = (1, 1, 1)
) -> cute.TiledMma:
    """Products of 64 rows a warpgroup in e4m3; both operands have the elements of a sum one after the other."""
    e4m3, k_major = cutlass.Float8E4M3FN, OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        e4m3, e4m3, k_major, k_major, cutlass.Float32, warpgroups, (64, columns), a_source
    )
