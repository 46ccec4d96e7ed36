# SPDX-License-Identifier: Apache-2.0
"""wgmma of a warpgroup: asynchronous matrix products and their order (PTX ISA 9.2, 9.7.15).

An operation belongs to a warpgroup and begins once all four of its warps have issued it; those of a warpgroup are done
one after the other. Then operands are read - A's registers too - and accumulators written: late, as far as a kernel
that waits for too little is concerned. A wgmma-group is the warpgroup's as well: whoever has waited for it knows that
all four warps' parts are complete (9.7.15.7.2 and .3).

Registers that an operation has are marked in the warp (`Warp.busy`) until a wait: accumulators may not be touched, A
may not be written. wgmma.fence has to stand between other accesses to registers and an operation that has them: here
registers are compared with what they held at the fence, so a write of the same value is not seen. Reads of accumulators
are: instructions that read them are counted.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import FULL, ROW_SINK, Program
from emulator.errors import Unsupported
from emulator.machine.access import touch_shared
from emulator.machine.clocks import Source, Vector
from emulator.machine.findings import Kind
from emulator.machine.fragments import Floats, Registers
from emulator.machine.handlers.matrix import Rows, rows_of, whole_warp
from emulator.machine.handlers.registry import executes
from emulator.machine.memory import MemoryFault
from emulator.machine.runner import Abort, Wait
from emulator.machine.swizzle import MatrixDescriptor
from emulator.machine.tasks import Task
from emulator.machine.wgmma import PATTERN_BYTES, ROWS, WARP_ROWS, Wgmma
from emulator.ptx.ir import Imm, Instr, Operand, Pair, Reg, Vec

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

WARPS = 4
FULL_WORD = 0xF
OWNED, READ = 1, 2  # marks of Warp.busy
Where: TypeAlias = slice | Rows


def compact(rows: Rows) -> Where:
    """Rows as an index that costs no copy where they lie one after the other."""
    first, count = int(rows[0]), len(rows)
    return slice(first, first + count) if (rows == np.arange(first, first + count)).all() else rows


@lru_cache(maxsize=64)
def registers_of(program: Program) -> Rows:
    """Rows of all registers that a wgmma of the program has, ascending."""
    found: list[Rows] = []
    for instr in program.instrs:
        if instr.op.name == "wgmma.mma_async":
            form = Wgmma.of(instr)
            found += [rows_of(program, instr["d"]), *([rows_of(program, instr["a"])] if form.a_in_registers else [])]
    return np.unique(np.concatenate(found)) if found else np.array([], np.int64)


@lru_cache(maxsize=64)
def filled(program: Program) -> NDArray[np.bool_]:
    """Which of `registers_of` nothing but wgmma and moves of constants writes: bool[registers]."""
    sources: dict[str, set[Operand | None]] = {}
    for instr in program.instrs:
        if instr.op.name == "wgmma.mma_async":
            continue
        of = instr["a"] if instr.op.form.id == "mov" else None
        for role, to in zip(instr.op.form.roles, instr.args, strict=True):
            if role.access != "r":
                for one in items(to):
                    sources.setdefault(one.name, set()).add(of)

    def is_constant(name: str, met: frozenset[str]) -> bool:
        return name in sources and all(
            isinstance(of, Imm) or (isinstance(of, Reg) and (of.name in met or is_constant(of.name, met | {of.name})))
            for of in sources[name]
        )

    constant = {program.row(name) for name in sources if name in program.registers and is_constant(name, frozenset())}
    return np.isin(registers_of(program), list(constant))


@lru_cache(maxsize=64)
def readers(program: Program) -> dict[int, set[int]]:
    """By row of `registers_of`: the instructions that read it, without wgmma itself.

    Moves are none: compilers carry accumulators from loop to loop by them, behind a fence too.
    """
    found: dict[int, set[int]] = {row: set() for row in registers_of(program).tolist()}
    for index, instr in enumerate(program.instrs):
        if instr.op.name == "wgmma.mma_async" or instr.op.form.id == "mov":
            continue
        for role, of in zip(instr.op.form.roles, instr.args, strict=True):
            if role.access != "w":
                for one in items(of):
                    if one.name in program.registers and (row := program.row(one.name)) in found:
                        found[row].add(index)
    return found


def items(operand: Operand | None) -> Iterator[Reg]:
    """The registers in an operand."""
    parts = operand.items if isinstance(operand, Vec) else (operand,)
    for part in parts:
        for one in (part.first, part.second) if isinstance(part, Pair) else (part,):
            if isinstance(one, Reg):
                yield one


@dataclass(frozen=True, eq=False)
class Plan:
    """What is known of an operation from the code alone.

    Attributes:
        d, a: rows of the accumulators and of A's registers; a is None where A lies in shared memory.
        d_places, a_places: where these are in `registers_of`.
        shape: a number that operations have in common whose accumulators may follow each other without a fence.
        readers: the instructions besides wgmma that read the accumulators.
    """

    form: Wgmma
    d: Where
    d_places: Where
    a: Where | None
    a_places: Where | None
    shape: int
    readers: Rows


@lru_cache(maxsize=8192)
def plan(program: Program, index: int) -> Plan:
    instr = program.instrs[index]
    form = Wgmma.of(instr)
    every = registers_of(program)
    d = rows_of(program, instr["d"])
    a = rows_of(program, instr["a"]) if form.a_in_registers else None
    return Plan(
        form,
        compact(d),
        compact(np.searchsorted(every, d)),
        None if a is None else compact(a),
        None if a is None else compact(np.searchsorted(every, a)),
        1 + 2 * form.n + (form.d_type == "f16"),
        np.array(sorted(set().union(*(readers(program)[row] for row in d.tolist() if row != ROW_SINK))), np.int64),
    )


# Operands in shared memory.


@dataclass(frozen=True, eq=False)
class Layout:
    """An operand behind a descriptor, for a start within the first 1024 bytes.

    Attributes:
        index: of each element, in elements: [rows, k].
        words: 4-byte words of all rows, each once.
        warp_words: the same for each warp's 16 rows of A.
        end: byte behind the last.
    """

    index: NDArray[np.int64]
    words: NDArray[np.int64]
    warp_words: tuple[NDArray[np.int64], ...]
    end: int


@lru_cache(maxsize=512)
def layout(form: Wgmma, of_a: bool, descriptor: MatrixDescriptor) -> Layout:
    addresses = form.a_addresses(descriptor) if of_a else form.b_addresses(descriptor)
    size = form.a_bytes if of_a else form.b_bytes
    parts = np.split(addresses, ROWS // WARP_ROWS) if of_a else []
    return Layout(
        addresses // size,
        np.unique(addresses >> 2),
        tuple(np.unique(part >> 2) for part in parts),
        int(addresses.max()) + size,
    )


@dataclass(frozen=True, eq=False)
class InShared:
    """An operand at its place: the layout, and how many bytes further it lies."""

    layout: Layout
    shift: int

    @property
    def words(self) -> NDArray[np.int64]:
        return self.layout.words + (self.shift >> 2)

    def warp_words(self, warp: int) -> NDArray[np.int64]:
        return self.layout.warp_words[warp] + (self.shift >> 2)


@lru_cache(maxsize=4096)
def in_shared(form: Wgmma, of_a: bool, bits: int) -> InShared:
    """The operand that a descriptor describes; raises DescriptorError."""
    descriptor = MatrixDescriptor.of_sm90(bits)
    first = descriptor.start % PATTERN_BYTES
    found = layout(form, of_a, replace(descriptor, start=first))
    return InShared(found, descriptor.start - first)


def operand(runner: "Runner", form: Wgmma, of_a: bool, bits: int) -> InShared:
    """As `in_shared`, checked against the CTA's shared memory: raises MemoryFault."""
    found = in_shared(form, of_a, bits)
    end = found.shift + found.layout.end
    if end > runner.cta.shared.size:
        name = "A" if of_a else "B"
        message = f"{name} behind descriptor {bits:#018x} ends at shared address {end:#x}: the CTA has "
        raise MemoryFault(Kind.BOUNDS, f"{message}{runner.cta.shared.size:#x} bytes", 0)
    return found


