# SPDX-License-Identifier: Apache-2.0
"""Starts the candidate's process, talks to it, and ends it.

It has an environment of few variables, its own cache and home folder, no network where that is permitted, and limits on
its time and memory. What it starts, in whatever session, counts as it does and ends with it (`descendants`). This stops
mistakes and lazy tricks; it is no sandbox for malware.
"""

import contextlib
import json
import os
import pathlib
import secrets
import select
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

import torch

from ..processes import ROOT
from . import descendants

# Variables that compilers and drivers need; everything else stays with the judge.
KEPT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LANG",
    "LC_ALL",
    "VIRTUAL_ENV",
    "CC",
    "CXX",
    "TRITON_INTERPRET",
    "PYTHONPATH",
)
KEPT_PREFIXES = ("CUDA", "NVIDIA_", "NV_")
POLL_SECONDS = 0.05
LAST_WORDS = 400
MOST_REPLY_BYTES = 1 << 20
STOP_SECONDS = 10.0
EMULATOR_CACHE = "cute-dsl-emulator"


@dataclass(frozen=True)
class Limits:
    """Of a candidate's process and all that it starts.

    Attributes:
        seconds: of one request: importing, preparing (compiling), or a launch.
        memory_bytes: of their memory, without files that they map and the judge's tensors.
        gpu_bytes: of a GPU's memory, without the judge's tensors; 0 where it does not run on a GPU.
    """

    seconds: float
    memory_bytes: int
    gpu_bytes: int = 0


class Stopped(Exception):
    """The candidate's process did not answer: it ended, was too slow, or had too much memory."""


class Failed(Exception):
    """The candidate raised."""


@dataclass(frozen=True)
class Isolation:
    """How a candidate's process is kept apart.

    Attributes:
        command: what its command begins with.
        network: why it has none.
        processes: what ends the processes that it starts.
    """

    command: tuple[str, ...]
    network: str
    processes: str


@cache
def isolation(on_gpu: bool) -> Isolation:
    """The best that is permitted.

    Args:
        on_gpu: a process in a PID namespace of its own cannot open the handles of a GPU's memory.
    """
    pids = () if on_gpu else ("--pid", "--fork", "--kill-child", "--mount-proc")
    for more in dict.fromkeys((pids, ())):
        for network in ("-n", "-rn"):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                command = ("unshare", network, *more)
                subprocess.run([*command, "true"], check=True, capture_output=True, timeout=STOP_SECONDS)
                return Isolation(command, f"unshare {network}", "unshare --pid" if more else "a parent process")
    return Isolation((), "sockets blocked", "a parent process")


def environment(folder: pathlib.Path) -> dict[str, str]:
    """A candidate's variables: every cache is in its own folder."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    path = os.pathsep.join([str(ROOT), *([kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [])])
    caches = {
        "HOME": "home",
        "TMPDIR": "tmp",
        "XDG_CACHE_HOME": "cache",
        "DSL_BACKEND_CACHE_DIR": "cache/dsl",
        "TRITON_CACHE_DIR": "cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
        "CUDA_CACHE_PATH": "cache/cuda",
        "CUTE_DSL_CACHE_DIR": "cache/cute",
        "TILELANG_CACHE_DIR": "cache/tilelang",
    }
    for name in caches.values():
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    # The emulator's own library takes seconds to build: a copy, which the candidate cannot change for others.
    built = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / EMULATOR_CACHE
    if built.is_dir():
        shutil.copytree(built, folder / "cache" / EMULATOR_CACHE, dirs_exist_ok=True)
        (folder / "cache" / EMULATOR_CACHE).chmod(0o700)
    fixed = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {**kept, **{name: str(folder / place) for name, place in caches.items()}, **fixed}


def command_of(requests: int, replies: int, limits: Limits) -> list[str]:
    """What runs a candidate's process between two ends of pipes."""
    isolated = isolation(limits.gpu_bytes > 0)
    network = "open" if isolated.command else "block"
    ends = (str(requests), str(replies))
    # Alone and without site-packages, so that it takes milliseconds to start.
    parent = [sys.executable, "-I", "-S", str(pathlib.Path(descendants.__file__)), *ends]
    child = [sys.executable, "-m", f"{__package__}.child", *ends, network, str(limits.gpu_bytes)]
    return [*isolated.command, *parent, *child]


