# SPDX-License-Identifier: Apache-2.0
"""What the kernels of absorbed MLA share: tiles, layouts, TMA atoms and the tile scheduler.

A row of the cache is a key, of which the first elements are the value: it is loaded once.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from dsl_backend.attention.cute.args import MlaKeyLoads, MlaLoads, MlaTensors
from dsl_backend.attention.cute.dequant import fp8_smem_layout, fp8_tma_box
from dsl_backend.attention.cute.fp8_smem import fp8_box
from dsl_backend.attention.cute.loader.dense import box_rows, query_box, tokens_of_box
from dsl_backend.attention.cute.mla_configs import ROWS, MlaTileConfig
from dsl_backend.attention.cute.scheduler.balanced import COMBINE_TILES_MLA, BalancedSplitKVTileScheduler, SplitRule
from dsl_backend.attention.cute.scheduler.persistent import StaticPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.split_kv import FixedSplitKVTileScheduler
from dsl_backend.attention.cute.scheduler.work_tile import WorkTilePipeline
from dsl_backend.attention.cute.sizes import chunk, fold_workspace_size
from dsl_backend.attention.cute.tiles import NUMERIC, SWIZZLES, LayerKey
from dsl_backend.primitives.copy import VECTOR_BYTES
from dsl_backend.primitives.moved import SmemAllocator


@dataclass(frozen=True, kw_only=True)
class MlaKey(LayerKey):
    """All that the code of a kernel depends on."""

    config: MlaTileConfig

    @property
    def dynamic_scheduler(self) -> bool:
        """Never: the CTAs of a cluster must have work tiles with the same keys."""
        return False

    @property
    def smem_fold_rows(self) -> int:
        return self.config.smem_fold_rows if self.tiles_per_split else 0

    @property
    def v_splits(self) -> int:
        """One: a CTA has room for O of full width."""
        return 1

    @property
    def key_bytes(self) -> int:
        """The value is a part of the key."""
        return self.head_dim * self.kv.itemsize


@dataclass(frozen=True, kw_only=True)
class Fp8MlaKey(MlaKey):
    """That of kernels with products in 8 bits."""

    reads_fp8_q = True


MOST_BOXES = 4  # boxes of Q in a tile; each takes one TMA load for every chunk


class TiledMla:
    """Sizes, layouts, TMA atoms and tile scheduler of a kernel.

    Of Q, only the boxes are loaded that have tokens of the work tile: with 16 heads, one token is 18 KB of a tile's 72,
    as much as a tile of K.

    Attributes:
        most_boxes: of Q in a tile, at most.
        box_tokens: tokens of a box of Q.
        q_itemsize: bytes of an element of Q as TMA copies it.
        rows_loaded: rows of Q that are loaded for every work tile. The others hold zeros, or earlier queries.
        few_rows_chunk: elements from a chunk of Q to the next one, in a work tile of up to `key.smem_fold_rows` rows.
        mma_commits_late: tcgen05.commit signals that K was read, at a time when the peer's load warp may have ended.
        math_clears: the MMA warpgroups zero the rows of Q that TMA may not write, and release Q to the load warp before
            the first work tile; else all warps zero them before the roles start.
        parts: chunks of a row of K, in the order in which their stages become empty: the rope part, then the two halves
            of the latent part.
        dequantizes: MMAs read 16-bit keys, which warps convert from stages of fp8.
        loaded_stages: stages of K that TMA fills.
    """

    most_boxes = 1
    mma_commits_late = False
    q_itemsize = 2

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
        # Chunks of a Q of few rows lie close together, and what follows them is free.
        self.few_rows_chunk = self.rows_loaded * self.chunk
        self.box = box_rows(key.page_size, self.tile_n // self.config.cluster)
        self.parts = self.three_parts()
        self.dequantizes = key.kv.fp8
        self.loaded_stages = self.config.dequant_stages if key.kv.fp8 else self.config.stages

    def three_parts(self) -> tuple[range, ...]:
        """The parts of a row of K, of its chunks."""
        chunks, chunks_v = self.dims // self.chunk, self.dims_v // self.chunk
        return range(chunks_v, chunks), range(chunks_v // 2), range(chunks_v // 2, chunks_v)

    def atom(self, width: int) -> cute.ComposedLayout:
        """The swizzled layout atom of rows of `width` elements."""
        return warpgroup.make_smem_layout_atom(SWIZZLES[width], self.dtype)

    def key_atom(self) -> cute.ComposedLayout:
        """The swizzled layout atom of keys as MMAs read them."""
        return self.atom(self.chunk)

    def layouts(self) -> tuple[cute.ComposedLayout, ...]:
        """Of sQ [row, column, 1], sK [key, column, stage] and sP [row, key]."""
        atom, tile_n = self.atom(self.chunk), self.tile_n
        return (
            cute.tile_to_shape(atom, (ROWS, self.dims, 1), order=(0, 1, 2)),
            cute.tile_to_shape(atom, (tile_n, self.dims, self.config.stages), order=(0, 1, 2)),
            cute.tile_to_shape(self.atom(chunk(tile_n)), (ROWS, tile_n), order=(0, 1)),
        )

    def smem_fold_workspace(self, sQ: cute.Tensor) -> cute.Tensor | None:
        """What is free of sQ where Q has few rows: the MMAs read ROWS rows from the begin of each chunk."""
        if not self.key.smem_fold_rows:
            return None
        begin = (self.dims // self.chunk - 1) * self.few_rows_chunk + ROWS * self.chunk
        size = fold_workspace_size(self.key.smem_fold_rows, self.dims_v)
        address = sQ.iterator.toint() + begin * self.dtype.width // 8
        pointer = cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
        return cute.make_tensor(pointer, cute.make_layout(size))

    def tma_target(self, allocator: SmemAllocator, sK: cute.Tensor) -> cute.Tensor:
        """Where TMA writes keys: sK, or stages of fp8 that are dequantized into sK."""
        if not self.key.kv.fp8:
            return sK
        layout = fp8_smem_layout(self.tile_n, self.dims, self.chunk, self.config.dequant_stages)
        return allocator.allocate_tensor(cutlass.Uint8, layout, byte_alignment=128)

    def values(self, sK: cute.Tensor) -> cute.Tensor:
        """V as a view of sK: its first columns, [key, column, stage]."""
        layout = cute.tile_to_shape(self.key_atom(), (self.tile_n, self.dims_v, 1), order=(0, 1, 2)).outer
        shape, stride = layout.shape, layout.stride
        stages = cute.make_layout(
            (shape[0], shape[1], self.config.stages), stride=(stride[0], stride[1], self.tile_n * self.dims)
        )
        return cute.make_tensor(sK.iterator, stages)

    def loads(self, tensors: MlaTensors) -> MlaLoads:
        """The TMA atoms, each with its tensor in the mode order that the atom takes."""
        key, atom = self.key, self.atom(self.chunk)
        load, load_keys = self.load_ops()
        q_box = cute.make_composed_layout(atom.inner, 0, query_box(key.pack_gqa, self.box_tokens, self.chunk))
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

    def key_loads(self, tensors: MlaTensors) -> MlaKeyLoads:
        """Those of a kernel that multiplies fp8 keys as they are: its warps load Q themselves."""
        order = [1, 3, 2, 0] if self.key.page_size else [0, 2, 1]
        mK = cute.make_tensor(tensors.k.iterator, cute.select(tensors.k.layout, mode=order))
        _, load = self.load_ops()
        keys = cpasync.make_tiled_tma_atom(load, mK, *fp8_box(self.box, self.dims))
        return MlaKeyLoads(tensors.q, tensors.q_rope, *keys)

    def load_ops(self) -> tuple[Any, Any]:
        """The TMA loads of Q, and of K."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        return load, cpasync.CopyBulkTensorTileG2SMulticastOp() if self.config.cluster > 1 else load

    def by_head(self, q: cute.Tensor) -> cute.Tensor:
        """View Q [token, head, column] as [head of a block, token, column, head block]."""
        tokens, heads, width = q.shape
        pack_gqa = self.key.pack_gqa
        return cute.make_tensor(
            q.iterator,
            cute.make_layout(
                (pack_gqa, tokens, width, heads // pack_gqa),
                stride=(q.stride[1], q.stride[0], 1, q.stride[1] * pack_gqa),
            ),
        )

    def schedule(
        self,
        work_pipeline: WorkTilePipeline,
        requests: Requests,
        scheduler_workspace: cute.Tensor | None,
        partials: cute.Tensor | None,
    ) -> Any:
        """The tile scheduler."""
        tokens, config = self.tokens_per_tile, self.config
        if self.key.split and self.key.tiles_per_split:
            return FixedSplitKVTileScheduler(
                self.key,
                work_pipeline,
                tokens,
                self.tile_n,
                requests,
                scheduler_workspace,
                partials,
                config.cluster,
                COMBINE_TILES_MLA,
                pair_row_tiles=True,
            )
        if self.key.split:
            return BalancedSplitKVTileScheduler(
                self.key,
                work_pipeline,
                tokens,
                self.tile_n,
                requests,
                scheduler_workspace,
                SplitRule(
                    min_tiles=config.min_split_tiles,
                    short_splits=config.short_splits,
                    combine_tiles=COMBINE_TILES_MLA,
                    idle_eighths=config.idle_eighths,
                    even_splits=config.even_splits,
                ),
                config.cluster,
                pair_row_tiles=True,
                row_groups=config.row_groups,
                kept_chunks=config.kept_chunks,
            )
        return StaticPersistentTileScheduler(self.key, work_pipeline, tokens, self.tile_n, requests)

    @cute.jit
    def cluster_sync(self):
        """A barrier of all threads of the cluster, or of a CTA without one."""
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
