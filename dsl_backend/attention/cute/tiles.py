# SPDX-License-Identifier: Apache-2.0
"""What the dense kernels of all SMs share: key, smem layouts, TMA atoms, tile scheduler, stores of O."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsl_backend.attention.cute.args import DenseLoads
from dsl_backend.attention.cute.dequant import fp8_smem_layout, fp8_tma_box
from dsl_backend.attention.cute.loader.dense import SWIZZLE_ROWS, box_rows, query_box, tokens_of_box
from dsl_backend.attention.cute.scheduler.balanced import BalancedSplitKVTileScheduler, SplitRule
from dsl_backend.attention.cute.scheduler.persistent import DynamicPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import FixedSplitKVTileScheduler
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, q_head_of, v_split_of
from dsl_backend.attention.cute.score_mod import ScoreModKey
from dsl_backend.attention.cute.sizes import chunk, fp8_chunk, padded, scale_box_bytes, v_splits
from dsl_backend.primitives.copy import store_vector
from dsl_backend.quant.format import KV_BLOCK, NVFP4, KVFormat, ScaledFormat

VECTOR = 8  # elements of 16 bytes
NUMERIC = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
SWIZZLES = {
    64: warpgroup.SmemLayoutAtomKind.K_SW128,
    32: warpgroup.SmemLayoutAtomKind.K_SW64,
    16: warpgroup.SmemLayoutAtomKind.K_SW32,
}


@dataclass(frozen=True, kw_only=True)
class LayerKey:
    """What a kernel's code depends on: the layer, and what a launch computes.

    Attributes:
        dtype: of queries, keys, values and outputs, as far as these are not quantized.
        heads_q, heads_kv: of the layer.
        pack_gqa: query heads whose rows share a tile.
        page_size: tokens of a page; 0 if keys and values are packed.
        kv: format of the cache. If that is quantized, dtype is that of queries and outputs alone.
        causality: `full`, `causal` or `per_request`.
        has_window_left, has_window_right: whether the window ends on that side.
        lse: whether to store the LSE.
        split: split-KV, rather than whole query tiles.
        tiles_per_split: key tiles of a split of a batch-invariant layer, which begins at a multiple of them. Splits are
            combined from the last to the first. 0 if the layer is not batch-invariant.
        scales_by_request: each request has dequantization scales of its own; keys are paged.
        fp8_q: queries arrive in e4m3, with dequantization scales.
        reads_fp8_q: the kernel takes these as they are; for others a launch before converts them to dtype.
        out_format: of outputs, which are scaled and stored as bytes; None: they are of dtype.
    """

    reads_fp8_q: ClassVar[bool] = False

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
    tiles_per_split: int
    scores: ScoreModKey
    scales_by_request: bool = False
    fp8_q: bool = False
    out_format: ScaledFormat | None = None

    @property
    def nvfp4_out(self) -> bool:
        return self.out_format == NVFP4

    @property
    def dynamic_scheduler(self) -> bool:
        """Whether CTAs take whole query tiles from counters in global memory."""
        return not self.split

    @property
    def has_fold_workspace(self) -> bool:
        """Whether CTAs keep the splits that they have combined in global memory."""
        return self.tiles_per_split > 0

    @property
    def smem_fold_rows(self) -> int:
        """Rows of a work tile up to which a CTA keeps what it has combined in shared memory, beside Q; 0: none."""
        return 0

    @property
    def scaled_by_tile(self) -> bool:
        """Whether work tiles may have different dequantization scales: those of KV heads, or of requests."""
        return self.kv.quantized and (self.heads_kv > 1 or self.scales_by_request)

    @property
    def v_splits(self) -> int:
        """Splits of head_dim_v, each processed as if it were a head of its own."""
        return v_splits(self.head_dim_v)

    @property
    def columns(self) -> int:
        """Columns of a split of head_dim_v."""
        return self.head_dim_v // self.v_splits

    @property
    def key_bytes(self) -> int:
        """Bytes of a key and of one split of its value."""
        return self.kv.row_bytes(self.head_dim) + self.kv.row_bytes(self.columns)

    @property
    def head_blocks(self) -> int:
        """Head blocks of a token: groups of packed heads, times splits of head_dim_v."""
        return self.heads_q // self.pack_gqa * self.v_splits


class Nvfp4Stages(NamedTuple):
    """Stages of K or of V as they are stored, bytes.

    Attributes:
        elements: (key, pair of elements, stage).
        scales: (KV_BLOCK keys, byte, stage): those of a key lie behind one another, and the next key's of the TMA box
            behind them.
    """

    elements: cute.Tensor
    scales: cute.Tensor


class TiledKernel:
    """Sizes and layouts of a kernel's tiles.

    Attributes:
        dims, dims_v: elements of a K row, and of a V row's split, padded.
        chunk, chunk_v: elements of a row in one swizzled chunk.
        dtype_v: of V in the MMA. fp8 converts to float16 exactly, by one instruction, and NVFP4 by two. K takes the
            queries' dtype, whose range may exceed that of float16.
        copied, copied_v: elements of a K or V row in one TMA box.
        tokens_per_tile: tokens whose packed heads are a tile's query rows.
        most_boxes: TMA boxes of a query tile. If there are several, only those with tokens of the work tile are loaded.
        box_tokens, rows_loaded: tokens of a query box, and their rows.
        math_clears: the MMA warps zero-fill the rows beyond the first box, and release the stages of Q to the load warp
            before the first work tile.
        box: keys of one TMA box.
        page_boxes: a TMA box has all columns of its keys, and not one chunk: a page of 16 keys is one box. In shared
            memory the chunks of eight keys lie side by side.
        pair_row_tiles: split-KV schedules the row tiles of causal prompts in pairs.
        exact_pairs: a row tile that has no partner does not count as a pair.
        late_claims: a CTA claims its next query tile when it has nearly loaded the one that it processes, and not when
            it begins it: a long one would keep the next from CTAs that are free earlier.
    """

    most_boxes = 1
    pair_row_tiles = False
    exact_pairs = False
    late_claims = False

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
        self.dtype_v = cutlass.Float16 if key.kv.quantized else self.dtype
        self.copied = fp8_chunk(key.head_dim) if key.kv.quantized else self.chunk
        self.copied_v = fp8_chunk(key.columns) if key.kv.quantized else self.chunk_v
        self.page_boxes = self.takes_page_boxes() and has_whole_rows(key)
        if self.page_boxes:
            self.copied, self.copied_v = self.dims, self.dims_v

    def takes_page_boxes(self) -> bool:
        """Whether the kernel's load warps and stages can have `page_boxes`."""
        return True

    def atom(self, width: int):
        """The swizzled layout atom of rows of `width` elements."""
        return warpgroup.make_smem_layout_atom(SWIZZLES[chunk(width)], self.dtype)

    def staged(self, rows: int, width: int, stages: int, order: tuple[int, int, int] = (0, 1, 2)):
        """(row, column, stage) in shared memory: by default chunks of columns, each (row, chunk)."""
        return cute.tile_to_shape(self.atom(width), (rows, width, stages), order=order)

    def key_tiles(self, rows: int, width: int, stages: int):
        """The same of K or V; in `page_boxes` groups of eight rows, each (chunk, row)."""
        return self.staged(rows, width, stages, (1, 0, 2) if self.page_boxes else (0, 1, 2))

    def query_tiles(self, width: int):
        """The same for query tiles, or outputs stored through their stages, which have room for the wider of both."""
        rows, stages = self.tile_m, self.config.query_stages
        staged = self.staged(rows, width, stages)
        shape, stride = staged.outer.shape, staged.outer.stride
        outer = cute.make_layout((*shape[:2], stages), stride=(*stride[:2], rows * max(self.dims, self.dims_v)))
        return cute.make_composed_layout(staged.inner, 0, outer)

    def boxed(self, rows: int, width: int):
        """(row, column) of one chunk, or in `page_boxes` of all, as TMA writes it."""
        return cute.tile_to_shape(self.atom(width), (rows, width), order=(1, 0))

    def stored(self, elements: int) -> int:
        """Columns of a tensor of K or V for so many elements: NVFP4 has two in a byte."""
        return elements // 2 if self.key.kv.nvfp4 else elements

    def loaded(self, allocator, sK: cute.Tensor, sV: cute.Tensor):
        """The tensors that TMA loads K and V into: those of the MMAs, or for a quantized cache its own stages."""
        if not self.key.kv.quantized:
            return sK, sV
        widths, stages = ((self.dims, self.copied), (self.dims_v, self.copied_v)), self.config.dequant_stages
        layouts = [
            fp8_smem_layout(self.tile_n, self.stored(width), self.stored(copied), stages) for width, copied in widths
        ]
        found = [allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=128) for layout in layouts]
        if not self.key.kv.nvfp4:
            return found
        layouts = [self.scale_layout(width, stages) for width, _ in widths]
        scales = [allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=128) for layout in layouts]
        return [Nvfp4Stages(*pair) for pair in zip(found, scales, strict=True)]

    def scale_layout(self, width: int, stages: int) -> cute.Layout:
        """[KV_BLOCK keys, byte, stage] of NVFP4 scales in shared memory: one TMA box after another, aligned."""
        boxes, step = self.tile_n // self.box, scale_box_bytes(width, self.box)
        shape = ((self.box // KV_BLOCK, boxes), width, stages)
        return cute.make_layout(shape, stride=((width, step), 1, boxes * step))

    @property
    def copied_q(self) -> int:
        """Elements of a Q row in one TMA box."""
        return self.chunk

    @property
    def q_itemsize(self) -> int:
        """Bytes of an element of Q as TMA copies it."""
        return 2

    @property
    def q_stage_elements(self) -> int:
        """Elements from one stage of Q to the next."""
        return self.tile_m * max(self.dims, self.dims_v)

    def query_atom(self) -> cute.ComposedLayout:
        """The swizzled layout atom of Q."""
        return self.atom(self.dims)

    def query_box(self) -> tuple[cute.ComposedLayout, tuple[int, ...]]:
        """The layout in shared memory of one TMA box of Q, of one head or of the packed ones, and the box's shape."""
        atom, pack_gqa, tokens, width = self.query_atom(), self.key.pack_gqa, self.box_tokens, self.copied_q
        if pack_gqa == 1:
            return cute.tile_to_shape(atom, (tokens, width), order=(0, 1)), (tokens, width)
        box = cute.make_composed_layout(atom.inner, 0, query_box(pack_gqa, tokens, width))
        return box, (pack_gqa, tokens, width)

    def value_box(self):
        return self.key_box(self.dims_v)

    def key_box(self, width: int):
        """The layout in shared memory of one TMA box of K or V, and the box's shape."""
        if self.key.kv.quantized:
            return fp8_tma_box(self.box, self.stored(fp8_chunk(width)))
        columns = width if self.page_boxes else chunk(width)
        return self.boxed(self.box, columns), (self.box, columns)

    def swizzled(self, place: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
        pointer = cute.recast_ptr(place, layout.inner, dtype=self.dtype)
        return cute.make_tensor(pointer, layout.outer)

    def loads(self, tensors: Any) -> DenseLoads:
        """The TMA atoms, and each tensor as its atom takes it; tensors: `DenseTensors`, or those of a subclass."""
        key, (q, keys, values) = self.key, tensors[:3]
        load = self.load_op()
        tokens, _, width = q.shape
        if key.pack_gqa == 1:
            mQ = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[0, 2, 1]))
        else:
            mQ = cute.make_tensor(
                q.iterator,
                cute.make_layout(
                    (key.pack_gqa, tokens, width, key.heads_q // key.pack_gqa),
                    stride=(q.stride[1], q.stride[0], 1, q.stride[1] * key.pack_gqa),
                ),
            )
        k_step, v_step = None, None
        if self.page_boxes:
            mK, k_step = by_head_step(keys, self.chunk)
            mV, v_step = by_head_step(values, self.chunk_v)
        else:
            order = [1, 3, 2, 0] if key.page_size else [0, 2, 1]
            mK = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=order))
            mV = cute.make_tensor(values.iterator, cute.select(values.layout, mode=order))
        if key.v_splits > 1:
            mV = self.by_slice(mV)
        q_load = cpasync.make_tiled_tma_atom(load, mQ, *self.query_box())
        k_load = cpasync.make_tiled_tma_atom(load, mK, *self.key_box(self.dims))
        v_load = cpasync.make_tiled_tma_atom(load, mV, *self.value_box())
        return DenseLoads(*q_load, *k_load, *v_load)._replace(k_step=k_step, v_step=v_step)

    def load_op(self) -> Any:
        return cpasync.CopyBulkTensorTileG2SOp()

    def by_slice(self, values: cute.Tensor) -> cute.Tensor:
        """V (token, column, ...) as (token, column of a split, ..., split)."""
        (tokens, _, *shape), (stride, *strides) = values.layout.shape, values.layout.stride
        columns, slices = self.key.columns, self.key.v_splits
        layout = cute.make_layout((tokens, columns, *shape, slices), stride=(stride, *strides, columns))
        return cute.make_tensor(values.iterator, layout)

    def schedule(self, work_pipeline, requests: Requests, scheduler_workspace, partials: cute.Tensor | None):
        """The tile scheduler of this kernel."""
        if self.key.split and self.key.tiles_per_split:
            return FixedSplitKVTileScheduler(
                self.key, work_pipeline, self.tokens_per_tile, self.tile_n, requests, scheduler_workspace, partials
            )
        if self.key.split:
            return BalancedSplitKVTileScheduler(
                self.key,
                work_pipeline,
                self.tokens_per_tile,
                self.tile_n,
                requests,
                scheduler_workspace,
                SplitRule(min_tiles=self.config.min_split_tiles),
                pair_row_tiles=self.pair_row_tiles,
                exact_pairs=self.exact_pairs,
            )
        return DynamicPersistentTileScheduler(
            self.key, work_pipeline, self.tokens_per_tile, self.tile_n, requests, scheduler_workspace
        )


