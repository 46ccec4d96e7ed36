# SPDX-License-Identifier: Apache-2.0
"""Loads from shared memory that an arrival at a barrier may overtake: it comes before anything uses what they load.

A warp goes on behind a load, and waits where an instruction takes what was loaded. ptxas lets no arrival wait for the
loads before it, `bar.warp.sync` or not, and on an H200 a tensor copy that such an arrival let in wrote over what was
still to be read. A fence of threads or proxies does wait: it is a MEMBAR.

Moves are no use: they are gone in what ptxas makes. Other arithmetic it may put behind the arrival as well, so that
only what keeps its place, such as a store, makes sure of a load; here the first use is believed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from emulator.ptx.flow import graph
from emulator.ptx.ir import Address, Function, Instr, Names, Not, Operand, Pair, Reg, TensorAddress, Vec

FENCES = frozenset({"fence", "membar", "fence.proxy.async", "fence.proxy.async::generic", "membar.proxy"})
RELEASING = ("mbarrier.arrive", "barrier.cluster.arrive")
Registers = frozenset[str]


@dataclass(frozen=True)
class Overtaken:
    """Of a function; instructions by their index.

    Attributes:
        uses: of each load that an arrival may overtake, whatever may be the first to use what it loads.
        arrivals, fences: all there are.
    """

    uses: Mapping[int, tuple[int, ...]]
    arrivals: frozenset[int]
    fences: frozenset[int]


def overtaken(function: Function) -> Overtaken:
    """The loads of a function that an arrival may overtake."""
    return _Search(function).found


def is_arrival(instr: Instr) -> bool:
    """Whether others may go on by it who know what the warp did before; cp.async.mbarrier.arrive says less."""
    return instr.op.name.startswith(RELEASING) and instr.op["sem"] != "relaxed"


def is_load(instr: Instr) -> bool:
    """Whether it may read shared memory by the generic proxy, into registers."""
    space = (instr.op["space"] or "shared").partition("::")[0]
    return instr.op.name in ("ld", "ldmatrix") and space == "shared"


def registers(operand: Operand | None) -> Iterator[str]:
    """Names of all in an operand."""
    if isinstance(operand, Reg):
        yield operand.name
    elif isinstance(operand, Not):
        yield operand.reg.name
    elif isinstance(operand, Pair):
        yield from (*registers(operand.first), *registers(operand.second))
    elif isinstance(operand, Vec | Names):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Address):
        yield from registers(operand.base)
    elif isinstance(operand, TensorAddress):
        yield from registers(operand.map)
        for coordinate in operand.coordinates:
            yield from registers(coordinate)


def _read(instr: Instr) -> Registers:
    roles = zip(instr.op.form.roles, instr.args, strict=True)
    found = {name for role, operand in roles if role.access != "w" for name in registers(operand)}
    return frozenset(found if instr.guard is None else found | {instr.guard.reg.name})


def _written(instr: Instr) -> Registers:
    roles = zip(instr.op.form.roles, instr.args, strict=True)
    return frozenset(name for role, operand in roles if role.access != "r" for name in registers(operand))


class _Search:
    """Follows what each load brings, along all paths, to where it is first used."""

    def __init__(self, function: Function) -> None:
        self.code = function.code or ()
        self.blocks = graph(function, ends_after=()).blocks
        self.arrivals = frozenset(i for i, instr in enumerate(self.code) if is_arrival(instr))
        self.fences = frozenset(i for i, instr in enumerate(self.code) if instr.op.name in FENCES)
        self._arrives = [any(i in self.arrivals for i in range(block.start, block.stop)) for block in self.blocks]

    @cached_property
    def found(self) -> Overtaken:
        uses: dict[int, tuple[int, ...]] = {}
        if self.arrivals:
            for block in self.blocks:
                loads = (i for i in range(block.start, block.stop) if is_load(self.code[i]))
                uses |= {load: first for load in loads if (first := self._first_uses(load, block.index))}
        return Overtaken(uses, self.arrivals, self.fences)

    @cached_property
    def _reads(self) -> list[Registers]:
        return [_read(instr) for instr in self.code]

    @cached_property
    def _writes(self) -> list[Registers]:
        return [_written(instr) for instr in self.code]

    @cached_property
    def _touched(self) -> list[Registers | None]:
        """Of each block the registers that it names; None where it has a fence."""
        return [
            None
            if any(i in self.fences for i in range(block.start, block.stop))
            else frozenset().union(*self._reads[block.start : block.stop], *self._writes[block.start : block.stop])
            for block in self.blocks
        ]

    def _first_uses(self, load: int, home: int) -> tuple[int, ...]:
        """Empty if no arrival can come before one of them."""
        uses: set[int] = set()
        late = False
        left = [(home, load + 1, self._writes[load], False)]
        seen: set[tuple[int, Registers, bool]] = set()
        while left:
            number, start, held, arrived = left.pop()
            block = self.blocks[number]
            touched = self._touched[number]
            if start == block.start and number != home and touched is not None and touched.isdisjoint(held):
                arrived |= self._arrives[number]
            else:
                for i in range(start, block.stop):
                    taken = held & self._reads[i]
                    moves = self.code[i].op.name == "mov"
                    if taken and not moves:
                        uses.add(i)
                        late |= arrived
                    # The same load again: what it brought before is nobody's any more.
                    if (taken and not moves) or i == load or i in self.fences:
                        held = frozenset()
                    elif taken:
                        held |= self._writes[i]
                    elif self.code[i].guard is None:
                        held -= self._writes[i]
                    if not held:
                        break
                    arrived |= i in self.arrivals
            if held:
                for follower in block.successors:
                    state = (follower, held, arrived)
                    if state not in seen:
                        seen.add(state)
                        left.append((follower, self.blocks[follower].start, held, arrived))
        return tuple(sorted(uses)) if late else ()
