# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of all rows and providers in parallel, before anything is timed.

Each process launches providers once on one layer of inputs. The compilers (CuTe DSL with this package's cache or
quack's, Triton, nvcc) keep what they compile on disk, where the process that times finds it.
"""

import contextlib
import math
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsl_backend.runtime import precompile

from .. import runner, timing
from ..case import Case, Operator, Provider

# A process that has lost its device takes tasks this slowly, so that the other processes do the rest.
LOST_SECONDS = 1.0


@dataclass(frozen=True)
class Task:
    """A provider of a row, to launch once."""

    operator: Operator[Any, Any]
    case: Case[Any]
    provider: Provider[Any, Any]
    device: str
    seconds: float


def is_lost(device: torch.device) -> bool:
    """Whether an error has left the device unusable for this process."""
    try:
        timing.synchronize(device)
    except RuntimeError:
        return True
    return False


def launch_once(task: Task) -> str | None:
    """Returns why the provider cannot run the row; None if it ran. The run that times reports the reason again."""
    problem, device = task.case.problem, torch.device(task.device)
    if is_lost(device):
        time.sleep(LOST_SECONDS)
        return "the device no longer answers this process"
    try:
        if reasons := task.provider.objections(problem):
            return "; ".join(reasons)
        with runner.deadline(task.seconds):
            inputs = task.operator.build(problem, 1, device, 0)
            task.provider.prepare(problem, inputs).run(0)
            timing.synchronize(device)
    except Exception as error:  # a provider may raise anything
        return runner.short_message(error)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


@dataclass(frozen=True)
class Outcome:
    """How many tasks there were, how many ended in time, and how many of these ran."""

    tasks: int
    ended: int
    ran: int
    processes: int
    seconds: float

    def __str__(self) -> str:
        left = f"; {self.tasks - self.ended} did not end in time" if self.ended < self.tasks else ""
        return (
            f"compiled ahead in {self.seconds:.1f} s with {self.processes} processes: {self.ran} of {self.tasks} "
            f"launches ran{left}"
        )


def results(tasks: Sequence[Task], processes: int, limit_seconds: float) -> Iterator[str | None]:
    """The result of each task as it ends. All processes have ended when the iterator has.

    Args:
        limit_seconds: when the iterator ends although tasks have not; also if no task ends within its own time limit.
    """
    until = time.monotonic() + limit_seconds
    longest = max(task.seconds for task in tasks)
    pool = multiprocessing.get_context("spawn").Pool(processes)
    try:
        found = pool.imap_unordered(launch_once, tasks)
        for _ in tasks:
            # A process that dies takes its task with it: the result never comes.
            with contextlib.suppress(multiprocessing.TimeoutError):
                yield found.next(timeout=max(0.0, min(longest, until - time.monotonic())))
                continue
            return
    finally:
        pool.terminate()
        pool.join()


def run(tasks: Sequence[Task], limit_seconds: float = math.inf, processes: int | None = None) -> Outcome:
    """Launches every task once in parallel.

    Args:
        limit_seconds: tasks that have not ended then are abandoned.
        processes: by default one for each core, if memory suffices.
    """
    began, count = time.monotonic(), processes or precompile.processes(len(tasks))
    found = list(results(tasks, count, limit_seconds))
    return Outcome(len(tasks), len(found), found.count(None), count, time.monotonic() - began)
