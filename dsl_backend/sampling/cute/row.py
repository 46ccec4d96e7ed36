# SPDX-License-Identifier: Apache-2.0
"""Passes of a cluster's threads over a row of logits. Each warp reads a segment of adjacent logits."""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from dsl_backend.primitives.copy import load_vector
from dsl_backend.sampling import fixed_point as constants
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.sampling.cute.philox import random_bits
from dsl_backend.sampling.cute.scan import WARP

# Logits that a lane loads at a time when a warp reads one thread's logits again, and the most loads. With 32 logits of
# 16 bits registers spilled (ptxas 13.0); 16 are enough for rows of 262144 logits in one CTA.
REVISIT_LOGITS, MAX_REVISIT_LOADS = 16, 4


class Segment(NamedTuple):
    """The adjacent logits of a row that a warp reads.

    Attributes:
        base, offset: pointer to the logits tensor, and the row's first element in it (64 bits).
        begin, end: the segment's first logit in the row, and one past its last.
        steps: loads of a lane along the segment.
    """

    base: Any
    offset: Any
    begin: Any
    end: Any
    steps: Any


class Row(NamedTuple):
    """A row and how to sample from it.

    Attributes:
        segment: of this thread's warp.
        vocab: logits of the row.
        scale: float32, of differences of logits.
        row_max: float32, the largest logit.
        reference: the same, but finite.
        min_prob: uint64, the least probability that min-p keeps; 0 where min-p is off.
        args, index: of the launch, and of the row in it: what is loaded where it is needed, for which no register is
            held before.
        random_bits: uint64, the 62 random bits of the first draw.
    """

    segment: Segment
    vocab: Any
    scale: Any
    row_max: Any
    reference: Any
    min_prob: Any
    args: Any
    index: Any
    random_bits: Any

    @property
    def top_k(self):
        """int32, from 1; vocab where top-k is off."""
        return top_k_of(self.args, self.index)


@cute.jit
def top_k_of(args: SampleArgs, index):
    """int32, from 1, of a row; vocab where top-k is off."""
    vocab = args.logits.shape[1]
    top_k = cutlass.Int64(args.top_k[index])
    has_top_k = top_k > 0 and top_k < vocab
    return cutlass.Int32(top_k) if has_top_k else vocab


@cute.jit
def top_p_of(row: Row):
    """float32; 1 where top-p is off."""
    top_p = row.args.top_p[row.index]
    return top_p if top_p < 1.0 else cutlass.Float32(1.0)


@cute.jit
def bits_of_draw(row: Row, draw):
    """62 random bits, uint64, for the number of a draw from the row."""
    bits = row.random_bits
    if draw > 0:
        bits = random_bits(row.args.seeds[row.index], row.args.positions[row.index], draw)
    return bits


