# SPDX-License-Identifier: Apache-2.0
"""Where tiles of keys and values lie in shared memory: in a ring each, or in one that they share.

Barriers are the same for both: `stages` tiles of each have one. What differs is what the loader waits for.
"""

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.loader.dense import PerTileLoads, RolledLoadWarp
from dsl_backend.attention.cute.sm100.dense_configs import SHARED_PLACES
from dsl_backend.primitives.accumulators import fence_register
from dsl_backend.primitives.ring import phase_of, stage_of


class OwnRings:
    """A ring of key tiles, and one of value tiles.

    Attributes:
        keys: tensors [row, column, place], whose columns follow one another.
        values: [row, column, place].

    Args:
        keys, columns: of a tile, those keys and those columns of values that are in the block's shared memory.
    """

    def __init__(self, kernel, allocator, keys: int, columns: int):
        self.stages = kernel.config.stages
        self.keys = [placed(allocator, kernel.dtype, kernel.staged(keys, kernel.dims, self.stages))]
        self.values = placed(allocator, kernel.dtype_v, kernel.staged(kernel.tile_n, columns, self.stages))

    def of_keys(self, tile):
        """A place for each tensor of keys."""
        return [stage_of(tile, self.stages)]

    def of_values(self, tile):
        return stage_of(tile, self.stages)


class SharedRing:
    """Places of a value tile's size, through which go value tiles and as many columns of key tiles, in turn; and a ring
    of the keys' other columns.

    Values take the place that the keys before them leave, and keys the place of the values before those.
    """

    def __init__(self, kernel, allocator):
        self.stages = kernel.config.stages
        self.values = placed(allocator, kernel.dtype, kernel.staged(kernel.tile_n, kernel.dims_v, SHARED_PLACES))
        rest = (kernel.tile_n, kernel.dims - kernel.dims_v, self.stages)
        self.rest = placed(allocator, kernel.dtype, cute.tile_to_shape(kernel.atom(kernel.dims), rest, order=(0, 1, 2)))
        self.keys = [self.values, self.rest]

    def of_keys(self, tile):
        return [stage_of(tile, SHARED_PLACES), stage_of(tile, self.stages)]

    def of_values(self, tile):
        return stage_of(tile + SHARED_PLACES - 1, SHARED_PLACES)


def placed(allocator, numeric, layout):
    return allocator.allocate_tensor(numeric, layout.outer, byte_alignment=1024, swizzle=layout.inner)


class RingLoadWarp(PerTileLoads, RolledLoadWarp):
    """With the fewest instructions for a tile, which a warp issues for all of its lanes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.box_begin = cute.arch.lane_idx() % self.boxes * self.box if self.boxes > 1 else 0

    @cute.jit
    def expect(self, full, size: cutlass.Constexpr[int]):
        # Half of the instructions of a branch around it.
        cute.arch.inline_ptx(
            "{ .reg .pred leader; elect.sync _|leader, 0xffffffff; "
            f"@leader mbarrier.arrive.expect_tx.shared.b64 _, [{{$r0}}], {size}; }}",
            read_only_args=[full.toint()],
        )

    @cute.jit
    def pages_of(self, work, tile):
        """Lane b: the page of box b modulo boxes; past the keys, one that is not there, whose copy fills with zeros."""
        page = cutlass.Int32(0)
        if cutlass.const_expr(self.page > 0):
            page = cutlass.Int32(cute.size(self.mK, mode=[3]))
            if tile * self.tile_n + self.box_begin < work.seqlen_k:
                page = self.whole_pages_of(work, tile)
        return page

    @cute.jit
    def whole_pages_of(self, work, tile):
        """The same for a tile that has all of its keys."""
        page = cutlass.Int32(0)
        if cutlass.const_expr(self.page > 0):
            page = self.requests.page_table[work.kv_source, self.place_of(tile)]
        return page

    def place_of(self, tile):
        """Of a lane's page among those of its request."""
        if self.boxes == 1:
            return tile // (self.page // self.tile_n)
        return (tile * self.tile_n + self.box_begin) // self.page

    def page_of(self, pages, b):
        return pages if self.boxes == 1 else cute.arch.shuffle_sync(pages, b)


