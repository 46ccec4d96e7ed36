# SPDX-License-Identifier: Apache-2.0
"""Launches of a stream on the clock: when each begins and ends, and what runs beside the launch before it."""

import json

import pytest
from ptx_kernels import text

from emulator.clock import grid, report, timeline
from emulator.clock.chips import CHIPS
from emulator.clock.machine import ClockMachine, stream_of
from emulator.host.launch import Launch

CHIP, ARCH = CHIPS["H200"], "sm_90a"
GAP = CHIP["launch_us"] - CHIP["overlapped_us"]
WHOLE_SM = 200 * 1024
RELEASE, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"


def chain(count):
    """So many instructions, each of the result of the one before it."""
    return "\n".join(["mov.f32 %f0, 0f3F800000;", *["fma.rn.f32 %f0, %f0, %f0, %f0;"] * count])


def us(count):
    """What a chain takes."""
    return CHIP.microseconds(count * CHIP["fma_latency"])


def launch(*body, programmatic=True, ctas=1, block=32, shared_bytes=1024):
    return Launch(
        kernel="k",
        ptx=text("\n".join(body), 0, ARCH),
        arch=ARCH,
        grid=(ctas, 1, 1),
        block=(block, 1, 1),
        shared_bytes=shared_bytes,
        parameters=(),
        regions=(),
        programmatic=programmatic,
    )


def stream(*launches, samples=2):
    """The times of launches of a stream."""
    machine = ClockMachine(ARCH, CHIP.sms, samples=samples)
    for one in launches:
        machine.launch(one)
    return machine.times


LONG = chain(2000)


def test_a_launch_begins_where_the_one_before_lets_it_and_waits_for_its_end():
    first, second = stream(launch(chain(200), RELEASE, LONG), launch(chain(300), WAIT, chain(100)))
    # In the assembler's order up to 32 of the chain come behind what they stood in front of.
    assert first.begin + us(168) <= first.released < first.begin + us(201)
    assert second.begin == pytest.approx(first.released + GAP)
    known = first.end + CHIP["dependent_us"]
    assert known + us(100) < second.end < known + us(133)
    assert second.microseconds == pytest.approx(second.end - first.end)


def test_a_wait_behind_the_end_takes_nothing():
    first, second = stream(launch(RELEASE, chain(200)), launch(LONG, WAIT, chain(100)))
    assert second.begin == pytest.approx(first.released + GAP)
    assert second.end == pytest.approx(second.begin + us(2100), abs=0.02)


def test_a_launch_that_lets_nobody_start_is_followed_as_before():
    first, second = stream(launch(LONG), launch(chain(300), WAIT, chain(100)))
    assert first.released == first.end
    assert second.begin == pytest.approx(first.end + GAP)
    assert second.microseconds == pytest.approx(GAP + us(400), abs=0.02)


def test_launches_without_the_attribute_do_not_overlap():
    first, second = stream(launch(RELEASE, LONG), launch(chain(300), WAIT, programmatic=False))
    assert second.begin == pytest.approx(first.end + CHIP["launch_us"])


@pytest.mark.parametrize(
    ("ctas", "shared_bytes", "beside"),
    [(CHIP.sms, WHOLE_SM, False), (CHIP.sms // 2, WHOLE_SM, True), (CHIP.sms, WHOLE_SM // 4, True)],
    ids=["all SMs are taken", "half of the SMs are free", "there is room on each SM"],
)
def test_ctas_start_beside_others_where_there_is_room(ctas, shared_bytes, beside):
    taken = {"ctas": ctas, "shared_bytes": shared_bytes}
    first, second = stream(launch(RELEASE, LONG, **taken), launch(WAIT, chain(100), **taken))
    assert (second.begin < first.end) == beside
    assert second.begin >= (first.released + GAP if beside else first.end)
    assert second.end == pytest.approx(first.end + CHIP["dependent_us"] + us(100), abs=0.02)


def test_a_launch_that_waits_for_nothing_may_end_first():
    first, second, third = stream(launch(RELEASE, LONG), launch(chain(50)), launch(chain(50), programmatic=False))
    assert second.end < first.end
    assert second.microseconds == 0
    assert third.begin == pytest.approx(first.end + CHIP["launch_us"])


LAST_IS_LATE = f"""
mov.u32 %r0, %ctaid.x;
setp.lt.u32 %p0, %r0, 2;
@%p0 bra EARLY;
{chain(1000)}
EARLY:
{RELEASE}
{chain(2000)}
"""


def test_the_last_cta_lets_the_next_launch_start():
    first, second = stream(launch(LAST_IS_LATE, ctas=4), launch(WAIT), samples=0)
    assert first.released == pytest.approx(first.begin + us(1000), abs=0.05)
    assert second.begin == pytest.approx(first.released + GAP)


def test_some_warps_of_a_cta_are_enough():
    """The first of a CTA counts."""
    body = f"""
    mov.u32 %r0, %tid.x;
    setp.lt.u32 %p0, %r0, 32;
    @%p0 bra FIRST;
    {chain(1000)}
    FIRST:
    {RELEASE}
    {chain(1000)}
    """
    first, _ = stream(launch(body, block=64), launch(WAIT))
    assert first.released == pytest.approx(first.begin, abs=0.05)


SOME_WORK_MORE = f"""
{WAIT}
mov.u32 %r0, %ctaid.x;
and.b32 %r0, %r0, 1;
setp.eq.u32 %p0, %r0, 0;
@%p0 bra LESS;
{chain(200)}
LESS:
{chain(200)}
"""


def test_different_ctas_wait_in_the_first_turn_alone():
    """Two turns of CTAs with 200 or 400 instructions; the second turn finds the launch before complete."""
    first, second = stream(
        launch(RELEASE, LONG),
        launch(SOME_WORK_MORE, ctas=2 * (CHIP.sms - 1), shared_bytes=WHOLE_SM),
        samples=4,
    )
    assert second.begin < first.end
    turns = us(400 + 400) + CHIP.microseconds(CHIP["dispatch"])
    known = first.end + CHIP["dependent_us"]
    assert known + us(400) < second.end < known + turns + 0.05


def test_a_grid_is_laid_out_behind_a_wait():
    layout = grid.Layout(clusters=3, groups=1, slots=2, members=1)
    # From 0 on, 10 cycles of work; with the wait until 100, 3 of them are behind it.
    span = grid.Span(end=10, release=1, late_end=103, late_release=101)
    assert grid.laid_out(layout, [span], before_ends=100) == (113, 104)


def test_text_and_timeline_say_what_overlaps():
    times = stream(launch(RELEASE, LONG), launch(chain(300), WAIT, chain(100)))
    assert f"begins at {times[1].begin:.2f} us, ends at {times[1].end:.2f} us" in report.text(times)
    assert "of it beside the launch before" in report.text(times)
    assert "beside" not in report.launch_text(times[0])
    waits = [one for one in timeline.events(times[1]) if one.get("name") == "waits for the launch"]
    assert waits[0]["ts"] > times[1].begin
    assert waits[0]["ts"] + waits[0]["dur"] == pytest.approx(times[0].end + CHIP["dependent_us"], abs=0.02)


def test_a_stream_is_timed_again_from_its_records(tmp_path):
    times = stream(launch(RELEASE, LONG), launch(chain(300), WAIT, chain(100)))
    again = stream_of([one.recorded for one in times], CHIP)
    assert [one.end for one in again] == [one.end for one in times]
    timeline.write(times, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]
