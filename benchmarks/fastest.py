# SPDX-License-Identifier: Apache-2.0
"""The choice among a few configurations of a peer whose DSL has no tuner of its own."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Candidate = TypeVar("Candidate")
LAUNCHES = 5


def fastest(candidates: Sequence[Candidate], bind: Callable[[Candidate], Callable[[], Any]]) -> Candidate:
    """The candidate whose launches take the least time on the GPU; a single one is not timed.

    Args:
        bind: makes the function that launches a candidate.

    Raises:
        What the first one raised, if none can be launched. One that does not compile is left out.
    """
    if len(candidates) == 1:
        return candidates[0]
    timed = [attempt(bind, candidate) for candidate in candidates]
    times = [one if isinstance(one, float) else math.inf for one in timed]
    best = min(range(len(times)), key=times.__getitem__)
    if isinstance(failure := timed[best], Exception):
        raise failure
    return candidates[best]


def attempt(bind: Callable[[Candidate], Callable[[], Any]], candidate: Candidate) -> float | Exception:
    """The time of a candidate, or why it has none."""
    try:
        return milliseconds(bind(candidate))
    except Exception as error:  # a compiler may raise anything
        return error


def milliseconds(launch: Callable[[], Any]) -> float:
    """Of `LAUNCHES` launches, after one that compiles and warms up."""
    launch()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(LAUNCHES):
        launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