def has_whole_rows(key: LayerKey) -> bool:
    """Whether a TMA box may have all columns of the keys of a page.

    Not of a quantized cache, whose tiles are not swizzled; of packed keys, which begin at any row; of padded columns,
    behind which the next head's lie; nor of values in splits, whose tensor map would have six dimensions.
    """
    whole = all(padded(width) == width for width in (key.head_dim, key.columns))
    return key.page_size > 0 and not key.kv.quantized and key.v_splits == 1 and whole


def by_head_step(cache: cute.Tensor, chunk: int) -> tuple[cute.Tensor, cutlass.Int32]:
    """K or V [token, column, step], and the steps from a page to the next: a step is that from a head to the next.

    A tensor map has five dimensions. Those of a box, in the order of shared memory, are columns of a chunk, eight keys,
    chunks, and groups of eight keys. So pages and heads are one dimension, and pages must begin at multiples of a step:
    `host.Alignment` checks that. 2^31 steps of 128 bytes are more than the memory of a GPU.
    """
    pages, page_size, heads, width = cache.shape
    page_stride, token_stride, head_stride, _ = cache.stride
    steps = cutlass.Int32(1)
    if heads == 1:
        # A dimension of one may have any stride.
        head_stride = page_stride
    else:
        steps = cutlass.Int32(page_stride // head_stride)
    layout = cute.make_layout(
        ((SWIZZLE_ROWS, page_size // SWIZZLE_ROWS), (chunk, width // chunk), (pages - 1) * steps + heads),
        stride=((token_stride, SWIZZLE_ROWS * token_stride), (1, chunk), head_stride),
    )
    return cute.make_tensor(cache.iterator, layout), steps


def vector_of(out: cute.Tensor) -> int:
    """Elements of an output in 16 bytes."""
    return VECTOR * 16 // out.element_type.width


@cute.jit
def store_rows(
    rows: cute.Tensor,
    out: cute.Tensor,
    work: WorkTile,
    key: cutlass.Constexpr,
    first: cutlass.Int32,
    count: cutlass.Constexpr[int],
    thread: cutlass.Int32,
    threads: cutlass.Constexpr[int],
):
    """Store the rows first ... first + count - 1 of a tile from shared to global memory, 16 bytes a thread.

    Args:
        rows: the tile, [row, column]. Of an output of bytes, an element of 16 bits has two of them.
        thread: index among the `threads` that call it.
    """
    vectors = cutlass.const_expr(cute.size(rows, mode=[1]) // vector_of(out))
    row_threads = cutlass.const_expr(math.gcd(vectors, threads))
    turns, step = cutlass.const_expr(vectors // row_threads), cutlass.const_expr(threads // row_threads)
    if cutlass.const_expr(step % key.pack_gqa == 0 and count % step == 0):
        # A thread keeps its columns and its head.
        own_row, column = first + thread // row_threads, thread % row_threads
        offset = row_offset(out, work, key, own_row)
        stride = out.stride[0] * (step // key.pack_gqa)
        for i in cutlass.range(count // step, unroll=max(1, 4 // turns)):
            for turn in cutlass.range_constexpr(turns):
                store_chunk(rows, out, work, key, own_row + i * step, column + turn * row_threads, offset)
            offset += stride
    else:
        for i in cutlass.range(count * vectors // threads, unroll=1):
            index = i * threads + thread
            m = first + index // vectors
            store_chunk(rows, out, work, key, m, index % vectors, row_offset(out, work, key, m))


@cute.jit
def store_chunk(
    rows: cute.Tensor,
    out: cute.Tensor,
    work: WorkTile,
    key: cutlass.Constexpr,
    m: cutlass.Int32,
    column: cutlass.Int32,
    offset: cutlass.Int64,
):
    """Store 16 bytes of row m, which begins at `offset` in the output."""
    vector = cutlass.const_expr(vector_of(out))
    if m < work.num_rows and column * vector < key.columns:
        fragment = cute.make_rmem_tensor(VECTOR, rows.element_type)
        cute.autovec_copy(cute.group_modes(cute.local_tile(rows, (1, VECTOR), (m, column)), 0, 2), fragment)
        store_vector(cute.recast_tensor(fragment, out.element_type), out.iterator, offset + column * vector)


@cute.jit
def row_offset(out: cute.Tensor, work: WorkTile, key: cutlass.Constexpr, m: cutlass.Int32):
    """Offset of a tile's row m in the output, in elements."""
    token = work.q_offset + m // key.pack_gqa
    head = q_head_of(key, work.head_block, m)
    offset = cutlass.Int64(token) * out.stride[0] + head * out.stride[1]
    if cutlass.const_expr(key.v_splits > 1):
        offset += v_split_of(key, work.head_block) * key.columns
    return offset
