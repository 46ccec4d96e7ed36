# SPDX-License-Identifier: Apache-2.0
"""Launches, memory, barriers and atomics: what a kernel computes, and the mistakes that are found."""

import numpy as np
import pytest
from ptx_kernels import SCHEDULES, errors, kinds, run, text, zeros

from emulator.errors import Unsupported
from emulator.host.launch import Launch
from emulator.machine import Machine
from emulator.machine.findings import Kind

THREAD = """
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mad.lo.s32 %r4, %r2, %r3, %r1;   // thread of the grid
ld.param.b64 %rd1, [p0];
mul.wide.u32 %rd2, %r4, 4;
add.s64 %rd3, %rd1, %rd2;        // its word
mov.b32 %r5, shared;
shl.b32 %r6, %r1, 2;
add.s32 %r7, %r5, %r6;           // its word of shared memory
"""
# Each thread passes its number to the thread 32 further on, through shared memory.
PASS_ON = """
st.shared.b32 [%r7], %r4;
{sync}
add.s32 %r8, %r6, 128;
and.b32 %r8, %r8, 255;
add.s32 %r8, %r5, %r8;
ld.shared.b32 %r9, [%r8];
st.global.b32 [%rd3], %r9;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_grid(schedule: str) -> None:
    out = zeros(256)
    machine = run(THREAD + "st.global.b32 [%rd3], %r4;", out, grid=4, block=64, schedule=schedule)
    assert (out == np.arange(256)).all()
    assert not errors(machine)


def test_a_partial_warp() -> None:
    out = zeros(64)
    run(THREAD + "st.global.b32 [%rd3], 7;", out, block=40)
    assert out.tolist() == [7] * 40 + [0] * 24


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("sync", "clean"), [("bar.sync 0;", True), ("bar.sync 1, 64;", True), ("", False)])
def test_shared_memory_between_warps(schedule: str, sync: str, clean: bool) -> None:
    out = zeros(64)
    machine = run(THREAD + PASS_ON.format(sync=sync), out, block=64, schedule=schedule)
    if clean:
        assert (out == (np.arange(64) + 32) % 64).all()
        assert not errors(machine)
    else:
        assert set(kinds(machine)) & {Kind.RACE, Kind.UNINITIALISED}


def test_a_finding_names_both_instructions() -> None:
    out = zeros(64)
    machine = run(THREAD + "st.shared.b32 [%r5], %r1;\nld.shared.b32 %r9, [%r5];", out, block=64)
    (finding,) = [one for one in errors(machine) if "written" in one.message]
    assert finding.kind is Kind.RACE
    assert "warp 1" in finding.place.who
    assert finding.other is not None
    assert "warp 0" in finding.other.who
    assert finding.place.text.startswith("st.shared.b32")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("st.global.b32 [%rd3+1000000], %r4;", Kind.BOUNDS),
        ("st.global.b32 [%rd3+2], %r4;", Kind.ALIGNMENT),
        ("ld.shared.b32 %r9, [%r5+65536];", Kind.BOUNDS),
        ("ld.shared.v2.b32 {%r9, %r10}, [%r5+4];", Kind.ALIGNMENT),
        ("ld.shared.b32 %r9, [%r5];\nst.global.b32 [%rd3], %r9;", Kind.UNINITIALISED),
        ("ld.shared.b32 %r9, [%r5];\nadd.s32 %r9, %r9, 1;\nst.global.b32 [%rd3], %r9;", Kind.UNINITIALISED),
        ("trap;", Kind.TRAP),
        ("bar.sync 0, 64;", Kind.BARRIER),
        ("bar.sync 0, 33;", Kind.BARRIER),
        ("mbarrier.init.shared.b64 [%r5], 0;", Kind.BARRIER),
        ("mov.u32 %r9, shared;\nmbarrier.init.shared.b64 [%r9], 32;", Kind.BARRIER),
        ("mbarrier.arrive.shared.b64 %rd4, [%r5];", Kind.BARRIER),
        ("setmaxnreg.dec.sync.aligned.u32 104;\nsetmaxnreg.inc.sync.aligned.u32 96;", Kind.REGISTERS),
        ("setmaxnreg.dec.sync.aligned.u32 96;\nsetmaxnreg.dec.sync.aligned.u32 104;", Kind.REGISTERS),
        ("setmaxnreg.dec.sync.aligned.u32 20;", Kind.REGISTERS),
    ],
)
def test_mistakes_of_one_instruction(line: str, kind: Kind) -> None:
    machine = run(THREAD + line, zeros(64))
    assert kinds(machine) == [kind]


PART = "setp.lt.u32 %p1, %r1, 40;\n"


@pytest.mark.parametrize(
    "line",
    [
        "@%p1 bar.sync 0;",
        "@%p1 bar.sync 0;\n@!%p1 bar.sync 0;",
        "@%p1 barrier.sync.aligned 1, 64;",
        "@%p1 bar.arrive 1, 64;",
        "@%p1 bar.red.popc.u32 %r9, 0, %p1;",
        "@%p1 barrier.cluster.arrive.aligned;",
        "barrier.cluster.arrive.aligned;\n@%p1 barrier.cluster.wait.aligned;",
    ],
)
def test_a_warp_arrives_as_a_whole(line: str) -> None:
    """Threads 40 to 63 are of a warp of which others arrive; where these come later they would count once more."""
    machine = run(THREAD + PART + line, zeros(64), block=64)
    (finding,) = errors(machine)
    assert finding.kind is Kind.ALIGNED
    assert "lanes 0x000000ff without lanes 0xffffff00" in finding.message
    assert "warp 1" in finding.place.who


def test_lanes_that_have_ended_are_not_missed() -> None:
    machine = run(THREAD + PART + "@!%p1 ret;\nbar.sync 0;\nbarrier.sync 1, 64;", zeros(64), block=64)
    assert not errors(machine)


def test_lanes_that_arrive_one_after_the_other_are_refused() -> None:
    with pytest.raises(Unsupported, match="lanes 0x000000ff without lanes 0xffffff00"):
        run(THREAD + PART + "@%p1 barrier.sync 0;\n@!%p1 barrier.sync 0;", zeros(64), block=64)


def test_global_memory_between_ctas_needs_order() -> None:
    body = THREAD + "ld.global.b32 %r9, [%rd1];\nadd.s32 %r9, %r9, 1;\nst.global.b32 [%rd1], %r9;"
    machine = run(body, zeros(4), grid=2, block=1)
    assert Kind.RACE in kinds(machine)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("released", [True, False])
def test_a_flag_orders_what_was_written_before_it(schedule: str, released: bool) -> None:
    """CTA 0 writes a value and raises a flag; CTA 1 waits for the flag and copies the value."""
    sem = "release" if released else "relaxed"
    body = (
        THREAD
        + f"""
    setp.ne.b32 %p1, %r2, 0;
    @%p1 bra READ;
    st.global.b32 [%rd1+16], 42;
    st.{sem}.gpu.global.b32 [%rd1], 1;
    bra END;
    READ:
    ld.acquire.gpu.global.b32 %r9, [%rd1];
    setp.eq.b32 %p2, %r9, 0;
    @%p2 bra READ;
    ld.global.b32 %r10, [%rd1+16];
    st.global.b32 [%rd1+32], %r10;
    END:
    """
    )
    out = zeros(16)
    machine = run(body, out, grid=2, block=1, schedule=schedule)
    assert out[8] == 42
    assert (Kind.RACE in kinds(machine)) == (not released)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_atomics(schedule: str) -> None:
    out = zeros(16)
    body = (
        THREAD
        + """
    red.relaxed.gpu.global.add.u32 [%rd1], %r4;
    atom.global.max.u32 %r9, [%rd1+4], %r4;
    atom.global.add.f32 %f1, [%rd1+8], 0f3F800000;
    """
    )
    machine = run(body, out, grid=3, block=64, schedule=schedule)
    assert out[0] == sum(range(192))
    assert out[1] == 191
    assert out.view(np.float32)[2] == 192
    assert not errors(machine)


MBARRIER = """
setp.ne.b32 %p1, %r1, 0;
@%p1 bra MADE;
mbarrier.init.shared.b64 [%r5+1024], {count};
MADE:
{sync}
setp.ge.u32 %p2, %r1, 32;
@%p2 bra CONSUME;
st.shared.b32 [%r7], %r1;
{arrive}
bra END;
CONSUME:
{wait}
ld.shared.b32 %r9, [%r7+-128];
st.global.b32 [%rd3], %r9;
END:
"""
WAIT = """
AGAIN:
mbarrier.try_wait.parity.shared.b64 %p3, [%r5+1024], {parity};
@!%p3 bra AGAIN;
"""
ARRIVE = "mbarrier.arrive.shared.b64 %rd4, [%r5+1024];"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"count": 33}, Kind.DEADLOCK),
        ({"count": 16}, Kind.DEADLOCK),
        ({"arrive": ""}, Kind.DEADLOCK),
        ({"wait": ""}, Kind.RACE),
        ({"wait": WAIT.format(parity=1)}, Kind.RACE),
        ({"sync": ""}, Kind.BARRIER),
    ],
)
def test_an_mbarrier_hands_over(schedule: str, changes: dict[str, object], expected: Kind | None) -> None:
    out = zeros(64)
    parts = {"count": 32, "sync": "bar.sync 0;", "arrive": ARRIVE, "wait": WAIT.format(parity=0)} | changes
    machine = run(THREAD + MBARRIER.format(**parts), out, block=64, schedule=schedule)
    if expected is None:
        assert out[32:].tolist() == list(range(32))
        assert not errors(machine)
    else:
        allowed = {expected, Kind.UNINITIALISED, Kind.RACE} if expected is Kind.RACE else {expected, Kind.RACE}
        assert set(kinds(machine)) & allowed


# A look at the barrier, and a wait where that has found nothing, as pipelines do; the look's answer goes by a register.
PEEK = """
mbarrier.{how}_wait.parity.shared.b64 %p4, [%r5+1024], 0;
selp.b32 %r20, 1, 0, %p4;
"""
WAIT_AFTER_PEEK = """
setp.ne.b32 %p5, %r20, 0;
@%p5 bra CONTINUE;
{wait}
CONTINUE:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["try", "test"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_a_wait_that_is_dropped_behind_a_peek(schedule: str, how: str, later: bool, dropped: bool) -> None:
    """Also where the phase is complete long before anyone looks: nothing tells the warp that it is."""
    wait = PEEK.format(how=how) + ("" if dropped else WAIT_AFTER_PEEK.format(wait=WAIT.format(parity=0)))
    if later:
        wait = "nanosleep.u32 20;" * 8 + wait
    parts = {"count": 32, "sync": "bar.sync 0;", "arrive": ARRIVE, "wait": wait}
    for seed in range(12 if schedule == "random" else 1):
        out = zeros(64)
        machine = run(THREAD + MBARRIER.format(**parts), out, block=64, schedule=schedule, seed=seed)
        if dropped and kinds(machine):
            break
        if not dropped:
            assert out[32:].tolist() == list(range(32))
            assert not list(machine.findings)
    if dropped:
        assert set(kinds(machine)) & {Kind.RACE, Kind.UNINITIALISED}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_look_at_a_phase_that_is_known_to_be_complete_finds_it(schedule: str) -> None:
    """Its predicate may be left alone then."""
    out = zeros(64)
    known = {"arrive": f"{ARRIVE} bar.sync 1, 64;", "wait": f"bar.sync 1, 64; {PEEK.format(how='try')}"}
    body = MBARRIER.format(count=32, sync="bar.sync 0;", **known) + "st.global.b32 [%rd3], %r20;"
    body = body.replace("bra END;", "ret;")
    machine = run(THREAD + body, out, block=64, schedule=schedule)
    assert not list(machine.findings)
    assert out[32:].tolist() == [1] * 32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_of_looks_goes_on(schedule: str) -> None:
    """One that does something in between: each look but the first at a phase waits for it."""
    out = zeros(64)
    wait = WAIT.format(parity=0).replace("@!%p3", "st.shared.b32 [%r5+2048], %r1; @!%p3")
    parts = {"count": 32, "sync": "bar.sync 0;", "arrive": ARRIVE, "wait": wait}
    machine = run(THREAD + MBARRIER.format(**parts), out, block=64, schedule=schedule)
    assert out[32:].tolist() == list(range(32))
    assert Kind.DEADLOCK not in kinds(machine)


@pytest.mark.parametrize(
    ("at", "count", "found"),
    [
        ("%r7", "1", []),
        ("%r5", "32", [True]),
        ("%r5", "%r8", [False]),
    ],
)
def test_lanes_that_initialise_mbarriers(at: str, count: str, found: list[bool]) -> None:
    """One each, or all of them the same one, alike or not."""
    body = THREAD + f"add.s32 %r8, %r1, 1;\nadd.s32 %r7, %r7, %r6;\nmbarrier.init.shared.b64 [{at}], {count};"
    machine = run(body, zeros(32))
    assert [one.warning for one in machine.findings] == found
    assert kinds(machine) == ([Kind.BARRIER] if found else [])


def test_pending_counts() -> None:
    """Each lane's state has what was missing before its own arrival, and says when the phase is over."""
    body = (
        THREAD
        + """
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [%r5], 100;
    bar.sync 0;
    mbarrier.arrive.noComplete.shared.b64 %rd4, [%r5], 2;
    mbarrier.pending_count.b64 %r9, %rd4;
    st.global.b32 [%rd3], %r9;
    mbarrier.test_wait.shared.b64 %p2, [%r5], %rd4;
    @%p1 mbarrier.arrive.shared.b64 _, [%r5], 36;
    bar.warp.sync -1;
    mbarrier.test_wait.shared.b64 %p3, [%r5], %rd4;
    @%p1 mbarrier.arrive_drop.noComplete.shared.b64 %rd5, [%r5], 60;
    @%p1 mbarrier.arrive.noComplete.shared.b64 %rd6, [%r5], 39;
    selp.b32 %r10, 10, 20, %p2;
    selp.b32 %r11, 1, 2, %p3;
    add.s32 %r10, %r10, %r11;
    st.global.b32 [%rd3+128], %r10;
    @!%p1 ret;
    mbarrier.pending_count.b64 %r9, %rd5;
    mbarrier.pending_count.b64 %r10, %rd6;
    mbarrier.arrive.shared.b64 _, [%r5];
    mbarrier.arrive.noComplete.shared.b64 %rd6, [%r5], 1;
    mbarrier.pending_count.b64 %r11, %rd6;
    st.global.b32 [%rd1+256], %r9;
    st.global.b32 [%rd1+260], %r10;
    st.global.b32 [%rd1+264], %r11;
    mbarrier.arrive.shared.b64 _, [%r5], 39;
    """
    )
    out = zeros(68)
    machine = run(body, out)
    assert not errors(machine)
    assert sorted(out[:32].tolist()) == list(range(38, 101, 2))
    assert (out[32:64] == 21).all()
    assert out[64:67].tolist() == [100, 40, 40]


@pytest.mark.parametrize("arrive", ["arrive.shared.b64 %rd4, [%r5]", "arrive_drop.shared.b64 %rd4, [%r5], 2"])
def test_pending_counts_are_of_arrivals_that_do_not_complete(arrive: str) -> None:
    init = "@%p1 mbarrier.init.shared.b64 [%r5], 4;\nbar.warp.sync -1;\n@!%p1 ret;\n"
    body = THREAD + "setp.eq.u32 %p1, %r1, 0;\n" + init + f"mbarrier.{arrive};\nmbarrier.pending_count.b64 %r9, %rd4;"
    (finding,) = errors(run(body, zeros(32)))
    assert finding.kind is Kind.BARRIER
    assert ".noComplete" in finding.message


def test_a_deadlock_says_where_everybody_is() -> None:
    parts = {"count": 33, "sync": "bar.sync 0;", "arrive": ARRIVE, "wait": WAIT.format(parity=0)}
    machine = run(THREAD + MBARRIER.format(**parts), zeros(64), block=64)
    (finding,) = errors(machine)
    assert "1 of 33 arrivals" in finding.message
    assert "warp 1" in finding.message


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ordered", [True, False])
def test_shared_memory_of_another_cta(schedule: str, ordered: bool) -> None:
    sync = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    body = (
        THREAD
        + f"""
    mov.u32 %r20, %cluster_ctarank;
    xor.b32 %r21, %r20, 1;
    mapa.shared::cluster.u32 %r22, %r7, %r21;
    st.shared::cluster.b32 [%r22], %r4;
    {sync if ordered else ""}
    ld.shared.b32 %r9, [%r7];
    st.global.b32 [%rd3], %r9;
    {sync}
    """
    )
    out = zeros(64)
    machine = run(body, out, grid=2, block=32, cluster=2, schedule=schedule)
    if ordered:
        assert (out == np.r_[32:64, 0:32]).all()
        assert not errors(machine)
    else:
        assert set(kinds(machine)) & {Kind.RACE, Kind.UNINITIALISED}


@pytest.mark.parametrize("wait", [True, False])
def test_a_cluster_waits_before_it_ends(wait: bool) -> None:
    body = f"barrier.cluster.arrive.aligned;\n{'barrier.cluster.wait.aligned;' if wait else ''}"
    machine = run(body, grid=2, cluster=2)
    assert [(one.kind, one.warning) for one in machine.findings] == ([] if wait else [(Kind.UNFINISHED, True)])


def test_an_mbarrier_ends_with_its_cta() -> None:
    body = """
    mov.u32 %r5, shared;
    mov.u32 %r20, %cluster_ctarank;
    mov.u32 %r4, %tid.x;
    setp.eq.u32 %p1, %r4, 0;
    @%p1 mbarrier.init.shared.b64 [%r5], 32;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    setp.eq.u32 %p2, %r20, 0;
    @%p2 ret;
    mapa.shared::cluster.u32 %r22, %r5, 0;
    nanosleep.u32 1000;
    nanosleep.u32 1000;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r22];
    """
    (finding,) = errors(run(body, grid=2, cluster=2))
    assert finding.kind is Kind.BARRIER
    assert "has ended" in finding.message


def test_what_the_machine_does_not_execute_is_refused_at_once() -> None:
    with pytest.raises(Unsupported, match=r"pmevent 1|pmevent"):
        run("pmevent 1;")


def test_barrier_reductions() -> None:
    out = zeros(64)
    body = (
        THREAD
        + """
    setp.lt.u32 %p1, %r1, 40;
    barrier.red.popc.u32 %r9, 0, %p1;
    barrier.red.and.pred %p2, 1, 64, %p1;
    barrier.red.or.pred %p3, 2, 64, %p1;
    selp.b32 %r10, 100, 0, %p2;
    selp.b32 %r11, 1000, 0, %p3;
    add.s32 %r9, %r9, %r10;
    add.s32 %r9, %r9, %r11;
    st.global.b32 [%rd3], %r9;
    """
    )
    machine = run(body, out, block=64)
    assert (out == 1040).all()
    assert not errors(machine)


def test_registers_wait_until_they_are_free() -> None:
    body = """
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 128;
    @%p1 bra GIVE;
    setmaxnreg.inc.sync.aligned.u32 240;
    bra END;
    GIVE:
    setmaxnreg.dec.sync.aligned.u32 {kept};
    END:
    """
    assert not errors(run(body.format(kept=24), block=384))
    assert kinds(run(body.format(kept=168), block=384)) == [Kind.DEADLOCK]


def test_what_was_never_written_may_be_loaded_and_dropped() -> None:
    body = (
        THREAD
        + """
    ld.shared.v2.b32 {%r9, %r10}, [%r5];
    add.s32 %r9, %r9, %r10;
    st.shared.b32 [%r7+4096], %r9;
    ld.shared.b32 %r9, [%r7+4096];
    setp.lt.u32 %p1, %r1, 64;
    selp.b32 %r9, %r1, %r9, %p1;
    st.global.b32 [%rd3], %r9;
    """
    )
    out = zeros(64)
    assert not errors(run(body, out, block=64))
    assert out.tolist() == list(range(64))


def test_a_kernel_without_an_end() -> None:
    body = """
    AGAIN:
    bar.sync 0;
    bra AGAIN;
    """
    machine = Machine("sm_100a", 1, limit=10_000)
    launch = Launch(kernel="k", ptx=text(body), arch="sm_100a", grid=(1, 1, 1), block=(64, 1, 1))
    machine.launch(launch)
    assert kinds(machine) == [Kind.DEADLOCK]


# Warps 0 and 2 complete two phases, one after the other; warp 1 waits for the first.
TWO_PHASES = """
mov.u32 %r5, shared;
mov.u32 %r4, %tid.x;
setp.eq.u32 %p1, %r4, 0;
@%p1 mbarrier.init.shared.b64 [%r5+1024], 1;
bar.sync 0;
shr.u32 %r6, %r4, 5;
setp.eq.u32 %p2, %r6, 1;
@%p2 bra LOOK;
@%p1 mbarrier.arrive.shared.b64 _, [%r5+1024];
bar.sync 1, 64;
bar.sync 1, 64;
{between}
@%p1 mbarrier.arrive.shared.b64 _, [%r5+1024];
bra END;
LOOK:
{wait}
{after}
END:
"""


@pytest.mark.parametrize(
    ("schedule", "seed", "found"),
    [("eager", 0, Kind.PHASE), ("late", 0, Kind.PHASE), ("late", 1, Kind.DEADLOCK)],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_warp_that_is_late_misses_its_phase(schedule: str, seed: int, found: Kind, ordered: bool) -> None:
    """Phases are told apart by one bit; nothing else but an order of the second one behind its wait helps."""
    sync = "bar.sync 2, 96;" if ordered else ""
    body = TWO_PHASES.format(between=sync, wait=WAIT.format(parity=0), after=sync)
    machine = run(body, block=96, schedule=schedule, seed=seed)
    assert kinds(machine) == ([] if ordered else [found])


def test_a_wait_may_give_up_before_its_phase_is_complete() -> None:
    """try_wait has a time limit of the system's: a kernel that does not come back reads too early."""
    body = """
    mov.u32 %r5, shared;
    mov.u32 %r4, %tid.x;
    ld.param.b64 %rd1, [p0];
    setp.eq.u32 %p1, %r4, 0;
    @%p1 mbarrier.init.shared.b64 [%r5], 1;
    bar.sync 0;
    setp.ge.u32 %p2, %r4, 32;
    @%p2 bra second;
    mbarrier.try_wait.parity.shared.b64 %p3, [%r5], 0;
    ld.shared.b32 %r9, [%r5+64];
    st.global.b32 [%rd1], %r9;
    ret;
    second:
    mov.b32 %r8, 7;
    setp.eq.u32 %p4, %r4, 32;
    @%p4 st.shared.b32 [%r5+64], %r8;
    bar.warp.sync -1;
    @%p4 mbarrier.arrive.shared.b64 _, [%r5];
    """
    for schedule in ("lazy", "eager"):
        assert set(kinds(run(body, zeros(4), block=64, schedule=schedule))) & {Kind.RACE, Kind.UNINITIALISED}
    found = {kind for seed in range(20) for kind in kinds(run(body, zeros(4), block=64, schedule="random", seed=seed))}
    assert found & {Kind.RACE, Kind.UNINITIALISED}
