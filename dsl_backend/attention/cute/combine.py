# SPDX-License-Identifier: Apache-2.0
"""Partial results of key ranges that were cut, merged into outputs."""

from typing import cast

import cutlass
from cutlass import cute

from dsl_backend.attention.cute.args import Outputs
from dsl_backend.attention.cute.mask import Mask
from dsl_backend.attention.cute.scheduler.balanced import SPLIT_RANGE_FIELDS, SplitRange
from dsl_backend.attention.cute.scheduler.requests import Requests, seqlen_info_of
from dsl_backend.attention.cute.scheduler.split_kv import even_splits_of, fixed_splits_of, row_tile_idx_of
from dsl_backend.attention.cute.scheduler.work_tile import q_head_of, v_split_of
from dsl_backend.attention.cute.score_mod import ScoreModArgs, v_scale_of
from dsl_backend.attention.cute.softmax import finalize
from dsl_backend.primitives.copy import load_vector, store_vector
from dsl_backend.primitives.math import exp2, finite_or_zero, fma, quotient, tree_reduce

WARP, WARPS = 32, 8
THREADS = WARP * WARPS
RESIDENT = 3  # blocks on an SM: what is left for each is 80 registers a thread
DEPTH = 8  # parts of which a thread has values in flight
FOLD_DEPTH = 4  # the same where they are folded one by one
FEW = 8  # parts that a warp merges by itself
MOST_BLOCKS = 16  # of a request's range where shares are its own


def partial_size(rows: int, columns: int) -> int:
    """float32s of a partial result: [rows, columns] sums, each row's largest base-2 score, each row's total."""
    return rows * columns + (2 * rows + 3) // 4 * 4


def fold_workspace_size(rows: int, columns: int) -> int:
    """float32s of what a block folds: a row tile's sums, and each of its threads' statistics of two rows."""
    return rows * (columns + 8)


@cute.jit
def combine_scales(row_max, its_top):
    """Two partial results as one: (its largest base-2 score, what the first one's and the second one's are times).

    The same operations wherever they are asked for, so that who folds does not matter.
    """
    higher = cute.arch.fmax(row_max, its_top)
    reference = finite_or_zero(higher)
    return higher, exp2(row_max - reference), exp2(its_top - reference)


