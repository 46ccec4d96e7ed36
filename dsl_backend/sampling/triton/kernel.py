# SPDX-License-Identifier: Apache-2.0
"""The sampler in Triton, with one program for each row.

Passes over a row: one for the maximum; four for top-k; one for the sum of the probabilities that min-p and top-k keep,
which with top-p also lists their distances; one for the draw. Top-p makes sixteen passes over that list.
"""

import triton
import triton.language as tl

from dsl_backend.sampling.triton.fixed_point import (
    GREEDY_TEMPERATURE,
    LN2,
    LOW_31,
    NEG_INF,
    NO_ID,
    PROB_ONE,
    PROB_UNIT,
    TOP_P_ONE,
    below_max,
    distance_of,
    load_logits,
    prob_of,
    random_bits,
    sampling_target,
    scaled_logit,
    to_ordered_uint,
)
from dsl_backend.sampling.triton.pivots import top_k_pivot, top_p_pivot


@triton.jit
def min_p_top_k(z, ids, V, row_max, min_prob, top_k_key):
    """(distance, probability, whether min-p and top-k keep the token)."""
    distance = distance_of(z, row_max)
    prob = prob_of(distance)
    return distance, prob, (ids < V) & (prob >= min_prob) & (to_ordered_uint(z) >= top_k_key)


@triton.jit
def all_filters(z, ids, V, row_max, min_prob, top_k_key, pivot, removed_ties, ties_before):
    """(probability, whether all filters keep the token, ties with top-p's pivot up to this block)."""
    distance, prob, keep = min_p_top_k(z, ids, V, row_max, min_prob, top_k_key)
    tie = keep & (distance == pivot)
    tie_rank = ties_before + tl.cumsum(tie.to(tl.int32), 0)
    keep &= (distance < pivot) | (tie & (tie_rank > removed_ties))
    return prob, keep, ties_before + tl.sum(tie.to(tl.int32))