class RowReader:
    """How a warp reads its segment of a row.

    Args:
        exp_sums: the first pass also sums the logits' exponentials; else its sums are 0.
    """

    def __init__(self, config: ClusterConfig, dtype: type[cutlass.Numeric], exp_sums: bool = False):
        self.vector, self.loads_in_flight = config.vector, config.loads_in_flight
        self.revisit_loads = min(MAX_REVISIT_LOADS, REVISIT_LOGITS // config.vector)
        self.dtype, self.exp_sums = dtype, exp_sums

    @cute.jit
    def exponentials(self, rX: cute.Tensor, reference):
        """The sum of exp(x - reference), as `fixed_point.exponential`."""
        exp_sum = cutlass.Float32(0.0)
        if cutlass.const_expr(self.exp_sums):
            reference = fixed_point.finite(reference)
            for i in cutlass.range_constexpr(cute.size(rX)):
                exp_sum = exp_sum + fixed_point.exponential(cutlass.Float32(rX[i]), reference)
        return exp_sum

    @cute.jit
    def rescaled(self, exp_sum, reference, other):
        """A sum of exponentials below a reference, below the larger one of that and another."""
        if cutlass.const_expr(self.exp_sums):
            larger = fixed_point.finite(cute.arch.fmax(reference, other))
            exp_sum = exp_sum * fixed_point.exponential(reference, larger)
        return exp_sum

    @cute.jit
    def thread_max(self, segment: Segment):
        """(the maximum of this thread's logits, the sum of their exponentials below it); NaN is ignored.

        -inf and 0 where the thread has none.
        """
        thread_begin = segment.begin + cute.arch.lane_idx() * self.vector
        maximum, exp_sum = -cutlass.Float32.inf, cutlass.Float32(0.0)
        for first in cutlass.range(0, segment.steps, self.loads_in_flight, unroll=1):
            rLogits = cute.make_rmem_tensor((self.vector, self.loads_in_flight), self.dtype)
            for i in cutlass.range_constexpr(self.loads_in_flight):
                # Columns past the segment's end load the row's start, so that no load waits for a branch.
                column = thread_begin + (first + i) * (WARP * self.vector)
                load_vector(segment.base, segment.offset + (column if column < segment.end else 0), rLogits[None, i])
            before = maximum
            for i in cutlass.range_constexpr(self.loads_in_flight):
                vector_max = cutlass.Float32(rLogits[0, i])
                for e in cutlass.range_constexpr(1, self.vector):
                    vector_max = cute.arch.fmax(vector_max, cutlass.Float32(rLogits[e, i]))
                inside = thread_begin + (first + i) * (WARP * self.vector) < segment.end
                maximum = cute.arch.fmax(maximum, vector_max) if inside else maximum
            if cutlass.const_expr(self.exp_sums):
                exp_sum = self.rescaled(exp_sum, before, maximum)
                for i in cutlass.range_constexpr(self.loads_in_flight):
                    vector_sum = self.exponentials(rLogits[None, i], maximum)
                    inside = thread_begin + (first + i) * (WARP * self.vector) < segment.end
                    exp_sum = exp_sum + vector_sum if inside else exp_sum
        return maximum, exp_sum

    @cute.jit
    def load_block(self, segment: Segment, vocab, block):
        """This lane's logits of a block, [vector, loads]; -inf past the row's end."""
        loads = cutlass.const_expr(constants.BLOCK // (WARP * self.vector))
        rLogits = cute.make_rmem_tensor((self.vector, loads), self.dtype)
        begin = block * constants.BLOCK + cute.arch.lane_idx() * self.vector
        if (block + 1) * constants.BLOCK <= vocab:
            for i in cutlass.range_constexpr(loads):
                load_vector(segment.base, segment.offset + begin + i * (WARP * self.vector), rLogits[None, i])
        else:
            for i in cutlass.range_constexpr(loads):
                for e in cutlass.range_constexpr(self.vector):
                    rLogits[e, i] = self.dtype(float("-inf"))
                column = begin + i * (WARP * self.vector)
                if column < vocab:
                    load_vector(segment.base, segment.offset + column, rLogits[None, i])
        return rLogits

    @cute.jit
    def load_logit(self, segment: Segment, token_id):
        """One logit in float32."""
        rLogit = cute.make_rmem_tensor(1, self.dtype)
        load_vector(segment.base, segment.offset + token_id, rLogit)
        return cutlass.Float32(rLogit[0])

    @cute.jit
    def for_each_logit(self, row: Row, visit: cutlass.Constexpr):
        """Call visit(x) for each of this thread's logits; x may be NaN or negative zero.

        One load at a time: a visit takes longer than a read from the cache.
        """
        segment = row.segment
        thread_begin = segment.begin + cute.arch.lane_idx() * self.vector
        for column in cutlass.range(thread_begin, segment.end, WARP * self.vector, unroll=1):
            rLogits = cute.make_rmem_tensor(self.vector, self.dtype)
            load_vector(segment.base, segment.offset + column, rLogits)
            for e in cutlass.range_constexpr(self.vector):
                visit(cutlass.Float32(rLogits[e]))

    @cute.jit
    def for_each_logit_of(self, row: Row, selected, visit: cutlass.Constexpr):
        """Call visit(x, token_id) for each logit of the threads that are selected.

        The lanes of a warp share the logits of one thread, where few threads are selected. The warp then stops once
        visit has returned true in a lane.
        """
        segment = row.segment
        lane = cute.arch.lane_idx()
        remaining = cutlass.Uint32(cute.arch.vote_ballot_sync(selected))
        if cutlass.Int32(cute.arch.popc(remaining)) > segment.steps:
            # Each lane reads its own logits: fewer loads wait for each other, in a small vocabulary above all.
            remaining = cutlass.Uint32(0)
            if selected:
                thread_begin = segment.begin + lane * self.vector
                for column in cutlass.range(thread_begin, segment.end, WARP * self.vector, unroll=1):
                    rOwn = cute.make_rmem_tensor(self.vector, self.dtype)
                    load_vector(segment.base, segment.offset + column, rOwn)
                    for e in cutlass.range_constexpr(self.vector):
                        visit(cutlass.Float32(rOwn[e]), column + e)
        while remaining != 0:
            source_lane = cutlass.Int32(cute.arch.popc((remaining & (~remaining + 1)) - 1))
            remaining = remaining & (remaining - 1)
            stop = cutlass.Boolean(False)
            for first in cutlass.range(0, segment.steps, WARP * self.revisit_loads, unroll=1):
                rLogits = cute.make_rmem_tensor((self.vector, self.revisit_loads), self.dtype)
                for i in cutlass.range_constexpr(self.revisit_loads):
                    column = segment.begin + ((first + i * WARP + lane) * WARP + source_lane) * self.vector
                    safe_column = column if column < segment.end else 0
                    load_vector(segment.base, segment.offset + safe_column, rLogits[None, i])
                # Not unrolled: the visit's code would be repeated for every load.
                for i in cutlass.range(self.revisit_loads, unroll=1):
                    column = segment.begin + ((first + i * WARP + lane) * WARP + source_lane) * self.vector
                    if column < segment.end:
                        for e in cutlass.range_constexpr(self.vector):
                            x = rLogits[e, 0]
                            for other in cutlass.range_constexpr(1, self.revisit_loads):
                                x = rLogits[e, other] if i == other else x
                            full = visit(cutlass.Float32(x), column + e)
                            stop = stop or full
            if cute.arch.vote_any_sync(stop):
                remaining = cutlass.Uint32(0)
