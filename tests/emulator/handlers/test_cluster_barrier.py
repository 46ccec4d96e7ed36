# SPDX-License-Identifier: Apache-2.0
"""The barrier of a cluster: arrivals and waits that do not take turns."""

import pytest
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.machine.findings import Kind

ARRIVE, WAIT = "barrier.cluster.arrive.aligned;\n", "barrier.cluster.wait.aligned;\n"
# Each CTA writes into the other's shared memory, and reads what the other wrote.
EXCHANGE = """
mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [p0];
mov.u32 %r2, %cluster_ctarank;
mad.lo.s32 %r3, %r2, 64, %r1;
mul.wide.u32 %rd2, %r3, 4;
add.s64 %rd3, %rd1, %rd2;
mov.b32 %r4, shared;
shl.b32 %r5, %r1, 2;
add.s32 %r6, %r4, %r5;
xor.b32 %r7, %r2, 1;
mapa.shared::cluster.u32 %r8, %r6, %r7;
st.shared::cluster.b32 [%r8], %r3;
"""
SHOW = """
ld.shared.b32 %r9, [%r6];
st.global.b32 [%rd3], %r9;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_arrivals_and_two_waits_are_a_warning(schedule: str) -> None:
    out = zeros(128)
    body = EXCHANGE + ARRIVE + ARRIVE + WAIT + SHOW + WAIT
    machine = run(body, out, grid=2, block=64, cluster=2, schedule=schedule)
    assert out.tolist() == [*range(64, 128), *range(64)]
    assert not errors(machine)
    assert {finding.kind for finding in machine.findings if finding.warning} == {Kind.BARRIER}


def test_the_second_arrival_waits_without_acquiring() -> None:
    machine = run(EXCHANGE + ARRIVE + ARRIVE + SHOW + WAIT + WAIT, zeros(128), grid=2, block=64, cluster=2)
    assert Kind.RACE in kinds(machine)


def test_a_wait_too_few() -> None:
    machine = run(EXCHANGE + ARRIVE + ARRIVE + WAIT + SHOW, zeros(128), grid=2, block=64, cluster=2)
    assert kinds(machine) == [Kind.BARRIER]
    assert "more often than it has waited" in errors(machine)[0].message


@pytest.mark.parametrize("waits", [ARRIVE + WAIT + WAIT, ARRIVE + ARRIVE + WAIT + WAIT + WAIT])
def test_a_wait_too_many(waits: str) -> None:
    machine = run(EXCHANGE + waits + SHOW, zeros(128), grid=2, block=64, cluster=2)
    assert kinds(machine) == [Kind.BARRIER]
    assert "without having arrived" in errors(machine)[0].message
