# SPDX-License-Identifier: Apache-2.0
"""A process and all that it starts, in whatever session: what they have, what they do, and their end.

As a program, `descendants.py REQUESTS REPLIES COMMAND...` is the parent of a candidate's process. The system gives it
the orphans among its descendants, so that none leaves its tree. When the command ends, or the judge closes its end of
the pipe REQUESTS, they all end. It runs without the package and without torch, and takes milliseconds to start.
"""

import contextlib
import ctypes
import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PROC = pathlib.Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
END_SECONDS = 10.0
PAUSE_SECONDS = 0.005
# An honest process may still start or end helpers when it has answered: workers that compile import torch for seconds.
WINDOWS = 40
WINDOW_SECONDS = 0.25
# Of one CPU. A thread that polls takes less.
BUSY = 0.1
MOST_NAMES = 3


class One(NamedTuple):
    """A process.

    Attributes:
        state: as in /proc; Z is one that has ended.
        seconds: of CPU time, with the children that it has waited for.
    """

    pid: int
    name: str
    state: str
    parent: int
    session: int
    seconds: float

    @property
    def has_ended(self) -> bool:
        return self.state in "ZX"


def everyone() -> list[One]:
    """All processes that /proc shows."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The command's name is in brackets, and may have some itself.
                head, _, tail = (entry / "stat").read_text(errors="replace").rpartition(")")
                part = tail.split()
                facts = part[0], int(part[1]), int(part[3]), sum(map(int, part[11:15])) / TICKS
                found.append(One(int(entry.name), head.partition("(")[2], *facts))
    return found


def tree(root: int) -> dict[int, One]:
    """A process, its children, theirs, and so on, by number; with those that have ended and were not waited for."""
    everything = everyone()
    children: dict[int, list[One]] = {}
    for one in everything:
        children.setdefault(one.parent, []).append(one)
    found, ahead = {}, [one for one in everything if one.pid == root]
    while ahead:
        one = ahead.pop()
        found[one.pid] = one
        ahead += children.pop(one.pid, [])
    return found


def living(root: int) -> set[int]:
    """The descendants of a process that have not ended."""
    return {pid for pid, one in tree(root).items() if pid != root and not one.has_ended}


def with_variable(name: str, value: str) -> set[int]:
    """Processes that were started with an environment variable, whoever their parents are."""
    wanted = f"{name}={value}".encode()
    found = set()
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def memory_of(root: int) -> int:
    """Bytes of anonymous memory of a process and its descendants."""
    total = 0
    for pid in {root} | living(root):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (PROC / str(pid) / "status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) << 10
    return total


def work_of(root: int) -> str | None:
    """What a process and its descendants do though nothing is asked of them; None once they rest for a window.

    Args:
        root: leads the session that they are expected in.
    """
    first = last = tree(root)
    for _ in range(WINDOWS):
        time.sleep(WINDOW_SECONDS)
        now = tree(root)
        # Of all together, with children that have ended: a process may follow another one.
        if cpu_seconds(now) - cpu_seconds(last) < BUSY * WINDOW_SECONDS:
            return None
        last = now
    spent = {pid: one.seconds - (first[pid].seconds if pid in first else 0.0) for pid, one in last.items()}
    busiest = [last[pid] for pid in sorted(spent, key=lambda pid: -spent[pid]) if spent[pid] >= BUSY * WINDOW_SECONDS]
    names = [one.name if one.session == root else f"{one.name}, in another session" for one in busiest[:MOST_NAMES]]
    seconds = cpu_seconds(last) - cpu_seconds(first)
    return f"{seconds:.1f} s of CPU time in {WINDOWS * WINDOW_SECONDS:g} s ({'; '.join(names)})"


def cpu_seconds(processes: dict[int, One]) -> float:
    return sum(one.seconds for one in processes.values())


def end(find: Callable[[], Iterable[int]], seconds: float = END_SECONDS) -> None:
    """Ends processes until none is found, or the time is over.

    A process that is stopped starts no other one. So all are stopped before the first one is ended.
    """
    until = time.monotonic() + seconds
    while (found := list(find())) and time.monotonic() < until:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        time.sleep(PAUSE_SECONDS)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def started(command: list[str]) -> int:
    """The process of a command, which ends with this one."""
    pid = os.fork()
    if pid == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            os.execv(command[0], command)
        finally:
            os._exit(127)
    return pid


def reaped(child: int) -> int | None:
    """Takes leave of all processes that have ended; returns the child's exit status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                status = os.waitstatus_to_exitcode(found[1])
    return status


def main() -> None:
    requests, replies, *command = sys.argv[1:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A byte in the pipe for each child that ends.
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    child = started(command)
    # The judge sees that no process can answer any more.
    os.close(int(replies))
    waiting = select.poll()
    # No requests are read here: this only tells whether the judge still has the other end.
    waiting.register(int(requests), 0)
    waiting.register(wake, select.POLLIN)
    status = None
    while status is None and all(ready != int(requests) for ready, _ in waiting.poll()):
        with contextlib.suppress(BlockingIOError):
            os.read(wake, 1 << 10)
        status = reaped(child)
    end(lambda: living(os.getpid()))
    # Waits for all of them, so that their CPU time counts as this process's.
    last = reaped(child)
    os._exit(as_shells_have_it(last if status is None else status))


def as_shells_have_it(status: int | None) -> int:
    """An exit status; None: of a process that was not waited for."""
    if status is None:
        return 128
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    main()
