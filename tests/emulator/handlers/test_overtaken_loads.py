# SPDX-License-Identifier: Apache-2.0
"""Loads from shared memory that an arrival overtakes, so that a copy that it lets in may change what they load."""

import numpy as np
import pytest
from map_bytes import map_of
from ptx_kernels import SCHEDULES, errors, run, zeros

from emulator.host.tensor_map import Element, encode
from emulator.machine import Machine
from emulator.machine.findings import Kind

# Warp 1 reads 128 bytes, its lane 0 gives them back by the mbarrier %r5, and warp 0 has them filled anew.
START = """
mov.u32 %r1, %tid.x;
and.b32 %r2, %r1, 31;
setp.eq.u32 %p1, %r2, 0;
setp.eq.u32 %p3, %r1, 0;
setp.lt.u32 %p4, %r1, 32;
mov.b64 %rd1, p0;
ld.param.b64 %rd2, [p1];
mul.wide.u32 %rd3, %r2, 4;
add.s64 %rd4, %rd2, %rd3;
mov.b32 %r3, shared;
add.s32 %r4, %r3, 8192;
add.s32 %r5, %r3, 8200;
shl.b32 %r6, %r2, 2;
add.s32 %r7, %r3, %r6;
@%p3 mbarrier.init.shared.b64 [%r4], 1;
@%p3 mbarrier.init.shared.b64 [%r5], 1;
fence.mbarrier_init.release.cluster;
@%p4 st.shared.b32 [%r7], %r1;
fence.proxy.async;
bar.sync 0;
@!%p4 bra reader;
wait_empty:
mbarrier.try_wait.parity.shared.b64 %p2, [%r5], 0;
@!%p2 bra wait_empty;
"""
COPY = """
@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 128;
@%p3 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%r3], [%rd1, {0, 0}], [%r4];
wait_full:
mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0;
@!%p2 bra wait_full;
ret;
"""
STORES = "st.shared.b32 [%r7], 77;\nret;\n"
READER = "reader:\n"
LOAD = "ld.shared.b32 %r9, [%r7];\n"
ARRIVE = "@%p1 mbarrier.arrive.shared.b64 _, [%r5];\n"
STORE = "st.global.b32 [%rd4], %r9;\n"


