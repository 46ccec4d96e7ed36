# SPDX-License-Identifier: Apache-2.0
"""The schedule role: one warp finds the block's next work from the lengths on the device."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import NOT_SPLIT, WorkTile, no_work_tile
from dsl_backend.primitives.math import quotient

FAR = 1 << 30  # a window that ends nowhere
# Key tiles that a block may have beyond its share where that leaves ranges whole: a merge takes 3 to 4 us on an H200
# besides reading what the blocks left, which is worth 4 more tiles with 64 rows of MLA. A dense tile takes some 2 us,
# and one of MLA has twice the bytes.
SPARED, SPARED_LATENT = 2, 1
# Parts of a range up to which a block may have fewer tiles than the least share, where what it leaves is no more than
# they are: as many parts as the merge kernel reads at once. MLA with shares of 1 tile instead of 2 took 10.6 us instead
# of 11.5 with 4 parts a range, and 13.1 instead of 12.1 with 128, on an H200; with 64 rows, which are 4 tiles, shares
# of 2 took 20.8 instead of 19.6 with 4.
FEW_PARTS = 64
# Key tiles that an item costs besides its own, where short ranges share a block: 0.4 of heads of 128, 0.6 of 64 on an
# H200, for the latency of its first tile and for its result.
ITEM_TILES = 1
WARP = 32
# Of keys and values that row tiles of the same length are taken together for: half an H200's L2.
SECTION_BYTES = 25 << 20
SHORT = 4  # key tiles of an item beside which the next one is claimed at once


class Requests(NamedTuple):
    """A batch, as `spec.Batch` has it; windows of a layer; the query lengths that are served.

    `rows` are those of a partial result: no row tile has more.
    """

    cu_seqlens_q: cute.Tensor
    seqused_k: cute.Tensor
    page_table: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    causal: cute.Tensor | None
    window_size_left: cutlass.Int32
    window_size_right: cutlass.Int32
    min_seqlen_q: cutlass.Int32
    max_seqlen_q: cutlass.Int32
    rows: cutlass.Int32


@cute.jit
def sum_through(value: cutlass.Int32):
    """Sum over this lane and those before it."""
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << bit, mask_and_clamp=0)
        value += other if cute.arch.lane_idx() >= (1 << bit) else 0
    return value


@cute.jit
def window_right(key: cutlass.Constexpr, requests: Requests, request):
    """How many keys after its own position a query of the request sees."""
    window_size_right = cutlass.Int32(FAR)
    if cutlass.const_expr(key.has_window_right):
        window_size_right = requests.window_size_right
    if cutlass.const_expr(key.causality == "causal"):
        window_size_right = cutlass.Int32(0)
    if cutlass.const_expr(key.causality == "per_request"):
        window_size_right = cutlass.Int32(0) if requests.causal[request] != 0 else window_size_right
    return window_size_right


@cute.jit
def seqlens_of(requests: Requests, request, count):
    """A lane's request: first query row, queries, keys; all 0 behind the last one."""
    first, seqlen_q, seqlen_k = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    if request < count:
        first = requests.cu_seqlens_q[request]
        seqlen_q = requests.cu_seqlens_q[request + 1] - first
        seqlen_k = requests.seqused_k[request]
    return first, seqlen_q, seqlen_k


