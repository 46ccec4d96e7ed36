# SPDX-License-Identifier: Apache-2.0
"""Bulk copies and reductions that are no tensor's: between global memory, shared memory and the cluster's."""

import numpy as np
import pytest
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.machine import Machine
from emulator.machine.findings import Kind
from emulator.ptx import Refused

START = """
mov.u32 %r1, %tid.x;
setp.eq.u32 %p3, %r1, 0;
mov.b32 %r3, shared;
add.s32 %r4, %r3, 8192;
shl.b32 %r6, %r1, 2;
add.s32 %r7, %r3, %r6;
ld.param.b64 %rd1, [p0];
ld.param.b64 %rd2, [p1];
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd4, %rd2, %rd3;
mov.u32 %r20, %cluster_ctarank;
@%p3 mbarrier.init.shared.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.b16 %rs1, 0xff0f;
"""
EXPECT = "@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 256;\n"
WAIT = """
again:
mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0;
@!%p2 bra again;
"""
OUT = "ld.shared.b32 %r9, [%r7];\nst.global.b32 [%rd4], %r9;\n"
FILL = "add.s32 %r8, %r1, 1;\nst.shared.b32 [%r7], %r8;\nfence.proxy.async;\nbar.sync 0;\n"
END = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
DONE = "@%p3 cp.async.bulk.commit_group;\n@%p3 cp.async.bulk.wait_group 0;\n"
LOAD = "@%p3 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes{more} [%r3], [%rd1], 256{operands}, [%r4];\n"
STORE = "@%p3 cp.async.bulk.global.shared::cta.bulk_group{more} [%rd1], [%r3], 256{operands};\n"


def go(body: str, schedule: str = "lazy", **more) -> "tuple[Machine, np.ndarray, np.ndarray]":
    """Array 0 holds 1000, 1001, ...; array 1 is empty."""
    first, second = zeros(128), zeros(128)
    first[:] = np.arange(1000, 1128)
    return run(START + body, first, second, block=64, schedule=schedule, **more), first, second


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_load(schedule: str) -> None:
    machine, first, second = go(EXPECT + LOAD.format(more="", operands="") + WAIT + OUT, schedule)
    assert not errors(machine)
    assert (second[:64] == first[:64]).all()


def test_ends_that_are_ignored() -> None:
    """4 bytes at the beginning and 8 at the end are not copied: reading them is a mistake."""
    load = EXPECT + LOAD.format(more=".ignore_oob", operands=", 4, 8") + WAIT
    inner = "setp.ne.u32 %p4, %r1, 0;\nsetp.lt.and.u32 %p4, %r1, 62, %p4;\n@!%p4 bra out;\n" + OUT + "out:\n"
    machine, first, second = go(load + inner)
    assert not errors(machine)
    assert (second[1:62] == first[1:62]).all()
    assert kinds(go(load + OUT)[0]) == [Kind.UNINITIALISED]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_store(schedule: str) -> None:
    machine, first, _ = go(FILL + STORE.format(more="", operands="") + DONE, schedule)
    assert not errors(machine)
    assert first.tolist() == [*range(1, 65), *range(1064, 1128)]


def test_bytes_by_a_mask() -> None:
    """Of each 16 bytes the bytes 0 to 3 and 8 to 15 are written."""
    machine, first, _ = go(FILL + STORE.format(more=".cp_mask", operands=", %rs1") + DONE)
    assert not errors(machine)
    assert first[:8].tolist() == [1, 1001, 3, 4, 5, 1005, 7, 8]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (FILL.replace("fence.proxy.async;\n", "") + STORE.format(more="", operands="") + DONE, Kind.PROXY),
        (FILL + STORE.format(more="", operands=""), Kind.UNFINISHED),
        (FILL + STORE.format(more="", operands="").replace("256", "260") + DONE, Kind.COPY),
        (FILL + STORE.format(more="", operands="").replace("[%rd1]", "[%rd1+8]") + DONE, Kind.ALIGNMENT),
        (FILL + STORE.format(more="", operands="").replace("[%rd1]", "[%rd1+4096]") + DONE, Kind.BOUNDS),
        (EXPECT + LOAD.format(more="", operands="") + OUT, Kind.RACE),
        (EXPECT + LOAD.format(more="", operands="").replace("256", "128") + WAIT + OUT, Kind.DEADLOCK),
    ],
)
def test_mistakes(body: str, kind: Kind) -> None:
    # Eagerly, so that a load without a wait reads what was written, and not what was not.
    assert kind in kinds(go(body, "eager")[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("add.u32", lambda old, new: old + 4 * new),
        ("max.s32", np.maximum),
        ("or.b32", np.bitwise_or),
        ("inc.u32", lambda old, new: np.where(new < 4, np.maximum(3 - new, 0), 0)),
    ],
)
def test_reductions_of_four_ctas(schedule: str, op: str, wanted) -> None:
    reduce = f"@%p3 cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%rd1], [%r3], 256;\n"
    machine, first, _ = go(FILL + reduce + DONE, schedule, grid=4)
    assert not errors(machine)
    if op == "inc.u32":
        # All are larger than what was added: 0 at the first, then up to the bound and around.
        assert first[:4].tolist() == [1, 0, 3, 3]
    else:
        assert (first[:64] == wanted(np.arange(1000, 1064), np.arange(1, 65))).all()


