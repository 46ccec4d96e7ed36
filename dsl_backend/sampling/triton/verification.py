# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts in Triton.

Where only tokens are known, `accept_drafts` is all: one program for each request finds the first draft that is not
accepted, and writes the tokens. Where distributions are known there are up to five launches. In those that read rows,
a row has a program for each of its blocks:

1. `max_of_blocks`: the largest draft logit of each block, for each draft.
2. `sum_of_blocks`: the sum of each block's probabilities, below the row's maximum.
3. `accept_drafts`: normalizes q of the drafts by the sums of their blocks, and tests them.
4. `rest_of_blocks`: the sums of max(p - q, 0) of each block, for the one row of a request that is drawn again.
5. `draw_from_rest`: finds the draw's block by these sums, and the token by a second look at that block.

Probabilities need no normalization, and so neither 1 nor 2. Sums are of integers: no partition changes a bit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsl_backend.sampling import verification_random
from dsl_backend.sampling.triton.dependent_launch import after_the_last_launch
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
# Sums of blocks that a request's program adds at a time, of all its drafts.
SUMS_AT_ONCE = tl.constexpr(2048)


@triton.jit
def target_probs(logprobs, ids, V):
    """The target's probabilities in units of 2**-40, int64; 0 past the row's end."""
    logprob = tl.load(logprobs + ids, mask=ids < V, other=NEG_INF)
    return prob_of(logprob, 0.0, EXPONENT_SCALE)


@triton.jit
def draft_probs(values, ids, V, row, PROBABILITIES: tl.constexpr):
    """The drafter's probabilities in units of 2**-40, int64; 0 past the row's end.

    Args:
        row: (scale of exponents, reference of the row, scale of its probabilities); not used for PROBABILITIES.
    """
    if PROBABILITIES:
        q = tl.load(values + ids, mask=ids < V, other=0.0)
        return (tl.minimum(tl.where(q > 0.0, q, 0.0), 1.0) * PROB_ONE).to(tl.int64)
    else:
        exponent_scale, reference, scale = row
        prob = prob_of(load_logits(values, ids, V), reference, exponent_scale)
        prob = tl.umulhi((prob << 2).to(tl.uint64), tl.zeros(prob.shape, tl.uint64) + scale.to(tl.uint64))
        return tl.where(ids < V, prob.to(tl.int64), 0)


@triton.jit
def draft_rows(parameters, drafts, request, step, max_drafts, V):
    """(row, its draft, whether that is tested by the ratio) of a request's draft number `step`.

    A greedy row's draft is not, nor is one that is no token of the vocabulary.
    """
    row = tl.load(drafts.cu_rows + request).to(tl.int64) + step
    has_draft = (row + 1 < tl.load(drafts.cu_rows + request + 1)) & (step < max_drafts)
    draft = tl.load(drafts.inputs + row + 1, mask=has_draft, other=NO_TOKEN).to(tl.int64)
    tested = (draft >= 0) & (draft < V)
    if parameters.temperature is not None:
        tested &= tl.load(parameters.temperature + row, mask=has_draft, other=0.0) >= GREEDY_TEMPERATURE
    return row, draft, tested


@triton.jit
def draft_values(stride, drafts, row, tested):
    """Pointers to the distributions of rows' drafts."""
    return drafts.distributions + tl.load(drafts.distribution_ids + row, mask=tested, other=0).to(tl.int64) * stride


@triton.jit
def exponent_scale_of(parameters, row):
    """Of one row, a scalar."""
    temperature = 1.0
    if parameters.temperature is not None:
        temperature = tl.load(parameters.temperature + row)
    return tl.max(scale_of(temperature), 0)


