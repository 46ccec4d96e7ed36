# SPDX-License-Identifier: Apache-2.0
"""Which key ranges were cut by equal shares, found from lengths by all threads of a block."""

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.schedule import FAR, Cut, KeyShares, reduced, sum_through

WARP = 32
# Of a request: the place behind its ranges, its first query row, queries, key tiles, ranges.
FACTS = 5
# Of a warp: `reduced`, and its places.
SUMS = 5


class Cuts:
    """What blocks left to be merged.

    Args:
        threads: of the block, a power of two.
    """

    def __init__(self, schedule: KeyShares, allocator, threads: int):
        self.schedule, self.threads, self.warps = schedule, threads, threads // WARP
        self.lane, self.thread = cute.arch.lane_idx(), cute.arch.thread_idx()[0]
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.facts = allocator.allocate_tensor(cutlass.Int32, cute.make_layout((threads, FACTS)), 16)
        self.sums = allocator.allocate_tensor(cutlass.Int32, cute.make_layout((self.warps, SUMS)), 16)

    @cute.jit
    def find(self, left, first, entries: cutlass.Constexpr[int]):
        """Of so many of the `left` blocks, from `first` on; by all threads, as a list."""
        count = cutlass.Int32(cute.size(self.schedule.requests.lengths))
        blocks = left // self.schedule.cluster
        shares = self.deal(count, blocks)
        facts, sums = self.facts, self.sums
        nothing, seen = cutlass.Int32(0), cutlass.Int32(0)
        places = [self.schedule.place_of_cut(shares, blocks, first + i) for i in range(entries)]
        found = [Cut(nothing, nothing, nothing, nothing) for _ in range(entries)]
        for base in cutlass.range(0, count, self.threads, unroll=1):
            row, queries, _, tiles, ranges = self.schedule.read(base + self.thread, count)
            through = sum_through(ranges * cutlass.max(tiles + shares.lead, shares.least_span))
            if self.lane == WARP - 1:
                sums[self.warp, SUMS - 1] = through
            cute.arch.sync_threads()
            of_warp = sums[self.lane % self.warps, SUMS - 1] if self.lane < self.warps else nothing
            through += seen + cute.arch.warp_redux_sync(of_warp if self.lane < self.warp else nothing, "add")
            last = seen + cute.arch.warp_redux_sync(of_warp, "add")
            for i, fact in enumerate((through, row, queries, tiles, ranges)):
                facts[self.thread, i] = fact
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(entries):
                if places[i] >= seen and places[i] < last:
                    owner = self.owner_of(places[i])
                    behind, row, queries, tiles, ranges = [facts[owner, fact] for fact in range(FACTS)]
                    of_request = (row, queries, nothing, tiles, ranges)
                    cut = self.schedule.cut(shares, blocks, first + i, of_request, behind)
                    if first + i < left:
                        found[i] = cut
            seen = last
            # The next requests' facts come into the same places.
            cute.arch.sync_threads()
        return found

    @cute.jit
    def deal(self, count, blocks):
        """How all ranges were dealt out to so many blocks, or clusters."""
        sums = self.sums
        total, ranges, longest, shortest = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(1), cutlass.Int32(FAR)
        for request in cutlass.range(self.thread, count, self.threads, unroll=1):
            _, _, _, tiles, own = self.schedule.read(request, count)
            total += own * tiles
            ranges += own
            if own > 0:
                longest, shortest = cutlass.max(longest, tiles), cutlass.min(shortest, tiles)
        of_warp = reduced(total, ranges, longest, shortest)
        if self.lane == 0:
            for i in cutlass.range_constexpr(SUMS - 1):
                sums[self.warp, i] = of_warp[i]
        cute.arch.sync_threads()
        of_all = [sums[self.lane % self.warps, i] for i in range(SUMS - 1)]
        counted = self.lane < self.warps
        total, ranges = (of_all[i] if counted else cutlass.Int32(0) for i in range(2))
        return self.schedule.deal(*reduced(total, ranges, of_all[2], of_all[3]), blocks)

    @cute.jit
    def owner_of(self, place):
        """Which of the requests a place belongs to: how many of them end before it, but for the last."""
        facts, owner, half = self.facts, cutlass.Int32(0), cutlass.const_expr(self.threads // 2)
        for step in cutlass.range_constexpr(half.bit_length()):
            ahead = cutlass.const_expr(half >> step)
            owner += ahead if facts[owner + ahead - 1, 0] <= place else 0
        return owner
