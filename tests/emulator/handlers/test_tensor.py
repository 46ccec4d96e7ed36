# SPDX-License-Identifier: Apache-2.0
"""tcgen05 on the machine: kernels that are right, and each mistake that the checks must find."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.machine import Machine
from emulator.machine.findings import Kind

Floats = NDArray[np.float32]

# A warp's own part of tensor memory, after warp 0 has allocated {columns} columns.
ALLOCATED = """
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
mov.b32 %r3, shared;
setp.ne.b32 %p1, %r2, 0;
@%p1 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 64;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
bar.sync 0;
ld.shared.b32 %r4, [%r3];
and.b32 %r5, %r1, 96;
shl.b32 %r5, %r5, 16;
add.s32 %r6, %r4, %r5;           // the warp's lanes
ld.param.b64 %rd1, [p0];
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;        // the thread's word
"""
FREED = """
bar.sync 0;
@%p1 bra FREED;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 64;
FREED:
"""
ROUND_TRIP = """
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r6+3], {%r1, 7};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r10, %r11}, [%r6+3];
tcgen05.wait::ld.sync.aligned;
mad.lo.s32 %r12, %r11, 1000, %r10;
st.global.b32 [%rd3], %r12;
"""
WAIT_LOAD, WAIT_STORE = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"
FENCE_BEFORE, FENCE_AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
FENCED_SYNC = f"{FENCE_BEFORE} bar.sync 2; {FENCE_AFTER}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_stored_is_loaded(schedule: str) -> None:
    out = zeros(128)
    machine = run(ALLOCATED + ROUND_TRIP + FREED, out, block=128, schedule=schedule)
    assert (out == 7000 + np.arange(128)).all()
    assert not list(machine.findings)
    assert machine.profile.kernels["k"].events["tensor memory bytes loaded"] == 128 * 8


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", [WAIT_LOAD, WAIT_STORE])
def test_a_missing_wait(schedule: str, missing: str) -> None:
    body = ALLOCATED + ROUND_TRIP.replace(missing, "") + FREED
    machine = run(body, zeros(128), block=128, schedule=schedule)
    assert set(kinds(machine)) & {Kind.TENSOR_ORDER, Kind.UNINITIALISED}


@pytest.mark.parametrize("waits", ["before the use", "behind it"])
def test_a_copy_of_a_register_in_flight(waits: str) -> None:
    """Compilers copy in front of a wait. A use of the copy there is a mistake, whatever is waited for later."""
    moved = "mov.b64 %rd10, {%r20, %r21}; WAIT mov.b64 {%r10, %r11}, %rd10;"
    body = ROUND_TRIP.replace(WAIT_LOAD, moved.replace("WAIT", WAIT_LOAD if waits == "before the use" else ""))
    body = body.replace("{%r10, %r11}, [", "{%r20, %r21}, [")
    machine = run(ALLOCATED + body + WAIT_LOAD + FREED, zeros(128), block=128)
    assert set(kinds(machine)) == ({Kind.TENSOR_ORDER} if waits == "behind it" else set())


def test_registers_in_flight_are_named() -> None:
    machine = run(ALLOCATED + ROUND_TRIP.replace(WAIT_LOAD, "") + FREED, zeros(128), block=128)
    (finding,) = [one for one in machine.findings if one.place.text.startswith("mad")]
    assert finding.other is not None
    assert finding.other.text.startswith("tcgen05.ld")
    assert finding.warning


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_in_front_of_a_wait_are_fine(schedule: str) -> None:
    out = zeros(128)
    copied = ROUND_TRIP.replace(WAIT_LOAD, f"mov.b32 %r10, %r10; mov.b64 %rd9, {{%r10, %r11}}; {WAIT_LOAD}")
    assert not list(run(ALLOCATED + copied + FREED, out, block=128, schedule=schedule).findings)
    assert (out == 7000 + np.arange(128)).all()
    copied = copied.replace(WAIT_LOAD, "mov.b64 {%r10, %r11}, %rd9;")
    machine = run(ALLOCATED + copied + FREED, out, block=128, schedule=schedule)
    assert Kind.TENSOR_ORDER in kinds(machine)
    assert not errors(machine)
    assert (out == 7000 + np.arange(128)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_load_that_nobody_waits_for_or_uses(schedule: str) -> None:
    """Its cells are given back while it may still read them."""
    body = ALLOCATED + ROUND_TRIP + "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r50, %r51}, [%r6+3];" + FREED
    machine = run(body, zeros(128), block=128, schedule=schedule)
    assert [one.kind for one in errors(machine)] == [Kind.TENSOR_ORDER]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r4];", Kind.TENSOR_MEMORY),  # lanes of warp 0
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r6+64];", Kind.TENSOR_MEMORY),  # not allocated
        ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r6+63], {%r1, %r1};", Kind.TENSOR_MEMORY),
        ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r6], {%r1, %r200};", Kind.UNINITIALISED),
        (f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r10}}, [%r6]; {WAIT_LOAD}", Kind.UNINITIALISED),
        ("add.s32 %r6, %r6, %r1; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r6];", Kind.TENSOR_ISSUE),
        ("add.s32 %r6, %r6, %r1; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r1};", Kind.TENSOR_ISSUE),
        ("setp.eq.b32 %p2, %r1, 32; @%p2 tcgen05.wait::ld.sync.aligned;", Kind.ALIGNED),
        ("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;", Kind.TENSOR_ISSUE),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;", Kind.TENSOR_MEMORY),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;", Kind.TENSOR_MEMORY),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 48;", Kind.TENSOR_MEMORY),
    ],
)
def test_mistakes_of_one_instruction(line: str, kind: Kind) -> None:
    machine = run(ALLOCATED + f"@!%p1 bra SKIP;\n{line}\nSKIP:\n" + FREED, zeros(128), block=128)
    assert kind in kinds(machine)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_that_differ_in_an_address_are_found_and_do_not_stop_the_run(schedule: str) -> None:
    """Kernels that add the lane to the address: a GPU takes it of one lane."""
    out = zeros(128)
    lanes = "and.b32 %r20, %r1, 31; shl.b32 %r20, %r20, 16; add.s32 %r21, %r6, %r20;"
    body = ALLOCATED + lanes + ROUND_TRIP.replace("[%r6+3], {%r1", "[%r21+3], {%r1") + FREED
    machine = run(body, out, block=128, schedule=schedule)
    assert (out == 7000 + np.arange(128)).all()
    assert [one.kind for one in errors(machine)] == [Kind.TENSOR_ISSUE]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_of_another_warp_are_found_and_do_not_stop_the_run(schedule: str) -> None:
    """Kernels that give each warp the address of lane 0: it reaches its own lanes."""
    out = zeros(128)
    body = ALLOCATED + ROUND_TRIP.replace("[%r6+3], {%r1", "[%r4+3], {%r1") + FREED
    machine = run(body, out, block=128, schedule=schedule)
    assert (out == 7000 + np.arange(128)).all()
    (found,) = errors(machine)
    assert found.kind == Kind.TENSOR_MEMORY
    assert "reaches lanes" in found.message


def test_allocations_are_given_back() -> None:
    out = zeros(128)
    leaky = run(ALLOCATED + ROUND_TRIP, out, block=128)
    assert kinds(leaky) == [Kind.TENSOR_MEMORY]
    early = run(ALLOCATED + ROUND_TRIP + FREED.replace("bar.sync 0;", ""), out, block=128, schedule="eager")
    assert set(kinds(early)) & {Kind.TENSOR_ORDER, Kind.RACE, Kind.TENSOR_MEMORY}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("freed", [True, False])
def test_an_allocation_waits_for_columns(schedule: str, freed: bool) -> None:
    """Two warps allocate all columns in turns; the second waits for the first."""
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 512;"
    body = f"""
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    mov.b32 %r3, shared;
    shl.b32 %r5, %r2, 3;
    add.s32 %r3, %r3, %r5;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 512;
    ld.shared.b32 %r4, [%r3];
    shl.b32 %r5, %r2, 21;
    add.s32 %r6, %r4, %r5;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {{%r1}};
    tcgen05.wait::st.sync.aligned;
    {free if freed else ""}
    """
    machine = run(body, zeros(4), block=64, schedule=schedule)
    assert kinds(machine) == ([] if freed else [Kind.DEADLOCK])


HAND_OVER = """
@%p1 bra OTHERS;
add.s32 %r20, %r4, 8;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1};
{wait}
OTHERS:
bar.sync 1, 160;
setp.ne.b32 %p2, %r2, 4;
@%p2 bra DONE;
add.s32 %r20, %r4, 8;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r20];
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%rd3], %r10;
DONE:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("wait", "clean"),
    [(WAIT_STORE, True), (FENCE_BEFORE, False), ("", False)],
)
def test_tensor_memory_between_warps(schedule: str, wait: str, clean: bool) -> None:
    """Warp 4 reaches the lanes of warp 0; a fence is no wait."""
    out = zeros(160)
    machine = run(ALLOCATED + HAND_OVER.replace("{wait}", wait) + FREED, out, block=160, schedule=schedule)
    if clean:
        assert (out[128:] == np.arange(32)).all()
        assert not errors(machine)
    else:
        assert set(kinds(machine)) & {Kind.TENSOR_ORDER, Kind.UNINITIALISED}


