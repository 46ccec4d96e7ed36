# SPDX-License-Identifier: Apache-2.0
"""tcgen05.alloc, .ld, .st, their waits and fences (PTX ISA 9.2, 9.7.16.6 to 9.7.16.8 and 9.7.16.11).

Loads and stores are asynchronous, and in no order with each other or with anything else until the warp has waited.

A load's registers are the load's until tcgen05.wait::ld. CUTLASS's tutorials leave that out and use the registers: the
compiler orders the use behind the load, as it does for any load. That is a warning, and nothing of it is random here:
a load reads when it is issued. What it leaves open is when others may write what was loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import FULL, Program
from emulator.core.warp import BUSY_LOAD, Fault, lanes_of
from emulator.errors import Unsupported
from emulator.machine.access import by_space, store
from emulator.machine.clocks import Knowledge, Source
from emulator.machine.cluster import Cta
from emulator.machine.findings import Kind
from emulator.machine.handlers.memory import items, space_of
from emulator.machine.handlers.registry import executes
from emulator.machine.runner import Runner, Wait
from emulator.machine.shadow import NOBODY
from emulator.machine.tensor_access import (
    Blocks,
    Order,
    Work,
    blocks_in,
    blocks_of,
    check_allocated,
    check_written,
    columns_of,
    group_of,
    issue,
    report_clash,
    same_address,
    submit,
    tensor_of,
    touch_tensor,
    whole_warp,
    work_of,
)
from emulator.machine.tensor_memory import (
    QUARTER,
    Cells,
    TensorMemory,
    TensorMemoryError,
    allocate,
    check_size,
    fragment,
    name_address,
    reduce,
    split_address,
)
from emulator.ptx.ir import Address, Imm, Instr, Reg, Sink

LOADS = ("tcgen05.ld", "tcgen05.ld.red")

# Allocation.


@dataclass
class Pairing:
    """An allocation that both CTAs of a pair take part in.

    Attributes:
        arrived: ranks of the CTAs that have executed it.
    """

    columns: int
    arrived: set[int] = field(default_factory=set)
    address: int | None = None


def pairing(runner: Runner, ctas: tuple[Cta, ...], columns: int) -> Pairing:
    """The allocation that this CTA's instruction is one half of."""
    found = ctas[0].state.get("pairing")
    if not isinstance(found, Pairing):
        found = ctas[0].state["pairing"] = Pairing(columns)
    if runner.cta.rank in found.arrived:
        raise TensorMemoryError(f"a second allocation in {runner.cta.name} while its peer has not joined the first")
    if found.columns != columns:
        raise TensorMemoryError(f"{runner.cta.name} allocates {columns} columns, its peer {found.columns}")
    found.arrived.add(runner.cta.rank)
    if len(found.arrived) == len(ctas):
        del ctas[0].state["pairing"]
    return found


@executes("tcgen05.alloc")
def execute_alloc(runner: Runner, instr: Instr) -> Wait:
    whole_warp(runner, instr)
    operand, columns = instr["d"], instr["columns"]
    assert isinstance(operand, Address)
    assert columns is not None
    count, ctas = runner.warp.uniform(columns), group_of(runner, instr)
    check_size(count)
    tensor, _ = tensor_of(runner.cta)
    if tensor.relinquished:
        raise TensorMemoryError(f"allocation of {count} columns after relinquish_alloc_permit")
    where = runner.warp.address(operand)[runner.lanes[:1]]
    if space_of(instr) is None:
        ((_, _, where),) = by_space(where)
    order = runner.run.order
    if order is not None and runner.cta.has_released and order.tensor_memory_at_risk():
        message = "asked for after launch_dependents: CTAs of a later launch may hold it while they wait for this one"
        runner.report(Kind.TENSOR_MEMORY, message)
    one = pairing(runner, ctas, count)
    tensors = [tensor_of(cta)[0] for cta in ctas]
    runner.run.progress += 1

    def ready() -> bool:
        if one.address is None and len(one.arrived) == len(ctas) and not any(each.relinquished for each in tensors):
            one.address = allocate(tensors, count)
        return one.address is not None

    def then() -> None:
        store(runner, "shared", where, np.array([[one.address]], np.uint32))
        runner.run.profile.count("tensor memory allocations")

    peer = " and for the peer CTA" if len(ctas) > 1 else ""
    return Wait(f"waits for {count} free columns of tensor memory{peer}", ready, then)


