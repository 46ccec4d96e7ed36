# SPDX-License-Identifier: Apache-2.0
"""The load warp of each CTA of a pair, for absorbed MLA."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.cute.args import MlaLoads
from dsl_backend.attention.cute.loader.mla import MlaLoadWarp
from dsl_backend.attention.cute.mla_configs import PARTS
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.sm100.dense_configs import CTA_PAIR
from dsl_backend.attention.cute.sm100.mla_barriers import TwoCtaBarriers
from dsl_backend.attention.cute.sm100.mla_configs import DV_TILE
from dsl_backend.primitives.ring import phase_of, stage_of
from dsl_backend.primitives.tma import TmaBox, tma_load_boxes


class TwoCtaMlaLoadWarp(MlaLoadWarp):
    """TMA producer of the CTA's stages: half of a tile's keys, in full width, and of all keys half of V's columns.

    The leader's mbarriers count the bytes of both CTAs.

    Args:
        kernel: the `TwoCtaMlaForward`.
        sV: [key, column, stage].
        cta_rank: of this CTA in the pair; the leader has 0.
    """

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        barriers: TwoCtaBarriers,
        loads: MlaLoads,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        requests: Requests,
        cta_rank: cutlass.Int32,
    ) -> None:
        super().__init__(kernel, work_pipeline, barriers, loads, sQ, sK, requests)
        self.cta_rank, self.dv_tiles = cta_rank, kernel.dv_tiles
        self.sV = self.in_boxes(sV, self.box, kernel.chunk)
        self.q_bytes *= CTA_PAIR
        # A lane has the page of one box of a tile; where a tile lies in one page, all lanes have the same.
        self.one_page = self.page % self.tile_n == 0
        self.box_begin = 0 if self.one_page else cute.arch.lane_idx() % self.boxes * self.box

    @cute.jit
    def expect(self, mbar_full: cute.Pointer, tx_bytes: cutlass.Int32):
        if self.cta_rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(mbar_full, tx_bytes)

    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return self.tma_atom_q, self.tma_atom_q_rope, self.tma_atom_k

    @cute.jit
    def run(self):
        """Load work tiles, in the order in which stages become empty.

        Stages of K become empty with S of the tile before, those of V with its PV MMA, which is issued after S of this
        tile. So the last V of a work tile comes behind Q and the first K of the next one. The numbers of pages come
        from memory too: they are read a tile ahead, and those of the next work tile's first tiles during this one.
        """
        for atom in self.atoms():
            cpasync.prefetch_descriptor(atom)
        work_tiles, tiles = cutlass.Int32(0), cutlass.Int32(0)
        owes_v, n_block_prev, pages_prev = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        pages, pages_ahead = self.first_pages(work)
        valid = work.valid
        while valid != 0:
            last, count = work.n_block_max - 1, work.n_block_max - work.n_block_min
            self.load_queries(work, work_tiles)
            self.load_k(last, pages, tiles)
            if owes_v != 0:
                self.load_v(n_block_prev, pages_prev, tiles - 1)
            self.load_v(last, pages, tiles)
            work_tiles += 1
            work_ahead = self.work_pipeline.consume(work_tiles)
            first_pages, second_pages = self.first_pages(work_ahead)
            for step in cutlass.range(1, count, unroll=1):
                pages_prev, pages = pages, pages_ahead
                pages_ahead = self.pages_ahead(work, last - step - 1)
                self.load_k(last - step, pages, tiles + step)
                if step > 1:
                    self.load_v(last - step + 1, pages_prev, tiles + step - 1)
            owes_v = cutlass.Int32(1) if count > 1 else cutlass.Int32(0)
            n_block_prev, pages_prev = work.n_block_min, pages
            tiles += count
            work, pages, pages_ahead = work_ahead, first_pages, second_pages
            valid = work.valid
        if owes_v != 0:
            self.load_v(n_block_prev, pages_prev, tiles - 1)

    @cute.jit
    def first_pages(self, work: WorkTile):
        """A lane's pages of the first two tiles of a work tile."""
        first, second = cutlass.Int32(0), cutlass.Int32(0)
        if work.valid != 0:
            first = self.pages_of(work, work.n_block_max - 1)
            second = self.pages_ahead(work, work.n_block_max - 2)
        return first, second

    @cute.jit
    def pages_ahead(self, work: WorkTile, n_block: cutlass.Int32):
        """A lane's page of a tile behind the first one processed; 0 where the work tile has no such tile."""
        page = cutlass.Int32(0)
        if n_block >= work.n_block_min:
            page = self.full_tile_pages_of(work, n_block)
        return page

    @cute.jit
    def pages_of(self, work: WorkTile, n_block: cutlass.Int32):
        """A lane's page. For keys that the request lacks, a page out of bounds: TMA fills it with zeros."""
        page = self.no_page()
        if n_block * self.tile_n + self.box_begin < work.seqlen_k:
            page = self.full_tile_pages_of(work, n_block)
        return page

    def full_tile_pages_of(self, work: WorkTile, n_block: cutlass.Int32) -> cutlass.Int32:
        """A lane's page, for a tile all of whose keys exist: of a work tile, all but the first one processed."""
        page_idx = cutlass.Uint32(n_block * self.tile_n + self.box_begin) // self.page
        return self.requests.page_table[work.kv_source, cutlass.Int32(page_idx)]

    @cute.jit
    def load_k(self, n_block: cutlass.Int32, pages: cutlass.Int32, count: cutlass.Int32):
        """The CTA's keys of a tile, part by part; `count` tiles were loaded before."""
        stage, phase = stage_of(count, self.config.stages), phase_of(count, self.config.stages) ^ 1
        boxes = self.boxes_of(n_block, pages, self.first_box, self.own_boxes)
        for part in cutlass.range_constexpr(PARTS):
            mbar_idx, chunks = stage * PARTS + part, self.parts[part]
            cute.arch.mbarrier_wait(self.barriers.k_empty + mbar_idx, phase)
            self.load_boxes(self.sK, chunks, boxes, chunks.start, stage, self.barriers.k_full + mbar_idx)

    @cute.jit
    def load_v(self, n_block: cutlass.Int32, pages: cutlass.Int32, count: cutlass.Int32):
        """The CTA's columns of V of a tile, those of one PV MMA after another."""
        stage, phase = stage_of(count, self.config.stages), phase_of(count, self.config.stages) ^ 1
        boxes = self.boxes_of(n_block, pages, 0, self.boxes)
        width = cutlass.const_expr(DV_TILE // self.chunk)
        for dv_tile in cutlass.range_constexpr(self.dv_tiles):
            mbar_idx, chunks = stage * self.dv_tiles + dv_tile, range(dv_tile * width, (dv_tile + 1) * width)
            cute.arch.mbarrier_wait(self.barriers.v_empty + mbar_idx, phase)
            first = self.cta_rank * (self.chunks_v // CTA_PAIR) + dv_tile * width
            self.load_boxes(self.sV, chunks, boxes, first, stage, self.barriers.v_full + mbar_idx)

    def boxes_of(
        self, n_block: cutlass.Int32, pages: cutlass.Int32, first_box: cutlass.Int32 | int, boxes: int
    ) -> list[tuple[Any, Any]]:
        """For each box of a tile from `first_box` on: its page, and its index among the boxes of that page."""
        return [(self.page_of(pages, first_box + i), self.box_in_page(n_block, first_box, i)) for i in range(boxes)]

    def page_of(self, pages: cutlass.Int32, box: cutlass.Int32 | int) -> cutlass.Int32:
        return pages if self.one_page else cute.arch.shuffle_sync(pages, box)

    def box_in_page(self, n_block: cutlass.Int32, first_box: cutlass.Int32 | int, i: int) -> cutlass.Int32 | int:
        if self.own_boxes * self.box % self.page == 0:
            # The CTA's keys begin with a page.
            return i * self.box % self.page // self.box
        return stage_of(n_block * self.boxes + first_box + i, self.page // self.box)

    def load_boxes(
        self,
        target: cute.Tensor,
        chunks: range,
        boxes: list[tuple[Any, Any]],
        first_chunk: cutlass.Int32 | int,
        stage: cutlass.Int32,
        mbar_full: cute.Pointer,
    ) -> None:
        """Load `chunks` of the target in all of its boxes, from the chunks of a row of K from `first_chunk` on."""
        gK = cute.group_modes(cute.flat_divide(self.mK[None, None, 0, None], (self.box, self.chunk)), 0, 2)
        tKsK, tKgK = cpasync.tma_partition(self.tma_atom_k, 0, cute.make_layout(1), target, gK)
        tKsK = tKsK[None, None, None, stage]
        itemsize = target.element_type.width // 8
        tma_boxes = [
            TmaBox(
                itemsize * cute.crd2idx((0, i, c), tKsK.layout),
                tKgK[None, box_in_page, first_chunk + c - chunks.start, page].iterator,
            )
            for i, (page, box_in_page) in enumerate(boxes)
            for c in chunks
        ]
        tx_bytes = CTA_PAIR * len(tma_boxes) * self.box * self.chunk * itemsize
        tma_load_boxes(self.tma_atom_k, tma_boxes, tKsK.iterator, mbar_full, tx_bytes, self.cta_rank == 0)
