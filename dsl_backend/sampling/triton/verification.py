# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts in Triton.

Where only tokens are known, `accept_drafts` is all: one program for each request finds the first draft that is not
accepted, and writes the tokens. Where distributions are known there are two launches, and rows have programs for their
blocks. p and q are computed from logits where they are needed, and no row of probabilities is written:

1. `sum_of_blocks`: the largest logit of each block, and the sum of its probabilities below it; of the drafts' logits,
   and of their rows if need be. They are read once. The last program of a request normalizes p and q of its drafts by
   these sums, and tests them. Where nothing is left to sum, `accept_drafts` is launched in place of this.
2. `rest_of_blocks`: the sums of max(p - q, 0) of each block, for the one row of a request that is drawn again. The
   request's last program finds the draw's block by these sums, and the token by a second look at that block.

No program waits for another one: the last one that arrives goes on.

p is computed with what the sampler has found of each row: what its filters keep, and what it is normalized with
(`spec.Kept`). The drafts' rows need no sums then. Behind a sampler that does not find it, rows without filters are
summed with the drafts; of rows with filters the launches of `logprobs_host.RowSums` come first, and `filter_rows` keeps
the same as the sampler. Sums are of integers: no partition changes a bit.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from dsl_backend.sampling import verification_random
from dsl_backend.sampling.triton.dependent_launch import LOGITS_OF_THREAD, after_the_last_launch
from dsl_backend.sampling.triton.fixed_point import (
    DEFINED_BLOCK,
    GREEDY_TEMPERATURE,
    MAX_LOGIT,
    NEG_INF,
    NO_ID,
    PROB_ONE,
    load_logits,
    multiply_high,
    normal_of,
    normalized,
    prob_of,
    random_bits,
    scale_of,
    to_ordered_uint,
    weighted,
)
from dsl_backend.sampling.triton.kernel import min_prob_of
from dsl_backend.sampling.triton.logprobs import block_masses, last_kept, row_of, row_top_p, ties_of_blocks

RATIO_TEST = tl.constexpr(verification_random.RATIO_TEST)
RESIDUAL = tl.constexpr(verification_random.RESIDUAL)
NO_TOKEN = tl.constexpr(-1)
# Sums of blocks that a warp adds at a time, of all drafts of a request. With 256 the launch that sums has 72 to 96
# registers a thread, with 128 it has 56 to 62, and 40 without the test of drafts (128256 logits, ptxas 13.4 for SM90).
SUMS_OF_WARP = tl.constexpr(128)
LOGITS_OF_WARP = tl.constexpr(32 * LOGITS_OF_THREAD)


@triton.jit
def is_last(arrivals, request, programs):
    """Whether all other programs of a request have come here: what they stored before may be loaded then, from L2.

    Args:
        arrivals: pointer to the requests' counts, zero before the first program and after the last one.
        programs: of the request, that come here.
    """
    # The count is one thread's: before it come the stores of all.
    tl.debug_barrier()
    before = tl.atomic_add(arrivals + request, 1, sem="acq_rel", scope="gpu")
    last = before == programs - 1
    if last:
        tl.store(arrivals + request, 0)
    return last


@triton.jit
def target_probs(logits, ids, V, scaled_by, workspace, row, tested):
    """The target's probabilities in units of 2**-40, int64; 0 past the row's end, and where a filter removes a token.

    Args:
        logits: pointers to the rows' first ones.
        scaled_by: (scale of exponents, reference of the row, scale of its probabilities).
        row: in the workspace, which has what filters keep, if there are any.
        tested: whether a row's is read; others get a meaningless probability.
    """
    exponent_scale, reference, normal = scaled_by
    x = load_logits(logits, ids, V)
    prob = prob_of(x, reference, exponent_scale)
    counts = ids < V
    if workspace.pivots is not None:
        pivot = tl.load(workspace.pivots + row, mask=tested, other=0)
        tie_id = tl.load(workspace.tie_ids + row, mask=tested, other=0)
        key = to_ordered_uint(x).to(tl.int64)
        counts &= (key > pivot) | ((key == pivot) & (ids >= tie_id))
        counts &= prob >= tl.load(workspace.min_probs + row, mask=tested, other=0)
    return tl.where(counts, normalized(prob, normal), 0)


