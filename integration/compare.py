# SPDX-License-Identifier: Apache-2.0
"""The prompts for comparisons, and the differences between two engines' answers, in natural-log units."""

import math
import random

from integration.environment import device
from integration.models import VOCABULARY
from integration.offline import Answer

# Natural-log units: the difference that another order of summation in float32 causes in logits of a few units after a
# few layers. A missing feature changes log-probabilities by more than a hundred times as much (test_feature_matters).
ROUNDING = 1e-4
VISIBLE = 100 * ROUNDING
# Of what a server says in the first of device().dtypes. bfloat16 moves the small Llama's log-probabilities by 0.1
# (test_numerics measures it): two runs part by twice that.
TOLERANCE = 0.2 if device().cuda else ROUNDING


def prompts() -> tuple[tuple[int, ...], ...]:
    """Prompts shorter and longer than windows, pages and chunks, with repetitions for the n-gram proposer."""
    numbers = random.Random(0)
    drawn = [[numbers.randrange(6, VOCABULARY) for _ in range(length)] for length in (1, 2, 31, 33, 100, 300)]
    drawn[4] = drawn[4][:25] * 4
    return tuple(tuple(prompt) for prompt in drawn)


def prompt_errors(answers: list[Answer], truth: list[Answer]) -> list[float]:
    """The absolute differences of the prompts' log-probabilities. Every position has the same context."""
    pairs = [
        pair
        for answer, exact in zip(answers, truth, strict=True)
        for pair in zip(answer.prompt_logprobs, exact.prompt_logprobs, strict=True)
    ]
    assert len(pairs) == sum(len(prompt) - 1 for prompt in prompts())
    return [abs(ours - exact) for ours, exact in pairs]


def generated_errors(answers: list[Answer], truth: list[Answer], tolerance: float) -> list[float]:
    """The absolute differences of the generated tokens' log-probabilities, up to the first differing token.

    Raises:
        AssertionError: tokens differ although it is no near tie: the exact run prefers its own by more than twice the
            tolerance.
    """
    errors = []
    for index, (answer, exact) in enumerate(zip(answers, truth, strict=True)):
        assert len(answer.tokens) == len(exact.tokens)
        for step, (token, expected) in enumerate(zip(answer.tokens, exact.tokens, strict=True)):
            if token != expected:
                gap = exact.logprobs[step][expected] - exact.logprobs[step].get(token, -math.inf)
                assert gap <= 2 * tolerance, f"prompt {index}, step {step}: {token}, but {expected} leads by {gap:.4f}"
                break
            errors.append(abs(answer.logprobs[step][token] - exact.logprobs[step][expected]))
    return errors


def rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def check_greedy(answers: list[Answer], scored: list[Answer], tolerance: float) -> None:
    """Checks each token of answers against an exact engine's scores of the same tokens.

    Args:
        scored: the exact engine's answers to prompts that end with the tokens of `answers`.

    Raises:
        AssertionError: a log-probability differs by more than the tolerance, or another token is likelier by more than
            twice the tolerance.
    """
    for index, (answer, exact) in enumerate(zip(answers, scored, strict=True)):
        count = len(answer.tokens)
        assert count
        for step, (token, logprob, best) in enumerate(
            zip(answer.tokens, exact.prompt_logprobs[-count:], exact.prompt_best[-count:], strict=True)
        ):
            where = f"answer {index}, step {step}, token {token}"
            error = abs(answer.logprobs[step][token] - logprob)
            assert error <= tolerance, f"{where}: log-probability off by {error:.4f}"
            assert best - logprob <= 2 * tolerance, f"{where}: another token is likelier by {best - logprob:.4f}"
