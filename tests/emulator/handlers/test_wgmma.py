# SPDX-License-Identifier: Apache-2.0
"""wgmma as kernels have it: products of a warpgroup, and the mistakes in their order that are found."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from ptx_kernels import SCHEDULES, errors, run, zeros

from emulator.machine import Machine
from emulator.machine.findings import Kind

K, N, STEPS = 16, 32, 4
A_BYTES, B_BYTES = 64 * 128, N * 128  # 64 elements of K in rows of 128 bytes
FENCE, COMMIT, WAIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned"
MATRIX_REGISTERS = N // 2
# From array 0 to shared memory, 16 bytes a thread at a time.
COPY = """
mov.u32 %r200, %tid.x;
mov.b32 %r201, shared;
ld.param.b64 %rd10, [p0];
mov.b32 %r202, %r200;
COPY:
shl.b32 %r203, %r202, 4;
cvt.u64.u32 %rd12, %r203;
add.s64 %rd13, %rd10, %rd12;
add.s32 %r204, %r201, %r203;
ld.global.v4.b32 {{%r205, %r206, %r207, %r208}}, [%rd13];
st.shared.v4.b32 [%r204], {{%r205, %r206, %r207, %r208}};
add.s32 %r202, %r202, 128;
setp.lt.u32 %p4, %r202, {chunks};
@%p4 bra COPY;
mov.pred %p1, 0;
mov.pred %p2, -1;
"""
READY = "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
OUT = """
mov.u32 %r200, %tid.x;
ld.param.b64 %rd11, [p1];
mul.wide.u32 %rd14, %r200, {stride};
add.s64 %rd15, %rd11, %rd14;
"""


def descriptor(start: int, stride: int = 1024, swizzle: int = 1, leading: int = 16) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | swizzle << 62


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + index}" for index in range(count)) + "}"


def mma(a: str, step: int = 0, *, first: int = 0, predicate: str = "%p2", tail: str = "1, 1, 0, 0", n: int = N) -> str:
    """A product of 16 of K: `a` is a register of A's descriptor or a vector; B's descriptor is in %rd2."""
    lines = [f"add.s64 %rd4, %rd2, {2 * step};"]
    if not a.startswith("{"):
        lines.append(f"add.s64 %rd3, {a}, {2 * step};")
        a = "%rd3"
    else:
        tail = tail.rpartition(",")[0] if tail.count(",") == 3 else tail
    d = registers(first, n // 2)
    return "\n".join(
        [*lines, f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {d}, {a}, %rd4, {predicate}, {tail};\n"]
    )


def products(first: int = 0) -> str:
    """All of K: the first step overwrites."""
    return "".join(mma("%rd1", step, first=first, predicate="%p2" if step else "%p1") for step in range(STEPS))


def store(first: int = 0, count: int = MATRIX_REGISTERS, total: int = MATRIX_REGISTERS, at: int = 0) -> str:
    lines = [f"st.global.b32 [%rd15+{4 * (at + index)}], %r{first + index};" for index in range(count)]
    return OUT.format(stride=4 * total) + "\n".join(lines)


def descriptors(a: int = 0, b: int = A_BYTES) -> str:
    return f"mov.b64 %rd1, {descriptor(a):#x};\nmov.b64 %rd2, {descriptor(b):#x};\n"


def matrices(seed: int = 0, n: int = N) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A [64, 64] and B [n, 64], small whole numbers."""
    draw = np.random.default_rng(seed)
    return draw.integers(-4, 5, (64, 64)).astype(float), draw.integers(-4, 5, (n, 64)).astype(float)


