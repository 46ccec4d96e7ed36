# SPDX-License-Identifier: Apache-2.0
"""Where the CTAs of a stream's launches go, beside what an H200 did (docs/dependent-launch.md)."""

from collections import Counter

import pytest
from ptx_kernels import text

from emulator.clock.chips import CHIPS
from emulator.clock.grid import Footprint
from emulator.clock.machine import ClockMachine, stream_of
from emulator.clock.places import Placed, Places
from emulator.host.launch import Launch

CHIP, ARCH = CHIPS["H200"], "sm_90a"
SMALL, HALF = Footprint(4, 1024, 1024), Footprint(32, 1024, 1024)
CYCLE = 0.001


def places(sms):
    return Places(sms, CYCLE)


def of(*order, last=0.0):
    return Placed(Counter(order), order, last)


def test_ctas_are_spread_evenly_over_an_empty_chip():
    placed = places(4).place(SMALL, 10, 1, 1.0)
    assert sorted(placed.counts.values()) == [2, 2, 3, 3]
    assert (placed.most, placed.last) == (3, 1.0)


def test_the_sm_with_most_room_comes_first():
    some = places(3)
    some.place(HALF, 2, 1, 0.0)
    # Two SMs have room for 8 small ones, the third one for 16.
    placed = some.place(SMALL, 8, 1, 0.0)
    assert placed.order == (2,) * 8


def test_ctas_take_the_places_that_are_left():
    """Of a chip that is full, one SM is left before another: all go there."""
    some = places(2)
    full = some.place(HALF, 4, 1, 0.0)
    some.leave(of(*full.order), HALF, 1, {2: 5.0}, 0.0)
    after = some.copy()
    after.leaving = [one._replace(us=3.0 + one.group) for one in after.leaving]
    placed = after.place(HALF, 2, 1, 1.0)
    assert (placed.order, placed.last) == ((0, 0), 3.0)
    assert len(some.leaving) == 4, "a copy changes nothing of what it is of"
    placed = after.place(HALF, 1, 1, 1.0)
    assert (placed.order, placed.last) == ((1,), 4.0)


def test_a_cluster_takes_sms_beside_each_other():
    some = places(5)
    some.place(SMALL, 1, 1, 0.0)
    # The fifth SM belongs to no pair.
    assert some.place(SMALL, 4, 2, 0.0).counts == {0: 2, 2: 2}


def test_ctas_end_one_after_the_other_and_the_last_ones_with_the_launch():
    some = places(4)
    placed = some.place(SMALL, 6, 1, 0.0)
    some.leave(placed, SMALL, 1, {1: 2.0, 2: 3.0}, 0.5)
    ends = [one.us for one in some.leaving]
    assert max(ends) == 3.0
    assert all(1.5 < us <= 2.0 or 2.5 < us <= 3.0 for us in ends)
    assert len(set(ends)) == 6


EXPONENTIALS = """
mov.u32 %r0, %tid.x;
cvt.rn.f32.u32 %f0, %r0;
mov.u32 %r1, 20;
{early}
griddepcontrol.wait;
AGAIN:
{steps}
sub.u32 %r1, %r1, 1;
setp.ne.u32 %p0, %r1, 0;
@%p0 bra AGAIN;
{late}
"""


def chained(early, ctas, shared_bytes):
    """The last 30 of 60 launches of CTAs of 128 threads with 320 exponentials."""
    call, steps = "griddepcontrol.launch_dependents;", "ex2.approx.ftz.f32 %f0, %f0;\n" * 16
    body = EXPONENTIALS.format(early=call if early else "", late="" if early else call, steps=steps)
    machine = ClockMachine(ARCH, CHIP.sms, samples=1)
    machine.launch(
        Launch(
            kernel="k", ptx=text(body, 0, ARCH), arch=ARCH, grid=(ctas, 1, 1), block=(128, 1, 1),
            shared_bytes=shared_bytes, parameters=(), regions=(), programmatic=True,
        )
    )  # fmt: skip
    return stream_of(machine.recorded * 60, CHIP)[30:]


@pytest.mark.parametrize(
    ("ctas", "shared", "early", "us", "sms", "most"),
    # Of an H200 (34b4e6ee): time of a launch, SMs that the last one used, its CTAs on the SM that had most.
    [
        (201, 0, True, 8.84, 70, 11),
        (201, 20, True, 11.17, 80, 8),
        (201, 56, True, 6.94, 70, 4),
        (132, 0, True, 3.36, 132, 1),
        (201, 0, False, 3.43, 132, 2),
        (201, 56, False, 3.40, 132, 2),
    ],
)
def test_an_early_call_packs_ctas_as_an_h200_does(ctas, shared, early, us, sms, most):
    times = chained(early, ctas, max(1, shared) * 1024)
    assert sum(one.microseconds for one in times) / len(times) == pytest.approx(us, rel=0.35)
    last = times[-1].placed
    assert last.most == pytest.approx(most, rel=0.3)
    assert len(last.counts) == pytest.approx(sms, rel=0.45)
    assert times[-1].layout.per_group == last.most