def judge(reader: str, schedule: str, *, writer: str = COPY) -> "tuple[Machine, np.ndarray]":
    source, out = zeros(32), zeros(32)
    source[:] = np.arange(100, 132)
    tensor = map_of(source.reshape(4, 8), (8, 4), Element.U32)
    body = START + writer + READER + reader
    return run(body, encode(tensor), out, source, block=64, schedule=schedule), out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "reader",
    [
        LOAD + ARRIVE + STORE,
        "ld.shared.v2.b32 {%r10, %r9}, [%r3];\nbar.warp.sync -1;\n" + ARRIVE + STORE,
        # A generic address.
        "cvt.u64.u32 %rd5, %r7;\ncvta.shared.u64 %rd5, %rd5;\nld.b32 %r9, [%rd5];\n" + ARRIVE + STORE,
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r3];\n" + ARRIVE + STORE,
        # Moves are gone in what ptxas makes; the use of what was there before is none of the load's.
        "mov.b32 %r9, 1;\nadd.s32 %r11, %r9, 1;\nld.shared.b32 %r8, [%r7];\nmov.b32 %r9, %r8;\n" + ARRIVE + STORE,
        "ld.shared.b32 %r8, [%r7];\nmov.b64 %rd5, {%r8, %r8};\n" + ARRIVE + "st.global.b64 [%rd2], %rd5;\n",
        # A path on which it is used is not the one that is taken.
        LOAD + "@%p4 bra used;\n" + ARRIVE + STORE + "ret;\nused:\nadd.s32 %r9, %r9, 1;\n" + ARRIVE + STORE,
        # Used in the next round of a loop, behind the arrival of this one.
        "setp.eq.u32 %p5, 0, 0;\nmov.b32 %r9, 5;\nround:\nst.global.b32 [%rd4], %r9;\n@!%p5 bra out;\n"
        "setp.eq.u32 %p5, 0, 1;\n" + LOAD + ARRIVE + "bra round;\nout:\n",
        LOAD + ARRIVE + "bar.warp.sync -1;\nnanosleep.u32 5;\nnanosleep.u32 5;\nnanosleep.u32 5;\n" + STORE,
    ],
    ids=["plain", "vector", "generic", "matrix", "moved", "packed", "other-path", "loop", "much-later"],
)
def test_an_arrival_before_the_first_use(reader: str, schedule: str) -> None:
    (finding,) = errors(judge(reader, schedule)[0])
    assert finding.kind is Kind.RACE
    assert "may still be under way" in finding.message
    assert "mbarrier.arrive" in finding.message
    assert "cp.async.bulk" in finding.place.text
    assert finding.other is not None
    assert finding.other.text.startswith("ld")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "reader",
    [
        LOAD + STORE + ARRIVE,
        LOAD + "add.s32 %r9, %r9, 1;\n" + ARRIVE + STORE,
        # The whole load is there, whichever of its registers is waited for.
        "ld.shared.v2.b32 {%r10, %r9}, [%r3];\nadd.s32 %r10, %r10, 1;\n" + ARRIVE + STORE,
        LOAD + "fence.proxy.async;\n" + ARRIVE + STORE,
        LOAD + "fence.acq_rel.cta;\n" + ARRIVE + STORE,
        # Nobody wants to know.
        LOAD + ARRIVE,
        LOAD + ARRIVE + "mov.b32 %r9, 1;\n" + STORE,
        LOAD + ARRIVE + "@!%p4 bra unused;\n" + STORE + "unused:\n",
        # Another barrier is arrived at, which lets nobody write; the one that does has waited.
        LOAD + "@%p1 mbarrier.init.shared.b64 [%r5+8], 2;\n@%p1 mbarrier.arrive.shared.b64 _, [%r5+8];\n"
        + STORE + ARRIVE,
        # Each round's load is used before its words are given back.
        "mov.b32 %r8, 0;\nround:\n" + LOAD + STORE + "add.s32 %r8, %r8, 1;\nsetp.lt.u32 %p5, %r8, 3;\n"
        "@%p5 bra round;\n" + ARRIVE,
    ],
    ids=[
        "stored", "added", "vector", "proxy-fence", "fence", "unused", "overwritten", "other-path", "other-barrier",
        "loop",
    ],
)  # fmt: skip
def test_an_arrival_behind_the_first_use(reader: str, schedule: str) -> None:
    machine, out = judge(reader, schedule)
    assert not errors(machine)
    if STORE + ARRIVE in reader:
        assert out.tolist() == list(range(32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stores_come_behind_loads(schedule: str) -> None:
    """Of the generic proxy: shared memory serves it in order."""
    machine, _ = judge(LOAD + ARRIVE + STORE, schedule, writer=STORES)
    assert not errors(machine)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", [True, False])
def test_an_arrival_of_the_cluster(first: bool, schedule: str) -> None:
    """It lets the copy of another block in as well."""
    body = """
mov.u32 %r1, %tid.x;
setp.eq.u32 %p3, %r1, 0;
mov.u32 %r20, %cluster_ctarank;
setp.eq.and.u32 %p1, %r20, 0, %p3;
mov.b32 %r3, shared;
add.s32 %r4, %r3, 8192;
shl.b32 %r6, %r1, 2;
add.s32 %r7, %r3, %r6;
ld.param.b64 %rd1, [p0];
ld.param.b64 %rd2, [p1];
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd4, %rd2, %rd3;
@%p3 mbarrier.init.shared.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 128;
st.shared.b32 [%r7], %r1;
fence.proxy.async;
bar.sync 0;
ld.shared.b32 %r9, [%r7];
BEFORE
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.b16 %rs1, 3;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster \
[%r3], [%rd1], 128, [%r4], %rs1;
BEHIND
again:
mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0;
@!%p2 bra again;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
    use = "st.global.b32 [%rd4], %r9;"
    body = body.replace("BEFORE", use if first else "").replace("BEHIND", "" if first else use)
    machine = run(body, zeros(32), zeros(32), grid=2, cluster=2, schedule=schedule)
    found = [finding for finding in errors(machine) if finding.other and finding.other.text.startswith("ld.shared")]
    assert len(found) == (not first)
    assert all("barrier.cluster.arrive" in finding.message for finding in found)