def test_reductions_that_there_are_not() -> None:
    reduce = "@%p3 cp.reduce.async.bulk.global.shared::cta.bulk_group.and.f32 [%rd1], [%r3], 256;\n"
    with pytest.raises(Refused, match=r"not together"):
        go(FILL + reduce + DONE)


# The neighbour in a pair of CTAs: its memory is %r23, its mbarrier %r24. The words lie at 0, and arrive at 1024.
PAIR = """
xor.b32 %r21, %r20, 1;
add.s32 %r22, %r3, 1024;
mapa.shared::cluster.u32 %r23, %r22, %r21;
mapa.shared::cluster.u32 %r24, %r4, %r21;
mad.lo.s32 %r8, %r20, 100, %r1;
st.shared.b32 [%r7], %r8;
st.shared.b32 [%r7+1024], 7;
fence.proxy.async;
"""
MINE = (
    "mad.lo.s32 %r10, %r20, 64, %r1;\nmul.wide.u32 %rd3, %r10, 4;\nadd.s64 %rd4, %rd2, %rd3;\nadd.s32 %r7, %r7, 1024;\n"
)
ACROSS = (
    "@%p3 cp{reduce}.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{op} "
    "[%r23], [%r3], 256, [%r24];\n"
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("", lambda new: new),
        (".add.u32", lambda new: new + 7),
        (".add.s32", lambda new: new + 7),
        # A carry out of the low word does not come about.
        (".add.u64", lambda new: new + 7),
        (".and.b32", lambda new: new & 7),
        (".or.b32", lambda new: new | 7),
        (".xor.b32", lambda new: new ^ 7),
        (".min.u32", lambda new: np.minimum(new, 7)),
        (".max.s32", lambda new: np.maximum(new, 7)),
        (".inc.u32", lambda new: np.where(new <= 7, 0, 8)),
        (".dec.u32", lambda new: np.where(new < 7, new, 6)),
    ],
)
def test_between_ctas(schedule: str, op: str, wanted) -> None:
    """What was at the destination is 7."""
    copy = ACROSS.format(reduce=".reduce" if op else "", op=op)
    machine, _, second = go(EXPECT + PAIR + END + copy + WAIT + MINE + OUT + END, schedule, grid=2, cluster=2)
    assert not errors(machine)
    assert (second == wanted(np.concatenate([np.arange(100, 164), np.arange(64)]))).all()


def test_between_ctas_without_order() -> None:
    """Nobody knows that the other CTA has written what the copy overwrites."""
    copy = ACROSS.format(reduce="", op="")
    assert Kind.RACE in kinds(go(EXPECT + PAIR + "bar.sync 0;\n" + copy + WAIT + END, grid=2, cluster=2)[0])


def test_an_mbarrier_of_the_wrong_cta() -> None:
    copy = ACROSS.format(reduce="", op="").replace("[%r24]", "[%r4]")
    assert kinds(go(EXPECT + PAIR + END + copy + END, grid=2, cluster=2)[0]) == [Kind.BARRIER]


def test_another_ctas_memory_is_no_source() -> None:
    store = STORE.format(more="", operands="").replace("[%r3]", "[%r23]")
    assert kinds(go(PAIR + END + store + DONE + END, grid=2, cluster=2)[0]) == [Kind.COPY]


def test_lanes_that_copy_different_things() -> None:
    """32 lanes of a warp store 16 bytes each."""
    each = """
    shl.b32 %r30, %r1, 4;
    add.s32 %r31, %r3, %r30;
    mul.wide.u32 %rd5, %r1, 16;
    add.s64 %rd6, %rd1, %rd5;
    setp.lt.u32 %p3, %r1, 16;
    @%p3 cp.async.bulk.global.shared::cta.bulk_group [%rd6], [%r31], 16;
    """
    machine, first, _ = go(FILL + each + DONE)
    assert not errors(machine)
    assert (first[:64] == np.arange(1, 65)).all()
    assert machine.profile.kernels["k"].events["bulk stores"] == 16


@pytest.mark.parametrize(
    ("fence", "warned"),
    [("fence.mbarrier_init.release.cluster;", False), ("fence.proxy.async;", False), ("", True)],
)
def test_engines_see_an_mbarrier_behind_a_fence(fence: str, warned: bool) -> None:
    first, second = zeros(128), zeros(128)
    start = START.replace("fence.mbarrier_init.release.cluster;", fence)
    machine = run(start + EXPECT + LOAD.format(more="", operands="") + WAIT + OUT, first, second, block=64)
    assert [(one.kind, one.warning) for one in machine.findings] == ([(Kind.PROXY, True)] if warned else [])


def test_lanes_that_make_the_same_load() -> None:
    """It is made once, and a warning says so."""
    load = LOAD.format(more="", operands="").replace("@%p3", "@%p4")
    machine, first, second = go("setp.lt.u32 %p4, %r1, 32;\n" + EXPECT + load + WAIT + OUT)
    assert (second[:64] == first[:64]).all()
    (finding,) = machine.findings
    assert (finding.kind, finding.warning) == (Kind.COPY, True)
