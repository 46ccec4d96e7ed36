# SPDX-License-Identifier: Apache-2.0
"""What the dense kernels of all SMs do alike: tiles in shared memory, copies that fill them, the schedule."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsl_backend.attention.cute.args import DenseLoads, DenseTensors
from dsl_backend.attention.cute.dequant import fp8_smem_layout, fp8_tma_box
from dsl_backend.attention.cute.loader.dense import box_rows, query_box, tokens_of_box
from dsl_backend.attention.cute.scheduler.balanced import BalancedSplitKVTileScheduler
from dsl_backend.attention.cute.scheduler.persistent import DynamicPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import FixedSplitKVTileScheduler, SplitKVTileScheduler
from dsl_backend.attention.cute.scheduler.work_tile import q_head_of, v_split_of
from dsl_backend.attention.cute.score_mod import ScoreModKey
from dsl_backend.attention.cute.sizes import chunk, fp8_chunk, padded, v_splits
from dsl_backend.primitives.copy import store_vector
from dsl_backend.quant.format import KVFormat

VECTOR = 8  # elements of 16 bytes
NUMERIC = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
SWIZZLES = {
    64: warpgroup.SmemLayoutAtomKind.K_SW128,
    32: warpgroup.SmemLayoutAtomKind.K_SW64,
    16: warpgroup.SmemLayoutAtomKind.K_SW32,
}


@dataclass(frozen=True, kw_only=True)
class LayerKey:
    """What of a layer, and of what is wanted of it, a kernel's code depends on.

    Attributes:
        dtype: of queries, keys, values and outputs.
        heads_q, heads_kv: of the layer.
        pack: query heads whose rows share a tile.
        page_size: tokens of a page; 0 where keys are packed.
        kv: how keys and values are stored; where as fp8, dtype is that of queries and outputs alone.
        causality: `full`, `causal` or `per_request`.
        left, right: whether a window ends before or after a position.
        split: key ranges are cut into equal shares for the blocks, rather than query tiles dealt out.
        shares: of each request's own key range, at most; 0 where they are shares of the whole batch.
        split_tiles: key tiles of a split, which begins at a multiple of them; partial results of splits are folded from
            the last one to the first, whoever made them. 0 where the layer is not batch-invariant.
        lse: whether the softmax's denominators are wanted.
    """

    dtype: str
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    pack_gqa: int
    page_size: int
    kv: KVFormat
    causality: str
    has_window_left: bool
    has_window_right: bool
    lse: bool
    split: bool
    max_splits: int
    scores: ScoreModKey
    tiles_per_split: int = 0

    @property
    def dynamic_scheduler(self) -> bool:
        """Whether whole query tiles are claimed by counters in memory."""
        return not self.split

    @property
    def scaled_by_head(self) -> bool:
        """Whether scales may differ from one key head to the next."""
        return self.kv.fp8 and self.heads_kv > 1

    @property
    def v_splits(self) -> int:
        """Slices of a value row, each multiplied as if it were a head's own."""
        return v_splits(self.head_dim_v)

    @property
    def columns(self) -> int:
        """Of a slice."""
        return self.head_dim_v // self.v_splits

    @property
    def key_bytes(self) -> int:
        """Of a key and the split of its value."""
        return (self.head_dim + self.columns) * self.kv.itemsize

    @property
    def head_blocks(self) -> int:
        """Row tiles of a token: packed heads, times slices."""
        return self.heads_q // self.pack_gqa * self.v_splits


