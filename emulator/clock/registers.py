# SPDX-License-Identifier: Apache-2.0
"""How many registers a thread needs: those that are alive at once. The assembler's number is not in the PTX."""

from functools import lru_cache
from math import prod

from emulator.clock.grid import OF_PARTITION, PARTITIONS, WARP
from emulator.clock.tables import names_of
from emulator.core.program import Program
from emulator.ptx.flow import Graph, graph
from emulator.ptx.ir import Instr

GRANULE, MOST = 8, 255  # how they are given out


@lru_cache(maxsize=16)
def registers_of(program: Program) -> int:
    """The most that are alive at once, rounded up as the hardware gives them out; predicates do not count.

    ptxas 13.0 gives 20 kernels of softmax for sm_90a that no limit binds 12 fewer to 7 more.
    """
    needed = min(MOST, -(-_most_alive(program) // GRANULE) * GRANULE)
    return min(needed, *_limits(program))


def _limits(program: Program) -> tuple[int, int]:
    """What the kernel asks the assembler for: registers, and CTAs of an SM that have to have enough of them."""
    directives = program.function.directives
    (most, *_) = directives.get("maxnreg", (MOST,))
    (ctas, *_) = directives.get("minnctapersm", (1,))
    threads = prod(directives.get("reqntid", directives.get("maxntid", (1,))))
    return most, share_of(ctas * -(-threads // WARP))


def share_of(warps: int) -> int:
    """Registers of a thread that so many warps of an SM leave to each: the partition with most warps counts.

    ptxas has this limit for `minnctapersm`: 6 CTAs of 7 warps get 40, where 64 Ki divided by their threads are 48.
    """
    return OF_PARTITION // (-(-warps // PARTITIONS) * WARP) // GRANULE * GRANULE


def _most_alive(program: Program) -> int:
    """Registers of 32 bits: each step takes a bit set of those that are needed behind it to those before it."""
    flow = graph(program.function, ())
    words = {name: max(1, bits // 32) * (bits > 1) for name, bits in _bits(program).items()}
    numbers = {name: number for number, name in enumerate(words)}
    before = _alive_before(flow, numbers)
    most = 0
    for block in flow.blocks:
        alive = _behind(before, block.successors)
        for instr in reversed(flow.instrs(block)):
            alive = _step(instr, alive, numbers)
            most = max(most, alive.bit_count())
    wide = sum(1 << numbers[name] for name, count in words.items() if count > 1)
    none = sum(1 << numbers[name] for name, count in words.items() if not count)
    return _weighed(flow, before, numbers, wide, none) if wide or none else most


def _weighed(flow: Graph, before: dict[int, int], numbers: dict[str, int], wide: int, none: int) -> int:
    """The same, where registers of 64 bits count twice and predicates do not."""
    most = 0
    for block in flow.blocks:
        alive = _behind(before, block.successors)
        for instr in reversed(flow.instrs(block)):
            alive = _step(instr, alive, numbers)
            most = max(most, alive.bit_count() + (alive & wide).bit_count() - (alive & none).bit_count())
    return most


def _bits(program: Program) -> dict[str, int]:
    """Width of each register that the code names."""
    return {name: int(program.widths[program.row(name)]) for name in sorted(program.registers)}


def _alive_before(flow: Graph, numbers: dict[str, int]) -> dict[int, int]:
    """What is needed at the start of each block."""
    found: dict[int, int] = {}
    todo = [block.index for block in flow.blocks]
    while todo:
        block = flow.blocks[todo.pop()]
        alive = _behind(found, block.successors)
        for instr in reversed(flow.instrs(block)):
            alive = _step(instr, alive, numbers)
        if found.get(block.index) != alive:
            found[block.index] = alive
            todo += flow.predecessors[block.index]
    return found


def _behind(before: dict[int, int], successors: tuple[int, ...]) -> int:
    alive = 0
    for one in successors:
        alive |= before.get(one, 0)
    return alive


def _step(instr: Instr, alive: int, numbers: dict[str, int]) -> int:
    """What is needed in front of an instruction; a guarded one may leave what was there."""
    read, written = _sets(instr, numbers)
    return alive | read if instr.guard is not None else alive & ~written | read


def _sets(instr: Instr, numbers: dict[str, int]) -> tuple[int, int]:
    read, written = names_of(instr)
    return (
        sum(1 << numbers[name] for name in set(read) if name in numbers),
        sum(1 << numbers[name] for name in set(written) if name in numbers),
    )