def swizzled(matrix: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Rows of 128 bytes with the swizzle of 128 bytes: the row's number XORed into the 16-byte chunk's."""
    rows = matrix.astype(np.float16).view(np.uint8).reshape(len(matrix), 8, 16)
    chunk = np.arange(8)[None, :] ^ np.arange(len(matrix))[:, None] % 8
    return np.take_along_axis(rows, chunk[:, :, None], 1).reshape(-1)


def expected(result: NDArray[np.float64]) -> NDArray[np.uint32]:
    """[128, registers]: d[4j + 2h + e] of lane l in warp w is row 16w + l / 4 + 8h, column 8j + 2 (l % 4) + e."""
    thread = np.arange(128)[:, None]
    number = np.arange(result.shape[1] // 2)[None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + number // 2 % 2 * 8
    column = number // 4 * 8 + thread % 4 * 2 + number % 2
    return result[row, column].astype(np.float32).view(np.uint32)


def launch(body: str, *, schedule: str, seed: int = 0, block: int = 128, data: Any = None, ready: str = READY,
           total: int = MATRIX_REGISTERS, **options: Any) -> tuple[Machine, NDArray[np.uint32]]:  # fmt: skip
    a, b = matrices()
    if data is None:
        data = np.concatenate((swizzled(a), swizzled(b)))
    source = zeros(data.size // 4)
    source[:] = data.view(np.uint32)
    out = zeros(block * total)
    text = COPY.format(chunks=data.size // 16) + ready + body
    machine = run(text, source, out, block=block, arch="sm_90a", schedule=schedule, seed=seed, **options)
    return machine, out.reshape(block, total)


def result() -> NDArray[np.uint32]:
    a, b = matrices()
    return expected(a @ b.T)


def found(machine: Machine) -> set[Kind]:
    return {finding.kind for finding in errors(machine)}


GOOD = [descriptors(), FENCE, products(), COMMIT, f"{WAIT} 0;", store()]


def without(*parts: str) -> str:
    assert all(part in GOOD for part in parts)
    return "\n".join(part for part in GOOD if part not in parts)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_product(schedule: str) -> None:
    machine, out = launch("\n".join(GOOD), schedule=schedule)
    assert not errors(machine)
    assert (out == result()).all()
    events = machine.profile.kernels["k"].events
    assert events["wgmma flops f16"] == 2 * 64 * N * 64
    assert events["shared bytes read by wgmma"] == A_BYTES + B_BYTES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_in_registers(schedule: str) -> None:
    """A's fragment by definition: registers hold rows l / 4 and + 8, columns 2 (l % 4) and + 8."""
    a, _ = matrices()
    thread = np.arange(128)[:, None, None]
    number, half = np.arange(4)[None, :, None], np.arange(2)[None, None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + number % 2 * 8 + 0 * half
    fragments = []
    for step in range(STEPS):
        column = 16 * step + number // 2 * 8 + thread % 4 * 2 + half
        fragments.append(np.ascontiguousarray(a[row, column].astype(np.float16)).view(np.uint32)[..., 0])
    _, b = matrices()
    data = np.concatenate((np.stack(fragments, 1).reshape(-1).view(np.uint8), swizzled(b)))
    loads = ["mul.lo.s32 %r209, %r200, 64;", "add.s32 %r209, %r201, %r209;"] + [
        f"ld.shared.v4.b32 {registers(100 + 4 * step, 4)}, [%r209+{16 * step}];" for step in range(STEPS)
    ]
    steps = [mma(registers(100 + 4 * step, 4), step, predicate="%p2" if step else "%p1") for step in range(STEPS)]
    good = [descriptors(), *loads, FENCE, *steps, COMMIT, f"{WAIT} 0;", store()]
    machine, out = launch("\n".join(good), schedule=schedule, data=data)
    assert not errors(machine)
    assert (out == result()).all()

    # A may be read while the product is made, not written, and needs the fence as well.
    read = [*good[:-2], "add.s32 %r210, %r100, 1;", *good[-2:]]
    machine, out = launch("\n".join(read), schedule=schedule, data=data)
    assert not errors(machine)
    fence = good.index(FENCE)
    for wrong, kind in (
        ([*good[:-2], "mov.b32 %r100, 1;", *good[-2:]], Kind.MATRIX_ORDER),
        ([*good[: fence + 1], "add.s32 %r103, %r103, 1;", *good[fence + 1 :]], Kind.MATRIX_ORDER),
        # Accumulators as A of the next product, and A as accumulators: only after a wait.
        ([*good[:-3], mma(registers(0, 4), 0, first=50), *good[-3:]], Kind.MATRIX_ORDER),
        ([*good[:-3], mma(registers(50, 4), 0, first=112, predicate="%p1"), *good[-3:]], Kind.UNINITIALISED),
        ([*good[:-3], mma(registers(100, 4), 0, first=112, predicate="%p1"), *good[-3:]], Kind.MATRIX_ORDER),
    ):
        machine, out = launch("\n".join(wrong), schedule=schedule, data=data)
        assert kind in found(machine)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("body", "ready", "kinds"),
    [
        pytest.param("\n".join(GOOD), "bar.sync 0;", {Kind.PROXY}, id="no proxy fence"),
        pytest.param(without(FENCE), READY, {Kind.MATRIX_ORDER}, id="no wgmma.fence"),
        pytest.param(without(f"{WAIT} 0;"), READY, {Kind.MATRIX_ORDER, Kind.UNFINISHED}, id="no wait"),
        pytest.param(without(COMMIT), READY, {Kind.MATRIX_ORDER, Kind.UNFINISHED}, id="no commit"),
    ],
)
def test_what_is_missing(body: str, ready: str, kinds: set[Kind], schedule: str) -> None:
    machine, _ = launch(body, schedule=schedule, ready=ready)
    assert found(machine) == kinds


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warps_read_what_others_wrote(schedule: str) -> None:
    """Without a barrier; whether some of it is there already depends on the order of the warps."""
    machine, _ = launch("\n".join(GOOD), schedule=schedule, ready="fence.proxy.async;")
    assert found(machine) <= {Kind.RACE, Kind.UNINITIALISED}
    assert found(machine)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_groups(schedule: str) -> None:
    """Two groups; what the first left may be read when one is pending, what the second leaves not."""
    total = 2 * MATRIX_REGISTERS

    def body(pending: int, first: int) -> str:
        reads = store(first, total=total, at=first)
        other = MATRIX_REGISTERS - first
        rest = store(other, total=total, at=other)
        start = [descriptors(), FENCE, products(), COMMIT, products(MATRIX_REGISTERS), COMMIT]
        return "\n".join([*start, f"{WAIT} {pending};", reads, f"{WAIT} 0;", rest])

    for pending, first in ((1, 0), (0, 0), (0, MATRIX_REGISTERS)):
        machine, out = launch(body(pending, first), schedule=schedule, total=total)
        assert not errors(machine)
        assert (out == np.concatenate((result(), result()), axis=1)).all()
    machine, _ = launch(body(1, MATRIX_REGISTERS), schedule=schedule, total=total)
    assert found(machine) == {Kind.MATRIX_ORDER}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulators_between_products(schedule: str) -> None:
    """A softmax rescales them: after a wait, and in front of another fence."""
    scaled = "\n".join(f"mul.f32 %r{index}, %r{index}, 0f40000000;" for index in range(MATRIX_REGISTERS))
    again = mma("%rd1", 0)
    parts = [*GOOD[:-1], scaled, FENCE, again, COMMIT, f"{WAIT} 0;", store()]
    machine, out = launch("\n".join(parts), schedule=schedule)
    assert not errors(machine)
    a, b = matrices()
    assert (out == expected(2 * a @ b.T + a[:, :K] @ b[:, :K].T)).all()
    place = parts.index(scaled)
    machine, _ = launch("\n".join(parts[: place + 1] + parts[place + 2 :]), schedule=schedule)
    assert found(machine) == {Kind.MATRIX_ORDER}
    # Nothing was read or written: they may follow without a fence.
    machine, _ = launch("\n".join(parts[:place] + parts[place + 2 :]), schedule=schedule)
    assert not errors(machine)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("read", "clean"),
    [
        ("add.f32 %f1, %f1, %r3;", False),
        ("st.global.b32 [%rd15], %r5;", False),
        ("@%p1 add.f32 %f1, %f1, %r3;", True),  # not executed
        ("add.f32 %f1, %f1, %r100;", True),  # of no product
        ("", True),
    ],
)
def test_accumulators_that_are_read_between_products(read: str, clean: bool, schedule: str) -> None:
    """As a promotion reads them: after a wait, and in front of another fence, since the product overwrites them."""
    start = f"mov.f32 %f1, 0f00000000;\nmov.b32 %r100, 0;\n{OUT.format(stride=4 * MATRIX_REGISTERS)}"
    waited = [products(), COMMIT, f"{WAIT} 0;"]
    for fence in (FENCE, ""):
        parts = [start, descriptors(), FENCE, *waited, read, fence, *waited, store()]
        machine, out = launch("\n".join(parts), schedule=schedule)
        assert found(machine) == (set() if clean or fence else {Kind.MATRIX_ORDER})
        assert (out == result()).all()


