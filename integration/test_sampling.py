# SPDX-License-Identifier: Apache-2.0
"""Sampled requests with `dsl`: seeds, filters, log-probabilities, and what stays vLLM's own."""

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from integration import offline
from integration.compare import ROUNDING, TOLERANCE, prompts
from integration.conftest import Checkpoint
from integration.environment import device
from integration.misuse import BAD, CONTEXT, Bad, refused
from integration.models import MODELS, VOCABULARY
from integration.offline import Job, Outcome
from integration.server import Server, serve
from integration.streams import at_once, steps_of

pytestmark = pytest.mark.e2e

DTYPE = device().dtypes[0]
# Of each prompt; the first is greedy. All have a seed but the last.
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "top_k": 20, "seed": 2},
    {"temperature": 1.2, "top_p": 0.9, "seed": -3},
    {"temperature": 0.9, "min_p": 0.02, "top_k": 50, "top_p": 0.95, "seed": 2**62},
    {"temperature": 1.0},
)
SEEDED = range(1, 5)
OFF = {"DSL_BACKEND_SAMPLER": "0"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# With drafts vLLM refuses min-p and logit bias. Few tokens are allowed, so that n-grams come again; the seed makes a
# request with a minimum length reach it. The first request is greedy.
FEW = list(range(20, 28))
DRAFTED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.6, "seed": 2, "allowed_token_ids": FEW},
    {"temperature": 0.6, "top_k": 4, "top_p": 0.9, "seed": 3, "allowed_token_ids": FEW},
    {"temperature": 0.6, "seed": 4, "allowed_token_ids": FEW, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0.6, "seed": 5, "allowed_token_ids": FEW, "min_tokens": 30, "stop_token_ids": [21]},
)
OURS, THEIRS = "dsl samples from", "vLLM's own sampler draws the tokens"


@pytest.fixture(scope="module")
def outcomes(checkpoint: Checkpoint) -> dict[str, Outcome]:
    model = str(checkpoint("llama", MODELS["llama"]))
    asked = tuple(prompts())

    def job(backend: str, **facts: Any) -> Job:
        usual: dict[str, Any] = {"prompts": asked, "sampling": SAMPLING, "max_tokens": 8}
        return Job(model=model, backend=backend, dtype=DTYPE, **usual | facts)

    jobs = {
        "ours": job("dsl"),
        "one at a time": job("dsl", engine={"max_num_seqs": 1}),
        "in pieces": job("dsl", engine={"max_num_batched_tokens": 48, "enable_chunked_prefill": True}),
        "theirs": job(device().dense),
        "off": job("dsl", environment=OFF),
        "ours, processed": job("dsl", engine={"logprobs_mode": "processed_logprobs"}),
        "theirs, processed": job("dsl", engine={"logprobs_mode": "processed_logprobs"}, environment=OFF),
        "masked logits": job("dsl", engine={"logprobs_mode": "processed_logits"}),
        "without drafts": job("dsl", sampling=DRAFTED, max_tokens=40),
        "drafts": job(
            "dsl",
            sampling=DRAFTED,
            max_tokens=40,
            engine={"speculative_config": NGRAM, "disable_log_stats": False},
            environment={"VLLM_LOG_STATS_INTERVAL": "1"},
        ),
        "drafts by another rule": job(
            "dsl",
            prompts=asked[:2],
            sampling=(),
            engine={
                "speculative_config": NGRAM
                | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
            },
        ),
    }
    done = dict(zip(jobs, offline.run(list(jobs.values())), strict=True))
    backend, dtype = device().dense_truth
    answers = done["ours"].answers
    scored = job(
        backend,
        prompts=tuple((*prompt, *answer.tokens) for prompt, answer in zip(asked, answers, strict=True)),
        sampling=(),
        max_tokens=1,
    )
    return done | {"exact": offline.run([Job(**{**vars(scored), "dtype": dtype})])[0]}


def tokens(outcome: Outcome) -> list[list[int]]:
    return [answer.tokens for answer in outcome.answers]


