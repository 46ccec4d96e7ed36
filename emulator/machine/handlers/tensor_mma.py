# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma, .cp, .shift and .commit (PTX ISA 9.2, 9.7.16.6, 9.7.16.9, 9.7.16.10 and 9.7.16.12).

What one warp issues is done in the order of issue. The manual promises that for pairs such as mma and mma, cp and mma,
shift and mma; kernels also rely on it for an MMA and a copy over what it has read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import RANK_SHIFT, Program
from emulator.machine.access import touch_shared
from emulator.machine.barriers import BarrierMisuse
from emulator.machine.clocks import Source, Vector
from emulator.machine.cluster import OFFSET, Cta
from emulator.machine.findings import Kind
from emulator.machine.handlers.barriers import locate, mbarrier
from emulator.machine.handlers.memory import items
from emulator.machine.handlers.registry import executes
from emulator.machine.handlers.tensor import hand_over
from emulator.machine.memory import MemoryFault
from emulator.machine.runner import Runner
from emulator.machine.tcgen05 import Mma, Multiplication, SharedOperand, TensorCopy, shift_down, shifted
from emulator.machine.tensor_access import (
    Blocks,
    Columns,
    Order,
    TensorIssueError,
    Work,
    blocks_of,
    check_allocated,
    check_written,
    columns_of,
    group_of,
    issue,
    single_lane,
    submit,
    tensor_of,
    touch_tensor,
    work_of,
)
from emulator.machine.tensor_memory import Cells, Rectangle, split_address
from emulator.ptx.ir import Address, Instr, Operand

ALL_BYTES = 0xF
ALWAYS = np.iinfo(np.int32).max
KEPT = 512  # placements; those of an MMA with a large result take half a megabyte

Bytes = NDArray[np.uint8]
T = TypeVar("T", Multiplication, TensorCopy)


@dataclass(frozen=True, eq=False)
class Footprint:
    """What an operation reads and writes, by CTA of the group.

    Attributes:
        shared: (CTA, parts of its shared memory).
        needs: (CTA, cells) that must have been written.
        reads, writes: (CTA, words of the tensor memory's history); what is read and written is in `writes` alone.
    """

    shared: tuple[SharedOperand, ...]
    needs: tuple[tuple[int, Cells | Rectangle], ...]
    reads: tuple[tuple[int, Blocks], ...]
    writes: tuple[tuple[int, Blocks], ...]

    @cached_property
    def columns(self) -> tuple[tuple[int, Columns], ...]:
        """(CTA, columns) of tensor memory that are touched."""
        return tuple((at, columns_of(blocks)) for at, blocks in (*self.reads, *self.writes))


@dataclass(frozen=True)
class Issue:
    """An operation as it was issued.

    Attributes:
        order: before its accesses to tensor memory.
        shared_order: what is ordered before its reads of shared memory.
    """

    index: int
    ctas: tuple[Cta, ...]
    stamp: tuple[int, int]
    order: Order
    shared_order: Vector


def start(runner: Runner, lane: int, ctas: tuple[Cta, ...]) -> Issue:
    work = work_of(runner, Source.TENSOR_PIPE)
    stamp = issue(runner, work)
    work.lanes[lane] = work.issued
    order = Order.now(runner.clock)
    order.seen[work.component] = order.admitted[work.component] = ALWAYS
    shared_order = runner.clock.async_order()
    runner.clock.tick()
    return Issue(runner.index, ctas, stamp, order, shared_order)


def touch(runner: Runner, by: Issue, what: Footprint) -> None:
    """Check and record all accesses of an operation."""
    for part in what.shared:
        cta = by.ctas[part.cta]
        if int(part.words[-1]) * 4 + 4 > cta.shared.size or int(part.words[0]) < 0:
            raise MemoryFault(
                Kind.BOUNDS,
                f"a matrix up to shared address {int(part.words[-1]) * 4 + 3:#x}: the CTA has {cta.shared.size} bytes",
                0,
            )
        if cta is not runner.cta and all(one.done for one in cta.runners):
            raise TensorIssueError(f"an operation of both CTAs after {cta.name} has ended")
        touch_shared(
            runner,
            cta,
            part.words,
            ALL_BYTES,
            write=False,
            stamp=by.stamp,
            order=by.shared_order,
            read_order=by.order.seen,
            index=by.index,
        )
    for at, columns in what.columns:
        check_allocated(by.ctas[at], columns)
    for at, cells in what.needs:
        check_written(runner, by.ctas[at], cells, by.index)
    for write, parts in ((False, what.reads), (True, what.writes)):
        for at, blocks in parts:
            touch_tensor(runner, by.ctas[at], blocks, write=write, stamp=by.stamp, order=by.order, index=by.index)


