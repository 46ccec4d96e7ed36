# SPDX-License-Identifier: Apache-2.0
"""The clock on kernels so small that their time can be told by hand."""

from dataclasses import replace

import numpy as np
import pytest
from ptx_kernels import text

from emulator.clock import grid, picture, report, timeline
from emulator.clock.chips import CHIPS, chip_of
from emulator.clock.constants import NAMES
from emulator.clock.machine import ClockMachine, place_of, stream_of, time_of
from emulator.clock.replay import REASONS
from emulator.clock.spins import INDEX, NOT_TAKEN, last_turns, spins_of
from emulator.errors import HostError, Unsupported
from emulator.host.chips import chip as emulated
from emulator.host.launch import Launch, Parameter, Region
from emulator.machine.launch import load

CHIP = CHIPS["H200"]
ARCH = "sm_90a"


def clocked(body, *arrays, grid=1, block=32, samples=0, shared_bytes=65536):
    """The time of a kernel; parameter i is the address of array i."""
    machine = ClockMachine(ARCH, CHIP.sms, samples=samples)
    regions = tuple(Region(f"array {i}", a.ctypes.data, a.nbytes, str(a.dtype), a) for i, a in enumerate(arrays))
    addresses = [int(array.ctypes.data).to_bytes(8, "little") for array in arrays]
    machine.launch(
        Launch(
            kernel="k",
            ptx=text(body, len(arrays), ARCH),
            arch=ARCH,
            grid=(grid, 1, 1),
            block=(block, 1, 1),
            shared_bytes=shared_bytes,
            parameters=tuple(Parameter(f"p{i}", 8, address) for i, address in enumerate(addresses)),
            regions=tuple(sorted(regions, key=lambda region: region.address)),
        )
    )
    assert [finding for finding in machine.findings if not finding.warning] == []
    (time,) = machine.times
    return time


def chain(count, *, dependent, op="fma.rn.f32 {d}, {a}, {a}, {a};"):
    """So many instructions, each of the result of the one before it, or of %f0."""
    lines = ["mov.f32 %f0, 0f3F800000;"]
    lines += [op.format(d=f"%f{n + 1}", a=f"%f{n if dependent else 0}") for n in range(count)]
    return "\n".join(lines)


def test_each_of_a_chain_waits_for_the_one_before():
    cycles = [clocked(chain(count, dependent=True)).cycles for count in (100, 200)]
    assert cycles[1] - cycles[0] == 100 * CHIP["fma_latency"]


def test_independent_instructions_take_a_cycle_each():
    cycles = [clocked(chain(count, dependent=False)).cycles for count in (100, 200)]
    assert cycles[1] - cycles[0] == 100


def test_special_functions_take_what_their_unit_does():
    op = "ex2.approx.ftz.f32 {d}, {a};"
    cycles = [clocked(chain(count, dependent=False, op=op), block=512).cycles for count in (50, 100)]
    assert cycles[1] - cycles[0] == pytest.approx(50 * 512 / CHIP["special_rate"], rel=0.02)


@pytest.mark.parametrize(
    ("op", "lanes"),
    [
        # What ptxas makes of them: F2FP, which an H200 does for 64 lanes a cycle and SM, and HADD2.F32.
        ("cvt.rn.f16x2.e4m3x2 {d}, %rs0;", 64),
        ("cvt.rn.bf16x2.f32 {d}, %f0, %f0;", 64),
        ("cvt.f32.f16 {d}, %rs0;", 128),
        ("cvt.rn.f32.s32 {d}, %r0;", 16),
    ],
)
def test_conversions_take_what_their_unit_does(op, lanes):
    register = "%f{}" if op.startswith(("cvt.f32", "cvt.rn.f32")) else "%r{}"
    start = "mov.f32 %f0, 0f3F800000;\nmov.b16 %rs0, 0;\nmov.u32 %r0, 0;\n"

    def cycles(count):
        lines = (op.format(d=register.format(n + 1)) for n in range(count))
        return clocked(start + "\n".join(lines), block=512).cycles

    assert cycles(40) - cycles(20) == pytest.approx(20 * 512 / lanes, rel=0.02)