@triton.jit
def draft_probs(values, ids, V, row, PROBABILITIES: tl.constexpr):
    """The drafter's probabilities in units of 2**-40, int64; 0 past the row's end.

    Args:
        row: `scaled_by` as in `target_probs`; not used for PROBABILITIES.
    """
    if PROBABILITIES:
        q = tl.load(values + ids, mask=ids < V, other=0.0)
        return (tl.minimum(tl.where(q > 0.0, q, 0.0), 1.0) * PROB_ONE).to(tl.int64)
    else:
        exponent_scale, reference, normal = row
        prob = prob_of(load_logits(values, ids, V), reference, exponent_scale)
        return tl.where(ids < V, normalized(prob, normal), 0)


@triton.jit
def draft_rows(parameters, drafts, request, step, max_drafts, V):
    """(row, its draft, whether that is tested by the ratio) of a request's draft number `step`.

    A greedy row's draft is not, nor is one that is no token of the vocabulary.
    """
    row = tl.load(drafts.cu_rows + request).to(tl.int64) + step
    has_draft = (row + 1 < tl.load(drafts.cu_rows + request + 1)) & (step < max_drafts)
    draft = tl.load(drafts.inputs + row + 1, mask=has_draft, other=NO_TOKEN).to(tl.int64)
    tested = (draft >= 0) & (draft < V)
    tested &= tl.load(parameters.temperature + row, mask=has_draft, other=0.0) >= GREEDY_TEMPERATURE
    return row, draft, tested


@triton.jit
def draft_values(stride, drafts, row, tested):
    """Pointers to the distributions of rows' drafts."""
    return drafts.distributions + tl.load(drafts.distribution_ids + row, mask=tested, other=0).to(tl.int64) * stride


@triton.jit
def exponent_scale_of(parameters, row):
    """Of one row, a scalar."""
    return tl.max(scale_of(tl.load(parameters.temperature + row)), 0)


@triton.jit
def sum_blocks(values, V, exponent_scale, maxima, masses, chunk, BLOCK: tl.constexpr):
    """Leave the maxima and the sums of masses of one program's blocks number `chunk`, BLOCK logits in all."""
    block, largest, mass_sum = block_masses(values, chunk, V, exponent_scale, BLOCK)
    mask = block * DEFINED_BLOCK < V
    tl.store(maxima + block, largest, mask=mask)
    tl.store(masses + block, mass_sum, mask=mask)