def test_tensor_memory_between_warps_without_a_barrier() -> None:
    body = ALLOCATED + HAND_OVER.replace("{wait}", WAIT_STORE).replace("bar.sync 1, 160;", "") + FREED
    machine = run(body, zeros(160), block=160, schedule="eager")
    assert Kind.RACE in kinds(machine)


RELAXED_SYNC = """
@%p1 bra PREPARED;
setp.ne.b32 %p2, %r1, 0;
@%p2 bra PREPARED;
mbarrier.init.shared.b64 [%r3+8], 32;
PREPARED:
bar.sync 3;
"""
RELAXED_ARRIVE = "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%r3+8];"
RELAXED_WAIT = """
WAIT:
mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p3, [%r3+8], 0;
@!%p3 bra WAIT;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", ["", FENCE_BEFORE, FENCE_AFTER, WAIT_STORE])
def test_relaxed_barriers_with_fences_of_tensor_memory(schedule: str, missing: str) -> None:
    """The ISA's own pattern between threads (9.7.16.6.4): relaxed on both sides, and the fences of tcgen05."""
    body = HAND_OVER.replace("{wait}", f"{WAIT_STORE} {FENCE_BEFORE} {RELAXED_ARRIVE}")
    body = body.replace("bar.sync 1, 160;", "").replace(
        "@%p2 bra DONE;", f"@%p2 bra DONE; {RELAXED_WAIT} {FENCE_AFTER}"
    )
    out = zeros(160)
    machine = run(
        ALLOCATED + RELAXED_SYNC + body.replace(missing or "?", "") + FREED, out, block=160, schedule=schedule
    )
    if missing:
        assert set(kinds(machine)) & {Kind.RACE, Kind.TENSOR_ORDER, Kind.UNINITIALISED}
        assert errors(machine)
    else:
        assert not list(machine.findings)
        assert (out[128:] == np.arange(32)).all()


