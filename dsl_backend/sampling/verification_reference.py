# SPDX-License-Identifier: Apache-2.0
"""The definition of verification in eager torch.

The sampler has drawn a token for each row as if there were no drafts. A request's rows are looked at in order, up to
the first draft that is not accepted. The request gets the drafts before it, and one token more.

Where only the drafts' tokens are known:

- a draft is accepted if it equals the token drawn for its row, and that token is the one more.

So a request gets the tokens that it would get without drafts, bit for bit, whatever the drafts are. The distribution
is the target's for any drafter that does not know the sampler's random numbers.

Where the distribution q of a draft d is known, p is that of the row after temperature and filters. Both are integers
in units of 2**-40, floor(prob * s / 2**62) of probabilities before normalization with s = floor(2**62 / their sum). The
sum of a row that no filter shortens, and of a draft's, is by blocks, as in `reference.py`. From p and q all follows
exactly:

- d is accepted if floor(U * q(d) / 2**62) < p(d), which has the probability min(1, p(d) / q(d));
- else the token is drawn from max(p - q, 0), by its prefix sums (`reference.search`);
- after the last draft, after a draft that is no token, and where max(p - q, 0) is zero, the token is the drawn one;
- a greedy row has no q: as above, its draft is accepted if it equals the drawn token.

The random bits U of the test and those of the second draw are not the sampler's at that position: their counters are
`position + RATIO_TEST` and `position + RESIDUAL` (verification_random.py).
"""

import itertools

import torch

from dsl_backend.checks import require
from dsl_backend.runtime.target import Target
from dsl_backend.sampling import fixed_point, reference
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification_random import RATIO_TEST, RESIDUAL
from dsl_backend.sampling.verification_spec import NO_TOKEN, Distributions, Drafts, Known, VerificationSpec, Verified

ONE = 1 << fixed_point.PROB_BITS
HIGHEST_62 = (1 << 62) - 1


def normals_of(prob_sum: torch.Tensor) -> torch.Tensor:
    """What probabilities are normalized with, int64: 2**62 / their sum, which is at least 2**40 unless all are 0."""
    # In units of 2**-40, by one division in float64.
    return (2.0**102 / prob_sum.clamp(min=ONE).double()).long().clamp(max=HIGHEST_62)


def normalized(prob: torch.Tensor, prob_sum: torch.Tensor) -> torch.Tensor:
    """Probabilities in units of 2**-40, int64. prob_sum: [rows, 1]."""
    return reference.multiply_high(prob, normals_of(prob_sum))


def kept_probs(logits: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, torch.Tensor]:
    """(the probabilities that the filters keep before normalization [rows, vocab], their sums [rows, 1])."""
    rows = reference.rows_of(logits, parameters)
    prob, prob_sum = rows.prob, rows.prefix[:, -1:]
    if parameters.top_p is not None:
        prob = prob * rows.kept
        has_top_p = parameters.top_p < 1
        if parameters.temperature is not None:
            has_top_p &= ~reference.is_greedy(parameters.temperature)
        prob_sum = torch.where(has_top_p.unsqueeze(1), prob.sum(-1, keepdim=True), prob_sum)
    return prob, prob_sum