@pytest.mark.parametrize(("of", "clean"), [("0f00000000", True), ("%f1", True), ("%f2", False)])
def test_accumulators_filled_behind_the_fence(of: str, clean: bool) -> None:
    """As compilers move a fill with zeros: a warning, unless what is put there is computed."""
    first = "mov.f32 %f1, 0f00000000;\ncvt.rn.f32.u32 %f2, %r200;"
    before, fill = ("\n".join(f"mov.b32 %r{index}, {one};" for index in range(MATRIX_REGISTERS)) for one in (7, of))
    steps = products().replace("%p1,", "%p2,")
    machine, out = launch("\n".join([first, GOOD[0], before, FENCE, fill, steps, *GOOD[3:]]), schedule="lazy")
    assert [finding.kind for finding in machine.findings] == [Kind.MATRIX_ORDER]
    assert bool(errors(machine)) != clean
    assert (out == result()).all() == clean


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("between", "clean"), [("", False), (FENCE, True)])
def test_products_of_another_shape(between: str, clean: bool, schedule: str) -> None:
    parts = [descriptors(), FENCE, products(), between, mma("%rd1", 0, n=16), COMMIT, f"{WAIT} 0;", store()]
    machine, out = launch("\n".join(parts), schedule=schedule)
    assert found(machine) == (set() if clean else {Kind.MATRIX_ORDER})
    a, b = matrices()
    added = a @ b.T
    added[:, :16] += a[:, :K] @ b[:16, :K].T
    assert (out == expected(added)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_operands_overwritten_too_early(schedule: str) -> None:
    """One thread may tell others that a group is complete: it is the whole warpgroup's."""
    overwrite = "mov.u32 %r200, %tid.x;\nshl.b32 %r203, %r200, 4;\nst.shared.b32 [%r203], 0;"
    early = [*GOOD[:4], overwrite, *GOOD[4:]]
    machine, _ = launch("\n".join(early), schedule=schedule)
    assert Kind.RACE in found(machine) | ({Kind.RACE} if schedule == "eager" else set())
    late = [*GOOD, overwrite]
    machine, out = launch("\n".join(late), schedule=schedule)
    assert not errors(machine)
    assert (out == result()).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("operand", "clean"), [(A_BYTES, True), (A_BYTES + B_BYTES, False)])
