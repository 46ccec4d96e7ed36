# SPDX-License-Identifier: Apache-2.0
"""A server with prefix caching, chunked prefill and n-gram drafts, all at once: answers, concurrency, bad requests."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from integration import offline
from integration.compare import ROUNDING, agree, prompts
from integration.conftest import Checkpoint
from integration.environment import device
from integration.models import MODELS, VOCABULARY
from integration.offline import Answer, Job
from integration.server import Server, serve

pytestmark = pytest.mark.e2e

CONTEXT = 512
PAGE = 16
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FLAGS = (
    *("--attention-backend", "dsl", "--dtype", device().dtypes[0], "--max-model-len", str(CONTEXT)),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "48", "--enable-chunked-prefill", "--enable-prefix-caching"),
    *("--block-size", str(PAGE), "--speculative-config", json.dumps(SPECULATION)),
)
# bfloat16 moves this model's log-probabilities by 0.1 (test_numerics measures it): two runs part by twice that.
SLACK = 0.2 if device().cuda else ROUNDING


@pytest.fixture(scope="module", params=["eager", "graphs"] if device().cuda else ["eager"])
def server(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    eager = ["--enforce-eager"] if request.param == "eager" else []
    log = tmp_path_factory.mktemp("serving") / "log"
    with serve(checkpoint("llama", MODELS["llama"]), log, *FLAGS, *eager) as running:
        yield running


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint) -> list[Answer]:
    """What vLLM's own backend answers to the prompts, without any of the server's settings."""
    backend, dtype = device().dense_truth
    job = Job(model=str(checkpoint("llama", MODELS["llama"])), backend=backend, dtype=dtype, prompts=prompts())
    return offline.run([job])[0].answers


def ask(server: Server, prompt: tuple[int, ...], **options: object) -> Answer:
    choice = server.complete(list(prompt), return_tokens_as_token_ids=True, **options)["logprobs"]

    def number(token: str) -> int:
        return int(token.removeprefix("token_id:"))

    return Answer(
        prompt_logprobs=[],
        tokens=[number(token) for token in choice["tokens"]],
        logprobs=[{number(t): value for t, value in step.items()} for step in choice["top_logprobs"]],
    )


def test_answers_one_at_a_time(server: Server, truth: list[Answer]) -> None:
    agree([ask(server, prompt) for prompt in prompts()], truth, SLACK)


def test_answers_side_by_side(server: Server, truth: list[Answer]) -> None:
    """Requests of different lengths join and leave a batch: none changes another's answer."""
    order = [index for turn in range(3) for index in range(len(prompts()))]
    with ThreadPoolExecutor(len(order)) as threads:
        lengths = [3 + 3 * (position % 4) for position in range(len(order))]
        answers = list(
            threads.map(lambda index, length: ask(server, prompts()[index], max_tokens=length), order, lengths)
        )
    exact = [
        Answer([], truth[index].tokens[:length], truth[index].logprobs[:length])
        for index, length in zip(order, lengths, strict=True)
    ]
    agree(answers, exact, SLACK)


def test_prefix_from_the_cache(server: Server, truth: list[Answer]) -> None:
    """A long prompt that was seen before is read from the cache, and the answer stays the same."""
    longest = max(range(len(prompts())), key=lambda index: len(prompts()[index]))
    ask(server, prompts()[longest])
    hits = server.metric("vllm:prefix_cache_hits_total")
    again = ask(server, prompts()[longest])
    assert server.metric("vllm:prefix_cache_hits_total") - hits >= len(prompts()[longest]) - 2 * PAGE
    agree([again], [truth[longest]], SLACK)


def test_drafts_were_accepted(server: Server) -> None:
    """The n-gram drafts took part: a repetitive prompt has some of them accepted."""
    before = server.metric("vllm:spec_decode_num_draft_tokens_total")
    ask(server, (7, 8, 9, 10) * 20, max_tokens=48)
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > before


def test_log_says_what_serves(server: Server) -> None:
    lines = [line for line in server.log.splitlines() if "dsl serves attention" in line]
    assert lines
    assert all(("by triton" if device().cuda else "by reference") in line for line in lines)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param({"prompt": [VOCABULARY + 5]}, 400, id="token id out of range"),
        pytest.param({"prompt": [-1]}, 400, id="negative token id"),
        pytest.param({"prompt": [7] * (CONTEXT + 1)}, 400, id="prompt longer than the context"),
        pytest.param({"prompt": []}, 400, id="empty prompt"),
        pytest.param({"prompt": "x", "temperature": -1}, 400, id="negative temperature"),
        pytest.param({"prompt": "x", "n": 0}, 400, id="no choices"),
        pytest.param({"prompt": "x", "model": "another"}, 404, id="unknown model"),
    ],
)
def test_bad_request(server: Server, truth: list[Answer], body: dict[str, Any], status: int) -> None:
    """VLLM's refusal reaches the client, and the next request is answered as ever."""
    reply = server.ask("/v1/completions", {"model": "demo", "max_tokens": 4} | body)
    assert reply.status == status, reply
    assert reply.body["error"]["message"]
    agree([ask(server, prompts()[2])], [truth[2]], SLACK)