def test_a_busy_unit_goes_to_the_oldest_warp_or_to_the_youngest():
    """Of two warps of a scheduler the older one has a chain of arithmetic behind a tenth of the exponentials."""
    few, many, behind = 10, 100, 250
    exponentials = {count: chain(count, dependent=False, op="ex2.approx.ftz.f32 {d}, {a};") for count in (few, many)}
    body = f"""
        mov.u32 %r0, %tid.x;
        setp.lt.u32 %p0, %r0, 32;
        setp.ge.u32 %p1, %r0, 128;
        @%p0 bra OLDER;
        @%p1 bra YOUNGER;
        bra END;
        OLDER:
        {exponentials[few]}
        {chain(behind, dependent=True)}
        bra END;
        YOUNGER:
        {exponentials[many]}
        END:
    """
    each, alone = 4 * 32 / CHIP["special_rate"], behind * CHIP["fma_latency"]
    found = clocked(body, block=160)
    assert found.cycles == pytest.approx(few * each + alone, rel=0.05)
    youngest = time_of(found.recorded, CHIP.with_values(youngest_first=1))
    assert youngest.cycles == pytest.approx((few + many) * each + alone, rel=0.05)


SHARED = """
mov.u32 %r0, %tid.x;
mul.lo.u32 %r1, %r0, {stride};
mov.u32 %r2, shared;
add.u32 %r3, %r1, %r2;
st.shared.b32 [%r3], %r0;
"""


def test_bank_conflicts_cost_time():
    loads = "\n".join(f"ld.shared.b32 %r{n + 10}, [%r3];" for n in range(64))
    free, conflicting = (clocked(SHARED.format(stride=stride) + loads).cycles for stride in (4, 128))
    assert conflicting - free == pytest.approx(64 * 31, rel=0.1)


COPY = """
ld.param.b64 %rd0, [p0];
ld.param.b64 %rd1, [p1];
mov.u32 %r0, %ctaid.x;
mov.u32 %r1, %tid.x;
mad.lo.u32 %r2, %r0, 4096, 0;
mad.lo.u32 %r2, %r1, 16, %r2;
cvt.u64.u32 %rd2, %r2;
add.u64 %rd3, %rd0, %rd2;
add.u64 %rd4, %rd1, %rd2;
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd3];
st.global.v4.b32 [%rd4], {%r4, %r5, %r6, %r7};
"""


def test_a_copy_of_much_data_takes_what_memory_does():
    source, target = np.ones(1 << 25, np.uint8), np.zeros(1 << 25, np.uint8)
    time = clocked(COPY, source, target, grid=8192, block=256, samples=2, shared_bytes=1024)
    floor = (1 + CHIP["store_cost"]) * source.nbytes / (CHIP["hbm_terabytes"] * CHIP["hbm_efficiency"]) / 1e6
    assert floor < time.microseconds < 1.25 * floor + CHIP["launch_us"] + 1
    assert "HBM" in report.bound(time)
    # The arrays need not begin with a sector.
    assert sorted(time.missing) == pytest.approx([0, 1], abs=0.1)


def test_all_clusters_or_some_of_them_take_the_same_time():
    source, target = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    every, some = (clocked(COPY, source, target, grid=256, block=256, samples=n).cycles for n in (0, 2))
    assert every == pytest.approx(some, rel=0.02)


COUNTERS = """
ld.param.b64 %rd0, [p0];
atom.global.add.u32 %r0, [%rd0], 1;
mov.u32 %r1, shared;
mov.u32 %r2, 0;
st.shared.b32 [%r1], %r2;
atom.shared.add.u32 %r3, [%r1], 1;
atom.shared.add.u32 %r4, [%r1], 1;
st.global.b32 [%rd0+4], %r4;
"""


