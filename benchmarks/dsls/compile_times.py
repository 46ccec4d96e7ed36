# SPDX-License-Identifier: Apache-2.0
"""How long a DSL needs until a kernel's first result, with empty caches and with those of an earlier process.

Each measurement is a process of its own (`compile_child`), whose caches are in a folder of its own. The clock starts
when torch, the benchmarks and the device are ready, so imports of a DSL are part of the time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsl_backend.runtime import machine

from ..case import Case, Provider
from ..judge.process import environment
from ..processes import stop_group

KIND = "compile"
# Cores for each process: compilers start threads and processes of their own.
CORES_EACH = 2
STOP_SECONDS = 2.0
LAST_WORDS = 300


@dataclass(frozen=True)
class Task:
    """A provider's kernel of one row of an operator."""

    operator: str
    case: Case[Any]
    provider: Provider[Any, Any]

    def record(self, **found: object) -> dict[str, Any]:
        """A line of the JSON: status `ok` with seconds, or `skipped`, `error` or `stopped` with a message.

        `warm_s` is None where there was no time for it.
        """
        facts = {"operator": self.operator, "id": self.case.id, "provider": self.provider.name}
        return {"kind": KIND, **facts, **found}


def run(tasks: Sequence[Task], device: str, until: float | None = None) -> Iterator[dict[str, Any]]:
    """The record of each task, as soon as it is known.

    Args:
        until: the `time.monotonic()` at which processes are stopped.
    """
    waiting = []
    for task in tasks:
        if objections := task.provider.objections(task.case.problem):
            yield task.record(status="skipped", message="; ".join(objections))
        else:
            waiting.append(task)
    with ThreadPoolExecutor(max(1, machine.cores() // CORES_EACH)) as pool:
        for done in as_completed([pool.submit(measured, task, device, until) for task in waiting]):
            yield done.result()


def measured(task: Task, device: str, until: float | None) -> dict[str, Any]:
    """Runs a task twice, in a folder that is empty at first. A first run without a second one has a message."""
    # What a compiler left running may still write while the folder is removed.
    with tempfile.TemporaryDirectory(prefix="dsl-backend-compile-", ignore_cleanup_errors=True) as name:
        cold = asked(task, device, Path(name), until)
        if "seconds" not in cold:
            return task.record(**cold)
        warm = asked(task, device, Path(name), until)
    message = {} if "seconds" in warm else {"message": f"warm: {warm['message']}"}
    return task.record(status="ok", cold_s=cold["seconds"], warm_s=warm.get("seconds"), **message)


def asked(task: Task, device: str, folder: Path, until: float | None) -> dict[str, Any]:
    """What the child says: `seconds`, or a status and a message."""
    left = None if until is None else until - time.monotonic()
    if left is not None and left <= 0:
        return {"status": "stopped", "message": "no time was left"}
    command = [sys.executable, "-m", f"{__package__}.compile_child", task.operator, task.case.id, task.provider.name]
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, device],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **environment(folder), "OMP_NUM_THREADS": str(os.cpu_count() or 1)},
            cwd=folder,
            start_new_session=True,
        )
    try:
        output, _ = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        return {"status": "stopped", "message": "it was not ready in time"}
    finally:
        stop_group(process, wait_s=STOP_SECONDS)
        if process.stdout is not None:
            process.stdout.close()
    lines = output.decode(errors="replace").splitlines()
    if process.returncode or not lines:
        words = " ".join(log.read_text(errors="replace").split())[-LAST_WORDS:]
        return {"status": "error", "message": f"its process ended with status {process.returncode}: {words}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found