def test_log_says_who_samples(outcomes: dict[str, Outcome]) -> None:
    """The log has a line for each kind of logits and each kernel, or one with the reason why vLLM's sampler is used."""
    reasons = {
        "off": "DSL_BACKEND_SAMPLER is off",
        "theirs, processed": "DSL_BACKEND_SAMPLER is off",
        "masked logits": "logprobs_mode processed_logits",
        "drafts by another rule": "drafts are verified by another rule (rejection_sample_method synthetic)",
    }
    for name in ("ours", "one at a time", "in pieces", "ours, processed", "drafts", *reasons):
        log = outcomes[name].log
        assert log.count(THEIRS) == (name in reasons), name
        lines = re.findall(rf"{OURS} \d+ logits, \w+: by .*", log)
        assert bool(lines) == (name not in reasons), name
        assert len(lines) == len(set(lines)), lines
        assert f"{THEIRS}: {reasons[name]}" in log if name in reasons else f"{OURS} {VOCABULARY} logits" in log
    assert OURS not in outcomes["theirs"].log
    assert THEIRS not in outcomes["theirs"].log


def test_a_seed_decides(outcomes: dict[str, Outcome]) -> None:
    """Alone, side by side, with its prompt whole or in pieces: the same tokens."""
    if not device().cuda:  # in bfloat16 another batch may be another token
        for name in ("one at a time", "in pieces"):
            for index in SEEDED:
                assert tokens(outcomes[name])[index] == tokens(outcomes["ours"])[index], (name, index)


@pytest.mark.skipif(device().cuda, reason="tokens of two backends in bfloat16 part for other reasons")
def test_greedy_requests_beside_others(outcomes: dict[str, Outcome]) -> None:
    assert tokens(outcomes["ours"])[0] == tokens(outcomes["theirs"])[0]


@pytest.mark.skipif(device().cuda, reason="in bfloat16 another batch may be another token")
def test_drafts_change_no_token(outcomes: dict[str, Outcome]) -> None:
    """Requests with a seed get the same tokens with drafts and without, and some drafts are accepted."""
    assert tokens(outcomes["drafts"]) == tokens(outcomes["without drafts"])
    log = outcomes["drafts"].log
    assert log.count("dsl verifies drafts, a draft is accepted if it is the token drawn at its position") == 1
    assert sum(map(int, re.findall(r"Accepted: (\d+) tokens", log))) > 10


def test_sampled_requests_are_not_greedy(outcomes: dict[str, Outcome]) -> None:
    """The compared tokens are really sampled: most answers have a token that is not the likeliest."""
    answers = outcomes["ours"].answers
    drawn = [
        any(token != max(step, key=step.__getitem__) for token, step in zip(one.tokens, one.logprobs, strict=True))
        for one in answers
    ]
    assert not drawn[0]
    assert sum(drawn[1:]) >= 4


@pytest.mark.skipif(device().cuda, reason="tokens of two backends in bfloat16 part for other reasons")
@pytest.mark.parametrize("name", ["off", "masked logits"])
def test_vllms_own_sampler_stays(outcomes: dict[str, Outcome], name: str) -> None:
    """The same seeds give the same tokens as without this package."""
    for index in range(5):
        assert tokens(outcomes[name])[index] == tokens(outcomes["theirs"])[index]


def test_raw_logprobs(outcomes: dict[str, Outcome]) -> None:
    """The log-probability of every sampled token, before temperature and filters, equals an exact engine's."""
    for answer, exact in zip(outcomes["ours"].answers, outcomes["exact"].answers, strict=True):
        expected = exact.prompt_logprobs[-len(answer.tokens) :]
        for token, step, logprob in zip(answer.tokens, answer.logprobs, expected, strict=True):
            assert abs(step[token] - logprob) <= TOLERANCE


def test_processed_logprobs(outcomes: dict[str, Outcome]) -> None:
    """After temperature and filters, as vLLM computes them: of the first step, whose context is the same."""
    both = (outcomes["ours, processed"].answers, outcomes["theirs, processed"].answers)
    for index, (ours, theirs) in enumerate(zip(*both, strict=True)):
        ranked = [
            sorted((value for value in one.logprobs[0].values()), reverse=True)[: offline.TOP] for one in (ours, theirs)
        ]
        for mine, own in zip(*ranked, strict=True):
            assert mine == own or abs(mine - own) <= (ROUNDING if not device().cuda else TOLERANCE), index
        assert math.isfinite(ours.logprobs[0][ours.tokens[0]])
    assert tokens(outcomes["ours, processed"])[1] == tokens(outcomes["ours"])[1] or device().cuda


