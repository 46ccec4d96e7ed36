# SPDX-License-Identifier: Apache-2.0
"""The timer of CUDA graphs, with a graph that records nothing."""

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch

from benchmarks import timing
from dsl_backend.providers import Launch

LAYERS, LAUNCH_MS = 3, 0.01


class Graph:
    def replay(self) -> None:
        pass


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return LAUNCH_MS * LAYERS


class Output:
    pass


def test_outputs_that_a_provider_allocates_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are layers are in use when another one is allocated: a cache does not hold what is written."""

    @contextlib.contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        yield

    for name, value in (("CUDAGraph", Graph), ("Event", Event), ("graph", capture)):
        monkeypatch.setattr(torch.cuda, name, value)
    made: list[weakref.ref[Output]] = []
    alive = []

    def run(index: int) -> Output:
        alive.append(sum(one() is not None for one in made))
        output = Output()
        made.append(weakref.ref(output))
        return output

    timer = timing.GraphTimer(Launch(run), LAYERS)  # type: ignore[arg-type]
    assert timer.launches > 2 * LAYERS
    assert timer.launches % LAYERS == 0
    assert alive[-timer.launches :][LAYERS + 1 :] == [LAYERS] * (timer.launches - LAYERS - 1)
    assert [id(one) for one in timer.results] == [id(one()) for one in made[-LAYERS:]]
