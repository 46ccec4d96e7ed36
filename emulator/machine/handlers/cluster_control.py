# SPDX-License-Identifier: Apache-2.0
"""Cluster launch control: a running cluster takes another one's work off the grid (PTX ISA 9.2, 9.7.13.18).

The response is 16 opaque bytes; here the first CTA's x, y and z, then 1 if there was a cluster to take, each 4 bytes.
"""

from functools import partial

import numpy as np

from emulator.machine.cluster import Cta
from emulator.machine.copies import CopyError
from emulator.machine.findings import Kind
from emulator.machine.handlers.barriers import mbarrier
from emulator.machine.handlers.issue import Issue, barrier_of, distinct, own, shared_address
from emulator.machine.handlers.registry import executes
from emulator.machine.runner import Runner
from emulator.ptx.ir import Instr, Operand, Sink, Vec

RESPONSE_BYTES = 16
TAKEN = 1
UNDEFINED = 0xFFFFFFFF  # the place of a cluster that was not taken


@executes("clusterlaunchcontrol.try_cancel")
def execute_cancel(runner: Runner, instr: Instr) -> None:
    """The response comes to the CTA, or to all of its cluster, and completes its bytes on an mbarrier of each."""
    to, at = instr["d"], instr["mbar"]
    assert to is not None
    assert at is not None
    if (said := runner.cta.refused) is not None and runner.clock.knows.seen[said[0]] >= said[1]:
        runner.report(Kind.COPY, "asks for another cluster when the CTA knows that there is none left")
    issue = Issue.of(runner)
    for address, barrier_address in distinct(runner, to, at):
        offset, barrier_offset = own(runner, address), own(runner, barrier_address)
        if offset % RESPONSE_BYTES:
            raise CopyError(f"shared address {address:#x}: a response is aligned to {RESPONSE_BYTES} bytes")
        ctas = runner.cta.cluster.ctas if instr.op["multicast"] else [runner.cta]
        for cta in ctas:
            mbarrier(runner, shared_address(cta.rank, barrier_offset))
        issue.submit("a try_cancel", partial(respond, issue, ctas, offset, barrier_offset))


def respond(issue: Issue, ctas: list[Cta], offset: int, barrier_offset: int) -> None:
    run = issue.runner.run
    first = run.next_cancelled()
    words = np.array([*(first or (0, 0, 0)), TAKEN if first else 0], np.uint32)
    run.profile.count("clusters cancelled" if first else "cancellations that found none left")
    for cta in ctas:
        if issue.gone(cta):
            continue
        barrier = barrier_of(cta, barrier_offset)
        stamp = (barrier.component, barrier.phase)
        issue.to_shared(cta, RESPONSE_BYTES, np.array([offset]), words.view(np.uint8)[None], stamp)
        if first is None:
            cta.refused = stamp
        barrier.complete_bytes(RESPONSE_BYTES, issue.history)


@executes("clusterlaunchcontrol.query_cancel.is_canceled")
def execute_query(runner: Runner, instr: Instr) -> None:
    to = instr["p"]
    assert to is not None
    taken = response(runner, instr)[:, 3] == TAKEN
    runner.warp.put_pred(to, int(np.bitwise_or.reduce(taken.astype(np.int64) << np.arange(32))))


@executes("clusterlaunchcontrol.query_cancel.get_first_ctaid", "clusterlaunchcontrol.query_cancel#axis")
def execute_place(runner: Runner, instr: Instr) -> None:
    """The first CTA of the cluster that was taken; undefined if there was none, and so is the fourth component."""
    to, words = instr["d"], response(runner, instr)
    places = np.where(words[:, 3:] == TAKEN, words, np.uint32(UNDEFINED))
    axis = instr.op["axis"]
    if axis is not None:
        assert to is not None
        runner.warp.put32(to, places[:, "xyz".index(axis[-1])])
        return
    assert isinstance(to, Vec)
    for number, item in enumerate(to.items):
        if not isinstance(item, Sink):
            runner.warp.put32(item, places[:, number])


def response(runner: Runner, instr: Instr) -> np.ndarray:
    """[32, 4] words of the lanes' responses."""
    handle: Operand | None = instr["handle"]
    assert handle is not None
    return np.ascontiguousarray(runner.warp.b128(handle)).view(np.uint32)
