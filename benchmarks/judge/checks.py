# SPDX-License-Identifier: Apache-2.0
"""Checks a candidate: trials with new inputs at each call, compared in this process."""

import itertools
import pathlib
import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import shared
from .process import Failed, Process, Stopped
from .registry import LAYERS, Judged, Trial
from .shared import Shared

SCHEDULES = ("lazy", "random", "eager")
# After a call has returned; work that goes on is seen by what it writes.
LATE_SECONDS = 0.03
# Processes that are lost before the other trials are given up.
MOST_LOST = 2
# Of an output's bytes on the emulator. A host may clear an output before a kernel adds to it.
MOST_BY_HOST = 0.5
# What outputs hold before a call: NaN, and a number that no NaN may hide behind.
POISONS = {True: (torch.nan, 77.0), False: (-1, 1 << 40)}


@dataclass(frozen=True)
class Result:
    """Of a trial.

    Attributes:
        status: `right`, `wrong`, `refused` (the candidate objects), `error` (it raised), `stopped` (its process ended
            or exceeded a limit), or `not run`.
        error_over_budget: the largest of all calls; None if there is none.
        findings: what it did that it must not do, whether the result was right or not.
    """

    id: str
    why: str
    status: str
    message: str = ""
    error_over_budget: float | None = None
    findings: tuple[str, ...] = ()
    emulated_launches: int | None = None


@dataclass
class Call:
    """A call of a trial.

    Attributes:
        change: changes the shared inputs before it; returns nothing.
        layers: the layers to launch on, in order.
        poison: index in POISONS' values.
    """

    what: str
    layers: tuple[int, ...]
    poison: int
    change: Callable[[], object] = field(default=lambda: None)


@dataclass
class Examination:
    """The trials of one operator for one candidate.

    Attributes:
        start: starts a candidate's process that has loaded the candidate.
        arch: of the emulated device, or None.
        seed: of all inputs.
    """

    judged: Judged
    start: Callable[[], Process]
    folder: pathlib.Path
    device: torch.device
    arch: str | None
    seed: int

    def run(self, process: Process, finished: Callable[[Result], object]) -> tuple[list[Result], Process]:
        """All trials; returns their results and the process, which may be another one by then."""
        results: list[Result] = []
        trials = self.judged.trials(random.Random(self.seed), self.arch is not None)
        lost = 0
        for index, trial in enumerate(trials):
            if lost == MOST_LOST:
                results.append(
                    Result(trial.id, trial.why, "not run", f"{MOST_LOST} trials before it ended its process")
                )
                continue
            try:
                result = self.trial(process, trial, index)
            except Failed as error:
                result = Result(trial.id, trial.why, "error", str(error))
                self.leave(process)
            except Stopped as error:
                result = Result(trial.id, trial.why, "stopped", str(error))
                lost += 1
                if lost < MOST_LOST:
                    process = self.start()
            results.append(result)
            finished(result)
        return results, process

    def leave(self, process: Process) -> None:
        """Ends a case that failed, so that the next one finds no emulated device."""
        try:
            process.ask("end")
        except (Failed, Stopped):
            process.stop()

    def trial(self, process: Process, trial: Trial, index: int) -> Result:
        seed = self.seed + 1000 * index
        memory = shared.share(self.judged.build(trial, self.device, seed), self.folder, f"trial-{index}")
        # Only the bytes go to the candidate's process: the trial's name and difficulty do not.
        path = self.folder / f"trial-{index}"
        path.write_bytes(case_payload(trial.problem, memory))
        try:
            answer = process.ask(
                "case",
                payload=str(path),
                device=self.device.type,
                arch=self.arch,
                schedule=SCHEDULES[index % len(SCHEDULES)],
                seed=seed,
            )
            if answer.get("objections"):
                return Result(trial.id, trial.why, "refused", "; ".join(map(str, answer["objections"])))
            return self.calls(process, trial, memory, seed)
        finally:
            memory.close()
            path.unlink()

    def calls(self, process: Process, trial: Trial, memory: Shared, seed: int) -> Result:
        """The calls of a trial, then the emulator's findings."""
        draw = random.Random(seed)
        plan = [
            Call("the first call", tuple(range(LAYERS)), 0),
            Call(
                "with other inputs at the same addresses",
                tuple(reversed(range(LAYERS))),
                1,
                lambda: memory.refill(self.judged.build(trial, self.device, seed + 1)),
            ),
            Call("with one row changed", (0,), 0, lambda: self.judged.nudge(memory.thing, 0, draw)),
            Call("with the same inputs once more", (0,), 1),
        ]
        worst, wrong, findings = 0.0, "", []
        for call in plan:
            error, message, found = self.call(process, trial, memory, call)
            worst = max(worst, error)
            wrong = wrong or (f"{call.what}: {message}" if message else "")
            findings += found
        ended = process.ask("end")
        findings += [str(one) for one in ended.get("errors", ())]
        launches = ended.get("launches")
        if self.arch is not None and not launches:
            findings.append("no kernel was launched on the emulated device: the host computed the result")
        elif self.arch is not None and ended.get("host_share", 0) > MOST_BY_HOST:
            findings.append("the host wrote most of the output, and not the kernels that were launched")
        status = "wrong" if wrong else "right"
        return Result(trial.id, trial.why, status, wrong, worst, tuple(dict.fromkeys(findings)), launches)

    def call(self, process: Process, trial: Trial, memory: Shared, call: Call) -> tuple[float, str, list[str]]:
        """A call: its error over budget, why it is wrong, and what else it did."""
        call.change()
        outputs = self.all_outputs(memory.thing)
        for out in itertools.chain(*outputs):
            out.fill_(POISONS[out.dtype.is_floating_point][call.poison])
        before = memory.snapshot()
        process.ask("run", layers=list(call.layers))
        after = memory.snapshot()
        given, made = memory.at(before), self.all_outputs(memory.at(after))
        findings = memory.damage(before, after, [out for layer in call.layers for out in outputs[layer]])
        time.sleep(LATE_SECONDS)
        if any(not torch.equal(then, now) for then, now in zip(after, memory.memory, strict=True)):
            findings.append("it went on writing after `run` had returned and the current stream was idle")
        process.check_limits()
        worst, why = 0.0, ""
        poisoned = self.all_outputs(given)
        for layer in call.layers:
            for index, (out, empty) in enumerate(zip(made[layer], poisoned[layer], strict=True)):
                if same_bits(out, empty):
                    which = f"output {index + 1}" if index else "the output"
                    return torch.inf, f"nothing was written to {which} of layer {layer}", findings
            try:
                worst = max(worst, self.judged.error(trial, given, layer, *made[layer]))
            except AssertionError as error:
                return torch.inf, f"layer {layer}: {' '.join(str(error).split())}", findings
        if not worst <= 1:
            why = f"the error is {worst:.3g} times its budget"
        return worst, why, findings

    def all_outputs(self, inputs: Any) -> list[list[torch.Tensor]]:
        """The outputs of each layer, further ones included."""
        return [[out, *self.judged.further(inputs, layer)] for layer, out in enumerate(self.judged.outputs(inputs))]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def case_payload(problem: Any, memory: Shared) -> bytes:
    """What `child.Candidate.case` opens: the problem and its inputs."""
    return pickle.dumps((problem, memory.payload))


def failures(results: Sequence[Result]) -> list[Result]:
    return [one for one in results if one.status not in ("right", "refused")]
