# SPDX-License-Identifier: Apache-2.0
"""Requests with drafts of all kinds: the tokens are those of an engine without drafts, with both model runners.

The V2 model runner is all Triton. On a CPU Triton's interpreter runs it.
"""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from integration import offline
from integration.compare import prompts
from integration.conftest import Checkpoint
from integration.environment import device
from integration.models import MODELS, make_tokenizer
from integration.offline import Job, Outcome

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(device().cuda, reason="in bfloat16 another batch may be another token"),
]

# Few tokens are allowed or grammatical, so that n-grams come again.
FEW = list(range(20, 28))
WORDS = r"((yes|no|maybe)[,.]){4,8}"
CHOICES = ["nor nor nor nor nor nor", "any any any any any any"]
GRAMMAR = {"temperature": 0.8, "ignore_eos": False}
# The first is greedy, all others have a seed. The last ones have grammars.
REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.3, "seed": 1},
    {"temperature": 0.4, "top_k": 20, "top_p": 0.9, "seed": 2},
    {"temperature": 0.6, "seed": 3, "allowed_token_ids": FEW, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0.6, "seed": 4, "allowed_token_ids": FEW, "bad_words": ["7", "85"]},
    GRAMMAR | {"seed": 5, "structured_outputs": {"regex": WORDS}},
    GRAMMAR | {"seed": 6, "structured_outputs": {"choice": CHOICES}},
)
WITH_GRAMMAR = (5, 6)
STEPS = 24
# The interpreter takes a second for each step: some requests and few steps.
SECOND, SECOND_STEPS = (0, 1, 2, 6), 10
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MTP = {"method": "mtp", "num_speculative_tokens": 2, "attention_backend": "dsl"}
EQUAL = "dsl verifies drafts, a draft is accepted if it is the token drawn at its position"
RATIO = "dsl verifies drafts, by the ratio of probabilities"


def job(
    model: str,
    drafts: dict[str, Any] | None = None,
    requests: Sequence[int] = range(len(REQUESTS)),
    max_tokens: int = STEPS,
) -> Job:
    without = {"logprobs": None, "prompt_logprobs": None}
    return Job(
        model=model,
        backend="dsl",
        dtype="float32",
        prompts=tuple(prompts()[index % len(prompts())] for index in requests),
        sampling=tuple(without | REQUESTS[index] for index in requests),
        max_tokens=max_tokens,
        engine={"speculative_config": drafts, "disable_log_stats": False},
        environment={"VLLM_LOG_STATS_INTERVAL": "0.2"},
    )


@pytest.fixture(scope="module")
def models(checkpoint: Checkpoint) -> dict[str, str]:
    names = ("quiet_llama", "eagle_llama", "draft_llama", "deepseek_v3")
    return {name: str(checkpoint(name, MODELS[name])) for name in names}


def eagle(models: dict[str, str], **changes: Any) -> dict[str, Any]:
    usual = {"method": "eagle", "model": models["eagle_llama"], "num_speculative_tokens": 3, "attention_backend": "dsl"}
    return usual | changes


def draft_model(models: dict[str, str]) -> dict[str, Any]:
    return eagle(models, method="draft_model", model=models["draft_llama"])


@pytest.fixture(scope="module")
def outcomes(models: dict[str, str]) -> dict[str, Outcome]:
    llama, deepseek = models["quiet_llama"], models["deepseek_v3"]
    jobs = {
        "none": job(llama),
        "n-grams": job(llama, NGRAM),
        "EAGLE": job(llama, eagle(models)),
        "EAGLE, drawn": job(llama, eagle(models, draft_sample_method="probabilistic")),
        "draft model": job(llama, draft_model(models)),
        "MLA, none": job(deepseek),
        "MLA, MTP": job(deepseek, MTP),
    }
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


@pytest.fixture(scope="module")
def second_runner(models: dict[str, str]) -> dict[str, Outcome]:
    drafts = {
        "n-grams": NGRAM,
        "EAGLE": eagle(models),
        "EAGLE, drawn": eagle(models, draft_sample_method="probabilistic"),
        "draft model": draft_model(models),
    }
    jobs = {
        name: job(models["quiet_llama"], given | {"num_speculative_tokens": 2}, SECOND, SECOND_STEPS)
        for name, given in drafts.items()
    }
    done = offline.run(list(jobs.values()), TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    return dict(zip(jobs, done, strict=True))


def tokens(outcome: Outcome) -> list[list[int]]:
    return [answer.tokens for answer in outcome.answers]


def accepted(outcome: Outcome) -> int:
    return sum(map(int, re.findall(r"Accepted: (\d+) tokens", outcome.log)))


def assert_grammatical(outcome: Outcome) -> None:
    """The texts follow their grammars, as far as they go."""
    words, choice = (make_tokenizer().decode(outcome.answers[index].tokens) for index in WITH_GRAMMAR)
    assert re.fullmatch(r"((yes|no|maybe)[,.])+(y|yes?|no?|m|may?|maybe?)?", words), words
    assert len(choice) > 4
    assert any(one.startswith(choice) for one in CHOICES), choice


@pytest.mark.parametrize("name", ["n-grams", "EAGLE", "draft model"])
def test_tokens_are_those_without_drafts(outcomes: dict[str, Outcome], name: str) -> None:
    """Greedy or with a seed, with filters, penalties, bad words and grammars; and some drafts are accepted."""
    assert tokens(outcomes[name]) == tokens(outcomes["none"])
    assert EQUAL in outcomes[name].log
    assert accepted(outcomes[name]) > 10


def test_multi_token_prediction(outcomes: dict[str, Outcome]) -> None:
    assert tokens(outcomes["MLA, MTP"]) == tokens(outcomes["MLA, none"])
    assert EQUAL in outcomes["MLA, MTP"].log
    assert accepted(outcomes["MLA, MTP"]) > 10


def test_grammars(outcomes: dict[str, Outcome]) -> None:
    for name in outcomes:
        assert_grammatical(outcomes[name])


def test_drawn_drafts(outcomes: dict[str, Outcome]) -> None:
    """By the ratio of probabilities a greedy request's tokens stay; those of others depend on what was drawn."""
    assert tokens(outcomes["EAGLE, drawn"])[0] == tokens(outcomes["none"])[0]
    assert RATIO in outcomes["EAGLE, drawn"].log
    assert accepted(outcomes["EAGLE, drawn"]) > 10


def shortened(outcome: Outcome) -> list[list[int]]:
    """The tokens of the requests that the second runner gets."""
    return [tokens(outcome)[index][:SECOND_STEPS] for index in SECOND]


@pytest.mark.parametrize("name", ["n-grams", "EAGLE", "draft model"])
def test_second_runner(outcomes: dict[str, Outcome], second_runner: dict[str, Outcome], name: str) -> None:
    """The V2 runner's tokens with drafts are the V1 runner's without."""
    assert "Using V2 Model Runner" in second_runner[name].log
    assert tokens(second_runner[name]) == shortened(outcomes["none"])
    assert EQUAL in second_runner[name].log
    assert accepted(second_runner[name]) > 0


def test_second_runner_drawn_drafts(outcomes: dict[str, Outcome], second_runner: dict[str, Outcome]) -> None:
    drawn = second_runner["EAGLE, drawn"]
    assert "Using V2 Model Runner" in drawn.log
    assert tokens(drawn)[0] == shortened(outcomes["none"])[0]
    assert RATIO in drawn.log
    assert accepted(drawn) > 0
    choice = make_tokenizer().decode(tokens(drawn)[3])
    assert any(one.startswith(choice) for one in CHOICES), choice
