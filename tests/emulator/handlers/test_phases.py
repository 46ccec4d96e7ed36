# SPDX-License-Identifier: Apache-2.0
"""Waits by parity that nothing orders before the phase after the next one, or behind the end of the phase before."""

from typing import NamedTuple

import pytest
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.machine.findings import Kind

# Of both warps: %p1 is thread 0, %p2 warp 1, %p4 a warp's first lane. %r5 is the address of the mbarrier that is waited
# for, those of others follow.
BEGIN = """
mov.u32 %r5, shared;
mov.u32 %r4, %tid.x;
shr.u32 %r6, %r4, 5;
and.b32 %r7, %r4, 31;
ld.param.b64 %rd1, [p0];
setp.eq.u32 %p1, %r4, 0;
setp.eq.u32 %p2, %r6, 1;
setp.eq.u32 %p4, %r7, 0;
@%p1 mbarrier.init.shared.b64 [%r5], {count};
@%p1 mbarrier.init.shared.b64 [%r5+8], {back};
@%p1 mbarrier.init.shared.b64 [%r5+16], 1;
fence.proxy.async;
bar.sync 0;
@%p2 bra WARP1;
"""
ARRIVE = "@%p4 mbarrier.arrive.shared.b64 _, [%r5];\n"
BACK = "mbarrier.arrive.shared.b64 _, [%r5+8];\n"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{}];\n"
CLUSTER = "barrier.cluster.arrive;\nbarrier.cluster.wait;\n"


def wait(number: int, parity: int = 0, at: int = 0) -> str:
    return f"AGAIN{number}:\nmbarrier.try_wait.parity.shared.b64 %p3, [%r5+{at}], {parity};\n@!%p3 bra AGAIN{number};\n"


class Way(NamedTuple):
    """How warp 1 tells warp 0 of its answer for the first phase, before warp 0 completes the second one.

    Attributes:
        told: by warp 1.
        heard: by warp 0.
        back: arrivals of the second mbarrier.
        count: of the first.
        orders: whether it does.
    """

    told: str
    heard: str
    back: int = 1
    count: int = 1
    orders: bool = True


