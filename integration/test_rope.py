# SPDX-License-Identifier: Apache-2.0
"""Compares models whose norms of heads, rotation and cache write are one launch of `dsl` with vLLM's own modules.

Errors are measured from a float32 run of vLLM's own backend, and may be at most twice those of the same model and
backend without the launch.
"""

import re
from typing import Any

import pytest

from integration import offline
from integration.compare import generated_errors, prompt_errors, prompts, rms
from integration.conftest import Checkpoint
from integration.environment import device
from integration.models import MODELS
from integration.offline import Job, Outcome

pytestmark = pytest.mark.e2e

BY_VLLM: dict[str, Any] = {"additional_config": {"dsl": {"rope": "vllm"}}}
BY_DSL: dict[str, Any] = {"additional_config": {"dsl": {"rope": "dsl"}}}
SERVES = re.compile(r"dsl serves (\d+) rotary embeddings and cache writes, (.*?) heads of .*? on ")
# Model -> what the log says of its layers.
SERVED = {"llama": "neox's style, bfloat16 table, on", "qwen3_moe": "table, normalised by bfloat16 weights, on"}
RUNS = (*SERVED, "compiled", "chunked")
Outcomes = dict[str, Outcome]


@pytest.fixture(scope="module")
def outcomes(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """By name; of a model in float32 as "MODEL, exact", with vLLM's own modules as "MODEL, theirs"."""
    here, jobs = device(), {}

    def add(name: str, model: str, backend: str = "dsl", dtype: str = "bfloat16", **facts: Any) -> None:
        folder = str(checkpoint(model, MODELS[model]))
        jobs[name] = Job(model=folder, backend=backend, dtype=dtype, **{"prompts": prompts()} | facts)

    for model in SERVED:
        add(f"{model}, exact", model, *here.dense_truth)
        add(model, model, engine=BY_DSL)
        add(f"{model}, theirs", model, engine=BY_VLLM)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}
    add("compiled", "llama", engine=BY_DSL | {"enforce_eager": False}, environment=cache)
    add("chunked", "llama", engine=BY_DSL | {"enable_chunked_prefill": True, "max_num_batched_tokens": 48})
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_matches(outcomes: Outcomes, name: str) -> None:
    model = name if name in SERVED else "llama"
    exact = outcomes[f"{model}, exact"].answers
    errors = prompt_errors(outcomes[name].answers, exact)
    theirs = prompt_errors(outcomes[f"{model}, theirs"].answers, exact)
    assert rms(errors) <= 2 * rms(theirs)
    assert max(errors) <= 2 * max(theirs)
    tolerance = 2 * max(theirs)
    assert max(generated_errors(outcomes[name].answers, exact, tolerance)) <= tolerance


@pytest.mark.parametrize("name", RUNS)
def test_log_says_what_is_served(outcomes: Outcomes, name: str) -> None:
    log = outcomes[name].log
    assert [count for count, _ in SERVES.findall(log)] == ["3"], log[-4000:]
    assert SERVED.get(name, SERVED["llama"]) in log
    assert not re.search(r"vLLM serves \d+ rotary", log)


def test_log_says_why_not(outcomes: Outcomes) -> None:
    log = outcomes["llama, theirs"].log
    assert "vLLM serves 3 rotary embeddings and cache writes: additional_config['dsl']['rope'] is vllm" in log
    assert not SERVES.search(log)