@triton.jit
def sample_row(logits_ptr, stride, parameters, outputs, list_ptr, V, BLOCK: tl.constexpr):
    """Sample one row.

    Args:
        parameters, outputs: bundles of `args.py`.
        list_ptr: int32 [rows, V], workspace for distances.
    """
    LOGPROBS: tl.constexpr = outputs.logprobs is not None
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    temperature = 1.0
    greedy = False
    if parameters.temperature is not None:
        temperature = tl.load(parameters.temperature + row)
        greedy = (temperature >= GREEDY_TEMPERATURE) == 0
        temperature = tl.where(greedy, 1.0, temperature)

    max_logit = NEG_INF
    argmax = tl.full([], 0, tl.int32)
    for base in range(0, V, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        x = load_logits(logits, ids, V)
        block_max = tl.max(x, 0)
        if block_max > max_logit:
            max_logit = block_max
            argmax = tl.min(tl.where(x == block_max, ids, NO_ID), 0)
    row_max = tl.max(scaled_logit(max_logit + tl.zeros([1], tl.float32), temperature), 0)

    has_token = row_max > NEG_INF
    token = tl.where(has_token, argmax, 0)
    needs_probs = has_token if LOGPROBS else has_token & (greedy == 0)
    if needs_probs:
        min_prob = tl.full([], 0, tl.int64)
        if parameters.min_p is not None:
            min_p = tl.load(parameters.min_p + row)
            min_p = tl.where((min_p > 0.0) & (greedy == 0), tl.minimum(min_p, 1.0), 0.0)
            min_prob = (min_p * PROB_ONE).to(tl.int64)
        top_k_key = tl.full([], 0, tl.uint32)
        if parameters.top_k is not None:
            k = tl.load(parameters.top_k + row)
            if (k > 0) & (k < V) & (greedy == 0):
                top_k_key = top_k_pivot(logits, V, temperature, k.to(tl.int32), BLOCK)

        has_top_p = False
        complement = tl.full([], 0, tl.int64)
        if parameters.top_p is not None:
            p = tl.load(parameters.top_p + row)
            has_top_p = (p < 1.0) & (greedy == 0)
            complement = ((1.0 - tl.where(p > 0.0, tl.minimum(p, 1.0), 0.0)) * TOP_P_ONE).to(tl.int64)
        prob_sum = tl.full([], 0, tl.int64)
        count = tl.full([], 0, tl.int32)
        distances = list_ptr + row * V
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            z = scaled_logit(load_logits(logits, ids, V), temperature)
            distance, prob, keep = min_p_top_k(z, ids, V, row_max, min_prob, top_k_key)
            prob_sum += tl.sum(tl.where(keep, prob, 0))
            if parameters.top_p is not None:
                if has_top_p:
                    listed = keep & (prob > 0)
                    index = count + tl.cumsum(listed.to(tl.int32), 0) - 1
                    tl.store(distances + index, distance, mask=listed)
                    count += tl.sum(listed.to(tl.int32))

        pivot = tl.full([], NO_ID, tl.int32)
        removed_ties = tl.full([], 0, tl.int32)
        if parameters.top_p is not None:
            if has_top_p:
                # Other threads read the list than wrote it.
                tl.debug_barrier()
                budget = (prob_sum >> 31) * complement + (((prob_sum & LOW_31) * complement) >> 31)
                pivot, removed_ties, removed_prob = top_p_pivot(distances, count, budget, BLOCK)
                prob_sum -= removed_prob

        if greedy == 0:
            bits = random_bits(tl.load(parameters.seeds + row), tl.load(parameters.positions + row))
            target = sampling_target(bits, prob_sum)
            passed = tl.full([], 0, tl.int64)
            ties = tl.full([], 0, tl.int32)
            token = tl.full([], NO_ID, tl.int32)
            base = tl.full([], 0, tl.int32)
            while base < V:
                ids = base + tl.arange(0, BLOCK)
                z = scaled_logit(load_logits(logits, ids, V), temperature)
                prob, keep, ties = all_filters(z, ids, V, row_max, min_prob, top_k_key, pivot, removed_ties, ties)
                prob = tl.where(keep, prob, 0)
                passed += tl.sum(prob)
                base += BLOCK
                if passed > target:
                    prefix = passed - tl.sum(prob) + tl.cumsum(prob, 0)
                    token = tl.min(tl.where(prefix > target, ids, NO_ID), 0)
                    base = V
        if LOGPROBS:
            log_sum = tl.log2(prob_sum.to(tl.float32) * PROB_UNIT) * LN2
            ties = tl.full([], 0, tl.int32)
            for base in range(0, V, BLOCK):
                ids = base + tl.arange(0, BLOCK)
                z = scaled_logit(load_logits(logits, ids, V), temperature)
                prob, keep, ties = all_filters(z, ids, V, row_max, min_prob, top_k_key, pivot, removed_ties, ties)
                logprobs_ptr = outputs.logprobs + row * V + ids
                tl.store(logprobs_ptr, tl.where(keep, -below_max(z, row_max) - log_sum, NEG_INF), mask=ids < V)
    elif LOGPROBS:
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            tl.store(outputs.logprobs + row * V + ids, tl.full([BLOCK], NEG_INF, tl.float32), mask=ids < V)
    tl.store(outputs.tokens + row, token)


@triton.jit(do_not_specialize=["TOP"])
def rank_row(logprobs_ptr, tokens_ptr, chosen_ptr, ranks_ptr, ids_ptr, values_ptr, V, TOP, BLOCK: tl.constexpr):
    """The log-probability and rank of a row's token, and the TOP likeliest tokens.

    One pass for each of them: it is the largest (value, lower id) below the last. TOP is small, and the row is cached.
    """
    row = tl.program_id(0).to(tl.int64)
    logprobs = logprobs_ptr + row * V
    chosen = tl.load(logprobs + tl.load(tokens_ptr + row))
    rank = tl.full([], 0, tl.int32)
    for base in range(0, V, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        values = tl.load(logprobs + ids, mask=ids < V, other=NEG_INF)
        rank += tl.sum(((values >= chosen) & (ids < V)).to(tl.int32))
    tl.store(chosen_ptr + row, chosen)
    tl.store(ranks_ptr + row, rank)
    last = tl.full([], (1 << 63) - 1, tl.int64)
    for n in range(TOP):
        best = tl.full([], -1, tl.int64)
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            values = tl.load(logprobs + ids, mask=ids < V, other=NEG_INF)
            # 63 bits: 32 of order, and 31 in which a lower id is larger.
            key = (to_ordered_uint(values).to(tl.int64) << 31) | (ids ^ NO_ID).to(tl.int64)
            best = tl.maximum(best, tl.max(tl.where((ids < V) & (key < last), key, -1), 0))
        last = best
        token = (best & LOW_31).to(tl.int32) ^ NO_ID
        tl.store(ids_ptr + row * TOP + n, token)
        tl.store(values_ptr + row * TOP + n, tl.load(logprobs + token))
