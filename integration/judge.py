# SPDX-License-Identifier: Apache-2.0
"""The requests of the checks under load, and an exact engine that checks a server's answers to them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from integration import offline
from integration.compare import check_greedy
from integration.environment import device
from integration.models import VOCABULARY
from integration.offline import Answer, Job

SHARED = 64
LONGEST_PROMPT = 300


@dataclass(frozen=True)
class Request:
    """A greedy completion of `tokens` tokens."""

    prompt: tuple[int, ...]
    tokens: int


def requests(count: int, longest: int, seed: int = 0) -> list[Request]:
    """Distinct prompts of mixed lengths. A third of them share a prefix, and a third have repetitions.

    Args:
        longest: tokens of the longest answer; the shortest answers have a tenth of that.
    """
    numbers = random.Random(seed)

    def draw(length: int) -> list[int]:
        return [numbers.randrange(6, VOCABULARY) for _ in range(length)]

    shared = draw(SHARED)
    made = []
    for index in range(count):
        length = numbers.randint(1, LONGEST_PROMPT - SHARED) if index % 2 else numbers.randint(1, 32)
        prompt = draw(length)
        if index % 3 == 1:
            prompt = shared + prompt
        elif index % 3 == 2:
            prompt = (prompt[:8] * length)[:length]
        made.append(Request(tuple(prompt), numbers.randint(max(1, longest // 10), longest)))
    # The first prompt and its answer are long, so that a request sent alone crosses page and chunk boundaries.
    return [Request(tuple(draw(LONGEST_PROMPT)), longest), *made[1:]]


class Judge:
    """Compares answers with those of vLLM's own backend, which runs requests one by one in a higher precision.

    If an answer has the exact engine's own tokens, its log-probabilities are compared with that engine's. Any other
    answer is scored by the engine, because it may be right too if two tokens are nearly equally likely.
    """

    def __init__(self, model: Path, asked: Sequence[Request]) -> None:
        self.model = model
        self.exact: dict[tuple[int, ...], Answer] = {}
        prompts = tuple(request.prompt for request in asked)
        longest = max(request.tokens for request in asked)
        for prompt, answer in zip(prompts, self.run(prompts, longest), strict=True):
            self.exact[prompt] = answer

    def run(self, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> list[Answer]:
        backend, dtype = device().dense_truth
        job = Job(model=str(self.model), backend=backend, dtype=dtype, prompts=prompts, max_tokens=max_tokens)
        return offline.run([job])[0].answers

    def agrees(self, request: Request, tokens: Sequence[int]) -> bool:
        """Whether the exact engine gave the same tokens."""
        return self.exact[request.prompt].tokens[: len(tokens)] == list(tokens)

    def score(self, asked: Sequence[Request], answers: Sequence[Answer]) -> list[Answer]:
        """The exact engine's log-probabilities of each answer's tokens, scored as a prompt's end (check_greedy)."""
        other = [
            (*request.prompt, *answer.tokens)
            for request, answer in zip(asked, answers, strict=True)
            if not self.agrees(request, answer.tokens)
        ]
        distinct = tuple(dict.fromkeys(other))
        scored = dict(zip(distinct, self.run(distinct, 1), strict=True)) if distinct else {}
        return [
            self.opinion(request, len(answer.tokens))
            if self.agrees(request, answer.tokens)
            else scored[(*request.prompt, *answer.tokens)]
            for request, answer in zip(asked, answers, strict=True)
        ]

    def opinion(self, request: Request, count: int) -> Answer:
        """The exact engine's own first tokens, in the form of a scored prompt."""
        exact = self.exact[request.prompt]
        steps = list(zip(exact.tokens, exact.logprobs, strict=True))[:count]
        return Answer(
            prompt_logprobs=[step[token] for token, step in steps],
            prompt_best=[max(step.values()) for _, step in steps],
            tokens=[],
            logprobs=[],
        )

    def check(self, asked: Sequence[Request], answers: Sequence[Answer], tolerance: float) -> None:
        """Raises AssertionError, as check_greedy does, for the first answer that is wrong."""
        check_greedy(list(answers), self.score(asked, answers), tolerance)
