# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies and stores of single threads: cp.async, st.async, red.async.

Sources: PTX ISA 9.2, sections 9.7.9.25.3 (cp.async and its groups), 9.7.13.15.17 (cp.async.mbarrier.arrive), 9.7.9.12
(st.async), 9.7.13.7 (red.async). All of them make their accesses by the generic proxy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from emulator.core.program import RANK_SHIFT, SHARED_BASE
from emulator.machine import copies
from emulator.machine.access import shared_parts
from emulator.machine.barriers import MAX_COUNT, BarrierMisuse
from emulator.machine.clocks import Source
from emulator.machine.cluster import OFFSET, Cta
from emulator.machine.copies import CopyError
from emulator.machine.handlers.barriers import each, locate, mbarrier
from emulator.machine.handlers.groups import groups_of
from emulator.machine.handlers.issue import Issue, barrier_of, column
from emulator.machine.handlers.memory import items, read_items
from emulator.machine.handlers.registry import executes
from emulator.machine.memory import check_alignment
from emulator.machine.runner import Runner, Wait
from emulator.ptx.ir import BITS, Address, Imm, Instr

Addresses = NDArray[np.int64]
SHARED = SHARED_BASE - 1  # the bits of a generic address that are a shared one


@dataclass(eq=False)
class Copies:
    """Copies of a warp that are not done, and what happens once they are.

    Attributes:
        waiting: for each arrival the copies that it still waits for, and what it does then.
    """

    pending: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[set[int], Callable[[], None]]] = field(default_factory=list)
    issued: int = 0

    def add(self, lanes: int) -> int:
        """A copy of those lanes; its number."""
        self.issued += 1
        self.pending[self.issued] = lanes
        return self.issued

    def done(self, number: int) -> None:
        del self.pending[number]
        for those, _ in self.waiting:
            those.discard(number)
        ready = [then for those, then in self.waiting if not those]
        self.waiting = [(those, then) for those, then in self.waiting if those]
        for then in ready:
            then()

    def after(self, lanes: int, then: Callable[[], None]) -> None:
        """Do something once the copies so far of those lanes are done."""
        those = {number for number, of in self.pending.items() if of & lanes}
        if those:
            self.waiting.append((those, then))
        else:
            then()


def copies_of(runner: Runner) -> Copies:
    found = runner.state.setdefault("cp.async", Copies())
    assert isinstance(found, Copies)
    return found


@executes("cp.async", "cp.async#ignore")
def execute_copy(runner: Runner, instr: Instr) -> None:
    """4, 8 or 16 bytes for each lane; of fewer source bytes the rest is zeros."""
    to, source, size = instr["d"], instr["a"], instr["size"]
    assert isinstance(to, Address)
    assert isinstance(source, Address)
    assert isinstance(size, Imm)
    unit = size.value
    if unit not in (4, 8, 16) or (instr.op["cache"] == "cg" and unit != 16):
        raise CopyError(f"{instr.op.text} of {unit} bytes")
    lanes, place = runner.lanes, instr.op.form.place
    cta, offsets = destination(runner, runner.warp.address(to)[lanes])
    addresses = runner.warp.address(source)[lanes]
    counts = np.full(lanes.size, unit)
    if "src" in place and (operand := instr["src"]) is not None:
        counts = column(runner, operand)[lanes].astype(np.int64)
        if (counts > unit).any():
            raise CopyError(f"{instr.op.text}: {counts.max()} bytes of the source for {unit}")
    if "ignore" in place and (ignored := instr["ignore"]) is not None:
        holds = runner.warp.pred(ignored)
        counts = np.where(holds >> lanes & 1, 0, counts)
    check_alignment(addresses[counts > 0], unit, "global")
    cta.shared.check(offsets, unit)
    issue = Issue.of(runner, generic=True)
    groups, copying = groups_of(runner, Source.COPY_GROUP), copies_of(runner)
    group, stamp = groups.open, (runner.component(Source.COPY_GROUP), groups.now)
    group.add(runner.mask, runner.index)
    number = copying.add(runner.mask)
    runner.run.profile.count("cp.async bytes", int(counts.sum()))

    def do() -> None:
        # The end of a CTA waits for these copies; what they bring is lost.
        if not issue.gone(cta, warning=True):
            data = np.zeros((lanes.size, unit), np.uint8)
            for count in np.unique(counts[counts > 0]):
                those = counts == count
                data[those, :count] = partly(issue, addresses[those], int(count), stamp)
            issue.to_shared(cta, unit, offsets, data, stamp)
        group.reading -= 1
        group.writing -= 1
        copying.done(number)

    issue.submit("a cp.async", do)


def destination(runner: Runner, addresses: Addresses) -> tuple[Cta, Addresses]:
    """The CTA, and offsets in its shared memory: a cp.async writes that of its own CTA."""
    addresses = addresses & SHARED
    if (addresses >> RANK_SHIFT != runner.cta.rank).any():
        raise CopyError(f"shared address {int(addresses[0]):#x} is another CTA's: a cp.async writes its own")
    return runner.cta, addresses & OFFSET