@executes("tcgen05.dealloc")
def execute_dealloc(runner: Runner, instr: Instr) -> None:
    """Each CTA of a pair gives its own columns back. Whatever was done with them must be known to be over."""
    whole_warp(runner, instr)
    where, columns = instr["a"], instr["columns"]
    assert where is not None
    assert columns is not None
    group_of(runner, instr)
    address, count = runner.warp.uniform(where), runner.warp.uniform(columns)
    tensor, shadow = tensor_of(runner.cta)
    tensor.deallocate(address, count)
    blocks = blocks_in(split_address(address)[1], count)
    clash = shadow.write(blocks, runner.clock.stamp, runner.clock.knows.seen, runner.index)
    if clash is not None:
        report_clash(runner, runner.cta, clash, "given back", runner.index, runner.clock.knows.seen)
    # Whoever gets them next got them from the allocator, after this.
    shadow.writer[blocks] = NOBODY
    runner.run.progress += 1


@executes("tcgen05.relinquish_alloc_permit")
def execute_relinquish(runner: Runner, instr: Instr) -> None:
    whole_warp(runner, instr)
    group_of(runner, instr)
    tensor_of(runner.cta)[0].relinquish()


# Loads and stores.


@dataclass(frozen=True, eq=False)
class Registers:
    """The registers of a load or a store.

    Attributes:
        rows: of the register file.
        kept: which of the operand's items they are; the rest is `_`.
        constants: of items that are none, by their place; of stores.
    """

    rows: NDArray[np.int64]
    kept: NDArray[np.int64]
    count: int
    constants: tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def registers(program: Program, index: int, role: str) -> Registers:
    """Of an instruction, by its index in the program."""
    operand = program.instrs[index][role]
    assert operand is not None
    found = items(operand)
    rows, kept, constants = [], [], []
    for place, one in enumerate(found):
        if isinstance(one, Reg):
            if one.bits != 32:
                raise Unsupported(f"a register of {one.bits} bits in {program.instrs[index].op.text}")
            rows.append(program.row(one.name))
            kept.append(place)
        elif isinstance(one, Imm):
            constants.append((place, one.bits(32)))
        elif not isinstance(one, Sink):
            raise Unsupported(f"{one} in {program.instrs[index].op.text}")
    return Registers(np.array(rows, np.int64), np.array(kept, np.int64), len(found), tuple(constants))


@lru_cache(maxsize=1024)
def fragment_blocks(address: int, shape: str, num: int, halves: bool, split: int) -> Blocks:
    """Words of the history that a load or store at an address touches."""
    lane, column = split_address(address)
    return blocks_of(fragment(shape, num, halves, split).offsets + (lane * 512 + column))


def place(runner: Runner, instr: Instr, tensor: TensorMemory) -> tuple[Cells, Blocks]:
    """The cells of a load or store, and their words in the history."""
    op, operand = instr.op, instr["a"]
    assert isinstance(operand, Address)
    address = own_quarter(runner, same_address(runner, runner.warp.address(operand), instr), instr)
    halves = bool(op["pack"] or op["unpack"])
    split = instr["split"] if "split" in op.form.place else None
    columns = split.value if isinstance(split, Imm) else 0
    shape, num = str(op["shape"]), str(op["num"])
    cells = tensor.cells(address, shape, num, runner.number % 4, halves=halves, split=columns)
    return cells, fragment_blocks(address, shape, int(num[1:]), halves, columns)


