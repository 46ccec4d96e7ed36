# SPDX-License-Identifier: Apache-2.0
"""ldmatrix, stmatrix, movmatrix and mma.sync as kernels have them, and the mistakes that are found."""

import numpy as np
import pytest
from numpy.typing import NDArray
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.errors import Unsupported
from emulator.machine.findings import Kind

# Registers 0 to 3: a thread's 16 bytes of array 0. %r12 is their place in shared memory, %rd15 that in array 1.
START = """
mov.u32 %r10, %tid.x;
mov.b32 %r11, shared;
shl.b32 %r12, %r10, 4;
ld.param.b64 %rd10, [p0];
ld.param.b64 %rd11, [p1];
cvt.u64.u32 %rd12, %r12;
add.s64 %rd14, %rd10, %rd12;
add.s64 %rd15, %rd11, %rd12;
add.s32 %r12, %r12, %r11;
ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%rd14];
"""
FILL = "st.shared.v4.b32 [%r12], {%r0, %r1, %r2, %r3};\n"
OUT = "st.global.v4.b32 [%rd15], {%r4, %r5, %r6, %r7};"
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r12];\n"
STORE = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r12], {%r0, %r1, %r2, %r3};\n"


def words(count: int = 128) -> NDArray[np.uint32]:
    found = zeros(count)
    found[:] = np.random.default_rng(0).integers(0, 1 << 32, count)
    return found


def fragments(rows: NDArray[np.uint32], transposed: bool = False) -> NDArray[np.uint32]:
    """[32, 4]: register i of lane l is, of matrix i, row l / 4 and columns 2 (l % 4) and the next."""
    halves = rows.view(np.uint16).reshape(4, 8, 8)
    if transposed:
        halves = halves.transpose(0, 2, 1)
    return np.ascontiguousarray(halves).view(np.uint32).reshape(4, 32).T


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed: bool, generic: bool, schedule: str) -> None:
    source, out = words(), zeros(128)
    line = LOAD.replace(".x4", ".x4.trans") if transposed else LOAD
    if generic:
        line = "cvt.u64.u32 %rd1, %r12;\ncvta.shared.u64 %rd1, %rd1;\n" + line.replace(".shared", "")
        line = line.replace("[%r12]", "[%rd1]")
    machine = run(START + FILL + line + OUT, source, out, schedule=schedule)
    assert not errors(machine)
    assert (out.reshape(32, 4) == fragments(source, transposed)).all()
    assert machine.profile.kernels["k"].events["ldmatrix bytes"] == 512


def test_ldmatrix_reads_the_rows_of_its_first_lanes_only() -> None:
    """Addresses of other lanes mean nothing."""
    source, out = words(), zeros(128)
    away = "setp.ge.u32 %p1, %r10, 16;\n@%p1 mov.b32 %r12, 1000003;\n"
    line = "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r4, %r5}, [%r12];\n"
    machine = run(START + FILL + away + line + "mov.b32 %r6, 0;\nmov.b32 %r7, 0;\n" + OUT, source, out)
    assert not errors(machine)
    assert (out.reshape(32, 4)[:, :2] == fragments(source)[:, :2]).all()
    assert machine.profile.kernels["k"].events["ldmatrix bytes"] == 256


