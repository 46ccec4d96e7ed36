# SPDX-License-Identifier: Apache-2.0
"""The shared-memory stages of K and V: separate ones, or stages that K and V share.

The mbarriers are the same for both: one for each of `stages` K tiles and V tiles. What the load warp waits for differs.
"""

from typing import Any

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.args import DenseLoads, Nvfp4Loads
from dsl_backend.attention.cute.loader.dense import PerTileLoads, RolledLoadWarp
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.sm100.dense_configs import SHARED_STAGES
from dsl_backend.attention.cute.tiles import TiledKernel
from dsl_backend.primitives.accumulators import fence_register
from dsl_backend.primitives.moved import SmemAllocator
from dsl_backend.primitives.ring import phase_of, stage_of


class SeparateKVStages:
    """Stages of K, and stages of V.

    Attributes:
        sK: tensors (key, dim, stage), whose columns follow one another.
        sV: (key, dim, stage).

    Args:
        rows_k, columns_v: keys of a K tile, and columns of a V tile, in this CTA's shared memory.
    """

    def __init__(self, kernel: TiledKernel, allocator: SmemAllocator, rows_k: int, columns_v: int):
        self.stages = kernel.config.stages
        self.sK = [allocate_swizzled(allocator, kernel.dtype, kernel.key_tiles(rows_k, kernel.dims, self.stages))]
        self.sV = allocate_swizzled(allocator, kernel.dtype_v, kernel.key_tiles(kernel.tile_n, columns_v, self.stages))

    def k_stages(self, kv_idx: cutlass.Int32) -> list[cutlass.Int32]:
        """The stage of each tensor of sK."""
        return [stage_of(kv_idx, self.stages)]

    def v_stage(self, kv_idx: cutlass.Int32) -> cutlass.Int32:
        return stage_of(kv_idx, self.stages)


class SharedKVStages:
    """Stages as wide as V, filled in turn with V tiles and with as many columns of K; and stages of K's other columns,
    where it has any.

    V takes the stage of the K tile before its own, and K that of the V tile before that.
    """

    def __init__(self, kernel: TiledKernel, allocator: SmemAllocator):
        self.stages = kernel.config.stages
        layout = kernel.key_tiles(kernel.tile_n, kernel.dims_v, SHARED_STAGES)
        self.sV = allocate_swizzled(allocator, kernel.dtype, layout)
        self.sK = [self.sV]
        if kernel.dims > kernel.dims_v:
            rest = (kernel.tile_n, kernel.dims - kernel.dims_v, self.stages)
            layout = cute.tile_to_shape(kernel.atom(kernel.dims), rest, order=(0, 1, 2))
            self.sK.append(allocate_swizzled(allocator, kernel.dtype, layout))

    def k_stages(self, kv_idx: cutlass.Int32) -> list[cutlass.Int32]:
        return [stage_of(kv_idx, SHARED_STAGES), stage_of(kv_idx, self.stages)][: len(self.sK)]

    def v_stage(self, kv_idx: cutlass.Int32) -> cutlass.Int32:
        return stage_of(kv_idx + SHARED_STAGES - 1, SHARED_STAGES)


def allocate_swizzled(
    allocator: SmemAllocator, dtype: type[cutlass.Numeric], layout: cute.ComposedLayout
) -> cute.Tensor:
    return allocator.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


class Sm100LoadWarp(PerTileLoads, RolledLoadWarp):
    """A load warp that issues few instructions for a tile, since each takes an issue slot of the other warps."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.box_begin = cute.arch.lane_idx() % self.boxes * self.box if self.boxes > 1 else 0

    @cute.jit
    def expect(self, full: cute.Pointer, size: cutlass.Constexpr[int]):
        # Half of the instructions of a branch around it.
        cute.arch.inline_ptx(
            "{ .reg .pred leader; elect.sync _|leader, 0xffffffff; "
            f"@leader mbarrier.arrive.expect_tx.shared.b64 _, [{{$r0}}], {size}; }}",
            read_only_args=[full.toint()],
        )

    @cute.jit
    def pages_of(self, work: WorkTile, tile: cutlass.Int32):
        """Lane b: the page of box b modulo boxes. After the last key a page that does not exist: TMA fills zeros."""
        page = cutlass.Int32(0)
        if cutlass.const_expr(self.page > 0):
            page = self.no_page()
            if tile * self.tile_n + self.box_begin < work.seqlen_k:
                page = self.full_tile_pages_of(work, tile)
        return page

    @cute.jit
    def full_tile_pages_of(self, work: WorkTile, tile: cutlass.Int32):
        """The same for a tile all of whose keys exist."""
        page = cutlass.Int32(0)
        if cutlass.const_expr(self.page > 0):
            page = self.requests.page_table[work.kv_source, self.page_idx_of(tile)]
        return page

    @cute.jit
    def next_pages_of(self, work: WorkTile, tile: cutlass.Int32):
        """The pages of the tile behind this one in a work tile, if there is one.

        They are asked for a tile ahead. By the emulator's clock of a B200, 64 decodes of 64/8 heads with pages of 16
        take 47.6 us (1024 keys) and 159.6 (4096) with it, and 50.9 and 190 without. Keys end in a work tile's first
        tile, which is the last one of the request: the others are full.
        """
        page = cutlass.Int32(0)
        if cutlass.const_expr(self.page > 0):
            if tile > work.n_block_min:
                page = self.full_tile_pages_of(work, tile - 1)
        return page

    def page_idx_of(self, tile: cutlass.Int32) -> cutlass.Int32:
        """The column of the page table for this lane's box."""
        if self.boxes == 1:
            return tile // (self.page // self.tile_n)
        return (tile * self.tile_n + self.box_begin) // self.page

    def page_of(self, pages: cutlass.Int32, b: cutlass.Int32 | int) -> cutlass.Int32:
        return pages if self.boxes == 1 else cute.arch.shuffle_sync(pages, b)


