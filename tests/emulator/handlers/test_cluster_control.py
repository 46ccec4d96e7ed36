# SPDX-License-Identifier: Apache-2.0
"""Cluster launch control: running clusters take the work of those that have not begun."""

import numpy as np
import pytest
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.machine import Machine
from emulator.machine.findings import Kind

# Every CTA marks its tile, %r10, with its first tile's number + 1, then asks for another cluster's tile.
KERNEL = """
mov.u32 %r1, %tid.x;
setp.eq.u32 %p3, %r1, 0;
mov.b32 %r3, shared;
add.s32 %r4, %r3, 16;
ld.param.b64 %rd1, [p0];
mov.u32 %r10, %ctaid.x;
add.s32 %r11, %r10, 1;
mov.u32 %r20, %cluster_ctarank;
setp.eq.u32 %p5, %r20, 0;
and.pred %p5, %p5, %p3;
mov.b32 %r12, 0;
@%p3 mbarrier.init.shared.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
tile:
mul.wide.u32 %rd2, %r10, 4;
add.s64 %rd3, %rd1, %rd2;
@%p3 st.global.b32 [%rd3], %r11;
@%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 16;
CLUSTER
@ISSUER clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytesMULTICAST.b128 [%r3], [%r4];
WAIT
ld.shared.b128 %rq1, [%r3];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, %rq1;
CLUSTER
@!%p4 bra end;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r10, %r13, %r14, _}, %rq1;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r15, %rq1;
setp.ne.u32 %p6, %r10, %r15;
@%p6 trap;
add.s32 %r10, %r10, %r20;
FENCE
xor.b32 %r12, %r12, 1;
bra tile;
end:
"""
WAIT = "again:\nmbarrier.try_wait.parity.shared.b64 %p2, [%r4], %r12;\n@!%p2 bra again;\n"
CLUSTER = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
# Reads of the response by all threads come before it is overwritten.
FENCE = "fence.proxy.async;\nbar.sync 0;"


def go(schedule: str, cluster: int = 1, wait: str = WAIT, fence: str = FENCE, **more) -> "tuple[Machine, np.ndarray]":
    out = zeros(16)
    issuer, multicast = ("%p5", ".multicast::cluster::all") if cluster > 1 else ("%p3", "")
    body = KERNEL.replace("WAIT", wait).replace("ISSUER", issuer).replace("MULTICAST", multicast)
    body = body.replace("FENCE", fence).replace("CLUSTER", CLUSTER if cluster > 1 else "")
    return run(body, out, grid=16, cluster=cluster, schedule=schedule, sms=4, **{"block": 64} | more), out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_tile_is_done_once(schedule: str, cluster: int) -> None:
    machine, out = go(schedule, cluster)
    assert not errors(machine)
    assert (out > 0).all()
    events = machine.profile.kernels["k"].events
    ran = machine.profile.kernels["k"].ctas // cluster
    assert events["clusters cancelled"] + ran == 16 // cluster
    assert events["clusters cancelled"] > 0
    # A tile's mark is that of a CTA with the same rank.
    assert ((out - 1) % cluster == np.arange(16) % cluster).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_response_that_is_not_waited_for(schedule: str) -> None:
    # One warp: of two that do not wait, one may go round forever on the other's last response.
    machine, _ = go(schedule, wait="", block=32)
    assert set(kinds(machine)) & {Kind.RACE, Kind.UNINITIALISED}


def test_a_response_over_one_that_is_still_read() -> None:
    assert Kind.RACE in kinds(go("lazy", fence="")[0])


def test_nobody_asks_after_a_refusal() -> None:
    body = KERNEL.replace("@!%p4 bra end;", "setp.eq.u32 %p7, %r12, 1;\n@%p7 bra end;")
    body = body.replace("WAIT", WAIT).replace("ISSUER", "%p3").replace("MULTICAST", "").replace("CLUSTER", "")
    out = zeros(16)
    body = body.replace("add.s32 %r10, %r10, %r20;\nFENCE", "mov.b32 %r10, 0;\n" + FENCE)
    assert Kind.COPY in kinds(run(body, out, grid=1, block=64))
