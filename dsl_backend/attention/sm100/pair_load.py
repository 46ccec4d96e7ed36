# SPDX-License-Identifier: Apache-2.0
"""The load role of a block of a pair."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.parts.work import packed_of
from dsl_backend.attention.sm100.configs import PAIR
from dsl_backend.attention.sm100.places import OwnRingsLoader


class PairLoader(OwnRingsLoader):
    """Fills the block's rings: half of a tile's keys, and of all its values half of the columns.

    Both blocks' bytes are counted by the first one's barriers.
    """

    def __init__(self, kernel, mailbox, barriers, q_load, mQ, sQ, k_load, mK, v_load, mV, places, requests, rank):
        (sK,), sV = places.keys, places.values
        super().__init__(kernel, mailbox, barriers, q_load, mQ, sQ, k_load, mK, sK, v_load, mV, sV, requests)
        self.rank, self.value_rows = rank, kernel.value_rows
        self.sV = self.in_boxes(sV, self.value_rows, self.copied_v)
        self.q_bytes *= PAIR
        self.in_one_page = self.page > 0 and self.page % self.tile_n == 0

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
        rows = cutlass.const_expr(self.tile_n // PAIR)
        self.load_part(
            self.k_load, self.mK, self.sK, (self.box, self.copied), self.rank * rows, rows, 0, self.k_chunks,
            work, tile, pages, stage, full,
        )  # fmt: skip

    @cute.jit
    def fill_values(self, work, tile, pages, stage):
        full = self.barriers.v_full + stage
        self.expect(full, self.v_bytes)
        chunks = cutlass.const_expr(self.v_chunks // PAIR)
        self.load_part(
            self.v_load, self.values_of(work), self.sV, (self.value_rows, self.copied_v), 0, self.tile_n,
            self.rank * chunks, chunks, work, tile, pages, stage, full,
        )  # fmt: skip

    @cute.jit
    def load_part(
        self,
        atom,
        source,
        target,
        box: cutlass.Constexpr,
        row,
        rows: cutlass.Constexpr[int],
        chunk,
        chunks: cutlass.Constexpr[int],
        work,
        tile,
        pages,
        stage,
        full,
    ):
        """Of a tile of keys or values: so many rows from one on, and of them so many chunks from one on."""
        one, head = cute.make_layout(1), packed_of(self.key, work.unit) // self.group
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
            there = cute.domain_offset((work.source + first, 0), source[None, None, head])
            cut = cute.group_modes(cute.local_tile(there, box, (0, None)), 0, 2)
            to, given = cpasync.tma_partition(atom, 0, one, target, cut)
            for c in cutlass.range_constexpr(chunks):
                cute.copy(atom, given[None, chunk + c], to[None, 0, c, stage], tma_bar_ptr=full)