@triton.jit
def filter_rows(
    logits_ptr,
    stride,
    parameters,
    sums,
    workspace,
    sizes,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Keep what one row's probabilities are computed with, of what filters keep: the grid is [rows].

    Arguments as in `logprobs.max_of_row_blocks`.

    Args:
        sums: the workspace of the launches before.
        workspace: that of verification.
    """
    after_the_last_launch(OVERLAP)
    V, max_rows = sizes
    row = tl.program_id(0).to(tl.int64)
    row_max, relative, _temperature, greedy = row_of(parameters, sums, row, V, BLOCKS, BLOCK)
    pivot, tie_id = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    normal = tl.full([], 0, tl.int64)
    if row_max > NEG_INF:
        prob_sum, has_top_p, limit = row_top_p(parameters, sums, row, greedy, V, BLOCKS, BLOCK)
        pivot = tl.load(sums.top_k_keys + row)
        if has_top_p:
            least, removed, tie_prob, prob_sum = last_kept(sums, row, max_rows, relative, limit, V, BLOCKS, BLOCK)
            if least >= pivot:
                pivot = least
                ties = ties_of_blocks(sums, row, max_rows, pivot, V, BLOCKS, BLOCK)
                passed = tl.cumsum(ties, 0) <= removed * tie_prob
                before = tl.sum(tl.where(passed, ties, 0), 0)
                base = tl.sum(passed.to(tl.int32), 0) * BLOCK
                ids = base + tl.arange(0, BLOCK)
                tie = to_ordered_uint(load_logits(logits_ptr + row * stride, ids, V)) == pivot.to(tl.uint32)
                rank = tl.cumsum(tie.to(tl.int32), 0)
                tie_id = tl.min(tl.where(tie & (ids < V) & (rank > removed - before // tie_prob), ids, NO_ID), 0)
        normal = normal_of(prob_sum)
    tl.store(workspace.references + row, relative[0])
    tl.store(workspace.normals + row, normal)
    tl.store(workspace.pivots + row, pivot)
    tl.store(workspace.tie_ids + row, tie_id)
    tl.store(workspace.min_probs + row, min_prob_of(parameters, row, greedy))


@triton.jit
def row_normals(workspace, kept, row, first, tested, exponent_scales, blocks, SUMS: tl.constexpr, BLOCKS: tl.constexpr):
    """(references, scales of probabilities) of rows whose blocks are summed, which are kept for later launches too.

    Args:
        kept: pointers to where these are kept.
        row: [STEPS].
        first: the first row whose blocks the workspace has.
        exponent_scales: [STEPS].
        blocks: that a row has.
    """
    at = first + row
    most: tl.constexpr = SUMS // at.shape[0]
    COLUMNS: tl.constexpr = BLOCKS if most > BLOCKS else most
    # Reduced behind the loop: Triton 3.8 does not compile a maximum that is carried from a reduction to the next one.
    column_max = tl.full([at.shape[0], COLUMNS], NEG_INF, tl.float32)
    for base in range(0, blocks, COLUMNS):
        block = base + tl.arange(0, COLUMNS)
        mask = tested[:, None] & (block < blocks)[None, :]
        offsets = at[:, None] * BLOCKS + block[None, :]
        maxima = tl.load(workspace.maxima + offsets, mask=mask, other=NEG_INF, cache_modifier=".cg")
        column_max = tl.maximum(column_max, maxima)
    row_max = tl.max(column_max, 1)
    references = tl.minimum(row_max, MAX_LOGIT)
    prob_sums = tl.zeros(at.shape, tl.int64)
    for base in range(0, blocks, COLUMNS):
        block = base + tl.arange(0, COLUMNS)
        mask = tested[:, None] & (block < blocks)[None, :]
        offsets = at[:, None] * BLOCKS + block[None, :]
        maxima = tl.load(workspace.maxima + offsets, mask=mask, other=NEG_INF, cache_modifier=".cg")
        weights = prob_of(tl.minimum(maxima, MAX_LOGIT), references[:, None], exponent_scales[:, None])
        masses = tl.load(workspace.masses + offsets, mask=mask, other=0, cache_modifier=".cg")
        prob_sums += tl.sum(weighted(masses, weights), 1)
    # Without a logit above -inf all probabilities are 0.
    normals = tl.where(row_max > NEG_INF, normal_of(prob_sums), 0)
    tl.store(kept[0] + row, references, mask=tested)
    tl.store(kept[1] + row, normals, mask=tested)
    return references, normals


@triton.jit
def test_ratios(
    drawn,
    strides,
    parameters,
    drafts,
    workspace,
    sizes,
    rows,
    ROWS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Whether p and q accept the drafts of a request; meaningless where they are not tested.

    Args:
        rows: (row, draft, whether it is tested), [STEPS] each.
    """
    PROBABILITIES: tl.constexpr = workspace.draft_normals is None
    _, V, draft_V, max_rows = sizes
    row, draft, tested = rows
    exponent_scales = scale_of(tl.load(parameters.temperature + row, mask=tested, other=1.0))
    # Past the end of both rows where it is not tested.
    ids = tl.where(tested, draft, V)
    q_row = (exponent_scales, 0.0, 0)
    if not PROBABILITIES:
        blocks = tl.cdiv(draft_V, DEFINED_BLOCK)
        kept = (workspace.draft_references, workspace.draft_normals)
        references, normals = row_normals(workspace, kept, row, max_rows, tested, exponent_scales, blocks, SUMS, BLOCKS)
        q_row = (exponent_scales, references, normals)
    q = draft_probs(draft_values(strides[1], drafts, row, tested), ids, draft_V, q_row, PROBABILITIES)
    if ROWS:
        blocks = tl.cdiv(V, DEFINED_BLOCK)
        kept = (workspace.references, workspace.normals)
        references, normals = row_normals(workspace, kept, row, 0, tested, exponent_scales, blocks, SUMS, BLOCKS)
    else:
        references = tl.load(workspace.references + row, mask=tested, other=0.0)
        normals = tl.load(workspace.normals + row, mask=tested, other=0)
    p_row = (exponent_scales, references, normals)
    p = target_probs(drawn.logits + row * strides[0], ids, V, p_row, workspace, row, tested)
    seeds = tl.load(parameters.seeds + row, mask=tested, other=0)
    positions = tl.load(parameters.positions + row, mask=tested, other=0)
    return multiply_high(random_bits(seeds, positions + RATIO_TEST, 0), q) < p


@triton.jit
def accept(
    drawn,
    strides,
    parameters,
    drafts,
    workspace,
    outputs,
    sizes,
    request,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write the tokens of one request and their number. Arguments as in `accept_drafts` and `sum_of_blocks`.

    Where distributions are known, the last token is the drawn one here; the workspace says where it is drawn again.

    Args:
        SUMS: a power of two, from STEPS on: sums of blocks that are added at a time.
    """
    RATIO: tl.constexpr = drafts.distributions is not None
    max_drafts, V, _draft_V, _max_rows = sizes
    first = tl.load(drafts.cu_rows + request).to(tl.int64)
    # -1 for a request without rows.
    num_drafts = tl.minimum(tl.load(drafts.cu_rows + request + 1) - first - 1, max_drafts).to(tl.int32)
    step = tl.arange(0, STEPS)
    sampled = tl.load(drawn.tokens + first + step, mask=step <= num_drafts, other=NO_TOKEN).to(tl.int64)
    draft = tl.load(drafts.inputs + first + 1 + step, mask=step < num_drafts, other=NO_TOKEN).to(tl.int64)
    accepted = draft == sampled
    if RATIO:
        rows = draft_rows(parameters, drafts, request, step, max_drafts, V)
        by_ratio = test_ratios(drawn, strides, parameters, drafts, workspace, sizes, rows, ROWS, SUMS, BLOCKS)
        accepted = tl.where(rows[2], by_ratio, accepted)
    num_accepted = tl.min(tl.where((step < num_drafts) & accepted, STEPS, step), 0)
    token = tl.sum(tl.where(step == num_accepted, sampled, 0))
    if RATIO:
        again = tl.sum((rows[2] & (step == num_accepted)).to(tl.int32), 0) > 0
        tl.store(workspace.again + request, tl.where(again, num_accepted, NO_TOKEN))
    written = tl.where(step < num_accepted, draft, tl.where(step == num_accepted, token, NO_TOKEN))
    written = tl.where(num_drafts < 0, NO_TOKEN, written)
    tl.store(outputs.tokens + request * (max_drafts + 1) + step, written, mask=step <= max_drafts)
    tl.store(outputs.counts + request, tl.where(num_drafts < 0, 0, num_accepted + 1))


@triton.jit
def accept_drafts(
    drawn,
    strides,
    parameters,
    drafts,
    workspace,
    outputs,
    sizes,
    STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the tokens of each request and their number, where there is nothing to sum: the grid is [requests].

    That is where tokens alone are known; or the drafts' probabilities, and what the rows are normalized with.

    Args:
        drawn, parameters, drafts, workspace, outputs: bundles of `verification_args.py`.
        strides: between rows of the logits, and of the drafts' distributions.
        sizes: (max_drafts, V, draft vocabulary, rows of the workspace).
        STEPS: a power of two, above max_drafts.
        OVERLAP: the launches after the first one are programmatic dependent launches.
    """
    if drafts.distributions is not None:
        after_the_last_launch(OVERLAP)
    request = tl.program_id(0)
    # The last two arguments are of sums.
    accept(drawn, strides, parameters, drafts, workspace, outputs, sizes, request, False, STEPS, STEPS, 1)


@triton.jit(do_not_specialize=["CHUNKS"])
def sum_of_blocks(
    drawn,
    parameters,
    drafts,
    workspace,
    outputs,
    layout,
    CHUNKS,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum blocks of one draft's row, or of its own: the grid is [requests * max_drafts, programs of a row, kinds].

    Kinds are rows, where ROWS, and then drafts, unless their probabilities are known. The last program of a request
    writes its tokens. Arguments as in `accept_drafts`.

    Args:
        layout: (strides, sizes).
        CHUNKS: a program has so many times BLOCK logits.
        ROWS: what rows are normalized with is not known: of rows without filters, behind a sampler that does not
            return it.
        BLOCKS: a power of two, from V / 512 on: of a row in the workspace.
    """
    after_the_last_launch(OVERLAP)
    PROBABILITIES: tl.constexpr = workspace.draft_normals is None
    at_once: tl.constexpr = BLOCK // LOGITS_OF_WARP * SUMS_OF_WARP
    SUMS: tl.constexpr = STEPS if at_once < STEPS else at_once
    strides, sizes = layout
    max_drafts, V, draft_V, max_rows = sizes
    request = tl.program_id(0) // max_drafts
    row, _, tested = draft_rows(parameters, drafts, request, tl.program_id(0) % max_drafts, max_drafts, V)
    if tested:
        exponent_scale = exponent_scale_of(parameters, row)
        first = tl.program_id(1) * CHUNKS
        if ROWS:
            if tl.program_id(2) == 0:
                logits = drawn.logits + row * strides[0]
                maxima, masses = workspace.maxima + row * BLOCKS, workspace.masses + row * BLOCKS
                for chunk in range(first, first + CHUNKS):
                    sum_blocks(logits, V, exponent_scale, maxima, masses, chunk, BLOCK)
        if not PROBABILITIES:
            if tl.program_id(2) == (1 if ROWS else 0):
                values, at = draft_values(strides[1], drafts, row, tested), (max_rows + row) * BLOCKS
                for chunk in range(first, first + CHUNKS):
                    sum_blocks(
                        values, draft_V, exponent_scale, workspace.maxima + at, workspace.masses + at, chunk, BLOCK
                    )
    # Of drafts that are not tested as well, and of those that a request does not have.
    if is_last(workspace.arrivals, request, max_drafts * tl.num_programs(1) * tl.num_programs(2)):
        accept(
            drawn,
            strides,
            parameters,
            drafts,
            workspace,
            outputs,
            sizes,
            request,
            ROWS,
            STEPS,
            SUMS,
            BLOCKS,
        )


@triton.jit
def drawn_again(drafts, workspace, request):
    """(the row of a request that is drawn again, its draft's number; -1 if there is none)."""
    step = tl.load(workspace.again + request)
    return tl.load(drafts.cu_rows + request).to(tl.int64) + step, step


@triton.jit
def rest_probs(drawn, strides, parameters, drafts, workspace, sizes, row, ids):
    """max(p - q, 0) of a row, in units of 2**-40, int64; 0 past the row's end."""
    PROBABILITIES: tl.constexpr = workspace.draft_normals is None
    _, V, draft_V, _max_rows = sizes
    exponent_scale = exponent_scale_of(parameters, row)
    q_row = (exponent_scale, 0.0, 0)
    if not PROBABILITIES:
        q_row = (exponent_scale, tl.load(workspace.draft_references + row), tl.load(workspace.draft_normals + row))
    q = draft_probs(draft_values(strides[1], drafts, row, True), ids, draft_V, q_row, PROBABILITIES)
    p_row = (exponent_scale, tl.load(workspace.references + row), tl.load(workspace.normals + row))
    p = target_probs(drawn.logits + row * strides[0], ids, V, p_row, workspace, row, True)
    return tl.maximum(p - q, 0)


@triton.jit
def rest_of_blocks(
    drawn,
    strides,
    parameters,
    drafts,
    workspace,
    outputs,
    sizes,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum max(p - q, 0) of one block of the row that is drawn again: the grid is [requests, blocks of a row].

    The sums take the place of the row's masses. The last program of a request draws its last token from max(p - q, 0);
    where that is zero, the drawn token stays. Arguments as in `accept_drafts`.

    Args:
        BLOCKS: as in `sum_of_blocks`.
        BLOCK: logits of a program.
    """
    if OVERLAP:
        gdc_wait()
    max_drafts, _V, _draft_V, _max_rows = sizes
    request = tl.program_id(0)
    # All programs of a request go on, or none of them.
    row, step = drawn_again(drafts, workspace, request)
    if step >= 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        rest = rest_probs(drawn, strides, parameters, drafts, workspace, sizes, row, ids)
        tl.store(workspace.masses + row * BLOCKS + tl.program_id(1), tl.sum(rest, 0))
        if is_last(workspace.arrivals, request, tl.num_programs(1)):
            blocks = tl.arange(0, BLOCKS)
            mask = blocks < tl.num_programs(1)
            sums = tl.load(workspace.masses + row * BLOCKS + blocks, mask=mask, other=0, cache_modifier=".cg")
            total = tl.sum(sums, 0)
            if total > 0:
                bits = random_bits(tl.load(parameters.seeds + row), tl.load(parameters.positions + row) + RESIDUAL, 0)
                target = multiply_high(bits, total)
                block = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
                before = tl.sum(tl.where(blocks < block, sums, 0), 0)
                ids = block * BLOCK + tl.arange(0, BLOCK)
                rest = rest_probs(drawn, strides, parameters, drafts, workspace, sizes, row, ids)
                token = tl.min(tl.where(before + tl.cumsum(rest, 0) > target, ids, NO_ID), 0)
                tl.store(outputs.tokens + request * (max_drafts + 1) + step, token)