class SplitKVCombine:
    """A warp merges up to 128 columns of a row, a lane four or two of them; the warps of a block share long ranges.

    Every block finds out alone what there is to do: rows of ranges that were cut are few in some batches and many in
    others. Where shares are a request's own, blocks have the rows of a request and a unit, of all its row tiles.

    Args:
        tile_n, least: keys of a tile, and tiles of a share at least, as the schedule has them.
        tile_tokens: of a row tile; None where one has all of a request.
        resident: blocks of an SM that left the partial results.
    """

    def __init__(
        self, key, tile_n: int, least: int, columns: int, tile_tokens: int | None = None, ctas_per_sm: int = 1
    ):
        self.key, self.tile_n, self.least, self.columns = key, tile_n, least, columns
        self.tile_tokens, self.ctas_per_sm = tile_tokens, ctas_per_sm
        self.head_blocks = key.head_blocks
        self.vector = 4 if columns > 2 * WARP else 2
        self.slices = -(-columns // (WARP * self.vector))

    @cute.jit
    def __call__(
        self,
        outputs: Outputs,
        split_ranges: cute.Tensor | None,
        requests: Requests,
        scoring: ScoreModArgs,
        num_ctas: cutlass.Int32,
        stream,
    ):
        grid = (num_ctas * RESIDENT // self.ctas_per_sm, 1, 1)
        if cutlass.const_expr(self.key.max_splits or self.key.tiles_per_split):
            needed = cutlass.min(cute.ceil_div(requests.rows * self.slices, WARPS), MOST_BLOCKS)
            grid = (cute.size(requests.seqused_k) * self.head_blocks, needed, 1)
        self.kernel(outputs.partials, split_ranges, requests, outputs.out, outputs.lse, scoring).launch(
            grid=grid,
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=RESIDENT,
            # Must be named then (runtime/compile.py).
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        partials: cute.Tensor,
        split_ranges: cute.Tensor | None,
        requests: Requests,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        scoring: ScoreModArgs,
    ):
        allocator = cutlass.utils.SmemAllocator()
        sums = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((self.vector, WARP, WARPS)), 16)
        statistics = allocator.allocate_tensor(cutlass.Float32, cute.make_layout((WARPS, 2)), 16)
        merger = CombineThread(self, Outputs(out, lse, partials), requests, scoring, sums, statistics)
        if cutlass.const_expr(self.key.tiles_per_split):
            merger.merge_fixed(split_ranges)
        elif cutlass.const_expr(self.key.max_splits):
            merger.merge_own()
        else:
            merger.merge_dealt(split_ranges)


class CombineThread:
    """A thread's part in it. An item is a row's slice of columns: row * slices + slice."""

    def __init__(
        self, merge: SplitKVCombine, outputs: Outputs, requests: Requests, scoring: ScoreModArgs, sums, statistics
    ):
        self.key, self.columns, self.vector, self.slices = merge.key, merge.columns, merge.vector, merge.slices
        self.tile_n, self.least = merge.tile_n, merge.least
        self.tile_tokens, self.head_blocks = merge.tile_tokens, merge.head_blocks
        self.out, self.lse, self.partials = outputs.out, outputs.lse, cast("cute.Tensor", outputs.partials)
        self.requests, self.scoring = requests, scoring
        self.sums, self.statistics = sums, statistics
        self.lane = cute.arch.lane_idx()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.held = requests.rows
        self.mask = Mask(self.key, self.tile_n, requests)
        self.size = partial_size(requests.rows, merge.columns)

    # ------------------------------------------------------------------ who does what

    @cute.jit
    def merge_own(self):
        """The block's request and unit, with the blocks beside it."""
        range_, place, _ = cute.arch.block_idx()
        num_ctas = cute.arch.grid_dim()[1]
        parts, query, head_block, rows = self.own_parts(range_)
        # Before any exit, as below.
        cute.arch.griddepcontrol_wait()
        items = rows * self.slices
        if parts <= FEW:
            for item in cutlass.range(place * WARPS + self.warp, items, num_ctas * WARPS, unroll=1):
                self.merge_alone(range_, parts, query, head_block, item)
        else:
            for item in cutlass.range(place, items, num_ctas, unroll=1):
                self.merge_together(range_, parts, query, head_block, item)

    @cute.jit
    def merge_fixed(self, bases):
        """The block's request and unit, with the blocks beside it: splits that begin at fixed keys."""
        range_, place, _ = cute.arch.block_idx()
        num_ctas = cute.arch.grid_dim()[1]
        request, head_block = range_ // self.head_blocks, range_ % self.head_blocks
        query, seqlen_q, seqlen_k = seqlen_info_of(self.requests, request, cute.size(self.requests.seqused_k))
        _, parts = fixed_splits_of(self.mask, seqlen_q, seqlen_k)
        # Before any exit, as below.
        cute.arch.griddepcontrol_wait()
        base = bases[request]
        if base >= 0:
            items = seqlen_q * self.key.pack_gqa * self.slices
            for item in cutlass.range(place * WARPS + self.warp, items, num_ctas * WARPS, unroll=1):
                self.fold_row(base, parts, query, head_block, item)

    @cute.jit
    def fold_row(self, base, parts, query, head_block, item):
        """A row's partial results folded from the last split to the first, as `Multiplier.fold` does it."""
        row, column = item // self.slices, self.column(item)
        rows = cutlass.const_expr(self.tile_tokens * self.key.pack_gqa)
        first, m = base + row // rows * parts * self.head_blocks + head_block, row % rows
        statistics = self.partials.iterator + self.held * self.columns + m
        row_max, row_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        own = cute.make_rmem_tensor(self.vector, cutlass.Float32)
        values = cute.make_rmem_tensor((self.vector, FOLD_DEPTH), cutlass.Float32)
        own.fill(0.0)
        for chunk in cutlass.range(0, parts, WARP, unroll=1):
            # Lane i: what is known of the i-th part from the chunk's end.
            part = parts - 1 - chunk - self.lane
            here, mine = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if part >= 0:
                source = statistics + cutlass.Int64(first + part * self.head_blocks) * self.size
                here = cute.make_tensor(source, cute.make_layout(1))[0]
                mine = cute.make_tensor(source + self.held, cute.make_layout(1))[0]
            for at in cutlass.range(0, cutlass.min(parts - chunk, WARP), FOLD_DEPTH, unroll=1):
                values.fill(0.0)
                for i in cutlass.range_constexpr(FOLD_DEPTH):
                    one = parts - 1 - chunk - at - i
                    if one >= 0 and column < self.columns:
                        source = cutlass.Int64(first + one * self.head_blocks) * self.size + m * self.columns + column
                        load_vector(self.partials.iterator, source, values[None, i])
                for i in cutlass.range_constexpr(FOLD_DEPTH):
                    its_top, its_total = cute.arch.shuffle_sync(here, at + i), cute.arch.shuffle_sync(mine, at + i)
                    row_max, keeps, adds = combine_scales(row_max, its_top)
                    row_sum = fma(its_total, adds, row_sum * keeps)
                    for j in cutlass.range_constexpr(self.vector):
                        own[j] = fma(values[j, i], adds, own[j] * keeps)
        self.write(own, row_max, row_sum, query, head_block, row, column)

    @cute.jit
    def own_parts(self, range_):
        """Of a request's range for a unit, as a Cut has them: parts, query row, unit, rows (0: nothing to merge)."""
        requests = self.requests
        first, seqlen_q, seqlen_k = seqlen_info_of(requests, range_ // self.head_blocks, cute.size(requests.seqused_k))
        _, tiles, share = even_splits_of(self.mask, self.least, seqlen_q, seqlen_k)
        parts, rows = (tiles + share - 1) // share, seqlen_q * self.key.pack_gqa
        if parts == 1 or seqlen_q < requests.min_seqlen_q or seqlen_q > requests.max_seqlen_q:
            rows = cutlass.Int32(0)
        return parts, first, range_ % self.head_blocks, rows

    @cute.jit
    def merge_dealt(self, split_ranges):
        """Items of all ranges that were cut: of those of many parts by blocks, of the others by warps.

        Every block's Cut has places for as many items as there may be, place = item * blocks + block. They are dealt
        out in turns, one less than there are blocks or warps: a step by them goes to the block before, or nearly. Where
        ranges are equally long, every so many blocks leave a Cut, and whole rounds would meet all of them or none.
        """
        block, num_ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        rounds = cute.ceil_div(
            cute.size(split_ranges, mode=[0]) * self.held * self.slices, cutlass.max(num_ctas - 1, 1)
        )
        for first in cutlass.range(0, rounds, WARP, unroll=1):
            entry, item = self.dealt(split_ranges, block, num_ctas, first + self.lane)
            own_entry, own_item = self.dealt(
                split_ranges, block * WARPS + self.warp, num_ctas * WARPS, first + self.lane
            )
            if first == 0:
                # Before any exit: a kernel that ends early would let the next one start beside the one before.
                cute.arch.griddepcontrol_wait()
            cut, own_cut = self.cut(split_ranges, entry), self.cut(split_ranges, own_entry)
            many = cut.num_splits > FEW and item < cut.num_rows * self.slices
            few = own_cut.num_splits > 0 and own_cut.num_splits <= FEW and own_item < own_cut.num_rows * self.slices
            many, few = cute.arch.vote_ballot_sync(many), cute.arch.vote_ballot_sync(few)
            self.merge_some(split_ranges, own_entry, own_item, few, False)
            self.merge_some(split_ranges, entry, item, many, True)

    @cute.jit
    def dealt(self, split_ranges, own, turns, nth):
        """The block and the item of the nth place of who has its own of so many turns."""
        count = cute.size(split_ranges, mode=[0])
        place = own + nth * cutlass.max(turns - 1, 1)
        if own > 0 and own == turns - 1:
            place = count * self.held * self.slices  # behind all items
        item = quotient(place, count)
        return place - item * count, item

    @cute.jit
    def merge_some(self, split_ranges, entry, item, wanted, together: cutlass.Constexpr[bool]):
        """The items of the lanes that are wanted, one after the other.

        What blocks left is read again: kept, it would take registers that values of parts need.
        """
        while wanted != 0:
            lane = cute.arch.popc(~wanted & (wanted - 1))
            range_, one = cute.arch.shuffle_sync(entry, lane), cute.arch.shuffle_sync(item, lane)
            parts, query, head_block, _ = self.cut(split_ranges, range_)
            if cutlass.const_expr(together):
                self.merge_together(range_, parts, query, head_block, one)
            else:
                self.merge_alone(range_, parts, query, head_block, one)
            wanted &= wanted - 1

    @cute.jit
    def cut(self, split_ranges, entry):
        """What a block left."""
        fields = cute.make_rmem_tensor(SPLIT_RANGE_FIELDS, cutlass.Int32)
        load_vector(split_ranges.iterator, cutlass.Int64(entry) * SPLIT_RANGE_FIELDS, fields)
        return SplitRange(*[fields[i] for i in range(SPLIT_RANGE_FIELDS)])

    # ------------------------------------------------------------------ an item

    @cute.jit
    def merge_alone(self, range_, parts, query, head_block, item):
        row, column = item // self.slices, self.column(item)
        row_max, row_sum, own = self.add(range_, query, row, column, parts, 0, 1)
        self.write(own, row_max, row_sum, query, head_block, row, column)

    @cute.jit
    def merge_together(self, range_, parts, query, head_block, item):
        """By all warps of the block, which share the parts."""
        row, column = item // self.slices, self.column(item)
        row_max, row_sum, own = self.add(range_, query, row, column, parts, self.warp, WARPS)
        sums, statistics = self.sums, self.statistics
        for j in cutlass.range_constexpr(self.vector):
            sums[j, self.lane, self.warp] = own[j]
        if self.lane == 0:
            statistics[self.warp, 0], statistics[self.warp, 1] = row_max, row_sum
        cute.arch.sync_threads()
        if self.warp == 0:
            row_maxes = [statistics[warp, 0] for warp in range(WARPS)]
            row_max = tree_reduce(row_maxes, cute.arch.fmax)
            probs = [exp2(one - finite_or_zero(row_max)) for one in row_maxes]
            row_sum = tree_reduce([statistics[warp, 1] * probs[warp] for warp in range(WARPS)], lambda a, b: a + b)
            for j in cutlass.range_constexpr(self.vector):
                parts_of = [sums[j, self.lane, warp] * probs[warp] for warp in range(WARPS)]
                own[j] = tree_reduce(parts_of, lambda a, b: a + b)
            self.write(own, row_max, row_sum, query, head_block, row, column)
        cute.arch.sync_threads()

    @cute.jit
    def column(self, item):
        """The lane's first."""
        return (item % self.slices * WARP + self.lane) * self.vector

    @cute.jit
    def add(self, range_, query, row, column, parts, first, step: cutlass.Constexpr[int]):
        """Over parts `first`, `first + step`, ... of a row: its largest base-2 score, its total, the lane's sums."""
        base, m = self.held_at(range_, query, row)
        count = (parts - first + step - 1) // step
        row_max, row_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        own = cute.make_rmem_tensor(self.vector, cutlass.Float32)
        values = cute.make_rmem_tensor((self.vector, DEPTH), cutlass.Float32)
        own.fill(0.0)
        statistics = self.partials.iterator + self.held * self.columns + m
        for chunk in cutlass.range(0, count, WARP, unroll=1):
            here, mine = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if chunk + self.lane < count:
                source = statistics + self.place(base, first + (chunk + self.lane) * step)
                here = cute.make_tensor(source, cute.make_layout(1))[0]
                mine = cute.make_tensor(source + self.held, cute.make_layout(1))[0]
            # On their way while weights are found.
            self.load(values, base, m, column, first + chunk * step, count - chunk, step)
            higher = cute.arch.fmax(row_max, cute.arch.warp_reduction(here, cute.arch.fmax))
            reference = finite_or_zero(higher)
            weight, acc_scale = exp2(here - reference), exp2(row_max - reference)
            row_sum = row_sum * acc_scale + cute.arch.warp_reduction(mine * weight, lambda a, b: a + b)
            row_max = higher
            for j in cutlass.range_constexpr(self.vector):
                own[j] *= acc_scale
            self.add_values(own, values, weight, 0)
            for at in cutlass.range(DEPTH, cutlass.min(count - chunk, WARP), DEPTH, unroll=1):
                self.load(values, base, m, column, first + (chunk + at) * step, count - chunk - at, step)
                self.add_values(own, values, weight, at)
        return row_max, row_sum, own

    @cute.jit
    def load(self, values, base, row, column, first, count, step: cutlass.Constexpr[int]):
        """The lane's values of DEPTH parts, or those that are there."""
        partials = self.partials
        values.fill(0.0)
        for i in cutlass.range_constexpr(DEPTH):
            if i < count and column < self.columns:
                source = self.place(base, first + i * step) + row * self.columns + column
                load_vector(partials.iterator, source, values[None, i])

    @cute.jit
    def add_values(self, own, values, weight, at):
        """weight: of the part that is the lane's; at: the first of those whose values these are."""
        for i in cutlass.range_constexpr(DEPTH):
            factor = cute.arch.shuffle_sync(weight, at + i)
            for j in cutlass.range_constexpr(self.vector):
                own[j] += values[j, i] * factor

    @cute.jit
    def write(self, own, row_max, row_sum, query, head_block, row, column):
        """Sums, divided, into the row's place, where the column is one of the unit's."""
        out, lse = self.out, self.lse
        head = q_head_of(self.key, head_block, row)
        token = query + row // self.key.pack_gqa
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = self.scoring.sinks[head].to(cutlass.Float32)
        factor, row_lse = finalize(row_max, row_sum, sink, v_scale_of(self.key, self.scoring, head_block))
        place = column
        if cutlass.const_expr(self.key.v_splits > 1):
            place += v_split_of(self.key, head_block) * self.key.columns
        if column < self.key.columns:
            result = cute.make_rmem_tensor(self.vector, out.element_type)
            for j in cutlass.range_constexpr(self.vector):
                result[j] = (own[j] * factor).to(out.element_type)
            offset = cutlass.Int64(token) * out.stride[0] + head * out.stride[1] + place
            store_vector(result, out.iterator, offset)
        if cutlass.const_expr(self.key.lse):
            if place == 0:
                lse[token, head] = row_lse

    @cute.jit
    def held_at(self, range_, query, row):
        """What `place` takes for the tile of a range's row, and which of the tile's rows it is."""
        base, m = range_, row
        if cutlass.const_expr(self.key.max_splits):
            tile = cutlass.Int32(0)
            if cutlass.const_expr(self.tile_tokens is not None):
                rows = cutlass.const_expr(self.tile_tokens * self.key.pack_gqa)
                tile, m = row // rows, row % rows
            number = row_tile_idx_of(query, range_ // self.head_blocks, tile, self.tile_tokens)
            base = (number * self.head_blocks + range_ % self.head_blocks) * self.key.max_splits
        return base, m

    @cute.jit
    def place(self, base, part):
        """Where part `part` of a range lies."""
        slot = 2 * (base + part) + (1 if part == 0 else 0)
        if cutlass.const_expr(self.key.max_splits):
            slot = base + part
        return cutlass.Int64(slot) * self.size
