# SPDX-License-Identifier: Apache-2.0
"""cp.async with its groups and mbarriers, and asynchronous stores to the cluster."""

import numpy as np
import pytest
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.machine import Machine
from emulator.machine.findings import Kind

# Each thread copies 16 bytes of p0 to its own place, %r7; %r4 is an mbarrier.
START = """
mov.u32 %r1, %tid.x;
setp.eq.u32 %p3, %r1, 0;
mov.b32 %r3, shared;
add.s32 %r4, %r3, 8192;
shl.b32 %r6, %r1, 4;
add.s32 %r7, %r3, %r6;
ld.param.b64 %rd1, [p0];
ld.param.b64 %rd2, [p1];
mul.wide.u32 %rd3, %r1, 16;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
"""
COPY = "cp.async.cg.shared.global [%r7], [%rd4], 16;\n"
COMMIT = "cp.async.commit_group;\n"
OUT = "ld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r7];\nst.global.v4.b32 [%rd5], {%r8, %r9, %r10, %r11};\n"
# What the thread 32 further on has copied.
OTHER = "xor.b32 %r12, %r6, 512;\nadd.s32 %r7, %r3, %r12;\n"
SYNC = "bar.sync 0;\n"


def go(body: str, schedule: str = "lazy", **more) -> "tuple[Machine, np.ndarray, np.ndarray]":
    first, second = zeros(1024), zeros(1024)
    first[:] = np.arange(1000, 2024)
    return run(START + body, first, second, block=64, schedule=schedule, **more), first, second


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("wait", "clean"),
    [
        (COMMIT + "cp.async.wait_group 0;\n", True),
        ("cp.async.wait_all;\n", True),
        (COMMIT + "cp.async.wait_group 1;\n", False),
        ("cp.async.wait_group 0;\n", False),
        ("", False),
    ],
)
def test_waits(schedule: str, wait: str, clean: bool) -> None:
    machine, first, second = go(COPY + wait + SYNC + OTHER + OUT, schedule)
    if clean:
        assert not errors(machine)
        assert (second[:256].reshape(2, 128) == first[:256].reshape(2, 128)[::-1]).all()
    else:
        assert set(kinds(machine)) & {Kind.RACE, Kind.UNINITIALISED}


def test_waiting_is_for_ones_own_copies() -> None:
    machine, _, _ = go(COPY + "cp.async.wait_all;\n" + OTHER + OUT, "eager")
    assert set(kinds(machine)) & {Kind.RACE, Kind.UNINITIALISED}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("left", "clean"), [(1, (True, False)), (0, (True, True)), (2, (False, False))])
