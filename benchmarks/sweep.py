# SPDX-License-Identifier: Apache-2.0
"""Times the configurations of a kernel on one problem: shared by the sweeps and `dsl-backend tune`."""

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import torch
from dsl_backend.providers import Launch, Limits
from dsl_backend.runtime import precompile
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.tuned import TunedConfigs

from . import check, timing
from .case import Case, Reference, select
from .check import BF16_LIMITS
from .runner import DeviceLostError, require_alive

if TYPE_CHECKING:
    from .held_out.compile_ahead import Task

SECONDS = 0.1
# All configurations are timed in turns: a GPU's clock falls as it warms up, which would favour the first one.
ROUNDS = 4
# The shortest time between two lines that say how many kernels are compiled.
PROGRESS_S = 10.0

MakeTimer = Callable[[Launch, int, torch.device], timing.Timer]


@dataclasses.dataclass(frozen=True)
class Ready:
    """A problem's tensors on a device.

    Attributes:
        runner: makes, for a configuration, the function that launches a layer and returns its output.
        outputs: the output of each layer.
        expected: the reference of the last layer.
        view: what a launch returned, as it is compared with the reference.
    """

    runner: Callable[[Any], Callable[[int], Any]]
    outputs: Sequence[torch.Tensor]
    expected: Reference
    view: Callable[[Any], torch.Tensor] = lambda returned: returned


def compiled_by(family: str, spec: Any, target: Target) -> Callable[[Any], PrecompileSpec]:
    """What has a configuration compiled, of a family whose kernel follows from a spec and a configuration."""

    def precompile_spec(config: Any) -> PrecompileSpec:
        # Imports CuTe DSL.
        host = importlib.import_module(f"dsl_backend.{family}.cute.host")
        return PrecompileSpec(family, host.build, host.key_of(spec, config), target)

    return precompile_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
    """A problem and the configurations to compare on it.

    Attributes:
        parameters: the problem's parameters, for the JSON file.
        configs: the configurations. The first one is the heuristic's, with which all others are compared.
        chosen: the configuration that dispatch uses at present.
        precompile_spec: the precompile spec of a configuration; None if there is nothing to compile.
        prepare: makes the problem's tensors.
        note: text to print for a configuration and its microseconds.
        limits: the largest errors of the first configuration.
    """

    name: str
    parameters: Mapping[str, Any]
    configs: Sequence[Any]
    chosen: Any
    precompile_spec: Callable[[Any], PrecompileSpec | None]
    prepare: Callable[[], Ready]
    note: Callable[[Any, float], str] = lambda config, time_us: ""
    limits: Limits = BF16_LIMITS

    @property
    def precompile_specs(self) -> Iterator[PrecompileSpec]:
        return (
            precompile_spec for config in self.configs if (precompile_spec := self.precompile_spec(config)) is not None
        )


@dataclasses.dataclass(frozen=True)
class Class:
    """A class of problems and the rows that represent it. All rows have the same configurations.

    Attributes:
        launches: of others' kernels in its rows, which are compiled at their first launch.
    """

    tuned_configs: TunedConfigs[Any]
    problem: Any
    contests: tuple[Contest, ...]
    launches: tuple["Task", ...] = ()

    @property
    def name(self) -> str:
        return str(self.problem.name)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A configuration and its time, or the reason why it has none."""

    config: Any
    summary: timing.Summary | None = None
    error: str = ""


def unique(configs: Iterable[Any]) -> list[Any]:
    """The items in order, without duplicates."""
    return list(dict.fromkeys(configs))


def compile_all(contests: Iterable[Contest]) -> None:
    """Compiles all configurations on all cores; prints how far it is, and those that could not be compiled."""
    precompile_specs = {
        str(precompile_spec): precompile_spec for contest in contests for precompile_spec in contest.precompile_specs
    }
    count = len(precompile_specs)
    print(f"compiling {count} kernels", flush=True)
    began = said = time.monotonic()
    for done, outcome in enumerate(precompile.run(list(precompile_specs.values())), 1):
        if outcome.error:
            print(f"not compiled: {outcome.spec}: {outcome.error}", flush=True)
        now = time.monotonic()
        if done == count or now - said >= PROGRESS_S:
            said = now
            print(f"compiled {done} of {count} kernels after {now - began:.0f} s", flush=True)


def timed(contest: Contest, seconds: float = SECONDS, make_timer: MakeTimer = timing.make_timer) -> list[Timed]:
    """Times every configuration whose result is right, in turns.

    The result of the heuristic's configuration must be close to the reference. Its error gives the budget for the
    errors of the others.

    Raises:
        Exception: the heuristic's configuration raised, or its result is wrong.
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
            output = ready.view(result_of(run, ready.outputs))
            if naive is None:
                check.require_right(output, ready.expected, contest.limits)
                naive = output[ready.expected.rows].clone()
            else:
                check.require_as_good(output, ready.expected, naive)
            timers.append((config, make_timer(Launch(run), layers, device), []))
        except Exception as error:  # noqa: PERF203 - each may fail alone; CuTe DSL may raise anything
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


