# SPDX-License-Identifier: Apache-2.0
"""The sampler in Triton, with one program for each row.

Passes over a row: one for the maximum; four for top-k; one for the sum of the probabilities that min-p and top-k keep;
one for the draw. Top-p makes one more to accept the token, and two more for each token that it does not accept.
"""

import triton
import triton.language as tl

from dsl_backend.sampling.triton.fixed_point import (
    DEFINED_BLOCK,
    GREEDY_TEMPERATURE,
    LOW_31,
    MASS_ONE,
    MASS_WEIGHT,
    MAX_LOGIT,
    NEG_INF,
    NO_ID,
    PROB_ONE,
    TOP_P_ONE,
    load_logits,
    multiply_high,
    prob_of,
    random_bits,
    scale_of,
    scaled_prob_of,
    to_ordered_uint,
    weighted,
)
from dsl_backend.sampling.triton.pivots import top_k_pivot


@triton.jit
def block_sums(logits, base, V, row, limits, by_block, bound, BLOCK: tl.constexpr):
    """The ids of some blocks [GROUPS, WIDTH], and their prefix sums in the row.

    Args:
        row, limits: as in `allowed_prob`.
        by_block: relative to each block's maximum; else to the row's.
        bound: (x, id): only likelier tokens count.
    """
    WIDTH: tl.constexpr = min(BLOCK, DEFINED_BLOCK)
    ids = tl.reshape(base + tl.arange(0, BLOCK), [BLOCK // WIDTH, WIDTH])
    x = load_logits(logits, ids, V)
    reference, scale = row
    block_reference = tl.where(by_block, tl.minimum(tl.max(x, 1), MAX_LOGIT), reference)
    prob = scaled_prob_of(x, block_reference[:, None], scale, tl.where(by_block, MASS_ONE, PROB_ONE))
    likelier = (x > bound[0]) | ((x == bound[0]) & (ids > bound[1]))
    counts = by_block | (likelier & (prob >= limits[0]) & (to_ordered_uint(x) >= limits[1]))
    prefix = tl.cumsum(tl.where((ids < V) & counts, prob, 0), 1)
    weight = tl.where(by_block, prob_of(block_reference, reference, scale), MASS_WEIGHT)
    return ids, weighted(prefix, weight[:, None])


@triton.jit
def row_sum(logits, V, row, limits, by_block, bound, BLOCK: tl.constexpr):
    """The sum of the row's probabilities. Arguments as in `block_sums`."""
    total = tl.full([], 0, tl.int64)
    for base in range(0, V, BLOCK):
        _, prefix = block_sums(logits, base, V, row, limits, by_block, bound, BLOCK)
        total += tl.sum(tl.max(prefix, 1))
    return total


@triton.jit
def draw(logits, V, row, limits, by_block, bound, target, BLOCK: tl.constexpr):
    """The first id at which the prefix sum exceeds the target. Arguments as in `block_sums`."""
    token = tl.full([], NO_ID, tl.int32)
    passed = tl.full([], 0, tl.int64)
    base = tl.full([], 0, tl.int32)
    while base < V:
        ids, prefix = block_sums(logits, base, V, row, limits, by_block, bound, BLOCK)
        sums = tl.max(prefix, 1)
        before = passed + tl.cumsum(sums, 0) - sums
        passed += tl.sum(sums)
        base += BLOCK
        if passed > target:
            token = tl.min(tl.where(before[:, None] + prefix > target, ids, NO_ID))
            base = V
    return token


@triton.jit
def temperature_of(parameters, row):
    """(the temperature of a row, 1 if it is greedy; whether it is)."""
    temperature = 1.0
    greedy = False
    if parameters.temperature is not None:
        temperature = tl.load(parameters.temperature + row)
        greedy = (temperature >= GREEDY_TEMPERATURE) == 0
        temperature = tl.where(greedy, 1.0, temperature)
    return temperature, greedy


@triton.jit
def min_prob_of(parameters, row, greedy):
    """The least probability that min-p keeps, int64; 0 without min-p."""
    min_prob = tl.full([], 0, tl.int64)
    if parameters.min_p is not None:
        min_p = tl.load(parameters.min_p + row)
        min_p = tl.where((min_p > 0.0) & (greedy == 0), tl.minimum(min_p, 1.0), 0.0)
        min_prob = (min_p * PROB_ONE).to(tl.int64)
    return min_prob


@triton.jit
def top_k_of(parameters, row, greedy, V):
    """The number of top-k, int32 from 0 to V - 1; 0 without top-k."""
    top_k = tl.full([], 0, tl.int32)
    if parameters.top_k is not None:
        k = tl.load(parameters.top_k + row)
        top_k = tl.where((k > 0) & (k < V) & (greedy == 0), k, 0).to(tl.int32)
    return top_k


@triton.jit
def top_p_of(parameters, row, greedy, prob_sum):
    """(whether a row has top-p, the sum of likelier tokens from which on top-p removes one; prob_sum without)."""
    has_top_p = False
    limit = prob_sum
    if parameters.top_p is not None:
        p = tl.load(parameters.top_p + row)
        has_top_p = (p < 1.0) & (greedy == 0)
        complement = ((1.0 - tl.where(p > 0.0, tl.minimum(p, 1.0), 0.0)) * TOP_P_ONE).to(tl.int64)
        budget = (prob_sum >> 31) * complement + (((prob_sum & LOW_31) * complement) >> 31)
        limit = tl.where(has_top_p, prob_sum - tl.minimum(budget, prob_sum - 1), prob_sum)
    return has_top_p, limit


@triton.jit
def sample_row(logits_ptr, stride, parameters, tokens_ptr, V, BLOCK: tl.constexpr):
    """Draw the token of one row.

    Args:
        parameters: the bundle of `args.py`.
    """
    row_idx = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row_idx * stride
    temperature, greedy = temperature_of(parameters, row_idx)
    scale = tl.max(scale_of(temperature), 0)

    row_max = NEG_INF
    argmax = tl.full([], 0, tl.int32)
    for base in range(0, V, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        x = load_logits(logits, ids, V)
        block_max = tl.max(x, 0)
        if block_max > row_max:
            row_max = block_max
            argmax = tl.min(tl.where(x == block_max, ids, NO_ID), 0)
    row = (tl.minimum(row_max, MAX_LOGIT), scale)

    has_token = row_max > NEG_INF
    token = tl.where(has_token, argmax, 0)
    if has_token & (greedy == 0):
        min_prob = min_prob_of(parameters, row_idx, greedy)
        top_k_key = tl.full([], 0, tl.uint32)
        if parameters.top_k is not None:
            k = top_k_of(parameters, row_idx, greedy, V)
            if k > 0:
                top_k_key = top_k_pivot(logits, V, k, BLOCK)
        limits = (min_prob, top_k_key)
        by_block = (min_prob == 0) & (top_k_key == 0)
        everything = (NEG_INF, tl.full([], -1, tl.int32))
        prob_sum = row_sum(logits, V, row, limits, by_block, everything, BLOCK)
        seed = tl.load(parameters.seeds + row_idx)
        position = tl.load(parameters.positions + row_idx)
        target = multiply_high(random_bits(seed, position, 0), prob_sum)
        token = draw(logits, V, row, limits, by_block, everything, target, BLOCK)
        if parameters.top_p is not None:
            has_top_p, top_p_limit = top_p_of(parameters, row_idx, greedy, prob_sum)
            if has_top_p:
                draws = tl.full([], 1, tl.int32)
                bound = tl.load(logits + token).to(tl.float32)
                likelier = row_sum(logits, V, row, limits, False, (bound, token), BLOCK)
                while likelier >= top_p_limit:
                    target = multiply_high(random_bits(seed, position, draws), likelier)
                    token = draw(logits, V, row, limits, False, (bound, token), target, BLOCK)
                    bound = tl.load(logits + token).to(tl.float32)
                    likelier = row_sum(logits, V, row, limits, False, (bound, token), BLOCK)
                    draws += 1
    tl.store(tokens_ptr + row_idx, token)


@triton.jit
def log_sum_exp(values, V, BLOCK: tl.constexpr):
    """(the maximum of a row's values, the logarithm of the sum of exp(value - maximum)); 0 for a row of -inf."""
    row_max = NEG_INF
    for base in range(0, V, BLOCK):
        row_max = tl.maximum(row_max, tl.max(load_logits(values, base + tl.arange(0, BLOCK), V), 0))
    row_sum = 0.0
    for base in range(0, V, BLOCK):
        row_sum += tl.sum(tl.exp(below(load_logits(values, base + tl.arange(0, BLOCK), V), row_max)), 0)
    return row_max, tl.where(row_sum > 0.0, tl.log(row_sum), 0.0)


@triton.jit
def below(x, row_max):
    """How far x is from the row's maximum; an infinite maximum is no distance from itself."""
    return tl.where(x == NEG_INF, NEG_INF, tl.where(x == row_max, 0.0, x - row_max))


@triton.jit(do_not_specialize=["TOP"])
def rank_row(values_ptr, stride, tokens_ptr, outputs, out_stride, V, TOP, NORMALIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The value and rank of a row's token, and those of the TOP likeliest tokens.

    One pass for each of them: it is the largest (value, lower id) below the last. TOP is small, and the row is cached.

    Args:
        outputs: the bundle of `args.py`.
        NORMALIZE: values are logits whose log-softmax is returned; else they are returned.
    """
    row = tl.program_id(0).to(tl.int64)
    values = values_ptr + row * stride
    ids_ptr, found_ptr = outputs.ids + row * out_stride, outputs.logprobs + row * out_stride
    row_max, log_sum = 0.0, 0.0
    if NORMALIZE:
        row_max, log_sum = log_sum_exp(values, V, BLOCK)
    token = tl.load(tokens_ptr + row).to(tl.int32)
    chosen = load_logits(values, token, V)
    tl.store(ids_ptr, token)
    tl.store(found_ptr, below(chosen, row_max) - log_sum if NORMALIZE else chosen)
    rank = tl.full([], 0, tl.int32)
    for base in range(0, V, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        rank += tl.sum(((load_logits(values, ids, V) >= chosen) & (ids < V)).to(tl.int32))
    tl.store(outputs.ranks + row, rank)
    last = tl.full([], (1 << 63) - 1, tl.int64)
    for n in range(TOP):
        best = tl.full([], -1, tl.int64)
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            # 63 bits: 32 of order, and 31 in which a lower id is larger.
            key = (to_ordered_uint(load_logits(values, ids, V)).to(tl.int64) << 31) | (ids ^ NO_ID).to(tl.int64)
            best = tl.maximum(best, tl.max(tl.where((ids < V) & (key < last), key, -1), 0))
        last = best
        token = (best & LOW_31).to(tl.int32) ^ NO_ID
        x = load_logits(values, token, V)
        tl.store(ids_ptr + 1 + n, token)
        tl.store(found_ptr + 1 + n, below(x, row_max) - log_sum if NORMALIZE else x)
