# SPDX-License-Identifier: Apache-2.0
"""The prompts that are compared, and how far apart two engines' answers to them are, in natural-log units."""

import math
import random

from integration.models import VOCABULARY
from integration.offline import Answer

# Natural-log units. What two orders of summation in float32 make of logits of a few units through a few layers; leaving
# out a feature moves log-probabilities by more than a hundred times as much (test_feature_matters).
ROUNDING = 1e-4
VISIBLE = 100 * ROUNDING


def prompts() -> tuple[tuple[int, ...], ...]:
    """Prompts shorter and longer than windows, pages and chunks, with repetitions for the n-gram proposer to find."""
    numbers = random.Random(0)
    drawn = [[numbers.randrange(6, VOCABULARY) for _ in range(length)] for length in (1, 2, 31, 33, 100, 300)]
    drawn[4] = drawn[4][:25] * 4
    return tuple(tuple(prompt) for prompt in drawn)


def prompt_errors(answers: list[Answer], truth: list[Answer]) -> list[float]:
    """Absolute differences of the prompts' log-probabilities: every position has seen the same tokens."""
    pairs = [
        pair
        for answer, exact in zip(answers, truth, strict=True)
        for pair in zip(answer.prompt_logprobs, exact.prompt_logprobs, strict=True)
    ]
    assert len(pairs) == sum(len(prompt) - 1 for prompt in prompts())
    return [abs(ours - exact) for ours, exact in pairs]


def generated_errors(answers: list[Answer], truth: list[Answer], slack: float) -> list[float]:
    """Absolute differences of the generated tokens' log-probabilities, up to where a near tie may part the two.

    Raises:
        AssertionError: a token differs although the exact run prefers its own by more than twice the slack.
    """
    errors = []
    for index, (answer, exact) in enumerate(zip(answers, truth, strict=True)):
        assert len(answer.tokens) == len(exact.tokens)
        for step, (token, expected) in enumerate(zip(answer.tokens, exact.tokens, strict=True)):
            if token != expected:
                gap = exact.logprobs[step][expected] - exact.logprobs[step].get(token, -math.inf)
                assert gap <= 2 * slack, f"prompt {index}, step {step}: {token}, but {expected} leads by {gap:.4f}"
                break
            errors.append(abs(answer.logprobs[step][token] - exact.logprobs[step][expected]))
    return errors


def rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def agree(answers: list[Answer], truth: list[Answer], slack: float) -> None:
    """Raises AssertionError where generated tokens or their log-probabilities differ by more than the slack."""
    errors = generated_errors(answers, truth, slack)
    assert max(errors) <= slack
    # A near tie may end a comparison early; most of the tokens have been compared all the same.
    assert len(errors) >= sum(len(answer.tokens) for answer in answers) / 2
