# SPDX-License-Identifier: Apache-2.0
"""What the kernels of absorbed MLA do alike: tiles, schedule, and the load role. Rows of the cache come once, and are
keys and values.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsl_backend.attention.cute.args import MlaLoads, MlaTensors
from dsl_backend.attention.cute.dequant import DequantTiles, fp8_smem_layout, fp8_tma_box
from dsl_backend.attention.cute.loader.dense import LoadWarp, box_rows, query_box, tokens_of_box
from dsl_backend.attention.cute.mla_configs import PARTS, ROWS, MlaTileConfig
from dsl_backend.attention.cute.scheduler.balanced import COMBINE_TILES_MLA, BalancedSplitKVTileScheduler
from dsl_backend.attention.cute.scheduler.persistent import StaticPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import SplitKVTileScheduler
from dsl_backend.attention.cute.sizes import chunk
from dsl_backend.attention.cute.tiles import NUMERIC, SWIZZLES, LayerKey
from dsl_backend.primitives.ring import phase_of, stage_of


@dataclass(frozen=True, kw_only=True)
class MlaKey(LayerKey):
    """All that a kernel's code depends on."""

    config: MlaTileConfig

    @property
    def dynamic_scheduler(self) -> bool:
        """Blocks of a cluster work on the same tile: tiles are dealt out in turn."""
        return False

    @property
    def v_splits(self) -> int:
        """Blocks have room for the sums of whole rows."""
        return 1

    @property
    def key_bytes(self) -> int:
        """The value is a part of the key."""
        return self.head_dim * self.kv.itemsize


MOST_BOXES = 4  # of queries that an item asks for, each a copy of every chunk


