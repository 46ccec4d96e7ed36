# SPDX-License-Identifier: Apache-2.0
"""The files that client processes write during a load: samples of requests, and the state of the client itself."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from loadtests.stream import Failure, Sample


@dataclass(frozen=True)
class Tick:
    """The state of a client process, written a few times a second.

    Attributes:
        at: seconds on the machine's monotonic clock.
        cpu_s: processor time of the process so far.
        late_us: how late sleepers of the process's event loop woke up, since the last tick.
        sent, done, failed: requests so far.
        tokens: tokens that arrived so far, including those of unfinished answers.
    """

    at: float
    cpu_s: float
    late_us: list[int] = field(default_factory=list)
    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Process:
    """The records of one client process.

    Attributes:
        started, stopped: when the load began and ended; None if the process did not record it.
        sent: the number of requests that the process counted at the end.
    """

    started: float | None
    stopped: float | None
    sent: int
    samples: list[Sample]
    ticks: list[Tick]


class Writer:
    """Appends a process's lines to its file."""

    def __init__(self, path: Path) -> None:
        self.file: TextIO = path.open("w")

    def sample(self, sample: Sample) -> None:
        self.file.write(sample.to_json() + "\n")

    def add(self, kind: str, **fields: Any) -> None:
        """Writes a line and flushes the file to the disk."""
        self.file.write(json.dumps({"kind": kind, **fields}, separators=(",", ":")) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file that may still grow."""
    for line in path.read_text().split("\n")[:-1]:
        yield json.loads(line)


def read(path: Path) -> Process:
    """The records of a process. Requests that were sent and have no result are samples with the failure LOST."""
    samples: list[Sample] = []
    ticks: list[Tick] = []
    started = stopped = None
    sent = 0
    for line in lines(path):
        kind = line.pop("kind")
        if kind == "sample":
            samples.append(Sample(**line))
        elif kind == "tick":
            ticks.append(Tick(**line))
            sent = max(sent, line["sent"])
        elif kind == "start":
            started = line["at"]
        elif kind == "stop":
            stopped, sent = line["at"], line["sent"]
    for _ in range(sent - len(samples)):
        lost = Sample(sent=ticks[-1].at if ticks else started or 0.0, output=0)
        lost.fail(Failure.LOST, f"{path.name} ends without it")
        samples.append(lost)
    return Process(started, stopped, sent, samples, ticks)


def read_all(folder: Path) -> list[Process]:
    return [read(path) for path in sorted(folder.glob("*.jsonl"))]


def last_ticks(folder: Path) -> list[Tick]:
    """The latest tick of every process, for progress. Reads only the ends of the files."""
    ticks = []
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - (1 << 16)))
            tail = file.read().split(b"\n")[:-1]
        found = [line for line in tail if line.startswith(b'{"kind":"tick"')]
        if found:
            fields = json.loads(found[-1])
            del fields["kind"]
            ticks.append(Tick(**fields))
    return ticks