@pytest.mark.parametrize("order", ["m8n8.x4", "x4.m8n8"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stmatrix_and_back(schedule: str, order: str) -> None:
    """As the ISA orders the modifiers, and as CUTLASS and TileLang do."""
    source, out = words(), zeros(128)
    store = STORE.replace("m8n8.x4", order)
    machine = run(START + store + "bar.sync 0;\n" + LOAD + OUT, source, out, schedule=schedule)
    assert not errors(machine)
    assert (out == source).all()
    read = "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r12];\n"
    machine = run(START + store + "bar.sync 0;\n" + read + OUT, source, out, schedule=schedule)
    assert not errors(machine)
    assert (fragments(out) == source.reshape(32, 4)).all()
    assert machine.profile.kernels["k"].events["stmatrix bytes"] == 512


def test_movmatrix() -> None:
    source, out = words(), zeros(128)
    moves = "".join(f"movmatrix.sync.aligned.m8n8.trans.b16 %r{4 + i}, %r{i};\n" for i in range(4))
    machine = run(START + moves + OUT, source, out)
    assert not errors(machine)
    halves = np.ascontiguousarray(source.reshape(32, 4).T).view(np.uint16).reshape(4, 8, 8)
    assert (fragments(np.ascontiguousarray(halves).view(np.uint32), transposed=True) == out.reshape(32, 4)).all()


def test_mma() -> None:
    """Through ldmatrix, as kernels do it: A [16, 16] by rows, B [8, 16] by columns."""
    draw = np.random.default_rng(1)
    a, b = (draw.integers(-8, 9, shape).astype(np.float16) for shape in ((16, 16), (8, 16)))
    # Matrices in the order of the registers: A's rows 0 to 7 and 8 to 15, then the same of its last 8 columns.
    data = np.concatenate([a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]])
    source, out = zeros(256), zeros(128)
    source[:] = np.concatenate([data, b[:, :8], b[:, 8:], np.zeros((16, 8), np.float16)]).reshape(-1).view(np.uint32)
    more = (
        "ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%rd14+512];\n"
        "st.shared.v4.b32 [%r12+512], {%r0, %r1, %r2, %r3};\n"
        "bar.sync 0;\n"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r12];\n"
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r24, %r25}, [%r12+512];\n"
        "mov.b32 %r26, 0f3F800000;\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r4, %r5, %r6, %r7}, {%r20, %r21, %r22, %r23}, "
        "{%r24, %r25}, {%r26, %r26, %r26, %r26};\n"
    )
    machine = run(START + FILL + more + OUT, source, out)
    assert not errors(machine)
    lane, number = np.arange(32)[:, None], np.arange(4)[None, :]
    row, column = lane // 4 + 8 * (number // 2), 2 * (lane % 4) + number % 2
    expected = (a.astype(np.float64) @ b.astype(np.float64).T + 1)[row, column]
    assert (out.view(np.float32).reshape(32, 4) == expected).all()
    assert machine.profile.kernels["k"].events["mma.sync flops f16"] == 2 * 16 * 8 * 16


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_order_between_warps(schedule: str) -> None:
    """A warp loads what another one stored."""
    for sync, clean in (("bar.sync 0;\n", True), ("", False)):
        source, out = words(256), zeros(256)
        other = "xor.b32 %r12, %r12, 512;\n"
        machine = run(START + STORE + sync + other + LOAD + OUT, source, out, block=64, schedule=schedule)
        if clean:
            assert not errors(machine)
            assert (out == np.roll(source, 128)).all()
        else:
            assert set(kinds(machine)) & {Kind.RACE, Kind.UNINITIALISED}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (FILL + "add.s32 %r12, %r12, 8;\n" + LOAD, Kind.ALIGNMENT),
        (FILL + "add.s32 %r12, %r12, 65536;\n" + LOAD, Kind.BOUNDS),
        (FILL + "add.s32 %r12, %r12, 16777216;\n" + LOAD, Kind.BOUNDS),
        (LOAD, Kind.UNINITIALISED),
        (STORE.replace("%r3", "%r9"), Kind.UNINITIALISED),
        ("add.s32 %r12, %r12, 4;\n" + STORE, Kind.ALIGNMENT),
        (FILL + "setp.ne.u32 %p1, %r10, 7;\n@%p1 " + LOAD, Kind.ALIGNED),
        ("setp.ne.u32 %p1, %r10, 7;\n@%p1 " + STORE, Kind.ALIGNED),
        (
            "setp.ne.u32 %p1, %r10, 7;\n@%p1 bra ON;\nret;\nON:\nmovmatrix.sync.aligned.m8n8.trans.b16 %r4, %r0;",
            Kind.ALIGNED,
        ),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r4, %r5, %r6, %r7}, {%r0, %r1}, {%r9}, "
            "{%r0, %r1, %r2, %r3};",
            Kind.UNINITIALISED,
        ),
    ],
)
def test_mistakes(body: str, kind: Kind) -> None:
    machine = run(START + body, words(), zeros(128))
    assert kinds(machine) == [kind]


def test_a_generic_address_of_something_else() -> None:
    line = LOAD.replace(".shared", "").replace("%r12", "%rd14")
    (finding,) = errors(run(START + FILL + line, words(), zeros(128)))
    assert "not of shared memory" in finding.message


def test_registers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(Unsupported, match="registers"):
        run(
            START + "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r4, %r5, %r6, %r7}, {%r0, %r1}, {%r2, %r3}, "
            "{%r0, %r1, %r2, %r3};",
            words(),
            zeros(128),
        )
