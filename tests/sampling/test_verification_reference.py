# SPDX-License-Identifier: Apache-2.0
"""Verification's definition: its rule said a second time, its distribution, and mistakes that are found."""

import itertools
from collections.abc import Callable

import pytest
import torch

from dsl_backend.sampling import fixed_point, reference, verification_random
from dsl_backend.sampling import verification_reference as definition
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification import NO_TOKEN, Distributions, Drafts, Known, VerificationSpec
from dsl_backend.testing.verification import ROWS, Step, cu_rows_of, random_step
from tests.sampling.verification_cases import SETTINGS, count, unfair

CPU = torch.device("cpu")


def one_by_one(step: Step) -> list[list[int]]:
    """The rule in a loop over requests and drafts, with Python's integers."""
    given, drawn = step.drafts, step.drawn.tokens.tolist()
    inputs, bounds = given.inputs.tolist(), given.cu_rows.tolist()
    answers = []
    for first, end in itertools.pairwise(bounds):
        tokens: list[int] = []
        for row in range(first, end):
            draft = inputs[row + 1] if row + 1 < end else NO_TOKEN
            accepted, token = draft == drawn[row], drawn[row]
            if given.distributions is not None and 0 <= draft < step.spec.vocab and not is_greedy(step, row):
                accepted, token = ratio(step, row, draft)
            if not accepted:
                tokens.append(token)
                break
            tokens.append(draft)
        answers.append(tokens)
    return answers


def is_greedy(step: Step, row: int) -> bool:
    assert step.parameters.temperature is not None
    return not bool(step.parameters.temperature[row] >= fixed_point.GREEDY_TEMPERATURE)


def ratio(step: Step, row: int, draft: int) -> tuple[bool, int]:
    known, given = step.drafts.distributions, step.parameters
    assert known is not None
    of_row = {name: one[row : row + 1] for name, one in vars(given).items() if one is not None}
    p = definition.target_probs(step.logits[row : row + 1], Parameters(**of_row))[0].tolist()
    index = int(known.index[row])
    temperature = step.parameters.temperature
    one = None if temperature is None else temperature[row : row + 1]
    q = definition.draft_probs(known.values[index : index + 1], one, step.spec.known)[0].tolist()
    q += [0] * (len(p) - len(q))
    seed, position = step.parameters.seeds[row : row + 1], step.parameters.positions[row : row + 1]
    test = reference.philox(seed, position + verification_random.RATIO_TEST).item()
    second = reference.philox(seed, position + verification_random.RESIDUAL).item()
    if int(test) * q[draft] >> 62 < p[draft]:
        return True, draft
    rest = [max(a - b, 0) for a, b in zip(p, q, strict=True)]
    target, passed = int(second) * sum(rest) >> 62, 0
    for token, weight in enumerate(rest):
        passed += weight
        if passed > target:
            return False, token
    return False, int(step.drawn.tokens[row])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("known", "dtype"),
    [
        (Known.TOKENS, torch.float32),
        (Known.LOGITS, torch.float32),
        (Known.LOGITS, torch.bfloat16),
        (Known.PROBABILITIES, torch.float32),
    ],
)
def test_the_rule(known: Known, dtype: torch.dtype, seed: int) -> None:
    step = random_step(seed, known, 200, CPU, dtype, draft_vocab=150 if seed % 2 else None)
    tokens, counts = step.expected()
    expected = one_by_one(step)
    assert [row[:n] for row, n in zip(tokens.tolist(), counts.tolist(), strict=True)] == expected
    width = step.spec.max_drafts + 1
    assert tokens.tolist() == [answer + [NO_TOKEN] * (width - len(answer)) for answer in expected]


def test_steps_accept_some_drafts_and_not_all() -> None:
    """The random steps of these tests have requests of both kinds under every rule."""
    for known in Known:
        found = [step.expected()[1] for step in (random_step(seed, known, 200, CPU) for seed in range(4))]
        accepted = torch.stack(found).sub(1)
        drafts = torch.tensor(ROWS) - 1
        assert ((accepted > 0) & (accepted < drafts)).any(), known
        assert ((accepted == drafts) & (drafts > 0)).any(), known


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_without_drafts(seed: int) -> None:
    """Where tokens alone are known, whatever the drafts are."""
    step = random_step(seed, Known.TOKENS, 200, CPU)
    tokens, counts = step.expected()
    for request, first in enumerate(step.drafts.cu_rows[:-1].tolist()):
        n = int(counts[request])
        assert tokens[request, :n].tolist() == step.drawn.tokens[first : first + n].tolist()


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_drafts_of_the_target_itself_are_accepted(known: Known) -> None:
    """Where the drafter's distribution is the target's, up to the rounding of probabilities."""
    rows, vocab = 2001, 64
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    parameters = Parameters(
        seeds=torch.arange(rows), positions=torch.arange(rows), temperature=torch.full((rows,), 0.7)
    )
    tokens, _ = reference.sample(logits, parameters)
    values = (logits / 0.7).softmax(-1) if known is Known.PROBABILITIES else logits
    inputs = torch.multinomial((logits / 0.7).softmax(-1), 1).view(-1).roll(1).int()
    spec = VerificationSpec(max_drafts=20, vocab=vocab, known=known)
    requests = torch.arange(0, rows + 1, 3, dtype=torch.int32)
    drafts = Drafts(
        inputs=inputs, cu_rows=requests, distributions=Distributions(values=values, index=torch.arange(rows))
    )
    counts = definition.verify(Sampled(tokens), parameters, drafts, spec, logits)[1]
    assert (counts == 3).float().mean() > 0.999


