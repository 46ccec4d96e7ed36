# SPDX-License-Identifier: Apache-2.0
"""Attention forward for SM90: one warp finds work, one loads, one to three warpgroups multiply.

A block stays for the whole launch and takes tile after tile. K and V tiles pass through rings of buffers that tensor
copies fill; scores and weights stay in registers (FlashAttention-3: Shah et al., 2024). A tile's query rows are tokens
of one head, or tokens times the heads that share its keys.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from dsl_backend.attention.parts.scores import ScoreKey, Scoring
from dsl_backend.attention.parts.work import SLOTS, Mailbox
from dsl_backend.attention.sm90.configs import REGISTERS, WARPGROUP, ForwardConfig, chunk, padded
from dsl_backend.attention.sm90.load import Loader, box_rows, query_box
from dsl_backend.attention.sm90.merge import Merge
from dsl_backend.attention.sm90.multiply import Multiplier
from dsl_backend.attention.sm90.schedule import KeyShares, QueryTiles, Requests

NUMERIC = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
SWIZZLES = {
    64: warpgroup.SmemLayoutAtomKind.K_SW128,
    32: warpgroup.SmemLayoutAtomKind.K_SW64,
    16: warpgroup.SmemLayoutAtomKind.K_SW32,
}
LOAD_WARP, SCHEDULE_WARP = 0, 1


@dataclass(frozen=True, kw_only=True)
class LayerKey:
    """What of a layer, and of what is wanted of it, a kernel's code depends on.

    Attributes:
        dtype: of queries, keys, values and outputs.
        heads_q, heads_kv: of the layer.
        pack: query heads whose rows share a tile.
        page_size: tokens of a page; 0 where keys are packed.
        causality: `full`, `causal` or `per_request`.
        left, right: whether a window ends before or after a position.
        split: key ranges are cut into equal shares for the blocks, rather than query tiles dealt out.
        lse: whether the softmax's denominators are wanted.
    """

    dtype: str
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    pack: int
    page_size: int
    causality: str
    left: bool
    right: bool
    lse: bool
    split: bool
    scores: ScoreKey


@dataclass(frozen=True, kw_only=True)
class ForwardKey(LayerKey):
    """All that the kernel's code depends on."""

    config: ForwardConfig


