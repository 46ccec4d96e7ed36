# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant mode as it is served: the same bits in every situation, and mistakes that must be seen."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from integration import invariance, module_bits
from integration.conftest import Checkpoint, parameters
from integration.environment import device
from integration.invariance import Situation, difference, situations
from integration.offline import Job, Outcome

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting in which a token's bits must not depend on what surrounds its request."""

    id: str
    engine: dict[str, Any] = field(default_factory=dict)
    cuda_only: bool = True


SETTINGS = (
    Setting(id="eager", cuda_only=False),
    Setting(id="graphs", engine={"enforce_eager": False}),
    Setting(id="triton", engine={"additional_config": {"dsl": {"attention_kernel": "triton"}}}),
)
ALONE, *OTHERS = situations()
MISTAKE = f"{invariance.THIS}:{invariance.splits_follow_the_batch.__name__}"
# What vLLM logs for MLA on a CPU without AMX: prompts are processed whole there.
WHOLE_PROMPTS = "forcing chunked prefill and prefix caching to be disabled"
RECORD = f"{module_bits.__name__}:{module_bits.record.__name__}"
Results = dict[tuple[str, str, str], tuple[Job, Outcome]]


def kinds() -> list[tuple[str, Setting]]:
    return [
        (name, setting) for setting in SETTINGS for name in invariance.CHECKED if device().cuda or not setting.cuda_only
    ]


@pytest.fixture(scope="module")
def results(
    checkpoint: Checkpoint, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """The jobs and outcomes that the selected tests need, by model, setting or "mistake", and situation."""
    jobs = {}
    for chosen in parameters(request):
        name = chosen.get("name", "llama")
        folder = checkpoint(f"{name}-invariance", invariance.model(name))
        if "setting" not in chosen:
            for situation in situations()[:2]:
                one = invariance.job(folder, situation, [MISTAKE, RECORD])
                file = tmp_path_factory.mktemp("modules") / "bits.pt"
                jobs[name, "mistake", situation.id] = module_bits.recorded(one, file)
            continue
        setting = chosen["setting"]
        for situation in (ALONE, chosen["situation"]):
            jobs[name, setting.id, situation.id] = invariance.job(folder, situation, engine=setting.engine)
    outcomes = invariance.run(list(jobs.values()))
    return {key: (one, outcome) for (key, one), outcome in zip(jobs.items(), outcomes, strict=True)}


@pytest.mark.parametrize("situation", OTHERS, ids=lambda situation: situation.id)
@pytest.mark.parametrize(
    ("name", "setting"), [pytest.param(name, setting, id=f"{name}-{setting.id}") for name, setting in kinds()]
)
def test_same_bits(results: Results, name: str, setting: Setting, situation: Situation) -> None:
    alone = results[name, setting.id, ALONE.id][1].answers[0]
    _, outcome = results[name, setting.id, situation.id]
    if (situation.cached or situation.chunk != ALONE.chunk) and WHOLE_PROMPTS in outcome.log:
        pytest.skip("vLLM neither caches nor chunks the prompts of MLA on a CPU without AMX")
    answer = outcome.answers[0]
    given = invariance.sizes()
    assert (len(alone.prompt_logprobs), len(alone.tokens)) == (given.prompt - 1, given.answer)
    assert len(answer.prompt_logprobs) == (0 if situation.cached else given.prompt - 1)
    assert situation.cached - 128 < answer.cached_tokens <= situation.cached
    assert difference(answer, alone) is None


def test_splits_that_follow_the_batch_are_seen(results: Results) -> None:
    (alone_job, alone), (batched_job, batched) = (results["llama", "mistake", one.id] for one in situations()[:2])
    assert difference(batched.answers[0], alone.answers[0]) is not None
    recorded = [module_bits.load(Path(job.environment[module_bits.FILE_VARIABLE])) for job in (batched_job, alone_job)]
    assert module_bits.first_difference(*recorded).startswith("model.layers.0.self_attn.attn: ")
    assert module_bits.first_difference(recorded[0], recorded[0]) == "no module: what differs comes behind them"


def test_other_tokens_are_not_compared() -> None:
    alone = {"embedding": {0: 1, 1: 1, 2: 1}, "norm": {0: 1, 1: 1, 2: 1}}
    others = {"embedding": {0: 1, 1: 9, 2: 9, 3: 9}, "norm": {0: 1, 1: 9, 2: 9, 3: 9}}
    until = "; other tokens from position 1 on"
    assert module_bits.first_difference(others, alone) == f"no module: what differs comes behind them{until}"
    others["norm"][0] = 8
    assert module_bits.first_difference(others, alone) == f"norm: 1 tokens, the first at position 0{until}"


def test_the_requests_rows_are_found_in_any_order() -> None:
    prompt = [5, 6, 7, 8]
    # Another request's prompt, one's answer, then a chunk of this one's from position 1 on.
    assert module_bits.rows_of([9, 6, 5, 6, 7], [0, 1, 40, 1, 2], prompt) == (3, [1, 2])
    assert module_bits.rows_of([5, 6, 7, 8, 1], [0, 1, 2, 3, 7], prompt) == (0, [0, 1, 2, 3])
    # Behind the prompt it can be told from others alone, or if they are not as far.
    assert module_bits.rows_of([1], [4], prompt) == (0, [4])
    assert module_bits.rows_of([1, 1], [4, 9], prompt) == (0, [])
    assert module_bits.rows_of([1, 1], [2, 9], prompt) == (1, [9])
    # One row of the prompt may be another request's.
    assert module_bits.rows_of([8, 1], [3, 1], prompt) == (0, [])
    # Rows of the next request that are adjacent by chance are not taken.
    assert module_bits.rows_of([5, 6, 9, 9], [0, 1, 2, 3], prompt) == (0, [0, 1])
    assert module_bits.rows_of([], [], prompt) == (0, [])


def test_hashes_see_bits() -> None:
    rows = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [1.0, 2.0, -0.0], [1.0, 2.0, 0.0]])
    first, swapped, negative_zero, same = module_bits.hashes(rows).tolist()
    assert first == same
    assert len({first, swapped, negative_zero}) == 3
