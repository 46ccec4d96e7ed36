# SPDX-License-Identifier: Apache-2.0
"""A process that compiles precompile specs for another one: both sides of it.

It is a new interpreter and not a child of `multiprocessing`: such a child runs the parent's main module again, and a
daemonic process, as vLLM's workers are, may not have children. The process sees no GPU, prints nothing on standard
output, leaves Ctrl-C to its parent, and ends when its parent ends. It may have a lower priority than its parent.
"""

import contextlib
import ctypes
import enum
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any, BinaryIO

from dsl_backend import envs
from dsl_backend.runtime.compiles import Source, compiles

# An option of prctl: the signal that a process gets when the thread that started it ends.
PR_SET_PDEATHSIG = 1
# How much of a dead process's output is reported.
TAIL_BYTES = 2000
CODE = (
    "import sys; sys.path[:] = {path!r}; "
    "from dsl_backend.runtime.compile_process import serve; serve({parent}, {niceness})"
)


class Result(enum.Enum):
    COMPILED = "compiled"
    PRESENT = "present"
    # Compiled, but not on disk: the next process compiles it again.
    UNKEPT = "not kept"
    FAILED = "failed"


class CompileProcess:
    """The parent's side. A thread that starts one must outlive it. Raises OSError: no process can be started.

    Args:
        niceness: added to that of the thread that starts it.
    """

    def __init__(self, niceness: int = 0) -> None:
        code = CODE.format(path=sys.path, parent=os.getpid(), niceness=niceness)
        # In memory: the folder of temporary files may be full.
        self._said = os.memfd_create("compile-process")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
            )
        except OSError:
            os.close(self._said)
            raise

    def fileno(self) -> int:
        """The descriptor of the pipe with the answers, for `selectors`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def give(self, pickled: bytes) -> None:
        """Send it a spec to compile; a process that has died is noticed when its answer is read."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(pickled, self._process.stdin)
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """The answer to a spec, when it arrives; None if the process died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def epitaph(self) -> str:
        """How a dead process ended, and the last line of its output."""
        status = self._process.wait()
        ended = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        size = os.fstat(self._said).st_size
        text = os.pread(self._said, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace").strip()
        return f"{ended}: {text.splitlines()[-1]}" if text else ended

    def close(self) -> None:
        """Kill the process and close its pipes."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self._process.wait()
        os.close(self._said)


def serve(parent: int, niceness: int) -> None:
    """The child's side: compile each spec that arrives, until the parent ends."""
    be_nice(niceness)
    envs.hide_gpus()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)
    answers = os.fdopen(os.dup(1), "w")
    # Output that libraries print must not mix with the answers.
    os.dup2(2, 1)
    given: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read, args=(sys.stdin.buffer, given), daemon=True).start()

    while True:
        answers.write(json.dumps(answer_to(given.get())) + "\n")
        answers.flush()


def answer_to(pickled: bytes) -> dict[str, Any]:
    """The answer of a process: `Outcome` without the spec, in JSON's types."""
    started, before = time.perf_counter(), len(compiles.events)
    try:
        pickle.loads(pickled).compile()
    except Exception as error:  # some errors of CuTe DSL cannot be pickled
        seconds = time.perf_counter() - started
        return {"result": Result.FAILED.value, "seconds": seconds, "size_bytes": 0, "error": one_line(error)}
    events = compiles.events[before:]
    unkept = next((event.unkept for event in events if event.unkept is not None), None)
    new = any(event.source is Source.COMPILER for event in events)
    result = Result.UNKEPT if unkept is not None else Result.COMPILED if new else Result.PRESENT
    return {
        "result": result.value,
        "seconds": time.perf_counter() - started,
        "size_bytes": sum(event.size_bytes for event in events if event.unkept is None),
        "error": unkept,
    }


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def read(pipe: BinaryIO, given: "queue.SimpleQueue[bytes]") -> None:
    """Queue the specs that the parent sends. The end of the pipe means that the parent has ended: exit."""
    try:
        while True:
            given.put(pickle.load(pipe))
    except (EOFError, OSError, pickle.UnpicklingError):
        os._exit(0)


def be_nice(niceness: int) -> None:
    """Lower this thread's priority; Linux gives it to the threads and processes that it starts later."""
    with contextlib.suppress(OSError, AttributeError):  # not every system has priorities
        os.nice(niceness)


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends. The pipe's end is not noticed during a compilation."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
