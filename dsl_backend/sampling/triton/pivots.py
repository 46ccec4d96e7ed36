# SPDX-License-Identifier: Apache-2.0
"""The pivots of top-k and top-p over a row, found from their highest bits on."""

import triton
import triton.language as tl

from dsl_backend.sampling.triton.fixed_point import load_logits, prob_of, to_ordered_uint

BINS = tl.constexpr(256)
DIGIT_BITS = tl.constexpr(8)


@triton.jit
def top_k_pivot(logits, V, k, BLOCK: tl.constexpr):
    """The k-th largest logit of a row, as `to_ordered_uint`: four digits of 8 bits. 1 <= k <= V."""
    pivot = tl.zeros([], tl.uint32)
    remaining = k
    for i in range(4):
        shift = 24 - DIGIT_BITS * i
        higher_digits = (pivot >> shift) >> DIGIT_BITS
        bins = tl.zeros([BINS], tl.int32)
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            key = to_ordered_uint(load_logits(logits, ids, V))
            matches = (ids < V) & (((key >> shift) >> DIGIT_BITS) == higher_digits)
            bins += tl.histogram(((key >> shift) & (BINS - 1)).to(tl.int32), BINS, mask=matches)
        at_least = tl.sum(bins) - tl.cumsum(bins, 0) + bins
        digit = tl.sum((at_least >= remaining).to(tl.int32)) - 1
        is_digit = tl.arange(0, BINS) == digit
        remaining -= tl.sum(tl.where(is_digit, at_least - bins, 0))
        pivot |= digit.to(tl.uint32) << shift
    return pivot


@triton.jit
def allowed_prob(logits, ids, V, row, limits):
    """(key, probability) of tokens, which is 0 where min-p or top-k removes one.

    Args:
        row: (reference, scale).
        limits: (min_prob, top_k_key).
    """
    x = load_logits(logits, ids, V)
    prob = prob_of(x, row[0], row[1])
    key = to_ordered_uint(x)
    return key, tl.where((ids < V) & (prob >= limits[0]) & (key >= limits[1]), prob, 0)


@triton.jit
def top_p_pivot(logits, V, row, limits, top_p_limit, BLOCK: tl.constexpr):
    """(the least key of which top-p keeps a token, how many ties with it are removed, the probability kept).

    Top-p keeps a token while the sum of the likelier ones is below the limit. Each of 16 passes finds two bits of the
    key. Arguments as in `allowed_prob`.
    """
    pivot = tl.zeros([], tl.int64)
    for i in range(16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * i)
        sum1 = tl.zeros([], tl.int64)
        sum2 = tl.zeros([], tl.int64)
        sum3 = tl.zeros([], tl.int64)
        for base in range(0, V, BLOCK):
            key, prob = allowed_prob(logits, base + tl.arange(0, BLOCK), V, row, limits)
            wide = key.to(tl.int64)
            sum1 += tl.sum(tl.where(wide >= pivot + unit, prob, 0))
            sum2 += tl.sum(tl.where(wide >= pivot + 2 * unit, prob, 0))
            sum3 += tl.sum(tl.where(wide >= pivot + 3 * unit, prob, 0))
        # The largest key is the pivot from which on the sum reaches the limit.
        reached = (sum1 >= top_p_limit).to(tl.int32) + (sum2 >= top_p_limit).to(tl.int32)
        reached += (sum3 >= top_p_limit).to(tl.int32)
        pivot += unit * reached
    likelier = tl.zeros([], tl.int64)
    ties = tl.zeros([], tl.int32)
    tie_prob = tl.zeros([], tl.int64)
    for base in range(0, V, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        key, prob = allowed_prob(logits, ids, V, row, limits)
        wide = key.to(tl.int64)
        is_tie = (wide == pivot) & (ids < V)
        likelier += tl.sum(tl.where(wide > pivot, prob, 0))
        ties += tl.sum(is_tie.to(tl.int32))
        tie_prob = tl.maximum(tie_prob, tl.max(tl.where(is_tie, prob, 0)))
    kept_ties = tl.minimum((top_p_limit - likelier + tie_prob - 1) // tl.maximum(tie_prob, 1), ties.to(tl.int64))
    return pivot.to(tl.uint32), ties - kept_ties.to(tl.int32), likelier + kept_ties * tie_prob