# Warps and warpgroups.


@dataclass(eq=False)
class Member:
    """What a warp of a warpgroup keeps.

    Attributes:
        fenced: what the registers of `registers_of` held at the last fence, or wgmma wrote since: [registers, 32].
        fences: executed so far.
        counts: how often each instruction had been executed at the last fence.
        group: number of the latest group whose operations have each of these registers and that nobody waited for; 0
            for none.
        shape: `Plan.shape` of the operation that had it as an accumulator last; 0 for one of A.
        since: the fence in front of that operation.
        issued: operations so far.
        ends: operations in front of the end of each group.
        waited: groups that are known to be complete.
        where: index of the latest operation.
    """

    runner: "Runner"
    number: int
    registers: Rows
    fenced: Registers = field(init=False)
    counts: NDArray[np.uint32] = field(init=False)
    fences: int = 0
    group: Vector = field(init=False)
    shape: Vector = field(init=False)
    since: Vector = field(init=False)
    issued: int = 0
    ends: list[int] = field(default_factory=list)
    waited: int = 0
    where: int = -1

    def __post_init__(self) -> None:
        count = len(self.registers)
        self.fenced = np.zeros((count, 32), np.uint32)
        self.counts = self.runner.warp.counts.copy()
        self.group, self.shape, self.since = (np.zeros(count, np.int32) for _ in range(3))

    @property
    def open_group(self) -> int:
        return len(self.ends) + 1

    def own(self, places: Where, rows: Where, mark: int, shape: int) -> None:
        """Mark registers as an operation's."""
        self.runner.warp.busy[rows] = mark
        self.group[places] = self.open_group
        self.shape[places] = shape
        self.since[places] = self.fences

    def free(self, group: int) -> None:
        """Registers of groups up to that one are the warp's own again."""
        done = (self.group > 0) & (self.group <= group)
        self.runner.warp.busy[self.registers[done]] = 0
        self.group[done] = 0
        self.waited = max(self.waited, group)


