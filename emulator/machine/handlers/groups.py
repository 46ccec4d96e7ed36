# SPDX-License-Identifier: Apache-2.0
"""Groups of asynchronous copies: opened by the first copy, closed by a commit, waited for by number.

PTX ISA 9.2, 9.7.9.25.2 (async-groups and bulk async-groups). The ISA counts them for each thread; here a warp has one
row of groups, and a commit or a wait of some lanes concerns the groups of these.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from emulator.machine.clocks import Source

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

KEPT = 64  # groups that a wait may leave pending, and more


@dataclass(eq=False)
class Group:
    """Copies that are waited for together.

    Attributes:
        number: stamp of its last copies.
        lanes: that committed it; of an open one, that issued its copies.
        where: index of the instruction of its last copy; -1 for an empty group.
        reading: copies that have not read their source yet.
        writing: copies that have not written their destination yet.
        read_awaited: somebody has waited for the reads.
    """

    number: int
    lanes: int = 0
    where: int = -1
    reading: int = 0
    writing: int = 0
    read_awaited: bool = False

    def add(self, lanes: int, where: int) -> None:
        """One more copy."""
        self.lanes |= lanes
        self.where = where
        self.reading += 1
        self.writing += 1


@dataclass
class Groups:
    """The groups of a warp.

    Attributes:
        committed: in order; the oldest are forgotten once they are done.
        forgotten: number of the last of those.
        now: stamp of the copies that are issued now.
        watched: somebody looks at them when the warp ends.
    """

    committed: list[Group] = field(default_factory=list)
    forgotten: int = 0
    now: int = 1
    watched: bool = False
    open: Group = field(default_factory=lambda: Group(1))

    def tick(self) -> int:
        """Later copies are told from those so far; returns the stamp of the latter."""
        self.now += 1
        self.open.number = self.now
        return self.now - 1

    def commit(self, lanes: int) -> None:
        """Close the open group; one of other lanes stays open, and an empty one is committed."""
        if self.open.where >= 0 and not self.open.lanes & lanes:
            self.committed.append(Group(self.open.number - 1, lanes))
            return
        self.open.lanes = lanes
        self.committed.append(self.open)
        self.now += 1
        self.open = Group(self.now)
        while len(self.committed) > KEPT and not self.committed[0].writing and self.committed[0].read_awaited:
            self.forgotten = self.committed.pop(0).number

    def before(self, lanes: int, left: int) -> list[Group]:
        """What a wait that leaves so many of the latest groups pending waits for."""
        mine = [group for group in self.committed if group.lanes & lanes]
        return mine[: len(mine) - left] if left else mine

    def drop(self, waited: list[Group]) -> int:
        """Forget groups that were waited for, and return the stamp up to which all is known to be done."""
        last = max([self.forgotten, *(group.number for group in waited)])
        if waited:
            self.forgotten = last
            # Groups in front of these are of other lanes.
            self.committed = [group for group in self.committed if group not in waited]
        return last


def groups_of(runner: "Runner", source: Source) -> Groups:
    """The warp's groups of a kind."""
    found = runner.state.get(source.name)
    if found is None:
        found = runner.state[source.name] = Groups()
    assert isinstance(found, Groups)
    return found