def own_quarter(runner: Runner, address: int, instr: Instr) -> int:
    """The address in the lanes that a warp reaches; another one is reported.

    An example of CUTLASS gives each warp the address of lane 0, and means its own. What a GPU does is not documented.
    """
    quarter = runner.number % 4
    lane, column = split_address(address)
    if lane // QUARTER == quarter:
        return address
    first = quarter * QUARTER
    runner.report(
        Kind.TENSOR_MEMORY,
        f"{instr.op.name} at {name_address(address)}: a warp with number % 4 = {quarter} reaches lanes {first} to"
        f" {first + QUARTER - 1}; it goes on there",
    )
    return (first + lane % QUARTER) << 16 | column


@executes(*LOADS)
def execute_load(runner: Runner, instr: Instr) -> None:
    whole_warp(runner, instr)
    warp, cta, index, mask = runner.warp, runner.cta, runner.index, runner.mask
    tensor, _ = tensor_of(cta)
    cells, blocks = place(runner, instr, tensor)
    to = registers(runner.run.program, index, "d")
    check_count(to, cells)
    extra = registers(runner.run.program, index, "r") if instr.op.name == "tcgen05.ld.red" else None
    work = loads_of(runner)
    stamp = issue(runner, work)
    check_written(runner, cta, cells, index)
    touch_tensor(runner, cta, blocks, write=False, stamp=stamp, order=Order.now(runner.clock), index=index)
    watch_uses(runner, work, stamp[1])
    rows = to.rows if extra is None else np.concatenate((to.rows, extra.rows))
    warp.check_rows(rows, reads=False)
    warp.busy[rows] = BUSY_LOAD
    warp.init[rows] |= np.uint32(mask)
    work.pending[index] = rows
    work.owners[rows] = index
    values = tensor.load(cells)
    put(runner, to, values, mask)
    if extra is not None:
        op = instr.op
        one = reduce(values, str(op["op"]), str(op["type"]), absolute=bool(op["abs"]), nan=bool(op["nan"]))
        put(runner, extra, one[None], mask)
    work.done += 1
    runner.run.profile.count("tensor memory bytes loaded", 4 * cells.size)


def check_count(found: Registers, cells: Cells) -> None:
    if found.count != cells.shape[0]:
        raise TensorMemoryError(f"{found.count} registers for the {cells.shape[0]} that the shape moves")


def loads_of(runner: Runner) -> Work:
    """The warp's loads; from the first one on the use of their registers is watched."""
    work = work_of(runner, Source.TENSOR_LOAD)
    if runner.on_busy is None:
        work.owners = np.zeros(runner.run.program.rows, np.int64)

        def end() -> None:
            for load, index in work.moved.items():
                if load not in work.used:
                    report_use(runner, load, index)

        runner.on_busy = partial(note_use, runner, work)
        runner.at_end.append(end)
    return work


def watch_uses(runner: Runner, work: Work, number: int) -> None:
    """The current load is the operation of that number: its registers' uses are noted anew until the warp waits."""
    if work.pending:
        runner.drain_faults()
    else:
        runner.clock.before_tick.append(runner.drain_faults)
    runner.warp.report_again(work.users.get(runner.index, ()))
    work.latest[runner.index] = number


def note_use(runner: Runner, work: Work, fault: Fault) -> None:
    """A register is used that a load has, or a copy of one: compilers move copies in front of a wait."""
    program = runner.run.program
    load, by = int(work.owners[program.row(fault.register)]), program.instrs[fault.index]
    if by.op.name == "mov":
        work.moved.setdefault(load, fault.index)
        to = by["d"]
        assert to is not None
        for copy in items(to):
            if isinstance(copy, Reg):
                work.owners[program.row(copy.name)] = load
    elif by.op.name not in LOADS:
        work.uses.setdefault(work.latest[load], runner.clock.now)
        work.users.setdefault(load, set()).add(fault.index)
        if load not in work.used:
            work.used.add(load)
            report_use(runner, load, fault.index)


def report_use(runner: Runner, load: int, index: int) -> None:
    message = "registers of tcgen05.ld are used without tcgen05.wait::ld: a compiler may order that, PTX does not"
    runner.report(Kind.TENSOR_ORDER, message, other=runner.place(load), index=index, warning=True)


