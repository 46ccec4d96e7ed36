# SPDX-License-Identifier: Apache-2.0
"""What the dense kernels of all SMs do alike: tiles in shared memory, copies that fill them, the schedule."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsl_backend.attention.sm90.configs import chunk, padded
from dsl_backend.attention.sm90.load import box_rows, query_box
from dsl_backend.attention.sm90.schedule import KeyShares, QueryTiles, Requests

NUMERIC = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
SWIZZLES = {
    64: warpgroup.SmemLayoutAtomKind.K_SW128,
    32: warpgroup.SmemLayoutAtomKind.K_SW64,
    16: warpgroup.SmemLayoutAtomKind.K_SW32,
}


class TiledKernel:
    """Sizes and layouts of a kernel's tiles.

    Attributes:
        dims, dims_v: elements of a key and a value row, padded.
        chunk, chunk_v: of a row, those that lie side by side.
        tokens_per_tile: whose packed heads are a tile's query rows.
        box: keys of one tensor copy.
    """

    def __init__(self, key: Any, config: Any) -> None:
        self.key, self.config = key, config
        self.dtype = NUMERIC[key.dtype]
        self.dims, self.dims_v = padded(key.head_dim), padded(key.head_dim_v)
        self.chunk, self.chunk_v = chunk(key.head_dim), chunk(key.head_dim_v)
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.tokens_per_tile = self.tile_m // key.pack
        self.box = box_rows(key.page_size, self.tile_n)

    def atom(self, width: int):
        """The swizzled atom of rows `width` elements wide."""
        return warpgroup.make_smem_layout_atom(SWIZZLES[chunk(width)], self.dtype)

    def staged(self, rows: int, width: int, stages: int):
        """[rows, width, stages] in shared memory: columns of chunks, each [rows, chunk]."""
        return cute.tile_to_shape(self.atom(width), (rows, width, stages), order=(0, 1, 2))

    def boxed(self, rows: int, width: int):
        """[rows, width] of one chunk, as a tensor copy writes it."""
        return cute.tile_to_shape(self.atom(width), (rows, width), order=(0, 1))

    def swizzled(self, place: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
        pointer = cute.recast_ptr(place, layout.inner, dtype=self.dtype)
        return cute.make_tensor(pointer, layout.outer)

    def copies(self, q: cute.Tensor, keys: cute.Tensor, values: cute.Tensor):
        """For queries, keys and values: the copy of a box, and the tensor as it takes it."""
        key = self.key
        load = cpasync.CopyBulkTensorTileG2SOp()
        tokens, _, width = q.shape
        if key.pack == 1:
            mQ = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[0, 2, 1]))
            q_tile: tuple[int, ...] = (self.tile_m, self.chunk)
            q_box = self.boxed(self.tile_m, self.chunk)
        else:
            mQ = cute.make_tensor(
                q.iterator,
                cute.make_layout(
                    (key.pack, tokens, width, key.heads_q // key.pack),
                    stride=(q.stride[1], q.stride[0], 1, q.stride[1] * key.pack),
                ),
            )
            q_tile = (key.pack, self.tokens_per_tile, self.chunk)
            q_box = cute.make_composed_layout(self.atom(self.dims).inner, 0, query_box(self))
        order = [1, 3, 2, 0] if key.page_size else [0, 2, 1]
        mK = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=order))
        mV = cute.make_tensor(values.iterator, cute.select(values.layout, mode=order))
        q_copy = cpasync.make_tiled_tma_atom(load, mQ, q_box, q_tile)
        k_copy = cpasync.make_tiled_tma_atom(load, mK, self.boxed(self.box, self.chunk), (self.box, self.chunk))
        v_copy = cpasync.make_tiled_tma_atom(load, mV, self.boxed(self.box, self.chunk_v), (self.box, self.chunk_v))
        return q_copy, k_copy, v_copy

    def schedule(self, mailbox, requests: Requests, merges):
        """The role that finds work."""
        if self.key.split:
            least = self.config.least_share
            return KeyShares(self.key, mailbox, self.tokens_per_tile, self.tile_n, requests, merges, least)
        return QueryTiles(self.key, mailbox, self.tokens_per_tile, self.tile_n, requests)