def test_others_count_in_global_memory_alone():
    """A cluster that stands for others finds that these have claimed work, and nobody in its own shared memory."""
    counted = np.zeros(2, np.uint32)
    clocked(COUNTERS, counted, grid=64, block=1, samples=1)
    assert counted.tolist() == [64, 1]


BARRIER = """
mov.u32 %r0, shared;
mov.u32 %r1, %tid.x;
setp.eq.u32 %p0, %r1, 0;
@%p0 mbarrier.init.shared.b64 [%r0], 1;
bar.sync 0;
setp.ge.u32 %p1, %r1, 32;
@%p1 bra WAIT;
{work}
st.shared.f32 [%r0+128], %f{last};
@%p0 mbarrier.arrive.shared.b64 _, [%r0];
ret;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p2, [%r0], 0;
@!%p2 bra WAIT;
"""


def behind(count):
    """A warp waits for another one, which waits for a chain of instructions."""
    return BARRIER.format(work=chain(count, dependent=True), last=count)


def test_a_wait_lasts_as_long_as_the_work_that_it_waits_for():
    short, long = (clocked(behind(n), block=64) for n in (10, 110))
    assert long.cycles - short.cycles == 100 * CHIP["fma_latency"]
    assert report.longest_waits(long)[0].reason == "an mbarrier"
    sleepy = time_of(long.recorded, CHIP.with_values(mbarrier_wake=CHIP["mbarrier_wake"] + 100))
    assert sleepy.cycles - long.cycles == 100


