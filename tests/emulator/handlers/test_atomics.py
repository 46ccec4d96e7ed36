# SPDX-License-Identifier: Apache-2.0
"""Atomics on halves, packed halves, vectors and 128 bits, against torch's arithmetic and the order of the lanes."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ptx_kernels import SCHEDULES, errors, kinds, run, zeros

from emulator.machine.findings import Kind

THREADS = 192
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
# NaN, infinities, the largest and smallest numbers, subnormal ones and zeros of both signs; then ordinary ones.
SPECIAL = {
    "f16": [0x7E00, 0x7C00, 0xFC00, 0x7BFF, 0xFBFF, 0x0400, 0x0001, 0x8001, 0x03FF, 0x0000, 0x8000, 0x3C00, 0xBC01],
    "bf16": [0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F, 0x0080, 0x0001, 0x8001, 0x007F, 0x0000, 0x8000, 0x3F80, 0xBF81],
}
ADDRESS = """
mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [p0];
ld.param.b64 %rd2, [p1];
ld.param.b64 %rd3, [p2];
mul.wide.u32 %rd4, %r1, {size};
add.s64 %rd1, %rd1, %rd4;
add.s64 %rd2, %rd2, %rd4;
add.s64 %rd3, %rd3, %rd4;
mad.lo.u32 %r2, %r1, {size}, 0;
mov.b32 %r3, shared;
add.s32 %r2, %r2, %r3;
"""


def halves(kind: str, count: int, seed: int) -> NDArray[np.uint16]:
    """Every pair of special values, old and new, somewhere among the first; seeds 0 and 1 are the two of a pair."""
    special = np.array(SPECIAL[kind], np.uint16)
    pairs = np.stack(np.meshgrid(special, special), -1).reshape(-1, 2)
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 8
    found = numbers.to(DTYPES[kind]).view(torch.int16).numpy().view(np.uint16).copy()
    known = min(count, len(pairs))
    found[:known] = pairs[:known, seed]
    return found


def combined(op: str, kind: str, old: NDArray[np.uint16], new: NDArray[np.uint16]) -> torch.Tensor:
    """In the type, by torch; a NaN loses to a number in min and max."""
    a, b = (torch.from_numpy(one.view(np.int16)).view(DTYPES[kind]) for one in (old, new))
    if op == "add":
        return a + b
    return (torch.fmin if op == "min" else torch.fmax)(a, b)


def same(kind: str, found: NDArray[np.uint16], wanted: torch.Tensor, *, zeros_differ: bool) -> bool:
    """The same numbers; any NaN is one, and where torch does not order zeros either is right."""
    got = torch.from_numpy(found.view(np.int16).copy()).view(DTYPES[kind])
    equal = (got == wanted) | (got.isnan() & wanted.isnan())
    return bool((equal & ((got.signbit() == wanted.signbit()) | got.isnan() | (not zeros_differ))).all())


def aligned(values: NDArray[np.uint16]) -> NDArray[np.uint16]:
    found = zeros(values.size, np.uint16)
    found[:] = values
    return found


CASES = [
    *((kind, "add", 1, space) for kind in ("f16", "bf16", "f16x2", "bf16x2") for space in ("global", "", "shared")),
    *(
        (kind, op, count, space)
        for op in ("add", "min", "max")
        for kind in ("f16", "bf16", "f16x2", "bf16x2")
        for count in ((2, 4) if "x2" in kind else (2, 4, 8))
        for space in ("global", "")
    ),
]


def atomic(kind: str, op: str, count: int, space: str, returns: bool) -> str:
    """Each thread combines its own words; shared memory is filled from global memory and read back to it."""
    bits, register = (32, "%r") if "x2" in kind else (16, "%rs")
    step = bits // 8
    new, old = (
        [f"{register}{first + index}" for index in range(count)] for first in ((10, 20) if step > 2 else (0, 8))
    )

    def each(instruction: str, address: str, registers: list[str]) -> str:
        places = [f"[{address}+{step * index}]" for index in range(count)]
        loads = instruction.startswith("ld")
        pairs = zip(registers, places, strict=True) if loads else zip(places, registers, strict=True)
        return "".join(f"{instruction}.b{bits} {first}, {second};\n" for first, second in pairs)

    body = ADDRESS.format(size=step * count) + each("ld.global", "%rd2", new)
    address = "%rd1"
    if space == "shared":
        address = "%r2"
        body += each("ld.global", "%rd1", old) + each("st.shared", address, old)
    words = [f"{{{', '.join(some)}}}" if count > 1 else some[0] for some in (old, new)]
    where = f".{space}" if space else ""
    vector = f".v{count}" if count > 1 else ""
    name = f"{'atom' if returns else 'red'}{where}.{op}.noftz{vector}.{kind}"
    body += f"{name} {words[0] + ', ' if returns else ''}[{address}], {words[1]};\n"
    if returns:
        body += each("st.global", "%rd3", old)
    if space == "shared":
        body += each("ld.shared", address, old) + each("st.global", "%rd1", old)
    return body


@pytest.mark.parametrize("returns", [True, False], ids=["atom", "red"])
@pytest.mark.parametrize(("kind", "op", "count", "space"), CASES)
def test_halves(kind: str, op: str, count: int, space: str, returns: bool) -> None:
    of = kind.removesuffix("x2")
    elements = THREADS * count * (2 if "x2" in kind else 1)
    old, new = (aligned(halves(of, elements, seed)) for seed in (0, 1))
    before, kept = old.copy(), zeros(elements, np.uint16)
    machine = run(atomic(kind, op, count, space, returns), old, new, kept, block=THREADS)
    assert not errors(machine)
    assert same(of, old, combined(op, of, before, new), zeros_differ=op == "add")
    assert (kept == (before if returns else 0)).all()


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_threads_add_to_one_word(kind: str, schedule: str) -> None:
    """Each half on its own: a carry out of the low one would change the high one. What is returned counts up."""
    out, before = zeros(2, np.uint16), zeros(128, np.uint32)
    of = DTYPES[kind.removesuffix("x2")]
    one, minus = (int(torch.tensor(value, dtype=of).view(torch.int16)) & 0xFFFF for value in (1.0, -1.0))
    body = f"""
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.u32 %r1, %r1, 64, %r2;
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd2, %rd2, %rd3;
    mov.b32 %r3, {minus << 16 | one};
    atom.global.add.noftz.{kind} %r4, [%rd1], %r3;
    st.global.b32 [%rd2], %r4;
    """
    machine = run(body, out, before, grid=2, block=64, schedule=schedule)
    assert not errors(machine)
    total = torch.from_numpy(out.view(np.int16)).view(of)
    assert total.tolist() == [128.0, -128.0]
    returned = torch.from_numpy(before.view(np.int16)).view(of).view(128, 2)
    assert sorted(returned[:, 0].tolist()) == list(range(128))
    assert (returned[:, 0] == -returned[:, 1]).all()


@pytest.mark.parametrize(("space", "vector"), [("global", ""), ("", ""), ("global", ".v2"), ("shared", "")])
def test_sums_of_subnormal_numbers(space: str, vector: str) -> None:
    """In global memory terms and sums are flushed, to zeros of their sign; what was there is returned as it was."""
    tiny, normal = np.float32(2.0**-127), np.float32(2.0**-126)
    old = [tiny, -tiny, normal, np.float32(1)]
    new = [tiny, -tiny, -np.float32(1.5) * normal, tiny]
    out, before, terms = zeros(4, np.float32), zeros(4, np.float32), zeros(4, np.float32)
    out[:], terms[:] = old, new
    body = "ld.param.b64 %rd1, [p0];\nld.param.b64 %rd2, [p1];\nld.param.b64 %rd3, [p2];\nmov.b32 %r9, shared;\n"
    body += "mov.u32 %r1, %tid.x;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 ret;\n"
    count = 2 if vector else 1
    for first in range(0, 4, count):
        some = range(first, first + count)
        lists = [
            f"{{{', '.join(f'%r{base + k}' for k in some)}}}" if vector else f"%r{base + first}" for base in (10, 20)
        ]
        body += "".join(f"ld.global.b32 %r{20 + k}, [%rd3+{4 * k}];\n" for k in some)
        at = f"%rd1+{4 * first}"
        if space == "shared":
            body += f"ld.global.b32 %r8, [{at}];\nst.shared.b32 [%r9+{4 * first}], %r8;\n"
        where = f"%r9+{4 * first}" if space == "shared" else at
        body += f"atom{'.' * bool(space)}{space}.add{vector}.f32 {lists[0]}, [{where}], {lists[1]};\n"
        body += "".join(f"st.global.b32 [%rd2+{4 * k}], %r{10 + k};\n" for k in some)
        if space == "shared":
            body += f"ld.shared.b32 %r8, [{where}];\nst.global.b32 [{at}], %r8;\n"
    assert not errors(run(body, out, before, terms))
    kept = [normal, -normal, -tiny, np.float32(1)]
    flushed = [np.float32(0), -np.float32(0), -np.float32(0), np.float32(1)]
    assert before.view(np.uint32).tolist() == np.array(old, np.float32).view(np.uint32).tolist()
    wanted = np.array(kept if space == "shared" else flushed, np.float32)
    assert out.view(np.uint32).tolist() == wanted.view(np.uint32).tolist()


def test_a_vector_has_to_be_aligned() -> None:
    body = "ld.param.b64 %rd1, [p0];\nmov.b32 %r1, 0;\nred.global.add.noftz.v2.f16x2 [%rd1+4], {%r1, %r1};\n"
    assert kinds(run(body, zeros(8))) == [Kind.ALIGNMENT]


def test_what_was_never_written_is_not_added() -> None:
    body = "ld.param.b64 %rd1, [p0];\nred.global.add.noftz.f16x2 [%rd1], %r9;\n"
    assert kinds(run(body, zeros(8))) == [Kind.UNINITIALISED]


@pytest.mark.parametrize("space", ["global", "shared"])
def test_128_bits(space: str) -> None:
    """Exchange, then compare-and-swap: of all 128 bits or of none."""
    out, before = zeros(6, np.uint64), zeros(6, np.uint64)
    at = "%rd1" if space == "global" else "%r3"
    body = f"""
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 ret;
    mov.b32 %r3, shared;
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    mov.b64 %rd10, 1;
    mov.b64 %rd11, 2;
    mov.b64 %rd12, 3;
    mov.b128 %rq0, {{%rd10, %rd11}};
    mov.b128 %rq1, {{%rd10, %rd12}};
    mov.b128 %rq2, {{%rd12, %rd12}};
    st.{space}.b128 [{at}], %rq2;
    atom.{space}.exch.b128 %rq3, [{at}], %rq0;
    st.global.b128 [%rd2], %rq3;
    atom.{space}.cas.b128 %rq3, [{at}], %rq1, %rq2;
    st.global.b128 [%rd2+16], %rq3;
    ld.{space}.b128 %rq4, [{at}];
    st.global.b128 [%rd1+16], %rq4;
    atom.{space}.cas.b128 %rq3, [{at}], %rq0, %rq2;
    st.global.b128 [%rd2+32], %rq3;
    ld.{space}.b128 %rq4, [{at}];
    st.global.b128 [%rd1+32], %rq4;
    """
    machine = run(body, out, before)
    assert not errors(machine)
    assert before.tolist() == [3, 3, 1, 2, 1, 2]
    assert out[2:].tolist() == [1, 2, 3, 3]
