# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of a model before it is served, in parallel, on a machine with or without a GPU.

An operator family lists its kernels for a model and a target as precompile specs. A spec can be pickled: `run` sends
specs to processes that see no GPU, and these write the compiled kernels to the disk cache. The command line waits for
them; `Ahead` compiles in the background, for example while weights load.
"""

import hashlib
import pickle
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsl_backend.errors import InvalidInput
from dsl_backend.log import logger
from dsl_backend.runtime import cache, machine, toolkit
from dsl_backend.runtime import compile as compilation
from dsl_backend.runtime.cache import DiskCache
from dsl_backend.runtime.compile_process import CompileProcess, Result, one_line
from dsl_backend.runtime.key import stable
from dsl_backend.runtime.target import Target

# Memory of a process that compiles: torch, CuTe DSL and a large kernel.
PROCESS_BYTES = 1 << 30
# The shortest time between two lines of progress.
PROGRESS_S = 5.0
# What is added to the niceness of processes that compile ahead. Where cores are short, Linux gives a thread whose
# niceness is larger by 10 a ninth of the other's time.
AHEAD_NICENESS = 10


@dataclass(frozen=True)
class PrecompileSpec:
    """A kernel to compile.

    Attributes:
        family: its operator family.
        build: `build(key, target)` calls `compile_kernel`; a function of a module, so that it can be pickled.
        key: the kernel's key.
    """

    family: str
    build: Callable[[Any, Target], Any]
    key: Any
    target: Target

    def __str__(self) -> str:
        return f"{self.family}: {stable(self.key)} for {self.target.arch}"

    def compile(self) -> Any:
        """The function: from memory, from disk, or compiled."""
        return self.build(self.key, self.target)


@dataclass(frozen=True)
class Outcome:
    """The result of compiling one spec.

    Attributes:
        seconds: in the process that compiled it.
        size_bytes: of its object files on disk.
        error: one line, where it failed or was not kept.
    """

    spec: PrecompileSpec
    result: Result
    seconds: float = 0.0
    size_bytes: int = 0
    error: str | None = None


def processes(count: int, spare: int = 0) -> int:
    """How many processes to use for `count` specs: one for each core that this process may use, if memory suffices.

    Args:
        spare: cores to leave to others.
    """
    room = machine.available_bytes() // PROCESS_BYTES
    return max(1, min(count, machine.cores() - spare, room))


def run(todo: Sequence[PrecompileSpec], jobs: int | None = None) -> Iterator[Outcome]:
    """Compile specs in parallel; yields the outcome of each as soon as it is known.

    A spec that fails, or whose process dies, does not affect the others.

    Args:
        jobs: processes; by default one for each core.

    Raises:
        InvalidInput: CuTe DSL is not installed, the disk cache, where the results go, cannot be used, or no process can
            be started.
    """
    toolkit.require()
    try:
        cache.open_cache()
    except cache.Rejected as reason:
        raise InvalidInput(f"nothing compiled could be kept in {cache.folder()}: {reason}") from None
    try:
        yield from Pool(jobs or processes(len(todo))).outcomes(deque(todo))
    except OSError as error:
        raise InvalidInput(f"no process to compile in: {cache.reason_of(error)}") from None


class Pool:
    """Processes that compile specs: at most `jobs`, each started when there is a spec for it.

    Args:
        niceness: of the processes, added to that of this one.
    """

    def __init__(self, jobs: int, niceness: int = 0) -> None:
        self.jobs = jobs
        self.niceness = niceness
        self.idle: list[CompileProcess] = []
        self.busy: dict[CompileProcess, PrecompileSpec] = {}
        self.answers = selectors.DefaultSelector()

    def outcomes(self, waiting: "deque[PrecompileSpec]") -> Generator[Outcome, None, None]:
        """The outcome of each spec as soon as it is known; processes end after the last, or when this is closed.

        Args:
            waiting: emptied from the left; another thread may add to it.

        Raises:
            OSError: not one process can be started.
        """
        try:
            while waiting or self.busy:
                while waiting and (process := self.free()) is not None:
                    spec = waiting.popleft()
                    try:
                        pickled = pickle.dumps(spec)
                    except Exception as error:  # pickling may raise anything
                        self.idle.append(process)
                        why = f"cannot be given to another process: {one_line(error)}"
                        yield Outcome(spec, Result.FAILED, error=why)
                        continue
                    process.give(pickled)
                    self.busy[process] = spec
                if self.busy:
                    for key, _ in self.answers.select():
                        yield self.answered(key.fileobj)  # type: ignore[arg-type]
        finally:
            for process in (*self.idle, *self.busy):
                process.close()
            self.answers.close()

    def free(self) -> CompileProcess | None:
        """An idle process, started if there may be one more; None if all are busy."""
        if self.idle:
            return self.idle.pop()
        if len(self.busy) >= self.jobs:
            return None
        try:
            process = CompileProcess(self.niceness)
        except OSError:
            if not self.busy:
                raise
            # Continue with those that were started.
            self.jobs = len(self.busy)
            return None
        self.answers.register(process, selectors.EVENT_READ)
        return process

    def answered(self, process: CompileProcess) -> Outcome:
        """The outcome of the spec that a process compiled; the process is free again, or has died."""
        spec = self.busy.pop(process)
        answer = process.answer()
        if answer is not None:
            self.idle.append(process)
            return Outcome(spec, Result(answer.pop("result")), **answer)
        error = f"its process ended {process.epitaph()}"
        self.answers.unregister(process)
        process.close()
        return Outcome(spec, Result.FAILED, error=error)


def absent(todo: Iterable[PrecompileSpec], disk: DiskCache) -> list[PrecompileSpec]:
    """The specs whose kernels are not on disk, each kernel once; nothing is compiled or loaded."""
    seen: set[str] = set()
    found = []
    for spec in todo:
        try:
            wanted = compilation.identities(spec.compile)
        except Exception as error:  # the launch that needs it compiles it again and reports the error
            logger.debug("%s cannot be looked for: %s", spec, one_line(error))
            continue
        missing = {one.digest for one in wanted if one.reusable and not disk.has(one)} - seen
        if missing:
            seen |= missing
            found.append(spec)
    return found


def claim_of(todo: Iterable[PrecompileSpec]) -> str:
    """The name of the lock of the one process that compiles these specs ahead of their use."""
    return f"{cache.AHEAD}-{hashlib.sha256('; '.join(sorted(map(str, todo))).encode()).hexdigest()[:16]}"


class Ahead:
    """Compiles specs in processes of a lower priority while this one continues; kernels on disk are only looked up.

    A launch that needs a kernel before then finds it on disk, waits for the process that compiles it, or compiles it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._claim = ""
        self._waiting: deque[PrecompileSpec] = deque()
        self._thread: threading.Thread | None = None

    def add(self, todo: Iterable[PrecompileSpec], spare: int = 1, beside: str = "in the background") -> int:
        """Begin to compile what is not on disk; returns the number of these specs.

        Nothing is begun if compiled kernels cannot be kept, or if another process compiles ahead that began with the
        same specs: it serves the same model, and its other kernels are mostly the same too.

        Args:
            spare: cores to leave to this process, and to others like it.
            beside: what this process does in the meantime, for the log.
        """
        new = [spec for spec in todo if str(spec) not in self._seen]
        self._seen |= {str(spec) for spec in new}
        if not new or toolkit.missing() or not toolkit.keeps_files():
            return 0
        self._claim = self._claim or claim_of(new)
        disk = cache.usable()
        if disk is None or not disk.is_writable():
            return 0
        missing = absent(new, disk)
        if not missing:
            return 0
        with self._lock:
            self._waiting.extend(missing)
            # After a fork the parent's thread is not alive.
            if self._thread is None or not self._thread.is_alive():
                # It must outlive the processes that it starts, and must not keep this process from ending.
                self._thread = threading.Thread(
                    target=self._work, args=(disk, spare, beside), name="dsl-compile-ahead", daemon=True
                )
                self._thread.start()
        return len(missing)

    def wait(self) -> None:
        """Return when nothing is being compiled ahead."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self, disk: DiskCache, spare: int, beside: str) -> None:
        try:
            with disk.claim(self._claim) as ours:
                while ours and self._left():
                    self._compile(spare, beside)
        except Exception as error:  # this process then compiles what it needs at its first launch
            logger.warning("kernels are not compiled ahead of their use: %s", one_line(error))
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._waiting.clear()
                    self._thread = None

    def _left(self) -> bool:
        """Whether specs are waiting. If not, the thread ends, and the next `add` starts a new one."""
        with self._lock:
            if not self._waiting:
                self._thread = None
            return bool(self._waiting)

    def _compile(self, spare: int, beside: str) -> None:
        """Compile the waiting specs, and those that are added in the meantime."""
        started = said = time.monotonic()
        jobs = processes(len(self._waiting), spare)
        logger.info("compiling %d kernels in %d processes %s", len(self._waiting), jobs, beside)
        done, failed = 0, []
        pool = Pool(jobs, AHEAD_NICENESS)
        outcomes = pool.outcomes(self._waiting)
        for outcome in outcomes:
            if outcome.result is Result.UNKEPT:
                # Others would not be kept either: this process compiles in memory.
                outcomes.close()
                self._waiting.clear()
                cache.unkept(f"{cache.folder()}: {outcome.error}")
                return
            done += 1
            if outcome.result is Result.FAILED:
                failed.append(f"{outcome.spec}: {outcome.error}")
            left = len(self._waiting) + len(pool.busy)
            if left and time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                logger.info("compiled %d of %d kernels, %d left", done, done + left, left)
        seconds = time.monotonic() - started
        logger.info("compiled %d kernels in %d processes in %.1f s", done - len(failed), jobs, seconds)
        if failed:
            logger.warning("%d of %d kernels were not compiled ahead of their use: %s", len(failed), done, failed[0])


# The one of this process.
ahead = Ahead()