class SharedRingLoadWarp(RingLoadWarp):
    """Fills a ring that keys and values share, in the order in which they are multiplied."""

    def __init__(self, kernel, work_pipeline, barriers, loads, sQ, places, requests):
        values = places.values
        super().__init__(kernel, work_pipeline, barriers, loads, sQ, values, values, requests)
        self.places = places
        self.mRest = cute.domain_offset((0, kernel.dims_v, *(0,) * (cute.rank(loads.mK) - 2)), loads.mK)
        self.sRest = self.in_boxes(places.rest, self.box, kernel.copied)

    @cute.jit
    def load_item(self, work, tiles):
        for step in cutlass.range(work.n_block_max - work.n_block_min, unroll=1):
            tile, count = work.n_block_max - 1 - step, tiles + step
            pages = self.pages_of(work, tile)
            self.load_keys(work, tile, pages, count)
            self.load_values(work, tile, pages, count)

    @cute.jit
    def load_keys(self, work, tile, pages, count):
        stage = stage_of(count, self.stages)
        place, rest_place = self.places.of_keys(count)
        full = self.barriers.k_full + stage
        self.expect(full, self.k_bytes)
        # The keys before the last ones, whose place this is, were read: the values before waited for them.
        rest = range(self.k_chunks - self.v_chunks)
        self.load_tile(self.tma_atom_k, self.mRest, self.sRest, self.copied, rest, work, tile, pages, rest_place, full)
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase_of(count, self.stages) ^ 1)
        chunks = range(self.v_chunks)
        self.load_tile(self.tma_atom_k, self.mK, self.sK, self.copied, chunks, work, tile, pages, place, full)

    @cute.jit
    def load_values(self, work, tile, pages, count):
        before = count - 1
        cute.arch.mbarrier_wait(self.barriers.k_empty + stage_of(before, self.stages), phase_of(before, self.stages))
        full = self.barriers.v_full + stage_of(count, self.stages)
        self.expect(full, self.v_bytes)
        chunks, place = range(self.v_chunks), self.places.of_values(count)
        self.load_tile(self.tma_atom_v, self.mV, self.sV, self.copied_v, chunks, work, tile, pages, place, full)


class OwnRingsLoadWarp(RingLoadWarp):
    """Fills a ring of keys and one of values, whose tile goes where that of the keys went one before."""

    @cute.jit
    def load_item(self, work, tiles):
        last = work.n_block_max - 1
        pages = self.pages_of(work, last)
        stage, phase = self.turn(tiles)
        cute.arch.mbarrier_wait(self.barriers.k_empty + stage, phase)
        self.fill_keys(work, last, pages, stage)
        through = tiles + last
        for count in cutlass.range(tiles + 1, tiles + work.n_block_max - work.n_block_min, unroll=1):
            tile = through - count
            pages_before, stage_before, phase_before = pages, stage, phase
            # Keys end in an item's last tile.
            pages = self.whole_pages_of(work, tile)
            stage, phase = self.turn(count)
            cute.arch.mbarrier_wait(self.barriers.k_empty + stage, phase)
            self.fill_keys(work, tile, pages, stage)
            cute.arch.mbarrier_wait(self.barriers.v_empty + stage_before, phase_before)
            self.fill_values(work, tile + 1, pages_before, stage_before)
        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase)
        self.fill_values(work, work.n_block_min, pages, stage)

    def turn(self, count):
        """Stage of the count-th tile, and the phase of being empty that it waits for."""
        # Settled: of a count in sight, each address would be made by a shift and a mask.
        return fence_register(stage_of(count, self.stages)), phase_of(count, self.stages) ^ 1
