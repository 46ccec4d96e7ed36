# SPDX-License-Identifier: Apache-2.0
"""Accesses to tensor memory: who issued them, what orders them, what they clash with.

Sources: PTX ISA 9.2, sections Memory Consistency Model (9.7.16.6) and Issue Granularity (9.7.16.5).

Between threads the canonical patterns (9.7.16.6.4) have a fence on both sides: who waited for its loads and stores has
tcgen05.fence::before_thread_sync before it arrives, and tcgen05.commit is one; who waits for an arrival has
tcgen05.fence::after_thread_sync before its next access. CUTLASS's pipelines have neither, so that one which is missing
is a warning. A fence does not wait: loads and stores that nobody waited for are in no order, fenced or not.

The history has one word for 16 lanes of a column. Every access touches those together, except for tcgen05.cp.4x256b and
for lanes that an MMA's masks disable: of these the history believes that they touch all 16.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.clocks import Clock, Source, Vector
from emulator.machine.cluster import TENSOR_BLOCK, Cta
from emulator.machine.findings import Kind
from emulator.machine.shadow import Clash, Shadow
from emulator.machine.tasks import Task
from emulator.machine.tensor_memory import (
    COLUMNS,
    FREE,
    Cells,
    Rectangle,
    TensorMemory,
    TensorMemoryError,
    name_address,
)
from emulator.ptx.ir import Instr

if TYPE_CHECKING:
    from emulator.machine.runner import Runner

Blocks = NDArray[np.int64]
Columns = NDArray[np.int64]


class TensorIssueError(ValueError):
    """A tcgen05 instruction executed in the wrong CTAs."""

    kind = Kind.TENSOR_ISSUE


class NotAligned(ValueError):
    """An instruction of a whole warp executed by a part of it."""

    kind = Kind.ALIGNED


@dataclass
class Work:
    """A warp's asynchronous tcgen05 work of one kind: loads, stores, or what it commits.

    Attributes:
        component: of its clock, which counts the operations from 1.
        pending: registers that loads fill, as rows of the register file, by the load, until the warp has waited.
        owners: of each row of the register file the latest load that filled it.
        used: loads whose registers were used before that, and moved: by what instruction they were moved.
        users: instructions that did, by the load.
        latest: number of a load's latest operation, by the load.
        uses: the warp's clock when something first used what an operation loads, by its number.
        lanes: last operation of each lane that has issued any since the last commit.
        ended: of mbarriers, the latest phase that a commit of the warp has ended alone, by their components.
    """

    component: int
    issued: int = 0
    done: int = 0
    pending: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    owners: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    used: set[int] = field(default_factory=set)
    users: dict[int, set[int]] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    moved: dict[int, int] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """What a warp knew when it issued an access.

    Attributes:
        seen: accesses that are ordered before it, by whatever means.
        handed: of loads and stores, those that their warps' fences cover.
        admitted: those that its own fence covers too, and its own.
    """

    seen: Vector
    handed: Vector
    admitted: Vector

    @classmethod
    def now(cls, clock: Clock) -> "Order":
        found = cls(clock.knows.seen.copy(), clock.knows.fenced.copy(), clock.admitted.copy())
        if clock.before_tick:
            # What the warp does from here on, such as to use what it loads, this access does not come behind.
            clock.tick()
        return found


def work_of(runner: "Runner", source: Source) -> Work:
    found = runner.state.get(source.value)
    if found is None:
        found = runner.state[source.value] = Work(runner.component(source))
    assert isinstance(found, Work)
    return found


def issue(runner: "Runner", work: Work) -> tuple[int, int]:
    """The stamp of the next operation."""
    work.issued += 1
    runner.cta.cluster.issued.setdefault(work.component, []).append(runner.clock.stamp)
    return work.component, work.issued


def submit(runner: "Runner", what: str, queue: Hashable, do: Callable[[], None]) -> None:
    """Hand asynchronous work over; its errors are the instruction's own."""
    index, run = runner.index, runner.run

    def task() -> None:
        runner.guarded(index, do)
        run.progress += 1

    run.tasks.submit(Task(f"{what} of {runner.name}", task), queue)


# Who executes.


def whole_warp(runner: "Runner", instr: Instr) -> None:
    """Raises NotAligned unless all of the warp's lanes execute an instruction that is .sync.aligned."""
    if runner.mask != runner.warp.live:
        raise NotAligned(
            f"{instr.op.name} is executed by lanes {runner.mask:#010x} of {runner.warp.live:#010x}: all of them have to"
        )


def single_lane(runner: "Runner", instr: Instr) -> int:
    """The lane that executes an instruction meant for one thread; of several the lowest does, once."""
    if runner.count > 1:
        runner.report(
            Kind.TENSOR_ISSUE,
            f"{instr.op.name} is executed by lanes {runner.mask:#010x}, each would issue it: one thread is meant",
        )
    return (runner.mask & -runner.mask).bit_length() - 1


def same_address(runner: "Runner", addresses: NDArray[np.int64], instr: Instr) -> int:
    """The one address that all lanes give; where they do not, that is undefined, and a GPU takes one of them."""
    lanes = runner.lanes
    first = int(addresses[lanes[0]])
    if (addresses[lanes] != first).any():
        message = f"{instr.op.name}: the lanes give different addresses; it goes on with that of the lowest lane"
        runner.report(Kind.TENSOR_ISSUE, message)
    return first & 0xFFFFFFFF


def tensor_of(cta: Cta) -> tuple[TensorMemory, Shadow]:
    if cta.tensor is None or cta.tensor_shadow is None:
        raise Unsupported("tcgen05 on a chip without tensor memory")
    return cta.tensor, cta.tensor_shadow