def test_groups_are_waited_for_in_order(schedule: str, left: int, clean: tuple[bool, bool]) -> None:
    two = COPY + COMMIT + COPY.replace("[%r7]", "[%r7+2048]").replace("[%rd4]", "[%rd4+2048]") + COMMIT
    for place, known in enumerate(clean):
        body = two + f"cp.async.wait_group {left};\n" + OUT.replace("[%r7]", f"[%r7+{2048 * place}]")
        machine, first, second = go(body, schedule)
        assert (not errors(machine)) == known
        if known:
            assert (second[:256] == first[512 * place : 512 * place + 256]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fewer_bytes_of_the_source(schedule: str) -> None:
    """Thread t copies t % 17 bytes; the rest is zeros."""
    copy = "rem.u32 %r20, %r1, 17;\ncp.async.ca.shared.global [%r7], [%rd4], 16, %r20;\ncp.async.wait_all;\n"
    machine, first, second = go(copy + OUT, schedule)
    assert not errors(machine)
    wanted = first[:256].view(np.uint8).reshape(64, 16).copy()
    for thread in range(64):
        wanted[thread, thread % 17 :] = 0
    assert (second[:256].view(np.uint8).reshape(64, 16) == wanted).all()


def test_a_source_that_is_not_read_may_be_anywhere() -> None:
    copy = "add.s64 %rd4, %rd4, 1048576;\ncp.async.ca.shared.global [%r7], [%rd4], 16, {};\ncp.async.wait_all;\n"
    machine, _, second = go(copy.format("0") + OUT)
    assert not errors(machine)
    assert (second == 0).all()
    assert kinds(go(copy.format("4") + OUT)[0]) == [Kind.BOUNDS]


def test_a_source_that_is_ignored() -> None:
    copy = "setp.lt.u32 %p4, %r1, 8;\ncp.async.ca.shared.global [%r7], [%rd4], 16, %p4;\ncp.async.wait_all;\n"
    machine, first, second = go(copy + OUT)
    assert not errors(machine)
    assert (second[:32] == 0).all()
    assert (second[32:256] == first[32:256]).all()


@pytest.mark.parametrize("size", [4, 8])
def test_narrow_copies(size: int) -> None:
    copy = "st.shared.v4.b32 [%r7], {5, 5, 5, 5};\n" + f"cp.async.ca.shared.global [%r7], [%rd4], {size};\n"
    machine, first, second = go(copy + "cp.async.wait_all;\n" + OUT)
    assert not errors(machine)
    wanted = first[:256].reshape(64, 4).copy()
    wanted[:, size // 4 :] = 5
    assert (second[:256].reshape(64, 4) == wanted).all()


@pytest.mark.parametrize(
    ("copy", "kind"),
    [
        ("cp.async.cg.shared.global [%r7+4], [%rd4], 16;\n", Kind.ALIGNMENT),
        ("cp.async.cg.shared.global [%r7], [%rd4+4], 16;\n", Kind.ALIGNMENT),
        ("cp.async.cg.shared.global [%r7+65536], [%rd4], 16;\n", Kind.BOUNDS),
        ("cp.async.cg.shared.global [%r7], [%rd4], 8;\n", Kind.COPY),
    ],
)
def test_copies_that_may_not_be(copy: str, kind: Kind) -> None:
    assert kinds(go(copy + "cp.async.wait_all;\n")[0]) == [kind]


def test_overwriting_what_others_read() -> None:
    """The same places are copied to again, with and without a barrier behind the reads."""
    once = COPY + "cp.async.wait_all;\n" + SYNC + OTHER + OUT
    again = "add.s32 %r7, %r3, %r6;\n" + COPY + "cp.async.wait_all;\n"
    assert not errors(go(once + SYNC + again)[0])
    assert kinds(go(once + again)[0]) == [Kind.RACE]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fenced", [True, False])
def test_engines_need_a_fence_behind_the_wait(schedule: str, fenced: bool) -> None:
    body = COPY + "cp.async.wait_all;\n" + ("fence.proxy.async;\n" if fenced else "") + SYNC
    body += "@%p3 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3], 1024;\n"
    body += "@%p3 cp.async.bulk.commit_group;\n@%p3 cp.async.bulk.wait_group 0;\n"
    machine, first, second = go(body, schedule)
    assert kinds(machine) == ([] if fenced else [Kind.PROXY])
    assert (second[:256] == first[:256]).all()


INIT = "@%p3 mbarrier.init.shared.b64 [%r4], {};\n" + SYNC
WAIT = """
again:
mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0;
@!%p2 bra again;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("count", "arrive", "found"),
    [
        (64, "cp.async.mbarrier.arrive.noinc.shared.b64 [%r4];\n", ()),
        (64, "cp.async.mbarrier.arrive.shared.b64 [%r4];\nmbarrier.arrive.shared.b64 _, [%r4];\n", ()),
        (65, "cp.async.mbarrier.arrive.noinc.shared.b64 [%r4];\n", (Kind.DEADLOCK,)),
        (64, "cp.async.mbarrier.arrive.shared.b64 [%r4];\n", (Kind.DEADLOCK,)),
        (64, "mbarrier.arrive.shared.b64 _, [%r4];\n", (Kind.RACE, Kind.UNINITIALISED)),
        (32, "cp.async.mbarrier.arrive.noinc.shared.b64 [%r4];\n", (Kind.RACE, Kind.UNINITIALISED, Kind.DEADLOCK)),
    ],
)
def test_mbarriers(schedule: str, count: int, arrive: str, found: tuple[Kind, ...]) -> None:
    machine, first, second = go(INIT.format(count) + COPY + arrive + WAIT + OTHER + OUT, schedule)
    if found:
        assert set(kinds(machine)) & set(found)
        assert set(kinds(machine)) <= {*found, Kind.BARRIER, Kind.PHASE, Kind.UNFINISHED}
    else:
        assert not errors(machine)
        assert (second[:256].reshape(2, 128) == first[:256].reshape(2, 128)[::-1]).all()


def test_an_arrival_does_not_speak_for_later_copies() -> None:
    later = COPY.replace("[%r7]", "[%r7+2048]")
    body = INIT.format(64) + COPY + "cp.async.mbarrier.arrive.noinc.shared.b64 [%r4];\n" + later + WAIT + OTHER
    assert not errors(go(body + OUT)[0])
    assert set(kinds(go(body + OUT.replace("[%r7]", "[%r7+2048]"))[0])) & {Kind.RACE, Kind.UNINITIALISED}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fenced", [True, False])
def test_engines_need_a_fence_behind_the_mbarrier(schedule: str, fenced: bool) -> None:
    body = INIT.format(64) + COPY + "cp.async.mbarrier.arrive.noinc.shared.b64 [%r4];\n" + WAIT
    body += "fence.proxy.async;\n" if fenced else ""
    body += "@%p3 cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r3], 1024;\n"
    body += "@%p3 cp.async.bulk.commit_group;\n@%p3 cp.async.bulk.wait_group 0;\n"
    machine, first, second = go(body, schedule)
    assert kinds(machine) == ([] if fenced else [Kind.PROXY])
    assert (second[:256] == first[:256]).all()


# Pairs of CTAs: a thread's word in the other one is %r23, the mbarrier there %r24.
PAIR = """
mov.u32 %r20, %cluster_ctarank;
xor.b32 %r21, %r20, 1;
mapa.shared::cluster.u32 %r23, %r7, %r21;
mapa.shared::cluster.u32 %r24, %r4, %r21;
@%p3 mbarrier.init.shared.b64 [%r4], 1;
@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {bytes};
st.shared.v4.b32 [%r7], {{1, 2, 3, 4}};
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mad.lo.s32 %r13, %r20, 64, %r1;
mul.wide.u32 %rd3, %r13, 16;
add.s64 %rd5, %rd2, %rd3;
"""
END = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_stores(schedule: str) -> None:
    stores = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r23], {%r13, %r20, %r1, 9}, [%r24];\n"
    machine, _, second = go(PAIR.format(bytes=1024) + stores + WAIT + OUT + END, schedule, grid=2, cluster=2)
    assert not errors(machine)
    threads = np.arange(64)
    for rank in (0, 1):
        found = second[256 * rank : 256 * rank + 256].reshape(64, 4)
        assert (
            found == np.stack([64 * (1 - rank) + threads, 0 * threads + 1 - rank, threads, 0 * threads + 9], 1)
        ).all()
    assert not errors(machine)
    unwaited = go(PAIR.format(bytes=1024) + stores + OUT + WAIT + END, schedule, grid=2, cluster=2)[0]
    assert kinds(unwaited) == [Kind.RACE]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_reductions(schedule: str) -> None:
    """All threads of the other CTA add their numbers to the first word."""
    target = "mapa.shared::cluster.u32 %r23, %r3, %r21;\n"
    reds = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r23], %r1, [%r24];\n"
    machine, _, second = go(PAIR.format(bytes=256) + target + reds + WAIT + OUT + END, schedule, grid=2, cluster=2)
    assert not errors(machine)
    assert second[0] == second[256] == 1 + sum(range(64))


def test_an_mbarrier_of_the_wrong_cta() -> None:
    stores = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r23], %r1, [%r4];\n"
    assert kinds(go(PAIR.format(bytes=256) + stores + END, grid=2, cluster=2)[0]) == [Kind.BARRIER]
