# SPDX-License-Identifier: Apache-2.0
"""Work tiles, and the pipeline in shared memory through which the scheduler warp passes them to the other warps."""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.ring import phase_of, stage_of

WORK_TILE_STAGES = 2  # the scheduler finds the next work tile while the other warps process one
NOT_SPLIT = -1


class RowTile(NamedTuple):
    """A tile of query rows of one request, for a head block; the fields are those of a `WorkTile`."""

    request: cutlass.Int32
    q_offset: cutlass.Int32
    num_rows: cutlass.Int32
    head_block: cutlass.Int32
    q_position: cutlass.Int32
    seqlen_k: cutlass.Int32
    window_size_right: cutlass.Int32


class WorkTile(NamedTuple):
    """A tile of query rows against a range of key tiles; all int32.

    Attributes:
        valid: 0 after the last work tile; the other fields then mean nothing.
        q_offset: row of q that holds the tile's first token.
        num_rows: of the tile that exist: tokens times query heads that share it (pack_gqa).
        head_block: group of packed query heads, and split of head_dim_v: head_q // pack_gqa * v_splits + v_split.
        q_position: of the first token among its request's keys.
        seqlen_k: keys of the request.
        n_block_min, n_block_max: key tiles, processed from the last to the first.
        n_block_full_min, n_block_full_max: those of them that need no mask.
        window_size_right: how many keys after its own position a query sees.
        kv_source: the request, which is the row of the page table; the request's first row where keys are packed.
        partial_idx: where the partial result goes; NOT_SPLIT where the result is complete.
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
    """What follows the last work tile."""
    zero = cutlass.Int32(0)
    return WorkTile(*[zero] * FIELDS)


def head_group_of(key: Any, head_block: Any) -> Any:
    """Which group of packed query heads a head block has: head_q // pack_gqa."""
    return head_block if key.v_splits == 1 else head_block // key.v_splits


def kv_head_of(key: Any, head_block: Any) -> Any:
    """The KV head of a head block's queries."""
    return head_group_of(key, head_block) // (key.heads_q // key.heads_kv // key.pack_gqa)


def v_split_of(key: Any, head_block: Any) -> Any:
    """Which split of head_dim_v a head block has."""
    return 0 if key.v_splits == 1 else head_block % key.v_splits


def q_head_of(key: Any, head_block: Any, row: Any) -> Any:
    """The query head of a tile's row."""
    return head_group_of(key, head_block) * key.pack_gqa + row % key.pack_gqa


@cute.jit
def lse_rows(key: cutlass.Constexpr, work: WorkTile):
    """Rows of which a work tile writes the LSE: all splits of head_dim_v have the same, and the first one writes it."""
    rows = work.num_rows
    if cutlass.const_expr(key.v_splits > 1):
        rows = work.num_rows if v_split_of(key, work.head_block) == 0 else cutlass.Int32(0)
    return rows


class WorkTilePipeline:
    """Work tiles from the scheduler warp to all warps that process them, in order.

    Args:
        sWork: [FIELDS, WORK_TILE_STAGES] in shared memory, of `layout`.
        mbar_full, mbar_empty: an mbarrier for each stage. `empty` counts one arrival for each consumer warp.
    """

    def __init__(self, sWork: cute.Tensor, mbar_full: cute.Pointer, mbar_empty: cute.Pointer) -> None:
        self.sWork, self.mbar_full, self.mbar_empty = sWork, mbar_full, mbar_empty

    @staticmethod
    def layout() -> cute.Layout:
        return cute.make_layout((FIELDS, WORK_TILE_STAGES), stride=(1, 16))

    @cute.jit
    def produce(self, count: cutlass.Int32, work: WorkTile):
        """By all lanes of the scheduler warp, after `count` other work tiles."""
        stage = stage_of(count, WORK_TILE_STAGES)
        cute.arch.mbarrier_wait(self.mbar_empty + stage, phase_of(count, WORK_TILE_STAGES) ^ 1)
        with cute.arch.elect_one():
            for field in cutlass.range_constexpr(FIELDS):
                self.sWork[field, stage] = work[field]
            cute.arch.mbarrier_arrive(self.mbar_full + stage)

    @cute.jit
    def wait_consumed(self, count: cutlass.Int32):
        """Until all consumers have read a work tile; by the lanes that produced it."""
        stage = stage_of(count, WORK_TILE_STAGES)
        cute.arch.mbarrier_wait(self.mbar_empty + stage, phase_of(count, WORK_TILE_STAGES))

    @cute.jit
    def consume(self, count: cutlass.Int32):
        """By all lanes of a consumer warp. The stage is empty again when every consumer warp has read it."""
        work = self.read(count)
        self.release(count)
        return work

    @cute.jit
    def read(self, count: cutlass.Int32):
        """The first half of `consume`: the scheduler warp waits for this warp until it calls `release`."""
        stage = stage_of(count, WORK_TILE_STAGES)
        cute.arch.mbarrier_wait(self.mbar_full + stage, phase_of(count, WORK_TILE_STAGES))
        return WorkTile(*(cute.arch.make_warp_uniform(self.sWork[field, stage]) for field in range(FIELDS)))

    @cute.jit
    def release(self, count: cutlass.Int32):
        """The second half of `consume`."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.mbar_empty + stage_of(count, WORK_TILE_STAGES))