def group_of(runner: "Runner", instr: Instr) -> tuple[Cta, ...]:
    """The CTAs that an instruction with .cta_group is for, that of even rank first."""
    cta = runner.cta
    group = instr.op["group"]
    known = cta.state.setdefault("cta_group", group)
    if known != group:
        runner.report(Kind.TENSOR_ISSUE, f"{instr.op.text}: tcgen05 instructions of {cta.name} had .{known} until now")
    if group == "cta_group::1":
        return (cta,)
    ctas, even = cta.cluster.ctas, cta.rank & ~1
    if even + 1 >= len(ctas):
        raise TensorIssueError(f"{instr.op.text}: {cta.name} is the last of a cluster of {len(ctas)} and has no peer")
    return ctas[even], ctas[even + 1]


# What they touch.


def blocks_of(cells: Cells) -> Blocks:
    """Words of the history for cells, each once."""
    flat = cells.reshape(-1)
    return np.unique((flat >> 9) // TENSOR_BLOCK * COLUMNS + (flat & (COLUMNS - 1)))


def blocks_in(first: int, columns: int) -> Blocks:
    """Words of the history for whole columns."""
    rows = np.arange(128 // TENSOR_BLOCK)[:, None] * COLUMNS
    return (rows + np.arange(first, first + columns)).reshape(-1)


def check_allocated(cta: Cta, columns: Columns) -> None:
    """Raises TensorMemoryError where a column was given back meanwhile."""
    tensor, _ = tensor_of(cta)
    free = tensor.owner[columns] == FREE
    if free.any():
        column = int(columns[free.argmax()])
        raise TensorMemoryError(f"column {column} of {cta.name}'s tensor memory is touched and is not allocated")


def columns_of(blocks: Blocks) -> Columns:
    """Columns that words of the history lie in."""
    return np.unique(blocks & (COLUMNS - 1))


def check_written(runner: "Runner", cta: Cta, cells: Cells | Rectangle, index: int) -> None:
    """Report a read of what nobody wrote since the columns were allocated."""
    tensor, _ = tensor_of(cta)
    missing = tensor.unwritten(cells)
    if missing >= 0:
        where = name_address(missing // COLUMNS << 16 | missing % COLUMNS)
        runner.report(Kind.UNINITIALISED, f"{where} of {cta.name} is read and was never written", index=index)
        tensor.written[cells.cells if isinstance(cells, Rectangle) else cells] = True


def touch_tensor(
    runner: "Runner", cta: Cta, blocks: Blocks, *, write: bool, stamp: tuple[int, int], order: Order, index: int
) -> None:
    """Record an access and report what it clashes with.

    Args:
        order: as known when it was issued.
        index: of its instruction.
    """
    _, shadow = tensor_of(cta)
    late = shadow.unordered(blocks, order.admitted, write=write)
    if late is None:
        (shadow.write if write else shadow.read)(blocks, stamp, order.admitted, index)
        return
    clash = (shadow.write if write else shadow.read)(blocks, stamp, order.seen, index)
    if clash is not None:
        report_clash(runner, cta, clash, "written" if write else "read", index, order.seen)
    elif order.seen[late.component] >= late.clock:
        report_fence(runner, cta, late, "written" if write else "read", order, index)


def report_fence(runner: "Runner", cta: Cta, late: Clash, doing: str, order: Order, index: int) -> None:
    """Threads have synchronized, and a fence is missing around that."""
    handed = runner.clock.components.is_handed[late.component] and order.handed[late.component] < late.clock
    missing = "before_thread_sync behind it" if handed else "after_thread_sync before this"
    other = runner.run.place_of(cta.cluster.number, late.component, late.where)
    message = f"{name_of(late)} of {cta.name} is {doing}: an earlier {late.earlier} has no tcgen05.fence::{missing}"
    runner.report(Kind.TENSOR_FENCE, message, other=other, index=index, warning=True)


def name_of(clash: Clash) -> str:
    return name_address(clash.word // COLUMNS * TENSOR_BLOCK << 16 | clash.word % COLUMNS)


def report_clash(runner: "Runner", cta: Cta, clash: Clash, doing: str, index: int, seen: Vector) -> None:
    """A race; where the warp knows that the earlier access was issued, but not that it is done, a wait is missing.

    Args:
        seen: what the warp knew when it issued its access.
    """
    stamps = cta.cluster.issued.get(clash.component)
    issuer, clock = stamps[clash.clock - 1] if stamps else (clash.component, clash.clock)
    own = issuer == runner.clock.component
    known = own or runner.clock.knows.seen[issuer] >= clock
    message = f"{name_of(clash)} of {cta.name} is {doing}, and nothing orders an earlier {clash.earlier}"
    if known:
        message += ", of which only the issue is known: it has to be waited for, or committed, first"
    other = runner.run.place_of(cta.cluster.number, clash.component, clash.where)
    warning = known and is_used(cta, issuer, clash, seen)
    runner.report(Kind.TENSOR_ORDER if known else Kind.RACE, message, other=other, index=index, warning=warning)


def is_used(cta: Cta, issuer: int, clash: Clash, seen: Vector) -> bool:
    """Whether the clash is with a load whose registers were used before its warp let this access go on.

    Then it is over, on a chip as well, and the missing wait is a warning; but the ISA says of a register dependency
    that it orders no access to memory (9.7.16.6.4.5). A load that is used later may bring what this access writes.
    """
    runner = next(one for one in cta.cluster.runners if one.clock.component == issuer)
    work = runner.state.get(Source.TENSOR_LOAD.value)
    if not isinstance(work, Work) or clash.component != work.component:
        return False
    runner.drain_faults()
    return 0 < work.uses.get(clash.clock, 0) <= seen[issuer]
