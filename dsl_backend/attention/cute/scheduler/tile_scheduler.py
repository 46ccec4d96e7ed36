# SPDX-License-Identifier: Apache-2.0
"""The schedule role: one warp finds the block's next work from the lengths on the device."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.scheduler.work_tile import WHOLE, Work, no_work
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

    starts: cute.Tensor
    lengths: cute.Tensor
    table: cute.Tensor | None
    packed_starts: cute.Tensor | None
    causal: cute.Tensor | None
    left: cutlass.Int32
    right: cutlass.Int32
    shortest: cutlass.Int32
    longest: cutlass.Int32
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
    right = cutlass.Int32(FAR)
    if cutlass.const_expr(key.right):
        right = requests.right
    if cutlass.const_expr(key.causality == "causal"):
        right = cutlass.Int32(0)
    if cutlass.const_expr(key.causality == "per_request"):
        right = cutlass.Int32(0) if requests.causal[request] != 0 else right
    return right


@cute.jit
def lengths_of(requests: Requests, request, count):
    """A lane's request: first query row, queries, keys; all 0 behind the last one."""
    first, queries, keys = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
    if request < count:
        first = requests.starts[request]
        queries = requests.starts[request + 1] - first
        keys = requests.lengths[request]
    return first, queries, keys


@cute.jit
def work_of(
    key: cutlass.Constexpr,
    requests: Requests,
    tile_n: cutlass.Constexpr[int],
    request,
    query,
    rows,
    unit,
    position,
    keys,
    begin,
    end,
    right,
    slot,
):
    """The item of a row tile and the key tiles begin ... end, with those of them that every row sees whole."""
    whole_begin, whole_stop = begin, keys
    if cutlass.const_expr(key.left):
        last = position + rows // key.pack - 1
        whole_begin = (cutlass.max(last - requests.left, 0) + tile_n - 1) // tile_n
    if cutlass.const_expr(key.right or key.causality != "full"):
        whole_stop = cutlass.min(keys, cutlass.max(position + right + 1, 0))
    whole_end = cutlass.max(cutlass.min(whole_stop // tile_n, end), begin)
    whole_begin = cutlass.min(cutlass.max(whole_begin, begin), whole_end)
    source = request
    if cutlass.const_expr(key.page_size == 0):
        source = requests.packed_starts[request]
    return Work(
        valid=cutlass.Int32(1),
        query=query,
        rows=rows,
        unit=unit,
        position=position,
        keys=keys,
        begin=begin,
        end=end,
        whole_begin=whole_begin,
        whole_end=whole_end,
        right=right,
        source=source,
        slot=slot,
    )


class QueryTiles:
    """Whole query tiles, dealt out in turn: a request's last first, which see the most keys, all heads side by side.

    Blocks of a cluster get neighbouring units of a tile.
    """

    def __init__(self, key, mailbox, tokens_per_tile: int, tile_n: int, requests: Requests):
        self.key, self.mailbox, self.requests = key, mailbox, requests
        self.tokens_per_tile, self.tile_n = tokens_per_tile, tile_n
        self.units = key.units

    @cute.jit
    def run(self):
        count = cutlass.Int32(cute.size(self.requests.lengths))
        lane = cute.arch.lane_idx()
        place, step = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        posted = cutlass.Int32(0)
        seen = cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, queries, keys = lengths_of(self.requests, request, count)
            tiles = self.items_of(queries, keys)
            if queries < self.requests.shortest or queries > self.requests.longest:
                tiles = cutlass.Int32(0)
            through = sum_through(tiles) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < seen:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                values = [cute.arch.shuffle_sync(value, owner) for value in (first, queries, keys, tiles, through)]
                self.mailbox.post(posted, self.item(place, chunk * WARP + owner, *values))
                posted += 1
                place += step
        self.mailbox.post(posted, no_work())

    @cute.jit
    def items_of(self, queries, keys):
        return (queries + self.tokens_per_tile - 1) // self.tokens_per_tile * self.units

    @cute.jit
    def item(self, place, request, first, queries, keys, tiles, through):
        local = place - (through - tiles)
        row = (tiles // self.units - 1 - local // self.units) * self.tokens_per_tile
        right = window_right(self.key, self.requests, request)
        return self.tile(request, first, queries, keys, local % self.units, row, right)

    @cute.jit
    def range_of(self, queries, keys, row, right):
        """The key tiles of the row tile that begins at a token of a request: begin, end."""
        position = keys - queries + row
        begin, stop = cutlass.Int32(0), keys
        if cutlass.const_expr(self.key.left):
            begin = cutlass.max(position - self.requests.left, 0) // self.tile_n
        if cutlass.const_expr(self.key.right or self.key.causality != "full"):
            tokens = cutlass.min(queries - row, self.tokens_per_tile)
            stop = cutlass.min(keys, cutlass.max(position + tokens + right, 0))
        # At least one tile, so that every row is written.
        return begin, cutlass.max((stop + self.tile_n - 1) // self.tile_n, begin + 1)

    @cute.jit
    def tile(self, request, first, queries, keys, unit, row, right):
        """The item of a row tile."""
        begin, end = self.range_of(queries, keys, row, right)
        return self.part(request, first, queries, keys, unit, row, right, begin, end, cutlass.Int32(WHOLE))

    @cute.jit
    def part(self, request, first, queries, keys, unit, row, right, begin, end, slot):
        """The item of some key tiles of a row tile; slot: of its result, WHOLE where there is no other part."""
        rows = cutlass.min(queries - row, self.tokens_per_tile) * self.key.pack
        return work_of(
            self.key,
            self.requests,
            self.tile_n,
            request,
            first + row,
            rows,
            unit,
            keys - queries + row,
            keys,
            begin,
            end,
            right,
            slot,
        )


class ClaimedTiles(QueryTiles):
    """Whole query tiles, claimed by whoever comes to their end: those with the most key tiles first, all heads side by
    side (longest processing time first: Graham, 1969). Requests whose keys fit into L2 together come before others.

    Dealt out in turn, 16 heads of prompts of 1024 tokens give one of 132 blocks 1.44 times the average to do: 128 items
    of a request are nearly a round of the blocks, and the same ones always got the longest.

    Args:
        claims: the workspace's counters: items claimed behind the first of each block, and blocks at their end. They
            are 0 before and after a launch.
    """

    def __init__(self, key, mailbox, tokens_per_tile: int, tile_n: int, requests: Requests, claims):
        super().__init__(key, mailbox, tokens_per_tile, tile_n, requests)
        self.claims = claims
        key_bytes = key.heads_kv * (key.head_dim + key.head_dim_v) * key.kv.itemsize
        self.section_keys = max(SECTION_BYTES // key_bytes, 1)

    @cute.jit
    def run(self):
        lane, blocks = cute.arch.lane_idx(), cutlass.Int32(cute.arch.grid_dim()[0])
        place, posted = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(0)
        _, posted, _ = self.post_from(place, posted, 0, lane, blocks)
        self.mailbox.post(posted, no_work())
        self.leave(blocks)

    @cute.jit
    def post_from(self, place, posted, passed, lane, blocks):
        """Post items from a place on, as long as the next place lies behind the last one.

        Args:
            posted, passed: of the places before, those whose items were posted, and those that have none.

        Returns:
            (the first place whose item was not posted, items posted, items there are)
        """
        count, seen = cutlass.Int32(cute.size(self.requests.lengths)), cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, queries, keys = lengths_of(self.requests, request, count)
            right = cutlass.Int32(0)
            if request < count:
                right = window_right(self.key, self.requests, request)
            left = (queries + self.tokens_per_tile - 1) // self.tokens_per_tile
            if queries < self.requests.shortest or queries > self.requests.longest:
                left = cutlass.Int32(0)
            section = (sum_through(keys) - keys) // self.section_keys
            largest, mine = self.foremost(queries, keys, right, left, section)
            while largest > 0:
                members = cute.arch.vote_ballot_sync(mine != 0)
                rank = cute.arch.popc(members & cute.arch.lanemask_lt())
                items = cute.arch.popc(members) * self.units
                while self.among(place, seen, items):
                    chosen = cute.arch.vote_ballot_sync(mine != 0 and rank == (place - seen) // self.units)
                    owner = cute.arch.popc(chosen - 1)
                    row = (left - 1) * self.tokens_per_tile
                    values = [cute.arch.shuffle_sync(value, owner) for value in (first, queries, keys)]
                    row, own_right = cute.arch.shuffle_sync(row, owner), cute.arch.shuffle_sync(right, owner)
                    work = self.tile(chunk * WARP + owner, *values, (place - seen) % self.units, row, own_right)
                    self.mailbox.post(posted, work)
                    if work.end - work.begin > SHORT:
                        # What is claimed while the last item waits is a block's own for as long as both take.
                        self.mailbox.wait_read(posted)
                    posted += 1
                    place = self.next_place(posted + passed, blocks)
                seen += items
                left -= mine
                largest, mine = self.foremost(queries, keys, right, left, section)
        return place, posted, seen

    def among(self, place, seen, items):
        """Whether a place is that of one of so many items behind those seen. Places only grow."""
        return place < seen + items

    def next_place(self, had, blocks):
        """The place behind so many others that the block had; its first is its own number."""
        return self.claim() + blocks

    @cute.jit
    def foremost(self, queries, keys, right, left, section):
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
                begin, end = self.range_of(queries, keys, (left - 1) * self.tokens_per_tile, right)
                tiles = end - begin
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
    def leave(self, blocks):
        """The last block to leave clears the counters for the next launch."""
        claims = self.claims
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_gpu()
            ended = cute.arch.atomic_add(claims.iterator + 1, cutlass.Int32(1), sem="relaxed", scope="gpu")
            cute.arch.fence_acq_rel_gpu()
            if ended == blocks - 1:
                claims[0] = cutlass.Int32(0)
                claims[1] = cutlass.Int32(0)


@cute.jit
def own_range(key: cutlass.Constexpr, tile_n: cutlass.Constexpr[int], requests: Requests, least, queries, keys):
    """A request's first key tile, how many it has, and how many one of its shares: nothing else counts."""
    begin = cutlass.Int32(0)
    if cutlass.const_expr(key.left):
        begin = cutlass.max(keys - queries - requests.left, 0) // tile_n
    # At least one tile, so that every row is written.
    tiles = cutlass.max((keys + tile_n - 1) // tile_n - begin, 1)
    return begin, tiles, cutlass.max((tiles + key.shares - 1) // key.shares, least)


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


class OwnShares(QueryTiles):
    """Shares of each request's own key range, dealt out in turn, all heads of a share side by side.

    What is summed in one piece, and what is merged in which order, then depends on the request's lengths alone. Share
    `part` of a unit's row tile leaves its partial result in slot (row tile * units + unit) * shares + part.

    Args:
        several: whether a request may have several row tiles.
    """

    def __init__(
        self, key, mailbox, tokens_per_tile: int, tile_n: int, requests: Requests, least: int, several: bool = False
    ):
        super().__init__(key, mailbox, tokens_per_tile, tile_n, requests)
        self.least, self.tile_tokens = least, tokens_per_tile if several else None

    @cute.jit
    def items_of(self, queries, keys):
        _, tiles, share = own_range(self.key, self.tile_n, self.requests, self.least, queries, keys)
        row_tiles = (queries + self.tokens_per_tile - 1) // self.tokens_per_tile
        return row_tiles * ((tiles + share - 1) // share) * self.units

    @cute.jit
    def item(self, place, request, first, queries, keys, items, through):
        local = place - (through - items)
        first_tile, tiles, share = own_range(self.key, self.tile_n, self.requests, self.least, queries, keys)
        parts = (tiles + share - 1) // share
        unit, local = local % self.units, local // self.units
        part, tile = local % parts, local // parts
        begin = first_tile + part * share
        end = cutlass.min(begin + share, first_tile + tiles)
        slot = cutlass.Int32(WHOLE)
        if parts > 1:
            number = row_tile_of(first, request, tile, self.tile_tokens)
            slot = (number * self.units + unit) * self.key.shares + part
        row = tile * self.tokens_per_tile
        right = window_right(self.key, self.requests, request)
        return self.part(request, first, queries, keys, unit, row, right, begin, end, slot)


@cute.jit
def splits_of(key: cutlass.Constexpr, tile_n: cutlass.Constexpr[int], requests: Requests, queries, keys):
    """A request's first split, and how many it has: those that any of its queries may see."""
    begin = cutlass.Int32(0)
    if cutlass.const_expr(key.left):
        begin = cutlass.max(keys - queries - requests.left, 0) // tile_n
    tiles = cutlass.max((keys + tile_n - 1) // tile_n, begin + 1)
    first = begin // key.split_tiles
    return first, (tiles - 1) // key.split_tiles - first + 1


class FixedSplits(QueryTiles):
    """Splits that begin at fixed keys, whatever the batch and the queries: what is summed in one piece never changes.

    A request's row tiles are processed split by split where there are slots for the partial results. Requests for which
    none are left are processed row tile by row tile, and their splits are folded where they are made: the same bits.
    The order of work tiles is: part of the range, row tile, unit.

    Args:
        bases: [requests], receives each request's first slot; -1 where there is nothing to combine.
        slots: how many partial results there is room for.
    """

    def __init__(self, key, mailbox, tokens_per_tile: int, tile_n: int, requests: Requests, bases, slots):
        super().__init__(key, mailbox, tokens_per_tile, tile_n, requests)
        self.bases, self.slots = bases, slots

    @cute.jit
    def run(self):
        count, bases = cutlass.Int32(cute.size(self.requests.lengths)), self.bases
        lane = cute.arch.lane_idx()
        place, step = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        posted, seen, seen_slots = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        writes = place == 0
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, queries, keys = lengths_of(self.requests, request, count)
            _, parts = splits_of(self.key, self.tile_n, self.requests, queries, keys)
            row_tiles = (queries + self.tokens_per_tile - 1) // self.tokens_per_tile
            if queries < self.requests.shortest or queries > self.requests.longest:
                row_tiles = cutlass.Int32(0)
            wanted = row_tiles * parts * self.units
            if parts == 1:
                wanted = cutlass.Int32(0)
            slots_through = sum_through(wanted) + seen_slots
            seen_slots = cute.arch.shuffle_sync(slots_through, WARP - 1)
            base = slots_through - wanted
            if wanted == 0 or slots_through > self.slots:
                base, parts = cutlass.Int32(-1), cutlass.Int32(1)
            if writes and request < count:
                bases[request] = base
            items = row_tiles * parts * self.units
            through = sum_through(items) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < seen:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                mine = [cute.arch.shuffle_sync(value, owner) for value in (first, queries, keys, parts, base)]
                local = place - cute.arch.shuffle_sync(through - items, owner)
                self.mailbox.post(posted, self.item_of(chunk * WARP + owner, local, *mine))
                posted += 1
                place += step
        self.mailbox.post(posted, no_work())

    @cute.jit
    def item_of(self, request, local, first, queries, keys, parts, base):
        """The work tile at a place among those of a request."""
        unit, rest = local % self.units, local // self.units
        part, tile = rest % parts, rest // parts
        row, right = tile * self.tokens_per_tile, window_right(self.key, self.requests, request)
        begin, end = self.range_of(queries, keys, row, right)
        slot = cutlass.Int32(WHOLE)
        if base >= 0:
            slot = base + local
            split, _ = splits_of(self.key, self.tile_n, self.requests, queries, keys)
            from_tile = (split + part) * self.key.split_tiles
            begin = cutlass.max(begin, from_tile)
            end = cutlass.min(end, from_tile + self.key.split_tiles)
            if begin >= end:
                # No row of the tile sees the split: one tile of it, wholly masked, leaves an empty partial result.
                begin, end = from_tile, from_tile + 1
        return self.part(request, first, queries, keys, unit, row, right, begin, end, slot)


class Cut(NamedTuple):
    """A range that begins in a block's share and goes on behind it: what the block leaves for the merge kernel.

    Attributes:
        parts: blocks that have some of it; 0 where there is no such range, and the others mean nothing.
        query: its first query row. rows: of its row tile.
    """

    parts: cutlass.Int32
    query: cutlass.Int32
    unit: cutlass.Int32
    rows: cutlass.Int32


CUT_FIELDS = len(Cut._fields)


class KeyShares(QueryTiles):
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
        mailbox,
        tokens_per_tile: int,
        tile_n: int,
        requests: Requests,
        cuts,
        least: int,
        cluster: int = 1,
        spared: int = SPARED,
        folds: bool = False,
    ):
        super().__init__(key, mailbox, tokens_per_tile, tile_n, requests)
        self.cluster, self.units = cluster, key.units // cluster
        self.cuts, self.least, self.spared = cuts, least, spared
        self.folds = folds and key.causality != "full" and not key.left

    @cute.jit
    def read(self, request, count, folded):
        """A lane's request: first query row, queries, keys, key tiles of a range or pair, and how many of these."""
        first, queries, keys = lengths_of(self.requests, request, count)
        begin = self.first_tile(queries, keys)
        # At least one tile, so that every row is written.
        tiles = cutlass.max((keys + self.tile_n - 1) // self.tile_n - begin, 1)
        row_tiles = (queries + self.tokens_per_tile - 1) // self.tokens_per_tile
        if cutlass.const_expr(self.folds):
            if folded != 0 and row_tiles > 1:
                right = window_right(self.key, self.requests, request)
                tiles = self.tiles_of_pair(queries, keys, tiles, row_tiles, right)
                row_tiles = (row_tiles + 1) // 2
        ranges = row_tiles * self.units
        if queries < self.requests.shortest or queries > self.requests.longest:
            ranges = cutlass.Int32(0)
        return first, queries, keys, tiles, ranges

    @cute.jit
    def tiles_of_pair(self, queries, keys, tiles, row_tiles, right):
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
        before, behind = keys - queries + step - 1, cutlass.min(right, queries) + step - 1
        steps = (row_tiles + 1) * of_row_tile + 2 * (before // step) + 2 * (behind // step)
        # One that sees nothing has a tile as well.
        both = cutlass.max((steps - 2) // per_tile + 2, tiles + 1)
        return cutlass.min(both, 2 * tiles)

    @cute.jit
    def read_chunk(self, held, chunk, lane, count, folded):
        """What `read` gives of the lane's request in a chunk of WARP; held: in the first one, often the only one."""
        first, queries, keys, tiles, ranges = held
        if chunk > 0:
            first, queries, keys, tiles, ranges = self.read(chunk * WARP + lane, count, folded)
        return first, queries, keys, tiles, ranges

    @cute.jit
    def first_tile(self, queries, keys):
        """The first that any query of a request sees."""
        begin = cutlass.Int32(0)
        if cutlass.const_expr(self.key.left):
            begin = cutlass.max(keys - queries - self.requests.left, 0) // self.tile_n
        return begin

    @cute.jit
    def run(self):
        count = cutlass.Int32(cute.size(self.requests.lengths))
        lane = cute.arch.lane_idx()
        place_in_grid, blocks = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        rank, block, blocks = place_in_grid % self.cluster, place_in_grid // self.cluster, blocks // self.cluster
        mine = rank * blocks + block
        folded = cutlass.Int32(0)
        held = self.read(lane, count, folded)
        total, share, lead, least_span = self.even_shares(held, count, lane, blocks, folded)
        if cutlass.const_expr(self.folds):
            # Where no block has two ranges, the longest one is all that counts.
            if (least_span == 0 or share > least_span) and self.requests.longest > self.tile_n:
                folded = cutlass.Int32(1)
                held = self.read(lane, count, folded)
                total, share, lead, least_span = self.even_shares(held, count, lane, blocks, folded)
        place = block * share
        end = cutlass.min(place + share, total)
        posted, parts, seen = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        cuts = self.cuts
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            values = self.read_chunk(held, chunk, lane, count, folded)
            through = sum_through(values[4] * self.span(values, lead, least_span, folded)) + seen
            seen = cute.arch.shuffle_sync(through, WARP - 1)
            while place < cutlass.min(seen, end):
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(through <= place))
                of_owner = [cute.arch.shuffle_sync(value, owner) for value in values]
                behind, request = cute.arch.shuffle_sync(through, owner), chunk * WARP + owner
                span, offset, of_range, unit, row = self.range_at(
                    of_owner, request, behind, place, lead, least_span, folded
                )
                start = place - offset + lead
                places = cutlass.min(span - offset, end - place)
                tile = cutlass.max(offset - lead, 0)
                taken = cutlass.min(cutlass.max(offset + places - lead, 0), of_range) - tile
                if taken > 0:
                    first_row, asked, kept, _, _ = of_owner
                    slot = cutlass.Int32(WHOLE)
                    if taken < of_range:
                        slot = 2 * mine + (1 if start >= block * share else 0)
                    rows = cutlass.min(asked - row, self.tokens_per_tile) * self.key.pack
                    unit = unit * self.cluster + rank
                    work = self.piece(request, first_row, asked, kept, unit, row, rows, tile, taken, slot)
                    self.mailbox.post(posted, work)
                    posted += 1
                    if taken < of_range and start >= block * share:
                        parts = quotient(start + of_range - 1, share) - block + 1
                        if lane == 0:
                            cuts[mine, 1], cuts[mine, 2], cuts[mine, 3] = first_row + row, unit, rows
                place += places
        if lane == 0:
            cuts[mine, 0] = parts
        self.mailbox.post(posted, no_work())

    @cute.jit
    def items_in(self, queries, folded):
        """Row tiles that lie together: those of a pair, or one."""
        items = cutlass.Int32(1)
        if cutlass.const_expr(self.folds):
            items = cutlass.Int32(2) if folded != 0 and queries > self.tokens_per_tile else items
        return items

    @cute.jit
    def span(self, of_request, lead, least_span, folded):
        """Places of a request's range or pair; of_request: what `read` gives."""
        _, queries, _, tiles, _ = of_request
        return cutlass.max(tiles + lead * self.items_in(queries, folded), least_span)

    @cute.jit
    def range_at(self, of_request, request, behind, place, lead, least_span, folded):
        """The range of a request that a place belongs to.

        Args:
            of_request: what `read` gives. behind: the place behind the request's ranges.

        Returns:
            (its places, which of them this is, its key tiles, its unit of a cluster, its first token)
        """
        _, queries, keys, tiles, ranges = of_request
        span = self.span(of_request, lead, least_span, folded)
        within = place - (behind - ranges * span)
        item = quotient(within, span)
        offset = within - item * span
        of_unit = ranges // self.units
        unit, row_tile = item, cutlass.Int32(0)
        if of_unit > 1:
            unit = quotient(item, of_unit)
            row_tile = item - unit * of_unit
        if cutlass.const_expr(self.folds):
            if self.items_in(queries, folded) > 1:
                right = window_right(self.key, self.requests, request)
                later = (queries + self.tokens_per_tile - 1) // self.tokens_per_tile - 1 - row_tile
                _, tiles = self.range_of(queries, keys, later * self.tokens_per_tile, right)
                places = tiles + lead
                if offset >= places and later > row_tile:
                    _, tiles = self.range_of(queries, keys, row_tile * self.tokens_per_tile, right)
                    span, offset = span - places, offset - places
                else:
                    if later > row_tile:
                        span = places
                    row_tile = later
        return span, offset, tiles, unit, row_tile * self.tokens_per_tile

    @cute.jit
    def even_shares(self, held, count, lane, blocks, folded):
        """How all ranges, or pairs of them, are dealt out to so many blocks, or clusters.

        Args:
            held: as in `read_chunk`.

        Returns:
            (places of all ranges, of a block, of a range before its first tile, and of a range at least)
        """
        total, ranges, longest, shortest = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(1), cutlass.Int32(FAR)
        items = cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            _, queries, _, tiles, own = self.read_chunk(held, chunk, lane, count, folded)
            total += own * tiles
            ranges += own
            together = self.items_in(queries, folded)
            items += own * together
            if own > 0:
                longest, shortest = cutlass.max(longest, tiles), cutlass.min(shortest, quotient(tiles, together))
        total, ranges = (cute.arch.warp_redux_sync(value, "add") for value in (total, ranges))
        longest, shortest = cute.arch.warp_redux_sync(longest, "max"), cute.arch.warp_redux_sync(shortest, "min")
        share = quotient(total + blocks - 1, blocks)
        merged = self.merged_tiles()
        if longest > FEW_PARTS * share or merged > share:
            share = cutlass.max(share, self.least)
        lead, least_span = cutlass.Int32(0), cutlass.Int32(0)
        whole = quotient(ranges + blocks - 1, blocks) * longest
        if whole <= share + self.spared + merged:
            # Merging would cost more than blocks idle that have shorter ranges than others, or none.
            total, share, least_span = ranges * longest, whole, longest
        elif shortest < cutlass.min(share, longest):
            lead = cutlass.Int32(ITEM_TILES)
            total += cute.arch.warp_redux_sync(items, "add") * lead
            share = cutlass.max(quotient(total + blocks - 1, blocks), share)
        return total, share, lead, least_span

    @cute.jit
    def merged_tiles(self):
        """The two partial results that a block may leave, in bytes of a key tile."""
        row, tile = cutlass.const_expr(2 * 4 * self.key.columns), cutlass.const_expr(self.tile_n * self.key.key_bytes)
        return (self.requests.rows * row + tile // 2) // tile

    @cute.jit
    def piece(self, request, first, queries, keys, unit, row, rows, tile, taken, slot):
        position = keys - queries + row
        right = window_right(self.key, self.requests, request)
        begin = self.first_tile(queries, keys) + tile
        end = begin + taken
        if slot == WHOLE:
            # Of what the request's queries see, that which these do.
            begin, end = self.range_of(queries, keys, row, right)
        return work_of(
            self.key,
            self.requests,
            self.tile_n,
            request,
            first + row,
            rows,
            unit,
            position,
            keys,
            begin,
            end,
            right,
            slot,
        )
