# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA for SM90: one warp finds work, one loads, two warpgroups multiply.

A row of the cache is a key, and its first elements are the value: it is loaded once. Outputs of 64 rows and 512 columns
do not fit a warpgroup's registers: each of the two has half of the columns, and weights pass between them through
shared memory (as in FlashMLA: Li and Liu, 2025). Query rows are tokens times the heads that share a tile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.parts.load import box_rows, query_box
from dsl_backend.attention.parts.merge import Merge
from dsl_backend.attention.parts.schedule import KeyShares, QueryTiles, Requests
from dsl_backend.attention.parts.scores import Scoring
from dsl_backend.attention.parts.sizes import WARPGROUP, chunk
from dsl_backend.attention.parts.tiles import NUMERIC, SWIZZLES, LayerKey
from dsl_backend.attention.parts.work import SLOTS, Mailbox
from dsl_backend.attention.sm90.configs import ROWS
from dsl_backend.attention.sm90.forward import LOAD_WARP, SCHEDULE_WARP
from dsl_backend.attention.sm90.latent_configs import GROUPS, MATH_REGISTERS, OTHER_REGISTERS, PARTS, LatentConfig
from dsl_backend.attention.sm90.latent_load import LatentLoader
from dsl_backend.attention.sm90.latent_multiply import LatentMultiplier


@dataclass(frozen=True, kw_only=True)
class LatentKey(LayerKey):
    """All that the kernel's code depends on."""

    config: LatentConfig


