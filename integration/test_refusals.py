# SPDX-License-Identifier: Apache-2.0
"""Configurations that cannot be served are refused at startup with all reasons, and not during a request."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dsl_backend.vllm_plugin.options import Options
from integration import offline
from integration.conftest import Checkpoint
from integration.environment import device
from integration.models import MODELS
from integration.offline import Job, Outcome
from integration.server import ServerError, serve

pytestmark = pytest.mark.e2e


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A configuration and the texts that the log must contain."""

    id: str
    dtype: str = "bfloat16"
    engine: dict[str, Any] = field(default_factory=dict)
    says: tuple[str, ...]


REFUSALS = (
    Refusal(id="cache dtype", engine={"kv_cache_dtype": "int8_per_token_head"}, says=("int8_per_token_head",)),
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


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command with invalid options, and the end of its output.

    Attributes:
        last: the last lines of the output, starting with this package's first one.
    """

    id: str
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    last: tuple[str, ...]


def options(**dsl: object) -> tuple[str, str]:
    return "--additional-config", json.dumps({"dsl": dsl})


REFUSED = "ValueError: attention backend dsl does not serve"
KEYS = f"(accepted keys: {', '.join(Options.model_fields)})"
COMMANDS = (
    Command(
        id="variables",
        environment={
            "DSL_BACKEND_SAMPLER": "2",
            "DSL_BACKEND_LINEAR": "2",
            "DSL_BACKEND_ARCH": "foo",
            "DSL_BACKEND_CACHE": "7",
            "DSL_BACKEND_CACHE_DIR": "cache",
            "DSL_BACKEND_TUNED_CONFIGS": "tuned.json",
            "DSL_BACKEND_SAMLPER": "1",
        },
        last=(
            f"{REFUSED} these options:",
            "  - DSL_BACKEND_SAMLPER is not a variable of dsl-backend: do you mean DSL_BACKEND_SAMPLER?",
            "  - DSL_BACKEND_CACHE='7' is not accepted: use 0 or 1",
            "  - DSL_BACKEND_CACHE_DIR='cache' is not accepted: use an absolute path",
            "  - DSL_BACKEND_ARCH='foo' is not accepted: use the GPU's own architecture or one below sm_90, such as "
            "sm_80",
            "  - DSL_BACKEND_TUNED_CONFIGS='tuned.json' is not accepted: use an absolute path",
            "  - DSL_BACKEND_SAMPLER='2' is not accepted: use 0 or 1",
            "  - DSL_BACKEND_LINEAR='2' is not accepted: use 0 or 1",
        ),
    ),
    Command(
        id="options",
        flags=options(attention_kernel="fastest", mla_latent_queries=0, kernel="triton"),
        last=(
            f"{REFUSED} these options:",
            "  - additional_config['dsl'] is not valid: attention_kernel: 'fastest' is not one of cute, cute-fp8, "
            "triton, reference; mla_latent_queries: Input should be greater than 0, not 0; kernel: unknown key " + KEYS,
        ),
    ),
    Command(
        id="cache dtype",
        flags=("--kv-cache-dtype", "int8_per_token_head"),
        last=(
            f"{REFUSED} this configuration:",
            "  - --kv-cache-dtype int8_per_token_head is not served: use one of auto, float16",
        ),
    ),
    Command(
        id="kernel by name",
        flags=(*options(attention_kernel="triton"), "--dtype", "float32"),
        last=(f"{REFUSED} this configuration:", "float32 is not one of float16, bfloat16"),
    ),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.id)
def test_server_does_not_start(checkpoint: Checkpoint, tmp_path: Path, command: Command) -> None:
    """The command fails before it starts a worker: one message at the end of the output, and exit status 1."""
    flags = ("--attention-backend", "dsl", "--enforce-eager", "--max-model-len", "512", *command.flags)
    model = checkpoint("llama", MODELS["llama"])
    with (
        pytest.raises(ServerError, match="ended with status 1"),
        serve(model, tmp_path / "log", *flags, **command.environment),
    ):
        pass
    log = (tmp_path / "log").read_text()
    assert "EngineCore" not in log, "an engine was started"
    assert log.count("Traceback") == 1
    lines = log[log.rindex(command.last[0]) :].splitlines()
    assert len(lines) == len(command.last) or command.id == "kernel by name"
    for said in command.last:
        assert [line for line in lines if said in line], (said, lines)


def test_another_backend_starts_all_the_same(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A problem with this package's variables is one line in the log."""
    # Not bfloat16, in which vLLM's own kernels for CPUs crash on some processors with AMX.
    dtype = device().dense_truth[1]
    flags = ("--dtype", dtype, "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "2")
    model, log = checkpoint("llama", MODELS["llama"]), tmp_path / "log"
    with serve(model, log, *flags, **device().environment, DSL_BACKEND_SAMPLER="2") as server:
        assert server.complete([7, 8])
    lines = [line for line in log.read_text().splitlines() if "DSL_BACKEND" in line]
    assert len(lines) == 1, lines
    assert "WARNING" in lines[0]