def partly(issue: Issue, addresses: Addresses, count: int, stamp: tuple[int, int]) -> NDArray[np.uint8]:
    """[n, count] bytes of global memory, any count."""
    if count & (count - 1) == 0 and not (addresses & (count - 1)).any():
        return issue.from_global(addresses, count, stamp)
    every = (addresses[:, None] + np.arange(count)).reshape(-1)
    return issue.from_global(every, 1, stamp).reshape(-1, count)


def learn(runner: Runner, clock: int) -> None:
    """The warp has waited for its copies up to a group. Their writes are generic: engines need a proxy fence."""
    if clock:
        runner.clock.knows.learn(runner.component(Source.COPY_GROUP), clock, generic=True)


@executes("cp.async.commit_group")
def execute_commit(runner: Runner, instr: Instr) -> None:
    groups_of(runner, Source.COPY_GROUP).commit(runner.mask)


@executes("cp.async.wait_group", "cp.async.wait_all")
def execute_wait(runner: Runner, instr: Instr) -> Wait:
    groups = groups_of(runner, Source.COPY_GROUP)
    left = 0
    if "n" in instr.op.form.place:
        operand = instr["n"]
        assert isinstance(operand, Imm)
        left = operand.value
    else:
        groups.commit(runner.mask)
    waited = groups.before(runner.mask, left)
    return Wait(
        f"waits for cp.async groups, {left} of {len(groups.committed)} may be pending",
        lambda: not any(group.writing for group in waited),
        lambda: learn(runner, groups.drop(waited)),
    )


@executes("cp.async.mbarrier.arrive")
def execute_arrive(runner: Runner, instr: Instr) -> None:
    """The mbarrier is arrived at once the lanes' copies so far are done."""
    groups, copying = groups_of(runner, Source.COPY_GROUP), copies_of(runner)
    clock, index = groups.tick(), runner.index
    component = runner.component(Source.COPY_GROUP)
    history = runner.clock.history.copy()
    for address, mask in each(runner, instr["mbar"]):
        barrier = mbarrier(runner, address)
        cta, offset = locate(runner, address)
        arrivals = mask.bit_count()
        if instr.op["noinc"] is None:
            barrier.pending += arrivals
            if barrier.pending > MAX_COUNT:
                raise BarrierMisuse(f"{barrier}: more than {MAX_COUNT} arrivals are pending")

        def arrive(cta=cta, offset=offset, arrivals=arrivals) -> None:  # type: ignore[no-untyped-def]
            barrier = barrier_of(cta, offset)
            barrier.learn(component, clock, generic=True)
            barrier.arrive(None, history, arrivals, engine=True)
            runner.run.progress += 1

        copying.after(mask, partial(runner.guarded, index, arrive))
    runner.run.progress += 1


# Stores and reductions to the cluster's shared memory.


@executes("st.async", "red.async")
def execute_store(runner: Runner, instr: Instr) -> None:
    """Each lane writes its own words and completes their bytes on its own mbarrier."""
    to, source, at = instr["a"], instr["b"], instr["mbar"]
    assert isinstance(to, Address)
    assert isinstance(at, Address)
    assert source is not None
    kind = instr.op["type"] or ""
    lanes = runner.lanes
    values = read_items(runner, items(source), BITS[kind])
    shared = runner.warp.address(to)[lanes] & SHARED
    barriers = runner.warp.address(at)[lanes] & SHARED
    unit, count = values.dtype.itemsize, values.shape[1]
    data = np.ascontiguousarray(values).view(np.uint8).reshape(lanes.size, unit * count)
    for address, _ in each(runner, at):
        mbarrier(runner, address)
    op = instr.op["op"]
    issue = Issue.of(runner, generic=True)
    for cta, some, offsets in shared_parts(runner, shared):
        cta.shared.check(offsets, data.shape[1])
        for address in np.unique(barriers[some]):
            home, offset = locate(runner, int(address))
            if home is not cta:
                raise BarrierMisuse(f"a store to {cta.name} that completes on an mbarrier of {home.name}")
            mine = barriers[some] == address

            def do(cta=cta, offset=offset, data=data[some][mine], offsets=offsets[mine]) -> None:  # type: ignore[no-untyped-def]
                if issue.gone(cta):
                    return
                barrier = barrier_of(cta, offset)
                stamp = (barrier.component, barrier.phase)
                if op is None:
                    issue.to_shared(cta, data.shape[1], offsets, data, stamp)
                else:
                    # Lane by lane: several may reduce into one word.
                    for lane in range(offsets.size):
                        issue.to_shared(
                            cta, unit, offsets[lane : lane + 1], data[lane : lane + 1], stamp, None,
                            lambda old, new: copies.reduce(op, kind, old, new, cluster=True),
                        )  # fmt: skip
                barrier.complete_bytes(data.size, issue.history)

            issue.submit(f"a {instr.op.name}", do)
    runner.run.profile.count(f"{instr.op.name} bytes", data.size)
