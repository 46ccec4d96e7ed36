# SPDX-License-Identifier: Apache-2.0
"""Happens-before by vector clocks (Lamport, 1978; Mattern, 1989; FastTrack: Flanagan and Freund, 2009).

Every source of events has a component: a warp's ordinary accesses, its accesses to tensor memory, and each means by
which asynchronous work completes: an mbarrier's phases, a warp's bulk, cp.async and wgmma groups. An access is stamped
(component, clock): for a warp its current clock, for asynchronous work the phase or group that completes it. An agent
knows of a stamped access when its vector holds that clock or a later one for that component.

What an agent knows is kept three times, since knowing of a generic write is not enough for every engine:

- `seen`: ordered before the agent's next ordinary access.
- `fenced`: ordered before its next access by the async proxy; generic accesses join it at fence.proxy.async.
- `tensor`: ordered before its next tcgen05 access; joins `seen` at tcgen05.fence::after_thread_sync.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.int32]


class Source(enum.Enum):
    """Whose events a component counts."""

    WARP = "warp"
    TENSOR = "tcgen05 accesses of a warp"
    MBARRIER = "mbarrier"
    BULK_GROUP = "bulk async-groups of a warp"
    COPY_GROUP = "cp.async groups of a warp"
    MATRIX_GROUP = "wgmma groups of a warp"


# Components whose accesses the async proxy makes: they need no proxy fence before another access of that proxy.
ASYNC_PROXY = frozenset({Source.MBARRIER, Source.BULK_GROUP, Source.MATRIX_GROUP})


class Components:
    """The components of CTAs that run together.

    Args:
        capacity: most components; vectors have this length.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.names: list[str] = []
        self.sources: list[Source] = []
        self.is_async = np.zeros(capacity, dtype=np.bool_)

    def new(self, source: Source, name: str) -> int:
        """A component's index.

        Raises:
            MemoryError: there are `capacity` of them already.
        """
        index = len(self.names)
        if index == self.capacity:
            raise MemoryError(f"more than {self.capacity} warps, barriers and groups run together")
        self.names.append(name)
        self.sources.append(source)
        self.is_async[index] = source in ASYNC_PROXY
        return index

    def zeros(self) -> Vector:
        # Clock 0 is "never": stamps start at 1.
        return np.zeros(self.capacity, dtype=np.int32)


@dataclass
class Knowledge:
    """What an agent, or the release of a barrier, knows; see the module."""

    seen: Vector
    fenced: Vector
    tensor: Vector

    @classmethod
    def none(cls, components: Components) -> "Knowledge":
        return cls(components.zeros(), components.zeros(), components.zeros())

    def copy(self) -> "Knowledge":
        return Knowledge(self.seen.copy(), self.fenced.copy(), self.tensor.copy())

    def join(self, other: "Knowledge") -> None:
        """Learn all that the other knows."""
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        np.maximum(self.tensor, other.tensor, out=self.tensor)

    def learn(self, component: int, clock: int) -> None:
        """Learn of one component's events up to a clock."""
        for vector in (self.seen, self.fenced):
            vector[component] = max(int(vector[component]), clock)


@dataclass
class Clock:
    """An agent's own time and what it knows.

    Attributes:
        component: its own.
        tensor_component: of its tcgen05 accesses.
    """

    components: Components
    component: int
    tensor_component: int
    knows: Knowledge = field(init=False)
    now: int = 1
    tensor_now: int = 1
    _exported: int = 0

    def __post_init__(self) -> None:
        self.knows = Knowledge.none(self.components)
        self._tick()

    def _tick(self) -> None:
        self.knows.seen[self.component] = self.now
        self.knows.tensor[self.tensor_component] = self.tensor_now

    def release(self, into: Knowledge) -> None:
        """Hand everything that happened so far to whoever acquires from `into`; later events have a later clock.

        Of the agent's own tcgen05 accesses only those before its last tcgen05.fence::before_thread_sync go along.
        """
        np.maximum(into.seen, self.knows.seen, out=into.seen)
        np.maximum(into.fenced, self.knows.fenced, out=into.fenced)
        into.seen[self.tensor_component] = max(int(into.seen[self.tensor_component]), self._exported)
        self.now += 1
        self._tick()

    def acquire(self, released: Knowledge) -> None:
        """Learn what was released; tcgen05 accesses are ordered after it only from the next after_thread_sync fence."""
        np.maximum(self.knows.seen, released.seen, out=self.knows.seen)
        np.maximum(self.knows.fenced, released.fenced, out=self.knows.fenced)

    def proxy_fence(self) -> None:
        """fence.proxy.async: generic accesses known so far are ordered before later ones of the async proxy."""
        np.maximum(self.knows.fenced, self.knows.seen, out=self.knows.fenced)
        self.now += 1
        self._tick()

    def before_thread_sync(self) -> None:
        """tcgen05.fence::before_thread_sync: own tcgen05 accesses go along with the next release."""
        self._exported = self.tensor_now
        self.tensor_now += 1
        self._tick()

    def after_thread_sync(self) -> None:
        """tcgen05.fence::after_thread_sync: what was acquired is ordered before later tcgen05 accesses."""
        own = self.tensor_component
        mine = self.knows.tensor[own]
        np.maximum(self.knows.tensor, self.knows.seen, out=self.knows.tensor)
        self.knows.tensor[own] = mine

    def async_order(self) -> Vector:
        """What is ordered before an async-proxy access issued now: fenced generic accesses, known asynchronous ones."""
        return np.where(self.components.is_async, self.knows.seen, self.knows.fenced)
