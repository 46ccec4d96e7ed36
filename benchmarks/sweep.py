# SPDX-License-Identifier: Apache-2.0
"""Configurations of a kernel against each other, on one problem: what the operators' sweeps have in common."""

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from dsl_backend.runtime import precompile
from dsl_backend.runtime.precompile import Unit

from . import check, timing
from .case import Launch, Reference
from .check import BF16_LIMITS

SECONDS = 0.1
# Of all configurations in turn: a GPU's clock falls as it grows warm, and whoever came first would seem the fastest.
ROUNDS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--best", type=int, default=6, help="lines for each problem")
    parser.add_argument("--json", type=pathlib.Path, help="write one JSON object a line, of everything")


def compile_all(units: Iterable[Unit]) -> None:
    """On all cores; says which could not be compiled."""
    for outcome in precompile.run(list(units)):
        if outcome.error:
            print(f"not compiled: {outcome.unit}: {outcome.error}", flush=True)


def timer_of(run: Callable[[int], torch.Tensor], outputs: Sequence[torch.Tensor], expected: Reference) -> timing.Timer:
    """What times a launch, once its result in the last layer is as expected.

    Args:
        run: launches a layer, and gives back its output.
        outputs: of all layers.
    """
    device = outputs[-1].device
    for index, output in enumerate(outputs):
        output.fill_(torch.nan)
        run(index)
    timing.synchronize(device)
    check.require_right(outputs[-1], expected, BF16_LIMITS)
    return timing.make_timer(Launch(run), len(outputs), device)


class Lines:
    """What a sweep prints, and keeps as JSON: the fastest configurations of each problem, and the chosen one."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.best = given.best
        self.file = given.json.open("w") if given.json else None

    def time(
        self,
        name: str,
        parameters: dict[str, Any],
        configs: Iterable[Any],
        chosen: Any,
        timer: Callable[[Any], timing.Timer],
        note: Callable[[Any, float], str],
    ) -> None:
        """Times all configurations of a problem.

        Args:
            parameters: of the problem, for the file.
            chosen: what would be taken without a sweep.
            timer: of a configuration.
            note: what to print of a configuration and its microseconds.
        """
        timers: list[tuple[Any, timing.Timer, list[float]]] = []
        for config in configs:
            try:
                timers.append((config, timer(config), []))
            except (check.WrongResultError, RuntimeError) as error:  # noqa: PERF203 - each may fail alone
                print(f"{name} {config}: {error}", flush=True)
        for _, one, samples in timers * ROUNDS:
            until = time.perf_counter() + SECONDS / ROUNDS
            samples.append(one.sample())
            while time.perf_counter() < until:
                samples.append(one.sample())
        found = [(timing.summarize(samples).median_us, config) for config, _, samples in timers]
        for place, (time_us, config) in enumerate(sorted(found, key=lambda one: one[0])):
            if place < self.best or config == chosen:
                mark = "*" if config == chosen else " "
                print(f"{name:28} {time_us:9.2f} us {note(config, time_us)} {mark} {config}", flush=True)
            if self.file:
                facts = {"us": time_us, "chosen": config == chosen, "name": type(config).__name__}
                line = {"row": name, **parameters, **facts, **dataclasses.asdict(config)}
                self.file.write(json.dumps(line) + "\n")
                self.file.flush()
