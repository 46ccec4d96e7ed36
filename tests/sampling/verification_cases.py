# SPDX-License-Identifier: Apache-2.0
"""Steps with drafts: random ones, and requests whose tokens have known probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dsl_backend.sampling import reference
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification import Distributions, Drafts, Known, VerificationSpec, Verified
from tests.sampling.distribution import chi_square

# Rows of each request: none, one (no draft), and up to four drafts.
ROWS = (3, 0, 5, 1, 2, 0, 5, 4, 1, 5)


@dataclass(frozen=True)
class Step:
    """What `verification.run` takes."""

    spec: VerificationSpec
    drawn: Sampled
    parameters: Parameters
    drafts: Drafts


def cu_rows_of(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *rows], device=device).cumsum(0).int()


def random_step(
    seed: int,
    known: Known,
    vocab: int,
    device: torch.device,
    draft_dtype: torch.dtype = torch.float32,
    token_dtype: torch.dtype = torch.int64,
    draft_vocab: int | None = None,
) -> Step:
    """Requests with filters, of which one row is greedy, and one has no logit above -inf.

    About half of the drafts are the tokens that are drawn. One is -1, and one is beyond the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(ROWS)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits[8] = -torch.inf
    temperature = torch.rand(rows, generator=generator) + 0.5
    temperature[5], temperature[20] = 0, float("nan")
    parameters = Parameters(
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        positions=torch.arange(rows) * 3,
        temperature=temperature,
        top_k=torch.randint(0, vocab, (rows,), generator=generator, dtype=torch.int32),
        top_p=torch.rand(rows, generator=generator) * 0.5 + 0.5,
    )
    tokens, logprobs = reference.sample(logits, parameters)
    inputs = tokens.roll(1)
    distributions = None
    if known is not Known.TOKENS:
        q = logits.nan_to_num(neginf=0.0) / 1.2 + torch.randn(rows, vocab, generator=generator)
        q = q[:, : draft_vocab or vocab].to(draft_dtype)
        drawn = torch.multinomial(q.float().softmax(-1), 1, generator=generator).view(-1).roll(1)
        inputs = torch.where(torch.rand(rows, generator=generator) < 0.8, drawn, inputs)
        values = q.softmax(-1) if known is Known.PROBABILITIES else q
        order = torch.randperm(rows, generator=generator)
        distributions = Distributions(values=values[order].to(device), index=order.argsort().to(device))
    else:
        other = torch.randint(0, vocab, (rows,), generator=generator)
        inputs = torch.where(torch.rand(rows, generator=generator) < 0.8, inputs, other)
    inputs[6], inputs[16] = -1, vocab
    spec = VerificationSpec(
        max_drafts=max(ROWS) - 1, vocab=vocab, known=known, draft_dtype=draft_dtype, token_dtype=token_dtype
    )
    given = {name: one for name, one in vars(parameters).items() if one is not None}
    moved = Parameters(**{name: one.to(device) for name, one in given.items()})
    drafts = Drafts(inputs=inputs.int().to(device), cu_rows=cu_rows_of(ROWS, device), distributions=distributions)
    return Step(spec, Sampled(tokens.to(device), logprobs.to(device)), moved, drafts)


# Requests of two drafts over a small vocabulary, as often as asked for.

