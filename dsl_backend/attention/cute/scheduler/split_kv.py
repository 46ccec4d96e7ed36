# SPDX-License-Identifier: Apache-2.0
"""Split-KV of batch-invariant layers: splits begin at fixed keys, and each has a partial result of its own.

A split begins at a multiple of `key.tiles_per_split` key tiles, whatever the batch, the query lengths and the grid are,
and the results of an output tile's splits are combined from the last split to the first. So a row's sums have the same
keys and the same order always. Which CTA processes a split does not change a bit: that is balanced over the batch.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.balanced import (
    COMBINE_TILES,
    OVERHEAD_ITERS,
    BalancedSplitKVTileScheduler,
    CtaShare,
    SplitRule,
    TilePart,
)
from dsl_backend.attention.cute.scheduler.requests import Requests
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WorkTile, WorkTilePipeline
from dsl_backend.attention.cute.sizes import padded, partial_size
from dsl_backend.primitives.math import quotient


class FixedSplitRange(NamedTuple):
    """An output tile whose splits belong to several CTAs, the first of them this one; the combine kernel completes it.

    Attributes:
        num_splits: partial results, of splits or of several that one CTA folded; 0 where there is no such tile, and the
            other fields mean nothing.
        q_offset: its first row of q. num_rows: of its row tile.
        partial_idx: of the first partial result; those of the splits before follow.
    """

    num_splits: cutlass.Int32
    q_offset: cutlass.Int32
    head_block: cutlass.Int32
    num_rows: cutlass.Int32
    partial_idx: cutlass.Int32


FIXED_SPLIT_RANGE_FIELDS = 8  # a multiple of a vector


# Added to `partial_idx` of a work tile whose splits the CTA folds to one partial result, at the index of the last one.
FOLDED_PARTIAL = 1 << 30


class FixedSplitKVTileScheduler(BalancedSplitKVTileScheduler):
    """The shares of BalancedSplitKVTileScheduler, moved to where splits begin: a work tile has whole splits.

    An output tile's iterations go from its last key tile to its first, as its splits do. The partial result of a work
    tile's last split has index `partial_idx`, those of the splits before follow. A CTA that has all splits of an output
    tile combines them itself. A fold begins with an output tile's last split: the CTA that has it may fold its splits
    to one partial result, where that is cheap: in tiles of up to `key.smem_fold_rows` rows.

    Args:
        partials: the workspace of partial results. If a batch may leave more than it holds, no output tile is split.
    """

    def __init__(
        self,
        key: Any,
        work_pipeline: WorkTilePipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        split_ranges: cute.Tensor,
        partials: cute.Tensor,
        cluster: int = 1,
        combine_tiles: int = COMBINE_TILES,
        pair_row_tiles: bool = False,
    ) -> None:
        super().__init__(
            key,
            work_pipeline,
            tokens_per_tile,
            tile_n,
            requests,
            split_ranges,
            SplitRule(min_tiles=key.tiles_per_split, combine_tiles=combine_tiles),
            cluster,
            pair_row_tiles,
        )
        self.partials, self.tiles_per_split = partials, key.tiles_per_split

    @cute.jit
    def splits_cost_more(
        self,
        unsplit_iters: cutlass.Int32,
        iters_per_cta: cutlass.Int32,
        most_key_tiles: cutlass.Int32,
        num_tiles: cutlass.Int32,
        num_ctas: cutlass.Int32,
    ):
        size = partial_size(self.requests.rows, padded(self.key.columns))
        room = cute.size(self.partials) // size // self.cluster
        # The overhead of output tiles, which come in pairs, may still be added.
        most_iters = iters_per_cta + quotient(2 * OVERHEAD_ITERS * num_tiles, num_ctas) + 1
        by_iter, by_cta = self.most_partials(most_iters, most_key_tiles, num_ctas)
        no_room = cutlass.min(by_iter, by_cta) > room
        return no_room or self.combining_costs_more(unsplit_iters, iters_per_cta)

    @cute.jit
    def most_partials(self, iters_per_cta: cutlass.Int32, most_key_tiles: cutlass.Int32, num_ctas: cutlass.Int32):
        """How many indices `first_partial` may give: by iterations, by CTAs."""
        by_iter = quotient(num_ctas * iters_per_cta, self.tiles_per_split) + 2 * num_ctas + 2
        return by_iter, num_ctas * (quotient(most_key_tiles, self.tiles_per_split) + 2)

    @cute.jit
    def first_partial(self, part: TilePart, share: CtaShare):
        """Index of the partial result of an output tile's last split.

        An output tile that is split is the only one that begins in its CTA and ends in another. It has K key tiles and
        at most (K - 2) / tiles_per_split + 2 splits. So indices are far enough apart if they follow iterations, with
        two more for each CTA; or if each CTA has as many as any output tile needs.
        """
        num_ctas, partition = share.num_clusters, share.partition
        by_iter, by_cta = self.most_partials(partition.iters_per_cta, partition.most_key_tiles, num_ctas)
        cluster_idx = quotient(part.tile_start, partition.iters_per_cta)
        first, most = quotient(part.tile_start, self.tiles_per_split) + 2 * cluster_idx, by_iter
        if by_cta < by_iter:
            first, most = cluster_idx * quotient(by_cta, num_ctas), by_cta
        return share.cta_rank * most + first

    @cute.jit
    def split_boundary(self, tile: cutlass.Int32, n_block_min: cutlass.Int32, n_block_max: cutlass.Int32):
        """The begin of the split that has key tile `tile`; n_block_max, n_block_min: of the output tile."""
        boundary = cutlass.max(quotient(tile, self.tiles_per_split) * self.tiles_per_split, n_block_min)
        return n_block_max if tile == n_block_max else boundary

    @cute.jit
    def produce_part(self, part: TilePart, share: CtaShare, num_produced: cutlass.Int32, num_splits: cutlass.Int32):
        n_block_min = self.mask.n_block_min(part.seqlen_k - part.seqlen_q)
        n_block_max = n_block_min + part.key_tiles
        first_tile = n_block_max - part.first_tile
        end = self.split_boundary(first_tile, n_block_min, n_block_max)
        begin = self.split_boundary(first_tile - part.num_tiles, n_block_min, n_block_max)
        if end > begin:
            last_split = quotient(n_block_max - 1, self.tiles_per_split)
            first_partial, partial_idx = self.first_partial(part, share), cutlass.Int32(NOT_SPLIT)
            if end - begin < part.key_tiles:
                partial_idx = first_partial + last_split - quotient(end - 1, self.tiles_per_split)
            head_block = part.head_block * self.cluster + share.cta_rank
            begins = end == n_block_max and partial_idx != NOT_SPLIT
            folded, marked_idx = cutlass.Int32(0), partial_idx
            if cutlass.const_expr(self.key.smem_fold_rows > 0):
                num_rows = cutlass.min(part.seqlen_q - part.token, self.tokens_per_tile) * self.key.pack_gqa
                if begins and num_rows <= self.key.smem_fold_rows:
                    folded = last_split - quotient(begin, self.tiles_per_split)
                    marked_idx = partial_idx + FOLDED_PARTIAL
            work = self.whole_splits(part, head_block, begin, end, marked_idx)
            self.work_pipeline.produce(num_produced, work)
            num_produced += 1
            if begins:
                num_splits = last_split - quotient(n_block_min, self.tiles_per_split) + 1 - folded
                self.write_split_range(work, share, first_partial + folded)
        return num_produced, num_splits

    @cute.jit
    def whole_splits(
        self,
        part: TilePart,
        head_block: cutlass.Int32,
        n_block_min: cutlass.Int32,
        n_block_max: cutlass.Int32,
        partial_idx: cutlass.Int32,
    ):
        """The work tile of a part whose key tiles are those of whole splits; all that it sees where it is not split."""
        window_size_right = self.mask.window_size_right(part.request)
        if partial_idx == NOT_SPLIT:
            n_block_min, n_block_max = self.n_block_range(part.info, part.token, window_size_right)
        tile = self.row_tile(part.request, part.info, head_block, part.token, window_size_right)
        return self.mask.work_tile(tile, n_block_min, n_block_max, partial_idx)

    @cute.jit
    def write_split_range(self, work: WorkTile, share: CtaShare, first_partial: cutlass.Int32):
        """All fields but num_splits, which is written at the end of the CTA's share."""
        split_ranges, row = self.split_ranges, share.partial_cta
        if cute.arch.lane_idx() == 0:
            split_ranges[row, 1], split_ranges[row, 2] = work.q_offset, work.head_block
            split_ranges[row, 3], split_ranges[row, 4] = work.num_rows, first_partial


