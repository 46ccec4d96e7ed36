# SPDX-License-Identifier: Apache-2.0
"""What one warp finds for the others to do: work items, and the mailbox in shared memory through which they pass."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.ring import phase_of, stage_of

WORK_TILE_STAGES = 2  # the next item is found while the last one is worked on
NOT_SPLIT = -1


class WorkTile(NamedTuple):
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
    q_offset: cutlass.Int32
    num_rows: cutlass.Int32
    head_block: cutlass.Int32
    q_position: cutlass.Int32
    seqlen_k: cutlass.Int32
    n_block_min: cutlass.Int32
    n_block_max: cutlass.Int32
    n_block_full_min: cutlass.Int32
    n_block_full_max: cutlass.Int32
    window_size_right: cutlass.Int32
    kv_source: cutlass.Int32
    partial_idx: cutlass.Int32


FIELDS = len(WorkTile._fields)


def no_work_tile() -> WorkTile:
    """What is posted behind the last item."""
    nothing = cutlass.Int32(0)
    return WorkTile(*[nothing] * FIELDS)


def head_group_of(key, head_block):
    """Which packed heads a unit has: head_q // pack."""
    return head_block if key.v_splits == 1 else head_block // key.v_splits


def kv_head_of(key, head_block):
    """The key head that a unit's queries share."""
    return head_group_of(key, head_block) // (key.heads_q // key.heads_kv // key.pack_gqa)


def v_split_of(key, head_block):
    """Which slice of value rows, and of outputs, a unit has."""
    return 0 if key.v_splits == 1 else head_block % key.v_splits


def q_head_of(key, head_block, m):
    """The query head of a tile's row m."""
    return head_group_of(key, head_block) * key.pack_gqa + m % key.pack_gqa


@cute.jit
def lse_rows(key: cutlass.Constexpr, work: WorkTile):
    """Rows whose LSE is for an item to write: all slices of a row have the same, and the first one writes it."""
    rows = work.num_rows
    if cutlass.const_expr(key.v_splits > 1):
        rows = work.num_rows if v_split_of(key, work.head_block) == 0 else cutlass.Int32(0)
    return rows


class WorkTilePipeline:
    """Items from one warp to `readers` others, in order."""

    def __init__(self, items: cute.Tensor, full: cute.Pointer, empty: cute.Pointer):
        self.items, self.full, self.empty = items, full, empty

    @staticmethod
    def layout() -> cute.Layout:
        return cute.make_layout((FIELDS, WORK_TILE_STAGES), stride=(1, 16))

    @cute.jit
    def produce(self, count: cutlass.Int32, work: WorkTile):
        """By all lanes of the writing warp; count: of the items before."""
        slot = stage_of(count, WORK_TILE_STAGES)
        cute.arch.mbarrier_wait(self.empty + slot, phase_of(count, WORK_TILE_STAGES) ^ 1)
        with cute.arch.elect_one():
            for field in cutlass.range_constexpr(FIELDS):
                self.items[field, slot] = work[field]
            cute.arch.mbarrier_arrive(self.full + slot)

    @cute.jit
    def wait_consumed(self, count: cutlass.Int32):
        """Until all readers have read an item; by the lanes that posted it."""
        cute.arch.mbarrier_wait(self.empty + stage_of(count, WORK_TILE_STAGES), phase_of(count, WORK_TILE_STAGES))

    @cute.jit
    def consume(self, count: cutlass.Int32):
        """By all lanes of a reading warp; the slot is free for the next item when all readers have read it."""
        slot = stage_of(count, WORK_TILE_STAGES)
        cute.arch.mbarrier_wait(self.full + slot, phase_of(count, WORK_TILE_STAGES))
        work = WorkTile(*(cute.arch.make_warp_uniform(self.items[field, slot]) for field in range(FIELDS)))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot)
        return work