def queue_of(runner: Runner) -> tuple[object, ...]:
    return runner.warp, Source.TENSOR_PIPE


# Placements are kept: a loop comes back to the same descriptors.


class Placements:
    """What was placed, by instruction and operands."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], tuple[Any, Footprint]] = {}

    def get(
        self,
        key: tuple[object, ...],
        make: Callable[[], T],
        footprint: Callable[[T], Footprint],
    ) -> tuple[T, Footprint]:
        if key not in self._kept:
            made = make()
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = made, footprint(made)
        return self._kept[key]


PLACEMENTS = Placements()


def footprint_of_mma(what: Multiplication) -> Footprint:
    written = {id(cells) for _, cells in what.writes}
    reads = [(at, cells) for at, cells in what.reads if id(cells) not in written]
    return Footprint(
        what.shared,
        tuple((at, Rectangle.of(cells)) for at, cells in what.reads),
        tuple((at, blocks_of(cells)) for at, cells in reads if cells.size),
        tuple((at, blocks_of(cells)) for at, cells in what.writes if cells.size),
    )


def footprint_of_copy(what: TensorCopy) -> Footprint:
    return Footprint(what.shared, (), (), tuple((at, blocks_of(cells)) for at, cells in enumerate(what.cells)))


@lru_cache(maxsize=4096)
def mma_of(program: Program, index: int, descriptor: int, disabled: tuple[int, ...]) -> Mma:
    return Mma.of(program.instrs[index], descriptor, disabled)


def number(runner: Runner, operand: Operand | None, lane: int) -> int:
    """An operand's value in a lane: an address or an integer."""
    assert operand is not None
    if isinstance(operand, Address):
        return int(runner.warp.address(operand)[lane]) & 0xFFFFFFFF
    return runner.warp.uniform(operand, 1 << lane)


@executes("tcgen05.mma#ss", "tcgen05.mma#ts", "tcgen05.mma#scaled_ss", "tcgen05.mma#scaled_ts")
def execute_mma(runner: Runner, instr: Instr) -> None:
    lane, ctas = single_lane(runner, instr), group_of(runner, instr)
    places = instr.op.form.place
    d, a, b, bits = (number(runner, instr[role], lane) for role in ("d", "a", "b", "idesc"))
    masks = instr["lanes"] if "lanes" in places else None
    disabled = () if masks is None else tuple(number(runner, one, lane) for one in items(masks))
    scales = None
    if "scale_a" in places:
        scales = number(runner, instr["scale_a"], lane), number(runner, instr["scale_b"], lane)
    enable = instr["enable_d"]
    assert enable is not None
    accumulate = bool(runner.warp.pred(enable) >> lane & 1)
    program, index = runner.run.program, runner.index
    mma = mma_of(program, index, bits & 0xFFFFFFFF, disabled)
    tensors = [tensor_of(cta)[0] for cta in ctas]
    what, footprint = PLACEMENTS.get(
        (mma, d, a, b, accumulate, scales),
        lambda: Multiplication.place(mma, tensors, d, a, b, accumulate=accumulate, scales=scales),
        footprint_of_mma,
    )
    by = start(runner, lane, ctas)

    def run() -> None:
        touch(runner, by, footprint)
        what.run([cta.shared.bytes.data for cta in ctas], tensors)
        count(runner, mma, footprint)

    submit(runner, instr.op.text, queue_of(runner), run)


def count(runner: Runner, mma: Mma, footprint: Footprint) -> None:
    what, profile = mma.descriptor, runner.run.profile
    profile.count("tcgen05.mma operations")
    profile.count(f"tcgen05.mma flops of kind::{what.kind}", 2 * what.m * what.n * what.k)
    profile.count("shared bytes read by tcgen05.mma", 4 * sum(part.words.size for part in footprint.shared))


