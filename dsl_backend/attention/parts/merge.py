# SPDX-License-Identifier: Apache-2.0
"""Partial results of key ranges that were cut, merged into outputs."""

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.schedule import MERGE_FIELDS, Requests, lengths_of, own_range, row_tile_of
from dsl_backend.attention.parts.scores import Scoring
from dsl_backend.attention.parts.softmax import normalized
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.math import exp2, finite_or_zero, tree

WARP = 32
VECTOR = 4  # columns of a thread
THREADS, THREADS_WIDE = 512, 1024
SM_THREADS = 1024  # at least, for which 64 registers each are left
WIDE = 256  # columns beyond which a block has more threads
DEPTH = 4  # parts of which a thread has values in flight
FEW, AT_A_TIME = 8, 2  # parts that a team merges by itself, and so many of them at once
MOST_ROWS = 16  # rows of blocks' grids: a block takes every 16th row


def partial_size(rows: int, columns: int) -> int:
    """float32s of a partial result: [rows, columns] sums, each row's largest base-2 score, each row's total."""
    return rows * columns + (2 * rows + 3) // 4 * 4


class Merge:
    """One block for some rows of a range, in teams of threads, a thread for four columns.

    Where a range has few parts, every team has rows of its own: most are so where many requests are served. Otherwise
    teams share a row's parts, whose values are under way while their maxima and totals are merged, which tell weights.

    A range goes by the share of the batch in which it began; where shares are a request's own, by request and unit,
    with the rows of all its row tiles.

    Args:
        tile_n, least: keys of a tile, and tiles of a share at least, as the schedule has them.
        tile_tokens: of a row tile; None where one has all of a request.
    """

    def __init__(self, key, tile_n: int, least: int, columns: int, tile_tokens: int | None = None):
        self.key, self.tile_n, self.least, self.columns = key, tile_n, least, columns
        self.tile_tokens = tile_tokens
        self.units = key.heads_q // key.pack
        self.lanes = columns // VECTOR
        most = THREADS if columns <= WIDE else THREADS_WIDE
        self.teams = most // self.lanes
        self.threads = -(-self.teams * self.lanes // WARP) * WARP
        self.warps = self.threads // WARP
        # A thread finds the weight of one part at a time.
        self.depth = min(DEPTH, self.lanes)

    @cute.jit
    def __call__(
        self,
        partials: cute.Tensor,
        merges: cute.Tensor | None,
        requests: Requests,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        scoring: Scoring,
        blocks: cutlass.Int32,
        stream,
    ):
        ranges = cute.size(requests.lengths) * self.units if cutlass.const_expr(self.key.shares) else blocks
        self.kernel(partials, merges, requests, out, lse, scoring).launch(
            grid=(ranges, cutlass.min(requests.rows, MOST_ROWS), 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=SM_THREADS // self.threads,
            # Must be named then (runtime/compile.py).
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        partials: cute.Tensor,
        merges: cute.Tensor | None,
        requests: Requests,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        scoring: Scoring,
    ):
        allocator = cutlass.utils.SmemAllocator()
        weights = allocator.allocate_tensor(cutlass.Float32, cute.make_layout(self.teams * self.depth), 16)
        warps = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((self.warps, 2)), 16)
        sums = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((VECTOR, self.lanes, self.teams)), 16)
        # Before any exit: a kernel that ends early would let the next one start beside the one before.
        cute.arch.griddepcontrol_wait()
        place, first, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.key.shares):
            parts, query, unit, rows = self.own_parts(requests, place)
        else:
            parts, query, unit, rows = (merges[place, field] for field in range(MERGE_FIELDS))
        if parts == 0:
            rows = cutlass.Int32(0)
        held, step = requests.rows, cute.arch.grid_dim()[1]
        thread = cute.arch.thread_idx()[0]
        if parts <= FEW:
            team, column = thread // self.lanes, thread % self.lanes * VECTOR
            if team < self.teams:
                for row in cutlass.range(first + team * step, rows, self.teams * step, unroll=1):
                    base, m = self.held_at(place, query, row)
                    top, total, own = self.add_few(partials, held, base, m, parts, column)
                    self.write(own, top, total, query, unit, row, column, out, lse, scoring)
        else:
            for row in cutlass.range(first, rows, step, unroll=1):
                base, m = self.held_at(place, query, row)
                top, total, own = self.add_parts(partials, held, base, m, parts, weights, warps)
                own = self.add_teams(own, sums)
                self.write(own, top, total, query, unit, row, thread * VECTOR, out, lse, scoring)

    @cute.jit
    def own_parts(self, requests: Requests, place):
        """Of a request's range for a unit, as `merges` has them: parts (0: nothing to merge), query row, unit, rows."""
        first, queries, keys = lengths_of(requests, place // self.units, cute.size(requests.lengths))
        _, tiles, share = own_range(self.key, self.tile_n, requests, self.least, queries, keys)
        parts = (tiles + share - 1) // share
        if parts == 1 or queries < requests.shortest or queries > requests.longest:
            parts = cutlass.Int32(0)
        return parts, first, place % self.units, queries * self.key.pack

    @cute.jit
    def add_few(self, partials, held, base, row, parts, column):
        """(a row's largest base-2 score, its total, the sums of this thread's columns)."""
        size = partial_size(held, self.columns)
        top, total = -cutlass.Float32.inf, cutlass.Float32(0.0)
        own = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        own.fill(0.0)
        tops = cute.make_rmem_tensor(AT_A_TIME, cutlass.Float32)
        totals = cute.make_rmem_tensor(AT_A_TIME, cutlass.Float32)
        values = cute.make_rmem_tensor((VECTOR, AT_A_TIME), cutlass.Float32)
        for first in cutlass.range(0, parts, AT_A_TIME, unroll=1):
            tops.fill(-cutlass.Float32.inf)
            totals.fill(0.0)
            values.fill(0.0)
            for i in cutlass.range_constexpr(AT_A_TIME):
                if first + i < parts:
                    place = self.place(base, first + i, size)
                    source = partials.iterator + (place + held * self.columns + row)
                    tops[i] = cute.make_tensor(source, cute.make_layout(1))[0]
                    totals[i] = cute.make_tensor(source + held, cute.make_layout(1))[0]
                    load_vector(partials.iterator, place + row * self.columns + column, values[None, i])
            higher = cute.arch.fmax(top, tree([tops[i] for i in range(AT_A_TIME)], cute.arch.fmax))
            reference = finite_or_zero(higher)
            shrink = exp2(top - reference)
            total *= shrink
            for j in cutlass.range_constexpr(VECTOR):
                own[j] *= shrink
            for i in cutlass.range_constexpr(AT_A_TIME):
                weight = exp2(tops[i] - reference)
                total += totals[i] * weight
                for j in cutlass.range_constexpr(VECTOR):
                    own[j] += values[j, i] * weight
            top = higher
        return top, total, own

    @cute.jit
    def add_parts(self, partials, held, base, row, parts, weights, warps):
        """(a row's largest base-2 score, its total, this thread's sums of its team's parts)."""
        thread = cute.arch.thread_idx()[0]
        team, column = thread // self.lanes, thread % self.lanes * VECTOR
        # Threads beyond the last team follow it.
        team = cutlass.min(team, self.teams - 1)
        size = partial_size(held, self.columns)
        tops = partials.iterator + held * self.columns + row
        top, total = -cutlass.Float32.inf, cutlass.Float32(0.0)
        own = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        own.fill(0.0)
        values = cute.make_rmem_tensor((VECTOR, self.depth), cutlass.Float32)
        at_a_time = cutlass.const_expr(self.teams * self.depth)
        for first in cutlass.range(0, parts, at_a_time, unroll=1):
            values.fill(0.0)
            for i in cutlass.range_constexpr(self.depth):
                part = first + i * self.teams + team
                if part < parts:
                    source = self.place(base, part, size) + row * self.columns + column
                    load_vector(partials.iterator, source, values[None, i])
            here, mine = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if thread < at_a_time and first + thread < parts:
                place = self.place(base, first + thread, size)
                here = cute.make_tensor(tops + place, cute.make_layout(1))[0]
                mine = cute.make_tensor(tops + place + held, cute.make_layout(1))[0]
            higher = cute.arch.fmax(top, self.over_block(here, warps[None, 0], cute.arch.fmax))
            reference = finite_or_zero(higher)
            weight, shrink = exp2(here - reference), exp2(top - reference)
            if thread < at_a_time:
                weights[thread] = weight
            total = total * shrink + self.over_block(mine * weight, warps[None, 1], lambda a, b: a + b)
            top = higher
            for j in cutlass.range_constexpr(VECTOR):
                own[j] *= shrink
            for i in cutlass.range_constexpr(self.depth):
                weight = weights[i * self.teams + team]
                for j in cutlass.range_constexpr(VECTOR):
                    own[j] += values[j, i] * weight
            cute.arch.sync_threads()
        return top, total, own

    @cute.jit
    def over_block(self, value, warps: cute.Tensor, combine: cutlass.Constexpr):
        """A reduction over the block's threads, in the same order for all of them; what they wrote before is seen."""
        value = cute.arch.warp_reduction(value, combine)
        if cute.arch.lane_idx() == 0:
            warps[cute.arch.thread_idx()[0] // WARP] = value
        cute.arch.sync_threads()
        value = warps[0]
        for warp in cutlass.range_constexpr(1, self.warps):
            value = combine(value, warps[warp])
        return value

    @cute.jit
    def add_teams(self, own, sums: cute.Tensor):
        """The sums of all teams: a thread's columns are `thread * VECTOR` and those after it from then on."""
        thread = cute.arch.thread_idx()[0]
        if thread < self.teams * self.lanes:
            for j in cutlass.range_constexpr(VECTOR):
                sums[j, thread % self.lanes, thread // self.lanes] = own[j]
        cute.arch.sync_threads()
        added = cute.make_rmem_tensor(VECTOR, cutlass.Float32)
        added.fill(0.0)
        if thread < self.lanes:
            for j in cutlass.range_constexpr(VECTOR):
                added[j] = tree([sums[j, thread, team] for team in range(self.teams)], lambda a, b: a + b)
        cute.arch.sync_threads()
        return added

    @cute.jit
    def write(self, own, top, total, query, unit, row, column, out, lse, scoring: Scoring):
        """Sums, divided, into the row's place, where the column is one."""
        head = unit * self.key.pack + row % self.key.pack
        token = query + row // self.key.pack
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = scoring.sinks[head].to(cutlass.Float32)
        factor, row_lse = normalized(top, total, sink, scoring.v_scale)
        if column < self.key.head_dim_v:
            result = cute.make_rmem_tensor(VECTOR, out.element_type)
            for j in cutlass.range_constexpr(VECTOR):
                result[j] = (own[j] * factor).to(out.element_type)
            offset = cutlass.Int64(token) * out.stride[0] + head * out.stride[1] + column
            store_vector(result, out.iterator, offset)
        if cutlass.const_expr(self.key.lse):
            if column == 0:
                lse[token, head] = row_lse

    @cute.jit
    def held_at(self, range_, query, row):
        """What `place` takes for the tile of a range's row, and which of the tile's rows it is."""
        base, m = range_, row
        if cutlass.const_expr(self.key.shares):
            tile = cutlass.Int32(0)
            if cutlass.const_expr(self.tile_tokens is not None):
                rows = cutlass.const_expr(self.tile_tokens * self.key.pack)
                tile, m = row // rows, row % rows
            number = row_tile_of(query, range_ // self.units, tile, self.tile_tokens)
            base = (number * self.units + range_ % self.units) * self.key.shares
        return base, m

    @cute.jit
    def place(self, base, part, size):
        """Where part `part` of a range lies."""
        slot = 2 * (base + part) + (1 if part == 0 else 0)
        if cutlass.const_expr(self.key.shares):
            slot = base + part
        return cutlass.Int64(slot) * size