def put(runner: Runner, to: Registers, values: NDArray[np.uint32], mask: int) -> None:
    rows = runner.warp.rows
    if mask == FULL:
        rows[to.rows] = values[to.kept]
    else:
        lanes = np.flatnonzero(lanes_of(mask))
        rows[to.rows[:, None], lanes] = values[to.kept][:, lanes]


@executes("tcgen05.st")
def execute_store(runner: Runner, instr: Instr) -> None:
    whole_warp(runner, instr)
    warp, cta, index = runner.warp, runner.cta, runner.index
    tensor, _ = tensor_of(cta)
    if runner.mask != FULL:
        raise Unsupported(f"{instr.op.text} by a warp of {runner.count} threads")
    cells, blocks = place(runner, instr, tensor)
    source = registers(runner.run.program, index, "b")
    check_count(source, cells)
    values = taken(runner, source)
    work = work_of(runner, Source.TENSOR_STORE)
    stamp, order = issue(runner, work), Order.now(runner.clock)

    def run() -> None:
        check_allocated(cta, columns_of(blocks))
        touch_tensor(runner, cta, blocks, write=True, stamp=stamp, order=order, index=index)
        tensor.store(cells, values)
        work.done += 1
        runner.run.profile.count("tensor memory bytes stored", 4 * cells.size)

    submit(runner, instr.op.text, (warp, Source.TENSOR_STORE), run)


def taken(runner: Runner, source: Registers) -> NDArray[np.uint32]:
    """[registers, 32] of what a store writes."""
    warp, rows = runner.warp, source.rows
    warp.check_rows(rows, reads=True)
    if not source.constants and rows.size == source.count:
        return warp.rows[rows]
    values = np.empty((source.count, 32), np.uint32)
    values[source.kept] = warp.rows[rows]
    for at, value in source.constants:
        values[at] = value
    return values


# Waits and fences.


def waited(runner: Runner, source: Source, then: Callable[[Work], None]) -> Wait:
    """Wait until the warp's work so far is done, and know of it."""
    work = work_of(runner, source)
    issued = work.issued

    def finish() -> None:
        if issued:
            runner.clock.wait_tensor(work.component, issued)
        then(work)

    return Wait(f"waits for {source.value}", lambda: work.done >= issued, finish)


@executes("tcgen05.wait::ld")
def execute_wait_load(runner: Runner, instr: Instr) -> Wait:
    whole_warp(runner, instr)

    def give_back(work: Work) -> None:
        if work.pending:
            runner.drain_faults()
            runner.clock.before_tick.remove(runner.drain_faults)
            busy = runner.warp.busy
            busy[busy >= BUSY_LOAD] = 0
        for load in work.pending:
            work.moved.pop(load, None)
        work.pending.clear()

    return waited(runner, Source.TENSOR_LOAD, give_back)


@executes("tcgen05.wait::st")
def execute_wait_store(runner: Runner, instr: Instr) -> Wait:
    whole_warp(runner, instr)
    return waited(runner, Source.TENSOR_STORE, lambda work: None)


def hand_over(runner: Runner, to: Knowledge) -> None:
    """The warp's loads and stores that it has waited for come before what others do after they have synchronized."""
    for source in (Source.TENSOR_LOAD, Source.TENSOR_STORE):
        work = runner.state.get(source.value)
        if isinstance(work, Work):
            to.fenced[work.component] = runner.clock.knows.seen[work.component]


@executes("tcgen05.fence::before_thread_sync")
def execute_fence_before(runner: Runner, instr: Instr) -> None:
    hand_over(runner, runner.clock.knows)


@executes("tcgen05.fence::after_thread_sync")
def execute_fence_after(runner: Runner, instr: Instr) -> None:
    """Behind a relaxed wait it orders accesses to tensor memory, and nothing else (9.7.16.6.4)."""
    if runner.unfenced is not None:
        runner.clock.acquire(runner.unfenced.only(runner.clock.components.is_tensor))
    runner.clock.admit_tensor()
