# SPDX-License-Identifier: Apache-2.0
"""Configurations of a kernel against each other, on one problem: what sweeps and `dsl-backend tune` have in common."""

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from dsl_backend.runtime import precompile
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.tuned import TunedConfigs

from . import check, timing
from .case import Launch, Reference
from .check import BF16_LIMITS
from .runner import DeviceLostError, require_alive

SECONDS = 0.1
# Of all configurations in turn: a GPU's clock falls as it grows warm, and whoever came first would seem the fastest.
ROUNDS = 4

MakeTimer = Callable[[Launch, int, torch.device], timing.Timer]


@dataclasses.dataclass(frozen=True)
class Ready:
    """A problem's tensors on a device.

    Attributes:
        runner: from a configuration to what launches a layer with it, and gives back its output.
        outputs: of all layers.
        expected: of the last one.
    """

    runner: Callable[[Any], Callable[[int], torch.Tensor]]
    outputs: Sequence[torch.Tensor]
    expected: Reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
    """Configurations that are to be compared on one problem.

    Attributes:
        parameters: of the problem, for files.
        configs: the heuristic's first, which is what all results are measured by.
        chosen: what would be taken now.
        precompile_spec: what to compile for a configuration; None where there is nothing.
        prepare: makes the problem's tensors.
        note: what to print of a configuration and its microseconds.
    """

    name: str
    parameters: Mapping[str, Any]
    configs: Sequence[Any]
    chosen: Any
    precompile_spec: Callable[[Any], PrecompileSpec | None]
    prepare: Callable[[], Ready]
    note: Callable[[Any, float], str] = lambda config, time_us: ""

    @property
    def precompile_specs(self) -> Iterator[PrecompileSpec]:
        return (
            precompile_spec for config in self.configs if (precompile_spec := self.precompile_spec(config)) is not None
        )


@dataclasses.dataclass(frozen=True)
class Class:
    """A class of problems, and the rows that stand for it: all with the same configurations."""

    tuned_configs: TunedConfigs[Any]
    problem: Any
    contests: tuple[Contest, ...]

    @property
    def name(self) -> str:
        return str(self.problem.name)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A configuration and its time, or why there is none."""

    config: Any
    summary: timing.Summary | None = None
    error: str = ""


def unique(configs: Iterable[Any]) -> list[Any]:
    """Each once, in order."""
    return list(dict.fromkeys(configs))


def compile_all(contests: Iterable[Contest]) -> None:
    """On all cores; says which could not be compiled."""
    precompile_specs = {
        str(precompile_spec): precompile_spec for contest in contests for precompile_spec in contest.precompile_specs
    }
    for outcome in precompile.run(list(precompile_specs.values())):
        if outcome.error:
            print(f"not compiled: {outcome.spec}: {outcome.error}", flush=True)


def timed(contest: Contest, seconds: float = SECONDS, make_timer: MakeTimer = timing.make_timer) -> list[Timed]:
    """Times every configuration whose result is right, in turn.

    The heuristic's result must be close to the exact one, and the others' errors fit into the budget that it gives.

    Raises:
        Exception: of the heuristic's own configuration, wrong or not to be run.
        DeviceLostError: a configuration left the device unusable.
    """
    ready = contest.prepare()
    device, layers = ready.outputs[-1].device, len(ready.outputs)
    timers: list[tuple[Any, timing.Timer, list[float]]] = []
    failed: list[Timed] = []
    naive: torch.Tensor | None = None
    for config in contest.configs:
        try:
            run = ready.runner(config)
            output = result_of(run, ready.outputs)
            if naive is None:
                check.require_right(output, ready.expected, BF16_LIMITS)
                naive = output[ready.expected.rows].clone()
            else:
                check.require_as_good(output, ready.expected, naive)
            timers.append((config, make_timer(Launch(run), layers, device), []))
        except Exception as error:  # noqa: PERF203 - each may fail alone; CuTe DSL raises what it likes
            require_alive(device, error)
            if naive is None:
                raise
            failed.append(Timed(config, error=str(error)))
    for _, one, samples in timers * ROUNDS:
        until = time.perf_counter() + seconds / ROUNDS
        samples.append(one.sample())
        while time.perf_counter() < until:
            samples.append(one.sample())
    return [*(Timed(config, timing.summarize(samples)) for config, _, samples in timers), *failed]


def result_of(run: Callable[[int], torch.Tensor], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Runs all layers once; the last one's output, where NaN is what was not written."""
    for index, output in enumerate(outputs):
        output.fill_(torch.nan)
        run(index)
    timing.synchronize(outputs[-1].device)
    return outputs[-1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--best", type=int, default=6, help="lines for each problem")
    parser.add_argument("--json", type=pathlib.Path, help="write one JSON object a line, of everything")


def run(contests: Sequence[Contest], given: argparse.Namespace) -> int:
    """A sweep: compiles and times all; prints the fastest configurations of each problem, and the chosen one.

    Args:
        given: of `add_arguments`.
    """
    compile_all(contests)
    lines = given.json.open("w") if given.json else None
    with timing.alone():
        for contest in contests:
            try:
                found = timed(contest)
            except DeviceLostError:
                raise
            except Exception as error:  # a compiler's, too
                found = [Timed(contest.configs[0], error=str(error))]
            torch.cuda.empty_cache()
            for one in found:
                if one.summary is None:
                    print(f"{contest.name} {one.config}: {one.error}", flush=True)
            times = [(one.summary.median_us, one.config) for one in found if one.summary is not None]
            for place, (time_us, config) in enumerate(sorted(times, key=lambda one: one[0])):
                is_chosen = config == contest.chosen
                if place < given.best or is_chosen:
                    note, mark = contest.note(config, time_us), "*" if is_chosen else " "
                    print(f"{contest.name:28} {time_us:9.2f} us {note} {mark} {config}", flush=True)
                if lines:
                    facts = {"us": time_us, "chosen": is_chosen, "name": type(config).__name__}
                    line = {"row": contest.name, **contest.parameters, **facts, **dataclasses.asdict(config)}
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()
    return 0
