# SPDX-License-Identifier: Apache-2.0
"""The load role of a block of a pair."""

from typing import NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.cute.scheduler.work_tile import head_group_of
from dsl_backend.attention.cute.sm100.dense_configs import PAIR
from dsl_backend.attention.cute.sm100.kv_stages import OwnRingsLoadWarp


class Part(NamedTuple):
    """What a block loads of a tile of keys or values.

    Attributes:
        target: [box, rows' place, columns' place, stage].
        box: rows and columns of one copy.
        row, rows, chunk, chunks: the first one, and how many.
    """

    atom: cute.CopyAtom
    target: cute.Tensor
    box: tuple[int, int]
    row: cutlass.Int32 | int
    rows: int
    chunk: cutlass.Int32 | int
    chunks: int


class TwoCtaLoadWarp(OwnRingsLoadWarp):
    """Fills the block's rings: half of a tile's keys, and of all its values half of the columns.

    Both blocks' bytes are counted by the first one's barriers.
    """

    def __init__(self, kernel, work_pipeline, barriers, loads, sQ, places, requests, rank):
        (sK,), sV = places.keys, places.values
        super().__init__(kernel, work_pipeline, barriers, loads, sQ, sK, sV, requests)
        self.rank = rank
        self.q_bytes *= PAIR
        self.in_one_page = self.page > 0 and self.page % self.tile_n == 0
        rows, chunks = self.tile_n // PAIR, self.v_chunks // PAIR
        self.keys = Part(loads.tma_atom_k, self.sK, (self.box, self.copied), rank * rows, rows, 0, self.k_chunks)
        box = (kernel.value_rows, self.copied_v)
        self.values = Part(loads.tma_atom_v, self.in_boxes(sV, *box), box, 0, self.tile_n, rank * chunks, chunks)

    @cute.jit
    def expect(self, full, size: cutlass.Constexpr[int]):
        cute.arch.inline_ptx(
            "{ .reg .pred leader; elect.sync _|leader, 0xffffffff; setp.eq.and.s32 leader, {$r1}, 0, leader; "
            f"@leader mbarrier.arrive.expect_tx.shared.b64 _, [{{$r0}}], {size}; }}",
            read_only_args=[full.toint(), cutlass.Int32(self.rank)],
        )

    def place_of(self, tile):
        return tile // (self.page // self.tile_n) if self.in_one_page else super().place_of(tile)

    def page_of(self, pages, b):
        return pages if self.in_one_page else super().page_of(pages, b)

    @cute.jit
    def fill_keys(self, work, tile, pages, stage):
        full = self.barriers.k_full + stage
        self.expect(full, self.k_bytes)
        self.load_part(self.keys, self.mK, work, tile, pages, stage, full)

    @cute.jit
    def fill_values(self, work, tile, pages, stage):
        full = self.barriers.v_full + stage
        self.expect(full, self.v_bytes)
        self.load_part(self.values, self.values_of(work), work, tile, pages, stage, full)

    @cute.jit
    def load_part(self, part: cutlass.Constexpr, source, work, tile, pages, stage, full):
        atom, target, box, row, rows, chunk, chunks = part
        one, head = cute.make_layout(1), head_group_of(self.key, work.head_block) // self.group
        first = tile * self.tile_n + row
        if cutlass.const_expr(self.page > 0):
            # [box, place in a page, chunk, page]
            cut = cute.group_modes(cute.flat_divide(source[None, None, head, None], box), 0, 2)
            to, given = cpasync.tma_partition(atom, 0, one, target, cut)
            for i in cutlass.range(rows // box[0], unroll=1):
                page = self.page_of(pages, (row + i * box[0]) // self.box)
                place = (first + i * box[0]) % self.page // box[0]
                for c in cutlass.range_constexpr(chunks):
                    cute.copy(atom, given[None, place, chunk + c, page], to[None, i, c, stage], tma_bar_ptr=full)
        else:
            there = cute.domain_offset((work.kv_source + first, 0), source[None, None, head])
            cut = cute.group_modes(cute.local_tile(there, box, (0, None)), 0, 2)
            to, given = cpasync.tma_partition(atom, 0, one, target, cut)
            for c in cutlass.range_constexpr(chunks):
                cute.copy(atom, given[None, chunk + c], to[None, 0, c, stage], tma_bar_ptr=full)