def test_more_drafts_than_the_spec_has_are_left_out() -> None:
    drawn = Sampled(torch.tensor([5, 6, 7, 8]))
    ids = torch.zeros(4, dtype=torch.int64)
    drafts = Drafts(inputs=torch.tensor([0, 5, 6, 7], dtype=torch.int32), cu_rows=cu_rows_of((4,), CPU))
    parameters = Parameters(seeds=ids, positions=ids)
    tokens, counts = definition.verify(drawn, parameters, drafts, VerificationSpec(max_drafts=2, vocab=9))
    assert tokens.tolist() == [[5, 6, 7]]
    assert counts.tolist() == [3]


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    drafts = Drafts(inputs=none, cu_rows=cu_rows_of((0, 0), CPU))
    spec = VerificationSpec(max_drafts=1, vocab=9)
    tokens, counts = definition.verify(Sampled(none), Parameters(seeds=none, positions=none), drafts, spec)
    assert tokens.tolist() == [[NO_TOKEN] * 2] * 2
    assert counts.tolist() == [0, 0]


# The distribution.

REQUESTS = [pytest.param(200_000, id="200k"), pytest.param(5_000_000, id="5M", marks=pytest.mark.full)]


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("known", list(Known))
def test_tokens_have_the_targets_distribution(known: Known, name: str, requests: int) -> None:
    """The first token, the second after an accepted draft, the third after two; and drafts are accepted as often."""
    assert unfair(name, known, count(name, known, requests, CPU, definition.verify)) == []


def accept_more(limit: torch.Tensor, factor: float) -> torch.Tensor:
    return (limit.double() * factor).long()


def biased_test(patch: pytest.MonkeyPatch) -> None:
    """Drafts are accepted 0.5 % more often where they are not always: 1e-3 of all tokens."""
    multiply = reference.multiply_high
    calls: list[None] = []

    def first_of_two(bits: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        product = multiply(bits, prob)
        return accept_more(product, 1 / 1.005) if prob.dim() == 1 and len(calls) % 2 else product

    ratio_test = definition.ratio_test

    def biased(*given: torch.Tensor | Parameters) -> tuple[torch.Tensor, torch.Tensor]:
        calls.clear()
        patch.setattr(reference, "multiply_high", first_of_two)
        found = ratio_test(*given)  # type: ignore[arg-type]
        patch.setattr(reference, "multiply_high", multiply)
        return found

    patch.setattr(definition, "ratio_test", biased)


def biased_target(patch: pytest.MonkeyPatch) -> None:
    """One token in 250 of the most likely one's is another's."""
    probs = definition.target_probs

    def biased(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        p = probs(logits, parameters)
        taken = p[:, 0] // 100
        p[:, 0] -= taken
        p[:, 1] += taken
        return p

    patch.setattr(definition, "target_probs", biased)


def biased_drafter(patch: pytest.MonkeyPatch) -> None:
    """The drafter's probabilities are 0.5 % too small."""
    probs = definition.draft_probs
    patch.setattr(definition, "draft_probs", lambda *given: accept_more(probs(*given), 0.995))


def same_bits(patch: pytest.MonkeyPatch) -> None:
    """The second draw has the random numbers of the test, which have just been large."""
    patch.setattr(definition, "RESIDUAL", verification_random.RATIO_TEST)


def samplers_bits(patch: pytest.MonkeyPatch) -> None:
    """The second draw has the sampler's random numbers and the test has them too."""
    patch.setattr(definition, "RATIO_TEST", 0)
    patch.setattr(definition, "RESIDUAL", 0)


def no_residual(patch: pytest.MonkeyPatch) -> None:
    """The second draw is from the target, so that the drafter's favourites come too often."""
    ratio_test = definition.ratio_test

    def target_again(
        p: torch.Tensor, q: torch.Tensor, draft: torch.Tensor, parameters: Parameters
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ratio_test(p, q, draft, parameters)[0], ratio_test(p, q * 0, draft, parameters)[1]

    patch.setattr(definition, "ratio_test", target_again)


Mutant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
@pytest.mark.parametrize("mutant", [same_bits, samplers_bits, no_residual])
def test_a_wrong_rule_is_found(mutant: Mutant, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert unfair("none", known, count("none", known, 100_000, CPU, definition.verify)) != []


@pytest.mark.full
@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
@pytest.mark.parametrize("mutant", [biased_test, biased_target, biased_drafter])
def test_a_bias_of_a_thousandth_is_found(mutant: Mutant, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five million tokens; where nothing is wrong the same number is fair (above)."""
    mutant(monkeypatch)
    assert unfair("none", known, count("none", known, 5_000_000, CPU, definition.verify)) != []


@pytest.mark.parametrize(
    ("requests", "share"),
    [pytest.param(200_000, 0.02, id="200k"), pytest.param(5_000_000, 0.002, id="5M", marks=pytest.mark.full)],
)
def test_drafts_that_are_accepted_by_chance_are_found(requests: int, share: float) -> None:
    """Where tokens alone are known: of a share of the drafts, all are accepted."""
    generator = torch.Generator().manual_seed(0)

    def lenient(
        drawn: Sampled, parameters: Parameters, drafts: Drafts, spec: VerificationSpec, _: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        draft = drafts.inputs.long().roll(-1)
        chosen = torch.rand(len(draft), generator=generator) < share
        return definition.verify(Sampled(torch.where(chosen, draft, drawn.tokens)), parameters, drafts, spec)

    assert unfair("none", Known.TOKENS, count("none", Known.TOKENS, requests, CPU, lenient)) != []
