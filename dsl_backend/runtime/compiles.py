# SPDX-License-Identifier: Apache-2.0
"""Counts compilations before and after warm-up: a server should compile nothing while it serves requests."""

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dsl_backend.log import logger


class Phase(enum.Enum):
    WARM_UP = "warm-up"
    SERVING = "serving"


class Source(enum.Enum):
    """Where a function came from."""

    COMPILER = "compiled"
    DISK = "loaded"


@dataclass(frozen=True)
class Event:
    """A function that this process compiled or loaded.

    Attributes:
        kernel: name, key and architecture.
        seconds: duration, including the time spent waiting for other processes.
        size_bytes: of its object file.
        unkept: why the compiled function is not on disk; None if it is.
    """

    kernel: str
    digest: str
    source: Source
    phase: Phase
    seconds: float
    size_bytes: int
    unkept: str | None = None


class Compiles:
    """The events of a process. They belong to warm-up until `end_warmup`, or until the function of `watch` says so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._over: Callable[[], bool] = lambda: False

    @property
    def phase(self) -> Phase:
        return Phase.SERVING if self._over() else Phase.WARM_UP

    def begin_warmup(self) -> None:
        """Begin a warm-up."""
        self._over = lambda: False

    def end_warmup(self) -> None:
        """Warm-up is over: requests are served from now on."""
        self._over = lambda: True

    def watch(self, over: Callable[[], bool]) -> None:
        """Call this function at each compilation, to ask whether warm-up is over."""
        self._over = over

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def count(self, source: Source, phase: Phase) -> int:
        return sum(event.source is source and event.phase is phase for event in self.events)

    @property
    def during_warmup(self) -> int:
        """The number of kernels that were compiled (not read from disk) during warm-up."""
        return self.count(Source.COMPILER, Phase.WARM_UP)

    @property
    def after_warmup(self) -> int:
        """The number of kernels that were compiled while requests were served; it should be 0."""
        return self.count(Source.COMPILER, Phase.SERVING)

    @property
    def loads_after_warmup(self) -> int:
        """The number of kernels that were read from disk while requests were served."""
        return self.count(Source.DISK, Phase.SERVING)

    def record(
        self, kernel: str, digest: str, source: Source, seconds: float, size_bytes: int, unkept: str | None = None
    ) -> Event:
        """Add an event; one that makes requests wait is logged as a warning."""
        event = Event(kernel, digest, source, self.phase, seconds, size_bytes, unkept)
        with self._lock:
            self._events.append(event)
        if event.phase is Phase.SERVING:
            logger.warning(
                "%s %s in %.0f ms after warm-up (key %s): requests wait for it; please report it",
                source.value,
                kernel,
                seconds * 1e3,
                digest,
            )
        elif source is Source.COMPILER:
            logger.info("compiled %s in %.2f s", kernel, seconds)
        else:
            logger.debug("loaded %s in %.1f ms", kernel, seconds * 1e3)
        return event

    def clear(self) -> None:
        """Forget all events, and that warm-up is over."""
        with self._lock:
            self._events.clear()
        self.begin_warmup()


compiles = Compiles()
