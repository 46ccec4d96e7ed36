# SPDX-License-Identifier: Apache-2.0
"""Which kernels a model needs, and compiling them all before it is served: on the cores of any machine.

An operator family registers a function that lists its kernels for a model and a target, as units. A unit can be
pickled: `run` gives units to spawned processes that see no GPU, and what they compile is found on disk.
"""

import enum
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from dsl_backend import envs
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime import cache, toolkit
from dsl_backend.runtime.compiles import Source, compiles
from dsl_backend.runtime.key import stable
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.target import Target


@dataclass(frozen=True)
class Unit:
    """A kernel to compile.

    Attributes:
        family: that it belongs to.
        build: `build(key, target)` calls `compile_kernel`; a function of a module, for processes to find.
        key: the kernel's key.
    """

    family: str
    build: Callable[[Any, Target], Any]
    key: Any
    target: Target

    def __str__(self) -> str:
        return f"{self.family}: {stable(self.key)} for {self.target.arch}"

    def compile(self) -> Any:
        """The function, from wherever it is had fastest."""
        return self.build(self.key, self.target)


Enumerator = Callable[[ModelShape, Target], Iterable[Unit]]

_families: dict[str, Enumerator] = {}


def register_family(name: str, enumerate_units: Enumerator) -> None:
    """Let a family say which kernels a model needs; a second registration of the same function is none.

    Raises:
        InvalidInput: another function has the name.
    """
    if _families.setdefault(name, enumerate_units) is not enumerate_units:
        raise InvalidInput(f"family {name!r} is registered already")


def families() -> tuple[str, ...]:
    return tuple(_families)


def units(model: ModelShape, target: Target, only: Sequence[str] = ()) -> list[Unit]:
    """All kernels that a model needs on a target, each once.

    Args:
        only: of these families; by default of all.

    Raises:
        InvalidInput: there is no such family.
    """
    unknown = [name for name in only if name not in _families]
    if unknown:
        known = ", ".join(_families) or "none"
        raise InvalidInput(f"family {unknown[0]!r} has no CuTe DSL kernels; families that have some: {known}")
    chosen = [_families[name] for name in only] if only else list(_families.values())
    found = (unit for enumerate_units in chosen for unit in enumerate_units(model, target))
    return list({str(unit): unit for unit in found}.values())


class Result(enum.Enum):
    COMPILED = "compiled"
    PRESENT = "present"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """What became of a unit.

    Attributes:
        seconds: in the process that had it.
        size_bytes: of its object files.
        error: one line, where it failed.
    """

    unit: Unit
    result: Result
    seconds: float = 0.0
    size_bytes: int = 0
    error: str | None = None


def processes(count: int) -> int:
    """How many processes to use for so many units: one for each core that this one may use."""
    return max(1, min(count, len(os.sched_getaffinity(0))))


def run(todo: Sequence[Unit], jobs: int | None = None) -> Iterator[Outcome]:
    """Compile units in parallel; yields each one's outcome when it is there.

    A unit that fails, or whose process dies, fails alone.

    Args:
        jobs: processes; by default one for each core.

    Raises:
        InvalidInput: CuTe DSL is not installed, or the disk cache, where the results go, cannot be used.
    """
    toolkit.require()
    try:
        cache.open_cache()
    except cache.Rejected as reason:
        raise InvalidInput(f"nothing compiled could be kept in {cache.folder()}: {reason}") from None
    fit: list[Unit] = []
    for unit in todo:
        objection = unpicklable(unit)
        if objection is None:
            fit.append(unit)
        else:
            yield Outcome(unit, Result.FAILED, error=f"cannot be given to another process: {objection}")
    lost: list[Unit] = []
    for outcome in in_pool(fit, jobs or processes(len(fit))):
        if outcome.result is Result.FAILED and outcome.error is None:
            lost.append(outcome.unit)
        else:
            yield outcome
    # A process that dies takes all units with it that others had; each gets one of its own to show which it was.
    for unit in lost:
        for outcome in in_pool([unit], 1):
            died = outcome.result is Result.FAILED and outcome.error is None
            yield Outcome(unit, Result.FAILED, error="its process died while it compiled") if died else outcome


def unpicklable(unit: Unit) -> str | None:
    """Why a unit cannot be pickled; None where it can."""
    try:
        pickle.dumps(unit)
    except Exception as error:  # pickling raises what it likes
        return one_line(error)
    return None


def in_pool(todo: Sequence[Unit], jobs: int) -> Iterator[Outcome]:
    """Outcomes as they come; units that were lost with a process have failed without an error."""
    if not todo:
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=spawn, initializer=envs.hide_gpus) as pool:
        running: dict[Future[Outcome], Unit] = {}
        waiting = list(todo)
        while waiting or running:
            # No more than can run: a queue that holds the rest would be lost with a process that dies.
            try:
                while waiting and len(running) < jobs:
                    running[pool.submit(compile_unit, waiting[0])] = waiting[0]
                    waiting.pop(0)
            except BrokenProcessPool:
                yield from (Outcome(unit, Result.FAILED) for unit in waiting)
                waiting.clear()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit = running.pop(future)
                error = future.exception()
                if error is None:
                    yield future.result()
                elif isinstance(error, BrokenProcessPool):
                    yield Outcome(unit, Result.FAILED)
                else:
                    yield Outcome(unit, Result.FAILED, error=one_line(error))


def compile_unit(unit: Unit) -> Outcome:
    """In a process of its own, whose only work this is."""
    started, before = time.perf_counter(), len(compiles.events)
    try:
        unit.compile()
    except Exception as error:  # CuTe DSL's errors cannot all be pickled
        return Outcome(unit, Result.FAILED, time.perf_counter() - started, error=one_line(error))
    events = compiles.events[before:]
    result = Result.COMPILED if any(event.source is Source.COMPILER for event in events) else Result.PRESENT
    size = sum(event.size_bytes for event in events)
    return Outcome(unit, result, time.perf_counter() - started, size)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