def result_of(run: Callable[[int], Any], outputs: Sequence[torch.Tensor]) -> Any:
    """Runs all layers once; returns what the last one returned.

    That is its output, in which elements that were not written are NaN or -1, or what the kernel made itself.
    """
    returned: Any = outputs[-1]
    for index, output in enumerate(outputs):
        output.fill_(torch.nan if output.is_floating_point() else -1)
        returned = run(index)
    timing.synchronize(outputs[-1].device)
    return returned


def line(contest: Contest, config: Any, time_us: float) -> dict[str, Any]:
    """A configuration's time as a JSON object."""
    facts = {"us": time_us, "chosen": config == contest.chosen, "name": type(config).__name__}
    return {"row": contest.name, **contest.parameters, **facts, **dataclasses.asdict(config)}


def rows_of(cases: Sequence[Case[Any]], pattern: str | None, parser: argparse.ArgumentParser) -> list[Case[Any]]:
    """`select`; ends the program with status 2 if no row matches, and names those that there are."""
    found = select(cases, pattern)
    if not found:
        parser.error(f"no row matches {pattern!r}: choose from {', '.join(case.id for case in cases)}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--best", type=int, default=6, help="number of configurations to print for each problem (default: 6)"
    )
    parser.add_argument("--json", type=pathlib.Path, help="write all results, one JSON object on each line")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of timing for each configuration (default: {SECONDS})"
    )
    parser.add_argument("--limit-seconds", type=float, help="start no problem after so many seconds")


def run(contests: Sequence[Contest], given: argparse.Namespace) -> int:
    """Compiles and times all configurations; prints the fastest ones of each problem, and the chosen one.

    Args:
        given: the arguments of `add_arguments`.
    """
    until = math.inf if given.limit_seconds is None else time.monotonic() + given.limit_seconds
    compile_all(contests)
    with timing.alone(), given.json.open("w") if given.json else contextlib.nullcontext() as lines:
        for index, contest in enumerate(contests):
            if time.monotonic() > until:
                print(f"{len(contests) - index} of {len(contests)} problems were not timed: {given.limit_seconds} s")
                break
            try:
                found = timed(contest, given.seconds)
            except DeviceLostError:
                raise
            except Exception as error:  # a compiler's, too
                found = [Timed(contest.configs[0], error=str(error))]
            torch.cuda.empty_cache()
            for one in found:
                if one.summary is None:
                    print(f"{contest.name} {one.config}: {one.error}", flush=True)
            times = [(one.summary.median_us, one.config) for one in found if one.summary is not None]
            say(contest, times, given.best, lines)
    return 0


def say(contest: Contest, times: Sequence[tuple[float, Any]], best: int, lines: TextIO | None) -> None:
    """Print times of a problem's configurations, the fastest first, and write all as JSON objects.

    Args:
        times: (microseconds, configuration).
        best: so many are printed, and the chosen one.
        lines: an open file, if times are to be written.
    """
    for rank, (time_us, config) in enumerate(sorted(times, key=lambda one: one[0])):
        is_chosen = config == contest.chosen
        if rank < best or is_chosen:
            note, mark = contest.note(config, time_us), "*" if is_chosen else " "
            print(f"{contest.name:28} {time_us:9.2f} us {note} {mark} {config}", flush=True)
        if lines:
            lines.write(json.dumps(line(contest, config, time_us)) + "\n")
            lines.flush()
