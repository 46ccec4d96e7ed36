# SPDX-License-Identifier: Apache-2.0
"""A server with prefix caching, chunked prefill and n-gram drafts, all at once: answers, concurrency, bad requests."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from integration import offline
from integration.compare import TOLERANCE, check_greedy, prompts
from integration.conftest import Checkpoint
from integration.environment import device
from integration.misuse import BAD, CONTEXT, Bad, refused
from integration.models import MODELS
from integration.offline import Answer, Job
from integration.server import Server, serve
from integration.streams import steps_of

pytestmark = pytest.mark.e2e

PAGE = 16
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FLAGS = (
    *("--attention-backend", "dsl", "--dtype", device().dtypes[0], "--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "48", "--enable-chunked-prefill", "--enable-prefix-caching"),
    *("--block-size", str(PAGE), "--speculative-config", json.dumps(SPECULATION)),
)
# Every prompt three times, with different lengths of its answer.
ORDER = [index for turn in range(3) for index in range(len(prompts()))]
LENGTHS = [3 + 3 * (position % 4) for position in range(len(ORDER))]
LONGEST = max(range(len(prompts())), key=lambda index: len(prompts()[index]))


@pytest.fixture(scope="module", params=["eager", "graphs"] if device().cuda else ["eager"])
def server(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    eager = ["--enforce-eager"] if request.param == "eager" else []
    log = tmp_path_factory.mktemp("serving") / "log"
    environment = device().environment if eager else {}
    with serve(checkpoint("llama", MODELS["llama"]), log, *FLAGS, *eager, **environment) as running:
        yield running


@dataclass(frozen=True)
class Answers:
    """The server's answers, and an exact engine's scores of them.

    Attributes:
        cache_hits: tokens of the last prompt, asked again, that came from the prefix cache.
    """

    alone: list[Answer]
    together: list[Answer]
    again: Answer
    cache_hits: float
    scored: dict[str, list[Answer]]


@pytest.fixture(scope="module")
def answers(server: Server, checkpoint: Checkpoint) -> Answers:
    alone = [ask(server, prompt) for prompt in prompts()]
    with ThreadPoolExecutor(len(ORDER)) as threads:
        together = list(
            threads.map(lambda index, length: ask(server, prompts()[index], max_tokens=length), ORDER, LENGTHS)
        )
    hits = server.metric("vllm:prefix_cache_hits_total")
    again = ask(server, prompts()[LONGEST])
    hits = server.metric("vllm:prefix_cache_hits_total") - hits
    asked = {
        "alone": list(zip(prompts(), alone, strict=True)),
        "together": [(prompts()[index], answer) for index, answer in zip(ORDER, together, strict=True)],
        "again": [(prompts()[LONGEST], again)],
    }
    backend, dtype = device().dense_truth
    job = Job(
        model=str(checkpoint("llama", MODELS["llama"])),
        backend=backend,
        dtype=dtype,
        prompts=tuple((*prompt, *answer.tokens) for pairs in asked.values() for prompt, answer in pairs),
        max_tokens=1,
    )
    exact = iter(offline.run([job])[0].answers)
    return Answers(alone, together, again, hits, {name: [next(exact) for _ in pairs] for name, pairs in asked.items()})


def ask(server: Server, prompt: tuple[int, ...], **options: object) -> Answer:
    choice = server.complete(list(prompt), return_tokens_as_token_ids=True, **options)["logprobs"]
    return Answer(
        prompt_logprobs=[],
        prompt_best=[],
        tokens=[int(token.removeprefix("token_id:")) for token in choice["tokens"]],
        logprobs=steps_of(choice),
    )


def test_answers_one_at_a_time(answers: Answers) -> None:
    check_greedy(answers.alone, answers.scored["alone"], TOLERANCE)


def test_answers_side_by_side(answers: Answers) -> None:
    """Requests of different lengths join and leave a batch without changing each other's answers."""
    check_greedy(answers.together, answers.scored["together"], TOLERANCE)


def test_prefix_from_the_cache(answers: Answers) -> None:
    """A repeated long prompt is read from the prefix cache, and its answer is right."""
    assert answers.cache_hits >= len(prompts()[LONGEST]) - 2 * PAGE
    check_greedy([answers.again], answers.scored["again"], TOLERANCE)


def test_drafts_were_accepted(server: Server) -> None:
    """N-gram drafts are used: some of them are accepted for a repetitive prompt."""
    before = server.metric("vllm:spec_decode_num_draft_tokens_total")
    ask(server, (7, 8, 9, 10) * 20, max_tokens=48)
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > before


def test_log_says_what_serves(server: Server) -> None:
    lines = [line for line in server.log.splitlines() if "dsl serves attention" in line]
    assert lines
    assert all(device().serves(line) for line in lines)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_bad_request(server: Server, answers: Answers, bad: Bad) -> None:
    """The client receives vLLM's refusal, and the next request is answered as usual."""
    assert refused(server, bad) is None
    first = answers.alone[2].tokens[0]
    after = ask(server, prompts()[2], max_tokens=1).logprobs[0]
    assert abs(after[first] - answers.alone[2].logprobs[0][first]) <= TOLERANCE
