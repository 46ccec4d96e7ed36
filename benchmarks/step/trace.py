# SPDX-License-Identifier: Apache-2.0
"""What a profiler's trace says of the kernels of decode steps."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

# A kernel that is named by a template is known by its first names.
LONGEST_NAME = 72


@dataclass(frozen=True)
class Kernel:
    """The launches of one name.

    Attributes:
        launches: for each step.
        us: for each step.
    """

    name: str
    launches: float
    us: float

    @property
    def each_us(self) -> float:
        return self.us / self.launches


@dataclass(frozen=True)
class Step:
    """The kernels of a step, the longest first.

    Attributes:
        busy_us: for each step, how long at least one kernel ran.
    """

    kernels: tuple[Kernel, ...]
    busy_us: float

    @property
    def sum_us(self) -> float:
        """The time of all kernels; with several streams it may exceed `busy_us`."""
        return sum(kernel.us for kernel in self.kernels)


def short(name: str) -> str:
    """A kernel's name without return type, arguments and what is too long to read."""
    plain = re.sub(r"^void ", "", name).replace("(anonymous namespace)::", "")
    return plain if len(plain) <= LONGEST_NAME else plain[: LONGEST_NAME - 3] + "..."


def busy(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def summarized(events: Iterable[Mapping[str, Any]], steps: int) -> Step:
    """The kernels among the events of a Chrome trace, which holds so many steps.

    Raises:
        ValueError: there is no kernel.
    """
    found = [event for event in events if event.get("cat") == "kernel"]
    if not found:
        raise ValueError("the profiler recorded no kernel: it needs a CUDA device and CUPTI")
    launches: dict[str, list[float]] = {}
    for event in found:
        launches.setdefault(short(event["name"]), []).append(event["dur"])
    kernels = [Kernel(name, len(times) / steps, sum(times) / steps) for name, times in launches.items()]
    total = busy((event["ts"], event["ts"] + event["dur"]) for event in found)
    return Step(tuple(sorted(kernels, key=lambda kernel: -kernel.us)), total / steps)


@dataclass(frozen=True)
class Launch:
    """A launch of a layer.

    Attributes:
        us: from its start to its end, which may include that it waits for the launch before.
        adds_us: from the latest end of all launches before it to its own: what the step would be shorter without it.
    """

    name: str
    us: float
    adds_us: float


def layer(events: Iterable[Mapping[str, Any]], steps: int, layers: int) -> list[Launch]:
    """The launches of one layer in their order, from one launch of a kernel that each layer has once to the next.

    The median of all layers with the sequence that most layers have; it begins with the first such kernel.
    Empty if no kernel is launched once in each layer.
    """
    found = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    names = [short(event["name"]) for event in found]
    counts = Counter(names)
    anchor = next((name for name in names if counts[name] == steps * layers), None)
    if anchor is None:
        return []
    launches, reached = [], found[0]["ts"]
    for name, event in zip(names, found, strict=True):
        end = event["ts"] + event["dur"]
        launches.append(Launch(name, event["dur"], max(0.0, end - reached)))
        reached = max(reached, end)
    begins = [number for number, name in enumerate(names) if name == anchor]
    sequences = [launches[begin:end] for begin, end in pairwise(begins)]
    usual, _ = Counter(tuple(one.name for one in sequence) for sequence in sequences).most_common(1)[0]
    alike = [sequence for sequence in sequences if tuple(one.name for one in sequence) == usual]
    return [
        Launch(name, median(one.us for one in same), median(one.adds_us for one in same))
        for name, same in zip(usual, zip(*alike, strict=True), strict=True)
    ]
