# SPDX-License-Identifier: Apache-2.0
"""The load role of a CTA with a peer."""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.cute.args import DenseLoads
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline, head_group_of
from dsl_backend.attention.cute.sm100.dense_barriers import TwoCtaBarriers
from dsl_backend.attention.cute.sm100.dense_configs import CTA_PAIR
from dsl_backend.attention.cute.sm100.kv_stages import SeparateKVLoadWarp, SeparateKVStages
from dsl_backend.attention.cute.tiles import TiledKernel


class TilePart(NamedTuple):
    """The part of a tile of K or V that a CTA loads.

    Attributes:
        smem: (box, box of rows, chunk of columns, stage).
        box: rows and columns of a TMA box.
        row, rows: first row in the tile, and how many.
        chunk, chunks: first chunk of columns, and how many.
    """

    tma_atom: cute.CopyAtom
    smem: cute.Tensor
    box: tuple[int, int]
    row: cutlass.Int32 | int
    rows: int
    chunk: cutlass.Int32 | int
    chunks: int


class TwoCtaLoadWarp(SeparateKVLoadWarp):
    """Load half of the keys of each K tile, and half of the columns of each V tile.

    The leader's mbarriers count the bytes of both CTAs.
    """

    def __init__(
        self,
        kernel: TiledKernel,
        work_pipeline: WorkTilePipeline,
        barriers: TwoCtaBarriers,
        loads: DenseLoads,
        sQ: cute.Tensor,  # (tile_m, head_dim, q_stage)
        kv_stages: SeparateKVStages,
        requests: Requests,
        cta_rank: cutlass.Int32,
    ):
        (sK,), sV = kv_stages.sK, kv_stages.sV
        super().__init__(kernel, work_pipeline, barriers, loads, sQ, sK, sV, requests)
        self.cta_rank = cta_rank
        self.q_bytes *= CTA_PAIR
        self.in_one_page = self.page > 0 and self.page % self.tile_n == 0
        rows, chunks = self.tile_n // CTA_PAIR, self.v_chunks // CTA_PAIR
        k_box, v_box = (self.box, self.copied), (kernel.value_rows, self.copied_v)
        self.k_part = TilePart(loads.tma_atom_k, self.sK, k_box, cta_rank * rows, rows, 0, self.k_chunks)
        sV_boxes = self.in_boxes(sV, *v_box)
        self.v_part = TilePart(loads.tma_atom_v, sV_boxes, v_box, 0, self.tile_n, cta_rank * chunks, chunks)

    @cute.jit
    def expect(self, full: cute.Pointer, size: cutlass.Constexpr[int]):
        """By the leader."""
        cute.arch.inline_ptx(
            "{ .reg .pred leader; elect.sync _|leader, 0xffffffff; setp.eq.and.s32 leader, {$r1}, 0, leader; "
            f"@leader mbarrier.arrive.expect_tx.shared.b64 _, [{{$r0}}], {size}; }}",
            read_only_args=[full.toint(), cutlass.Int32(self.cta_rank)],
        )

    def page_idx_of(self, tile: cutlass.Int32) -> cutlass.Int32:
        return tile // (self.page // self.tile_n) if self.in_one_page else super().page_idx_of(tile)

    def page_of(self, pages: cutlass.Int32, b: cutlass.Int32 | int) -> cutlass.Int32:
        return pages if self.in_one_page else super().page_of(pages, b)

    @cute.jit
    def fill_keys(self, work: WorkTile, tile: cutlass.Int32, pages: cutlass.Int32, stage: cutlass.Int32):
        full = self.barriers.k_full + stage
        self.expect(full, self.k_bytes)
        self.load_part(self.k_part, self.mK, work, tile, pages, stage, full)

    @cute.jit
    def fill_values(self, work: WorkTile, tile: cutlass.Int32, pages: cutlass.Int32, stage: cutlass.Int32):
        full = self.barriers.v_full + stage
        self.expect(full, self.v_bytes)
        self.load_part(self.v_part, self.values_of(work), work, tile, pages, stage, full)

    @cute.jit
    def load_part(
        self,
        part: cutlass.Constexpr[TilePart],
        mKV: cute.Tensor,  # (token, dim, head_kv[, page])
        work: WorkTile,
        tile: cutlass.Int32,
        pages: cutlass.Int32,
        stage: cutlass.Int32,
        mbar_full: cute.Pointer,
    ):
        tma_atom, smem, box, row, rows, chunk, chunks = part
        cta_layout, head = cute.make_layout(1), head_group_of(self.key, work.head_block) // self.group
        first = tile * self.tile_n + row
        if cutlass.const_expr(self.page > 0):
            # (box, box of a page, chunk, page)
            gKV = cute.group_modes(cute.flat_divide(mKV[None, None, head, None], box), 0, 2)
            tKVs, tKVg = cpasync.tma_partition(tma_atom, 0, cta_layout, smem, gKV)
            for i in cutlass.range(rows // box[0], unroll=1):
                page = self.page_of(pages, (row + i * box[0]) // self.box)
                box_idx = (first + i * box[0]) % self.page // box[0]
                for c in cutlass.range_constexpr(chunks):
                    cute.copy(
                        tma_atom, tKVg[None, box_idx, chunk + c, page], tKVs[None, i, c, stage], tma_bar_ptr=mbar_full
                    )
        else:
            mKV_rows = cute.domain_offset((work.kv_source + first, 0), mKV[None, None, head])
            gKV = cute.group_modes(cute.local_tile(mKV_rows, box, (0, None)), 0, 2)
            tKVs, tKVg = cpasync.tma_partition(tma_atom, 0, cta_layout, smem, gKV)
            for c in cutlass.range_constexpr(chunks):
                cute.copy(tma_atom, tKVg[None, chunk + c], tKVs[None, 0, c, stage], tma_bar_ptr=mbar_full)
