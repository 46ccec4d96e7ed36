# SPDX-License-Identifier: Apache-2.0
"""The sampler with one program for each row: for batches that fill the chip.

Passes over a row: one for the largest logit; four where top-k is on; one for the sum of what is kept, which where top-p
is on also lists the distances of it, as its sixteen passes look at no other; one that ends at the token.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import RowConfig
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec
from dsl_backend.sampling.triton.parts import (
    LEAST_TEMPERATURE,
    LN2,
    LOW_31,
    NEG_INF,
    NO_ID,
    SHARE_ONE,
    WEIGHT_ONE,
    WEIGHT_UNIT,
    away,
    distance,
    kth_largest,
    load,
    multiply_high,
    ordered,
    random_bits,
    scale,
    top_p_bound,
    weigh,
)


@triton.jit
def kept(z, ids, V, largest, least, kth):
    """Distances, weights and whether min-p and top-k keep them."""
    v = distance(z, largest)
    w = weigh(v)
    return v, w, (ids < V) & (w >= least) & (ordered(z) >= kth)


@triton.jit
def kept_by_all(z, ids, V, largest, least, kth, bound, removed, seen):
    """Weights, whether all filters keep them, and the ties with top-p's bound up to here; seen: those before."""
    v, w, keep = kept(z, ids, V, largest, least, kth)
    tie = keep & (v == bound)
    rank = seen + tl.cumsum(tie.to(tl.int32), 0)
    keep &= (v < bound) | (tie & (rank > removed))
    return w, keep, seen + tl.sum(tie.to(tl.int32))