@dataclass(frozen=True, eq=False)
class Issue:
    """A warp's part of an operation.

    Attributes:
        order: what is ordered before its reads of shared memory.
        seen: what the warp knew.
        history: what came before it, whatever memory order says.
    """

    member: Member
    order: Vector
    seen: Vector
    history: Vector


@dataclass(eq=False)
class Operation:
    """One wgmma.mma_async of a warpgroup.

    Attributes:
        number: in the warpgroup, from 1.
        same: what all four warps have to agree on: descriptors, scale_d, group.
        issues: by warp.
    """

    number: int
    index: int
    plan: Plan
    a: InShared | None
    b: InShared
    same: tuple[int, int, bool, int]
    issues: dict[int, Issue] = field(default_factory=dict)

    @property
    def scale_d(self) -> bool:
        return self.same[2]

    @property
    def group(self) -> int:
        return self.same[3]


class Warpgroup:
    """Four warps and what they have issued.

    Attributes:
        component: of its groups.
        members: by warp.
        pending: operations that not all of them have issued.
        done: operations that are complete.
        histories: by group that somebody may still wait for, what came before all four warps' parts of it.
    """

    def __init__(self, runners: "list[Runner]") -> None:
        self.name = f"{runners[0].cta.name} warps {runners[0].number} to {runners[-1].number}"
        self.runners = runners
        self.component = runners[0].component(Source.MATRIX_GROUP)
        registers = registers_of(runners[0].run.program)
        self.members = {number: Member(runner, number, registers) for number, runner in enumerate(runners)}
        self.pending: deque[Operation] = deque()
        self.begun = 0
        self.done = 0
        self.histories = {0: runners[0].clock.components.zeros()}

    def issue(self, member: Member, operation: Operation) -> Operation:
        """A warp issues its next operation: the warpgroup's own, the first time."""
        place = member.issued - self.begun
        if place == len(self.pending):
            self.pending.append(operation)
        found = self.pending[place]
        if (found.index, found.same) != (operation.index, operation.same):
            first = next(iter(found.issues.values())).member.runner
            message = f"{self.name} disagree on their wgmma number {found.number}: the instruction, a descriptor, "
            member.runner.report(
                Kind.ALIGNED, f"{message}scale-d or the group is another one", other=first.place(found.index)
            )
            raise Abort
        clock = member.runner.clock
        found.issues[member.number] = Issue(member, clock.async_order(), clock.knows.seen.copy(), clock.history.copy())
        clock.tick()
        member.issued += 1
        member.where = found.index
        return found

    def begin(self) -> None:
        """Submit what all four warps have issued."""
        run = self.runners[0].run
        while self.pending and len(self.pending[0].issues) == WARPS:
            operation = self.pending.popleft()
            self.begun += 1
            before = self.histories[max(self.histories)]
            issued = [issue.history for issue in operation.issues.values()]
            self.histories[operation.group] = np.maximum.reduce([before, *issued])
            do = partial(self.runners[0].guarded, operation.index, partial(self.execute, operation))
            task = Task(f"wgmma number {operation.number} of {self.name}", do)
            run.tasks.submit(task, queue=("wgmma", self))

    def execute(self, operation: Operation) -> None:
        read_shared(self, operation)
        multiply(self, operation)
        self.done += 1
        self.runners[0].run.progress += 1

    def waited(self, member: Member, last: int) -> None:
        """A warp has waited for the groups up to that one."""
        member.free(last)
        clock = member.runner.clock
        clock.knows.learn(self.component, last)
        clock.follow(self.histories[max(group for group in self.histories if group <= last)])
        oldest = max(group for group in self.histories if group <= min(one.waited for one in self.members.values()))
        for group in [group for group in self.histories if group < oldest]:
            del self.histories[group]

    def ended(self, member: Member) -> None:
        """A warp of it has ended: nothing may be left."""
        runner, where = member.runner, member.where
        if member.issued > (member.ends[-1] if member.ends else 0):
            message = f"{runner.name} ends with wgmma operations that no wgmma.commit_group follows"
            runner.report(Kind.UNFINISHED, message, index=where)
        elif member.issued and member.waited < len(member.ends):
            message = f"{runner.name} ends with wgmma-groups that it has not waited for"
            runner.report(Kind.UNFINISHED, message, index=where)
        if self.pending and all(one.done for one in self.runners):
            operation = self.pending[0]
            missing = [one.runner.name for number, one in self.members.items() if number not in operation.issues]
            message = f"wgmma number {operation.number} of {self.name} was not executed by {', '.join(missing)}"
            runner.report(Kind.ALIGNED, message, index=operation.index)