@cute.jit
def num_splits_of(key: cutlass.Constexpr, work: WorkTile):
    """Splits of a work tile."""
    last, first = quotient(work.n_block_max - 1, key.tiles_per_split), quotient(work.n_block_min, key.tiles_per_split)
    return last - first + 1


@cute.jit
def split_of(key: cutlass.Constexpr, work: WorkTile, index: cutlass.Int32):
    """A split as a work tile of its own; `index`: counted from the work tile's last split.

    Its partial result has index `partial_idx`, unless the work tile is not split.
    """
    tiles = cutlass.const_expr(key.tiles_per_split)
    begin = (quotient(work.n_block_max - 1, tiles) - index) * tiles
    n_block_min, n_block_max = cutlass.max(work.n_block_min, begin), cutlass.min(work.n_block_max, begin + tiles)
    n_block_full_max = cutlass.max(cutlass.min(work.n_block_full_max, n_block_max), n_block_min)
    n_block_full_min = cutlass.min(cutlass.max(work.n_block_full_min, n_block_min), n_block_full_max)
    partial_idx = work.partial_idx
    if partial_idx != NOT_SPLIT:
        partial_idx += index
    return work._replace(
        n_block_min=n_block_min,
        n_block_max=n_block_max,
        n_block_full_min=n_block_full_min,
        n_block_full_max=n_block_full_max,
        partial_idx=partial_idx,
    )
