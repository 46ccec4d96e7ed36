# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused at start-up, with every reason, and not in the middle of a request."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from integration import offline
from integration.conftest import Checkpoint
from integration.environment import device
from integration.models import MODELS
from integration.offline import Job, Outcome
from integration.server import ServerError, serve

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A configuration and what the log must say about it."""

    id: str
    dtype: str = "bfloat16"
    engine: dict[str, Any] = field(default_factory=dict)
    says: tuple[str, ...]


REFUSALS = (
    Refusal(id="fp8_e5m2 cache", engine={"kv_cache_dtype": "fp8_e5m2"}, says=("fp8_e5m2",)),
    Refusal(
        id="unknown option",
        engine={"additional_config": {"dsl": {"atention_kernel": "triton"}}},
        says=("atention_kernel", "unknown key", "attention_kernel"),
    ),
    Refusal(
        id="unknown kernel",
        engine={"additional_config": {"dsl": {"attention_kernel": "fastest"}}},
        says=("'fastest'", "triton", "reference"),
    ),
    Refusal(
        id="a kernel asked for by name",
        dtype="float32",
        engine={"additional_config": {"dsl": {"attention_kernel": "triton"}}},
        says=("float32", "float16", "bfloat16") + (() if device().cuda else ("this is a CPU",)),
    ),
)


@pytest.fixture(scope="module")
def outcomes(checkpoint: Checkpoint) -> dict[str, Outcome]:
    folder = str(checkpoint("llama", MODELS["llama"]))
    jobs = [
        Job(model=folder, backend="dsl", dtype=refusal.dtype, prompts=((7, 8),), engine=refusal.engine)
        for refusal in REFUSALS
    ]
    return dict(zip((refusal.id for refusal in REFUSALS), offline.run(jobs), strict=True))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused(outcomes: dict[str, Outcome], refusal: Refusal) -> None:
    outcome = outcomes[refusal.id]
    assert outcome.given is None, "it was served"
    error = outcome.log[outcome.log.rindex("Traceback") :]
    assert "ValueError" in error or "ValidationError" in error, error
    for words in refusal.says:
        assert words in error


def test_server_does_not_start(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The command ends with an error that names the reason."""
    model = checkpoint("llama", MODELS["llama"])
    flags = ("--attention-backend", "dsl", "--kv-cache-dtype", "fp8_e5m2", "--enforce-eager", "--max-model-len", "512")
    with pytest.raises(ServerError, match="ended with status 1"), serve(model, tmp_path / "log", *flags):
        pass
    log = (tmp_path / "log").read_text()
    assert "fp8_e5m2 is not served: use one of" in log
