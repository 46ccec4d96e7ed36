# SPDX-License-Identifier: Apache-2.0
"""Runs the scenarios without HTTP: each level is a batch for the benchmark of whole engines."""

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import children
from benchmarks.engine.models import SHAPES, Shape
from benchmarks.engine.scenarios import Figure
from benchmarks.engine.scenarios import Scenario as Batch
from loadtests.scenario import Level, Sampling, Scenario, ScenarioError
from loadtests.servers import BackendError
from loadtests.subjects import Subject

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings(children.Settings):
    """The settings of an engine whose model already exists.

    Attributes:
        path: the model's folder, or its name on a hub.
    """

    path: str

    def write_model(self) -> Path:
        return Path(self.path)

    def arguments(self) -> dict[str, Any]:
        own = super().arguments() if self.model in SHAPES else {"enable_prefix_caching": False}
        return own | self.engine


def engine_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Converts flags of `vllm serve` to arguments of an engine.

    Raises:
        ScenarioError: a word does not belong to a flag.
    """
    arguments: dict[str, Any] = {}
    words = list(flags)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ScenarioError(f"{flag!r} is not a flag of vLLM: use --name value, --name=value or --name")
        if not equals and words and not words[0].startswith("--"):
            equals, value = "=", words.pop(0)
        name = flag.removeprefix("--").replace("-", "_")
        if not equals:
            arguments[name.removeprefix("no_")] = not name.startswith("no_")
            continue
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def batches(scenario: Scenario) -> dict[str, tuple[Level, Batch]]:
    """A batch for each level of closed loop: id -> level and batch.

    Raises:
        ScenarioError: a batch cannot have a property of the scenario.
    """
    missing = {
        "shared_prefix": scenario.shared_prefix > 0,
        "text": scenario.text,
        "sampling": scenario.sampling != Sampling(),
        "only rates": not scenario.users,
    }
    found = [name for name, asked in missing.items() if asked]
    if found:
        raise ScenarioError(f"scenario {scenario.name} has {', '.join(found)}, which --offline does not support")
    return {
        f"{scenario.name}@{users}": (
            Level(users=users),
            Batch(
                id=f"{scenario.name}@{users}",
                figure=Figure.OUTPUT,
                requests=users,
                prompt=scenario.prompt,
                output=scenario.output,
                warm_requests=users,
                warm_output=min(scenario.output, 16),
            ),
        )
        for users in scenario.users
    }


def run(
    backend: str,
    scenarios: Sequence[Scenario],
    subject: Subject,
    flags: Sequence[str],
    start_s: float,
    seed: int,
    folder: Path,
) -> Iterator[Record]:
    """Yields the events of one backend's engine: `note`, `ready`, `run`, and `failed` for a single scenario.

    Raises:
        BackendError: the engine did not start, it died, or another backend serves its layers.
    """
    chosen = {name: (scenario, *pair) for scenario in scenarios for name, pair in batches(scenario).items()}
    shape = Shape(
        config={"vocab_size": subject.vocabulary},
        max_model_len=max(scenario.longest for scenario in scenarios),
        backends=subject.backends,
        # Engines run one at a time: whether two fit the GPU's memory is not asked.
        weight_bytes=0,
        token_bytes=0,
        small=subject.name in SHAPES and SHAPES[subject.name].small,
    )
    if subject.name in SHAPES:
        shape = SHAPES[subject.name]
    settings = Settings(
        shape=shape,
        model=subject.name,
        path=subject.path,
        engine=engine_arguments(flags),
        start_s=start_s,
        scenario_s=max(300.0, start_s),
        cache=Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser(),
        seed=seed,
    )
    for event in children.offline(backend, [batch for _, _, batch in chosen.values()], settings, folder):
        kind = event["event"]
        if kind == "ready":
            yield {
                "event": "ready",
                "ready_s": event["at_s"],
                "facts": event["facts"],
                "startup_lines": event["startup_lines"],
            }
        elif kind == "result":
            scenario, level, _ = chosen[event["scenario"]]
            rate = statistics.median(event["rates"])
            yield {"event": "run", "scenario": scenario.name, "level": level, "output_per_s": rate}
        elif kind == "error":
            scenario, level, _ = chosen[event["scenario"]]
            message = f"{level.label}: {event['message']}"
            yield {"event": "failed", "scenario": scenario.name, "message": message}
        elif kind == "failed":
            raise BackendError(event["message"], event["log_tail"])
        else:
            yield {"event": "note", "text": f"{kind} {event.get('scenario', '')} {event.get('message', '')}".strip()}
