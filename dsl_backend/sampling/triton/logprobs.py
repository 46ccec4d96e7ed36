# SPDX-License-Identifier: Apache-2.0
"""The log-probabilities of whole rows, with a program for each block of a row, behind any sampler that draws tokens.

What the filters keep are the first tokens in the order of larger logits, then higher ids. The last one kept is found by
its logit's order, `to_ordered_uint`, from the highest digit of 4 bits on. Each launch sums what each value of one digit
has, of the tokens that have the digits before: for top-k their number, for top-p their probability. All programs of
the next launch find the digit by these sums.

1. `max_of_row_blocks`: the largest logit of each block, and top-k's first digit.
2. `count_digits`, seven times for top-k: one digit each.
3. `sum_of_row_blocks`: the probabilities of each block that min-p and top-k keep, and top-p's first digit.
4. `sum_digits`, seven times for top-p: one digit each.
5. `write_logprobs`.

Sums are of integers: no partition changes what is kept, or a bit of the row's sum. A block that has nothing of the
digits found so far is not read again.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsl_backend.sampling.triton.dependent_launch import after_the_last_launch
from dsl_backend.sampling.triton.fixed_point import (
    DEFINED_BLOCK,
    LN2,
    MAX_LOGIT,
    NEG_INF,
    PROB_UNIT,
    SIGN,
    load_logits,
    mass_of,
    prob_of,
    scale_of,
    to_ordered_uint,
    weighted,
)
from dsl_backend.sampling.triton.kernel import min_prob_of, temperature_of, top_k_of, top_p_of

PASSES = 8
DIGIT_BITS = tl.constexpr(32 // PASSES)
DIGITS = tl.constexpr(1 << 32 // PASSES)
ALL_DIGITS = tl.constexpr(PASSES)
# Blocks whose sums a program adds at a time.
BLOCKS_AT_ONCE = tl.constexpr(64)


@triton.jit
def row_of(parameters, workspace, row, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """(the largest logit, (reference, scale), temperature, whether it is greedy) of a row."""
    temperature, greedy = temperature_of(parameters, row)
    block = tl.arange(0, BLOCKS)
    maxima = tl.load(workspace.maxima + row * BLOCKS + block, mask=block < tl.cdiv(V, BLOCK), other=NEG_INF)
    row_max = tl.max(maxima, 0)
    return row_max, (tl.minimum(row_max, MAX_LOGIT), tl.max(scale_of(temperature), 0)), temperature, greedy


@triton.jit
def row_top_p(parameters, workspace, row, greedy, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """(the sum of the probabilities that min-p and top-k keep, whether there is top-p, its limit) of a row."""
    block = tl.arange(0, BLOCKS)
    sums = tl.load(workspace.prob_sums + row * BLOCKS + block, mask=block < tl.cdiv(V, BLOCK), other=0)
    prob_sum = tl.sum(sums, 0)
    has_top_p, limit = top_p_of(parameters, row, greedy, prob_sum)
    return prob_sum, has_top_p, limit


@triton.jit
def digits_of(keys, pivot, PASS):
    """(digit number PASS of keys, int32; whether they begin as the pivot does)."""
    shift = 32 - DIGIT_BITS * (PASS + 1)
    # By DIGIT_BITS alone: all of 32 bits are no shift.
    before = ((keys >> shift) >> DIGIT_BITS) == ((pivot.to(tl.uint32) >> shift) >> DIGIT_BITS)
    return ((keys >> shift) & (DIGITS - 1)).to(tl.int32), before


@triton.jit
def digit_sums_of(workspace, row, max_rows, block, PASS, BLOCKS: tl.constexpr):
    """Pointers to the sums that a block has for each value of digit number PASS, [DIGITS]."""
    return workspace.digit_sums + (((PASS & 1) * max_rows + row) * BLOCKS + block) * DIGITS + tl.arange(0, DIGITS)


@triton.jit
def count_by_digit(workspace, row, max_rows, block, keys, counts, pivot, PASS, BLOCKS: tl.constexpr):
    """Leave how many of a block's keys have each value of digit number PASS, of those that begin as the pivot does."""
    value, before = digits_of(keys, pivot, PASS)
    # Four counts, each below 2**16, in one sum.
    place = tl.full(value.shape, 1, tl.int64) << ((value & 3) * 16)
    place = tl.where(counts & before, place, 0)
    digit = tl.arange(0, DIGITS)
    found = tl.zeros([DIGITS], tl.int64)
    for quarter in tl.static_range(DIGITS // 4):
        four = tl.sum(tl.where((value >> 2) == quarter, place, 0), 0)
        found = tl.where((digit >> 2) == quarter, (four >> ((digit & 3) * 16)) & 0xFFFF, found)
    tl.store(digit_sums_of(workspace, row, max_rows, block, PASS, BLOCKS), found)


@triton.jit
def sum_by_digit(workspace, row, max_rows, block, keys, amounts, pivot, PASS, BLOCKS: tl.constexpr):
    """Leave the sums of a block's amounts for each value of digit number PASS, of keys that begin as the pivot does."""
    value, before = digits_of(keys, pivot, PASS)
    amounts = tl.where(before, amounts, 0)
    digit = tl.arange(0, DIGITS)
    sums = tl.zeros([DIGITS], tl.int64)
    # Most blocks have no amount that counts: min-p and top-k keep few tokens, and a pivot's digits are those of few.
    if tl.max(amounts, 0) > 0:
        for one in tl.static_range(DIGITS):
            sums = tl.where(digit == one, tl.sum(tl.where(value == one, amounts, 0), 0), sums)
    tl.store(digit_sums_of(workspace, row, max_rows, block, PASS, BLOCKS), sums)


@triton.jit
def has_digit(workspace, row, max_rows, block, pivot, PASS, BLOCKS: tl.constexpr):
    """Whether a block has any amount of keys that begin with the first PASS digits of the pivot.

    If not, the block need not be read: its sums are 0, which this leaves.
    """
    digit = (pivot >> (32 - DIGIT_BITS * PASS)) & (DIGITS - 1)
    at = ((((PASS - 1) & 1) * max_rows + row) * BLOCKS + block) * DIGITS
    has = tl.load(workspace.digit_sums + at + digit) > 0
    if has == 0:
        tl.store(digit_sums_of(workspace, row, max_rows, block, PASS, BLOCKS), tl.zeros([DIGITS], tl.int64))
    return has


@triton.jit
def pivot_before(workspace, row, max_rows, first, blocks, PASS, BLOCKS: tl.constexpr):
    """(the first PASS digits of a row's pivot, what later ones have to add up to, the sum of the last digit found).

    The pivot is the largest key from which on all amounts add up to `first`; 0 if they do not. PASS is at least 1.
    """
    at = ((PASS - 1) & 1) * max_rows + row
    pivot = tl.load(workspace.pivots + at, mask=PASS > 1, other=0)
    missing = tl.where(PASS > 1, tl.load(workspace.missing + at, mask=PASS > 1, other=0), first)
    digit = tl.arange(0, DIGITS)
    AT_ONCE: tl.constexpr = min(BLOCKS, BLOCKS_AT_ONCE)
    sums = tl.zeros([DIGITS], tl.int64)
    for base in range(0, blocks, AT_ONCE):
        block = base + tl.arange(0, AT_ONCE)
        of_blocks = workspace.digit_sums + (at * BLOCKS + block[:, None]) * DIGITS + digit[None, :]
        sums += tl.sum(tl.load(of_blocks, mask=(block < blocks)[:, None], other=0), 0)
    at_least = tl.sum(sums, 0) - tl.cumsum(sums, 0) + sums
    found = tl.maximum(tl.sum((at_least >= missing).to(tl.int32), 0) - 1, 0)
    larger = tl.sum(tl.where(digit > found, sums, 0), 0)
    own = tl.sum(tl.where(digit == found, sums, 0), 0)
    return pivot | (found.to(tl.int64) << (32 - DIGIT_BITS * PASS)), missing - larger, own


@triton.jit
def keep_pivot(workspace, row, max_rows, pivot, missing, PASS):
    """Leave what was found before digit number PASS, once for a row."""
    at = (PASS & 1) * max_rows + row
    first = tl.program_id(1) == 0
    tl.store(workspace.pivots + at, pivot, mask=first)
    tl.store(workspace.missing + at, missing, mask=first)


@triton.jit
def block_of_row(logits_ptr, stride, row, block, V, BLOCK: tl.constexpr):
    """(ids, logits) of a block."""
    ids = block * BLOCK + tl.arange(0, BLOCK)
    return ids, load_logits(logits_ptr + row * stride, ids, V)


@triton.jit
def block_masses(values, block, V, scale, BLOCK: tl.constexpr):
    """Of the blocks of 512 logits in a block: (their numbers, largest logits, sums of masses below those).

    Of one without a logit above -inf the sum means nothing: its weight in the row is 0.
    """
    GROUPS: tl.constexpr = BLOCK // DEFINED_BLOCK
    group = block * GROUPS + tl.arange(0, GROUPS)
    x = load_logits(values, group[:, None] * DEFINED_BLOCK + tl.arange(0, DEFINED_BLOCK)[None, :], V)
    largest = tl.max(x, 1)
    mass = mass_of(x, tl.minimum(largest, MAX_LOGIT)[:, None], scale)
    return group, largest, tl.sum(mass.to(tl.int64), 1)


@triton.jit
def allowed_prob(x, ids, V, row, limits):
    """(whether min-p and top-k keep tokens, the probabilities of those, else 0).

    Args:
        row: (reference, scale).
        limits: (min_prob, top_k_key).
    """
    prob = prob_of(x, row[0], row[1])
    keep = (ids < V) & (prob >= limits[0]) & (to_ordered_uint(x) >= limits[1])
    return keep, tl.where(keep, prob, 0)


@triton.jit
def max_of_row_blocks(
    logits_ptr, stride, parameters, workspace, sizes, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Find each block's largest logit, and count by top-k's first digit: the grid is [rows, programs of a row].

    A row's programs take its blocks in turns.

    Args:
        stride: between rows of the logits.
        parameters, workspace: bundles of `args.py`.
        sizes: (V, rows of the workspace).
        BLOCKS: a power of two, from V / BLOCK on: of a row in the workspace.
        OVERLAP: the launches after the first one are programmatic dependent launches.
    """
    if OVERLAP:
        gdc_launch_dependents()
    V, max_rows = sizes
    row = tl.program_id(0).to(tl.int64)
    _temperature, greedy = temperature_of(parameters, row)
    has_top_k = top_k_of(parameters, row, greedy, V) > 0
    zero = tl.full([], 0, tl.int64)
    for block in range(tl.program_id(1), tl.cdiv(V, BLOCK), tl.num_programs(1)):
        ids, x = block_of_row(logits_ptr, stride, row, block, V, BLOCK)
        tl.store(workspace.maxima + row * BLOCKS + block, tl.max(x, 0))
        if has_top_k:
            count_by_digit(workspace, row, max_rows, block, to_ordered_uint(x), ids < V, zero, 0, BLOCKS)


@triton.jit(do_not_specialize=["PASS"])
def count_digits(
    logits_ptr,
    stride,
    parameters,
    workspace,
    sizes,
    PASS,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find digit PASS - 1 of top-k's pivot, and count by digit PASS. Grid and arguments as in `max_of_row_blocks`."""
    after_the_last_launch(OVERLAP)
    V, max_rows = sizes
    row = tl.program_id(0).to(tl.int64)
    _temperature, greedy = temperature_of(parameters, row)
    k = top_k_of(parameters, row, greedy, V)
    if k > 0:
        blocks = tl.cdiv(V, BLOCK)
        pivot, missing, _last = pivot_before(workspace, row, max_rows, k.to(tl.int64), blocks, PASS, BLOCKS)
        keep_pivot(workspace, row, max_rows, pivot, missing, PASS)
        for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
            if has_digit(workspace, row, max_rows, block, pivot, PASS, BLOCKS):
                ids, x = block_of_row(logits_ptr, stride, row, block, V, BLOCK)
                count_by_digit(workspace, row, max_rows, block, to_ordered_uint(x), ids < V, pivot, PASS, BLOCKS)


@triton.jit
def sum_of_row_blocks(
    logits_ptr, stride, parameters, workspace, sizes, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Sum what min-p and top-k keep of each block, also by top-p's first digit. As `max_of_row_blocks`."""
    after_the_last_launch(OVERLAP)
    V, max_rows = sizes
    row = tl.program_id(0).to(tl.int64)
    row_max, relative, _temperature, greedy = row_of(parameters, workspace, row, V, BLOCKS, BLOCK)
    if row_max > NEG_INF:
        blocks = tl.cdiv(V, BLOCK)
        top_k_key = tl.full([], 0, tl.int64)
        k = top_k_of(parameters, row, greedy, V)
        if k > 0:
            top_k_key, _missing, _last = pivot_before(
                workspace, row, max_rows, k.to(tl.int64), blocks, ALL_DIGITS, BLOCKS
            )
        tl.store(workspace.top_k_keys + row, top_k_key, mask=tl.program_id(1) == 0)
        limits = (min_prob_of(parameters, row, greedy), top_k_key.to(tl.uint32))
        by_block = (limits[0] == 0) & (limits[1] == 0)
        zero = tl.full([], 0, tl.int64)
        has_top_p, _limit = top_p_of(parameters, row, greedy, zero)
        for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
            if by_block:
                _group, largest, masses = block_masses(logits_ptr + row * stride, block, V, relative[1], BLOCK)
                weights = prob_of(tl.minimum(largest, MAX_LOGIT), relative[0], relative[1])
                tl.store(workspace.prob_sums + row * BLOCKS + block, tl.sum(weighted(masses, weights), 0))
            if has_top_p | (by_block == 0):
                ids, x = block_of_row(logits_ptr, stride, row, block, V, BLOCK)
                _keep, prob = allowed_prob(x, ids, V, relative, limits)
                if by_block == 0:
                    tl.store(workspace.prob_sums + row * BLOCKS + block, tl.sum(prob, 0))
                if has_top_p:
                    sum_by_digit(workspace, row, max_rows, block, to_ordered_uint(x), prob, zero, 0, BLOCKS)


@triton.jit(do_not_specialize=["PASS"])
def sum_digits(
    logits_ptr,
    stride,
    parameters,
    workspace,
    sizes,
    PASS,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Find digit PASS - 1 of top-p's pivot, and sum by digit PASS. Grid and arguments as in `max_of_row_blocks`."""
    after_the_last_launch(OVERLAP)
    V, max_rows = sizes
    row = tl.program_id(0).to(tl.int64)
    row_max, relative, _temperature, greedy = row_of(parameters, workspace, row, V, BLOCKS, BLOCK)
    if row_max > NEG_INF:
        _prob_sum, has_top_p, limit = row_top_p(parameters, workspace, row, greedy, V, BLOCKS, BLOCK)
        if has_top_p:
            blocks = tl.cdiv(V, BLOCK)
            pivot, missing, _last = pivot_before(workspace, row, max_rows, limit, blocks, PASS, BLOCKS)
            keep_pivot(workspace, row, max_rows, pivot, missing, PASS)
            limits = (min_prob_of(parameters, row, greedy), tl.load(workspace.top_k_keys + row).to(tl.uint32))
            for block in range(tl.program_id(1), blocks, tl.num_programs(1)):
                if has_digit(workspace, row, max_rows, block, pivot, PASS, BLOCKS):
                    ids, x = block_of_row(logits_ptr, stride, row, block, V, BLOCK)
                    _keep, prob = allowed_prob(x, ids, V, relative, limits)
                    sum_by_digit(workspace, row, max_rows, block, to_ordered_uint(x), prob, pivot, PASS, BLOCKS)


@triton.jit
def last_kept(workspace, row, max_rows, relative, limit, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """What top-p keeps: (the least key, how many ties with it are removed, a tie's probability, the sum kept).

    Ties are removed from the lowest id on. The probability is 1 at least.
    """
    pivot, missing, ties_prob = pivot_before(workspace, row, max_rows, limit, tl.cdiv(V, BLOCK), ALL_DIGITS, BLOCKS)
    key = pivot.to(tl.uint32)
    bits = tl.where((key & SIGN) != 0, key ^ SIGN, ~key)
    # No key is 0: then all is kept, and there are no ties.
    x = tl.where(pivot > 0, bits.to(tl.float32, bitcast=True), relative[0])
    tie_prob = tl.maximum(prob_of(x, relative[0], relative[1]), 1)
    ties = ties_prob // tie_prob
    kept = tl.minimum((missing + tie_prob - 1) // tie_prob, ties)
    return pivot, ties - kept, tie_prob, limit - missing + kept * tie_prob


@triton.jit
def ties_of_blocks(workspace, row, max_rows, pivot, V, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The probabilities of all ties with top-p's least key in each block, [BLOCKS] int64."""
    block = tl.arange(0, BLOCKS)
    at = (((ALL_DIGITS - 1) & 1) * max_rows + row) * BLOCKS + block
    sums = workspace.digit_sums + at * DIGITS + (pivot & (DIGITS - 1))
    return tl.load(sums, mask=block < tl.cdiv(V, BLOCK), other=0)


@triton.jit
def write_logprobs(
    logits_ptr,
    stride,
    parameters,
    workspace,
    logprobs,
    sizes,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write a block's log-probabilities: the grid is [rows, blocks of a row]. Arguments as in `max_of_row_blocks`.

    Args:
        logprobs: pointer to [rows, V] float32.
    """
    if OVERLAP:
        gdc_wait()
    V, max_rows = sizes
    row = tl.program_id(0).to(tl.int64)
    row_max, relative, temperature, greedy = row_of(parameters, workspace, row, V, BLOCKS, BLOCK)
    ids, x = block_of_row(logits_ptr, stride, row, tl.program_id(1), V, BLOCK)
    found = tl.full([BLOCK], NEG_INF, tl.float32)
    if row_max > NEG_INF:
        prob_sum, has_top_p, limit = row_top_p(parameters, workspace, row, greedy, V, BLOCKS, BLOCK)
        limits = (min_prob_of(parameters, row, greedy), tl.load(workspace.top_k_keys + row).to(tl.uint32))
        keep, _prob = allowed_prob(x, ids, V, relative, limits)
        if has_top_p:
            pivot, removed, tie_prob, prob_sum = last_kept(workspace, row, max_rows, relative, limit, V, BLOCKS, BLOCK)
            ties = ties_of_blocks(workspace, row, max_rows, pivot, V, BLOCKS, BLOCK)
            before = tl.sum(tl.where(tl.arange(0, BLOCKS) < tl.program_id(1), ties, 0), 0)
            key = to_ordered_uint(x)
            tie = keep & (key == pivot.to(tl.uint32))
            is_last = tl.cumsum(tie.to(tl.int32), 0) > removed - before // tie_prob
            keep &= (key > pivot.to(tl.uint32)) | (tie & is_last)
        log_sum = tl.log2(prob_sum.to(tl.float32) * PROB_UNIT) * LN2
        # An infinite logit is no difference from itself.
        below_max = tl.where(x == row_max, 0.0, row_max - tl.where(x == row_max, 0.0, x))
        found = tl.where(keep, -below_max / temperature - log_sum, NEG_INF)
    tl.store(logprobs + row * V + ids, found, mask=ids < V)
