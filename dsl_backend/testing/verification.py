# SPDX-License-Identifier: Apache-2.0
"""Steps with drafts to verify, and random ones. The tokens have to be the definition's, bit for bit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dsl_backend.sampling import reference, verification
from dsl_backend.sampling import verification_reference as definition
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification import Distributions, Drafts, Known, VerificationSpec

# Rows of each request: none, one (no draft), and up to four drafts.
ROWS = (3, 0, 5, 1, 2, 0, 5, 4, 1, 5)


@dataclass(frozen=True)
class Step:
    """What `verification.run` takes."""

    spec: VerificationSpec
    drawn: Sampled
    parameters: Parameters
    drafts: Drafts
    logits: torch.Tensor

    @property
    def given(self) -> tuple[Sampled, Parameters, Drafts]:
        return self.drawn, self.parameters, self.drafts

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The definition's tokens and counts."""
        return definition.verify(*self.given, self.spec, self.logits)

    def first(self, requests: int) -> "Step":
        """A step of the first requests alone."""
        rows, given = int(self.drafts.cu_rows[requests]), self.drafts.distributions
        return replace(
            self,
            drawn=self.drawn.rows(rows),
            parameters=Parameters(
                **{name: one[:rows] for name, one in vars(self.parameters).items() if one is not None}
            ),
            drafts=Drafts(
                inputs=self.drafts.inputs[:rows],
                cu_rows=self.drafts.cu_rows[: requests + 1],
                distributions=None if given is None else replace(given, index=given.index[:rows]),
            ),
            logits=self.logits[:rows],
        )


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
    filters: tuple[str, ...] = ("top_k", "top_p"),
) -> Step:
    """Requests with filters, of which one row is greedy, and one has no logit above -inf.

    About half of the drafts are the tokens that are drawn. One is -1, and one is beyond the vocabulary.

    Args:
        filters: names of the parameters that rows have.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = sum(ROWS)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    logits[8] = -torch.inf
    temperature = torch.rand(rows, generator=generator) + 0.5
    temperature[5], temperature[20] = 0, float("nan")
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    values = {
        "top_k": torch.randint(0, vocab, (rows,), generator=generator, dtype=torch.int32),
        "top_p": torch.rand(rows, generator=generator) * 0.5 + 0.5,
        "min_p": torch.rand(rows, generator=generator) * 0.02,
    }
    parameters = Parameters(
        seeds=seeds,
        positions=torch.arange(rows) * 3,
        temperature=temperature,
        **{name: values[name] for name in filters},
    )
    tokens = reference.sample(logits, parameters)[0]
    inputs = tokens.roll(1)
    distributions = None
    if known is not Known.TOKENS:
        q = logits.nan_to_num(neginf=0.0) / 1.2 + torch.randn(rows, vocab, generator=generator)
        q = q[:, : draft_vocab or vocab].to(draft_dtype)
        drawn = torch.multinomial(q.float().softmax(-1), 1, generator=generator).view(-1).roll(1)
        inputs = torch.where(torch.rand(rows, generator=generator) < 0.8, drawn, inputs)
        known_values = q.softmax(-1) if known is Known.PROBABILITIES else q
        order = torch.randperm(rows, generator=generator)
        distributions = Distributions(values=known_values[order].to(device), index=order.argsort().to(device))
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
    return Step(spec, Sampled(tokens.to(device)), moved, drafts, logits.to(device))


@dataclass(frozen=True, kw_only=True)
class VerificationCase:
    """A `random_step`.

    Attributes:
        draft_dtype, token_dtype, draft_vocab, seed, filters: its arguments; draft_vocab is None where it is the
            target's.
    """

    id: str
    known: Known
    vocab: int
    draft_dtype: torch.dtype = torch.float32
    token_dtype: torch.dtype = torch.int64
    draft_vocab: int | None = None
    seed: int = 0
    filters: tuple[str, ...] = ("top_k", "top_p")


TOKENS, LOGITS, PROBABILITIES = Known.TOKENS, Known.LOGITS, Known.PROBABILITIES
CASES = (
    VerificationCase(id="tokens", known=TOKENS, vocab=300),
    VerificationCase(id="tokens-int32", known=TOKENS, vocab=5, token_dtype=torch.int32, seed=1),
    VerificationCase(id="logits", known=LOGITS, vocab=300, seed=2),
    VerificationCase(id="logits-bf16", known=LOGITS, vocab=77, draft_dtype=torch.bfloat16, seed=3),
    VerificationCase(id="probabilities", known=PROBABILITIES, vocab=300, token_dtype=torch.int32, seed=4),
    VerificationCase(id="draft-vocab", known=LOGITS, vocab=300, draft_vocab=80, seed=5),
    VerificationCase(id="logits-no-filter", known=LOGITS, vocab=1300, filters=(), seed=7),
    VerificationCase(id="probabilities-no-filter", known=PROBABILITIES, vocab=600, filters=(), seed=8),
    VerificationCase(id="min-p", known=LOGITS, vocab=300, filters=("min_p",), seed=9),
)
WIDE = tuple(
    VerificationCase(id=f"real-{known.value}{suffix}", known=known, vocab=128_256, seed=6, filters=filters)
    for known in (TOKENS, LOGITS, PROBABILITIES)
    for suffix, filters in (("", ("top_k", "top_p")), ("-no-filter", ()))
)


def random_case(seed: int, widest: int) -> VerificationCase:
    """A step of any kind; the same for the same seed."""
    draw = random.Random(seed)
    known, vocab = draw.choice(tuple(Known)), draw.randint(3, widest)
    return VerificationCase(
        id=f"fuzz-{seed}",
        known=known,
        vocab=vocab,
        draft_dtype=draw.choice((torch.float32, torch.bfloat16, torch.float16)) if known is LOGITS else torch.float32,
        token_dtype=draw.choice((torch.int64, torch.int32)),
        draft_vocab=draw.choice((None, draw.randint(2, vocab))),
        seed=seed,
        filters=draw.choice(((), (), ("top_p",), ("top_k", "min_p"), ("top_k", "top_p", "min_p"))),
    )


def check_verification(case: VerificationCase, kernel: str | None, device: torch.device | str) -> None:
    """Raise AssertionError where a token or a count is not the definition's."""
    step = random_step(
        case.seed,
        case.known,
        case.vocab,
        torch.device(device),
        case.draft_dtype,
        case.token_dtype,
        case.draft_vocab,
        case.filters,
    )
    rows = len(step.drawn.tokens)
    plan = verification.plan(step.spec, step.drafts.requests, rows, device, kernel)
    found = verification.run(plan, *step.given, step.logits)
    tokens, counts = step.expected()
    assert found.counts.tolist() == counts.tolist(), f"counts {found.counts.tolist()} where {counts.tolist()} is right"
    assert found.tokens.tolist() == tokens.tolist(), f"{found.tokens.tolist()} where {tokens.tolist()} is right"