@executes("tcgen05.cp")
def execute_copy(runner: Runner, instr: Instr) -> None:
    lane, ctas = single_lane(runner, instr), group_of(runner, instr)
    address, descriptor = number(runner, instr["d"], lane), number(runner, instr["a"], lane)
    tensors = [tensor_of(cta)[0] for cta in ctas]
    what, footprint = PLACEMENTS.get(
        (instr.op.text, address, descriptor),
        lambda: TensorCopy.place(instr, tensors, address, descriptor),
        footprint_of_copy,
    )
    by = start(runner, lane, ctas)

    def run() -> None:
        touch(runner, by, footprint)
        what.run([cta.shared.bytes.data for cta in ctas], tensors)
        runner.run.profile.count("tcgen05.cp operations")
        runner.run.profile.count("shared bytes read by tcgen05.cp", 4 * sum(one.words.size for one in what.shared))

    submit(runner, instr.op.text, queue_of(runner), run)


@executes("tcgen05.shift")
def execute_shift(runner: Runner, instr: Instr) -> None:
    lane, ctas = single_lane(runner, instr), group_of(runner, instr)
    address = number(runner, instr["a"], lane)
    tensors = [tensor_of(cta)[0] for cta in ctas]
    cells = tuple((at, shifted(one, address)) for at, one in enumerate(tensors))
    footprint = Footprint((), cells, (), tuple((at, blocks_of(some)) for at, some in cells))
    by = start(runner, lane, ctas)

    def run() -> None:
        touch(runner, by, footprint)
        for tensor in tensors:
            shift_down(tensor, split_address(address)[1])
        runner.run.profile.count("tcgen05.shift operations")

    submit(runner, instr.op.text, queue_of(runner), run)


@executes("tcgen05.commit")
def execute_commit(runner: Runner, instr: Instr) -> None:
    """An arrival once everything is done that the thread has issued so far.

    Whoever waits for it learns of these operations, and of what was known when they were committed: they came after
    it. It does not learn of the thread's own accesses: a commit releases nothing else.
    """
    lane = single_lane(runner, instr)
    group_of(runner, instr)
    address = number(runner, instr["mbar"], lane)
    targets = [address]
    if instr.op["multicast"]:
        mask = number(runner, instr["mask"], lane) & 0xFFFF
        targets = [rank << RANK_SHIFT | address & OFFSET for rank in range(16) if mask >> rank & 1]
    for target in targets:
        mbarrier(runner, target)
    work = work_of(runner, Source.TENSOR_PIPE)
    check_lanes(runner, work, lane)
    last = work.issued
    known = runner.clock.knows.copy()
    known.seen[runner.clock.component] = known.fenced[runner.clock.component] = 0
    hand_over(runner, known)
    history = runner.clock.history.copy()

    def run() -> None:
        # Commits of a thread arrive in their order: a later one waits for all that an earlier one waits for. That it
        # cannot be overtaken on its way to the mbarriers is an assumption.
        for component, phase in work.ended.items():
            history[component] = max(int(history[component]), phase)
        for target in targets:
            cta, offset = locate(runner, target)
            barrier = cta.mbarriers.get(offset)
            if barrier is None:
                raise BarrierMisuse(f"{cta.name} has no mbarrier at shared address {offset:#x} any more")
            if cta is not runner.cta and not cta.cluster.done and all(one.done for one in cta.runners):
                raise BarrierMisuse(f"{barrier} is arrived at after {cta.name} has ended")
            if last:
                barrier.learn(work.component, last)
            barrier.hand(known)
            phase = barrier.arrive(None, history, engine=True)
            if barrier.expected == 1 and barrier.phase > phase:
                work.ended[barrier.component] = phase
        runner.run.profile.count("tcgen05.commit operations")

    submit(runner, instr.op.text, queue_of(runner), run)


def check_lanes(runner: Runner, work: Work, lane: int) -> None:
    """A commit is for the operations of its own thread."""
    others = [other for other in work.lanes if other != lane]
    if others:
        runner.report(
            Kind.TENSOR_ORDER, f"a commit by lane {lane} does not cover what lane {others[0]} has issued since the last"
        )
    work.lanes.clear()