class Barriers(NamedTuple):
    """Pairs of mbarrier arrays: full ones say that a buffer was written, empty ones that it was read."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer


class LatentForward:
    """out = softmax(q k^T) k[:, :head_dim_v] for the requests of a batch; see `api.run` for the operands."""

    def __init__(self, key: LatentKey):
        self.key, self.config = key, key.config
        self.dtype = NUMERIC[key.dtype]
        self.dims, self.dims_v = key.head_dim, key.head_dim_v
        self.chunk = chunk(key.head_dim)
        self.tile_n = self.config.tile_n
        self.tokens_per_tile = ROWS // key.pack
        self.box = box_rows(key.page_size, self.tile_n // self.config.cluster)
        chunks, chunks_v = self.dims // self.chunk, self.dims_v // self.chunk
        # Chunks of a row, in the order in which their room becomes free: what is only key, then the groups' halves of
        # the value.
        self.parts = (range(chunks_v, chunks), range(chunks_v // 2), range(chunks_v // 2, chunks_v))

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        q_rope: cute.Tensor,
        keys: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        starts: cute.Tensor,
        lengths: cute.Tensor,
        table: cute.Tensor | None,
        packed_starts: cute.Tensor | None,
        causal: cute.Tensor | None,
        sinks: cute.Tensor | None,
        slopes: cute.Tensor | None,
        k_scale: cute.Tensor | None,
        v_scale: cute.Tensor | None,
        partials: cute.Tensor | None,
        merges: cute.Tensor | None,
        scale: cutlass.Float32,
        softcap: cutlass.Float32,
        left: cutlass.Int32,
        right: cutlass.Int32,
        shortest: cutlass.Int32,
        longest: cutlass.Int32,
        blocks: cutlass.Int32,
        rows: cutlass.Int32,
        stream,
    ):
        key, config = self.key, self.config
        product = self.product((1, 1, 1), self.tile_n, OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        halves, half = (1, GROUPS, 1), self.dims_v // GROUPS
        weighing = self.product(halves, half, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        weighing_shared = self.product(halves, half, OperandMajorMode.MN, warpgroup.OperandSource.SMEM)
        atom = self.atom(self.chunk)
        q_layout = cute.tile_to_shape(atom, (ROWS, self.dims, 1), order=(0, 1, 2))
        k_layout = cute.tile_to_shape(atom, (self.tile_n, self.dims, config.stages), order=(0, 1, 2))
        v_layout = cute.tile_to_shape(atom, (self.tile_n, self.dims_v, 1), order=(0, 1, 2))
        p_layout = cute.tile_to_shape(self.atom(chunk(self.tile_n)), (ROWS, self.tile_n), order=(0, 1))
        k_box = cute.tile_to_shape(atom, (self.box, self.chunk), order=(0, 1))
        q_box = cute.make_composed_layout(atom.inner, 0, query_box(self))
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if config.cluster > 1 else load
        q_tile = (key.pack, self.tokens_per_tile, self.chunk)
        v_load, mV = cpasync.make_tiled_tma_atom(load, self.by_head(q), q_box, q_tile)
        r_load, mR = cpasync.make_tiled_tma_atom(load, self.by_head(q_rope), q_box, q_tile)
        order = [1, 3, 2, 0] if key.page_size else [0, 2, 1]
        mK = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=order))
        k_load, mK = cpasync.make_tiled_tma_atom(load_shared, mK, k_box, (self.box, self.chunk))
        requests = Requests(starts, lengths, table, packed_starts, causal, left, right, shortest, longest, rows)
        scoring = Scoring(scale, softcap, sinks, slopes, k_scale, v_scale)
        self.kernel(
            product,
            weighing,
            weighing_shared,
            v_load,
            mV,
            r_load,
            mR,
            k_load,
            mK,
            q_layout,
            k_layout,
            v_layout,
            p_layout,
            out,
            lse,
            partials,
            merges,
            requests,
            scoring,
        ).launch(
            grid=(blocks, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )
        if cutlass.const_expr(key.split):
            merge = Merge(key, self.tile_n, config.least_share, self.dims_v)
            merge(partials, merges, requests, out, lse, scoring, blocks, stream)

    def product(self, groups, columns, b_major, a_source):
        return hopper_helpers.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, cutlass.Float32, groups, (ROWS, columns), a_source
        )

    def atom(self, width: int):
        """The swizzled atom of rows `width` elements wide."""
        return warpgroup.make_smem_layout_atom(SWIZZLES[width], self.dtype)

    def by_head(self, q: cute.Tensor) -> cute.Tensor:
        """Queries [tokens, heads, width] as [heads of a tile, tokens, width, tile of heads]."""
        tokens, heads, width = q.shape
        pack = self.key.pack
        return cute.make_tensor(
            q.iterator,
            cute.make_layout(
                (pack, tokens, width, heads // pack), stride=(q.stride[1], q.stride[0], 1, q.stride[1] * pack)
            ),
        )

    @cute.kernel
    def kernel(
        self,
        product: cute.TiledMma,
        weighing: cute.TiledMma,
        weighing_shared: cute.TiledMma,
        v_load: cute.CopyAtom,
        mV: cute.Tensor,
        r_load: cute.CopyAtom,
        mR: cute.Tensor,
        k_load: cute.CopyAtom,
        mK: cute.Tensor,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        partials: cute.Tensor | None,
        merges: cute.Tensor | None,
        requests: Requests,
        scoring: Scoring,
    ):
        config = self.config
        if cutlass.const_expr(self.key.split):
            # The merge kernel may take its place beside this one, and waits there.
            cute.arch.griddepcontrol_launch_dependents()
        allocator = cutlass.utils.SmemAllocator()
        sQ, sK, sP = (
            allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (q_layout, k_layout, p_layout)
        )
        # A key tile's first columns.
        v_shape, v_stride = v_layout.outer.shape, v_layout.outer.stride
        values = cute.make_layout(
            (v_shape[0], v_shape[1], config.stages), stride=(v_stride[0], v_stride[1], self.tile_n * self.dims)
        )
        sV = cute.make_tensor(sK.iterator, values)
        state = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, 2)), byte_alignment=16)
        totals = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((ROWS, GROUPS, 2)), byte_alignment=16)
        items = allocator.allocate_tensor(cutlass.Int32, Mailbox.layout(), byte_alignment=64)
        sizes = [1] * 2 + [PARTS * config.stages] * 2 + [SLOTS] * 2
        barriers = Barriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))

        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                group = WARPGROUP // 32
                # A loading warp fills by bytes. One group's warps empty a part of a key tile, in all blocks of a
                # cluster; both groups' the queries; the mailbox has the load warp as well.
                counts = [1, GROUPS * group, 1, config.cluster * group, 1, GROUPS * group + 1]
                for pointer, size, count in zip(barriers, sizes, counts, strict=True):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
            cute.arch.mbarrier_init_fence()
        self.meet()

        mailbox = Mailbox(items, barriers.work_full, barriers.work_empty)
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == LOAD_WARP:
                LatentLoader(self, mailbox, barriers, v_load, mV, r_load, mR, sQ, k_load, mK, sK, requests).run()
            if warp == SCHEDULE_WARP:
                if cutlass.const_expr(self.key.split):
                    least = config.least_share
                    KeyShares(
                        self.key, mailbox, self.tokens_per_tile, self.tile_n, requests, merges, least, config.cluster
                    ).run()
                else:
                    QueryTiles(self.key, mailbox, self.tokens_per_tile, self.tile_n, requests).run()
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            LatentMultiplier(
                self,
                mailbox,
                product,
                weighing,
                weighing_shared,
                barriers,
                sQ,
                sK,
                sV,
                sP,
                state,
                totals,
                out,
                lse,
                partials,
                requests,
                scoring,
                thread - WARPGROUP,
            ).run()
        if cutlass.const_expr(config.cluster > 1):
            # A block's memory and barriers are there until the others have done with them.
            self.meet()

    @cute.jit
    def meet(self):
        """All threads of a cluster, or of a block that is alone."""
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