class Process:
    """A candidate's process, ended with the block."""

    def __init__(self, folder: pathlib.Path, limits: Limits) -> None:
        self.limits = limits
        self.log = folder / "log"
        self._environment = environment(folder)
        requests, self._send = os.pipe()
        self._receive, replies = os.pipe()
        self._others_at_start = memory_of_others() if limits.gpu_bytes else 0
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command_of(requests, replies, limits),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=folder,
                pass_fds=(requests, replies),
                start_new_session=True,
            )
        os.close(requests)
        os.close(replies)
        self._rest = b""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process and all that it started."""
        if self._send == -1:
            return
        os.close(self._send)
        self._send = -1
        # The parent sees the closed pipe, and ends and waits for all: so their CPU time counts as the judge's.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        # A candidate may have ended or stopped its parent.
        descendants.end(self._family)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        descendants.end(self._family)
        os.close(self._receive)
        self._receive = -1

    def _family(self) -> set[int]:
        """What is left of the process and of all that it started."""
        # The number of a process that was waited for may be another one's by now.
        known = descendants.living(self.process.pid) if self.process.poll() is None else set()
        return known | descendants.with_variable("HOME", self._environment["HOME"]) - {self.process.pid}

    def work(self) -> str | None:
        """What its processes do though nothing is asked of them."""
        return descendants.work_of(self.process.pid)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            Failed: the candidate raised.
            Stopped: its process does not answer any more.
        """
        ticket = secrets.token_hex(8)
        line = json.dumps({"ticket": ticket, "do": do, **arguments}) + "\n"
        try:
            os.write(self._send, line.encode())
        except OSError:
            raise self.stopped(None) from None
        answer = self._answer(ticket, time.monotonic() + self.limits.seconds)
        if "error" in answer:
            raise Failed(str(answer["error"]))
        return answer

    def _answer(self, ticket: str, until: float) -> dict[str, Any]:
        """The next line with the ticket; others were not written by the harness and mean nothing."""
        while True:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                with contextlib.suppress(ValueError, AttributeError):
                    answer: dict[str, Any] = json.loads(line)
                    if answer.get("ticket") == ticket:
                        return answer
                continue
            ready, _, _ = select.select([self._receive], [], [], POLL_SECONDS)
            if ready:
                piece = os.read(self._receive, 1 << 16)
                if not piece or len(self._rest) > MOST_REPLY_BYTES:
                    raise self.stopped(None)
                self._rest += piece
            elif time.monotonic() > until:
                raise self.stopped(f"did not answer within {self.limits.seconds:g} s")
            else:
                self.check_limits()

    def check_limits(self) -> None:
        """Looks at what is taken now: a request that is answered at once is not looked at while it runs.

        Raises:
            Stopped: it is too much, or the process has ended.
        """
        if self.process.poll() is not None:
            raise self.stopped(None)
        if (used := descendants.memory_of(self.process.pid)) > self.limits.memory_bytes:
            raise self.stopped(f"has {used >> 20} MiB of memory; the limit is {self.limits.memory_bytes >> 20}")
        if (used := self.gpu_memory()) > self.limits.gpu_bytes:
            raise self.stopped(f"has {used >> 20} MiB of GPU memory; the limit is {self.limits.gpu_bytes >> 20}")

    def gpu_memory(self) -> int:
        """Bytes of the GPU that were taken since the process started, by it or by another program; 0 without a GPU."""
        return memory_of_others() - self._others_at_start if self.limits.gpu_bytes else 0

    def stopped(self, why: str | None) -> Stopped:
        """Ends the process; returns what is to be said of it."""
        if why is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        self.stop()
        words = " ".join(self.log.read_text(errors="replace")[-LAST_WORDS:].split())
        return Stopped(why or f"ended with exit status {self.process.returncode}{f': {words}' if words else ''}")


def memory_of_others() -> int:
    """Bytes of the current GPU's memory that are not free and not of this process's tensors.

    The driver says how much is free. It names the processes that have the rest only outside of containers.
    """
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
