# SPDX-License-Identifier: Apache-2.0
"""Partial results of key ranges that crossed blocks, merged into outputs."""

import cutlass
from cutlass import cute

from dsl_backend.attention.parts.scores import Scoring
from dsl_backend.attention.parts.softmax import normalized
from dsl_backend.primitives.math import exp2, finite_or_zero

WARP = 32
AT_A_TIME = 8  # loads in flight


class Merge:
    """One block for a row of the range that began in share block_idx()[0]: a thread for each column.

    A partial result is [rows, columns] sums, then each row's largest base-2 score, then each row's total, float32.
    """

    def __init__(self, key, tile_m: int, columns: int):
        self.key, self.tile_m, self.columns = key, tile_m, columns
        self.partial = tile_m * (columns + 2)
        self.threads = -(-columns // WARP) * WARP

    @cute.kernel
    def kernel(
        self, partials: cute.Tensor, merges: cute.Tensor, out: cute.Tensor, lse: cute.Tensor | None, scoring: Scoring
    ):
        # Before any exit: a kernel that ends early would let the next one start beside the one before.
        cute.arch.griddepcontrol_wait()
        block, row, _ = cute.arch.block_idx()
        parts = merges[block, 0]
        if parts > 0 and row < merges[block, 3]:
            self.merge_row(partials, block, row, parts, merges[block, 1], merges[block, 2], out, lse, scoring)

    @cute.jit
    def merge_row(self, partials, block, row, parts, query, unit, out, lse, scoring: Scoring):
        column = cute.arch.thread_idx()[0]
        lane = cute.arch.lane_idx()
        inside = column if column < self.columns else 0
        tops = partials.iterator + self.tile_m * self.columns + row
        top, total, sums = -cutlass.Float32.inf, cutlass.Float32(0.0), cutlass.Float32(0.0)
        for chunk in cutlass.range(cute.ceil_div(parts, WARP), unroll=1):
            part = chunk * WARP + lane
            here, mine = -cutlass.Float32.inf, cutlass.Float32(0.0)
            if part < parts:
                place = self.place(block, part)
                here = cute.make_tensor(tops + place, cute.make_layout(1))[0]
                mine = cute.make_tensor(tops + place + self.tile_m, cute.make_layout(1))[0]
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
        """Where part `part` of the range that began in a block lies."""
        slot = 2 * (block + part) + (1 if part == 0 else 0)
        return cutlass.Int64(slot) * self.partial
