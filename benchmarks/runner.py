# SPDX-License-Identifier: Apache-2.0
"""Runs a case with every provider: asks for objections, builds inputs, checks results, then times in turns."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from dsl_backend.providers import Launch, Limits

from . import check, timing
from .case import Case, Operator, Provider, Reference
from .devices import floor_us

# Providers are timed in turns, so that a clock that falls as the GPU warms up affects all of them alike.
ROUNDS = 6
NOT_READY_TEXT = "not ready after"
# How a cell's message begins whose provider was not ready in time.
NOT_READY = f"TimeoutError: {NOT_READY_TEXT}"


class DeviceLostError(RuntimeError):
    """The device is unusable after a provider's error, so the run must end."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        seconds: seconds of timing for each provider in each row.
        prepare_seconds: the time limit for a provider to plan and compile.
        flush: overwrite the last-level cache before each replay.
    """

    seconds: float = 0.3
    prepare_seconds: float = 240.0
    flush: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The result of one provider in one row.

    Attributes:
        status: `ok`, `skipped` (it objects), `wrong` (its result is not right) or `error` (it raised).
        message: the objection or the error; empty if there is none.
        launch_us: the host time of a launch without a graph.
    """

    provider: str
    status: str
    message: str = ""
    time: timing.Summary | None = None
    error: check.Error | None = None
    launch_us: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case and the results of all providers. `layers` is the number of data sets that the launches cycle through."""

    case: Case
    floor_us: float | None
    layers: int
    cells: tuple[Cell, ...]

    def time_us(self, provider: str) -> float | None:
        for cell in self.cells:
            if cell.provider == provider and cell.time is not None:
                return cell.time.median_us
        return None


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread after `seconds`. In other threads there is no time limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{NOT_READY_TEXT} {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def short_message(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def require_alive(device: torch.device, cause: BaseException) -> None:
    """Raises DeviceLostError if the device no longer works after the exception `cause`."""
    try:
        timing.synchronize(device)
    except RuntimeError as error:
        raise DeviceLostError(short_message(cause)) from error


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@dataclass(frozen=True)
class Expected:
    """The references of some layers, and the limits that hold for a provider."""

    operator: Operator
    inputs: Any
    references: dict[int, Reference]
    limits: Limits

    def check(self, launch: Launch, results: Sequence[torch.Tensor]) -> check.Error:
        """The largest error over the layers that have a reference. Raises WrongResultError: one is too large."""
        errors = [
            check.require_right(
                self.operator.compared(self.inputs, layer, launch.view(results[layer])), exact, self.limits
            )
            for layer, exact in self.references.items()
        ]
        return max(errors, key=lambda error: error.total)


@dataclass(frozen=True)
class Ready:
    """A provider whose results were right, ready for timing."""

    timer: timing.Timer
    error: check.Error
    launch_us: float


def make_ready(
    operator: Operator,
    provider: Provider,
    problem: Any,
    inputs: Any,
    references: dict[int, Reference],
    layers: int,
    device: torch.device,
    settings: Settings,
) -> Ready:
    """Prepares a provider. Checks its results, both from direct launches and from the timer's replays."""
    expected = Expected(operator, inputs, references, provider.limits(problem))
    with deadline(settings.prepare_seconds):
        operator.poison(inputs)
        launch = provider.prepare(problem, inputs)
        results = [launch.run(layer) for layer in range(layers)]
        timing.synchronize(device)
    expected.check(launch, results)
    del results
    host_us = timing.launch_us(launch, layers, device)
    timer = timing.make_timer(launch, layers, device, settings.flush)
    operator.poison(inputs)
    timer.sample()
    return Ready(timer, expected.check(launch, timer.results), host_us)


def measure_in_turns(timers: dict[str, timing.Timer], seconds: float) -> dict[str, timing.Summary | Exception]:
    """Times every provider for `seconds`, in rounds of alternating order."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    failed: dict[str, Exception] = {}
    for round_index in range(ROUNDS):
        for name in sorted(timers, reverse=round_index % 2 == 1):
            if name in failed:
                continue
            try:
                timers[name].sample()  # warms the instruction cache and the TLB for this provider
                end = time.perf_counter() + seconds / ROUNDS
                while True:
                    samples[name].append(timers[name].sample())
                    if time.perf_counter() >= end:
                        break
            except Exception as error:  # a provider may raise anything
                failed[name] = error
    return {name: failed[name] if name in failed else timing.summarize(samples[name]) for name in timers}


def run_case(
    operator: Operator, case: Case, providers: Sequence[Provider], device: torch.device, settings: Settings
) -> Row:
    """Measures one row. A provider that raises or has a wrong result gets a cell with the reason and without a time.

    Raises:
        DeviceLostError: a provider left the device unusable.
    """
    floor = floor_us(case, device_name(device))
    cells: dict[str, Cell] = {}
    ready: dict[str, Ready] = {}

    def fail(name: str, error: BaseException, status: str = "error") -> None:
        cells[name] = Cell(provider=name, status=status, message=short_message(error))

    candidates = []
    for provider in providers:
        try:
            reasons = provider.objections(case.problem)
        except Exception as error:
            fail(provider.name, error)
            continue
        if reasons:
            cells[provider.name] = Cell(provider=provider.name, status="skipped", message="; ".join(reasons))
        else:
            candidates.append(provider)

    layers = timing.layers_needed(case.traffic_bytes, timing.l2_bytes(device))
    if candidates:
        try:
            inputs = operator.build(case.problem, layers, device, settings.seed)
            references = {layer: operator.reference(case.problem, inputs, layer) for layer in {0, layers - 1}}
        except Exception as error:
            require_alive(device, error)
            for provider in candidates:
                fail(provider.name, error)
            candidates = []

    def attempt(provider: Provider) -> None:
        try:
            ready[provider.name] = make_ready(
                operator, provider, case.problem, inputs, references, layers, device, settings
            )
        except check.WrongResultError as error:
            fail(provider.name, error, "wrong")
        except Exception as error:  # a provider may raise anything
            require_alive(device, error)
            fail(provider.name, error)

    for provider in candidates:
        attempt(provider)
    timers = {name: one.timer for name, one in ready.items()}
    for name, result in measure_in_turns(timers, settings.seconds).items():
        if isinstance(result, Exception):
            require_alive(device, result)
            fail(name, result)
        else:
            one = ready[name]
            cells[name] = Cell(provider=name, status="ok", time=result, error=one.error, launch_us=one.launch_us)
    ordered = tuple(cells[provider.name] for provider in providers)
    return Row(case=case, floor_us=floor, layers=layers, cells=ordered)