class TiledKernel:
    """Sizes and layouts of a kernel's tiles.

    Attributes:
        dims, dims_v: elements of a key row and of a value row's slice, padded.
        chunk, chunk_v: of a row, those that lie side by side.
        dtype_v: of values as they are multiplied. What was fp8 is exact in float16, which one instruction makes of it;
            keys take the queries' dtype, whose range float16 has not.
        copied, copied_v: elements of a key or value row in one tensor copy.
        tokens_per_tile: whose packed heads are a tile's query rows.
        most_boxes: of a tile's queries. Where there are several, an item's tokens alone are copied.
        box_tokens, rows_loaded: tokens of a box of queries, and their rows.
        math_clears: who multiplies clears the rows behind the first box, and gives queries' places to the loader before
            the first item too.
        box: keys of one tensor copy.
    """

    most_boxes = 1

    def __init__(self, key: Any, config: Any) -> None:
        self.key, self.config = key, config
        self.dtype = NUMERIC[key.dtype]
        self.dims, self.dims_v = padded(key.head_dim), padded(key.columns)
        self.chunk, self.chunk_v = chunk(key.head_dim), chunk(key.columns)
        self.tile_m, self.tile_n = config.tile_m, config.tile_n
        self.tokens_per_tile = self.tile_m // key.pack_gqa
        self.box_tokens = tokens_of_box(key.pack_gqa, self.tokens_per_tile, self.most_boxes)
        self.rows_loaded = self.box_tokens * key.pack_gqa
        self.math_clears = self.box_tokens < self.tokens_per_tile
        self.box = box_rows(key.page_size, self.tile_n)
        self.dtype_v = cutlass.Float16 if key.kv.fp8 else self.dtype
        self.copied = fp8_chunk(key.head_dim) if key.kv.fp8 else self.chunk
        self.copied_v = fp8_chunk(key.columns) if key.kv.fp8 else self.chunk_v

    def atom(self, width: int):
        """The swizzled atom of rows `width` elements wide."""
        return warpgroup.make_smem_layout_atom(SWIZZLES[chunk(width)], self.dtype)

    def staged(self, rows: int, width: int, stages: int):
        """[rows, width, stages] in shared memory: columns of chunks, each [rows, chunk]."""
        return cute.tile_to_shape(self.atom(width), (rows, width, stages), order=(0, 1, 2))

    def query_tiles(self, width: int):
        """The same for query tiles, or outputs that leave through their places: a place has room for the wider."""
        rows, stages = self.tile_m, self.config.query_stages
        staged = self.staged(rows, width, stages)
        shape, stride = staged.outer.shape, staged.outer.stride
        places = cute.make_layout((*shape[:2], stages), stride=(*stride[:2], rows * max(self.dims, self.dims_v)))
        return cute.make_composed_layout(staged.inner, 0, places)

    def boxed(self, rows: int, width: int):
        """[rows, width] of one chunk, as a tensor copy writes it."""
        return cute.tile_to_shape(self.atom(width), (rows, width), order=(0, 1))

    def loaded(self, allocator, sK: cute.Tensor, sV: cute.Tensor):
        """Where tensor copies lay keys and values: where products read them, or where fp8 is widened from."""
        if not self.key.kv.fp8:
            return sK, sV
        widths = ((self.dims, self.copied), (self.dims_v, self.copied_v))
        layouts = [fp8_smem_layout(self.tile_n, width, copied, self.config.dequant_stages) for width, copied in widths]
        return [allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=128) for layout in layouts]

    def value_box(self):
        return self.key_box(self.dims_v)

    def key_box(self, width: int):
        """The box of one tensor copy of keys or values, and how it lies in shared memory."""
        if self.key.kv.fp8:
            return fp8_tma_box(self.box, fp8_chunk(width))
        return self.boxed(self.box, chunk(width)), (self.box, chunk(width))

    def swizzled(self, place: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
        pointer = cute.recast_ptr(place, layout.inner, dtype=self.dtype)
        return cute.make_tensor(pointer, layout.outer)

    def loads(self, tensors: DenseTensors) -> DenseLoads:
        """The TMA atoms, and each tensor as its atom takes it."""
        key, (q, keys, values) = self.key, tensors
        load = self.load_op()
        tokens, _, width = q.shape
        if key.pack_gqa == 1:
            mQ = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[0, 2, 1]))
            q_tile: tuple[int, ...] = (self.box_tokens, self.chunk)
            q_box = self.boxed(self.box_tokens, self.chunk)
        else:
            mQ = cute.make_tensor(
                q.iterator,
                cute.make_layout(
                    (key.pack_gqa, tokens, width, key.heads_q // key.pack_gqa),
                    stride=(q.stride[1], q.stride[0], 1, q.stride[1] * key.pack_gqa),
                ),
            )
            q_tile = (key.pack_gqa, self.box_tokens, self.chunk)
            q_box = cute.make_composed_layout(self.atom(self.dims).inner, 0, query_box(self, self.box_tokens))
        order = [1, 3, 2, 0] if key.page_size else [0, 2, 1]
        mK = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=order))
        mV = cute.make_tensor(values.iterator, cute.select(values.layout, mode=order))
        if key.v_splits > 1:
            mV = self.by_slice(mV)
        q_load = cpasync.make_tiled_tma_atom(load, mQ, q_box, q_tile)
        k_load = cpasync.make_tiled_tma_atom(load, mK, *self.key_box(self.dims))
        v_load = cpasync.make_tiled_tma_atom(load, mV, *self.value_box())
        return DenseLoads(*q_load, *k_load, *v_load)

    def load_op(self):
        return cpasync.CopyBulkTensorTileG2SOp()

    def by_slice(self, values: cute.Tensor) -> cute.Tensor:
        """Values [token, column, ...] as [token, column of a slice, ..., slice]."""
        (tokens, _, *shape), (stride, *strides) = values.layout.shape, values.layout.stride
        columns, slices = self.key.columns, self.key.v_splits
        layout = cute.make_layout((tokens, columns, *shape, slices), stride=(stride, *strides, columns))
        return cute.make_tensor(values.iterator, layout)

    def schedule(self, work_pipeline, requests: Requests, scheduler_workspace, slots=None):
        """The role that finds work."""
        if self.key.split and self.key.tiles_per_split:
            return FixedSplitKVTileScheduler(
                self.key, work_pipeline, self.tokens_per_tile, self.tile_n, requests, scheduler_workspace, slots
            )
        if self.key.max_splits:
            return SplitKVTileScheduler(
                self.key, work_pipeline, self.tokens_per_tile, self.tile_n, requests, self.config.min_split_tiles
            )
        if self.key.split:
            least = self.config.min_split_tiles
            return BalancedSplitKVTileScheduler(
                self.key, work_pipeline, self.tokens_per_tile, self.tile_n, requests, scheduler_workspace, least
            )
        return DynamicPersistentTileScheduler(
            self.key, work_pipeline, self.tokens_per_tile, self.tile_n, requests, scheduler_workspace
        )