def target_probs(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """P in units of 2**-40, int64."""
    return normalized(*kept_probs(logits, parameters))


def draft_probs(values: torch.Tensor, temperature: torch.Tensor | None, known: Known) -> torch.Tensor:
    """Q in units of 2**-40, int64. values: [rows, draft vocab]."""
    if known is Known.PROBABILITIES:
        return (values.nan_to_num(0.0).clamp(0.0, 1.0) * float(ONE)).long()
    x = reference.canonical(values)
    usual, _ = reference.temperatures_of(temperature, x)
    scale = reference.scale_of(usual).unsqueeze(1)
    row_max = x.amax(-1, keepdim=True).clamp(max=fixed_point.MAX_LOGIT)
    prob = reference.probs(reference.exponents(x, row_max, scale))
    return normalized(prob, reference.block_prefix(x, row_max, scale)[:, -1:])


def bits_at(parameters: Parameters, offset: int) -> torch.Tensor:
    return reference.philox(parameters.seeds, parameters.positions + offset)


def ratio_test(
    p: torch.Tensor, q: torch.Tensor, draft: torch.Tensor, parameters: Parameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each row's draft is accepted, the token of max(p - q, 0); -1 where that is zero).

    Args:
        draft: [rows], ids of the vocabulary.
    """
    q_full = torch.zeros_like(p)
    q_full[:, : q.shape[1]] = q
    at_draft = draft.unsqueeze(1)
    limit = reference.multiply_high(bits_at(parameters, RATIO_TEST), q_full.gather(1, at_draft).squeeze(1))
    residual = (p - q_full).clamp(min=0)
    residual_sum = residual.sum(-1)
    token = reference.search(residual.cumsum(-1), bits_at(parameters, RESIDUAL))
    return limit < p.gather(1, at_draft).squeeze(1), token.where(residual_sum > 0, NO_TOKEN)


def row_results(
    drawn: Sampled, parameters: Parameters, drafts: Drafts, spec: VerificationSpec, logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each row's draft is accepted, the token where it is not).

    A draft is the next row's input; the one of a request's last row is meaningless, and so is its acceptance.
    """
    tokens = drawn.tokens.long()
    draft = drafts.inputs.long().roll(-1)
    equal = draft == tokens
    known = drafts.distributions
    if known is None:
        return equal, tokens
    assert logits is not None, "checked by run"
    valid = (draft >= 0) & (draft < spec.vocab)
    accepted, token = ratio_of_rows(logits, parameters, known, draft.where(valid, 0), spec.known)
    greedy = torch.zeros_like(valid)
    if parameters.temperature is not None:
        greedy = reference.is_greedy(parameters.temperature)
    accepted = torch.where(greedy, equal, accepted & valid)
    return accepted, torch.where(greedy | ~valid | (token == NO_TOKEN), tokens, token)


def ratio_of_rows(
    logits: torch.Tensor, parameters: Parameters, known: Distributions, draft: torch.Tensor, kind: Known
) -> tuple[torch.Tensor, torch.Tensor]:
    # Without a draft there may be no distribution, and rows have a meaningless one.
    values = known.values if len(known.values) else known.values.new_zeros(1, known.values.shape[1])
    index = known.index.long().clamp(0, len(values) - 1)
    q = draft_probs(values[index], parameters.temperature, kind)
    return ratio_test(target_probs(logits, parameters), q, draft, parameters)


def verify(
    drawn: Sampled,
    parameters: Parameters,
    drafts: Drafts,
    spec: VerificationSpec,
    logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [requests, max_drafts + 1] int64 and counts [requests] int32."""
    tokens = drawn.tokens.long()
    step = torch.arange(spec.max_drafts + 1, device=tokens.device)
    if not len(tokens):
        return step.new_full((drafts.requests, len(step)), NO_TOKEN), drafts.cu_rows[1:] * 0
    accepted, token_if_not = row_results(drawn, parameters, drafts, spec, logits)
    first, end = drafts.cu_rows[:-1].long(), drafts.cu_rows[1:].long()
    num_drafts = (end - first - 1).clamp(max=spec.max_drafts).unsqueeze(1)
    rows = (first.unsqueeze(1) + step).clamp(max=len(tokens) - 1)
    is_draft = step < num_drafts
    # The number of leading ones.
    num_accepted = (is_draft & accepted[rows]).long().cumprod(-1).sum(-1, keepdim=True)
    last_row = (first.unsqueeze(1) + num_accepted).clamp(max=len(tokens) - 1)
    last = torch.where(num_accepted < num_drafts, token_if_not[last_row], tokens[last_row])
    out = torch.where(step < num_accepted, drafts.inputs.long().roll(-1)[rows], NO_TOKEN)
    out = torch.where((step == num_accepted) & (num_drafts >= 0), last, out)
    return out, ((num_accepted + 1) * (num_drafts >= 0)).squeeze(1).int()


def check_values(drafts: Drafts, spec: VerificationSpec, rows: int) -> None:
    """Raise InvalidInput where values are none that `Drafts` and `Distributions` allow."""
    bounds, least = drafts.cu_rows.tolist(), 0
    for place, bound in enumerate(bounds):
        require(
            least <= bound <= rows,
            f"cu_rows[{place}] is {bound}: {least} to {rows} are possible, with {rows} rows and none decreasing",
        )
        least = bound
    known = drafts.distributions
    index, count = ([], 0) if known is None else (known.index.tolist(), len(known.values))
    for request, (first, end) in enumerate(itertools.pairwise(bounds)):
        require(
            end - first - 1 <= spec.max_drafts,
            f"request {request} has {end - first - 1} drafts: the spec's max_drafts, {spec.max_drafts}, are the most",
        )
        for row in range(first, end - 1) if known else ():
            require(
                0 <= index[row] < count,
                f"index[{row}] is {index[row]}, of a draft of request {request}: a row of values is needed, which has "
                f"{count}",
            )


class ReferenceVerifier:
    """The definition as a kernel, for CPUs. It refuses values that would have kernels read out of bounds."""

    def __init__(
        self, spec: VerificationSpec, target: Target, max_requests: int, max_rows: int, device: torch.device
    ) -> None:
        self.spec = spec

    def launch(
        self, drawn: Sampled, parameters: Parameters, drafts: Drafts, logits: torch.Tensor | None, out: Verified
    ) -> None:
        check_values(drafts, self.spec, len(drawn.tokens))
        tokens, counts = verify(drawn, parameters, drafts, self.spec, logits)
        out.tokens.copy_(tokens)
        out.counts.copy_(counts)
