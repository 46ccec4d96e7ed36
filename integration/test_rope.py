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
from integration.conftest import Checkpoint, parameters
from integration.environment import device
from integration.models import MODELS
from integration.offline import Job, Outcome

pytestmark = pytest.mark.e2e

BY_VLLM: dict[str, Any] = {"additional_config": {"dsl": {"rope": "vllm"}}}
BY_DSL: dict[str, Any] = {"additional_config": {"dsl": {"rope": "dsl"}}}
SERVES = re.compile(
    r"dsl serves (\d+) (?:norms, )?rotary embeddings and cache writes(?: of MLA)?, (.*?) heads of .*? on "
)
# Model -> what the log says of its layers. gemma2's are of two kinds, with a window and without. On a GPU without
# torch.compile, vLLM keeps DeepSeek's table in float32.
SERVED = {
    "llama": "neox's style, bfloat16 table, on",
    "gemma2": "neox's style, bfloat16 table, on",
    "qwen3_moe": "table, normalised by bfloat16 weights, on",
    "deepseek_v2": r"gptj's style, (bfloat16|float32) table, 512 normalised by bfloat16 weights, on",
}
# Run -> its model, where that is not its name.
OTHERS = {"compiled": "llama", "chunked": "llama", "compiled MLA": "deepseek_v2"}
RUNS = (*SERVED, *OTHERS)
Outcomes = dict[str, Outcome]


@pytest.fixture(scope="module")
def outcomes(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Outcomes:
    """By name; of a model in float32 as "MODEL, exact", with vLLM's own modules as "MODEL, theirs"."""
    here, jobs = device(), {}
    names = {one.get("name", "llama") for one in parameters(request)}

    def add(name: str, model: str, backend: str = "dsl", dtype: str = "bfloat16", **facts: Any) -> None:
        folder = str(checkpoint(model, MODELS[model]))
        jobs[name] = Job(model=folder, backend=backend, dtype=dtype, **{"prompts": prompts()} | facts)

    for model in {OTHERS.get(name, name) for name in names}:
        add(f"{model}, exact", model, *(here.mla_truth if model == "deepseek_v2" else here.dense_truth))
        add(f"{model}, theirs", model, engine=BY_VLLM)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}
    compiled: dict[str, Any] = {"engine": BY_DSL | {"enforce_eager": False}, "environment": cache}
    facts: dict[str, dict[str, Any]] = {
        "compiled": compiled,
        "compiled MLA": compiled,
        "chunked": {"engine": BY_DSL | {"enable_chunked_prefill": True, "max_num_batched_tokens": 48}},
    }
    for name in names:
        add(name, OTHERS.get(name, name), **facts.get(name, {"engine": BY_DSL}))
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_matches(outcomes: Outcomes, name: str) -> None:
    model = OTHERS.get(name, name)
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
    kinds = 2 if name == "gemma2" else 1
    assert len(SERVES.findall(log)) == kinds, log[-4000:]
    assert sum(int(count) for count, _ in SERVES.findall(log)) == 3, log[-4000:]
    assert re.search(SERVED[OTHERS.get(name, name)], log), log[-4000:]
    assert not re.search(r"vLLM serves \d+ (norms, )?rotary", log)


def test_log_says_why_not(outcomes: Outcomes) -> None:
    log = outcomes["llama, theirs"].log
    assert "vLLM serves 3 rotary embeddings and cache writes: additional_config['dsl']['rope'] is vllm" in log
    assert not SERVES.search(log)
