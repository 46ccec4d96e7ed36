# SPDX-License-Identifier: Apache-2.0
"""Checks and timings in a process of their own, which a kernel may hang, crash or leave without a device."""

import enum
import importlib
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from dsl_backend.errors import Unsupported, by_reason
from dsl_backend.testing import fuzz, tables

# After which a problem is given up; compiling its kernel is most of it.
PROBLEM_SECONDS = 300.0
# Of one kernel and family, before it is left: each costs a process, and up to as long.
MOST_LOST = 3
# For a killed process to let go of the device.
STOP_SECONDS = 60.0
LAST_WORDS = 600


class Status(enum.Enum):
    """What came of a problem."""

    RIGHT = "right"
    REFUSED = "refused"  # the kernel says that it does not serve it
    WRONG = "wrong"
    ERROR = "error"  # it raised
    HUNG = "hung"
    CRASHED = "crashed"
    NOT_RUN = "not run"  # after too many that hung or crashed

    @property
    def failed(self) -> bool:
        return self not in (Status.RIGHT, Status.REFUSED)


@dataclass(frozen=True)
class Outcome:
    """Of one problem. `lost`: the process cannot continue after it."""

    name: str
    status: Status
    message: str = ""
    seconds: float = 0.0
    lost: bool = False


def check(family: str, kernel: str, name: str, device: str) -> Outcome:
    """Run a problem, and say how it went; never raises."""
    began, status, message = time.perf_counter(), Status.RIGHT, ""
    try:
        fuzz.check(tables.find(family, name, device), kernel, device)
        if device == "cuda":
            torch.cuda.synchronize()
    except Unsupported as error:
        status, message = Status.REFUSED, "; ".join(by_reason(error.objections))
    except AssertionError as error:
        status, message = Status.WRONG, str(error)
    except Exception as error:  # a kernel may raise anything
        status, message = Status.ERROR, f"{type(error).__name__}: {error}"
    if status.failed and tables.RANDOM.fullmatch(name):
        message += f"\n  {fuzz.source(tables.find(family, name, device))}"
    lost = status is Status.ERROR and device == "cuda" and not device_answers()
    return Outcome(name, status, message, time.perf_counter() - began, lost)


def device_answers() -> bool:
    """Whether the GPU still does what it is asked: after a fault nothing can be believed."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def check_all(sender: Connection, family: str, kernel: str, names: Sequence[str], device: str) -> None:
    """The child's part of `checks`: sends one outcome after another."""
    for name in names:
        outcome = check(family, kernel, name, device)
        sender.send(outcome)
        if outcome.lost:
            return
        if device == "cuda":
            torch.cuda.empty_cache()


def time_rows(sender: Connection, benchmarks: str, op: str, path: pathlib.Path, options: dict[str, Any]) -> None:
    """The child's part of timing: rows go to the file; sends the exit status of the benchmark."""
    module = importlib.import_module(benchmarks)
    sender.send(module.main(op, path, module.Options(**options)))


def begin(work: Callable[..., None], sender: Connection, log: pathlib.Path, arguments: tuple[Any, ...]) -> None:
    """First function of a child: what compilers and kernels print goes to the log."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    work(sender, *arguments)


class Child:
    """A process at work, ended with the block.

    Args:
        work: function of a module; gets a connection to send through, then the arguments.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="dsl-backend-")
        self.log = pathlib.Path(self.folder.name) / "log"
        self.log.touch()
        spawn = multiprocessing.get_context("spawn")
        self.receiver, sender = spawn.Pipe(duplex=False)
        self.process = spawn.Process(target=begin, args=(work, sender, self.log, arguments))
        self.process.start()
        # Now the child's end is the only one: its death is the end of what can be received.
        sender.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A kernel that hangs holds the device until its process is gone.
        self.process.kill()
        self.process.join(STOP_SECONDS)
        self.receiver.close()
        self.folder.cleanup()

    def receive(self, seconds: float) -> Any:
        """What it sends next.

        Raises:
            TimeoutError: nothing came in that time.
            EOFError: it ended; the message has its last words.
        """
        if not self.receiver.poll(seconds):
            raise TimeoutError(f"not done after {seconds:.0f} s")
        try:
            return self.receiver.recv()
        except EOFError:
            self.process.join(STOP_SECONDS)
            raise EOFError(f"exit status {self.process.exitcode}: {self.last_words()}") from None

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-LAST_WORDS:].strip()


def checks(
    family: str, kernel: str, names: Sequence[str], device: str, problem_seconds: float = PROBLEM_SECONDS
) -> Iterator[Outcome]:
    """Outcomes of all problems, in their order, whatever becomes of the processes that run them."""
    left, lost = deque(names), 0
    while left and lost < MOST_LOST:
        with Child(check_all, family, kernel, tuple(left), device) as child:
            while left:
                outcome = received(child, left.popleft(), problem_seconds)
                yield outcome
                if outcome.lost:
                    lost += 1
                    break
    for name in left:
        yield Outcome(name, Status.NOT_RUN, f"{MOST_LOST} problems before it ended their process")


def received(child: Child, name: str, seconds: float) -> Outcome:
    """What a child says of a problem, or what is to be said of the child."""
    try:
        outcome: Outcome = child.receive(seconds)
    except TimeoutError as error:
        return Outcome(name, Status.HUNG, str(error), seconds, lost=True)
    except EOFError as error:
        return Outcome(name, Status.CRASHED, str(error), lost=True)
    return outcome
