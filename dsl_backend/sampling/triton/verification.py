# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts in Triton.

`accept_drafts` has one program for each request: it finds the first draft that is not accepted, and writes the tokens.
Where distributions are known, `test_ratios` has gone before, with one program for each draft; then `accept_drafts`
also draws the token of the first draft that is not accepted, from what the target has more of than the drafter. That is
one pass over both rows, which sums blocks, and a second look at the block of the draw.
"""

import triton
import triton.language as tl

from dsl_backend.sampling import verification_random
from dsl_backend.sampling.triton.fixed_point import (
    EXPONENT_SCALE,
    GREEDY_TEMPERATURE,
    MAX_LOGIT,
    NEG_INF,
    NO_ID,
    PROB_ONE,
    load_logits,
    multiply_high,
    prob_of,
    random_bits,
    scale_of,
)

RATIO_TEST = tl.constexpr(verification_random.RATIO_TEST)
RESIDUAL = tl.constexpr(verification_random.RESIDUAL)
HIGHEST_62 = tl.constexpr((1 << 62) - 1)
SCALE_ONE = tl.constexpr(2.0**102)
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def target_probs(logprobs, ids, V):
    """The target's probabilities in units of 2**-40, int64; 0 past the row's end."""
    logprob = tl.load(logprobs + ids, mask=ids < V, other=NEG_INF)
    return prob_of(logprob, 0.0, EXPONENT_SCALE)


@triton.jit
def draft_probs(values, ids, V, row, PROBABILITIES: tl.constexpr):
    """The drafter's probabilities in units of 2**-40, int64; 0 past the row's end.

    Args:
        row: (temperature, reference of the row, scale of its probabilities); not used for PROBABILITIES.
    """
    if PROBABILITIES:
        q = tl.load(values + ids, mask=ids < V, other=0.0)
        return (tl.minimum(tl.where(q > 0.0, q, 0.0), 1.0) * PROB_ONE).to(tl.int64)
    else:
        temperature, reference, scale = row
        prob = prob_of(load_logits(values, ids, V), reference, tl.max(scale_of(temperature), 0))
        prob = tl.umulhi((prob << 2).to(tl.uint64), tl.zeros(prob.shape, tl.uint64) + scale.to(tl.uint64))
        return tl.where(ids < V, prob.to(tl.int64), 0)


@triton.jit
def row_scale(values, V, temperature, BLOCK: tl.constexpr):
    """(reference of a row of draft logits, 2**62 / the sum of its probabilities), to normalize them."""
    max_logit = NEG_INF
    for base in range(0, V, BLOCK):
        max_logit = tl.maximum(max_logit, tl.max(load_logits(values, base + tl.arange(0, BLOCK), V), 0))
    reference = tl.minimum(max_logit, MAX_LOGIT)
    exponent_scale = tl.max(scale_of(temperature), 0)
    prob_sum = tl.full([], 0, tl.int64)
    for base in range(0, V, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        prob = prob_of(load_logits(values, ids, V), reference, exponent_scale)
        prob_sum += tl.sum(tl.where(ids < V, prob, 0))
    scale = (tl.full([], SCALE_ONE, tl.float64) / prob_sum.to(tl.float64)).to(tl.int64)
    return reference, tl.minimum(scale, HIGHEST_62)


@triton.jit
def test_ratios(
    drawn, stride, parameters, drafts, workspace, V, draft_V, PROBABILITIES: tl.constexpr, BLOCK: tl.constexpr
):
    """Test one draft: the grid is [requests, max_drafts].

    Args:
        drawn, parameters, drafts, workspace: bundles of `verification_args.py`.
        stride: between rows of the drafts' distributions.
    """
    request = tl.program_id(0)
    row = tl.load(drafts.cu_rows + request).to(tl.int64) + tl.program_id(1)
    if row + 1 < tl.load(drafts.cu_rows + request + 1):
        draft = tl.load(drafts.inputs + row + 1).to(tl.int64)
        token = tl.load(drawn.tokens + row).to(tl.int64)
        temperature = 1.0
        greedy = False
        if parameters.temperature is not None:
            temperature = tl.load(parameters.temperature + row)
            greedy = (temperature >= GREEDY_TEMPERATURE) == 0
        accepted = draft == token
        is_token = (draft >= 0) & (draft < V)
        # What accept_drafts does with this row's draft if it is not accepted: 1 is to draw from the rest.
        rest = (greedy == 0) & is_token
        if rest:
            values = drafts.distributions + tl.load(drafts.distribution_ids + row).to(tl.int64) * stride
            row_max = tl.full([], 0.0, tl.float32)
            scale = tl.full([], 0, tl.int64)
            if not PROBABILITIES:
                row_max, scale = row_scale(values, draft_V, temperature, BLOCK)
                tl.store(workspace.row_max + row, row_max)
                tl.store(workspace.scale + row, scale)
            at_draft = draft + tl.zeros([1], tl.int64)
            q = draft_probs(values, at_draft, draft_V, (temperature, row_max, scale), PROBABILITIES)
            p = target_probs(drawn.logprobs + row * V, at_draft, V)
            bits = random_bits(tl.load(parameters.seeds + row), tl.load(parameters.positions + row) + RATIO_TEST, 0)
            accepted = multiply_high(bits, tl.sum(q, 0)) < tl.sum(p, 0)
        tl.store(workspace.state + row, tl.where(accepted, 2, rest.to(tl.int32)))


@triton.jit
def draw_from_rest(
    logprobs,
    values,
    row,
    target_bits,
    V,
    draft_V,
    PROBABILITIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token drawn from max(p - q, 0); NO_ID where that is zero.

    Args:
        row: as in `draft_probs`.
        BLOCKS: a power of two, from V / BLOCK on.
    """
    sums = tl.zeros([BLOCKS], tl.int64)
    for base in range(0, V, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        rest = target_probs(logprobs, ids, V) - draft_probs(values, ids, draft_V, row, PROBABILITIES)
        sums = tl.where(tl.arange(0, BLOCKS) == base // BLOCK, tl.sum(tl.maximum(rest, 0)), sums)
    total = tl.sum(sums)
    token = tl.full([], NO_ID, tl.int32)
    if total > 0:
        target = multiply_high(target_bits, total)
        prefix = tl.cumsum(sums, 0)
        block = tl.sum((prefix <= target).to(tl.int32))
        before = tl.sum(tl.where(tl.arange(0, BLOCKS) < block, sums, 0))
        ids = block * BLOCK + tl.arange(0, BLOCK)
        rest = target_probs(logprobs, ids, V) - draft_probs(values, ids, draft_V, row, PROBABILITIES)
        prefix = before + tl.cumsum(tl.maximum(rest, 0), 0)
        token = tl.min(tl.where(prefix > target, ids, NO_ID), 0)
    return token


@triton.jit
def accept_drafts(
    drawn,
    stride,
    parameters,
    drafts,
    workspace,
    outputs,
    sizes,
    RATIO: tl.constexpr,
    PROBABILITIES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the tokens of one request and their number.

    Args:
        drawn, parameters, drafts, workspace, outputs: bundles of `verification_args.py`.
        sizes: (max_drafts, V, draft vocabulary).
        RATIO: `test_ratios` has tested the drafts.
        STEPS: a power of two, above max_drafts.
    """
    max_drafts, V, draft_V = sizes
    request = tl.program_id(0)
    first = tl.load(drafts.cu_rows + request).to(tl.int64)
    # -1 for a request without rows.
    num_drafts = tl.minimum(tl.load(drafts.cu_rows + request + 1) - first - 1, max_drafts).to(tl.int32)
    step = tl.arange(0, STEPS)
    sampled = tl.load(drawn.tokens + first + step, mask=step <= num_drafts, other=NO_TOKEN).to(tl.int64)
    draft = tl.load(drafts.inputs + first + 1 + step, mask=step < num_drafts, other=NO_TOKEN).to(tl.int64)
    if RATIO:
        state = tl.load(workspace.state + first + step, mask=step < num_drafts, other=0)
        accepted = state == 2
    else:
        accepted = draft == sampled
    num_accepted = tl.min(tl.where((step < num_drafts) & accepted, STEPS, step), 0)
    token = tl.sum(tl.where(step == num_accepted, sampled, 0))
    if RATIO:
        if tl.sum(tl.where((step == num_accepted) & (step < num_drafts), state, 0)) == 1:
            row = first + num_accepted
            values = drafts.distributions + tl.load(drafts.distribution_ids + row).to(tl.int64) * stride
            temperature = 1.0
            if parameters.temperature is not None:
                temperature = tl.load(parameters.temperature + row)
            row_max = tl.full([], 0.0, tl.float32)
            scale = tl.full([], 0, tl.int64)
            if not PROBABILITIES:
                row_max = tl.load(workspace.row_max + row)
                scale = tl.load(workspace.scale + row)
            bits = random_bits(tl.load(parameters.seeds + row), tl.load(parameters.positions + row) + RESIDUAL, 0)
            found = draw_from_rest(
                drawn.logprobs + row * V,
                values,
                (temperature, row_max, scale),
                bits,
                V,
                draft_V,
                PROBABILITIES,
                BLOCKS,
                BLOCK,
            )
            token = tl.where(found == NO_ID, token, found.to(tl.int64))
    written = tl.where(step < num_accepted, draft, tl.where(step == num_accepted, token, NO_TOKEN))
    written = tl.where(num_drafts < 0, NO_TOKEN, written)
    tl.store(outputs.tokens + request * (max_drafts + 1) + step, written, mask=step <= max_drafts)
    tl.store(outputs.counts + request, tl.where(num_drafts < 0, 0, num_accepted + 1))
