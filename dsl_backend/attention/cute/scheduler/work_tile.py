# SPDX-License-Identifier: Apache-2.0
"""What one warp finds for the others to do: work items, and the mailbox in shared memory through which they pass."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.ring import phase_of, stage_of

SLOTS = 2  # the next item is found while the last one is worked on
WHOLE = -1


class Work(NamedTuple):
    """A tile of query rows against a range of key tiles; all int32.

    Attributes:
        valid: 0 says that there is no more.
        query: row of q that holds the tile's first token.
        rows: of the tile that are there: tokens times packed heads.
        unit: which packed heads, and which slice of their value rows: head_q // pack * value_slices + slice.
        position: of the first token among its request's keys.
        keys: of the request.
        begin, end: key tiles, taken from the last to the first.
        whole_begin, whole_end: those of them that every row sees whole.
        right: how many keys after its own position a query sees.
        source: the request, whose row of the page table counts; or the first of its packed keys.
        slot: where an unfinished result goes; WHOLE where there is no other part.
    """

    valid: cutlass.Int32
    query: cutlass.Int32
    rows: cutlass.Int32
    unit: cutlass.Int32
    position: cutlass.Int32
    keys: cutlass.Int32
    begin: cutlass.Int32
    end: cutlass.Int32
    whole_begin: cutlass.Int32
    whole_end: cutlass.Int32
    right: cutlass.Int32
    source: cutlass.Int32
    slot: cutlass.Int32


FIELDS = len(Work._fields)


def no_work() -> Work:
    """What is posted behind the last item."""
    nothing = cutlass.Int32(0)
    return Work(*[nothing] * FIELDS)


def packed_of(key, unit):
    """Which packed heads a unit has: head_q // pack."""
    return unit if key.value_slices == 1 else unit // key.value_slices


def key_head_of(key, unit):
    """The key head that a unit's queries share."""
    return packed_of(key, unit) // (key.heads_q // key.heads_kv // key.pack)


def slice_of(key, unit):
    """Which slice of value rows, and of outputs, a unit has."""
    return 0 if key.value_slices == 1 else unit % key.value_slices


def head_of(key, unit, m):
    """The query head of a tile's row m."""
    return packed_of(key, unit) * key.pack + m % key.pack


@cute.jit
def lse_rows(key: cutlass.Constexpr, work: Work):
    """Rows whose LSE is for an item to write: all slices of a row have the same, and the first one writes it."""
    rows = work.rows
    if cutlass.const_expr(key.value_slices > 1):
        rows = work.rows if slice_of(key, work.unit) == 0 else cutlass.Int32(0)
    return rows


class Mailbox:
    """Items from one warp to `readers` others, in order."""

    def __init__(self, items: cute.Tensor, full: cute.Pointer, empty: cute.Pointer):
        self.items, self.full, self.empty = items, full, empty

    @staticmethod
    def layout() -> cute.Layout:
        return cute.make_layout((FIELDS, SLOTS), stride=(1, 16))

    @cute.jit
    def post(self, count: cutlass.Int32, work: Work):
        """By all lanes of the writing warp; count: of the items before."""
        slot = stage_of(count, SLOTS)
        cute.arch.mbarrier_wait(self.empty + slot, phase_of(count, SLOTS) ^ 1)
        with cute.arch.elect_one():
            for field in cutlass.range_constexpr(FIELDS):
                self.items[field, slot] = work[field]
            cute.arch.mbarrier_arrive(self.full + slot)

    @cute.jit
    def wait_read(self, count: cutlass.Int32):
        """Until all readers have read an item; by the lanes that posted it."""
        cute.arch.mbarrier_wait(self.empty + stage_of(count, SLOTS), phase_of(count, SLOTS))

    @cute.jit
    def read(self, count: cutlass.Int32):
        """By all lanes of a reading warp; the slot is free for the next item when all readers have read it."""
        slot = stage_of(count, SLOTS)
        cute.arch.mbarrier_wait(self.full + slot, phase_of(count, SLOTS))
        work = Work(*(cute.arch.make_warp_uniform(self.items[field, slot]) for field in range(FIELDS)))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot)
        return work


@cute.jit
def unseen_before(key: cutlass.Constexpr, work: Work, requests, tile_n: cutlass.Constexpr[int], tile):
    """Keys of a tile that lie below the windows of all of an item's rows; 0 or less where there are none.

    Their page may be another request's by now: they are anything, and a weight of 0 does not take away a NaN.
    """
    below = cutlass.Int32(0)
    if cutlass.const_expr(key.left):
        below = cutlass.min(work.position - requests.left - tile * tile_n, tile_n)
    return below


@cute.jit
def cuts_first_tile(work: Work):
    """Whether there may be such keys: some row does not see all of the item's first tile."""
    return work.whole_begin > work.begin or work.whole_end <= work.begin
