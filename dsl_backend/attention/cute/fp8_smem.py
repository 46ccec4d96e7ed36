# SPDX-License-Identifier: Apache-2.0
"""Tiles of e4m3 in shared memory, as MMAs read them: rows of up to 128 bytes, swizzled."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsl_backend.attention.cute.args import DenseKeyLoads, DenseTensors
from dsl_backend.attention.cute.sizes import fp8_chunk
from dsl_backend.attention.cute.tiles import SWIZZLES, TiledKernel
from dsl_backend.attention.cute.transpose import swizzle_of
from dsl_backend.primitives.copy import store_matrices
from dsl_backend.primitives.moved import SmemAllocator

P_UNIT = 16  # keys of a row of P that one stmatrix row has


def fp8_atom(width: int) -> cute.ComposedLayout:
    """The swizzled layout atom of rows of `width` bytes."""
    return warpgroup.make_smem_layout_atom(SWIZZLES[fp8_chunk(width) // 2], cutlass.Uint8)


def fp8_box(rows: int, width: int) -> tuple[cute.ComposedLayout, tuple[int, int]]:
    """The layout in shared memory of one TMA box of rows of `width` bytes, and the box's shape."""
    box = (rows, fp8_chunk(width))
    return cute.tile_to_shape(fp8_atom(width), box, order=(0, 1)), box


class Fp8Tiles(TiledKernel):
    """How kernels with e4m3 products copy K, V and quantised queries: as bytes."""

    @property
    def copied_q(self) -> int:
        return fp8_chunk(self.dims) if self.key.fp8_q else super().copied_q

    @property
    def q_itemsize(self) -> int:
        return 1 if self.key.fp8_q else super().q_itemsize

    @property
    def q_stage_elements(self) -> int:
        return self.tile_m * self.dims if self.key.fp8_q else super().q_stage_elements

    def query_atom(self) -> cute.ComposedLayout:
        return fp8_atom(self.dims) if self.key.fp8_q else super().query_atom()

    def key_box(self, width: int) -> tuple[cute.ComposedLayout, tuple[int, int]]:
        return fp8_box(self.box, width)

    def key_loads(self, tensors: DenseTensors) -> DenseKeyLoads:
        """Where warps load the queries: these as they are, and the TMA atoms of K and V."""
        order = [1, 3, 2, 0] if self.key.page_size else [0, 2, 1]
        load, found = self.load_op(), [tensors.q]
        for tensor, width in ((tensors.k, self.dims), (tensors.v, self.dims_v)):
            view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))
            found += cpasync.make_tiled_tma_atom(load, view, *self.key_box(width))
        return DenseKeyLoads(*found)


def fp8_tensors(allocator: SmemAllocator, rows: int, width: int, stages: int) -> list[cute.Tensor]:
    """(row, byte, stage): chunks of columns, each (row, chunk).

    The same memory as bytes, which TMA and threads write, and as e4m3, which MMAs read.
    """
    layout = cute.tile_to_shape(fp8_atom(width), (rows, width, stages), order=(0, 1, 2))
    place = allocator.allocate(cute.cosize(layout.outer), byte_alignment=1024)
    types = cutlass.Uint8, cutlass.Float8E4M3FN
    return [cute.make_tensor(cute.recast_ptr(place, layout.inner, dtype=kind), layout.outer) for kind in types]


def store_p(words: cute.Tensor, sP_bytes: cute.Tensor, thread: cutlass.Int32) -> None:
    """Store P of a warpgroup's 64 rows.

    Args:
        words: of a thread, of both its rows 4 keys of 16, then of the next 16.
        sP_bytes: (row, key, 1).
    """
    lane, tile_n = thread % 32, cute.size(sP_bytes, mode=[1])
    row, width = thread // 32 * 16 + lane % 16, fp8_chunk(tile_n)
    tile = cutlass.Int32(sP_bytes.iterator.toint()) + row * width
    for first in range(0, tile_n, 2 * P_UNIT):
        chunk, within = divmod(first, width)
        unit = (within + lane // 16 * P_UNIT) ^ swizzle_of(row * width, width)
        # Four words of a thread: both rows of 16 keys, then of the next 16.
        some = [words[first // 8 + i] for i in range(4)]
        store_matrices(tile + chunk * cute.size(sP_bytes, mode=[0]) * width + unit, some)