VOCAB, DRAFTS = 12, 2
AT_ONCE = 50_000
Verify = Callable[[Sampled, Parameters, Drafts, VerificationSpec], Verified | tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Chances:
    """Probabilities, float64.

    Attributes:
        target: [DRAFTS + 1, VOCAB], of each row, after filters.
        draft: [DRAFTS, VOCAB], that drafts are drawn with.
    """

    target: torch.Tensor
    draft: torch.Tensor


SETTINGS: dict[str, dict[str, float]] = {"none": {}, "hot": {"temperature": 1.6}, "kp": {"top_k": 6, "top_p": 0.9}}


def row_parameters(name: str, requests: int, start: int, device: torch.device) -> Parameters:
    """Of requests with seeds from `start` on."""
    rows = requests * (DRAFTS + 1)
    kinds = {"top_k": torch.int32}
    filters = {
        key: torch.full((rows,), value, dtype=kinds.get(key, torch.float32), device=device)
        for key, value in SETTINGS[name].items()
    }
    seeds = torch.arange(start, start + requests, device=device).repeat_interleave(DRAFTS + 1)
    return Parameters(seeds=seeds, positions=torch.arange(DRAFTS + 1, device=device).repeat(requests) + 9, **filters)


def logits_of_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target [DRAFTS + 1, VOCAB] and of the drafter [DRAFTS, VOCAB]."""
    generator = torch.Generator().manual_seed(11)
    target = torch.randn(DRAFTS + 1, VOCAB, generator=generator)
    return target, target[:DRAFTS] * 0.7 + torch.randn(DRAFTS, VOCAB, generator=generator) * 0.8


def chances_of(name: str) -> Chances:
    target, draft = logits_of_rows()
    one = row_parameters(name, 1, 0, torch.device("cpu"))
    z = draft.double() / SETTINGS[name].get("temperature", 1.0)
    return Chances(reference.probabilities(target, one), z.softmax(-1))


@dataclass
class Counts:
    """How often each token came in a place, given that the drafts before it were accepted.

    Attributes:
        tokens: [DRAFTS + 1, VOCAB].
        accepted: [DRAFTS], how often a place's draft was accepted.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor


def count(name: str, known: Known, requests: int, device: torch.device, verify: Verify) -> Counts:
    """Verify the drafts of so many requests, which differ in their seeds and in drafts drawn by torch.

    Args:
        verify: (drawn, parameters, drafts, spec) -> tokens and counts.
    """
    target, draft = logits_of_rows()
    chances = chances_of(name)
    known_values = chances.draft.float() if known is Known.PROBABILITIES else draft
    spec = VerificationSpec(max_drafts=DRAFTS, vocab=VOCAB, known=known)
    one = row_parameters(name, 1, 0, torch.device("cpu"))
    logprobs = reference.sample(target, one)[1].to(device)
    z = reference.scaled_logits(target, one.temperature)[0]
    prob = (reference.fixed_point_probs(reference.distances(z)) * reference.filter_mask(z, one)).to(device)
    found = Counts(torch.zeros(DRAFTS + 1, VOCAB, dtype=torch.int64), torch.zeros(DRAFTS, dtype=torch.int64))
    generator = torch.Generator().manual_seed(7)
    for start in range(0, requests, AT_ONCE):
        parameters = row_parameters(name, AT_ONCE, start, device)
        rows = AT_ONCE * (DRAFTS + 1)
        inputs = torch.zeros(AT_ONCE, DRAFTS + 1, dtype=torch.int32)
        for place in range(DRAFTS):
            inputs[:, place + 1] = torch.multinomial(
                chances.draft[place].float(), AT_ONCE, replacement=True, generator=generator
            )
        index = torch.arange(DRAFTS + 1, device=device).clamp(max=DRAFTS - 1).repeat(AT_ONCE)
        distributions = None
        if known is not Known.TOKENS:
            distributions = Distributions(values=known_values.to(device), index=index)
        drafts = Drafts(
            inputs=inputs.view(-1).to(device),
            cu_rows=torch.arange(0, rows + 1, DRAFTS + 1, dtype=torch.int32, device=device),
            distributions=distributions,
        )
        drawn = Sampled(reference.draw(prob.repeat(AT_ONCE, 1), parameters), logprobs.repeat(AT_ONCE, 1))
        tokens, counts = (one.cpu() for one in verify(drawn, parameters, drafts, spec))
        for place in range(DRAFTS + 1):
            there = counts > place
            found.tokens[place] += torch.bincount(tokens[there, place].long(), minlength=VOCAB)
            if place < DRAFTS:
                found.accepted[place] += (counts > place + 1).sum()
    return found


def unfair(name: str, known: Known, found: Counts) -> list[str]:
    """What is not as often as its probability says: by more than five standard deviations of a chi-square."""
    chances = chances_of(name)
    wrong = []
    for place in range(DRAFTS + 1):
        statistic, freedom = chi_square(found.tokens[place], chances.target[place])
        if statistic > freedom + 5 * (2 * freedom) ** 0.5:
            wrong.append(f"tokens in place {place}: chi-square {statistic:.0f} of {freedom}")
        if found.tokens[place][chances.target[place] == 0].any():
            wrong.append(f"tokens in place {place} that filters remove")
    for place in range(DRAFTS):
        p, q = chances.target[place], chances.draft[place]
        # Equal by chance, or by the best coupling of the two.
        accepted = (p * q).sum() if known is Known.TOKENS else torch.minimum(p, q).sum()
        given, trials = found.accepted[place], found.tokens[place].sum()
        deviation = (trials * accepted * (1 - accepted)).sqrt()
        if (given - trials * accepted).abs() > 5 * deviation:
            wrong.append(f"drafts accepted in place {place}: {given / trials:.4f} where {accepted:.4f} is right")
    return wrong
