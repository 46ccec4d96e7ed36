# SPDX-License-Identifier: Apache-2.0
"""The schedule role: one warp finds the block's next work from the lengths on the device."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.work import WHOLE, Work

FAR = 1 << 30  # a window that ends nowhere
WARP = 32


class Requests(NamedTuple):
    """A batch, as `spec.Batch` has it; windows of a layer; the query lengths that are served."""

    starts: cute.Tensor
    lengths: cute.Tensor
    table: cute.Tensor | None
    packed_starts: cute.Tensor | None
    causal: cute.Tensor | None
    left: cutlass.Int32
    right: cutlass.Int32
    shortest: cutlass.Int32
    longest: cutlass.Int32


@cute.jit
def sum_through(value: cutlass.Int32):
    """Sum over this lane and those before it."""
    for bit in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << bit, mask_and_clamp=0)
        value += other if cute.arch.lane_idx() >= (1 << bit) else 0
    return value


class QueryTiles:
    """Whole query tiles, dealt out in turn: a request's last first, which see the most keys, all heads side by side."""

    def __init__(self, key, mailbox, tokens_per_tile: int, tile_n: int, requests: Requests):
        self.key, self.mailbox, self.requests = key, mailbox, requests
        self.tokens_per_tile, self.tile_n = tokens_per_tile, tile_n
        self.units = key.heads_q // key.pack

    @cute.jit
    def run(self):
        count = cutlass.Int32(cute.size(self.requests.lengths))
        lane = cute.arch.lane_idx()
        place, step = cutlass.Int32(cute.arch.block_idx()[0]), cutlass.Int32(cute.arch.grid_dim()[0])
        posted = cutlass.Int32(0)
        seen = cutlass.Int32(0)
        for chunk in cutlass.range(cute.ceil_div(count, WARP), unroll=1):
            request = chunk * WARP + lane
            first, queries, keys = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
            if request < count:
                first = self.requests.starts[request]
                queries = self.requests.starts[request + 1] - first
                keys = self.requests.lengths[request]
            tiles = (queries + self.tokens_per_tile - 1) // self.tokens_per_tile * self.units
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
        nothing = cutlass.Int32(0)
        self.mailbox.post(posted, Work(*[nothing] * len(Work._fields)))

    @cute.jit
    def item(self, place, request, first, queries, keys, tiles, through):
        local = place - (through - tiles)
        unit = local % self.units
        row = (tiles // self.units - 1 - local // self.units) * self.tokens_per_tile
        tokens = cutlass.min(queries - row, self.tokens_per_tile)
        position = keys - queries + row
        right = self.window_right(request)
        last = position + tokens - 1
        begin, whole_begin = cutlass.Int32(0), cutlass.Int32(0)
        if cutlass.const_expr(self.key.left):
            begin = cutlass.max(position - self.requests.left, 0) // self.tile_n
            whole_begin = (cutlass.max(last - self.requests.left, 0) + self.tile_n - 1) // self.tile_n
        stop, whole_stop = keys, keys
        if cutlass.const_expr(self.key.right or self.key.causality != "full"):
            stop = cutlass.min(keys, cutlass.max(last + right + 1, 0))
            whole_stop = cutlass.min(keys, cutlass.max(position + right + 1, 0))
        # At least one tile, so that every row is written.
        end = cutlass.max((stop + self.tile_n - 1) // self.tile_n, begin + 1)
        whole_end = cutlass.max(whole_stop // self.tile_n, begin)
        whole_begin = cutlass.min(whole_begin, whole_end)
        source = request
        if cutlass.const_expr(self.key.page_size == 0):
            source = self.requests.packed_starts[request]
        return Work(
            valid=cutlass.Int32(1),
            query=first + row,
            rows=tokens * self.key.pack,
            unit=unit,
            position=position,
            keys=keys,
            begin=begin,
            end=end,
            whole_begin=whole_begin,
            whole_end=whole_end,
            right=right,
            source=source,
            slot=cutlass.Int32(WHOLE),
        )

    @cute.jit
    def window_right(self, request):
        """How many keys after its own position a query of the request sees."""
        right = cutlass.Int32(FAR)
        if cutlass.const_expr(self.key.right):
            right = self.requests.right
        if cutlass.const_expr(self.key.causality == "causal"):
            right = cutlass.Int32(0)
        if cutlass.const_expr(self.key.causality == "per_request"):
            right = cutlass.Int32(0) if self.requests.causal[request] != 0 else right
        return right
