# SPDX-License-Identifier: Apache-2.0
"""The pivot of top-k over a row, found from its highest bits on."""

import triton
import triton.language as tl

from dsl_backend.sampling.triton.fixed_point import load_logits, to_ordered_uint

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