def test_operands_of_a_group_that_is_pending(operand: int, clean: bool, schedule: str) -> None:
    """Two groups with a B each: those of the first may be overwritten, those of the second not."""
    a, b = matrices()
    data = np.concatenate((swizzled(a), swizzled(b), swizzled(b)))
    second = f"mov.b64 %rd2, {descriptor(A_BYTES + B_BYTES):#x};"
    overwrite = f"mov.u32 %r200, %tid.x;\nshl.b32 %r203, %r200, 2;\nst.shared.b32 [%r203+{operand}], 0;"
    parts = [*GOOD[:4], second, products(MATRIX_REGISTERS), COMMIT, f"{WAIT} 1;", overwrite, f"{WAIT} 0;", store()]
    machine, _ = launch("\n".join(parts), schedule=schedule, data=data)
    assert found(machine) == (set() if clean else {Kind.RACE})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_warp_needs_its_own_rows_of_a_alone(schedule: str) -> None:
    """A warp that writes its rows of A, as attention does with P, needs no barrier with others for them."""
    rows = """
mov.u32 %r210, %tid.x;
shr.u32 %r211, %r210, 5;
mul.lo.s32 %r211, %r211, {stride};
and.b32 %r212, %r210, 31;
shl.b32 %r212, %r212, 4;
add.s32 %r211, %r211, %r212;
and.b32 %r211, %r211, 8191;
mov.b32 %r213, 0;
{stores}
fence.proxy.async.shared::cta;
"""
    stores = "\n".join(f"st.shared.v4.b32 [%r211+{512 * part}], {{%r213, %r213, %r213, %r213}};" for part in range(4))
    for stride, clean in ((2048, True), (2048 + 8192 - 2048, False)):
        text = rows.format(stride=stride, stores=stores)
        machine, out = launch(text + "\n".join(GOOD), schedule=schedule)
        if clean:
            assert not errors(machine)
            assert not out.any()
        else:
            assert found(machine) == {Kind.RACE}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("body", "options", "kind"),
    [
        pytest.param(["%part"], {}, Kind.ALIGNED, id="part of a warp"),
        pytest.param(["%warps"], {}, Kind.ALIGNED, id="three warps"),
        pytest.param([], {"block": 96}, Kind.ALIGNED, id="no warpgroup"),
        pytest.param(["mov.u32 %r220, %tid.x;", "cvt.u64.u32 %rd20, %r220;", "and.b64 %rd20, %rd20, 1;",
                      "add.s64 %rd2, %rd2, %rd20;"], {}, Kind.ALIGNED, id="descriptors of lanes"),
        pytest.param(["mov.u32 %r220, %tid.x;", "shr.u32 %r220, %r220, 6;", "cvt.u64.u32 %rd20, %r220;",
                      "add.s64 %rd2, %rd2, %rd20;"], {}, Kind.ALIGNED, id="descriptors of warps"),
        pytest.param(["mov.u32 %r220, %tid.x;", "setp.lt.u32 %p2, %r220, 3;"], {}, Kind.ALIGNED, id="scale of lanes"),
        pytest.param(["mov.u32 %r220, %tid.x;", "setp.lt.u32 %p2, %r220, 32;"], {}, Kind.ALIGNED, id="scale of warps"),
        pytest.param([f"mov.b64 %rd2, {descriptor(65536 - 1024):#x};"], {}, Kind.BOUNDS, id="out of bounds"),
        pytest.param([f"mov.b64 %rd2, {1 << 49 | descriptor(A_BYTES):#x};"], {}, Kind.DESCRIPTOR, id="descriptor"),
        pytest.param([f"mov.b64 %rd2, {descriptor(A_BYTES + B_BYTES):#x};"], {}, Kind.UNINITIALISED, id="unwritten"),
    ],
)  # fmt: skip
def test_misuse(body: list[str], options: dict[str, Any], kind: Kind, schedule: str) -> None:
    parts = [GOOD[0], *body, *GOOD[1:]]
    if body == ["%part"]:
        parts = [GOOD[0], "mov.u32 %r220, %tid.x;\nsetp.ne.u32 %p5, %r220, 5;\n@%p5 bra ON;\nret;\nON:", *GOOD[1:]]
    if body == ["%warps"]:
        parts = [GOOD[0], "mov.u32 %r220, %tid.x;\nsetp.lt.u32 %p5, %r220, 96;\n@%p5 bra ON;\nret;\nON:", *GOOD[1:3]]
    machine, _ = launch("\n".join(parts), schedule=schedule, **options)
    assert kind in found(machine)