def test_a_tensor_that_is_read_twice_comes_from_hbm_once():
    """A chain of loads of which half find their bytes in L2."""
    data = np.zeros(64 * 4 + 2, np.uint64)
    data = data[-(data.ctypes.data // 8) % 4 :][: 64 * 2]
    loads = "\n".join(["ld.global.cg.u64 %rd5, [%rd5];"] * 64)
    time = clocked(f"ld.param.b64 %rd0, [p0];\nst.global.u64 [%rd0], %rd0;\nmov.u64 %rd5, %rd0;\n{loads}", data)
    assert time.missing == (0.5,)
    cycles = [time_of(time.recorded, CHIP.with_values(hbm_latency=value)).cycles for value in (600, 700)]
    # Nobody waits for the last one.
    assert cycles[1] - cycles[0] in (31 * 100, 32 * 100)


@pytest.mark.parametrize(("kind", "size"), [("u16", 2), ("u32", 4), ("v4.u32", 16)])
def test_what_is_stored_in_parts_of_sectors_goes_to_hbm_once(kind, size):
    """Each lane stores its 64 bytes one part after the other, so that each store touches 32 sectors."""
    data = np.zeros(32 * 64 + 32, np.uint8)
    data = data[-data.ctypes.data % 32 :][: 32 * 64]
    value = "{%r1, %r1, %r1, %r1}" if kind.startswith("v4") else "%r1"
    stores = "\n".join(f"st.global.{kind} [%rd0+{at}], {value};" for at in range(0, 64, size))
    place = "ld.param.b64 %rd0, [p0];\nmov.u32 %r1, %tid.x;\nmul.wide.u32 %rd1, %r1, 64;\nadd.s64 %rd0, %rd0, %rd1;"
    time = clocked(f"{place}\n{stores}", data)
    assert time.recorded.written == [64 // size * 32 * 32]
    constants = CHIP.of_replay(1)
    busy = report.utilisation(time)["HBM"] * time.cycles
    assert busy == pytest.approx(CHIP["store_cost"] * data.nbytes / constants[NAMES.index("hbm_bytes")])


def test_a_launch_finds_in_l2_what_the_one_before_it_touched():
    """Unless it is more than L2 holds. The same launch again is one of other tensors."""
    small, large = (np.zeros(size, np.uint8) for size in (1 << 16, 1 << 22))
    first, other = (clocked(COPY, small, small, grid=16, block=256).recorded for _ in range(2))
    sweep = clocked(COPY, large, large, grid=1 << 10, block=256, samples=1, shared_bytes=1024).recorded
    again = replace(sweep)
    target = np.zeros_like(small)
    copied = clocked(COPY, small, target, grid=16, block=256).recorded
    assert sorted(copied.touched.values()) == [small.nbytes, target.nbytes]
    assert sweep.touched == {place_of(sweep.launch.regions[0]): large.nbytes}

    tiny, bigger = (CHIP.with_values(l2_mebibytes=size) for size in (2, 8))

    def found(*launches, chip=tiny):
        return [not any(one.missing) for one in stream_of(launches, chip)]

    assert found(first, other, first, other) == [False, True, False, True]
    assert found(first, sweep, other) == [False, False, False]
    assert found(first, sweep, other, chip=bigger) == [False, False, True]
    # Of what the last two launches touched L2 keeps what the later one did.
    assert found(sweep, first, other, again) == [False, False, True, False]
    assert found(sweep, first, other, again, chip=bigger) == [False, False, True, True]


PRODUCT = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, shared;
mad.lo.u32 %r2, %r0, 32, %r1;
mov.b32 %r3, 0;
st.shared.v4.b32 [%r2], {{%r3, %r3, %r3, %r3}};
st.shared.v4.b32 [%r2+16], {{%r3, %r3, %r3, %r3}};
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r4, %r1, 4;
cvt.u64.u32 %rd0, %r4;
or.b64 %rd1, %rd0, {layout};
mov.f32 %f0, 0f3F800000;
setp.lt.u32 %p1, %r0, 96;
@%p1 bra TOGETHER;
{late}
st.shared.f32 [%r1+8192], %f{last};
TOGETHER:
setp.ne.b32 %p2, %r3, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r10, %r11, %r12, %r13}}, %rd1, %rd1, %p2, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.shared.b32 [%r2], %r10;
"""


def product(late):
    """A wgmma whose fourth warp comes behind a chain of instructions."""
    layout = 128 >> 4 << 16 | 256 >> 4 << 32
    return clocked(PRODUCT.format(layout=layout, late=chain(late, dependent=True), last=late), block=128)


def test_a_wgmma_begins_with_the_last_of_its_warps():
    short, long = product(10), product(110)
    assert long.cycles - short.cycles == 100 * CHIP["fma_latency"]
    slower = time_of(long.recorded, CHIP.with_values(wgmma_latency=CHIP["wgmma_latency"] + 50))
    assert slower.cycles - long.cycles == 50


def test_the_report_names_time_and_waits():
    time = clocked(chain(50, dependent=True))
    shown = report.text([time])
    assert f"{time.microseconds:.2f} us on an H200" in shown
    assert "a result of arithmetic" in shown
    assert "fma.rn.f32" in shown


def test_a_wait_at_a_barrier_is_no_wait_for_a_turn():
    """All warps of a scheduler go on in the same cycle: each waits for its turn as long as others issue."""
    late = f"mov.u32 %r0, %tid.x;\nsetp.ge.u32 %p0, %r0, 32;\n@%p0 bra ALL;\n{chain(200, dependent=True)}\nALL:\n"
    stalls = clocked(f"{late}bar.sync 0;\nadd.u32 %r1, %r0, 1;", block=512).replayed.stalls.sum((0, 1))
    barrier, turn = (int(stalls[REASONS.index(name)]) for name in ("a barrier of the CTA", "another warp's turn"))
    assert barrier > 14 * 200 * CHIP["fma_latency"]
    assert turn < barrier / 10


def test_the_timeline_has_the_waits(tmp_path):
    import json

    file = tmp_path / "trace.json"
    time = clocked(behind(100), block=64)
    timeline.write([time], file)
    events = json.loads(file.read_text())["traceEvents"]
    longest = max((event for event in events if event["ph"] == "X"), key=lambda event: event["dur"])
    assert longest["name"] == "waits for an mbarrier"
    assert longest["tid"] == 1


def waits_for_a_flag(before, after, turns=""):
    """CTA 1 has a chain and sets a flag, for which CTA 0 waits and then has another chain."""
    return f"""
ld.param.b64 %rd0, [p0];
mov.u32 %r0, %ctaid.x;
setp.eq.u32 %p0, %r0, 0;
@%p0 bra WAITS;
{chain(before, dependent=True)}
st.release.gpu.global.b32 [%rd0], 1;
ret;
WAITS:
{turns}
AGAIN:
ld.acquire.gpu.global.b32 %r1, [%rd0];
setp.eq.u32 %p1, %r1, 0;
@%p1 bra AGAIN;
{chain(after, dependent=True)}
"""


def test_a_cta_that_waits_for_a_flag_goes_on_when_it_is_set():
    def cycles(before, after):
        return clocked(waits_for_a_flag(before, after), np.zeros(1, np.int32), grid=2).cycles

    base = cycles(200, 50)
    latency = CHIP["fma_latency"]
    assert base > 250 * latency + CHIP["l2_latency"]
    assert cycles(280, 50) - base == pytest.approx(80 * latency, abs=2)
    assert cycles(200, 150) - base == pytest.approx(100 * latency, abs=2)


def test_of_a_loop_that_waits_for_a_flag_one_turn_is_left():
    time = clocked(waits_for_a_flag(200, 100), np.zeros(1, np.int32), grid=2)
    (spin,) = spins_of(time.recorded.program)
    entries, events = time.recorded.classes[0][0][0]
    turns = (entries & INDEX == spin.load).sum()
    assert turns > 1, "the emulator ran the other CTA first"
    kept, left = last_turns(entries, events, (spin,))
    assert (kept & INDEX == spin.load).sum() == (left["index"] == spin.load).sum() == 1
    assert entries.size - kept.size == (turns - 1) * (spin.last - spin.first + 1)
    assert events.size - left.size == turns - 1
    # The last turn does not branch back, and what comes behind it is there.
    assert kept[kept & INDEX == spin.last] >= NOT_TAKEN
    assert kept[-100:].tolist() == entries[-100:].tolist()


def test_loops_that_work_are_no_waits_for_flags():
    others = [
        waits_for_a_flag(1, 1).replace("ld.acquire.gpu.global", "ld.global"),
        waits_for_a_flag(1, 1).replace("setp.eq.u32 %p1", "st.shared.b32 [%r0], %r1;\nsetp.eq.u32 %p1"),
        waits_for_a_flag(1, 1).replace("@%p1 bra AGAIN", "bra AGAIN"),
        behind(1),
    ]
    for body in others:
        assert spins_of(load(text(body, 1, ARCH), "k")[1]) == ()


def test_the_picture_has_the_waits_of_the_window(tmp_path):
    from xml.etree import ElementTree

    file, time = tmp_path / "timeline.svg", clocked(behind(100), block=64)
    (wait,) = [bar for bar in picture.bars(time, (0, time.cycles)) if bar.name == "an mbarrier"]
    assert (wait.row, wait.last - wait.first > 100 * CHIP["fma_latency"]) == (1, True)

    def drawn(window=None):
        """Where the wait is drawn, in pixels."""
        picture.write(time, file, window)
        colour = picture.COLOURS["an mbarrier"]
        rects = [one for one in ElementTree.parse(file).iter() if one.get("fill") == colour]
        assert len(rects) == 2  # and its colour in the legend
        return float(rects[1].get("x")), float(rects[1].get("width"))

    room = picture.WIDTH - picture.LEFT - picture.RIGHT
    x, width = drawn()
    assert width == pytest.approx(room * (wait.last - wait.first) / time.replayed.cycles, abs=0.1)
    assert x == pytest.approx(picture.LEFT + room * wait.first / time.replayed.cycles, abs=0.1)
    # Half of the wait fills the picture of that half.
    middle, last = ((wait.first + wait.last) / 2, wait.last)
    x, width = drawn((CHIP.microseconds(middle), CHIP.microseconds(last)))
    assert (x, width) == (picture.LEFT, pytest.approx(room, abs=2))
    with pytest.raises(HostError, match="nothing happens"):
        picture.draw(time, (1e6, 2e6))


def test_waits_for_one_thing_are_drawn_as_one():
    parts = [(0, 0, 10, "wgmma"), (0, 11, 20, "wgmma"), (0, 21, 30, "an mbarrier"), (1, 21, 30, "an mbarrier")]
    found = list(picture.merged([picture.Bar(*one) for one in parts], 1))
    assert found == [picture.Bar(*one) for one in [(0, 0, 20, "wgmma"), *parts[2:]]]


def test_a_chip_with_other_numbers_is_another_chip():
    time = clocked(chain(100, dependent=True))
    slower = time_of(time.recorded, CHIP.with_values(fma_latency=8))
    # Nobody waits for the last one's result.
    assert slower.cycles - time.cycles == 99 * (8 - CHIP["fma_latency"])
    with pytest.raises(Unsupported, match="no constants"):
        CHIP.with_values(nonsense=1)


def test_chips_are_of_their_architecture():
    assert chip_of("sm_100a").name == "B200"
    with pytest.raises(Unsupported, match="H200 is an sm_90"):
        chip_of("sm_100a", "H200")
    with pytest.raises(Unsupported, match="it has H100, H200"):
        chip_of("sm_80")
    assert (chip_of("sm_103a").name, emulated("sm_103a").capability) == ("B300", (10, 3))
    for chip in CHIPS.values():
        assert emulated(chip.arch).sms <= chip.sms
        assert all(known.source for known in chip.constants.values())


def test_clusters_are_chosen_all_over_the_grid():
    assert grid.chosen(3, 5) == (0, 1, 2)
    assert grid.chosen(100, 1) == (50,)
    assert grid.chosen(100, 3) == (16, 50, 83)
    # Work that repeats with 16, 64 or 128 clusters is met at many phases, in each share of the grid once.
    some = grid.chosen(2048, 8)
    assert [one * 8 // 2048 for one in some] == list(range(8))
    assert all(len({one % period * 8 // period for one in some}) > 3 for period in (16, 64, 128))
    assert sum(grid.weights(100, 3)) == 100
    layout = grid.Layout(clusters=4, groups=2, slots=1, members=1)
    assert grid.laid_out(layout, [grid.Span(10.0, 3.0, 10.0, 3.0), grid.Span(4.0, 2.0, 4.0, 2.0)]) == (14.0, 12.0)


def test_idle_clusters_leave_their_share_to_the_others():
    layout = grid.Layout(clusters=74, groups=74, slots=1, members=2)
    # The last of seven shares has ten of 74 clusters.
    assert grid.at_work(layout, [1000] * 6 + [0], 148) == 128
    # Half of them have half as much to do as the others, and are at work for half of the time.
    assert grid.at_work(layout, [1000, 500], 148) == 111
    assert grid.at_work(layout, [700, 700, 700], 148) == 148
    # Where other clusters follow, none is idle for long.
    assert grid.at_work(grid.Layout(clusters=148, groups=74, slots=1, members=2), [1000, 20], 148) == 148


TURNS = """
mov.u32 %r1, %tid.x;
mov.f32 %f0, 0f3F800000;
setp.ge.u32 %p1, %r1, 128;
@%p1 bra SECOND;
{special}
{behind}
ret;
SECOND:
{before}
{arithmetic}
"""


def test_warpgroups_that_take_turns_are_slower_than_side_by_side():
    """The overlap of exponentials with other work that attention lives on, and the same with a barrier between them."""
    work = {
        "special": chain(64, dependent=False, op="ex2.approx.ftz.f32 {d}, {a};"),
        "arithmetic": chain(64, dependent=True),
    }
    # In a block of its own: an assembler may put an arrival among exponentials that it does not depend on.
    arrives = "bra ARRIVE;\nARRIVE:\nbar.arrive 1, 256;"
    side_by_side = clocked(TURNS.format(behind="", before="", **work), block=256).cycles
    in_turn = clocked(TURNS.format(behind=arrives, before="bar.sync 1, 256;", **work), block=256).cycles
    assert side_by_side == pytest.approx(64 * 8, rel=0.1)
    assert in_turn - side_by_side > 200


def test_arithmetic_waits_less_in_an_assemblers_order():
    """Two chains one behind the other in the PTX, whose instructions take turns on a GPU."""
    first = chain(32, dependent=True)
    second = "\n".join(f"fma.rn.f32 %f{n + 101}, %f{n + 100}, %f0, %f0;" for n in range(32))
    time = clocked(f"{first}\nmov.f32 %f100, 0f3F800000;\n{second}")
    assert time.cycles < 1.2 * 32 * CHIP["fma_latency"]


ARRIVE, WAIT = "barrier.cluster.arrive.relaxed.aligned;\n", "barrier.cluster.wait.aligned;\n"
TWO_WARPS = """
mov.u32 %r0, %tid.x;
mov.u32 %r1, shared;
setp.ge.u32 %p1, %r0, 32;
setp.eq.u32 %p2, %r0, 0;
@%p1 bra OTHER;
{first}
bra END;
OTHER:
{other}
END:
"""
INIT = "@%p2 mbarrier.init.shared.b64 [%r1], 1;\nfence.mbarrier_init.release.cluster;\n"
LOOK = """
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0;
@!%p3 bra AGAIN;
"""


def test_a_warp_arrives_at_a_cluster_once_a_round():
    """Two arrivals of a fast warp are no round: the slow warp has not initialised the mbarrier yet."""
    first = f"{chain(100, dependent=True)}\n{INIT}{ARRIVE}{ARRIVE}{WAIT}{WAIT}{LOOK}"
    arrival = "setp.eq.u32 %p4, %r0, 32;\n@%p4 mbarrier.arrive.shared.b64 _, [%r1];\n"
    other = f"{ARRIVE}{ARRIVE}{WAIT}{WAIT}{arrival}"
    cycles = clocked(TWO_WARPS.format(first=first, other=other), block=64).cycles
    # The second round begins when the first one has ended.
    slow = 100 * CHIP["fma_latency"] + 2 * CHIP["cluster_barrier"]
    assert slow < cycles < slow + 100


def test_a_wait_at_an_mbarrier_leaves_an_arrival_at_a_cluster_as_it_was():
    """The third round is waited for although the mbarrier's first phase was, since the warp arrived."""
    rounds = 2 * (ARRIVE + WAIT)
    arrival = "@%p2 mbarrier.arrive.shared.b64 _, [%r1];\n"
    first = f"{INIT}{rounds}{chain(50, dependent=True)}\nbra NEXT;\nNEXT:\n{arrival}{chain(250, dependent=True)}\n"
    first += f"bra LAST;\nLAST:\n{ARRIVE}{WAIT}"
    other = f"{rounds}{ARRIVE}{LOOK}{WAIT}{chain(200, dependent=True)}"
    cycles = clocked(TWO_WARPS.format(first=first, other=other), block=64).cycles
    slow = 500 * CHIP["fma_latency"] + 3 * CHIP["cluster_barrier"]
    assert slow < cycles < slow + 150


def test_a_look_at_a_phase_that_never_ends_is_no_wait():
    """A pipeline looks for the stage behind its last one and does not ask again: the launch ends nevertheless."""
    look = "mbarrier.try_wait.parity.shared.b64 %p3, [%r1], {parity};\n"
    setup = f"mov.u32 %r1, shared;\nmov.u32 %r0, %tid.x;\nsetp.eq.u32 %p2, %r0, 0;\n{INIT}bar.sync 0;\n"
    never, over = (clocked(f"{setup}{look.format(parity=parity)}{chain(50, dependent=True)}") for parity in (0, 1))
    assert never.cycles == pytest.approx(over.cycles, abs=5)