def member_of(runner: "Runner") -> tuple[Warpgroup, Member]:
    """A warp's warpgroup and its part of it; ends the launch where the CTA has no four warps for one."""
    found = runner.state.get("warpgroup")
    if found is None:
        first = runner.number // WARPS * WARPS
        runners = runner.cta.runners[first : first + WARPS]
        if len(runners) < WARPS:
            message = f"{runner.name} is in no warpgroup: the CTA has {len(runner.cta.runners)} warps"
            runner.report(Kind.ALIGNED, message)
            raise Abort
        group = Warpgroup(runners)
        for number, one in enumerate(runners):
            one.state["warpgroup"] = group
            one.at_end.append(partial(group.ended, group.members[number]))
        found = group
    assert isinstance(found, Warpgroup)
    return found, found.members[runner.number % WARPS]


# Execution, once all four warps have issued.


def read_shared(group: Warpgroup, operation: Operation) -> None:
    """Record and check the reads of operands: each warp reads its rows of A and all of B."""
    issues = operation.issues.values()
    cta = group.runners[0].cta
    shadow = cta.shared.shadow
    stamp = (group.component, operation.group)
    order = np.minimum.reduce([issue.order for issue in issues])
    a, b = operation.a, operation.b
    words = b.words if a is None else np.concatenate((a.words, b.words))
    profile = group.runners[0].run.profile
    profile.count("shared bytes read by wgmma", 4 * words.size)
    if shadow.unwritten(words) < 0 and shadow.read(words, stamp, order, operation.index) is None:
        return
    # Something is wrong, or only the warp whose rows they are knows of some of A.
    for issue in issues:
        member = issue.member
        words = b.words if a is None else np.concatenate((a.warp_words(member.number), b.words))
        touch_shared(
            member.runner, cta, words, FULL_WORD, write=False, stamp=stamp, order=issue.order, read_order=issue.seen,
            index=operation.index,
        )  # fmt: skip


