# SPDX-License-Identifier: Apache-2.0
"""The pivots of top-k and top-p over a row, found from their highest bits on."""

import triton
import triton.language as tl

from dsl_backend.sampling.triton.fixed_point import load_logits, prob_of, scaled_logit, to_ordered_uint

BINS = tl.constexpr(256)
DIGIT_BITS = tl.constexpr(8)


@triton.jit
def top_k_pivot(logits, V, temperature, k, BLOCK: tl.constexpr):
    """The k-th largest z of a row, as `to_ordered_uint`: a radix select with four digits of 8 bits. 1 <= k <= V."""
    pivot = tl.zeros([], tl.uint32)
    remaining = k
    for i in range(4):
        shift = 24 - DIGIT_BITS * i
        higher_digits = (pivot >> shift) >> DIGIT_BITS
        bins = tl.zeros([BINS], tl.int32)
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            key = to_ordered_uint(scaled_logit(load_logits(logits, ids, V), temperature))
            matches = (ids < V) & (((key >> shift) >> DIGIT_BITS) == higher_digits)
            bins += tl.histogram(((key >> shift) & (BINS - 1)).to(tl.int32), BINS, mask=matches)
        at_least = tl.sum(bins) - tl.cumsum(bins, 0) + bins
        digit = tl.sum((at_least >= remaining).to(tl.int32)) - 1
        is_digit = tl.arange(0, BINS) == digit
        remaining -= tl.sum(tl.where(is_digit, at_least - bins, 0))
        pivot |= digit.to(tl.uint32) << shift
    return pivot


@triton.jit
def sums_beyond(distances, count, bounds, BLOCK: tl.constexpr):
    """The sums of the probabilities of listed distances above each of three bounds."""
    bound0, bound1, bound2 = bounds
    sum0 = tl.zeros([], tl.int64)
    sum1 = tl.zeros([], tl.int64)
    sum2 = tl.zeros([], tl.int64)
    for base in range(0, count, BLOCK):
        index = base + tl.arange(0, BLOCK)
        distance = tl.load(distances + index, mask=index < count, other=-1)
        prob = tl.where(index < count, prob_of(tl.maximum(distance, 0)), 0)
        sum0 += tl.sum(tl.where(distance > bound0, prob, 0))
        sum1 += tl.sum(tl.where(distance > bound1, prob, 0))
        sum2 += tl.sum(tl.where(distance > bound2, prob, 0))
    return sum0, sum1, sum2


@triton.jit
def top_p_pivot(distances, count, budget, BLOCK: tl.constexpr):
    """(pivot: the distance at which top-p's budget ends, how many ties with it are removed, the probability removed).

    The pivot is the least distance beyond which the sum of all probabilities is within the budget. Each of 15 passes
    finds two bits of it.
    """
    pivot = tl.zeros([], tl.int32)
    for i in range(15):
        unit = 1 << (28 - 2 * i)
        bounds = (pivot + unit - 1, pivot + 2 * unit - 1, pivot + 3 * unit - 1)
        sum0, sum1, sum2 = sums_beyond(distances, count, bounds, BLOCK)
        above = (sum0 > budget).to(tl.int32) + (sum1 > budget).to(tl.int32) + (sum2 > budget).to(tl.int32)
        pivot += unit * above
    beyond = tl.zeros([], tl.int64)
    ties = tl.zeros([], tl.int32)
    for base in range(0, count, BLOCK):
        index = base + tl.arange(0, BLOCK)
        distance = tl.load(distances + index, mask=index < count, other=-1)
        beyond += tl.sum(tl.where(distance > pivot, prob_of(tl.maximum(distance, 0)), 0))
        ties += tl.sum((distance == pivot).to(tl.int32))
    tie_prob = tl.max(prob_of(pivot + tl.zeros([1], tl.int32)), 0)
    removed_ties = tl.minimum((budget - beyond) // tie_prob, (ties - 1).to(tl.int64))
    return pivot, removed_ties.to(tl.int32), beyond + removed_ties * tie_prob