@cute.jit
def work_tile_of(
    key: cutlass.Constexpr,
    requests: Requests,
    tile_n: cutlass.Constexpr[int],
    request,
    query,
    rows,
    head_block,
    position,
    seqlen_k,
    n_block_min,
    n_block_max,
    window_size_right,
    slot,
):
    """The item of a row tile and the key tiles begin ... end, with those of them that every row sees whole."""
    n_block_full_min, whole_stop = n_block_min, seqlen_k
    if cutlass.const_expr(key.has_window_left):
        last = position + rows // key.pack_gqa - 1
        n_block_full_min = (cutlass.max(last - requests.window_size_left, 0) + tile_n - 1) // tile_n
    if cutlass.const_expr(key.has_window_right or key.causality != "full"):
        whole_stop = cutlass.min(seqlen_k, cutlass.max(position + window_size_right + 1, 0))
    n_block_full_max = cutlass.max(cutlass.min(whole_stop // tile_n, n_block_max), n_block_min)
    n_block_full_min = cutlass.min(cutlass.max(n_block_full_min, n_block_min), n_block_full_max)
    source = request
    if cutlass.const_expr(key.page_size == 0):
        source = requests.cu_seqlens_k[request]
    return WorkTile(
        valid=cutlass.Int32(1),
        q_offset=query,
        num_rows=rows,
        head_block=head_block,
        q_position=position,
        seqlen_k=seqlen_k,
        n_block_min=n_block_min,
        n_block_max=n_block_max,
        n_block_full_min=n_block_full_min,
        n_block_full_max=n_block_full_max,
        window_size_right=window_size_right,
        kv_source=source,
        partial_idx=slot,
    )


class StaticPersistentTileScheduler:
    """Whole query tiles, dealt out in turn: a request's last first, which see the most keys, all heads side by side.

    Blocks of a cluster get neighbouring units of a tile.
    """

    def __init__(self, key, work_pipeline, tokens_per_tile: int, tile_n: int, requests: Requests):
        self.key, self.work_pipeline, self.requests = key, work_pipeline, requests
        self.tokens_per_tile, self.tile_n = tokens_per_tile, tile_n
        self.head_blocks = key.head_blocks

    @cute.jit
    def run(self):
        count = cutlass.Int32(cute.size(self.requests.seqused_k))
        lane = cute.arch.lane_idx()
        place, step = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        posted = cutlass.Int32(0)
        seen = cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, seqlen_q, seqlen_k = seqlens_of(self.requests, request, count)
            tiles = self.items_of(seqlen_q, seqlen_k)
            if seqlen_q < self.requests.min_seqlen_q or seqlen_q > self.requests.max_seqlen_q:
                tiles = cutlass.Int32(0)
            through = sum_through(tiles) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < seen:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                values = [cute.arch.shuffle_sync(value, owner) for value in (first, seqlen_q, seqlen_k, tiles, through)]
                self.work_pipeline.produce(posted, self.item(place, chunk * WARP + owner, *values))
                posted += 1
                place += step
        self.work_pipeline.produce(posted, no_work_tile())

    @cute.jit
    def items_of(self, seqlen_q, seqlen_k):
        return (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile * self.head_blocks

    @cute.jit
    def item(self, place, request, first, seqlen_q, seqlen_k, tiles, through):
        local = place - (through - tiles)
        row = (tiles // self.head_blocks - 1 - local // self.head_blocks) * self.tokens_per_tile
        window_size_right = window_right(self.key, self.requests, request)
        return self.tile(request, first, seqlen_q, seqlen_k, local % self.head_blocks, row, window_size_right)

    @cute.jit
    def range_of(self, seqlen_q, seqlen_k, row, window_size_right):
        """The key tiles of the row tile that begins at a token of a request: begin, end."""
        position = seqlen_k - seqlen_q + row
        n_block_min, stop = cutlass.Int32(0), seqlen_k
        if cutlass.const_expr(self.key.has_window_left):
            n_block_min = cutlass.max(position - self.requests.window_size_left, 0) // self.tile_n
        if cutlass.const_expr(self.key.has_window_right or self.key.causality != "full"):
            tokens = cutlass.min(seqlen_q - row, self.tokens_per_tile)
            stop = cutlass.min(seqlen_k, cutlass.max(position + tokens + window_size_right, 0))
        # At least one tile, so that every row is written.
        return n_block_min, cutlass.max((stop + self.tile_n - 1) // self.tile_n, n_block_min + 1)

    @cute.jit
    def tile(self, request, first, seqlen_q, seqlen_k, head_block, row, window_size_right):
        """The item of a row tile."""
        n_block_min, n_block_max = self.range_of(seqlen_q, seqlen_k, row, window_size_right)
        return self.part(
            request,
            first,
            seqlen_q,
            seqlen_k,
            head_block,
            row,
            window_size_right,
            n_block_min,
            n_block_max,
            cutlass.Int32(NOT_SPLIT),
        )

    @cute.jit
    def part(
        self, request, first, seqlen_q, seqlen_k, head_block, row, window_size_right, n_block_min, n_block_max, slot
    ):
        """The item of some key tiles of a row tile; slot: of its result, WHOLE where there is no other part."""
        rows = cutlass.min(seqlen_q - row, self.tokens_per_tile) * self.key.pack_gqa
        return work_tile_of(
            self.key,
            self.requests,
            self.tile_n,
            request,
            first + row,
            rows,
            head_block,
            seqlen_k - seqlen_q + row,
            seqlen_k,
            n_block_min,
            n_block_max,
            window_size_right,
            slot,
        )


class DynamicPersistentTileScheduler(StaticPersistentTileScheduler):
    """Whole query tiles, claimed by whoever comes to their end: those with the most key tiles first, all heads side by
    side (longest processing time first: Graham, 1969). Requests whose keys fit into L2 together come before others.

    Dealt out in turn, 16 heads of prompts of 1024 tokens give one of 132 blocks 1.44 times the average to do: 128 items
    of a request are nearly a round of the blocks, and the same ones always got the longest.

    Args:
        claims: the workspace's counters: items claimed behind the first of each block, and blocks at their end. They
            are 0 before and after a launch.
    """

    def __init__(self, key, work_pipeline, tokens_per_tile: int, tile_n: int, requests: Requests, claims):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.claims = claims
        key_bytes = key.heads_kv * (key.head_dim + key.head_dim_v) * key.kv.itemsize
        self.section_keys = max(SECTION_BYTES // key_bytes, 1)

    @cute.jit
    def run(self):
        lane, num_ctas = cute.arch.lane_idx(), cutlass.Int32(cute.arch.grid_dim()[0])
        place, posted = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(0)
        _, posted, _ = self.produce_from(place, posted, 0, lane, num_ctas)
        self.work_pipeline.produce(posted, no_work_tile())
        self.leave(num_ctas)

    @cute.jit
    def produce_from(self, place, posted, passed, lane, num_ctas):
        """Post items from a place on, as long as the next place lies behind the last one.

        Args:
            posted, passed: of the places before, those whose items were posted, and those that have none.

        Returns:
            (the first place whose item was not posted, items posted, items there are)
        """
        count, seen = cutlass.Int32(cute.size(self.requests.seqused_k)), cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, seqlen_q, seqlen_k = seqlens_of(self.requests, request, count)
            window_size_right = cutlass.Int32(0)
            if request < count:
                window_size_right = window_right(self.key, self.requests, request)
            left = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile
            if seqlen_q < self.requests.min_seqlen_q or seqlen_q > self.requests.max_seqlen_q:
                left = cutlass.Int32(0)
            section = (sum_through(seqlen_k) - seqlen_k) // self.section_keys
            largest, mine = self.foremost(seqlen_q, seqlen_k, window_size_right, left, section)
            while largest > 0:
                members = cute.arch.vote_ballot_sync(mine != 0)
                rank = cute.arch.popc(members & cute.arch.lanemask_lt())
                items = cute.arch.popc(members) * self.head_blocks
                while self.among(place, seen, items):
                    chosen = cute.arch.vote_ballot_sync(mine != 0 and rank == (place - seen) // self.head_blocks)
                    owner = cute.arch.popc(chosen - 1)
                    row = (left - 1) * self.tokens_per_tile
                    values = [cute.arch.shuffle_sync(value, owner) for value in (first, seqlen_q, seqlen_k)]
                    row, own_right = (
                        cute.arch.shuffle_sync(row, owner),
                        cute.arch.shuffle_sync(window_size_right, owner),
                    )
                    work = self.tile(chunk * WARP + owner, *values, (place - seen) % self.head_blocks, row, own_right)
                    self.work_pipeline.produce(posted, work)
                    if work.n_block_max - work.n_block_min > SHORT:
                        # What is claimed while the last item waits is a block's own for as long as both take.
                        self.work_pipeline.wait_consumed(posted)
                    posted += 1
                    place = self.next_place(posted + passed, num_ctas)
                seen += items
                left -= mine
                largest, mine = self.foremost(seqlen_q, seqlen_k, window_size_right, left, section)
        return place, posted, seen

    def among(self, place, seen, items):
        """Whether a place is that of one of so many items behind those seen. Places only grow."""
        return place < seen + items

    def next_place(self, had, num_ctas):
        """The place behind so many others that the block had; its first is its own number."""
        return self.claim() + num_ctas

    @cute.jit
    def foremost(self, seqlen_q, seqlen_k, window_size_right, left, section):
        """The most key tiles of any request's next row tile, 0 if none is left; and whether it is the lane's: 0 or 1.

        Args:
            left: row tiles of the lane's request that are not yet dealt with.
            section: of the lane's request; the first one with row tiles left counts alone.
        """
        last, tiles = cutlass.Int32(0x7FFFFFFF), cutlass.Int32(0)
        if left > 0:
            last = section
        if section == cute.arch.warp_redux_sync(last, "min"):
            if left > 0:
                n_block_min, n_block_max = self.range_of(
                    seqlen_q, seqlen_k, (left - 1) * self.tokens_per_tile, window_size_right
                )
                tiles = n_block_max - n_block_min
        largest = cute.arch.warp_redux_sync(tiles, "max")
        mine = cutlass.Int32(1) if tiles > 0 and tiles == largest else cutlass.Int32(0)
        return largest, mine

    @cute.jit
    def claim(self):
        """How many items blocks have claimed before, but for each one's first."""
        before, claims = cutlass.Int32(0), self.claims
        if cute.arch.lane_idx() == 0:
            before = cute.arch.atomic_add(claims.iterator, cutlass.Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(before, 0)

    @cute.jit
    def leave(self, num_ctas):
        """The last block to leave clears the counters for the next launch."""
        claims = self.claims
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_gpu()
            ended = cute.arch.atomic_add(claims.iterator + 1, cutlass.Int32(1), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
            if ended == num_ctas - 1:
                claims[0] = cutlass.Int32(0)
                claims[1] = cutlass.Int32(0)


@cute.jit
def own_range(key: cutlass.Constexpr, tile_n: cutlass.Constexpr[int], requests: Requests, least, seqlen_q, seqlen_k):
    """A request's first key tile, how many it has, and how many one of its shares: nothing else counts."""
    n_block_min = cutlass.Int32(0)
    if cutlass.const_expr(key.has_window_left):
        n_block_min = cutlass.max(seqlen_k - seqlen_q - requests.window_size_left, 0) // tile_n
    # At least one tile, so that every row is written.
    tiles = cutlass.max((seqlen_k + tile_n - 1) // tile_n - n_block_min, 1)
    return n_block_min, tiles, cutlass.max((tiles + key.max_splits - 1) // key.max_splits, least)


@cute.jit
def row_tile_of(first, request, tile, tile_tokens: cutlass.Constexpr):
    """A number for a request's row tile that no other tile of the batch has, whatever lies before it.

    Below `row_tiles` of the batch.

    Args:
        first: the request's first query row.
        tile_tokens: tokens of a row tile; None where one has all of a request.
    """
    number = request
    if cutlass.const_expr(tile_tokens == 1):
        number = first + tile
    elif cutlass.const_expr(tile_tokens is not None):
        number = request + first // tile_tokens + tile
    return number


def row_tiles(requests: int, tokens: int, tile_tokens: int | None) -> int:
    """Bound of a batch's row tiles."""
    if tile_tokens is None:
        return requests
    return tokens if tile_tokens == 1 else requests + -(-tokens // tile_tokens)


class SplitKVTileScheduler(StaticPersistentTileScheduler):
    """Shares of each request's own key range, dealt out in turn, all heads of a share side by side.

    What is summed in one piece, and what is merged in which order, then depends on the request's lengths alone. Share
    `part` of a unit's row tile leaves its partial result in slot (row tile * units + unit) * shares + part.

    Args:
        several: whether a request may have several row tiles.
    """

    def __init__(
        self,
        key,
        work_pipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        least: int,
        several: bool = False,
    ):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.least, self.tile_tokens = least, tokens_per_tile if several else None

    @cute.jit
    def items_of(self, seqlen_q, seqlen_k):
        _, tiles, share = own_range(self.key, self.tile_n, self.requests, self.least, seqlen_q, seqlen_k)
        row_tiles = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile
        return row_tiles * ((tiles + share - 1) // share) * self.head_blocks

    @cute.jit
    def item(self, place, request, first, seqlen_q, seqlen_k, items, through):
        local = place - (through - items)
        first_tile, tiles, share = own_range(self.key, self.tile_n, self.requests, self.least, seqlen_q, seqlen_k)
        parts = (tiles + share - 1) // share
        head_block, local = local % self.head_blocks, local // self.head_blocks
        part, tile = local % parts, local // parts
        n_block_min = first_tile + part * share
        n_block_max = cutlass.min(n_block_min + share, first_tile + tiles)
        slot = cutlass.Int32(NOT_SPLIT)
        if parts > 1:
            number = row_tile_of(first, request, tile, self.tile_tokens)
            slot = (number * self.head_blocks + head_block) * self.key.max_splits + part
        row = tile * self.tokens_per_tile
        window_size_right = window_right(self.key, self.requests, request)
        return self.part(
            request, first, seqlen_q, seqlen_k, head_block, row, window_size_right, n_block_min, n_block_max, slot
        )


@cute.jit
def splits_of(key: cutlass.Constexpr, tile_n: cutlass.Constexpr[int], requests: Requests, seqlen_q, seqlen_k):
    """A request's first split, and how many it has: those that any of its queries may see."""
    n_block_min = cutlass.Int32(0)
    if cutlass.const_expr(key.has_window_left):
        n_block_min = cutlass.max(seqlen_k - seqlen_q - requests.window_size_left, 0) // tile_n
    tiles = cutlass.max((seqlen_k + tile_n - 1) // tile_n, n_block_min + 1)
    first = n_block_min // key.tiles_per_split
    return first, (tiles - 1) // key.tiles_per_split - first + 1


class FixedSplitKVTileScheduler(StaticPersistentTileScheduler):
    """Splits that begin at fixed keys, whatever the batch and the queries: what is summed in one piece never changes.

    A request's row tiles are processed split by split where there are slots for the partial results. Requests for which
    none are left are processed row tile by row tile, and their splits are folded where they are made: the same bits.
    The order of work tiles is: part of the range, row tile, unit.

    Args:
        bases: [requests], receives each request's first slot; -1 where there is nothing to combine.
        slots: how many partial results there is room for.
    """

    def __init__(self, key, work_pipeline, tokens_per_tile: int, tile_n: int, requests: Requests, bases, slots):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.bases, self.slots = bases, slots

    @cute.jit
    def run(self):
        count, bases = cutlass.Int32(cute.size(self.requests.seqused_k)), self.bases
        lane = cute.arch.lane_idx()
        place, step = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        posted, seen, seen_slots = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        writes = place == 0
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, seqlen_q, seqlen_k = seqlens_of(self.requests, request, count)
            _, parts = splits_of(self.key, self.tile_n, self.requests, seqlen_q, seqlen_k)
            row_tiles = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile
            if seqlen_q < self.requests.min_seqlen_q or seqlen_q > self.requests.max_seqlen_q:
                row_tiles = cutlass.Int32(0)
            wanted = row_tiles * parts * self.head_blocks
            if parts == 1:
                wanted = cutlass.Int32(0)
            slots_through = sum_through(wanted) + seen_slots
            seen_slots = cute.arch.shuffle_sync(slots_through, WARP - 1)
            base = slots_through - wanted
            if wanted == 0 or slots_through > self.slots:
                base, parts = cutlass.Int32(-1), cutlass.Int32(1)
            if writes and request < count:
                bases[request] = base
            items = row_tiles * parts * self.head_blocks
            through = sum_through(items) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < seen:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                mine = [cute.arch.shuffle_sync(value, owner) for value in (first, seqlen_q, seqlen_k, parts, base)]
                local = place - cute.arch.shuffle_sync(through - items, owner)
                self.work_pipeline.produce(posted, self.item_of(chunk * WARP + owner, local, *mine))
                posted += 1
                place += step
        self.work_pipeline.produce(posted, no_work_tile())

    @cute.jit
    def item_of(self, request, local, first, seqlen_q, seqlen_k, parts, base):
        """The work tile at a place among those of a request."""
        head_block, rest = local % self.head_blocks, local // self.head_blocks
        part, tile = rest % parts, rest // parts
        row, window_size_right = tile * self.tokens_per_tile, window_right(self.key, self.requests, request)
        n_block_min, n_block_max = self.range_of(seqlen_q, seqlen_k, row, window_size_right)
        slot = cutlass.Int32(NOT_SPLIT)
        if base >= 0:
            slot = base + local
            split, _ = splits_of(self.key, self.tile_n, self.requests, seqlen_q, seqlen_k)
            from_tile = (split + part) * self.key.tiles_per_split
            n_block_min = cutlass.max(n_block_min, from_tile)
            n_block_max = cutlass.min(n_block_max, from_tile + self.key.tiles_per_split)
            if n_block_min >= n_block_max:
                # No row of the tile sees the split: one tile of it, wholly masked, leaves an empty partial result.
                n_block_min, n_block_max = from_tile, from_tile + 1
        return self.part(
            request, first, seqlen_q, seqlen_k, head_block, row, window_size_right, n_block_min, n_block_max, slot
        )


class SplitRange(NamedTuple):
    """A range that begins in a block's share and goes on behind it: what the block leaves for the merge kernel.

    Attributes:
        parts: blocks that have some of it; 0 where there is no such range, and the others mean nothing.
        query: its first query row. rows: of its row tile.
    """

    parts: cutlass.Int32
    query: cutlass.Int32
    head_block: cutlass.Int32
    rows: cutlass.Int32


SPLIT_RANGE_FIELDS = len(SplitRange._fields)


class BalancedSplitKVTileScheduler(StaticPersistentTileScheduler):
    """Equal, contiguous shares of all the key tiles of the batch (stream-K: Osama et al., 2023).

    Where requests shorter than a share are beside longer ones, a range begins with ITEM_TILES places without a tile:
    else who gets many short ranges would have as many tiles to do as all others, and all their items besides. Where
    ranges are not to be cut, all have as many places as the longest.

    A key range that crosses blocks leaves partial results. A block holds two at most: that of a range which began
    before it, in slot 2b, and that of one which goes on after it, in slot 2b + 1. Blocks of a cluster have the same
    share, of neighbouring units: the first ones' slots come before all second ones'.

    A range counts all keys of its request, although a prompt's first rows see few of them, unless prompts are folded:
    then a request's row tiles lie in pairs, the last with the first and so on inwards. What the two see together
    is nearly the same for every pair, so that all pairs of a request have as many places.

    Args:
        cuts: [blocks, fields of a Cut], which blocks write.
        folds: whether prompts may be folded, which costs nothing where there is none.
    """

    def __init__(
        self,
        key,
        work_pipeline,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        split_ranges,
        least: int,
        cluster: int = 1,
        spared: int = SPARED,
        folds: bool = False,
    ):
        super().__init__(key, work_pipeline, tokens_per_tile, tile_n, requests)
        self.cluster, self.head_blocks = cluster, key.head_blocks // cluster
        self.split_ranges, self.least, self.spared = split_ranges, least, spared
        self.folds = folds and key.causality != "full" and not key.has_window_left

    @cute.jit
    def read(self, request, count, folded):
        """A lane's request: first query row, queries, keys, key tiles of a range or pair, and how many of these."""
        first, seqlen_q, seqlen_k = seqlens_of(self.requests, request, count)
        n_block_min = self.first_tile(seqlen_q, seqlen_k)
        # At least one tile, so that every row is written.
        tiles = cutlass.max((seqlen_k + self.tile_n - 1) // self.tile_n - n_block_min, 1)
        row_tiles = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile
        if cutlass.const_expr(self.folds):
            if folded != 0 and row_tiles > 1:
                window_size_right = window_right(self.key, self.requests, request)
                tiles = self.tiles_of_pair(seqlen_q, seqlen_k, tiles, row_tiles, window_size_right)
                row_tiles = (row_tiles + 1) // 2
        ranges = row_tiles * self.head_blocks
        if seqlen_q < self.requests.min_seqlen_q or seqlen_q > self.requests.max_seqlen_q:
            ranges = cutlass.Int32(0)
        return first, seqlen_q, seqlen_k, tiles, ranges

    @cute.jit
    def tiles_of_pair(self, seqlen_q, seqlen_k, tiles, row_tiles, window_size_right):
        """The most that two row tiles of a request see together.

        Row tile t sees as many steps of keys as 1 + t and what lies before the request's queries make up, of which
        `per_tile` are a key tile; two see `steps`. Of a + b = steps, a and b are at most (steps - 2) / per_tile + 2
        together where each is rounded up to key tiles.

        Args:
            tiles: that the last one sees.
        """
        step = self.tokens_per_tile if self.tile_n % self.tokens_per_tile == 0 else 1
        of_row_tile, per_tile = self.tokens_per_tile // step, self.tile_n // step
        # Behind its queries a request has no keys.
        before, behind = seqlen_k - seqlen_q + step - 1, cutlass.min(window_size_right, seqlen_q) + step - 1
        steps = (row_tiles + 1) * of_row_tile + 2 * (before // step) + 2 * (behind // step)
        # One that sees nothing has a tile as well.
        both = cutlass.max((steps - 2) // per_tile + 2, tiles + 1)
        return cutlass.min(both, 2 * tiles)

    @cute.jit
    def read_chunk(self, held, chunk, lane, count, folded):
        """What `read` gives of the lane's request in a chunk of WARP; held: in the first one, often the only one."""
        first, seqlen_q, seqlen_k, tiles, ranges = held
        if chunk > 0:
            first, seqlen_q, seqlen_k, tiles, ranges = self.read(chunk * WARP + lane, count, folded)
        return first, seqlen_q, seqlen_k, tiles, ranges

    @cute.jit
    def first_tile(self, seqlen_q, seqlen_k):
        """The first that any query of a request sees."""
        n_block_min = cutlass.Int32(0)
        if cutlass.const_expr(self.key.has_window_left):
            n_block_min = cutlass.max(seqlen_k - seqlen_q - self.requests.window_size_left, 0) // self.tile_n
        return n_block_min

    @cute.jit
    def run(self):
        count = cutlass.Int32(cute.size(self.requests.seqused_k))
        lane = cute.arch.lane_idx()
        place_in_grid, num_ctas = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        rank, block, num_ctas = place_in_grid % self.cluster, place_in_grid // self.cluster, num_ctas // self.cluster
        mine = rank * num_ctas + block
        folded = cutlass.Int32(0)
        held = self.read(lane, count, folded)
        total, share, lead, least_span = self.even_shares(held, count, lane, num_ctas, folded)
        if cutlass.const_expr(self.folds):
            # Where no block has two ranges, the longest one is all that counts.
            if (least_span == 0 or share > least_span) and self.requests.max_seqlen_q > self.tile_n:
                folded = cutlass.Int32(1)
                held = self.read(lane, count, folded)
                total, share, lead, least_span = self.even_shares(held, count, lane, num_ctas, folded)
        place = block * share
        share_end = cutlass.min(place + share, total)
        posted, parts, seen = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        split_ranges = self.split_ranges
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            values = self.read_chunk(held, chunk, lane, count, folded)
            through = sum_through(values[4] * self.span(values, lead, least_span, folded)) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < cutlass.min(seen, share_end):
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                of_owner = [cute.arch.shuffle_sync(value, owner) for value in values]
                behind, request = cute.arch.shuffle_sync(through, owner), chunk * WARP + owner
                span, offset, of_range, head_block, row = self.range_at(
                    of_owner, request, behind, place, lead, least_span, folded
                )
                start = place - offset + lead
                places = cutlass.min(span - offset, share_end - place)
                tile = cutlass.max(offset - lead, 0)
                taken = cutlass.min(cutlass.max(offset + places - lead, 0), of_range) - tile
                if taken > 0:
                    first_row, asked, kept, _, _ = of_owner
                    slot = cutlass.Int32(NOT_SPLIT)
                    if taken < of_range:
                        slot = 2 * mine + (1 if start >= block * share else 0)
                    rows = cutlass.min(asked - row, self.tokens_per_tile) * self.key.pack_gqa
                    head_block = head_block * self.cluster + rank
                    work = self.piece(request, first_row, asked, kept, head_block, row, rows, tile, taken, slot)
                    self.work_pipeline.produce(posted, work)
                    posted += 1
                    if taken < of_range and start >= block * share:
                        parts = quotient(start + of_range - 1, share) - block + 1
                        if lane == 0:
                            split_ranges[mine, 1], split_ranges[mine, 2], split_ranges[mine, 3] = (
                                first_row + row,
                                head_block,
                                rows,
                            )
                place += places
        if lane == 0:
            split_ranges[mine, 0] = parts
        self.work_pipeline.produce(posted, no_work_tile())

    @cute.jit
    def items_in(self, seqlen_q, folded):
        """Row tiles that lie together: those of a pair, or one."""
        items = cutlass.Int32(1)
        if cutlass.const_expr(self.folds):
            items = cutlass.Int32(2) if folded != 0 and seqlen_q > self.tokens_per_tile else items
        return items

    @cute.jit
    def span(self, of_request, lead, least_span, folded):
        """Places of a request's range or pair; of_request: what `read` gives."""
        _, seqlen_q, _, tiles, _ = of_request
        return cutlass.max(tiles + lead * self.items_in(seqlen_q, folded), least_span)

    @cute.jit
    def range_at(self, of_request, request, behind, place, lead, least_span, folded):
        """The range of a request that a place belongs to.

        Args:
            of_request: what `read` gives. behind: the place behind the request's ranges.

        Returns:
            (its places, which of them this is, its key tiles, its unit of a cluster, its first token)
        """
        _, seqlen_q, seqlen_k, tiles, ranges = of_request
        span = self.span(of_request, lead, least_span, folded)
        within = place - (behind - ranges * span)
        item = quotient(within, span)
        offset = within - item * span
        of_unit = ranges // self.head_blocks
        head_block, row_tile = item, cutlass.Int32(0)
        if of_unit > 1:
            head_block = quotient(item, of_unit)
            row_tile = item - head_block * of_unit
        if cutlass.const_expr(self.folds):
            if self.items_in(seqlen_q, folded) > 1:
                window_size_right = window_right(self.key, self.requests, request)
                later = (seqlen_q + self.tokens_per_tile - 1) // self.tokens_per_tile - 1 - row_tile
                _, tiles = self.range_of(seqlen_q, seqlen_k, later * self.tokens_per_tile, window_size_right)
                places = tiles + lead
                if offset >= places and later > row_tile:
                    _, tiles = self.range_of(seqlen_q, seqlen_k, row_tile * self.tokens_per_tile, window_size_right)
                    span, offset = span - places, offset - places
                else:
                    if later > row_tile:
                        span = places
                    row_tile = later
        return span, offset, tiles, head_block, row_tile * self.tokens_per_tile

    @cute.jit
    def even_shares(self, held, count, lane, num_ctas, folded):
        """How all ranges, or pairs of them, are dealt out to so many blocks, or clusters.

        Args:
            held: as in `read_chunk`.

        Returns:
            (places of all ranges, of a block, of a range before its first tile, and of a range at least)
        """
        total, ranges, most_tiles, fewest_tiles = (
            cutlass.Int32(0),
            cutlass.Int32(0),
            cutlass.Int32(1),
            cutlass.Int32(FAR),
        )
        items = cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            _, seqlen_q, _, tiles, own = self.read_chunk(held, chunk, lane, count, folded)
            total += own * tiles
            ranges += own
            together = self.items_in(seqlen_q, folded)
            items += own * together
            if own > 0:
                most_tiles, fewest_tiles = (
                    cutlass.max(most_tiles, tiles),
                    cutlass.min(fewest_tiles, quotient(tiles, together)),
                )
        total, ranges = (cute.arch.warp_redux_sync(value, "add") for value in (total, ranges))
        most_tiles, fewest_tiles = (
            cute.arch.warp_redux_sync(most_tiles, "max"),
            cute.arch.warp_redux_sync(fewest_tiles, "min"),
        )
        share = quotient(total + num_ctas - 1, num_ctas)
        merged = self.merged_tiles()
        if most_tiles > FEW_PARTS * share or merged > share:
            share = cutlass.max(share, self.least)
        lead, least_span = cutlass.Int32(0), cutlass.Int32(0)
        whole = quotient(ranges + num_ctas - 1, num_ctas) * most_tiles
        if whole <= share + self.spared + merged:
            # Merging would cost more than blocks idle that have shorter ranges than others, or none.
            total, share, least_span = ranges * most_tiles, whole, most_tiles
        elif fewest_tiles < cutlass.min(share, most_tiles):
            lead = cutlass.Int32(ITEM_TILES)
            total += cute.arch.warp_redux_sync(items, "add") * lead
            share = cutlass.max(quotient(total + num_ctas - 1, num_ctas), share)
        return total, share, lead, least_span

    @cute.jit
    def merged_tiles(self):
        """The two partial results that a block may leave, in bytes of a key tile."""
        row, tile = cutlass.const_expr(2 * 4 * self.key.columns), cutlass.const_expr(self.tile_n * self.key.key_bytes)
        return (self.requests.rows * row + tile // 2) // tile

    @cute.jit
    def piece(self, request, first, seqlen_q, seqlen_k, head_block, row, rows, tile, taken, slot):
        position = seqlen_k - seqlen_q + row
        window_size_right = window_right(self.key, self.requests, request)
        n_block_min = self.first_tile(seqlen_q, seqlen_k) + tile
        n_block_max = n_block_min + taken
        if slot == NOT_SPLIT:
            # Of what the request's queries see, that which these do.
            n_block_min, n_block_max = self.range_of(seqlen_q, seqlen_k, row, window_size_right)
        return work_tile_of(
            self.key,
            self.requests,
            self.tile_n,
            request,
            first + row,
            rows,
            head_block,
            position,
            seqlen_k,
            n_block_min,
            n_block_max,
            window_size_right,
            slot,
        )