def test_a_warp_that_never_comes_is_named() -> None:
    skip = "mov.u32 %r220, %tid.x;\nsetp.lt.u32 %p5, %r220, 96;\n@%p5 bra ON;\nret;\nON:"
    machine, _ = launch("\n".join([GOOD[0], skip, *GOOD[1:]]), schedule="lazy")
    assert Kind.DEADLOCK in found(machine)
    machine, _ = launch("\n".join([GOOD[0], skip, *GOOD[1:4]]), schedule="lazy")
    (finding,) = [one for one in errors(machine) if one.kind is Kind.ALIGNED]
    assert "warp 3" in finding.message


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulators_never_written(schedule: str) -> None:
    body = without().replace("%p1, 1, 1, 0, 0", "%p2, 1, 1, 0, 0")
    machine, _ = launch(body, schedule=schedule)
    assert found(machine) == {Kind.UNINITIALISED}


# All four warps wait for a phase; then thread 0 completes the next one, too.
ONE_FOR_FOUR = """
mov.u32 %r210, shared;
mov.u32 %r211, %tid.x;
setp.eq.u32 %p5, %r211, 0;
@%p5 mbarrier.init.shared.b64 [%r210+32768], 1;
@%p5 mbarrier.init.shared.b64 [%r210+32776], 1;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p5 mbarrier.arrive.shared.b64 _, [%r210+32768];
FULL:
mbarrier.try_wait.parity.shared.b64 %p8, [%r210+32768], 0;
@!%p8 bra FULL;
{products}
// Others have their turn.
PAUSE:
mbarrier.test_wait.parity.shared.b64 %p8, [%r210+32776], 1;
@!%p8 bra PAUSE;
@%p5 mbarrier.arrive.shared.b64 _, [%r210+32768];
"""


@pytest.mark.parametrize("waits", [[0], [1, 0], []])
def test_who_has_waited_for_a_product_knows_that_all_four_warps_issued_it(waits: list[int]) -> None:
    """So one thread may complete the phase after one that all of its warpgroup wait for; not without a product."""
    lines = [descriptors(), FENCE, products(), COMMIT, *(f"{WAIT} {pending};" for pending in waits)]
    machine, _ = launch(ONE_FOR_FOUR.format(products="\n".join(lines) if waits else ""), schedule="eager")
    assert found(machine) == (set() if waits else {Kind.PHASE})
