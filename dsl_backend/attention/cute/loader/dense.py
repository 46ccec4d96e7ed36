# SPDX-License-Identifier: Apache-2.0
"""The load role: one warp issues the tensor copies of queries, keys and values."""

import math

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.cute.scheduler.work_tile import head_group_of, v_split_of
from dsl_backend.primitives.ring import phase_of, stage_of

UNROLLED = 4  # chunks of a box: more are asked for in a loop by a loader that is rolled
SWIZZLED_ROWS = 8  # that a swizzle repeats after


def box_rows(page_size: int, tile_n: int) -> int:
    """Keys of one tensor copy: as many of a tile as lie in one page."""
    return math.gcd(page_size, tile_n) if page_size else tile_n


def tokens_of_box(pack_gqa: int, tokens: int, most_boxes: int) -> int:
    """Tokens of a box of queries: a tile's, or a part of them that begins where the swizzle does."""
    parts = (
        n for n in range(-(-tokens // most_boxes), tokens) if tokens % n == 0 and n * pack_gqa % SWIZZLED_ROWS == 0
    )
    return next(parts, tokens)


def query_box(kernel, tokens: int) -> cute.Layout:
    """[packed heads, tokens, chunk] of some tokens of a query tile in shared memory, swizzle apart."""
    shape = (kernel.key.pack_gqa, tokens, kernel.chunk)
    return cute.make_layout(shape, stride=(kernel.chunk, kernel.key.pack_gqa * kernel.chunk, 1))


class LoadWarp:
    """Fills the rings: for each item key tiles from the last to the first, values one behind, and the query tile.

    Attributes:
        rolled: boxes of a tile, and many chunks of one box, are asked for by a loop that stays one. Unrolled, ptxas
            keeps an address for each in registers (CUDA 13.0), for which some loaders have no room.
    """

    rolled = False

    def __init__(self, kernel, work_pipeline, barriers, loads, sQ, sK, sV, requests):
        self.config, self.key = kernel.config, kernel.key
        self.page, self.box, self.tile_n = kernel.key.page_size, kernel.box, kernel.tile_n
        self.boxes = self.own_boxes = self.tile_n // self.box
        self.first_box, self.multicast = 0, {}
        self.group = kernel.key.heads_q // kernel.key.heads_kv // kernel.key.pack_gqa
        self.work_pipeline, self.barriers, self.requests = work_pipeline, barriers, requests
        self.tma_atom_q, self.tma_atom_k, self.tma_atom_v = loads.tma_atom_q, loads.tma_atom_k, loads.tma_atom_v
        self.mQ, self.mK, self.mV = loads.mQ, loads.mK, loads.mV
        self.q_chunks, self.k_chunks = kernel.dims // kernel.chunk, kernel.dims // kernel.copied
        self.v_chunks = kernel.dims_v // kernel.copied_v
        self.chunk, self.copied, self.copied_v = kernel.chunk, kernel.copied, kernel.copied_v
        self.stages = self.config.dequant_stages if self.key.kv.fp8 else self.config.stages
        self.take_boxes(kernel)
        size = self.key.kv.itemsize
        self.k_bytes, self.v_bytes = self.tile_n * kernel.dims * size, self.tile_n * kernel.dims_v * size
        if self.key.pack_gqa == 1:
            self.sQ = self.in_boxes(sQ, self.box_tokens, kernel.chunk)
        else:
            # Rows of a chunk lie one after another: [head and token, box, chunk, stage].
            one_tile = (kernel.tile_m * kernel.chunk, kernel.tile_m * max(kernel.dims, kernel.dims_v))
            box = query_box(kernel, self.box_tokens)
            shape = (box.shape, self.q_boxes, self.q_chunks, self.config.query_stages)
            layout = cute.make_layout(shape, stride=(box.stride, self.rows_loaded * kernel.chunk, *one_tile))
            self.sQ = cute.make_tensor(sQ.iterator, layout)
        self.sK = self.in_boxes(sK, self.box, kernel.copied)
        self.sV = self.in_boxes(sV, self.box, kernel.copied_v)

    def in_boxes(self, tensor: cute.Tensor, rows: int, width: int) -> cute.Tensor:
        """[box, rows' place, columns' place, stage]."""
        return cute.group_modes(cute.flat_divide(tensor, (rows, width)), 0, 2)

    @cute.jit
    def run(self):
        for atom in (self.tma_atom_q, self.tma_atom_k, self.tma_atom_v):
            cpasync.prefetch_descriptor(atom)
        items, keys, values = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            last = work.n_block_max - 1
            pages = self.pages_of(work, last)
            self.load_keys(work, last, pages, keys)
            # Behind keys, which come from memory, and whose place is free while the item before is multiplied.
            self.load_queries(work, items)
            keys += 1
            for step in cutlass.range(work.n_block_max - work.n_block_min - 1, unroll=1):
                tile = last - 1 - step
                before = pages
                pages = self.pages_of(work, tile)
                self.load_keys(work, tile, pages, keys)
                self.load_values(work, tile + 1, before, values)
                keys += 1
                values += 1
            self.load_values(work, work.n_block_min, pages, values)
            values += 1
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    @cute.jit
    def pages_of(self, work, tile):
        """Lane b: the page of box b of the tile; past the keys, one that is not there, whose copy fills with zeros."""
        page = cutlass.Int32(0)
        if cutlass.const_expr(self.page > 0):
            page = cutlass.Int32(cute.size(self.mK, mode=[3]))
            token = tile * self.tile_n + cute.arch.lane_idx() * self.box
            if token < work.seqlen_k and cute.arch.lane_idx() < self.boxes:
                page = self.requests.page_table[work.kv_source, token // self.page]
        return page

    @cute.jit
    def expect(self, full, size):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)

    @cute.jit
    def load_queries(self, work, count):
        stage = stage_of(count, self.config.query_stages)
        cute.arch.mbarrier_wait(self.barriers.q_empty + stage, phase_of(count, self.config.query_stages) ^ self.q_phase)
        full = self.barriers.q_full + stage
        boxes = self.expect_queries(work, full)
        packed = head_group_of(self.key, work.head_block)
        if cutlass.const_expr(self.key.pack_gqa == 1):
            rows = cute.domain_offset((work.q_offset, 0), self.mQ[None, None, packed])
            gQ = cute.group_modes(cute.local_tile(rows, (self.box_tokens, self.chunk), (None, None)), 0, 2)
        else:
            rows = cute.domain_offset((0, work.q_offset, 0), self.mQ[None, None, None, packed])
            tile = (self.key.pack_gqa, self.box_tokens, self.chunk)
            gQ = cute.group_modes(cute.local_tile(rows, tile, (0, None, None)), 0, 3)
        to, given = cpasync.tma_partition(self.tma_atom_q, 0, cute.make_layout(1), self.sQ, gQ)
        if cutlass.const_expr(self.q_boxes == 1):
            self.copy_chunks(
                self.tma_atom_q, given[None, 0, None], to[None, 0, None, None], stage, full, range(self.q_chunks)
            )
        else:
            for box in cutlass.range(boxes, unroll=1):
                self.copy_chunks(
                    self.tma_atom_q,
                    given[None, box, None],
                    to[None, box, None, None],
                    stage,
                    full,
                    range(self.q_chunks),
                )

    def take_boxes(self, kernel):
        """What the boxes of queries are, by the kernel; q_bytes: of a box's chunks."""
        self.box_tokens, self.rows_loaded = kernel.box_tokens, kernel.rows_loaded
        self.q_boxes = kernel.tokens_per_tile // kernel.box_tokens
        self.q_phase = 0 if kernel.math_clears else 1
        self.q_bytes = self.rows_loaded * kernel.dims * 2

    def expect_queries(self, work, full):
        """Of an item; how many boxes there are to copy. One box is a constant, as some loaders' copies want it."""
        boxes = cute.ceil_div(work.num_rows, self.rows_loaded) if self.q_boxes > 1 else 1
        self.expect(full, boxes * self.q_bytes)
        return boxes

    def copy(self, atom, source, target, stage, full, chunks):
        """The chunks (a range) of one box of rows; source [box, chunk], target [box, 1, chunk, stage]."""
        one = cute.make_layout(1)
        to, given = cpasync.tma_partition(atom, 0, one, target, source)
        self.copy_chunks(atom, given, to[None, 0, None, None], stage, full, chunks)

    @cute.jit
    def copy_chunks(self, atom, given, to, stage, full, chunks: cutlass.Constexpr):
        if cutlass.const_expr(self.rolled and len(chunks) > UNROLLED):
            for c in cutlass.range(chunks.start, chunks.stop, unroll=1):
                cute.copy(atom, given[None, c], to[None, c, stage], tma_bar_ptr=full)
        else:
            for c in cutlass.range_constexpr(chunks.start, chunks.stop):
                cute.copy(atom, given[None, c], to[None, c, stage], tma_bar_ptr=full)

    @cute.jit
    def load_keys(self, work, tile, pages, count):
        stage = stage_of(count, self.stages)
        cute.arch.mbarrier_wait(self.barriers.k_empty + stage, phase_of(count, self.stages) ^ 1)
        self.fill_keys(work, tile, pages, stage)

    @cute.jit
    def fill_keys(self, work, tile, pages, stage):
        """A stage that is empty."""
        full = self.barriers.k_full + stage
        self.expect(full, self.k_bytes)
        chunks = range(self.k_chunks)
        self.load_tile(self.tma_atom_k, self.mK, self.sK, self.copied, chunks, work, tile, pages, stage, full)

    @cute.jit
    def load_values(self, work, tile, pages, count):
        stage = stage_of(count, self.stages)
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase_of(count, self.stages) ^ 1)
        self.fill_values(work, tile, pages, stage)

    @cute.jit
    def fill_values(self, work, tile, pages, stage):
        full = self.barriers.v_full + stage
        self.expect(full, self.v_bytes)
        mV, chunks = self.values_of(work), range(self.v_chunks)
        self.load_tile(self.tma_atom_v, mV, self.sV, self.copied_v, chunks, work, tile, pages, stage, full)

    def values_of(self, work):
        """Values as keys are: [token, column, head, page], of the item's slice."""
        if self.key.v_splits == 1:
            return self.mV
        every = (None,) * (4 if self.page else 3)
        return self.mV[(*every, v_split_of(self.key, work.head_block))]

    def load_tile(self, atom, source, target, width, chunks, work, tile, pages, stage, full):
        """Every box of a tile of keys or values, and of it the chunks (a range)."""
        one = cute.make_layout(1)
        head = head_group_of(self.key, work.head_block) // self.group
        if self.page:
            # [box, place in a page, chunk, page]
            cut = cute.group_modes(cute.flat_divide(source[None, None, head, None], (self.box, width)), 0, 2)
            to, given = cpasync.tma_partition(atom, 0, one, target, cut)
            self.load_boxes(atom, given, to, chunks, tile, pages, stage, full)
        else:
            rows = cute.domain_offset((work.kv_source + tile * self.tile_n, 0), source[None, None, head])
            cut = cute.group_modes(cute.local_tile(rows, (self.box, width), (0, None)), 0, 2)
            self.copy(atom, cut, target, stage, full, chunks)

    @cute.jit
    def load_boxes(self, atom, given, to, chunks: cutlass.Constexpr, tile, pages, stage, full):
        if cutlass.const_expr(self.rolled):
            for i in cutlass.range(self.own_boxes, unroll=1):
                self.load_box(atom, given, to, chunks, tile, pages, stage, full, self.first_box + i)
        else:
            for i in cutlass.range_constexpr(self.own_boxes):
                self.load_box(atom, given, to, chunks, tile, pages, stage, full, self.first_box + i)

    def load_box(self, atom, given, to, chunks, tile, pages, stage, full, b):
        page = self.page_of(pages, b)
        place = ((tile * self.tile_n + b * self.box) % self.page) // self.box
        for c in chunks:
            source = given[None, place, c, page]
            cute.copy(atom, source, to[None, b, c, stage], tma_bar_ptr=full, **self.multicast)

    def page_of(self, pages, b):
        """Of box b, from what `pages_of` gave each lane."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(pages, b))


class RolledLoadWarp(LoadWarp):
    rolled = True


class PerTileLoads:
    """For loaders that load an item's tiles by one method."""

    @cute.jit
    def run(self):
        for atom in self.atoms():
            cpasync.prefetch_descriptor(atom)
        items, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(items)
        valid = work.valid
        while valid != 0:
            self.load_queries(work, items)
            self.load_item(work, tiles)
            tiles += work.n_block_max - work.n_block_min
            items += 1
            work = self.work_pipeline.consume(items)
            valid = work.valid

    def atoms(self):
        """Of the copies."""
        return self.tma_atom_q, self.tma_atom_k, self.tma_atom_v

    def load_item(self, work, tiles):
        """Keys and values of an item; tiles: those of the items before it."""
        raise NotImplementedError
