# SPDX-License-Identifier: Apache-2.0
"""Compares models of which `dsl` serves all that it can with the same models with vLLM's own layers.

Other files have one kind of layers at a time: here projections, norms, rotary embeddings with cache writes, gated
linear layers and routed experts are dsl's together. Errors are measured from a float32 run of vLLM's own backend, and
may be at most twice those of vLLM's own layers beside dsl's attention.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest

from integration import offline
from integration.compare import generated_errors, prompt_errors, prompts, rms
from integration.conftest import Checkpoint, parameters
from integration.environment import device
from integration.models import MODELS
from integration.offline import Job, Outcome

pytestmark = pytest.mark.e2e

KINDS = ("projections", "norms", "rope", "experts")
BY_DSL: dict[str, Any] = {"additional_config": {"dsl": dict.fromkeys(KINDS, "dsl")}}
BY_VLLM: dict[str, Any] = {"additional_config": {"dsl": dict.fromkeys(KINDS, "vllm")}}
OFF = {"DSL_BACKEND_LINEAR": "0"}
# Kind of layers -> how the log names it, behind their number.
NAMES = {
    "gated": r"gated linear layers",
    "qkv": r"projections \((?:QKVParallelLinear|DeepSeekV2FusedQkvAProjLinear)\)",
    "rows": r"projections \(RowParallelLinear\)",
    "norms": r"norms",
    "rope": r"(?:norms, )?rotary embeddings and cache writes",
    "experts": r"layers of routed experts",
}


@dataclass(frozen=True)
class Served:
    """How many layers of a kind dsl serves in a model of 3 layers.

    Attributes:
        rows: projections of attention's and of the MLP's results.
        norms: of hidden states.
    """

    gated: int = 3
    qkv: int = 3
    rows: int = 6
    norms: int = 7
    rope: int = 3
    experts: int = 0


SERVED = {
    "llama": Served(),
    # Four norms in each layer, and the last one.
    "gemma2": Served(norms=13),
    "qwen3_moe": Served(gated=0, rows=3, experts=3),
    # The latent queries have a norm too; that of the latent keys is part of `rope`.
    "deepseek_v2_queries": Served(norms=10),
}
Outcomes = dict[str, Outcome]


@pytest.fixture(scope="module")
def outcomes(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Outcomes:
    """By name; of a model in float32 as "MODEL, exact", with vLLM's own layers as "MODEL, theirs"."""
    here, jobs = device(), {}
    for model in sorted({one["model"] for one in parameters(request)}):
        folder = str(checkpoint(model, MODELS[model]))
        backend, dtype = here.mla_truth if model.startswith("deepseek") else here.dense_truth
        jobs[f"{model}, exact"] = Job(model=folder, backend=backend, dtype=dtype, prompts=prompts())
        ours = Job(model=folder, backend="dsl", dtype="bfloat16", prompts=prompts(), engine=BY_DSL)
        jobs |= {model: ours, f"{model}, theirs": replace(ours, engine=BY_VLLM, environment=OFF)}
    return dict(zip(jobs, offline.run(list(jobs.values())), strict=True))


@pytest.mark.parametrize("model", SERVED)
def test_matches(outcomes: Outcomes, model: str) -> None:
    exact = outcomes[f"{model}, exact"].answers
    errors = prompt_errors(outcomes[model].answers, exact)
    theirs = prompt_errors(outcomes[f"{model}, theirs"].answers, exact)
    assert rms(errors) <= 2 * rms(theirs)
    assert max(errors) <= 2 * max(theirs)
    tolerance = 2 * max(theirs)
    assert max(generated_errors(outcomes[model].answers, exact, tolerance)) <= tolerance


@pytest.mark.parametrize("model", SERVED)
def test_log_says_that_all_are_served(outcomes: Outcomes, model: str) -> None:
    log = outcomes[model].log
    found = {kind: sum(map(int, re.findall(rf"dsl serves (\d+) {name}", log))) for kind, name in NAMES.items()}
    assert found == vars(SERVED[model]), log[-4000:]
    assert not re.search(r"vLLM serves \d+ ", log)


@pytest.mark.parametrize("model", SERVED)
def test_log_says_that_none_is(outcomes: Outcomes, model: str) -> None:
    """The others are compared with vLLM's layers indeed."""
    log = outcomes[f"{model}, theirs"].log
    assert not re.search(rf"dsl serves \d+ ({'|'.join(NAMES.values())})", log), log[-4000:]
