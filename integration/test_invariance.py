# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant mode as it is served: the same bits in every situation, and mistakes that must be seen."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from integration import invariance
from integration.conftest import Checkpoint, parameters
from integration.environment import device
from integration.invariance import Situation, difference, situations
from integration.offline import Outcome

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
Key = tuple[str, str, str]


def kinds() -> list[tuple[str, Setting]]:
    return [
        (name, setting) for setting in SETTINGS for name in invariance.CHECKED if device().cuda or not setting.cuda_only
    ]


@pytest.fixture(scope="module")
def results(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> dict[Key, Outcome]:
    """The outcomes that the selected tests need, by model, setting or "mistake", and situation."""
    jobs = {}
    for chosen in parameters(request):
        name = chosen.get("name", "llama")
        folder = checkpoint(f"{name}-invariance", invariance.model(name))
        if "setting" not in chosen:
            for situation in situations()[:2]:
                jobs[name, "mistake", situation.id] = invariance.job(folder, situation, [MISTAKE])
            continue
        setting = chosen["setting"]
        for situation in (ALONE, chosen["situation"]):
            jobs[name, setting.id, situation.id] = invariance.job(folder, situation, engine=setting.engine)
    return dict(zip(jobs, invariance.run(list(jobs.values())), strict=True))


@pytest.mark.parametrize("situation", OTHERS, ids=lambda situation: situation.id)
@pytest.mark.parametrize(
    ("name", "setting"), [pytest.param(name, setting, id=f"{name}-{setting.id}") for name, setting in kinds()]
)
def test_same_bits(results: dict[Key, Outcome], name: str, setting: Setting, situation: Situation) -> None:
    alone = results[name, setting.id, ALONE.id].answers[0]
    outcome = results[name, setting.id, situation.id]
    if (situation.cached or situation.chunk != ALONE.chunk) and WHOLE_PROMPTS in outcome.log:
        pytest.skip("vLLM neither caches nor chunks the prompts of MLA on a CPU without AMX")
    answer = outcome.answers[0]
    given = invariance.sizes()
    assert (len(alone.prompt_logprobs), len(alone.tokens)) == (given.prompt - 1, given.answer)
    assert len(answer.prompt_logprobs) == (0 if situation.cached else given.prompt - 1)
    assert situation.cached - 128 < answer.cached_tokens <= situation.cached
    assert difference(answer, alone) is None


def test_splits_that_follow_the_batch_are_seen(results: dict[Key, Outcome]) -> None:
    alone, batched = (results["llama", "mistake", situation.id].answers[0] for situation in situations()[:2])
    assert difference(batched, alone) is not None