@cute.jit
def store_rows(
    rows: cute.Tensor,
    out: cute.Tensor,
    work,
    key: cutlass.Constexpr,
    first: cutlass.Int32,
    count: cutlass.Constexpr[int],
    thread: cutlass.Int32,
    threads: cutlass.Constexpr[int],
):
    """Rows first ... first + count of a tile from shared to global memory, 16 bytes a thread.

    Args:
        rows: the tile's, [row, column].
        thread: of `threads` that take part.
    """
    vectors = cutlass.const_expr(cute.size(rows, mode=[1]) // VECTOR)
    step = cutlass.const_expr(threads // vectors)
    if cutlass.const_expr(threads % vectors == 0 and step % key.pack_gqa == 0 and count % step == 0):
        # A thread keeps its column and its head.
        own, place = first + thread // vectors, thread % vectors
        offset = row_offset(out, work, key, own)
        stride = out.stride[0] * (step // key.pack_gqa)
        for i in cutlass.range(count // step, unroll=4):
            store_piece(rows, out, work, key, own + i * step, place, offset)
            offset += stride
    else:
        for i in cutlass.range(count * vectors // threads, unroll=1):
            index = i * threads + thread
            m = first + index // vectors
            store_piece(rows, out, work, key, m, index % vectors, row_offset(out, work, key, m))


@cute.jit
def store_piece(rows: cute.Tensor, out: cute.Tensor, work, key: cutlass.Constexpr, m, column, offset):
    """16 bytes of row m, which begins at the offset."""
    if m < work.num_rows and column * VECTOR < key.columns:
        held = cute.make_rmem_tensor(VECTOR, rows.element_type)
        cute.autovec_copy(cute.group_modes(cute.local_tile(rows, (1, VECTOR), (m, column)), 0, 2), held)
        store_vector(held, out.iterator, offset + column * VECTOR)


@cute.jit
def row_offset(out: cute.Tensor, work, key: cutlass.Constexpr, m):
    """Elements from the output's beginning to row m of a tile."""
    token = work.q_offset + m // key.pack_gqa
    head = q_head_of(key, work.head_block, m)
    offset = cutlass.Int64(token) * out.stride[0] + head * out.stride[1]
    if cutlass.const_expr(key.v_splits > 1):
        offset += v_split_of(key, work.head_block) * key.columns
    return offset