class TiledMla:
    """Sizes, layouts, copies and schedule of a kernel.

    Of an item's queries only the boxes are copied that its tokens lie in: with 16 heads one token has 18 KB of a tile's
    72, which is as much as a tile of keys.

    Attributes:
        box_tokens: tokens of a box of queries.
        rows_loaded: of queries that are copied for every item. The others are zeros, or what was copied before.
        most_boxes: of a tile's queries.
        products_release: whether products say themselves that keys were read, some time after their end.
        math_clears: who multiplies clears rows of queries that no copy may write, and gives their place to the loader
            before the first item too; else they are cleared in front of the roles.
        parts: chunks of a row, in the order in which their room becomes free: what is only key, then the halves of the
            value.
    """

    most_boxes = 1
    products_release = False

    def __init__(self, key: MlaKey):
        self.key: Any = key
        self.config: Any = key.config
        self.dtype = NUMERIC[key.dtype]
        self.dims, self.dims_v = key.head_dim, key.head_dim_v
        self.chunk = chunk(key.head_dim)
        self.tile_n = self.config.tile_n
        self.tokens_per_tile = ROWS // key.pack_gqa
        self.box_tokens = tokens_of_box(key.pack_gqa, self.tokens_per_tile, self.most_boxes)
        self.rows_loaded = self.box_tokens * key.pack_gqa
        self.math_clears = self.most_boxes > 1 and self.rows_loaded < ROWS
        self.box = box_rows(key.page_size, self.tile_n // self.config.cluster)
        chunks, chunks_v = self.dims // self.chunk, self.dims_v // self.chunk
        self.parts = (range(chunks_v, chunks), range(chunks_v // 2), range(chunks_v // 2, chunks_v))

    def atom(self, width: int):
        """The swizzled atom of rows `width` elements wide."""
        return warpgroup.make_smem_layout_atom(SWIZZLES[width], self.dtype)

    def layouts(self):
        """Of queries [rows, column, 1], key tiles [key, column, stage] and weights [row, key]."""
        atom, tile_n = self.atom(self.chunk), self.tile_n
        return (
            cute.tile_to_shape(atom, (ROWS, self.dims, 1), order=(0, 1, 2)),
            cute.tile_to_shape(atom, (tile_n, self.dims, self.config.stages), order=(0, 1, 2)),
            cute.tile_to_shape(self.atom(chunk(tile_n)), (ROWS, tile_n), order=(0, 1)),
        )

    def loaded(self, allocator, sK: cute.Tensor) -> cute.Tensor:
        """Where tensor copies lay keys: where products read them, or where fp8 is widened from."""
        if not self.key.kv.fp8:
            return sK
        layout = fp8_smem_layout(self.tile_n, self.dims, self.chunk, self.config.dequant_stages)
        return allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=128)

    def values(self, sK: cute.Tensor) -> cute.Tensor:
        """The first columns of key tiles: [key, column, stage]."""
        layout = cute.tile_to_shape(self.atom(self.chunk), (self.tile_n, self.dims_v, 1), order=(0, 1, 2)).outer
        shape, stride = layout.shape, layout.stride
        stages = cute.make_layout(
            (shape[0], shape[1], self.config.stages), stride=(stride[0], stride[1], self.tile_n * self.dims)
        )
        return cute.make_tensor(sK.iterator, stages)

    def loads(self, tensors: MlaTensors) -> MlaLoads:
        """The TMA atoms, and each tensor as its atom takes it."""
        key, atom = self.key, self.atom(self.chunk)
        load, load_keys = self.load_ops()
        q_box = cute.make_composed_layout(atom.inner, 0, query_box(self, self.box_tokens))
        q_tile = (key.pack_gqa, self.box_tokens, self.chunk)
        k_tile = (self.box, self.chunk)
        k_box = fp8_tma_box(*k_tile)[0] if key.kv.fp8 else cute.tile_to_shape(atom, k_tile, order=(0, 1))
        order = [1, 3, 2, 0] if key.page_size else [0, 2, 1]
        mK = cute.make_tensor(tensors.k.iterator, cute.select(tensors.k.layout, mode=order))
        return MlaLoads(
            *cpasync.make_tiled_tma_atom(load, self.by_head(tensors.q), q_box, q_tile),
            *cpasync.make_tiled_tma_atom(load, self.by_head(tensors.q_rope), q_box, q_tile),
            *cpasync.make_tiled_tma_atom(load_keys, mK, k_box, k_tile),
        )

    def load_ops(self):
        """The copies of queries, and of keys."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        return load, cpasync.CopyBulkTensorTileG2SMulticastOp() if self.config.cluster > 1 else load

    def by_head(self, q: cute.Tensor) -> cute.Tensor:
        """Queries [tokens, heads, width] as [heads of a tile, tokens, width, tile of heads]."""
        tokens, heads, width = q.shape
        pack_gqa = self.key.pack_gqa
        return cute.make_tensor(
            q.iterator,
            cute.make_layout(
                (pack_gqa, tokens, width, heads // pack_gqa),
                stride=(q.stride[1], q.stride[0], 1, q.stride[1] * pack_gqa),
            ),
        )

    def schedule(self, work_pipeline, requests: Requests, scheduler_workspace):
        """The role that finds work."""
        tokens, config = self.tokens_per_tile, self.config
        if self.key.max_splits:
            # Neighbouring blocks have neighbouring units of a share: those of a cluster load the same keys.
            return SplitKVTileScheduler(
                self.key, work_pipeline, tokens, self.tile_n, requests, config.min_split_tiles, several_row_tiles=True
            )
        if self.key.split:
            return BalancedSplitKVTileScheduler(
                self.key,
                work_pipeline,
                tokens,
                self.tile_n,
                requests,
                scheduler_workspace,
                config.min_split_tiles,
                config.cluster,
                COMBINE_TILES_MLA,
                pair_row_tiles=True,
            )
        return StaticPersistentTileScheduler(self.key, work_pipeline, tokens, self.tile_n, requests)

    @cute.jit
    def meet(self):
        """All threads of a cluster, or of a block that is alone."""
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()


class MlaLoadWarp(LoadWarp):
    """Fills the ring: for each item key tiles from the last to the first, behind that one the queries' two parts."""

    def __init__(self, kernel, work_pipeline, barriers, loads, sQ, sK, requests):
        self.config, self.key = kernel.config, kernel.key
        self.page, self.box, self.tile_n = kernel.key.page_size, kernel.box, kernel.tile_n
        self.boxes = self.tile_n // self.box
        # Blocks of a cluster load a share of each tile, for all of them.
        cluster = self.config.cluster
        self.own_boxes, self.first_box, self.multicast = self.boxes // cluster, 0, {}
        if cluster > 1:
            self.first_box = cute.arch.block_idx_in_cluster() * self.own_boxes
            self.multicast = {"mcast_mask": cutlass.Int16((1 << cluster) - 1)}
        self.group = kernel.key.heads_q // kernel.key.pack_gqa
        self.work_pipeline, self.barriers, self.requests = work_pipeline, barriers, requests
        # Queries against what is value too, and against the rest.
        self.tma_atom_q, self.mQ, self.tma_atom_q_rope, self.mQRope, self.tma_atom_k, self.mK = loads
        self.chunk, self.parts = kernel.chunk, kernel.parts
        self.chunks, self.chunks_v = kernel.dims // kernel.chunk, kernel.dims_v // kernel.chunk
        self.take_boxes(kernel)
        self.stages = self.config.dequant_stages if self.key.kv.fp8 else self.config.stages
        self.drains = kernel.products_release and cluster > 1 and not self.key.kv.fp8
        self.chunk_bytes = self.tile_n * kernel.chunk * self.key.kv.itemsize
        # Rows of a chunk lie one after another: [head and token, box, chunk].
        box = query_box(kernel, kernel.box_tokens)
        strides = (box.stride, kernel.rows_loaded * kernel.chunk, ROWS * kernel.chunk)
        layout = cute.make_layout((box.shape, self.q_boxes, self.chunks), stride=strides)
        self.sQ = cute.make_tensor(sQ.iterator, layout)
        self.sK = self.in_boxes(sK, self.box, kernel.chunk)

    @cute.jit
    def run(self):
        for atom in (self.tma_atom_q, self.tma_atom_q_rope, self.tma_atom_k):
            cpasync.prefetch_descriptor(atom)
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
                tile = work.n_block_max - 1 - step
                self.load_rows(work, tile, self.pages_of(work, tile), tiles)
                if step == 0:
                    # Behind keys, which come from memory, and whose place is free while the item before is multiplied.
                    self.load_queries(work, items)
                tiles += 1
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid
        if cutlass.const_expr(self.drains):
            # What the other block's products have to say comes to barriers of this block, which are there so long.
            for stage in cutlass.range(self.stages, unroll=1):
                for part in cutlass.range_constexpr(PARTS):
                    self.await_room(tiles + stage, part)

    @cute.jit
    def await_room(self, count, part: cutlass.Constexpr[int]):
        """Until a part of the tile that had a tile's place before it was read; returns the place."""
        place = stage_of(count, self.stages) * PARTS + part
        cute.arch.mbarrier_wait(self.barriers.k_empty + place, phase_of(count, self.stages) ^ 1)
        return place

    @cute.jit
    def load_queries(self, work, count):
        cute.arch.mbarrier_wait(self.barriers.q_empty, (count & 1) ^ self.q_phase)
        full = self.barriers.q_full
        boxes = self.expect_queries(work, full)
        tile = (self.key.pack_gqa, self.box_tokens, self.chunk)
        first = 0
        for atom, source, chunks in (
            (self.tma_atom_q, self.mQ, self.chunks_v),
            (self.tma_atom_q_rope, self.mQRope, self.chunks - self.chunks_v),
        ):
            rows = cute.domain_offset((0, work.q_offset, 0), source[None, None, None, work.head_block])
            given = cute.group_modes(cute.local_tile(rows, tile, (0, None, None)), 0, 3)
            to, given = cpasync.tma_partition(atom, 0, cute.make_layout(1), self.sQ, given)
            for box in cutlass.range(boxes, unroll=1):
                for c in cutlass.range_constexpr(chunks):
                    cute.copy(atom, given[None, box, c], to[None, box, first + c], tma_bar_ptr=full)
            first += chunks

    @cute.jit
    def load_rows(self, work, tile, pages, count):
        """A key tile, part by part as they become free."""
        stage = stage_of(count, self.stages)
        for part in cutlass.range_constexpr(PARTS):
            place = self.await_room(count, part)
            full = self.barriers.k_full + place
            self.expect(full, len(self.parts[part]) * self.chunk_bytes)
            chunks = self.parts[part]
            self.load_tile(self.tma_atom_k, self.mK, self.sK, self.chunk, chunks, work, tile, pages, stage, full)


class MlaDequantWarps:
    """Key tiles of fp8, in the order and parts in which they are loaded.

    Args:
        loaded: where tensor copies lay bytes; sK: where products read.
    """

    def __init__(self, kernel, work_pipeline, barriers, loaded, sK):
        self.work_pipeline, b = work_pipeline, barriers
        rings, wide = (b.k_loaded, b.k_taken, b.k_full, b.k_empty), kernel.chunk
        self.tiles = [
            DequantTiles(
                kernel.key.kv,
                wide,
                loaded,
                sK,
                rings,
                columns=range(part.start * wide, part.stop * wide),
                part=(i, PARTS),
                num_ctas=kernel.config.cluster,
            )
            for i, part in enumerate(kernel.parts)
        ]

    @cute.jit
    def run(self):
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            for _ in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
                for part in cutlass.range_constexpr(PARTS):
                    self.tiles[part].dequantize(tiles)
                tiles += 1
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid
