# SPDX-License-Identifier: Apache-2.0
"""Runs steps on the GPUs of a host, each GPU one step at a time; or says when each would run."""

import heapq
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..processes import ROOT, child_environment, stop_group
from .steps import PYTHON, Step, filled

POLL_S = 0.2
# Seconds from the request to stop until a step's processes are killed, at most.
GRACE_S = 5.0
# Where CUDA's tools may be beside PATH.
TOOLS = Path("/usr/local/cuda/bin")


@dataclass
class Queue:
    """Steps that wait for GPUs: those of several GPUs first, when all are free, then in their order.

    Attributes:
        gpus: of the host.
        left: steps that were left out, and why.
    """

    waiting: list[Step]
    gpus: int
    left: list[tuple[Step, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting.sort(key=lambda step: -step.gpus)

    def next(self, free: int, seconds_left: float) -> tuple[Step, float] | None:
        """The first step for which there is time, and its seconds; None if it waits for GPUs, or there is none."""
        while self.waiting:
            step = self.waiting[0]
            seconds = min(step.most_s, seconds_left - GRACE_S)
            if step.gpus > self.gpus:
                self.left.append((self.waiting.pop(0), f"needs {step.gpus} GPUs"))
            elif seconds < step.least_s:
                self.left.append((self.waiting.pop(0), "no time left"))
            elif step.gpus > free:
                return None
            else:
                return self.waiting.pop(0), seconds
        return None


@dataclass(frozen=True)
class Planned:
    """When a step would start and for how long, if each one before takes all its time."""

    step: Step
    begin_s: float
    seconds: float


def planned(steps: Sequence[Step], gpus: int, limit_s: float) -> tuple[list[Planned], list[tuple[Step, str]]]:
    """What a campaign would run, and what it would leave out."""
    queue, found = Queue(list(steps), gpus), []
    now, free = 0.0, gpus
    ends: list[tuple[float, int]] = []  # when how many GPUs become free
    while True:
        while free and (one := queue.next(free, limit_s - now)) is not None:
            step, seconds = one
            found.append(Planned(step, now, seconds))
            heapq.heappush(ends, (now + seconds, step.gpus))
            free -= step.gpus
        if not ends:
            return found, queue.left
        now, count = heapq.heappop(ends)
        free += count


@dataclass
class Run:
    """A step that was started.

    Attributes:
        gpus: values of CUDA_VISIBLE_DEVICES.
        until: the `time.monotonic()` at which it is stopped.
    """

    step: Step
    gpus: tuple[str, ...]
    process: "subprocess.Popen[bytes] | None"
    began: float
    until: float
    outcome: str = ""
    seconds: float = 0.0


@dataclass
class Campaign:
    """Runs steps on GPUs.

    Attributes:
        out: the folder of each step's output (NAME.log) and results (NAME.jsonl).
        gpus: values of CUDA_VISIBLE_DEVICES.
        until: the `time.monotonic()` at which all steps must have ended.
    """

    out: Path
    gpus: Sequence[str]
    until: float
    runs: list[Run] = field(default_factory=list)
    left: list[tuple[Step, str]] = field(default_factory=list)

    def execute(self, steps: Sequence[Step]) -> None:
        """Starts the steps in order, and returns when all have ended."""
        queue = Queue(list(steps), len(self.gpus), self.left)
        running: list[Run] = []
        try:
            while queue.waiting or running:
                taken = {gpu for run in running for gpu in run.gpus}
                free = [gpu for gpu in self.gpus if gpu not in taken]
                while free and (one := queue.next(len(free), self.until - time.monotonic())) is not None:
                    step, seconds = one
                    running.append(self.start(step, tuple(free[: step.gpus]), seconds))
                    self.runs.append(running[-1])
                    free = free[step.gpus :]
                if running:
                    time.sleep(POLL_S)
                for run in [run for run in running if ended(run)]:
                    running.remove(run)
                    print(f"{run.step.name}: {run.outcome} after {run.seconds:.0f} s", flush=True)
        finally:
            for run in running:
                stop(run)

    def start(self, step: Step, gpus: tuple[str, ...], seconds: float) -> Run:
        now = time.monotonic()
        # What an earlier campaign found in the same folder is not this one's.
        for ending in ("log", "jsonl"):
            (self.out / f"{step.name}.{ending}").unlink(missing_ok=True)
        # A step ends its own work a little before it is stopped, to have the time to print what it found.
        given = {
            "seconds": f"{seconds * 0.9:.0f}",
            "json": str(self.out / f"{step.name}.jsonl"),
            "python": sys.executable,
        }
        program = program_of(step)
        if program is None:
            return Run(step, gpus, None, now, now, f"no program {step.program}")
        with (self.out / f"{step.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [program, *(filled(word, given) for word in step.arguments)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(CUDA_VISIBLE_DEVICES=",".join(gpus), **dict(step.variables)),
                start_new_session=True,
            )
        os.sched_setaffinity(process.pid, {core for gpu in gpus for core in self.cores(gpu)})
        return Run(step, gpus, process, now, now + seconds)

    def cores(self, gpu: str) -> set[int]:
        """The CPU's cores for the steps of a GPU; all cores where there are fewer than GPUs.

        Beside tests and compilers that take all cores, engines and benches are slower.
        """
        every = sorted(os.sched_getaffinity(0))
        return set(every[self.gpus.index(gpu) :: len(self.gpus)] if len(every) >= len(self.gpus) else every)

    @property
    def complete(self) -> bool:
        """Whether every step was started and succeeded."""
        return not self.left and all(run.outcome == "ok" for run in self.runs)


def program_of(step: Step) -> str | None:
    """The path of a step's program; None if there is none."""
    if step.program == PYTHON:
        return sys.executable
    return shutil.which(step.program) or shutil.which(step.program, path=str(TOOLS))


def ended(run: Run) -> bool:
    """Whether a step has ended; stops it if its time is over."""
    if run.process is None:
        return True
    status = run.process.poll()
    if status is not None:
        run.outcome = "ok" if status == 0 else f"status {status}"
        stop(run)
    elif time.monotonic() >= run.until:
        stop(run)
        run.outcome = "stopped"
    else:
        return False
    run.seconds = time.monotonic() - run.began
    return True


def stop(run: Run) -> None:
    """End a step and all that it started, which may still run if the step has ended, and disturb the next one."""
    if run.process is not None:
        stop_group(run.process, wait_s=GRACE_S / 2)