@triton.jit
def sample_row(
    logits_ptr,
    stride,
    seeds_ptr,
    positions_ptr,
    temperature_ptr,
    k_ptr,
    p_ptr,
    min_p_ptr,
    tokens_ptr,
    logprobs_ptr,
    list_ptr,
    V,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    temperature = 1.0
    greedy = False
    if TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
        greedy = (temperature >= LEAST_TEMPERATURE) == 0
        temperature = tl.where(greedy, 1.0, temperature)

    largest_x = NEG_INF
    first = tl.full([], 0, tl.int32)
    for base in range(0, V, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        x = load(logits, ids, V)
        here = tl.max(x, 0)
        if here > largest_x:
            largest_x = here
            first = tl.min(tl.where(x == here, ids, NO_ID), 0)
    largest = tl.max(scale(largest_x + tl.zeros([1], tl.float32), temperature), 0)

    alive = largest > NEG_INF
    token = tl.where(alive, first, 0)
    go_on = alive if LOGPROBS else alive & (greedy == 0)
    if go_on:
        least = tl.full([], 0, tl.int64)
        if MIN_P:
            min_p = tl.load(min_p_ptr + row)
            min_p = tl.where((min_p > 0.0) & (greedy == 0), tl.minimum(min_p, 1.0), 0.0)
            least = (min_p * WEIGHT_ONE).to(tl.int64)
        kth = tl.full([], 0, tl.uint32)
        if TOP_K:
            k = tl.load(k_ptr + row)
            if (k > 0) & (k < V) & (greedy == 0):
                kth = kth_largest(logits, V, temperature, k.to(tl.int32), BLOCK)

        narrow = False
        share = tl.full([], 0, tl.int64)
        if TOP_P:
            p = tl.load(p_ptr + row)
            narrow = (p < 1.0) & (greedy == 0)
            share = ((1.0 - tl.where(p > 0.0, tl.minimum(p, 1.0), 0.0)) * SHARE_ONE).to(tl.int64)
        total = tl.full([], 0, tl.int64)
        count = tl.full([], 0, tl.int32)
        distances = list_ptr + row * V
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            v, w, keep = kept(scale(load(logits, ids, V), temperature), ids, V, largest, least, kth)
            total += tl.sum(tl.where(keep, w, 0))
            if TOP_P:
                if narrow:
                    listed = keep & (w > 0)
                    place = count + tl.cumsum(listed.to(tl.int32), 0) - 1
                    tl.store(distances + place, v, mask=listed)
                    count += tl.sum(listed.to(tl.int32))

        bound = tl.full([], NO_ID, tl.int32)
        removed = tl.full([], 0, tl.int32)
        if TOP_P:
            if narrow:
                # The list is read by other threads than wrote it.
                tl.debug_barrier()
                budget = (total >> 31) * share + (((total & LOW_31) * share) >> 31)
                bound, removed, gone = top_p_bound(distances, count, budget, BLOCK)
                total -= gone

        if greedy == 0:
            goal = multiply_high(random_bits(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)), total)
            passed = tl.full([], 0, tl.int64)
            seen = tl.full([], 0, tl.int32)
            token = tl.full([], NO_ID, tl.int32)
            base = tl.full([], 0, tl.int32)
            while base < V:
                ids = base + tl.arange(0, BLOCK)
                z = scale(load(logits, ids, V), temperature)
                w, keep, seen = kept_by_all(z, ids, V, largest, least, kth, bound, removed, seen)
                w = tl.where(keep, w, 0)
                passed += tl.sum(w)
                base += BLOCK
                if passed > goal:
                    running = passed - tl.sum(w) + tl.cumsum(w, 0)
                    token = tl.min(tl.where(running > goal, ids, NO_ID), 0)
                    base = V
        if LOGPROBS:
            log_total = tl.log2(total.to(tl.float32) * WEIGHT_UNIT) * LN2
            seen = tl.full([], 0, tl.int32)
            for base in range(0, V, BLOCK):
                ids = base + tl.arange(0, BLOCK)
                z = scale(load(logits, ids, V), temperature)
                w, keep, seen = kept_by_all(z, ids, V, largest, least, kth, bound, removed, seen)
                tl.store(
                    logprobs_ptr + row * V + ids, tl.where(keep, -away(z, largest) - log_total, NEG_INF), mask=ids < V
                )
    elif LOGPROBS:
        for base in range(0, V, BLOCK):
            ids = base + tl.arange(0, BLOCK)
            tl.store(logprobs_ptr + row * V + ids, tl.full([BLOCK], NEG_INF, tl.float32), mask=ids < V)
    tl.store(tokens_ptr + row, token)


@triton.jit
def rank_row(logprobs_ptr, tokens_ptr, chosen_ptr, ranks_ptr, ids_ptr, values_ptr, V, TOP, BLOCK: tl.constexpr):
    """The token's log-probability and rank, and the TOP likeliest: each the largest (value, lower id) below the last.

    One pass for each: TOP is small, and a row stays in the cache.
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
            key = (ordered(values).to(tl.int64) << 31) | (ids ^ NO_ID).to(tl.int64)
            best = tl.maximum(best, tl.max(tl.where((ids < V) & (key < last), key, -1), 0))
        last = best
        token = (best & LOW_31).to(tl.int32) ^ NO_ID
        tl.store(ids_ptr + row * TOP + n, token)
        tl.store(values_ptr + row * TOP + n, tl.load(logprobs + token))


class TritonSampler:
    """The sampler on a CUDA device, or in Triton's interpreter."""

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec = spec
        self.config = RowConfig.default(spec, target)
        self.distances = torch.empty(max_rows, spec.vocab, dtype=torch.int32, device=device)

    def launch(self, logits: torch.Tensor, rows: Parameters, out: Sampled) -> None:
        count, vocab = logits.shape
        options: dict[str, Any] = {"BLOCK": self.config.block, "num_warps": self.config.num_warps}
        unused = out.tokens

        def pointer(tensor: torch.Tensor | None) -> torch.Tensor:
            return unused if tensor is None else tensor

        sample_row[(count,)](
            logits,
            logits.stride(0),
            rows.seeds,
            rows.positions,
            pointer(rows.temperature),
            pointer(rows.top_k),
            pointer(rows.top_p),
            pointer(rows.min_p),
            out.tokens,
            pointer(out.logprobs),
            self.distances,
            vocab,
            TEMPERATURE=rows.temperature is not None,
            TOP_K=rows.top_k is not None,
            TOP_P=rows.top_p is not None,
            MIN_P=rows.min_p is not None,
            LOGPROBS=out.logprobs is not None,
            **options,
        )
        if out.logprobs is None:
            return
        rank_row[(count,)](
            out.logprobs,
            out.tokens,
            out.token_logprobs,
            out.token_ranks,
            out.top_ids,
            out.top_logprobs,
            vocab,
            self.spec.top,
            **options,
        )
