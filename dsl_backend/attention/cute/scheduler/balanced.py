# SPDX-License-Identifier: Apache-2.0
"""Balanced split-KV: every CTA gets a contiguous, even share of all key tiles of the batch, in the manner of stream-K.

Stream-K (Osama et al., 2023; CUTLASS) lays the iterations of all output tiles end to end and gives each CTA an equal
number of consecutive ones. Here an output tile is a row tile of a request for a head block, and an iteration is one of
its key tiles. An output tile that crosses a boundary between CTAs is split: each of these CTAs leaves a partial result,
and the combine kernel (combine.py) puts them together.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.mask import UNBOUNDED
from dsl_backend.attention.cute.scheduler.persistent import StaticPersistentTileScheduler
from dsl_backend.attention.cute.scheduler.requests import (
    WARP,
    Requests,
    SeqlenInfo,
    from_lane,
    lengths_of,
    seqlen_info_of,
    warp_prefix_sum,
    zero_unless_served,
)
from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, RowTile, WorkTilePipeline, no_work_tile
from dsl_backend.primitives.math import quotient

# Key tiles that a CTA may have beyond an even share where no output tile is split then. The combine kernel takes 3 to 4
# us on an H200 besides reading the partial results, which count as 4 more tiles for 64 rows of MLA. A dense key tile
# takes some 2 us, and one of MLA has twice the bytes.
COMBINE_TILES, COMBINE_TILES_MLA = 2, 1
# A CTA may have fewer key tiles than min_split_tiles while an output tile has at most this many splits, and while the
# partial results are no more bytes than the key tiles. The combine kernel reads 64 splits at once. MLA with 1 tile for
# each CTA instead of 2 took 10.6 us instead of 11.5 with 4 splits, and 13.1 instead of 12.1 with 128, on an H200; with
# 64 rows, whose partial results are 4 tiles, 2 tiles took 20.8 us instead of 19.6 with 4.
MAX_SPLITS_BELOW_MIN = 64
# Combining n splits takes as long as n / SPLITS_PER_TILE key tiles, besides its fixed cost. So an output tile is done
# soonest with sqrt(key tiles / SPLITS_PER_TILE) of its key tiles a split. With MLA's 64 rows and tiles of 64
# keys on an H200, 24 tiles of 128 heads took 15.2 us with 2 tiles a split at least and 17.3 with 4, but 128 tiles 20.9
# and 20.4; 9 tiles of 32 heads took 15.0 with 1 and 19.8 with 2.
SPLITS_PER_TILE = 8
# Iterations that stand for the fixed cost of a work tile where short output tiles share a CTA: the latency of its first
# key tile, and its result. Measured on an H200: 0.4 tiles with heads of 128, 0.6 with heads of 64.
OVERHEAD_ITERS = 1


class SplitRange(NamedTuple):
    """An output tile that begins in a CTA's share and ends in a later one, which the combine kernel completes.

    Attributes:
        num_splits: CTAs that have a part of it; 0 where there is no such tile, and the other fields mean nothing.
        q_offset: its first row of q. num_rows: of its row tile.
    """

    num_splits: cutlass.Int32
    q_offset: cutlass.Int32
    head_block: cutlass.Int32
    num_rows: cutlass.Int32


SPLIT_RANGE_FIELDS = len(SplitRange._fields)


class RequestTiles(NamedTuple):
    """A request and its output tiles.

    Attributes:
        key_tiles: of each output tile: those of all keys of the request, or what a pair of row tiles sees together.
        num_tiles: output tiles, or pairs of them.
        middle_tiles: with `exact_pairs`, what the row tile that has no partner sees, and 0 where there is none; the
            tile counts as a pair otherwise.
    """

    offset_q: cutlass.Int32
    seqlen_q: cutlass.Int32
    seqlen_k: cutlass.Int32
    key_tiles: cutlass.Int32
    num_tiles: cutlass.Int32
    middle_tiles: cutlass.Int32

    @property
    def info(self) -> SeqlenInfo:
        return SeqlenInfo(self.offset_q, self.seqlen_q, self.seqlen_k)


class Partition(NamedTuple):
    """How the iterations of the batch are divided among CTAs, clusters, or row groups.

    Attributes:
        row_group: clusters of a row group, which have the same share of neighbouring row tiles.
        total_iters: of all output tiles. iters_per_cta: those of each CTA.
        overhead_iters: at the beginning of each output tile, without a key tile.
        min_tile_iters: of an output tile at least; those after its key tiles are empty.
        most_key_tiles: of an output tile, or of a pair.
    """

    row_group: cutlass.Int32
    total_iters: cutlass.Int32
    iters_per_cta: cutlass.Int32
    overhead_iters: cutlass.Int32
    min_tile_iters: cutlass.Int32
    most_key_tiles: cutlass.Int32


class CtaShare(NamedTuple):
    """The share of a CTA, or of the CTAs of a cluster, or of a row group.

    Attributes:
        cluster_idx: of num_clusters, or of so many row groups; cta_rank: of the CTA in its cluster.
        group_rank: of the cluster in its row group.
        partial_cta: the CTA's row of split_ranges: the first CTAs of all clusters, and of all row groups, come before
            the second ones.
    """

    cluster_idx: cutlass.Int32
    num_clusters: cutlass.Int32
    cta_rank: cutlass.Int32
    group_rank: cutlass.Int32
    partial_cta: cutlass.Int32
    partition: Partition


class TilePart(NamedTuple):
    """The part of an output tile that is in a CTA's share.

    Attributes:
        key_tiles: of the output tile. first_tile, num_tiles: of them, those of the part.
        tile_start: the iteration of the first key tile.
    """

    request: cutlass.Int32
    offset_q: cutlass.Int32
    seqlen_q: cutlass.Int32
    seqlen_k: cutlass.Int32
    head_block: cutlass.Int32
    token: cutlass.Int32
    key_tiles: cutlass.Int32
    first_tile: cutlass.Int32
    num_tiles: cutlass.Int32
    tile_start: cutlass.Int32

    @property
    def info(self) -> SeqlenInfo:
        return SeqlenInfo(self.offset_q, self.seqlen_q, self.seqlen_k)


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """When output tiles are split.

    Attributes:
        min_tiles: key tiles of a CTA at least.
        short_splits: fewer are enough where the longest output tile has few key tiles: `least_split_tiles`.
        combine_tiles: COMBINE_TILES or COMBINE_TILES_MLA.
        idle_eighths: of the clusters, eighths that may be idle while memory is what the others wait for: without them
            these have a larger share of its rate.
        even_splits: output tiles may have a whole number of CTAs each, where that costs less than partial results.
    """

    min_tiles: int
    short_splits: bool = False
    combine_tiles: int = COMBINE_TILES
    idle_eighths: int = 0
    even_splits: bool = False


def even_split_iters(most_key_tiles: cutlass.Int32, num_tiles: cutlass.Int32, num_ctas: cutlass.Int32):
    """(CTAs of each output tile, iterations of each CTA), where every output tile has as many CTAs as the others."""
    splits = quotient(num_ctas, num_tiles)
    return splits, quotient(most_key_tiles + splits - 1, splits)


class BalancedSplitKVTileScheduler(StaticPersistentTileScheduler):
    """An even, contiguous share of the batch's iterations for each CTA; the module's docstring defines the words.

    Where some requests are shorter than a share, each output tile begins with OVERHEAD_ITERS empty iterations.
    Otherwise a CTA with many short tiles would have as many iterations as the others, and all their fixed costs too.
    Where splitting costs more than it gains, every output tile has as many iterations as the longest, so that none is
    split.

    A CTA leaves at most two partial results: index 2 * cta for an output tile that began in an earlier CTA, and
    2 * cta + 1 for one that goes on in a later CTA. The CTAs of a cluster have the same share of neighbouring head
    blocks; `cta` then counts the first CTAs of all clusters before the second ones.

    An output tile has all key tiles of its request, although the first row tiles of a causal prompt see few of them,
    unless prompts are paired: then the first row tile of a request is an output tile together with the last, the second
    with the last but one, and so on. All pairs of a request see nearly the same number of keys.

    Row groups: so many neighbouring clusters have the same share of neighbouring row tiles of a request, side by side,
    so that keys come from memory once for all of them and from L2 for the others. A cluster without a row tile is idle:
    a batch where this costs more than it saves has no row groups.

    Args:
        split_ranges: [CTAs, SPLIT_RANGE_FIELDS], written here for the combine kernel.
        rule: when output tiles are split.
        cluster: CTAs of a cluster.
        pair_row_tiles: prompts may be paired; costs nothing where there are none.
        exact_pairs: of an odd number of row tiles the one in the middle is an output tile of its own, with its own
            number of iterations; not for row groups.
        row_groups: there may be row groups, of as many clusters as the requests say.
        kept_chunks: chunks of WARP requests whose lengths are loaded at once, and kept in registers; those of others
            are loaded one chunk after another, twice.
    """

    def __init__(
        self,
        key: Any,
        work_pipeline: WorkTilePipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        split_ranges: cute.Tensor,
        rule: SplitRule,
        cluster: int = 1,
        pair_row_tiles: bool = False,
        row_groups: bool = False,
        kept_chunks: int = 1,
        exact_pairs: bool = False,
    ) -> None:
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.cluster, self.head_blocks, self.row_groups = cluster, key.head_blocks // cluster, row_groups
        self.split_ranges, self.rule = split_ranges, rule
        self.kept_chunks = kept_chunks
        self.kept: list[tuple[cutlass.Int32, cutlass.Int32, cutlass.Int32]] = []
        self.may_pair = pair_row_tiles and key.causality != "full" and not key.has_window_left
        self.exact_pairs = exact_pairs and self.may_pair
        assert not (exact_pairs and row_groups), "a row group has neighbouring row tiles"

    @cute.jit
    def request_tiles(self, request: cutlass.Int32, num_requests: cutlass.Int32, paired: cutlass.Int32):
        """The RequestTiles of a lane's request."""
        return self.tiles_of(request, seqlen_info_of(self.requests, request, num_requests), paired)

    @cute.jit
    def tiles_of(self, request: cutlass.Int32, info: SeqlenInfo, paired: cutlass.Int32):
        """The RequestTiles of a request."""
        offset_q, seqlen_q, seqlen_k = info
        n_block_min = self.mask.n_block_min(seqlen_k - seqlen_q)
        # At least one tile, so that every row is written.
        key_tiles = cutlass.max((seqlen_k + self.tile_n - 1) // self.tile_n - n_block_min, 1)
        row_tiles, middle_tiles = self.num_row_tiles(seqlen_q), cutlass.Int32(0)
        if cutlass.const_expr(self.may_pair):
            if paired != 0 and row_tiles > 1:
                window_size_right = self.mask.window_size_right(request)
                key_tiles = self.key_tiles_of_pair(seqlen_q, seqlen_k, key_tiles, row_tiles, window_size_right)
                if cutlass.const_expr(self.exact_pairs):
                    if row_tiles % 2 != 0:
                        token = row_tiles // 2 * self.tokens_per_tile
                        n_block_min, n_block_max = self.n_block_range(info, token, window_size_right)
                        middle_tiles = n_block_max - n_block_min
                    row_tiles = row_tiles // 2
                else:
                    row_tiles = (row_tiles + 1) // 2
        num_tiles = zero_unless_served(self.requests, seqlen_q, row_tiles * self.head_blocks)
        if cutlass.const_expr(self.exact_pairs):
            middle_tiles = zero_unless_served(self.requests, seqlen_q, middle_tiles)
        return RequestTiles(offset_q, seqlen_q, seqlen_k, key_tiles, num_tiles, middle_tiles)

    @cute.jit
    def key_tiles_of_pair(
        self,
        seqlen_q: cutlass.Int32,
        seqlen_k: cutlass.Int32,
        key_tiles: cutlass.Int32,
        row_tiles: cutlass.Int32,
        window_size_right: cutlass.Int32,
    ):
        """Bound of the key tiles that two row tiles of a pair see together; key_tiles: those of the last row tile.

        Keys are counted in steps, of which a row tile and a key tile have a whole number. Row tile t sees the steps of
        t + 1 row tiles and of the keys before the request's queries, so that both see a + b = `steps`. With `per_tile`
        steps for each key tile, a and b rounded up to key tiles are at most (steps - 2) / per_tile + 2 together.
        """
        step = self.tokens_per_tile if self.tile_n % self.tokens_per_tile == 0 else 1
        per_row_tile, per_tile = self.tokens_per_tile // step, self.tile_n // step
        # A request has no keys after its last query.
        before, after = seqlen_k - seqlen_q + step - 1, cutlass.min(window_size_right, seqlen_q) + step - 1
        steps = (row_tiles + 1) * per_row_tile + 2 * (before // step) + 2 * (after // step)
        # A row tile that sees no key has one tile as well.
        both = cutlass.max((steps - 2) // per_tile + 2, key_tiles + 1)
        return cutlass.min(both, 2 * key_tiles)

    @cute.jit
    def chunk_tiles(
        self,
        first_chunk: RequestTiles,
        chunk: cutlass.Int32,
        lane: cutlass.Int32,
        num_requests: cutlass.Int32,
        paired: cutlass.Int32,
    ):
        """The RequestTiles of the lane's request in a chunk of WARP requests. The first, often only, one is kept."""
        offset_q, seqlen_q, seqlen_k, key_tiles, num_tiles, middle_tiles = first_chunk
        if chunk > 0:
            if cutlass.const_expr(self.kept_chunks > 1):
                request = chunk * WARP + lane
                info = self.chunk_lengths(chunk, request, num_requests)
                offset_q, seqlen_q, seqlen_k, key_tiles, num_tiles, middle_tiles = self.tiles_of(request, info, paired)
            else:
                offset_q, seqlen_q, seqlen_k, key_tiles, num_tiles, middle_tiles = self.request_tiles(
                    chunk * WARP + lane, num_requests, paired
                )
        return RequestTiles(offset_q, seqlen_q, seqlen_k, key_tiles, num_tiles, middle_tiles)

    @cute.jit
    def chunk_lengths(self, chunk: cutlass.Int32, request: cutlass.Int32, num_requests: cutlass.Int32):
        """The SeqlenInfo of a lane's request in a chunk from 1 on: a kept one, or a loaded one."""
        begin, end, keys = self.kept[0]
        for other in cutlass.range_constexpr(2, self.kept_chunks):
            is_other = chunk == other
            begin, end, keys = (
                theirs if is_other else own
                for theirs, own in zip(self.kept[other - 1], (begin, end, keys), strict=True)
            )
        seqlen_q = end - begin
        if chunk >= self.kept_chunks:
            begin, seqlen_q, keys = seqlen_info_of(self.requests, request, num_requests)
        return SeqlenInfo(begin, seqlen_q, keys)

    @cute.jit
    def run(self):
        num_requests = cutlass.Int32(cute.size(self.requests.seqused_k))
        lane = cute.arch.lane_idx()
        cta, num_ctas = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        num_clusters = num_ctas // self.cluster
        paired = cutlass.Int32(0)
        self.kept = [lengths_of(self.requests, c * WARP + lane, num_requests) for c in range(1, self.kept_chunks)]
        first_chunk = self.request_tiles(lane, num_requests, paired)
        partition = self.partition(first_chunk, num_requests, lane, num_clusters, paired)
        if cutlass.const_expr(self.may_pair):
            # Where no CTA has two output tiles, pairs would not shorten the longest one.
            if (
                (partition.min_tile_iters == 0 or partition.iters_per_cta > partition.min_tile_iters)
                and partition.row_group == 1
                and self.requests.max_seqlen_q > self.tile_n
            ):
                paired = cutlass.Int32(1)
                first_chunk = self.request_tiles(lane, num_requests, paired)
                partition = self.partition(first_chunk, num_requests, lane, num_clusters, paired)
        share = self.share(cta, num_clusters, partition)
        _, total_iters, iters_per_cta, _, _, _ = partition
        partial_cta = share.partial_cta
        iter_idx = share.cluster_idx * iters_per_cta
        cta_end = cutlass.min(iter_idx + iters_per_cta, total_iters)
        num_produced, num_splits, chunk_end = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(num_requests, WARP), unroll=1):
            tiles = self.chunk_tiles(first_chunk, chunk, lane, num_requests, paired)
            num_groups = self.num_groups(tiles.num_tiles, partition.row_group)
            iters = num_groups * self.tile_iters(tiles, partition, paired)
            iters += self.head_blocks * self.middle_iters(tiles, partition)
            if cutlass.const_expr(self.kept_chunks > 1):
                # Most chunks of a long batch have none of the CTA's work, and their sum says so.
                chunk_begin = chunk_end
                chunk_end += cute.arch.warp_redux_sync(iters, "add")
                if iter_idx < cutlass.min(chunk_end, cta_end):
                    request_end = warp_prefix_sum(iters) + chunk_begin
                    iter_idx, num_produced, num_splits = self.produce_chunk(
                        tiles, chunk, request_end, iter_idx, chunk_end, cta_end, share, paired, num_produced, num_splits
                    )
            else:
                request_end = warp_prefix_sum(iters) + chunk_end
                chunk_end = cute.arch.shuffle_sync(request_end, WARP - 1)
                iter_idx, num_produced, num_splits = self.produce_chunk(
                    tiles, chunk, request_end, iter_idx, chunk_end, cta_end, share, paired, num_produced, num_splits
                )
        split_ranges = self.split_ranges
        if lane == 0:
            split_ranges[partial_cta, 0] = num_splits
        self.work_pipeline.produce(num_produced, no_work_tile())

    @cute.jit
    def produce_chunk(
        self,
        tiles: RequestTiles,
        chunk: cutlass.Int32,
        request_end: cutlass.Int32,
        iter_idx: cutlass.Int32,
        chunk_end: cutlass.Int32,
        cta_end: cutlass.Int32,
        share: CtaShare,
        paired: cutlass.Int32,
        num_produced: cutlass.Int32,
        num_splits: cutlass.Int32,
    ):
        """Produce the CTA's work tiles of a chunk of requests, from an iteration on.

        Args:
            tiles: of the lane's request. request_end: the iteration after its last one.
            chunk_end, cta_end: those after the chunk's and the CTA's last ones.

        Returns:
            (the iteration after those, work tiles produced, splits of the output tile that begins here if any).
        """
        overhead_iters = share.partition.overhead_iters
        while iter_idx < cutlass.min(chunk_end, cta_end):
            owner = cute.arch.popc(cute.arch.vote_ballot_sync(request_end <= iter_idx))
            own = self.own_tiles(tiles, owner)
            own_end, request = cute.arch.shuffle_sync(request_end, owner), chunk * WARP + owner
            tile_iters, offset, key_tiles, head_block, token = self.output_tile_at(
                own, request, own_end, iter_idx, share, paired
            )
            tile_start = iter_idx - offset + overhead_iters
            own_iters = cutlass.min(tile_iters - offset, cta_end - iter_idx)
            first_tile = cutlass.max(offset - overhead_iters, 0)
            own_tiles = cutlass.min(cutlass.max(offset + own_iters - overhead_iters, 0), key_tiles) - first_tile
            if own_tiles > 0:
                info = own.info
                part = TilePart(
                    request,
                    info.offset_q,
                    info.seqlen_q,
                    info.seqlen_k,
                    head_block,
                    token,
                    key_tiles,
                    first_tile,
                    own_tiles,
                    tile_start,
                )
                # A row group may have more clusters than the request has row tiles left.
                if cutlass.const_expr(not self.row_groups) or token < own.seqlen_q:
                    num_produced, num_splits = self.produce_part(part, share, num_produced, num_splits)
            iter_idx += own_iters
        return iter_idx, num_produced, num_splits

    def own_tiles(self, tiles: RequestTiles, owner: cutlass.Int32) -> RequestTiles:
        """The RequestTiles of a lane, in all lanes."""
        if self.exact_pairs:
            return from_lane(tiles, owner)
        own = [cute.arch.shuffle_sync(value, owner) for value in tiles[:-1]]
        return RequestTiles._make([*own, cutlass.Int32(0)])

    @cute.jit
    def share(self, cta: cutlass.Int32, num_clusters: cutlass.Int32, partition: Partition):
        """The CtaShare of a CTA."""
        cta_rank, cluster_idx = cta % self.cluster, cta // self.cluster
        num_groups, group_rank = num_clusters, cutlass.Int32(0)
        partial_cta = cta_rank * num_clusters + cluster_idx
        if cutlass.const_expr(self.row_groups):
            num_groups, group_idx = (
                quotient(num_clusters, partition.row_group),
                quotient(cluster_idx, partition.row_group),
            )
            group_rank = cluster_idx - group_idx * partition.row_group
            # Clusters that are left over have no share, and come last.
            cluster_idx, partial_cta = group_idx, cta
            if group_idx < num_groups:
                partial_cta = (group_rank * self.cluster + cta_rank) * num_groups + group_idx
        return CtaShare(cluster_idx, num_groups, cta_rank, group_rank, partial_cta, partition)

    @cute.jit
    def num_groups(self, num_tiles: cutlass.Int32, row_group: cutlass.Int32):
        """Row groups that process a request's output tiles."""
        if cutlass.const_expr(self.row_groups):
            num_tiles = quotient(num_tiles + row_group - 1, row_group)
        return num_tiles

    @cute.jit
    def produce_part(self, part: TilePart, share: CtaShare, num_produced: cutlass.Int32, num_splits: cutlass.Int32):
        """Produce the work tile of a part; (work tiles produced, splits of the output tile that begins here if any)."""
        iters_per_cta, partial_cta = share.partition.iters_per_cta, share.partial_cta
        split_ranges = self.split_ranges
        partial_idx = cutlass.Int32(NOT_SPLIT)
        if part.num_tiles < part.key_tiles:
            partial_idx = 2 * partial_cta + (1 if part.tile_start >= share.cluster_idx * iters_per_cta else 0)
        num_rows = cutlass.min(part.seqlen_q - part.token, self.tokens_per_tile) * self.key.pack_gqa
        head_block = part.head_block * self.cluster + share.cta_rank
        work = self.split_tile(
            part.request, part.info, head_block, part.token, num_rows, part.first_tile, part.num_tiles, partial_idx
        )
        self.work_pipeline.produce(num_produced, work)
        num_produced += 1
        if part.num_tiles < part.key_tiles and part.tile_start >= share.cluster_idx * iters_per_cta:
            num_splits = quotient(part.tile_start + part.key_tiles - 1, iters_per_cta) - share.cluster_idx + 1
            if cute.arch.lane_idx() == 0:
                (
                    split_ranges[partial_cta, 1],
                    split_ranges[partial_cta, 2],
                    split_ranges[partial_cta, 3],
                ) = (part.offset_q + part.token, head_block, num_rows)
        return num_produced, num_splits

    @cute.jit
    def row_tiles_of_output_tile(self, seqlen_q: cutlass.Int32, paired: cutlass.Int32):
        """2 for pairs, else 1."""
        row_tiles = cutlass.Int32(1)
        if cutlass.const_expr(self.may_pair):
            row_tiles = cutlass.Int32(2) if paired != 0 and seqlen_q > self.tokens_per_tile else row_tiles
        return row_tiles

    @cute.jit
    def tile_iters(self, tiles: RequestTiles, partition: Partition, paired: cutlass.Int32):
        """Iterations of an output tile, or of a pair."""
        overhead_iters = partition.overhead_iters * self.row_tiles_of_output_tile(tiles.seqlen_q, paired)
        return cutlass.max(tiles.key_tiles + overhead_iters, partition.min_tile_iters)

    @cute.jit
    def middle_iters(self, tiles: RequestTiles, partition: Partition):
        """Iterations of the row tile that has no partner; 0 where there is none."""
        iters = cutlass.Int32(0)
        if cutlass.const_expr(self.exact_pairs):
            if tiles.middle_tiles > 0:
                iters = cutlass.max(tiles.middle_tiles + partition.overhead_iters, partition.min_tile_iters)
        return iters

    @cute.jit
    def output_tile_at(
        self,
        tiles: RequestTiles,
        request: cutlass.Int32,
        request_end: cutlass.Int32,
        iter_idx: cutlass.Int32,
        share: CtaShare,
        paired: cutlass.Int32,
    ):
        """The output tile of a request that an iteration belongs to; request_end: the iteration after the request's.

        Returns:
            (its iterations, which of them this is, its key tiles, its head block in a cluster's, its first token); the
            token is beyond the request's queries if the cluster has no tile of its row group.
        """
        partition = share.partition
        tile_iters = self.tile_iters(tiles, partition, paired)
        num_groups = self.num_groups(tiles.num_tiles, partition.row_group)
        middle_iters = self.middle_iters(tiles, partition)
        request_iter = iter_idx - (request_end - num_groups * tile_iters - self.head_blocks * middle_iters)
        if cutlass.const_expr(self.exact_pairs):
            key_tiles, tiles_per_head_block = tiles.key_tiles, tiles.num_tiles // self.head_blocks
            head_block_iters = tiles_per_head_block * tile_iters + middle_iters
            head_block = quotient(request_iter, head_block_iters)
            head_block_iter = request_iter - head_block * head_block_iters
            # The middle has fewer iterations than a pair.
            row_tile = quotient(head_block_iter, tile_iters)
            offset = head_block_iter - row_tile * tile_iters
            if row_tile == tiles_per_head_block:
                tile_iters = middle_iters
        else:
            tile_idx = quotient(request_iter, tile_iters)
            offset = request_iter - tile_idx * tile_iters
            if cutlass.const_expr(self.row_groups):
                tile_idx = tile_idx * partition.row_group + share.group_rank
            tiles_per_head_block = tiles.num_tiles // self.head_blocks
            head_block, row_tile, key_tiles = tile_idx, cutlass.Int32(0), tiles.key_tiles
            if tiles_per_head_block > 1:
                head_block = quotient(tile_idx, tiles_per_head_block)
                row_tile = tile_idx - head_block * tiles_per_head_block
        if cutlass.const_expr(self.may_pair):
            if self.row_tiles_of_output_tile(tiles.seqlen_q, paired) > 1:
                window_size_right = self.mask.window_size_right(request)
                later = self.num_row_tiles(tiles.seqlen_q) - 1 - row_tile
                _, key_tiles = self.n_block_range(tiles.info, later * self.tokens_per_tile, window_size_right)
                later_iters = key_tiles + partition.overhead_iters
                if offset >= later_iters and later > row_tile:
                    _, key_tiles = self.n_block_range(tiles.info, row_tile * self.tokens_per_tile, window_size_right)
                    tile_iters, offset = tile_iters - later_iters, offset - later_iters
                else:
                    if later > row_tile:
                        tile_iters = later_iters
                    row_tile = later
        token = row_tile * self.tokens_per_tile
        if cutlass.const_expr(self.row_groups):
            token = token if tile_idx < tiles.num_tiles else tiles.seqlen_q
        return tile_iters, offset, key_tiles, head_block, token

    @cute.jit
    def partition(
        self,
        first_chunk: RequestTiles,
        num_requests: cutlass.Int32,
        lane: cutlass.Int32,
        num_ctas: cutlass.Int32,
        paired: cutlass.Int32,
    ):
        """The Partition of all output tiles, or pairs of them, among so many CTAs, or clusters."""
        total_iters, num_tiles, row_tiles = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        group_iters, num_groups, row_group = cutlass.Int32(0), cutlass.Int32(0), self.requests.row_group
        most_key_tiles, fewest_key_tiles = cutlass.Int32(1), cutlass.Int32(UNBOUNDED)
        for chunk in cutlass.range(cute.ceil_div(num_requests, WARP), unroll=1):
            tiles = self.chunk_tiles(first_chunk, chunk, lane, num_requests, paired)
            total_iters += tiles.num_tiles * tiles.key_tiles
            num_tiles += tiles.num_tiles
            if cutlass.const_expr(self.exact_pairs):
                if tiles.middle_tiles > 0:
                    total_iters += self.head_blocks * tiles.middle_tiles
                    num_tiles += self.head_blocks
                    row_tiles += self.head_blocks
            if cutlass.const_expr(self.row_groups):
                groups = self.num_groups(tiles.num_tiles, row_group)
                group_iters += groups * tiles.key_tiles
                num_groups += groups
            row_tiles_each = self.row_tiles_of_output_tile(tiles.seqlen_q, paired)
            row_tiles += tiles.num_tiles * row_tiles_each
            if tiles.num_tiles > 0:
                most_key_tiles = cutlass.max(most_key_tiles, tiles.key_tiles)
                fewest_key_tiles = cutlass.min(fewest_key_tiles, quotient(tiles.key_tiles, row_tiles_each))
        total_iters, num_tiles = (cute.arch.warp_redux_sync(value, "add") for value in (total_iters, num_tiles))
        most_key_tiles = cute.arch.warp_redux_sync(most_key_tiles, "max")
        fewest_key_tiles = cute.arch.warp_redux_sync(fewest_key_tiles, "min")
        row_tiles = cute.arch.warp_redux_sync(row_tiles, "add")
        if cutlass.const_expr(self.row_groups):
            group_iters, num_groups = (cute.arch.warp_redux_sync(value, "add") for value in (group_iters, num_groups))
            if self.row_groups_pay(total_iters, group_iters, num_ctas):
                total_iters, num_tiles, row_tiles = group_iters, num_groups, num_groups
                num_ctas = quotient(num_ctas, row_group)
            else:
                row_group = cutlass.Int32(1)
        iters_per_cta = quotient(total_iters + num_ctas - 1, num_ctas)
        partial_tiles = self.key_tiles_of_partials()
        if most_key_tiles > MAX_SPLITS_BELOW_MIN * iters_per_cta or partial_tiles > iters_per_cta:
            iters_per_cta = cutlass.max(iters_per_cta, self.least_split_tiles(most_key_tiles))
        overhead_iters, min_tile_iters = cutlass.Int32(0), cutlass.Int32(0)
        unsplit_iters = quotient(num_tiles + num_ctas - 1, num_ctas) * most_key_tiles
        if self.splits_cost_more(unsplit_iters, iters_per_cta, most_key_tiles, num_tiles, num_ctas):
            # Combining would cost more than the time that CTAs with shorter output tiles, or with none, are idle.
            total_iters, iters_per_cta, min_tile_iters = num_tiles * most_key_tiles, unsplit_iters, most_key_tiles
        elif self.even_splits_suffice(iters_per_cta, most_key_tiles, num_tiles, num_ctas):
            splits, iters_per_cta = even_split_iters(most_key_tiles, num_tiles, num_ctas)
            min_tile_iters = splits * iters_per_cta
            total_iters = num_tiles * min_tile_iters
        elif fewest_key_tiles < cutlass.min(iters_per_cta, most_key_tiles):
            overhead_iters = cutlass.Int32(OVERHEAD_ITERS)
            total_iters += row_tiles * overhead_iters
            iters_per_cta = cutlass.max(quotient(total_iters + num_ctas - 1, num_ctas), iters_per_cta)
        return Partition(row_group, total_iters, iters_per_cta, overhead_iters, min_tile_iters, most_key_tiles)

    @cute.jit
    def least_split_tiles(self, most_key_tiles: cutlass.Int32):
        """Key tiles of a split at least; with `short_splits` up to sqrt(most_key_tiles / SPLITS_PER_TILE), rounded."""
        least = cutlass.Int32(self.rule.min_tiles)
        if cutlass.const_expr(self.rule.short_splits):
            least = cutlass.Int32(1)
            for tiles in cutlass.range_constexpr(2, self.rule.min_tiles + 1):
                # The root is at least tiles - 1/2.
                rounds_up = 4 * most_key_tiles >= SPLITS_PER_TILE * (2 * tiles - 1) ** 2
                least = cutlass.Int32(tiles) if rounds_up else least
        return least

    @cute.jit
    def row_groups_pay(self, total_iters: cutlass.Int32, group_iters: cutlass.Int32, num_ctas: cutlass.Int32):
        """Whether the iterations of a cluster are not too many more in row groups, where some are idle."""
        row_group = self.requests.row_group
        num_groups = quotient(num_ctas, row_group)
        iters = quotient(total_iters + num_ctas - 1, num_ctas)
        pays = cutlass.Boolean(False)
        if row_group > 1 and num_groups > 0:
            # In float: hundredths of the iterations may exceed int32.
            grouped = quotient(group_iters + num_groups - 1, num_groups)
            most = self.requests.row_group_iters.to(cutlass.Float32) * iters.to(cutlass.Float32)
            pays = grouped.to(cutlass.Float32) * 100.0 <= most
        return pays

    @cute.jit
    def splits_cost_more(
        self,
        unsplit_iters: cutlass.Int32,
        iters_per_cta: cutlass.Int32,
        most_key_tiles: cutlass.Int32,
        num_tiles: cutlass.Int32,
        num_ctas: cutlass.Int32,
    ):
        """Whether no output tile is to be split, so that a CTA has up to `unsplit_iters` iterations.

        Args:
            iters_per_cta: where output tiles are split.
            num_tiles: output tiles, or pairs.
        """
        return self.combining_costs_more(unsplit_iters, iters_per_cta)

    @cute.jit
    def combining_costs_more(self, unsplit_iters: cutlass.Int32, iters_per_cta: cutlass.Int32):
        """Whether combining takes longer than the time for which CTAs are idle without splits."""
        if cutlass.const_expr(self.rule.idle_eighths > 0):
            unsplit_iters -= unsplit_iters * self.rule.idle_eighths // 8
        return unsplit_iters <= iters_per_cta + self.rule.combine_tiles + self.key_tiles_of_partials()

    @cute.jit
    def even_splits_suffice(
        self,
        iters_per_cta: cutlass.Int32,
        most_key_tiles: cutlass.Int32,
        num_tiles: cutlass.Int32,
        num_ctas: cutlass.Int32,
    ):
        """Whether every output tile is to have as many CTAs as the others, so that none has parts of two.

        CTAs are left over, but each of the others leaves one partial result in place of two.
        """
        suffice = cutlass.Boolean(False)
        if cutlass.const_expr(self.rule.even_splits):
            if num_tiles > 0 and num_tiles <= num_ctas:
                even_iters = even_split_iters(most_key_tiles, num_tiles, num_ctas)[1]
                suffice = even_iters >= iters_per_cta and self.combining_costs_more(even_iters, iters_per_cta)
        return suffice

    @cute.jit
    def key_tiles_of_partials(self):
        """The two partial results that a CTA may leave, in key tiles of as many bytes."""
        row_bytes = cutlass.const_expr(2 * 4 * self.key.columns)
        tile_bytes = cutlass.const_expr(self.tile_n * self.key.key_bytes)
        return (self.requests.rows * row_bytes + tile_bytes // 2) // tile_bytes

    @cute.jit
    def split_tile(
        self,
        request: cutlass.Int32,
        info: SeqlenInfo,
        head_block: cutlass.Int32,
        token: cutlass.Int32,
        num_rows: cutlass.Int32,
        first_tile: cutlass.Int32,
        num_key_tiles: cutlass.Int32,
        partial_idx: cutlass.Int32,
    ):
        """A row tile against key tiles `first_tile` ... of the output tile; all that it sees where it is not split."""
        q_position = info.seqlen_k - info.seqlen_q + token
        window_size_right = self.mask.window_size_right(request)
        n_block_min = self.mask.n_block_min(info.seqlen_k - info.seqlen_q) + first_tile
        n_block_max = n_block_min + num_key_tiles
        if partial_idx == NOT_SPLIT:
            n_block_min, n_block_max = self.n_block_range(info, token, window_size_right)
        tile = RowTile(
            request=request,
            q_offset=info.offset_q + token,
            num_rows=num_rows,
            head_block=head_block,
            q_position=q_position,
            seqlen_k=info.seqlen_k,
            window_size_right=window_size_right,
        )
        return self.mask.work_tile(tile, n_block_min, n_block_max, partial_idx)
