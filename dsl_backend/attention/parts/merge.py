# SPDX-License-Identifier: Apache-2.0
"""Partial results of key ranges that were cut, merged into outputs."""

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.schedule import MERGE_FIELDS, Requests, lengths_of, own_range
from dsl_backend.attention.parts.scores import Scoring
from dsl_backend.attention.parts.softmax import normalized
from dsl_backend.primitives.math import exp2, finite_or_zero

WARP = 32
AT_A_TIME = 8  # loads in flight


def partial_size(rows, columns):
    """float32s of a partial result: [rows, columns] sums, each row's largest base-2 score, each row's total."""
    return rows * columns + (2 * rows + 3) // 4 * 4


class Merge:
    """One block for a row of a range: a thread for each column.

    A range goes by the share of the batch in which it began; where shares are a request's own, by request and unit.

    Args:
        tile_n, least: keys of a tile, and tiles of a share at least, as the schedule has them.
    """

    def __init__(self, key, tile_n: int, least: int, columns: int):
        self.key, self.tile_n, self.least, self.columns = key, tile_n, least, columns
        self.units = key.heads_q // key.pack
        self.threads = -(-columns // WARP) * WARP

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
            grid=(ranges, requests.rows, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
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
        # Before any exit: a kernel that ends early would let the next one start beside the one before.
        cute.arch.griddepcontrol_wait()
        place, row, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.key.shares):
            parts, query, unit, rows = self.own_parts(requests, place)
        else:
            parts, query, unit, rows = (merges[place, field] for field in range(MERGE_FIELDS))
        if parts > 0 and row < rows:
            self.merge_row(partials, place, row, parts, query, unit, out, lse, scoring)

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
    def merge_row(self, partials, block, row, parts, query, unit, out, lse, scoring: Scoring):
        column = cute.arch.thread_idx()[0]
        lane = cute.arch.lane_idx()
        inside = column if column < self.columns else 0
        held = cute.arch.grid_dim()[1]
        tops = partials.iterator + held * self.columns + row
        top, total, sums = -cutlass.Float32.inf, cutlass.Float32(0.0), cutlass.Float32(0.0)
        for chunk in cutlass.range(cute.ceil_div(parts, WARP), unroll=1):
            part = chunk * WARP + lane
            here, mine = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if part < parts:
                place = self.place(block, part)
                here = cute.make_tensor(tops + place, cute.make_layout(1))[0]
                mine = cute.make_tensor(tops + place + held, cute.make_layout(1))[0]
            higher = cute.arch.fmax(top, cute.arch.warp_reduction_max(here))
            reference = finite_or_zero(higher)
            weight = exp2(here - reference)
            shrink = exp2(top - reference)
            total = total * shrink + cute.arch.warp_reduction_sum(mine * weight)
            sums *= shrink
            top = higher
            for first in cutlass.range(0, cutlass.min(parts - chunk * WARP, WARP), AT_A_TIME, unroll=1):
                for i in cutlass.range_constexpr(AT_A_TIME):
                    # Past the last part the weight is 0, and the value one that is there.
                    index = cutlass.min(chunk * WARP + first + i, parts - 1)
                    source = partials.iterator + self.place(block, index) + row * self.columns + inside
                    value = cute.make_tensor(source, cute.make_layout(1))[0]
                    factor = cute.arch.shuffle_sync(weight, first + i)
                    sums += value * factor if chunk * WARP + first + i < parts else 0.0
        head = unit * self.key.pack + row % self.key.pack
        token = query + row // self.key.pack
        sink = None
        if cutlass.const_expr(self.key.scores.sinks):
            sink = scoring.sinks[head].to(cutlass.Float32)
        factor, row_lse = normalized(top, total, sink, scoring.v_scale)
        if column < self.key.head_dim_v:
            offset = cutlass.Int64(token) * out.stride[0] + head * out.stride[1] + column
            cute.make_tensor(out.iterator + offset, cute.make_layout(1))[0] = (sums * factor).to(out.element_type)
        if cutlass.const_expr(self.key.lse):
            if column == 0:
                lse[token, head] = row_lse

    @cute.jit
    def place(self, block, part):
        """Where part `part` of a range lies."""
        slot = 2 * (block + part) + (1 if part == 0 else 0)
        if cutlass.const_expr(self.key.shares):
            slot = block * self.key.shares + part
        return cutlass.Int64(slot) * partial_size(cute.arch.grid_dim()[1], self.columns)