# Over HTTP.


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--attention-backend", "dsl", "--dtype", DTYPE, "--max-model-len", str(CONTEXT), "--max-num-seqs", "8")
    pieces = ("--max-num-batched-tokens", "48", "--enable-chunked-prefill", "--enforce-eager")
    log = tmp_path_factory.mktemp("sampling") / "log"
    with serve(checkpoint("llama", MODELS["llama"]), log, *flags, *pieces, **device().environment) as running:
        yield running


def sampled(server: Server, prompt: object, **options: Any) -> list[int]:
    given: list[int] = server.complete(prompt, logprobs=None, **{"temperature": 0.9, **options})["token_ids"]
    return given


@pytest.mark.skipif(device().cuda, reason="in bfloat16 another batch may be another token")
def test_side_by_side(server: Server) -> None:
    """Requests with a seed in a batch with others get the same tokens as alone, even if prefilled in chunks."""
    asked = [(list(prompts()[index % 6]), SAMPLING[1 + index % 4] | {"seed": index}) for index in range(12)]
    alone = [sampled(server, prompt, **options) for prompt, options in asked]
    others = [(list(prompts()[index % 6]), {"temperature": index % 3 / 2}) for index in range(12)]
    calls = [
        functools.partial(sampled, server, prompt, **options)
        for prompt, options in itertools.chain(*zip(asked, others, strict=True))
    ]
    assert at_once(calls)[::2] == alone


def test_without_a_seed(server: Server) -> None:
    answers = [tuple(sampled(server, [7, 8, 9], temperature=1.5)) for _ in range(4)]
    assert len(set(answers)) == 4


def test_choices_of_one_request_differ(server: Server) -> None:
    body = {"model": "demo", "prompt": [7, 8, 9], "max_tokens": 12, "temperature": 1.5, "n": 4, "seed": 3}
    replies = [server.ask("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True}) for _ in range(2)]
    first, second = ([choice["token_ids"] for choice in reply.body["choices"]] for reply in replies)
    assert len({tuple(choice) for choice in first}) == 4
    assert first == second or device().cuda


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.4}, {"min_p": 0.2}, {"top_k": 10, "top_p": 0.6}])
def test_filters(server: Server, filters: dict[str, float]) -> None:
    """The filters keep every sampled token, according to the log-probabilities in the reply."""
    for seed in range(4):
        options = {"temperature": 1.0, "seed": seed, "logprobs": 20, "return_tokens_as_token_ids": True, **filters}
        choice = server.complete([7, 8, 9], **options)
        drawn = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        for token, step in zip(drawn, steps_of(choice["logprobs"]), strict=True):
            likelier = [value for value in step.values() if value > step[token]]
            assert len(likelier) < filters.get("top_k", VOCABULARY)
            # In units of what top-k has left.
            left = sum(map(math.exp, sorted(step.values())[-int(filters["top_k"]) :])) if "top_k" in filters else 1
            assert sum(map(math.exp, likelier)) / left < filters.get("top_p", 1.0) + TOLERANCE
            assert step[token] >= max(step.values()) + math.log(filters.get("min_p", 1e-9)) - TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"top_k": 1},
        {"top_p": 1e-30},
        {"min_p": 1},
        {"temperature": 1e-9},
        {"temperature": 2},
        {"temperature": 2, "logit_bias": {str(token): 100 for token in range(6, 40)}},
        {"logit_bias": {"7": math.nan}},
        {"allowed_token_ids": [VOCABULARY - 1]},
        {"repetition_penalty": 1e-30},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
    ],
    ids=str,
)
def test_values_at_the_edge(server: Server, options: dict[str, Any]) -> None:
    """What vLLM does not refuse (integration.misuse has what it does) is answered with ids of the vocabulary."""
    body = {"model": "demo", "prompt": [7, 8, 9], "max_tokens": 6, "temperature": 1.0, "seed": 4}
    reply = server.ask("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True} | options)
    assert reply.status == 200, reply
    given = reply.body["choices"][0]["token_ids"]
    assert len(given) == 6
    assert all(0 <= token < VOCABULARY for token in given)
    if "allowed_token_ids" in options:
        assert given == [VOCABULARY - 1] * 6


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_bad_request(server: Server, bad: Bad) -> None:
    """The client receives vLLM's refusal, and the next request is answered as usual."""
    assert refused(server, bad) is None
    assert len(sampled(server, [7, 8, 9], seed=4)) == 12


def test_log_of_the_server(server: Server) -> None:
    assert server.log.count(OURS) in ((1, 2) if device().cuda else (1,))
    assert THEIRS not in server.log
