# SPDX-License-Identifier: Apache-2.0
"""Happens-before by vector clocks (Lamport, 1978; Mattern, 1989; FastTrack: Flanagan and Freund, 2009).

Every source of events has a component: a warp's ordinary accesses, and each means by which asynchronous work
completes: an mbarrier's phases, a warp's bulk, cp.async and wgmma groups, its tcgen05 loads and stores, the tcgen05
operations that it commits. An access is stamped (component, clock): for a warp its current clock, for asynchronous work
the phase, group or number that completes it. An agent knows of a stamped access when its vector holds that clock or a
later one for that component; of its own asynchronous accesses it knows once it has waited for them.

What an agent knows is kept twice, since knowing of a generic write is not enough for every engine:

- `seen`: ordered before the agent's next ordinary access.
- `fenced`: ordered before its next access by the async proxy; generic accesses join it at fence.proxy.async. Of
  tcgen05.ld and .st it is what their warp has handed over by tcgen05.fence::before_thread_sync.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.int32]


class Source(enum.Enum):
    """Whose events a component counts."""

    WARP = "warp"
    MBARRIER = "mbarrier"
    COPY_GROUP = "cp.async groups of a warp"
    BULK_GROUP = "bulk async-groups of a warp"
    BULK_READ = "reads of bulk async-groups of a warp"
    MATRIX_GROUP = "wgmma groups of a warp"
    TENSOR_LOAD = "tcgen05.ld of a warp"
    TENSOR_STORE = "tcgen05.st of a warp"
    TENSOR_PIPE = "tcgen05 operations that a warp commits"


# Accesses to tensor memory that a warp hands over, once it has waited for them, by a fence before it synchronizes.
HANDED = frozenset({Source.TENSOR_LOAD, Source.TENSOR_STORE})
# Accesses of tcgen05: its fence orders those of others, once a barrier was waited for, whatever that acquired.
TENSOR = HANDED | {Source.TENSOR_PIPE}
# Components whose accesses the async proxy makes: they need no proxy fence before another access of that proxy.
ASYNC_PROXY = frozenset({Source.MBARRIER, Source.BULK_GROUP, Source.BULK_READ, Source.MATRIX_GROUP, Source.TENSOR_PIPE})


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
        self.is_handed = np.zeros(capacity, dtype=np.bool_)
        self.is_tensor = np.zeros(capacity, dtype=np.bool_)

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
        self.is_handed[index] = source in HANDED
        self.is_tensor[index] = source in TENSOR
        return index

    def zeros(self) -> Vector:
        # Clock 0 is "never": stamps start at 1.
        return np.zeros(self.capacity, dtype=np.int32)


@dataclass
class Knowledge:
    """What an agent, or the release of a barrier, knows; see the module.

    Attributes:
        foreign: the same as `seen` for the components of other clusters, by their number.
        owner: number of the cluster whose components these are, where it is not plain.
    """

    seen: Vector
    fenced: Vector
    foreign: dict[int, Vector] = field(default_factory=dict)
    owner: int = -1

    @classmethod
    def none(cls, components: Components) -> "Knowledge":
        return cls(components.zeros(), components.zeros())

    def copy(self) -> "Knowledge":
        return Knowledge(self.seen.copy(), self.fenced.copy(), dict(self.foreign))

    def join(self, other: "Knowledge") -> None:
        """Learn all that the other knows."""
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)
        if other.foreign:
            self.join_foreign(other.foreign)

    def join_foreign(self, foreign: dict[int, Vector]) -> None:
        """Learn of other clusters. Vectors in these dictionaries are never written into."""
        for cluster, seen in foreign.items():
            known = self.foreign.get(cluster)
            self.foreign[cluster] = seen if known is None else np.maximum(known, seen)

    def only(self, components: NDArray[np.bool_]) -> "Knowledge":
        """What is known of some components of the own cluster."""
        return Knowledge(np.where(components, self.seen, 0), np.where(components, self.fenced, 0))

    def learn(self, component: int, clock: int, *, generic: bool = False) -> None:
        """Learn of one component's events up to a clock.

        Args:
            generic: they are accesses by the generic proxy: nothing fenced them yet.
        """
        for vector in (self.seen,) if generic else (self.seen, self.fenced):
            vector[component] = max(int(vector[component]), clock)


@dataclass
class Clock:
    """An agent's own time and what it knows.

    Attributes:
        component: its own.
        admitted: accesses to tensor memory that are ordered before its next one by its own waits, and by the fences
            of both sides where others made them.
        history: what came before its next instruction, whatever memory order says: of warps their waits and arrivals at
            mbarriers by number, of mbarriers their phases.
        before_tick: called while the present clock is still that of accesses; only some warps have any, at times.
    """

    components: Components
    component: int
    knows: Knowledge = field(init=False)
    admitted: Vector = field(init=False)
    now: int = 1
    history: Vector = field(init=False)
    before_tick: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.knows = Knowledge.none(self.components)
        self.admitted = self.components.zeros()
        self.history = self.components.zeros()
        self.knows.seen[self.component] = self.now

    @property
    def stamp(self) -> tuple[int, int]:
        """Of an ordinary access now."""
        return self.component, self.now

    def tick(self) -> None:
        """Later accesses have a later clock: whoever knows of this moment does not know of them."""
        for call in tuple(self.before_tick):
            call()
        self.now += 1
        self.knows.seen[self.component] = self.now

    def count_event(self) -> int:
        """One more wait or arrival at an mbarrier; returns its number."""
        self.history[self.component] += 1
        return int(self.history[self.component])

    def follow(self, history: Vector) -> None:
        """What comes next comes after that, too."""
        np.maximum(self.history, history, out=self.history)

    def release(self, into: Knowledge) -> None:
        """Hand everything that happened so far to whoever acquires from `into`; later events have a later clock."""
        into.join(self.knows)
        self.tick()

    def acquire(self, released: Knowledge) -> None:
        """Learn what was released."""
        self.knows.join(released)

    def proxy_fence(self) -> None:
        """fence.proxy.async: generic accesses known so far are ordered before later ones of the async proxy."""
        np.maximum(self.knows.fenced, self.knows.seen, out=self.knows.fenced, where=~self.components.is_handed)
        self.tick()

    def wait_tensor(self, component: int, clock: int) -> None:
        """tcgen05.wait: its own loads or stores are over."""
        self.knows.learn(component, clock, generic=True)
        self.admitted[component] = clock

    def handed_tensor(self) -> Knowledge:
        """What a relaxed arrival hands on: loads and stores that tcgen05.fence::before_thread_sync covers."""
        handed = np.where(self.components.is_handed, self.knows.fenced, 0)
        return Knowledge(handed, handed.copy())

    def admit_tensor(self) -> None:
        """tcgen05.fence::after_thread_sync: what was acquired so far is ordered before later accesses."""
        handed = np.where(self.components.is_handed, self.knows.fenced, self.knows.seen)
        np.maximum(self.admitted, handed, out=self.admitted)

    def async_order(self) -> Vector:
        """What is ordered before an async-proxy access issued now: fenced generic accesses, known asynchronous ones."""
        return np.where(self.components.is_async, self.knows.seen, self.knows.fenced)
