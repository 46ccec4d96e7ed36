# SPDX-License-Identifier: Apache-2.0
"""Times providers in their own processes with this process's clock.

A block is one launch on each layer: all layers have other data than in the block before, their outputs are poisoned
before it and compared after it. So a block cannot be answered from an earlier one, and a clock or an event that a
candidate replaced changes nothing. In some blocks no launch is asked for: work ahead of the clock is seen. Requests
whose graph has one kernel that sets a number are timed in turn, and their median is subtracted: of all blocks, since
single ones differ by as much as a block's launches take.
"""

import dataclasses
import pathlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import check, timing
from ..case import Case
from . import shared
from .checks import LATE_SECONDS, case_payload
from .process import Process
from .registry import Judged

BLOCKS = 24
# Beside them, in which no launch is asked for.
IDLE_BLOCKS = 2
# Bytes that a block moves at least, if its layers are not too many: about a millisecond on an H200. Of what the request
# with an empty graph takes, a part is hidden behind the kernels of a block: 36 us, by the times of an H200.
BLOCK_BYTES = 4 << 30
MOST_LAYERS = 512
# On a CPU, where there is no cache to be larger than.
CPU_LAYERS = 8


@dataclass(frozen=True)
class Times:
    """A launch's time in microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


class WrongError(Exception):
    """A timed launch had a wrong result."""


@dataclass
class Row:
    """A case with its shared inputs, which all timed providers get one after another.

    Attributes:
        limits: of the provider's errors; by default the problem's.
    """

    operator: Any
    judged: Judged
    case: Case
    folder: pathlib.Path
    device: torch.device
    seed: int

    def __post_init__(self) -> None:
        of_gpu = layers_of_block(self.case.traffic_bytes, timing.l2_bytes(self.device))
        self.layers = of_gpu if self.device.type == "cuda" else CPU_LAYERS
        self.draw = random.Random(self.seed)

    def build(self) -> Any:
        return self.operator.build(self.case.problem, self.layers, self.device, self.draw.randrange(1 << 30))

    def time(self, process: Process, blocks: int = BLOCKS) -> Times | list[str]:
        """The time of a launch, or the candidate's objections.

        Raises:
            WrongError: a result was wrong.
            Failed, Stopped: as `Process.ask`.
        """
        problem = self.case.problem
        memory = shared.share(self.judged.hidden(self.build()), self.folder, "row")
        path = self.folder / "row"
        path.write_bytes(case_payload(problem, memory))
        try:
            facts = {"device": self.device.type, "arch": None, "schedule": "", "seed": 0}
            if objections := process.ask("case", payload=str(path), **facts).get("objections"):
                return [str(one) for one in objections]
            process.ask("capture", layers=self.layers)
            # The first one warms up.
            self.block(process, memory)
            idle = self.draw.sample(range(blocks - 1), min(IDLE_BLOCKS, blocks - 1))
            timed = []
            for index in range(blocks - 1):
                if index in idle:
                    self.idle_block(process, memory)
                timed.append(self.block(process, memory))
            process.ask("end")
        finally:
            memory.close()
            path.unlink()
        return times_of_launch(timed, self.layers)

    def block(self, process: Process, memory: shared.Shared) -> tuple[float, list[float]]:
        """Seconds of a request with new inputs, and of empty ones before it."""
        fresh, costs = self.before_launch(process, memory)
        seconds = asked(process, empty=False)
        for layer in self.sampled_layers():
            self.compare(fresh, memory.thing, layer)
        process.check_limits()
        return seconds, costs

    def idle_block(self, process: Process, memory: shared.Shared) -> None:
        """A block without its launch: raises WrongError if an output is written all the same."""
        self.before_launch(process, memory)
        time.sleep(LATE_SECONDS)
        outputs = self.judged.outputs(memory.thing)
        for layer in self.sampled_layers():
            if not is_poisoned(outputs[layer]):
                raise WrongError(f"the output of layer {layer} was written before a launch was asked for")

    def before_launch(self, process: Process, memory: shared.Shared) -> tuple[Any, list[float]]:
        """The new inputs of a block, and seconds of empty requests."""
        fresh = self.build()
        memory.refill(self.judged.hidden(fresh))
        self.operator.poison(memory.thing)
        timing.synchronize(self.device)
        return fresh, [asked(process, empty=True) for _ in range(3)]

    def sampled_layers(self) -> list[int]:
        return self.draw.sample(range(self.layers), min(2, self.layers))

    def compare(self, fresh: Any, written: Any, layer: int) -> None:
        """Compares rows that the candidate does not know. fresh: inputs that it did not see."""
        problem = self.case.problem
        out = self.judged.outputs(written)[layer]
        reference = self.operator.reference(problem, fresh, layer, self.draw.randrange(1 << 30))
        try:
            check.require_right(self.operator.compared(fresh, layer, out), reference, problem.limits)
        except check.WrongResultError as error:
            raise WrongError(f"a timed launch on layer {layer} is wrong: {error}") from None


def is_poisoned(out: torch.Tensor) -> bool:
    """Whether an output is as `Operator.poison` leaves it: NaN, or -1 of integers."""
    return bool((out.float().isnan() if out.dtype.is_floating_point else out == -1).all())


def times_of_launch(blocks: Sequence[tuple[float, list[float]]], layers: int) -> Times:
    """The time of a launch by what `Row.block` has returned."""
    cost = statistics.median(one for _, costs in blocks for one in costs)
    found = timing.summarize([1e6 * max(seconds - cost, 0.0) / layers for seconds, _ in blocks])
    return Times(found.median_us, found.p10_us, found.p90_us, found.samples)


def layers_of_block(traffic_bytes: int, cache_bytes: int) -> int:
    """Layers of a block on a GPU: they exceed the cache, and move BLOCK_BYTES if that many are allowed."""
    return timing.layers_needed(traffic_bytes, cache_bytes, BLOCK_BYTES, MOST_LAYERS)


def asked(process: Process, empty: bool) -> float:
    """Seconds until a request is answered."""
    start = time.perf_counter()
    process.ask("replay", empty=empty)
    return time.perf_counter() - start


def as_json(times: Times) -> dict[str, float]:
    return dataclasses.asdict(times)