BY_BYTES = "@%p4 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r5+64], [%rd1], 16, [{}];\n"
EXPECT = "@%p4 mbarrier.arrive.expect_tx.shared.b64 _, [{}], 16;\n"
# Others have their turn in every schedule.
PAUSE = "PAUSE:\nmbarrier.test_wait.parity.shared.b64 %p3, [%r5+16], 1;\n@!%p3 bra PAUSE;\n"
WAYS = {
    "nothing": Way("", PAUSE, orders=False),
    "before": Way("", wait(9, at=8) + PAUSE, orders=False),
    "mbarrier": Way("@%p4 " + BACK, wait(9, at=8)),
    "relaxed": Way("@%p4 mbarrier.arrive.relaxed.cta.shared.b64 _, [%r5+8];\n", wait(9, at=8)),
    "all lanes": Way(BACK, wait(9, at=8), back=32),
    "bar.sync": Way("bar.sync 1, 64;\n", "bar.sync 1, 64;\n"),
    "bar.arrive": Way("bar.arrive 1, 64;\n", "bar.sync 1, 64;\n"),
    "bar.red": Way(*2 * ["barrier.cta.red.popc.aligned.u32 %r8, 1, 64, %p1;\n"]),
    "the other way": Way("bar.sync 1, 64;\n", "bar.arrive 1, 64;\n" + PAUSE, orders=False),
    "cluster": Way(CLUSTER, CLUSTER),
    "own part": Way(ARRIVE, "", count=2),
    "cp.async": Way("cp.async.mbarrier.arrive.noinc.shared.b64 [%r5+8];\n", wait(9, at=8), back=32),
    "bytes": Way(
        BY_BYTES.format("%r5+8"),
        "@%p4 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r5+8], 16;\n@%p4 " + BACK + wait(9, at=8),
    ),
    "own bytes": Way(
        BY_BYTES.format("%r5") + wait(8, parity=1), "@%p4 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r5], 16;\n"
    ),
    "commit": Way("@%p4 " + COMMIT.format("%r5+8"), wait(9, at=8)),
    "own commit": Way("@%p4 " + COMMIT.format("%r5"), "", count=2),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", WAYS)
def test_the_phase_after_the_next_one_ends_behind_the_answer(name: str, schedule: str) -> None:
    """The mbarrier's first phase is two arrivals of warp 0 where warp 1 has a part in the second."""
    way = WAYS[name]
    before, after = ("", "@%p4 " + BACK) if name == "before" else (way.told, "")
    body = BEGIN.format(count=way.count, back=way.back)
    body += way.count * ARRIVE + way.heard + ARRIVE + "bra END;\nWARP1:\n"
    body += after + wait(0) + before + "END:\n"
    machine = run(body, zeros(64), block=64, schedule=schedule)
    if way.orders:
        assert not errors(machine)
    else:
        assert set(kinds(machine)) & {Kind.PHASE, Kind.DEADLOCK}
    if not way.orders and schedule == "eager":
        (finding,) = errors(machine)
        assert finding.kind is Kind.PHASE
        assert "a wait for phase 1, whose answer nothing orders before the end of phase 2" in finding.message
        assert finding.place.who.endswith("warp 1")
        assert "try_wait" in finding.place.text


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("first", "count", "orders"),
    [
        ("", 1, False),
        (wait(8), 1, True),
        ("bar.sync 1, 64;\n", 1, True),
        # What warp 1 knows without a wait: it has arrived itself, and alone; or with others, whom it does not know.
        ("@%p4 mbarrier.arrive.shared.b64 _, [%r5];\n", 2, False),
    ],
)
def test_the_phase_before_ends_before_the_wait(first: str, count: int, orders: bool, schedule: str) -> None:
    """Warp 1 needs the second phase alone: before the first has ended, its parity is that of the phase before."""
    body = BEGIN.format(count=count, back=1) + ARRIVE + ("bar.sync 1, 64;\n" if "bar" in first else "")
    # Warp 0 goes on when warp 1 has its answer for the first phase, or comes to its wait for the second.
    body += (
        wait(9, at=8) + count * ARRIVE + "bra END;\nWARP1:\n" + first + "@%p4 " + BACK + wait(0, parity=1) + "END:\n"
    )
    machine = run(body, zeros(64), block=64, schedule=schedule)
    assert (Kind.PHASE in kinds(machine)) != orders


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warp_that_completes_a_phase_alone_need_not_wait_for_it(schedule: str) -> None:
    body = BEGIN.format(count=1, back=1) + wait(9, at=8) + ARRIVE + "bra END;\nWARP1:\n"
    body += ARRIVE + "@%p4 " + BACK + wait(0, parity=1) + "END:\n"
    assert not errors(run(body, zeros(64), block=64, schedule=schedule))


def test_bytes_of_a_phase_are_not_known_by_arrivals() -> None:
    """Warp 1 completes the first phase, but for bytes that are under way: these may come later than its wait."""
    body = BEGIN.format(count=1, back=1) + wait(9, at=8) + ARRIVE + "bra END;\nWARP1:\n"
    body += EXPECT.format("%r5") + BY_BYTES.format("%r5") + "@%p4 " + BACK + wait(0, parity=1) + "END:\n"
    assert kinds(run(body, zeros(64), block=64, schedule="eager")) == [Kind.PHASE]


@pytest.mark.parametrize(("count", "orders"), [(1, True), (2, False)])
def test_a_commit_comes_after_the_commits_before_it(count: int, orders: bool) -> None:
    """Who waits for a later commit knows of phases that earlier commits of its thread have ended alone."""
    body = BEGIN.format(count=count, back=1)
    by_commit = "@%p1 " + COMMIT.format("%r5")
    body += by_commit + (count - 1) * ARRIVE + "@%p1 " + COMMIT.format("%r8")
    body += wait(9, at=16) + by_commit + (count - 1) * ARRIVE + "bra END;\nWARP1:\n"
    body += wait(8, at=8) + "@%p4 mbarrier.arrive.shared.b64 _, [%r5+16];\n" + wait(0, parity=1) + "END:\n"
    body = body.replace("mov.u32 %r4, %tid.x;", "add.u32 %r8, %r5, 8;\nmov.u32 %r4, %tid.x;")
    machine = run(body, zeros(64), block=64, schedule="eager", arch="sm_100a")
    assert kinds(machine) == ([] if orders else [Kind.PHASE])