@pytest.mark.parametrize("fence", [FENCE_AFTER, "fence.acq_rel.cta;"])
def test_a_fence_of_tensor_memory_orders_nothing_else(fence: str) -> None:
    """Shared memory behind a relaxed wait needs a fence of its own."""
    body = f"""
    @%p1 bra OTHERS;
    st.shared.b32 [%r3+16], %r2;
    mbarrier.arrive.shared::cta.b64 _, [%r3+8];
    bra DONE;
    OTHERS:
    {RELAXED_WAIT} {fence}
    ld.shared.b32 %r10, [%r3+16];
    st.global.b32 [%rd3], %r10;
    DONE:
    """
    machine = run(ALLOCATED + RELAXED_SYNC + body + FREED, zeros(64), block=64)
    assert (Kind.RACE in kinds(machine)) == (fence == FENCE_AFTER)


# Warp 0 loads what it has stored, twice, and lets warp 4 write over it. A part is in the {round} that it says.
OVERWRITTEN = """
setp.eq.b32 %p2, %r2, 0;
setp.eq.b32 %p4, %r2, 4;
add.s32 %r20, %r4, 8;
mov.b32 %r22, 0;
@!%p2 bra ROUND;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1};
tcgen05.wait::st.sync.aligned;
ROUND:
@%p4 bra WRITER;
@!%p2 bra DONE;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r20];
{wait}
setp.lt.u32 %p5, %r22, {late};
@%p5 st.global.b32 [%rd3], %r10;
bar.sync 1, 64;
@!%p5 st.global.b32 [%rd3], %r10;
{end}
bar.sync 2, 64;
bra NEXT;
WRITER:
bar.sync 1, 64;
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r20], {%r1};
tcgen05.wait::st.sync.aligned;
bar.sync 2, 64;
NEXT:
add.s32 %r22, %r22, 1;
setp.lt.u32 %p3, %r22, 2;
@%p3 bra ROUND;
DONE:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("late", "error"), [(2, False), (1, True), (0, True)])
def test_a_load_that_is_used_after_its_warp_let_others_go_on(schedule: str, late: int, error: bool) -> None:
    """Without tcgen05.wait::ld: a use before that makes sure of the load, one behind it comes too late."""
    body = OVERWRITTEN.replace("{late}", str(late)).replace("{wait}", "").replace("{end}", WAIT_LOAD)
    machine = run(ALLOCATED + body + FREED, zeros(160), block=160, schedule=schedule)
    found = [one for one in machine.findings if one.kind is Kind.TENSOR_ORDER and "is written" in one.message]
    assert found
    assert any(not one.warning for one in found) == error
    body = OVERWRITTEN.replace("{late}", str(late)).replace("{wait}", WAIT_LOAD).replace("{end}", "")
    machine = run(ALLOCATED + body + FREED, zeros(160), block=160, schedule=schedule)
    assert Kind.TENSOR_ORDER not in kinds(machine)


@pytest.mark.parametrize("kind", ["f32", "s32"])
def test_a_load_with_a_reduction(kind: str) -> None:
    out = zeros(128)
    body = """
    mov.b32 %r20, 0x40000000;
    mov.b32 %r21, 0xC0400000;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r6], {%r20, %r21};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.red.sync.aligned.32x32b.x2.min.TYPE {%r10, _}, %r12, [%r6];
    tcgen05.wait::ld.sync.aligned;
    st.global.b32 [%rd3], %r12;
    """.replace("TYPE", kind)
    machine = run(ALLOCATED + body + FREED, out, block=128)
    assert (out == 0xC0400000).all()
    assert not errors(machine)


# MMAs: 128 threads of each CTA; A and B lie in shared memory with the 128-byte swizzle, K = 64 in four instructions.

A_AT, B_AT, IMAGE = 1024, 1024 + 128 * 128, 1024 + 2 * 128 * 128
K = 64


def bf16(values: Floats) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def image(a: Floats, b: Floats) -> NDArray[np.uint32]:
    """Shared memory from A_AT on, as words: rows of 128 bytes."""
    memory = np.zeros(IMAGE, np.uint8)
    for at, matrix in ((A_AT, a), (B_AT, b)):
        row, column = np.indices(matrix.shape)
        place = at + row * 128 + column * 2
        memory.view(np.uint16)[(place ^ (place >> 3 & 0x70)) >> 1] = bf16(matrix)
    return memory[A_AT:].view(np.uint32)


def gemm(group: int, n: int, **parts: str) -> str:
    """The kernel. Each part may be replaced.

    p0: images, one for each CTA; p1: results [CTAs * 128, n] of f32.
    """
    m = 128 * group
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | n >> 3 << 17 | m >> 4 << 24
    descriptor = 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61
    cta = f"cta_group::{group}"
    mmas = "\n".join(
        f"""
        add.s64 %rd20, %rd10, {2 * k};
        add.s64 %rd21, %rd11, {2 * k};
        setp.ne.b32 %p5, {k}, 0;
        tcgen05.mma.{cta}.kind::f16 [%r4], %rd20, %rd21, %r9, %p5;
        """
        for k in range(4)
    )
    commit = (
        f"tcgen05.commit.{cta}.mbarrier::arrive::one.shared::cluster.b64 [%r8];"
        if group == 1
        else f"tcgen05.commit.{cta}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r8], 3;"
    )
    known = {
        "before": "",
        "proxy_fence": "fence.proxy.async;",
        "leader": "elect.sync _|%p4, -1; @!%p4 bra ISSUED;",
        "mmas": mmas,
        "commit": commit,
        "issued": "",
        "wait": "mbarrier.try_wait.parity.shared.b64 %p6, [%r8], 0; @!%p6 bra WAIT;",
        "fence": "tcgen05.fence::after_thread_sync;",
        "end": "barrier.cluster.arrive; barrier.cluster.wait;",
    }
    known |= parts
    columns = max(32, n)
    return f"""
    mov.u32 %r1, %tid.x;
    shr.u32 %r2, %r1, 5;
    mov.b32 %r3, shared;
    add.s32 %r8, %r3, 8;
    mov.u32 %r7, %cluster_ctarank;
    setp.ne.b32 %p1, %r2, 0;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.{cta}.sync.aligned.shared::cta.b32 [%r3], {columns};
    tcgen05.relinquish_alloc_permit.{cta}.sync.aligned;
    setp.ne.b32 %p2, %r1, 0;
    @%p2 bra ALLOCATED;
    mbarrier.init.shared.b64 [%r8], 1;
    fence.mbarrier_init.release.cluster;
    ALLOCATED:
    // The image.
    ld.param.b64 %rd1, [p0];
    mul.lo.s32 %r20, %r7, {IMAGE - A_AT};
    cvt.u64.u32 %rd2, %r20;
    add.s64 %rd1, %rd1, %rd2;
    shl.b32 %r20, %r1, 2;
    COPY:
    cvt.u64.u32 %rd2, %r20;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.b32 %r21, [%rd3];
    add.s32 %r22, %r3, %r20;
    st.shared.b32 [%r22+{A_AT}], %r21;
    add.s32 %r20, %r20, 512;
    setp.lt.u32 %p3, %r20, {IMAGE - A_AT};
    @%p3 bra COPY;
    {known["proxy_fence"]}
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ld.shared.b32 %r4, [%r3];
    {known["before"]}
    @%p1 bra ISSUED;
    setp.ne.b32 %p2, %r7, 0;
    @%p2 bra ISSUED;
    {known["leader"]}
    and.b32 %r20, %r3, 0x3FFFF;
    shr.u32 %r20, %r20, 4;
    cvt.u64.u32 %rd10, %r20;
    add.s64 %rd11, %rd10, {descriptor + (B_AT >> 4)};
    add.s64 %rd10, %rd10, {descriptor + (A_AT >> 4)};
    mov.b32 %r9, {idesc};
    {known["mmas"]}
    {known["commit"]}
    ISSUED:
    {known["issued"]}
    WAIT:
    {known["wait"]}
    {known["fence"]}
    and.b32 %r5, %r1, 96;
    shl.b32 %r5, %r5, 16;
    add.s32 %r6, %r4, %r5;
    ld.param.b64 %rd1, [p1];
    mad.lo.s32 %r20, %r7, 128, %r1;
    mul.wide.u32 %rd2, %r20, {4 * n};
    add.s64 %rd1, %rd1, %rd2;
    mov.b32 %r20, 0;
    OUT:
    add.s32 %r21, %r6, %r20;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37}}, [%r21];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd2, %r20, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.v4.b32 [%rd3], {{%r30, %r31, %r32, %r33}};
    st.global.v4.b32 [%rd3+16], {{%r34, %r35, %r36, %r37}};
    add.s32 %r20, %r20, 8;
    setp.lt.u32 %p3, %r20, {n};
    @%p3 bra OUT;
    {known["end"]}
    @%p1 bra END;
    tcgen05.dealloc.{cta}.sync.aligned.b32 %r4, {columns};
    END:
    """


class Gemm:
    """A product of random matrices."""

    def __init__(self, group: int, n: int) -> None:
        draw = np.random.default_rng(3)
        self.group, self.n = group, n
        a, b = (
            (draw.standard_normal((rows, K)).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
            for rows in (128 * group, n)
        )
        self.expected = a.astype(np.float64) @ b.T.astype(np.float64)
        per = n // group
        self.images = zeros(group * (IMAGE - A_AT) // 4)
        for cta, part in enumerate(np.split(self.images, group)):
            part[:] = image(a[128 * cta : 128 * cta + 128], b[per * cta : per * cta + per])
        self.out = zeros(128 * group * n, np.float32)

    def run(self, schedule: str = "lazy", *, cluster: int = 0, **parts: Any) -> Machine:
        body = gemm(self.group, self.n, **parts)
        count = cluster or self.group
        return run(body, self.images, self.out, block=128, grid=count, cluster=count, schedule=schedule)

    @property
    def right(self) -> bool:
        return bool(np.allclose(self.out.reshape(-1, self.n), self.expected, rtol=1e-5, atol=1e-4))


GROUPS = [(1, 64), (1, 256 // 2), (2, 128), (2, 256)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("group", "n"), GROUPS)
def test_a_product(schedule: str, group: int, n: int) -> None:
    work = Gemm(group, n)
    machine = work.run(schedule)
    assert not [str(one) for one in machine.findings]
    assert work.right
    events = machine.profile.kernels["k"].events
    assert events["tcgen05.mma operations"] == 4
    assert events["tcgen05.mma flops of kind::f16"] == 2 * 128 * group * n * K
    assert events["tcgen05.commit operations"] == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fenced", [True, False])
def test_a_relaxed_wait_for_a_product(schedule: str, fenced: bool) -> None:
    wait = "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p6, [%r8], 0; @!%p6 bra WAIT;"
    work = Gemm(1, 64)
    machine = work.run(schedule, wait=wait, **({} if fenced else {"fence": ""}))
    assert work.right
    assert bool(errors(machine)) != fenced


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("part", "text", "kinds_of_it"),
    [
        ("proxy_fence", "", {Kind.PROXY}),
        ("wait", "", {Kind.TENSOR_ORDER, Kind.RACE, Kind.UNINITIALISED}),
        ("commit", "", {Kind.DEADLOCK}),
        ("leader", "", {Kind.TENSOR_ISSUE}),
        ("issued", "bar.sync 0; st.shared.b32 [%r3+1024], %r1;", {Kind.RACE}),
        ("mmas", "tcgen05.mma.{cta}.kind::f16 [%r4], %rd10, %rd11, 0, 0;", {Kind.DESCRIPTOR}),
        ("mmas", "tcgen05.mma.{cta}.kind::f16 [%r4], 0, %rd11, %r9, 0;", {Kind.DESCRIPTOR}),
        ("mmas", "tcgen05.mma.{cta}.kind::f16 [%r4+256], %rd10, %rd11, %r9, 0;", {Kind.TENSOR_MEMORY}),
        ("mmas", "tcgen05.mma.{cta}.kind::f16 [%r4], %rd10, %rd11, %r9, 1;", {Kind.UNINITIALISED}),
        ("mmas", "tcgen05.mma.{other}.kind::f16 [%r4], %rd10, %rd11, %r9, 0;", {Kind.TENSOR_ISSUE}),
        ("commit", "tcgen05.commit.{cta}.mbarrier::arrive::one.shared::cluster.b64 [%r8+8];", {Kind.BARRIER}),
        ("end", "", {Kind.TENSOR_ORDER, Kind.RACE, Kind.TENSOR_MEMORY}),
    ],
)
def test_mistakes(schedule: str, group: int, part: str, text: str, kinds_of_it: set[Kind]) -> None:
    text = text.replace("{cta}", f"cta_group::{group}").replace("{other}", f"cta_group::{3 - group}")
    parts: dict[str, Any] = {part: text}
    machine = Gemm(group, 128).run(schedule, **parts)
    assert set(kinds(machine)) & kinds_of_it, [str(one) for one in machine.findings]


def test_a_pair_needs_a_peer() -> None:
    machine = Gemm(2, 128).run(cluster=1)
    assert kinds(machine) == [Kind.TENSOR_ISSUE]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("waits", [True, False])
def test_shared_memory_is_used_again(schedule: str, waits: bool) -> None:
    """Warp 1 writes A anew after the first product, which it knows by the commit alone; warp 0 multiplies again."""
    rewrite = """
    setp.ne.b32 %p7, %r2, 1;
    @%p7 bra WRITTEN;
    {wait}
    mov.b32 %r40, 0;
    REWRITE:
    shl.b32 %r41, %r1, 2;
    and.b32 %r41, %r41, 127;
    add.s32 %r41, %r41, %r3;
    add.s32 %r41, %r41, %r40;
    st.shared.b32 [%r41+1024], 0;
    add.s32 %r40, %r40, 128;
    setp.lt.u32 %p3, %r40, 16384;
    @%p3 bra REWRITE;
    fence.proxy.async;
    WRITTEN:
    FIRST:
    mbarrier.try_wait.parity.shared.b64 %p6, [%r8], 0;
    @!%p6 bra FIRST;
    bar.sync 0;
    @%p1 bra AGAIN;
    elect.sync _|%p4, -1;
    @!%p4 bra AGAIN;
    {mmas}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8];
    AGAIN:
    """
    wait = "EARLY: mbarrier.try_wait.parity.shared.b64 %p6, [%r8], 0; @!%p6 bra EARLY;"
    mmas = "".join(
        f"add.s64 %rd20, %rd10, {2 * k}; add.s64 %rd21, %rd11, {2 * k};"
        f"tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd20, %rd21, %r9, {int(k > 0)};"
        for k in range(4)
    )
    text = rewrite.replace("{wait}", wait if waits else "").replace("{mmas}", mmas)
    work = Gemm(1, 64)
    second = "mbarrier.try_wait.parity.shared.b64 %p6, [%r8], 1; @!%p6 bra WAIT;"
    # Warp 2 writes a word of A before, and only warp 0 hears of that: warp 1 knows it by the commit.
    first = """
    setp.eq.b32 %p8, %r2, 2;
    @%p8 st.shared.b32 [%r3+1024], 0;
    @%p8 fence.proxy.async;
    setp.eq.or.b32 %p9, %r2, 0, %p8;
    @%p9 bar.sync 3, 64;
    """
    machine = work.run(schedule, before=first, issued=text, wait=second)
    if waits:
        assert not [str(one) for one in machine.findings]
        assert (work.out == 0).all()
    else:
        assert Kind.RACE in kinds(machine)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", ["", WAIT_STORE, "bar.sync 2;", FENCE_BEFORE, FENCE_AFTER])
def test_a_in_tensor_memory(schedule: str, missing: str) -> None:
    """All warps write A = 1 to 8 columns beside D; the product is then a sum over 16 elements of B's rows."""
    before = f"""
    and.b32 %r5, %r1, 96;
    shl.b32 %r5, %r5, 16;
    add.s32 %r6, %r4, %r5;
    mov.b32 %r50, 0x3f803f80;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r6+64], {{%r50, %r50, %r50, %r50, %r50, %r50, %r50, %r50}};
    {WAIT_STORE}
    {FENCED_SYNC}
    """
    before = before.replace(missing, "") if missing else before
    mma = "tcgen05.mma.cta_group::1.kind::f16 [%r4], [%r4+64], %rd11, %r60, 0;"
    # N = 64 of the 128 columns.
    mma = f"mov.b32 %r60, {1 << 4 | 1 << 7 | 1 << 10 | 8 << 17 | 8 << 24};" + mma
    work = Gemm(1, 128)
    machine = work.run(schedule, before=before, mmas=mma)
    if missing in (FENCE_BEFORE, FENCE_AFTER):
        (found,) = (one for one in machine.findings if one.kind is Kind.TENSOR_FENCE)
        assert found.warning
        assert missing.removesuffix(";") in found.message
    elif missing:
        assert set(kinds(machine)) & {Kind.TENSOR_ORDER, Kind.RACE}
        assert errors(machine)
    else:
        # The kernel's own loop reads D's 64 columns and A's cells, and columns that nobody wrote.
        assert set(kinds(machine)) == {Kind.UNINITIALISED}
        b = work.images.view(np.uint16)[128 * 64 :].reshape(-1, 64)[0]
        chunks = b.reshape(8, 8)[:2]  # row 0 is not moved by the swizzle
        total = (chunks.astype(np.uint32) << 16).view(np.float32).astype(np.float64).sum()
        assert np.allclose(work.out.reshape(128, 128)[:, 0], total, rtol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fenced", [True, False])
def test_a_copy(schedule: str, fenced: bool) -> None:
    """tcgen05.cp of 128 rows of 32 bytes without a swizzle, then a commit."""
    copy = """
    and.b32 %r20, %r3, 0x3FFFF;
    shr.u32 %r20, %r20, 4;
    cvt.u64.u32 %rd10, %r20;
    add.s64 %rd10, %rd10, {descriptor};
    tcgen05.cp.cta_group::1.128x256b [%r4], %rd10;
    """
    # Core matrices of 8 rows and 16 bytes: the next 16 bytes lie 2048 further, the next 8 rows 128.
    text = copy.replace("{descriptor}", str((A_AT >> 4) + (2048 >> 4 << 16) + (128 >> 4 << 32) + (1 << 46)))
    work = Gemm(1, 8)
    extra: dict[str, Any] = {} if fenced else {"proxy_fence": ""}
    machine = work.run(schedule, mmas=text, **extra)
    if fenced:
        assert not [str(one) for one in machine.findings]
        words = work.images.view(np.uint32)
        row, column = np.indices((128, 8))
        expected = words[(row * 16 + column % 4 * 4 + column // 4 * 2048) // 4]
        assert (work.out.view(np.uint32).reshape(128, 8) == expected).all()
    else:
        assert Kind.PROXY in kinds(machine)


def test_a_commit_is_of_its_own_thread() -> None:
    lanes = "setp.eq.b32 %p7, %r1, 3; setp.eq.b32 %p8, %r1, 5;"
    mma = lanes + "@%p7 tcgen05.mma.cta_group::1.kind::f16 [%r4], %rd10, %rd11, %r9, 0;"
    commit = "@%p8 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r8];"
    machine = Gemm(1, 128).run(leader="", mmas=mma, commit=commit)
    assert kinds(machine) == [Kind.TENSOR_ORDER]
    machine = Gemm(1, 128).run(leader="", mmas=mma, commit=commit.replace("%p8", "%p7"))
    assert not [str(one) for one in machine.findings]
    # Another thread's operation that it has committed itself.
    other = lanes + "@%p8 mbarrier.init.shared.b64 [%r8+8], 1;" + mma.removeprefix(lanes).replace("%p7", "%p8")
    other += commit.replace("[%r8]", "[%r8+8]") + mma
    machine = Gemm(1, 128).run(leader="", mmas=other, commit=commit.replace("%p8", "%p7"))
    assert not [str(one) for one in machine.findings]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("written", [True, False])
def test_block_scaling(schedule: str, written: bool) -> None:
    """Ones of e4m3 with the scale factors 2 and 4: each element of D is 32 * 8."""
    before = f"""
    and.b32 %r5, %r1, 96;
    shl.b32 %r5, %r5, 16;
    add.s32 %r6, %r4, %r5;
    mov.b32 %r50, 0x80808080;
    mov.b32 %r51, 0x81818181;
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%r6+32], {{%r50, %r50, %r50, %r50}};
    {"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6+36], {%r51};" if written else ""}
    {WAIT_STORE}
    {FENCED_SYNC}
    """
    mma = f"""
    mov.b32 %r60, {4 << 17 | 1 << 23 | 8 << 24};
    add.s32 %r61, %r4, 32;
    add.s32 %r62, %r4, 36;
    tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r4], %rd10, %rd11, %r60, [%r61], [%r62], 0;
    """
    work = Gemm(1, 32)
    work.images.view(np.uint8)[:] = 0x38
    body = (
        gemm(1, 32, before=before, mmas=mma)
        .replace("[%r3], 32;", "[%r3], 64;")
        .replace("%r4, 32;\n    END", "%r4, 64;\n    END")
    )
    machine = run(body, work.images, work.out, block=128, schedule=schedule)
    if written:
        assert not [str(one) for one in machine.findings]
        assert (work.out == 256).all()
    else:
        assert kinds(machine) == [Kind.UNINITIALISED]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_shift(schedule: str) -> None:
    before = f"""
    and.b32 %r5, %r1, 96;
    shl.b32 %r5, %r5, 16;
    add.s32 %r6, %r4, %r5;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r6], {{%r1, %r1, %r1, %r1, %r1, %r1, %r1, %r1}};
    {WAIT_STORE}
    {FENCED_SYNC}
    """
    work = Gemm(1, 8)
    machine = work.run(schedule, before=before, mmas="tcgen05.shift.cta_group::1.down [%r4];")
    assert not [str(one) for one in machine.findings]
    lanes = np.arange(128)
    assert (work.out.view(np.uint32).reshape(128, 8)[:, 0] == np.where(lanes % 32 == 31, lanes, lanes + 1)).all()