def values(group: Warpgroup, of: InShared, size: int) -> NDArray[np.unsignedinteger]:
    view = group.runners[0].cta.shared.bytes.view(size)
    return view[of.shift // size :].take(of.layout.index)


def a_values(group: Warpgroup, operation: Operation) -> Floats:
    """[64, k]."""
    form = operation.plan.form
    if operation.a is not None:
        return form.a_values(values(group, operation.a, form.a_bytes))
    rows = operation.plan.a
    return np.concatenate([form.a_from_registers(runner.warp.rows[rows]) for runner in group.runners])


def multiply(group: Warpgroup, operation: Operation) -> None:
    form, rows, places = operation.plan.form, operation.plan.d, operation.plan.d_places
    a, b = a_values(group, operation), form.b_values(values(group, operation.b, form.b_bytes))
    d = np.stack([runner.warp.rows[rows] for runner in group.runners])
    result = form.multiply(a, b, d, operation.scale_d)
    for number, runner in enumerate(group.runners):
        runner.warp.rows[rows] = result[number]
        group.members[number].fenced[places] = result[number]
    group.runners[0].run.profile.count(f"wgmma flops {form.a_type}", 2 * ROWS * form.n * form.k)


# Instructions.


def report_written(runner: "Runner", member: Member, found: Plan) -> None:
    """Accumulators differ from what they held at the fence. A compiler moves zeros that a kernel writes in front of a
    fence behind it, since in PTX the two have no register in common: that is no mistake of the kernel.
    """
    written = (runner.warp.rows[found.d] != member.fenced[found.d_places]).any(axis=1)
    harmless = bool(filled(runner.run.program)[found.d_places][written].all())
    what = "filled with constants" if harmless else "written"
    message = f"accumulators were {what} since the last wgmma.fence"
    runner.report(Kind.MATRIX_ORDER, message, warning=harmless)


def check_registers(runner: "Runner", member: Member, found: Plan, scale_d: bool) -> None:
    """That a fence stands between other accesses to the operation's registers and the operation."""
    warp = runner.warp
    if not member.fences:
        runner.report(Kind.MATRIX_ORDER, "no wgmma.fence before the first wgmma of the warp")
        member.fences += 1
        member.fenced[:] = warp.rows[member.registers]
    if not np.array_equal(warp.rows[found.d], member.fenced[found.d_places]):
        report_written(runner, member, found)
        member.fenced[found.d_places] = warp.rows[found.d]
    elif (read := warp.counts[found.readers] != member.counts[found.readers]).any():
        other = runner.place(int(found.readers[read.argmax()]))
        runner.report(Kind.MATRIX_ORDER, "accumulators were read since the last wgmma.fence", other=other)
    if found.a is not None and not np.array_equal(warp.rows[found.a], member.fenced[found.a_places]):
        runner.report(Kind.MATRIX_ORDER, "registers of A were written since the last wgmma.fence")
        member.fenced[found.a_places] = warp.rows[found.a]
    places = found.d_places
    shapes = member.shape[places]
    other = (member.group[places] > 0) & (shapes != found.shape)
    if other.any() and (other & ((shapes == 0) | (member.since[places] == member.fences))).any():
        runner.report(
            Kind.MATRIX_ORDER, "accumulators belong to a wgmma of another shape, or to A of one, that is not complete"
        )
    if scale_d:
        missing = warp.init[found.d] != FULL
        if missing.any():
            runner.warp.check_rows(np.atleast_1d(member.registers[places][missing]), reads=True)
    if found.a is not None:
        warp.check_rows(member.registers[found.a_places], reads=True)


def uniform(runner: "Runner", instr: Instr, role: str) -> int:
    """A descriptor, which is the same in all lanes."""
    found = instr[role]
    assert found is not None
    lanes = runner.warp.u64(found)
    bits = int(lanes[0])
    if (lanes != bits).any():
        runner.report(Kind.ALIGNED, f"the descriptor {role} of {instr.op.name} differs between lanes of {runner.name}")
        raise Abort
    return bits


def scale(runner: "Runner", of: Operand | None, name: str) -> bool:
    """Whether the accumulators are added, which is the same in all lanes."""
    assert of is not None
    lanes = runner.warp.pred(of)
    if lanes not in (0, FULL):
        runner.report(Kind.ALIGNED, f"scale-d of {name} differs between lanes of {runner.name}")
        raise Abort
    return lanes == FULL


@executes("wgmma.mma_async#ss", "wgmma.mma_async#rs")
def execute_product(runner: "Runner", instr: Instr) -> None:
    whole_warp(runner, instr)
    group, member = member_of(runner)
    found = plan(runner.run.program, runner.index)
    scale_d = scale(runner, instr["scale_d"], instr.op.name)
    a_bits = uniform(runner, instr, "a") if found.a is None else 0
    b_bits = uniform(runner, instr, "b")
    a = operand(runner, found.form, True, a_bits) if found.a is None else None
    b = operand(runner, found.form, False, b_bits)
    check_registers(runner, member, found, scale_d)
    same = (a_bits, b_bits, scale_d, member.open_group)
    group.issue(member, Operation(member.issued + 1, runner.index, found, a, b, same))
    if found.a is not None and found.a_places is not None:
        member.own(found.a_places, found.a, READ, 0)
    member.own(found.d_places, found.d, OWNED, found.shape)
    runner.warp.init[found.d] = FULL
    runner.run.progress += 1
    group.begin()


@executes("wgmma.fence")
def execute_fence(runner: "Runner", instr: Instr) -> None:
    whole_warp(runner, instr)
    _, member = member_of(runner)
    member.fences += 1
    np.copyto(member.counts, runner.warp.counts)
    if member.registers.size:
        np.take(runner.warp.rows, member.registers, axis=0, out=member.fenced)


@executes("wgmma.commit_group")
def execute_commit(runner: "Runner", instr: Instr) -> None:
    whole_warp(runner, instr)
    _, member = member_of(runner)
    member.ends.append(member.issued)


@executes("wgmma.wait_group")
def execute_wait(runner: "Runner", instr: Instr) -> Wait | None:
    whole_warp(runner, instr)
    group, member = member_of(runner)
    pending = instr["n"]
    if not isinstance(pending, Imm):
        raise Unsupported(f"{instr.op.text} {pending}, on line {instr.line}")
    last = len(member.ends) - pending.value
    if last <= member.waited:
        return None
    needed = member.ends[last - 1]

    return Wait(
        f"waits for wgmma-group {last} of {group.name}, {needed} operations of which {group.done} are done",
        lambda: group.done >= needed,
        partial(group.waited, member, last),
    )
