# SPDX-License-Identifier: Apache-2.0
"""The TMA producer: one warp issues the TMA loads of Q, K and V."""

import math
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from dsl_backend.attention.cute.args import DenseLoads
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import WorkTile, WorkTilePipeline, head_group_of, v_split_of
from dsl_backend.primitives.ring import phase_of, stage_of

MAX_UNROLLED = 4  # chunks of a box; a `rolled` load warp loads more in a loop
SWIZZLE_ROWS = 8  # period of a swizzle
# Key tiles of a work tile that are not loaded yet when the load warp lets the scheduler claim the next one, with
# `late_claims`. The scheduler may have to step over all row tiles that other CTAs have claimed.
LATE_KEY_TILES = 8


def box_rows(page_size: int, tile_n: int) -> int:
    """Keys of one TMA box: as many of a tile as lie in one page."""
    return math.gcd(page_size, tile_n) if page_size else tile_n


def tokens_of_box(pack_gqa: int, tokens: int, most_boxes: int) -> int:
    """Tokens of a box of Q: those of a tile, or a part of them at whose end the swizzle begins anew."""
    parts = (n for n in range(-(-tokens // most_boxes), tokens) if tokens % n == 0 and n * pack_gqa % SWIZZLE_ROWS == 0)
    return next(parts, tokens)


def query_box(pack_gqa: int, tokens: int, width: int) -> cute.Layout:
    """[packed head, token, column of a chunk] of some tokens of a tile of Q in shared memory, without the swizzle."""
    return cute.make_layout((pack_gqa, tokens, width), stride=(width, pack_gqa * width, 1))


class LoadWarp:
    """Loads Q of each work tile, K from the last key tile to the first, and V one key tile later.

    Args:
        kernel: the `TiledKernel`.
        barriers: a kernel's, as `tma_barriers` gives them.
        sQ: [row, column, stage]; sK, sV: [key, column, stage], where TMA writes.

    Attributes:
        rolled: the boxes of a tile, and many chunks of one box, are loaded in a loop that is not unrolled. Unrolled,
            ptxas keeps an address for each in registers (CUDA 13.0), for which some load warps have no room.
        late_claims: the scheduler claims the next work tile when this one is nearly loaded, not when it is begun.
        copied, copied_v: columns of one TMA box of K, and of V, as they are stored.
        own_boxes, first_box: of a tile, the boxes that this CTA loads.
        k_step, v_step: as of `DenseLoads`, in `page_boxes`.
    """

    rolled = False
    k_step: Any = None
    v_step: Any = None

    def __init__(
        self,
        kernel: Any,
        work_pipeline: WorkTilePipeline,
        barriers: Any,
        loads: DenseLoads,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        requests: Requests,
    ) -> None:
        self.config, self.key = kernel.config, kernel.key
        self.page, self.box, self.tile_n = kernel.key.page_size, kernel.box, kernel.tile_n
        self.boxes = self.own_boxes = self.tile_n // self.box
        self.first_box = 0
        self.late_claims = kernel.key.dynamic_scheduler and kernel.late_claims
        self.copy_options: dict[str, Any] = {}
        self.group = kernel.key.heads_q // kernel.key.heads_kv // kernel.key.pack_gqa
        self.work_pipeline, self.barriers, self.requests = work_pipeline, barriers, requests
        self.tma_atom_k, self.tma_atom_v, self.mK, self.mV = loads.tma_atom_k, loads.tma_atom_v, loads.mK, loads.mV
        self.k_chunks, self.v_chunks = kernel.dims // kernel.copied, kernel.dims_v // kernel.copied_v
        self.copied, self.copied_v = kernel.stored(kernel.copied), kernel.stored(kernel.copied_v)
        self.stages = self.config.dequant_stages if self.key.kv.quantized else self.config.stages
        kv = self.key.kv
        self.k_bytes, self.v_bytes = (self.tile_n * kv.row_bytes(dims) for dims in (kernel.dims, kernel.dims_v))
        if kernel.page_boxes:
            self.k_step, self.v_step = loads.k_step, loads.v_step
        self.set_queries(kernel, loads, sQ)
        self.sK = self.in_boxes(sK, self.box, self.copied)
        self.sV = self.in_boxes(sV, self.box, self.copied_v)

    def set_queries(self, kernel: Any, loads: DenseLoads, sQ: cute.Tensor) -> None:
        """Set what Q is loaded from, and where to."""
        self.tma_atom_q, self.mQ, self.chunk = loads.tma_atom_q, loads.mQ, kernel.copied_q
        self.q_chunks = kernel.dims // kernel.copied_q
        self.set_query_boxes(kernel)
        if self.key.pack_gqa == 1:
            self.sQ = self.in_boxes(sQ, self.box_tokens, kernel.copied_q)
        else:
            # Rows of a chunk lie one after another: [head and token, box, chunk, stage].
            box = query_box(self.key.pack_gqa, self.box_tokens, self.chunk)
            shape = (box.shape, self.q_boxes, self.q_chunks, self.config.query_stages)
            strides = (self.rows_loaded * self.chunk, kernel.tile_m * self.chunk, kernel.q_stage_elements)
            layout = cute.make_layout(shape, stride=(box.stride, *strides))
            self.sQ = cute.make_tensor(sQ.iterator, layout)

    def in_boxes(self, tensor: cute.Tensor, rows: int, width: int) -> cute.Tensor:
        """View a tensor as [box, row of boxes, column of boxes, stage]."""
        return cute.group_modes(cute.flat_divide(tensor, (rows, width)), 0, 2)

    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        """The TMA atoms, whose descriptors are prefetched."""
        return self.tma_atom_q, self.tma_atom_k, self.tma_atom_v

    @cute.jit
    def run(self):
        for atom in self.atoms():
            cpasync.prefetch_descriptor(atom)
        work_tiles, k_tiles, v_tiles = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        work = self.next_work(work_tiles)
        valid = work.valid
        while valid != 0:
            last = work.n_block_max - 1
            self.let_claim(work_tiles, work.n_block_max - work.n_block_min <= LATE_KEY_TILES)
            pages = self.pages_of(work, last)
            self.load_keys(work, last, pages, k_tiles)
            # After K, which comes from memory, and whose stage is empty while the work tile before is computed.
            self.load_queries(work, work_tiles)
            k_tiles += 1
            for step in cutlass.range(work.n_block_max - work.n_block_min - 1, unroll=1):
                n_block = last - 1 - step
                self.let_claim(work_tiles, n_block + 1 - work.n_block_min == LATE_KEY_TILES)
                pages_prev = pages
                pages = self.pages_of(work, n_block)
                self.load_keys(work, n_block, pages, k_tiles)
                self.load_values(work, n_block + 1, pages_prev, v_tiles)
                k_tiles += 1
                v_tiles += 1
            self.load_values(work, work.n_block_min, pages, v_tiles)
            v_tiles += 1
            work_tiles += 1
            work = self.next_work(work_tiles)
            valid = work.valid
        if cutlass.const_expr(self.late_claims):
            self.work_pipeline.release(work_tiles)

    def next_work(self, count: cutlass.Int32) -> WorkTile:
        """The work tile after `count` others."""
        return self.work_pipeline.read(count) if self.late_claims else self.work_pipeline.consume(count)

    @cute.jit
    def let_claim(self, count: cutlass.Int32, now: cutlass.Boolean):
        """With `late_claims`, let the scheduler go on from the work tile after `count` others: once for each."""
        if cutlass.const_expr(self.late_claims):
            if now:
                self.work_pipeline.release(count)

    @cute.jit
    def pages_of(self, work: WorkTile, n_block: cutlass.Int32):
        """In lane b, the page of box b of a key tile. For keys that the request lacks, a page out of bounds: TMA fills
        it with zeros.
        """
        page = cutlass.Int32(0)
        if cutlass.const_expr(self.page > 0):
            page = self.no_page()
            token = n_block * self.tile_n + cute.arch.lane_idx() * self.box
            if token < work.seqlen_k and cute.arch.lane_idx() < self.boxes:
                page = self.requests.page_table[work.kv_source, token // self.page]
        return page

    def no_page(self) -> cutlass.Int32:
        """A page out of bounds: in `page_boxes`, whose tensors have no dimension of pages, one before the first."""
        return cutlass.Int32(cute.size(self.mK, mode=[3]) if self.k_step is None else -1)

    @cute.jit
    def expect(self, mbar_full: cute.Pointer, tx_bytes: cutlass.Int32 | int):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(mbar_full, tx_bytes)

    @cute.jit
    def load_queries(self, work: WorkTile, count: cutlass.Int32):
        """Load the rows of Q; `count` work tiles were loaded before."""
        stage = stage_of(count, self.config.query_stages)
        cute.arch.mbarrier_wait(self.barriers.q_empty + stage, phase_of(count, self.config.query_stages) ^ self.q_phase)
        full = self.barriers.q_full + stage
        boxes = self.expect_queries(work, full)
        head_group = head_group_of(self.key, work.head_block)
        if cutlass.const_expr(self.key.pack_gqa == 1):
            rows = cute.domain_offset((work.q_offset, 0), self.mQ[None, None, head_group])
            gQ = cute.group_modes(cute.local_tile(rows, (self.box_tokens, self.chunk), (None, None)), 0, 2)
        else:
            rows = cute.domain_offset((0, work.q_offset, 0), self.mQ[None, None, None, head_group])
            tile = (self.key.pack_gqa, self.box_tokens, self.chunk)
            gQ = cute.group_modes(cute.local_tile(rows, tile, (0, None, None)), 0, 3)
        tQsQ, tQgQ = cpasync.tma_partition(self.tma_atom_q, 0, cute.make_layout(1), self.sQ, gQ)
        if cutlass.const_expr(self.q_boxes == 1):
            self.copy_chunks(
                self.tma_atom_q, tQgQ[None, 0, None], tQsQ[None, 0, None, None], stage, full, range(self.q_chunks)
            )
        else:
            for box in cutlass.range(boxes, unroll=1):
                self.copy_chunks(
                    self.tma_atom_q,
                    tQgQ[None, box, None],
                    tQsQ[None, box, None, None],
                    stage,
                    full,
                    range(self.q_chunks),
                )

    def set_query_boxes(self, kernel: Any) -> None:
        """Set what the boxes of Q are; q_bytes: of all chunks of one box."""
        self.box_tokens, self.rows_loaded = kernel.box_tokens, kernel.rows_loaded
        self.q_boxes = kernel.tokens_per_tile // kernel.box_tokens
        self.q_phase = 0 if kernel.math_clears else 1
        self.q_bytes = self.rows_loaded * kernel.dims * kernel.q_itemsize

    def expect_queries(self, work: WorkTile, full: cute.Pointer) -> cutlass.Int32 | int:
        """Expect the bytes of Q; return the boxes to load. Where a tile has one box, it is a constant."""
        boxes = cute.ceil_div(work.num_rows, self.rows_loaded) if self.q_boxes > 1 else 1
        self.expect(full, boxes * self.q_bytes)
        return boxes

    def copy(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        target: cute.Tensor,
        stage: cutlass.Int32,
        full: cute.Pointer,
        chunks: range,
    ) -> None:
        """Load the chunks of one box of rows; source [box, chunk], target [box, 1, chunk, stage]."""
        tXsX, tXgX = cpasync.tma_partition(atom, 0, cute.make_layout(1), target, source)
        self.copy_chunks(atom, tXgX, tXsX[None, 0, None, None], stage, full, chunks)

    @cute.jit
    def copy_chunks(
        self,
        atom: cute.CopyAtom,
        tXgX: cute.Tensor,
        tXsX: cute.Tensor,
        stage: cutlass.Int32,
        full: cute.Pointer,
        chunks: cutlass.Constexpr[range],
    ):
        """Issue a TMA load for each chunk of a box; tXgX [box, chunk], tXsX [box, chunk, stage]."""
        if cutlass.const_expr(self.rolled and len(chunks) > MAX_UNROLLED):
            for c in cutlass.range(chunks.start, chunks.stop, unroll=1):
                cute.copy(atom, tXgX[None, c], tXsX[None, c, stage], tma_bar_ptr=full)
        else:
            for c in cutlass.range_constexpr(chunks.start, chunks.stop):
                cute.copy(atom, tXgX[None, c], tXsX[None, c, stage], tma_bar_ptr=full)

    @cute.jit
    def load_keys(self, work: WorkTile, n_block: cutlass.Int32, pages: cutlass.Int32, count: cutlass.Int32):
        """Load K of a key tile once its stage is empty; `count` key tiles were loaded before."""
        stage = stage_of(count, self.stages)
        cute.arch.mbarrier_wait(self.barriers.k_empty + stage, phase_of(count, self.stages) ^ 1)
        self.fill_keys(work, n_block, pages, stage)

    @cute.jit
    def fill_keys(self, work: WorkTile, n_block: cutlass.Int32, pages: cutlass.Int32, stage: cutlass.Int32):
        """Load K of a key tile into a stage that is empty."""
        full = self.barriers.k_full + stage
        self.expect(full, self.k_bytes)
        chunks = range(self.k_chunks)
        self.load_tile(
            self.tma_atom_k, self.mK, self.sK, self.copied, chunks, work, n_block, pages, stage, full, step=self.k_step
        )

    @cute.jit
    def load_values(self, work: WorkTile, n_block: cutlass.Int32, pages: cutlass.Int32, count: cutlass.Int32):
        """Load V of a key tile once its stage is empty; `count` key tiles were loaded before."""
        stage = stage_of(count, self.stages)
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase_of(count, self.stages) ^ 1)
        self.fill_values(work, n_block, pages, stage)

    @cute.jit
    def fill_values(self, work: WorkTile, n_block: cutlass.Int32, pages: cutlass.Int32, stage: cutlass.Int32):
        """Load V of a key tile into a stage that is empty."""
        full = self.barriers.v_full + stage
        self.expect(full, self.v_bytes)
        mV, chunks = self.values_of(work), range(self.v_chunks)
        self.load_tile(
            self.tma_atom_v, mV, self.sV, self.copied_v, chunks, work, n_block, pages, stage, full, step=self.v_step
        )

    def values_of(self, work: WorkTile) -> cute.Tensor:
        """V [token, column, head, page], the columns of the work tile's split of head_dim_v."""
        if self.key.v_splits == 1:
            return self.mV
        all_modes = (None,) * (4 if self.page else 3)
        return self.mV[(*all_modes, v_split_of(self.key, work.head_block))]

    def load_tile(
        self,
        atom: cute.CopyAtom,
        source: cute.Tensor,
        target: cute.Tensor,
        width: int,
        chunks: range,
        work: WorkTile,
        tile: cutlass.Int32,
        pages: cutlass.Int32,
        stage: cutlass.Int32,
        full: cute.Pointer,
        rows: int | None = None,
        step: Any = None,
    ) -> None:
        """Load the chunks of all boxes of a tile of K or V.

        Args:
            source: [token, column, head, page], or packed [token, column, head]; target: [box, row, column, stage].
            width: columns of a chunk.
            tile: the key tile. pages: as `pages_of` gives them.
            rows: of a box; by default a row is a key.
            step: `k_step` or `v_step`; then `source` is [token, column, step].
        """
        rows = rows or self.box
        head = head_group_of(self.key, work.head_block) // self.group
        if step is not None:
            # [box, box of a page, 1, step]
            gX = cute.group_modes(cute.flat_divide(source, (rows, width)), 0, 2)
            tXsX, tXgX = cpasync.tma_partition(atom, 0, cute.make_layout(1), target, gX)
            self.load_boxes(atom, tXgX, tXsX, chunks, tile, pages * step + head, stage, full)
        elif self.page:
            # [box, box of a page, chunk, page]
            gX = cute.group_modes(cute.flat_divide(source[None, None, head, None], (rows, width)), 0, 2)
            tXsX, tXgX = cpasync.tma_partition(atom, 0, cute.make_layout(1), target, gX)
            self.load_boxes(atom, tXgX, tXsX, chunks, tile, pages, stage, full)
        else:
            keys = cute.domain_offset((work.kv_source + tile * self.tile_n, 0), source[None, None, head])
            gX = cute.group_modes(cute.local_tile(keys, (rows, width), (0, None)), 0, 2)
            self.copy(atom, gX, target, stage, full, chunks)

    @cute.jit
    def load_boxes(self, atom, tXgX, tXsX, chunks: cutlass.Constexpr, tile, pages, stage, full):
        """Load the boxes of a tile, of which each lies in one page."""
        if cutlass.const_expr(self.rolled):
            for i in cutlass.range(self.own_boxes, unroll=1):
                self.load_box(atom, tXgX, tXsX, chunks, tile, pages, stage, full, self.first_box + i)
        else:
            for i in cutlass.range_constexpr(self.own_boxes):
                self.load_box(atom, tXgX, tXsX, chunks, tile, pages, stage, full, self.first_box + i)

    def load_box(self, atom, tXgX, tXsX, chunks, tile, pages, stage, full, box):
        page = self.page_of(pages, box)
        box_in_page = ((tile * self.tile_n + box * self.box) % self.page) // self.box
        for c in chunks:
            source = tXgX[None, box_in_page, c, page]
            cute.copy(atom, source, tXsX[None, box, c, stage], tma_bar_ptr=full, **self.copy_options)

    def page_of(self, pages: cutlass.Int32, box: cutlass.Int32 | int) -> cutlass.Int32:
        """The page of a box, from what `pages_of` gave each lane."""
        return cute.arch.make_warp_uniform(cute.arch.shuffle_sync(pages, box))


class KeyLoads:
    """What differs in load warps of K and V alone, of `DenseKeyLoads`: other warps load Q. Keys are not dequantized."""

    def set_queries(self, kernel: Any, loads: Any, sQ: cute.Tensor) -> None:
        self.stages = self.config.stages

    def load_queries(self, work: WorkTile, count: cutlass.Int32) -> None:
        """Nothing: Q is not copied by TMA."""

    def atoms(self) -> tuple[cute.CopyAtom, ...]:
        return self.tma_atom_k, self.tma_atom_v


class KeyLoadWarp(KeyLoads, LoadWarp):
    """Loads K from the last key tile to the first, and V one key tile later."""


class RolledLoadWarp(LoadWarp):
    rolled = True


class PerTileLoads:
    """The loop of load warps that load the key tiles of a work tile in one method."""

    @cute.jit
    def run(self):
        for atom in self.atoms():
            cpasync.prefetch_descriptor(atom)
        work_tiles, tiles = cutlass.Int32(0), cutlass.Int32(0)
        work = self.work_pipeline.consume(work_tiles)
        valid = work.valid
        while valid != 0:
            self.load_queries(work, work_tiles)
            self.load_item(work, tiles)
            tiles += work.n_block_max - work.n_block_min
            work_tiles += 1
            work = self.work_pipeline.consume(work_tiles)
            valid = work.valid

    def load_item(self, work: WorkTile, tiles: cutlass.Int32) -> None:
        """Load K and V of a work tile; `tiles` key tiles were loaded before."""
        raise NotImplementedError