class SharedKVLoadWarp(Sm100LoadWarp):
    """Fill stages that K and V share, in the order of the MMAs."""

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        barriers: Any,
        loads: DenseLoads | Nvfp4Loads,
        sQ: cute.Tensor,  # (tile_m, head_dim, q_stage)
        kv_stages: SharedKVStages,
        requests: Requests,
    ):
        sV = kv_stages.sV
        super().__init__(kernel, work_pipeline, barriers, loads, sQ, sV, sV, requests)
        self.kv_stages = kv_stages
        if len(kv_stages.sK) > 1:
            self.mK_rest = cute.domain_offset((0, kernel.dims_v, *(0,) * (cute.rank(loads.mK) - 2)), loads.mK)
            self.sK_rest = self.in_boxes(kv_stages.sK[1], self.box, kernel.copied)

    @cute.jit
    def load_item(self, work: WorkTile, tiles: cutlass.Int32):
        pages_next = self.pages_of(work, work.n_block_max - 1)
        for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
            tile, kv_idx = work.n_block_max - 1 - step, tiles + step
            pages, pages_next = pages_next, self.next_pages_of(work, tile)
            self.load_keys(work, tile, pages, kv_idx)
            self.load_values(work, tile, pages, kv_idx)

    @cute.jit
    def load_keys(self, work: WorkTile, tile: cutlass.Int32, pages: cutlass.Int32, count: cutlass.Int32):
        stage = stage_of(count, self.stages)
        k_stage, *rest_stage = self.kv_stages.k_stages(count)
        full = self.barriers.k_full + stage
        self.expect(full, self.k_bytes)
        if cutlass.const_expr(len(rest_stage) > 0):
            # K of the round before, whose stage this is, has been read: the V before waited for it.
            chunks = range(self.k_chunks - self.v_chunks)
            self.load_tile(
                self.tma_atom_k, self.mK_rest, self.sK_rest, self.copied, chunks, work, tile, pages, rest_stage[0], full
            )
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase_of(count, self.stages) ^ 1)
        chunks = range(self.v_chunks)
        self.load_tile(
            self.tma_atom_k, self.mK, self.sK, self.copied, chunks, work, tile, pages, k_stage, full, step=self.k_step
        )

    @cute.jit
    def load_values(self, work: WorkTile, tile: cutlass.Int32, pages: cutlass.Int32, count: cutlass.Int32):
        before = count - 1
        cute.arch.mbarrier_wait(self.barriers.k_empty + stage_of(before, self.stages), phase_of(before, self.stages))
        full = self.barriers.v_full + stage_of(count, self.stages)
        self.expect(full, self.v_bytes)
        chunks, v_stage = range(self.v_chunks), self.kv_stages.v_stage(count)
        self.load_tile(
            self.tma_atom_v, self.mV, self.sV, self.copied_v, chunks, work, tile, pages, v_stage, full, step=self.v_step
        )


class SeparateKVLoadWarp(Sm100LoadWarp):
    """Fill stages of K and stages of V: V of a tile after K of the next one."""

    @cute.jit
    def load_item(self, work: WorkTile, tiles: cutlass.Int32):
        last = work.n_block_max - 1
        pages = self.pages_of(work, last)
        stage, phase = self.stage_and_phase(tiles)
        cute.arch.mbarrier_wait(self.barriers.k_empty + stage, phase)
        self.fill_keys(work, last, pages, stage)
        kv_idx_of_tile_0 = tiles + last
        pages_next = self.next_pages_of(work, last)
        for kv_idx in cutlass.range(tiles + 1, tiles + work.n_block_max - work.n_block_min, unroll=1):
            tile = kv_idx_of_tile_0 - kv_idx
            pages_before, stage_before, phase_before = pages, stage, phase
            pages, pages_next = pages_next, self.next_pages_of(work, tile)
            stage, phase = self.stage_and_phase(kv_idx)
            cute.arch.mbarrier_wait(self.barriers.k_empty + stage, phase)
            self.fill_keys(work, tile, pages, stage)
            cute.arch.mbarrier_wait(self.barriers.v_empty + stage_before, phase_before)
            self.fill_values(work, tile + 1, pages_before, stage_before)
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase)
        self.fill_values(work, work.n_block_min, pages, stage)

    def stage_and_phase(self, kv_idx: cutlass.Int32) -> tuple[cutlass.Int32, cutlass.Int32]:
        """The stage of a tile, and the phase of `empty` that its load waits for."""
        # Fenced: otherwise the compiler makes each address from kv_idx again, by a shift and a mask.
        return fence_register(stage_of(kv_idx, self.stages)), phase_of(kv_idx, self.stages) ^ 1
