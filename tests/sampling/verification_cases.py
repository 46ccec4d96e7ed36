# SPDX-License-Identifier: Apache-2.0
"""Requests with drafts whose tokens have known probabilities, as often as asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsl_backend.sampling import reference
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification import Distributions, Drafts, Known, VerificationSpec, Verified
from tests.sampling.distribution import chi_square

# Requests of two drafts over a small vocabulary.
VOCAB, DRAFTS = 12, 2
AT_ONCE = 50_000
Verify = Callable[
    [Sampled, Parameters, Drafts, VerificationSpec, torch.Tensor], Verified | tuple[torch.Tensor, torch.Tensor]
]


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
        verify: (drawn, parameters, drafts, spec, logits) -> tokens and counts.
    """
    target, draft = logits_of_rows()
    chances = chances_of(name)
    known_values = chances.draft.float() if known is Known.PROBABILITIES else draft
    spec = VerificationSpec(max_drafts=DRAFTS, vocab=VOCAB, known=known)
    one = row_parameters(name, 1, 0, torch.device("cpu"))
    logits = target.to(device).repeat(AT_ONCE, 1)
    row = reference.Rows(*(tensor.to(device) for tensor in reference.rows_of(target, one)))
    repeated = reference.Rows(*(tensor.repeat(AT_ONCE, 1) for tensor in row))
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
        drawn = Sampled(reference.draw(repeated, parameters))
        tokens, counts = (one.cpu() for one in verify(drawn, parameters, drafts, spec, logits))
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