class Barriers(NamedTuple):
    """Pairs of mbarrier arrays: full ones say that a buffer was written, empty ones that it was read."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    work_full: cute.Pointer
    work_empty: cute.Pointer


class Forward:
    """out = softmax(q k^T) v for the requests of a batch; see `api.run` for the operands."""

    def __init__(self, key: ForwardKey):
        self.key, self.config = key, key.config
        self.dtype = NUMERIC[key.dtype]
        self.dims, self.dims_v = padded(key.head_dim), padded(key.head_dim_v)
        self.chunk, self.chunk_v = chunk(key.head_dim), chunk(key.head_dim_v)
        self.tile_m, self.tile_n = self.config.tile_m, self.config.tile_n
        self.tokens_per_tile = self.tile_m // key.pack
        self.box = box_rows(key.page_size, self.tile_n)
        self.most_registers, self.least_registers = REGISTERS[self.config.groups]
        if self.config.resident > 1:
            self.most_registers, self.least_registers = 216, 24

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        keys: cute.Tensor,
        values: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        starts: cute.Tensor,
        lengths: cute.Tensor,
        table: cute.Tensor | None,
        packed_starts: cute.Tensor | None,
        causal: cute.Tensor | None,
        sinks: cute.Tensor | None,
        slopes: cute.Tensor | None,
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
        product = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float32,
            (config.groups, 1, 1),
            (64, self.tile_n),
        )
        weighing = hopper_helpers.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            cutlass.Float32,
            (config.groups, 1, 1),
            (64, self.dims_v),
            warpgroup.OperandSource.RMEM,
        )
        q_layout = self.staged(self.tile_m, self.dims, config.query_stages)
        k_layout = self.staged(self.tile_n, self.dims, config.stages)
        v_layout = self.staged(self.tile_n, self.dims_v, config.stages)
        out_layout = self.staged(self.tile_m, self.dims_v, config.query_stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        tokens, _, width = q.shape
        if cutlass.const_expr(key.pack == 1):
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
        q_load, mQ = cpasync.make_tiled_tma_atom(load, mQ, q_box, q_tile)
        k_load, mK = cpasync.make_tiled_tma_atom(load, mK, self.boxed(self.box, self.chunk), (self.box, self.chunk))
        v_load, mV = cpasync.make_tiled_tma_atom(load, mV, self.boxed(self.box, self.chunk_v), (self.box, self.chunk_v))
        scoring = Scoring(scale, softcap, sinks, slopes)
        self.kernel(
            product,
            weighing,
            q_load,
            mQ,
            k_load,
            mK,
            v_load,
            mV,
            q_layout,
            k_layout,
            v_layout,
            out_layout,
            out,
            lse,
            partials,
            merges,
            Requests(starts, lengths, table, packed_starts, causal, left, right, shortest, longest),
            scoring,
        ).launch(
            grid=(blocks, 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=config.resident,
            preferred_smem_carveout=100,
        )
        if cutlass.const_expr(key.split):
            merge = Merge(key, self.tile_m, self.dims_v)
            merge.kernel(partials, merges, out, lse, scoring).launch(
                grid=(blocks, rows, 1), block=(merge.threads, 1, 1), stream=stream, use_pdl=True
            )

    def atom(self, width: int):
        """The swizzled atom of rows `width` elements wide."""
        return warpgroup.make_smem_layout_atom(SWIZZLES[chunk(width)], self.dtype)

    def staged(self, rows: int, width: int, stages: int):
        """[rows, width, stages] in shared memory: columns of chunks, each [rows, chunk]."""
        return cute.tile_to_shape(self.atom(width), (rows, width, stages), order=(0, 1, 2))

    def boxed(self, rows: int, width: int):
        """[rows, width] of one chunk, as a tensor copy writes it."""
        return cute.tile_to_shape(self.atom(width), (rows, width), order=(0, 1))

    @cute.kernel
    def kernel(
        self,
        product: cute.TiledMma,
        weighing: cute.TiledMma,
        q_load: cute.CopyAtom,
        mQ: cute.Tensor,
        k_load: cute.CopyAtom,
        mK: cute.Tensor,
        v_load: cute.CopyAtom,
        mV: cute.Tensor,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        out_layout: cute.ComposedLayout,
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
        places = config.query_stages * self.tile_m * max(self.dims, self.dims_v)
        q_place = allocator.allocate(places * 2, byte_alignment=1024)
        sQ = self.swizzled(q_place, q_layout)
        sOut = self.swizzled(q_place, out_layout)
        sK = allocator.allocate_tensor(self.dtype, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner)
        sV = allocator.allocate_tensor(self.dtype, v_layout.outer, byte_alignment=1024, swizzle=v_layout.inner)
        items = allocator.allocate_tensor(cutlass.Int32, Mailbox.layout(), byte_alignment=64)
        sizes = [config.query_stages] * 2 + [config.stages] * 4 + [SLOTS] * 2
        barriers = Barriers(*(allocator.allocate_array(cutlass.Int64, size) for size in sizes))

        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                warps = config.groups * WARPGROUP // 32
                # A loading warp fills by bytes; a math warp empties by one lane. The mailbox has the load warp as well.
                for pointer, size, count in zip(
                    barriers, sizes, [1, warps, 1, warps, 1, warps, 1, warps + 1], strict=True
                ):
                    for i in cutlass.range_constexpr(size):
                        cute.arch.mbarrier_init(pointer + i, count)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        mailbox = Mailbox(items, barriers.work_full, barriers.work_empty)
        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(self.least_registers)
            if warp == LOAD_WARP:
                Loader(self, mailbox, barriers, q_load, mQ, sQ, k_load, mK, sK, v_load, mV, sV, requests).run()
            if warp == SCHEDULE_WARP:
                if cutlass.const_expr(self.key.split):
                    least = config.least_share
                    KeyShares(self.key, mailbox, self.tokens_per_tile, self.tile_n, requests, merges, least).run()
                else:
                    QueryTiles(self.key, mailbox, self.tokens_per_tile, self.tile_n, requests).run()
        else:
            cute.arch.setmaxregister_increase(self.most_registers)
            Multiplier(
                self,
                mailbox,
                product,
                weighing,
                barriers,
                sQ,
                sK,
                sV,
                sOut,
                out,
                lse,
                partials,
                requests,
                scoring,
                thread - WARPGROUP,
            ).run()

    def swizzled(self, place: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
        pointer = cute.recast_ptr(place, layout.inner, dtype=self.dtype)
        return cute.make_tensor(pointer, layout.outer)