@triton.jit
def max_of_blocks(
    stride, parameters, drafts, workspace, sizes, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Find the largest logit of one block of one draft: the grid is [requests * max_drafts, blocks of a draft's row].

    Args:
        stride: between rows of the drafts' distributions.
        parameters, drafts, workspace: bundles of `verification_args.py`.
        sizes: (max_drafts, V, draft vocabulary).
        BLOCKS: a power of two, from V / BLOCK on: of a row in the workspace.
        OVERLAP: the launches after the first one are programmatic dependent launches.
    """
    if OVERLAP:
        gdc_launch_dependents()
    max_drafts, V, draft_V = sizes
    program = tl.program_id(0)
    row, _, tested = draft_rows(parameters, drafts, program // max_drafts, program % max_drafts, max_drafts, V)
    if tested:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(draft_values(stride, drafts, row, tested), ids, draft_V)
        tl.store(workspace.maxima + row * BLOCKS + tl.program_id(1), tl.max(x, 0))


@triton.jit
def sum_of_blocks(
    stride, parameters, drafts, workspace, sizes, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Sum the probabilities of one block of one draft. Grid and arguments as in `max_of_blocks`."""
    after_the_last_launch(OVERLAP)
    max_drafts, V, draft_V = sizes
    program = tl.program_id(0)
    row, _, tested = draft_rows(parameters, drafts, program // max_drafts, program % max_drafts, max_drafts, V)
    if tested:
        blocks = tl.arange(0, BLOCKS)
        maxima = tl.load(workspace.maxima + row * BLOCKS + blocks, mask=blocks < tl.num_programs(1), other=NEG_INF)
        reference = tl.minimum(tl.max(maxima, 0), MAX_LOGIT)
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(draft_values(stride, drafts, row, tested), ids, draft_V)
        prob = prob_of(x, reference, exponent_scale_of(parameters, row))
        prob_sum = tl.sum(tl.where(ids < draft_V, prob, 0), 0)
        tl.store(workspace.sums + row * BLOCKS + tl.program_id(1), prob_sum)
        tl.store(workspace.references + row, reference, mask=tl.program_id(1) == 0)


@triton.jit
def test_ratios(
    drawn,
    stride,
    parameters,
    drafts,
    workspace,
    V,
    draft_V,
    rows,
    PROBABILITIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whether p and q accept the drafts of a request; meaningless where they are not tested.

    Args:
        rows: (row, draft, whether it is tested), [STEPS] each.
    """
    row, draft, tested = rows
    most: tl.constexpr = SUMS_AT_ONCE // row.shape[0]
    COLUMNS: tl.constexpr = BLOCKS if most > BLOCKS else most
    references = tl.zeros(row.shape, tl.float32)
    scales = tl.zeros(row.shape, tl.int64)
    exponent_scales = tl.zeros(row.shape, tl.float32)
    if not PROBABILITIES:
        blocks = tl.cdiv(draft_V, BLOCK)
        prob_sums = tl.zeros(row.shape, tl.int64)
        for base in range(0, blocks, COLUMNS):
            block = base + tl.arange(0, COLUMNS)
            mask = tested[:, None] & (block < blocks)[None, :]
            at = workspace.sums + row[:, None] * BLOCKS + block[None, :]
            prob_sums += tl.sum(tl.load(at, mask=mask, other=0), 1)
        # At least PROB_ONE, or 0 if no logit is above -inf: then q is 0 with any scale.
        divisors = tl.maximum(prob_sums.to(tl.float64), PROB_ONE)
        scales = tl.minimum((tl.full(row.shape, SCALE_ONE, tl.float64) / divisors).to(tl.int64), HIGHEST_62)
        tl.store(workspace.scales + row, scales, mask=tested)
        references = tl.load(workspace.references + row, mask=tested, other=0.0)
        temperatures = tl.full(row.shape, 1.0, tl.float32)
        if parameters.temperature is not None:
            temperatures = tl.load(parameters.temperature + row, mask=tested, other=1.0)
        exponent_scales = scale_of(temperatures)
    # Past the end of both rows where it is not tested.
    ids = tl.where(tested, draft, V)
    values = draft_values(stride, drafts, row, tested)
    q = draft_probs(values, ids, draft_V, (exponent_scales, references, scales), PROBABILITIES)
    p = target_probs(drawn.logprobs + row * V, ids, V)
    seeds = tl.load(parameters.seeds + row, mask=tested, other=0)
    positions = tl.load(parameters.positions + row, mask=tested, other=0)
    return multiply_high(random_bits(seeds, positions + RATIO_TEST, 0), q) < p


@triton.jit
def accept_drafts(
    drawn,
    stride,
    parameters,
    drafts,
    workspace,
    outputs,
    sizes,
    PROBABILITIES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the tokens of one request and their number.

    Where distributions are known, the last token is the drawn one here; the workspace says where it is drawn again.

    Args:
        drawn, parameters, drafts, workspace, outputs: bundles of `verification_args.py`.
        stride, sizes, BLOCKS, OVERLAP: as in `max_of_blocks`.
        STEPS: a power of two, above max_drafts.
    """
    RATIO: tl.constexpr = drafts.distributions is not None
    if RATIO:
        after_the_last_launch(OVERLAP)
    max_drafts, V, draft_V = sizes
    request = tl.program_id(0)
    first = tl.load(drafts.cu_rows + request).to(tl.int64)
    # -1 for a request without rows.
    num_drafts = tl.minimum(tl.load(drafts.cu_rows + request + 1) - first - 1, max_drafts).to(tl.int32)
    step = tl.arange(0, STEPS)
    sampled = tl.load(drawn.tokens + first + step, mask=step <= num_drafts, other=NO_TOKEN).to(tl.int64)
    draft = tl.load(drafts.inputs + first + 1 + step, mask=step < num_drafts, other=NO_TOKEN).to(tl.int64)
    accepted = draft == sampled
    if RATIO:
        rows = draft_rows(parameters, drafts, request, step, max_drafts, V)
        by_ratio = test_ratios(
            drawn, stride, parameters, drafts, workspace, V, draft_V, rows, PROBABILITIES, BLOCKS, BLOCK
        )
        accepted = tl.where(rows[2], by_ratio, accepted)
    num_accepted = tl.min(tl.where((step < num_drafts) & accepted, STEPS, step), 0)
    token = tl.sum(tl.where(step == num_accepted, sampled, 0))
    if RATIO:
        again = tl.sum((rows[2] & (step == num_accepted)).to(tl.int32), 0) > 0
        tl.store(workspace.again + first, tl.where(again, num_accepted, NO_TOKEN), mask=num_drafts >= 0)
    written = tl.where(step < num_accepted, draft, tl.where(step == num_accepted, token, NO_TOKEN))
    written = tl.where(num_drafts < 0, NO_TOKEN, written)
    tl.store(outputs.tokens + request * (max_drafts + 1) + step, written, mask=step <= max_drafts)
    tl.store(outputs.counts + request, tl.where(num_drafts < 0, 0, num_accepted + 1))


@triton.jit
def drawn_again(drafts, workspace, request):
    """(the row of a request that is drawn again, its draft's number; -1 if there is none)."""
    first = tl.load(drafts.cu_rows + request).to(tl.int64)
    has_rows = first < tl.load(drafts.cu_rows + request + 1)
    step = tl.load(workspace.again + first, mask=has_rows, other=NO_TOKEN)
    return first + step, step


@triton.jit
def rest_probs(drawn, stride, parameters, drafts, workspace, V, draft_V, row, ids, PROBABILITIES: tl.constexpr):
    """max(p - q, 0) of a row, in units of 2**-40, int64; 0 past the row's end."""
    normal = (0.0, 0.0, 0)
    if not PROBABILITIES:
        scale = tl.load(workspace.scales + row)
        normal = (exponent_scale_of(parameters, row), tl.load(workspace.references + row), scale)
    q = draft_probs(draft_values(stride, drafts, row, True), ids, draft_V, normal, PROBABILITIES)
    return tl.maximum(target_probs(drawn.logprobs + row * V, ids, V) - q, 0)


@triton.jit
def rest_of_blocks(
    drawn,
    stride,
    parameters,
    drafts,
    workspace,
    sizes,
    PROBABILITIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum max(p - q, 0) of one block of the row that is drawn again: the grid is [requests, blocks of a row].

    Arguments as in `accept_drafts`.
    """
    after_the_last_launch(OVERLAP)
    _, V, draft_V = sizes
    row, step = drawn_again(drafts, workspace, tl.program_id(0))
    if step >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        rest = rest_probs(drawn, stride, parameters, drafts, workspace, V, draft_V, row, ids, PROBABILITIES)
        tl.store(workspace.sums + row * BLOCKS + tl.program_id(1), tl.sum(rest, 0))


@triton.jit
def draw_from_rest(
    drawn,
    stride,
    parameters,
    drafts,
    workspace,
    outputs,
    sizes,
    PROBABILITIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Draw the last token of one request from max(p - q, 0); where that is zero, the drawn token stays.

    Arguments as in `accept_drafts`.
    """
    if OVERLAP:
        gdc_wait()
    max_drafts, V, draft_V = sizes
    row, step = drawn_again(drafts, workspace, tl.program_id(0))
    if step >= 0:
        blocks = tl.arange(0, BLOCKS)
        sums = tl.load(workspace.sums + row * BLOCKS + blocks, mask=blocks < tl.cdiv(V, BLOCK), other=0)
        total = tl.sum(sums, 0)
        if total > 0:
            bits = random_bits(tl.load(parameters.seeds + row), tl.load(parameters.positions + row) + RESIDUAL, 0)
            target = multiply_high(bits, total)
            block = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
            before = tl.sum(tl.where(blocks < block, sums, 0), 0)
            ids = block * BLOCK + tl.arange(0, BLOCK)
            rest = rest_probs(drawn, stride, parameters, drafts, workspace, V, draft_V, row, ids, PROBABILITIES)
            token = tl.min(tl.where(before + tl.cumsum(rest, 0) > target, ids, NO_ID), 0)
            tl.store(outputs.tokens + tl.program_id(0) * (max_drafts + 1) + step, token)
