# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma against numpy: matrices are placed by CUTLASS's canonical layouts, written here in CuTe's notation."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest
from cute_layouts import matrix, swizzle
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.formats import FORMATS, Format
from emulator.machine.swizzle import DescriptorError
from emulator.machine.tcgen05 import InstructionDescriptor, Mma, Multiplication, TensorCopy, shift_down, shifted
from emulator.machine.tensor_memory import TensorMemory, TensorMemoryError
from emulator.ptx import Instr, parse

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]

A_AT, B_AT = 1 << 12, 1 << 17
D_AT = 64  # column
CODES = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "i8": {"u8": 0, "s8": 1},
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e2m1": 1},
}
CODES["f8f6f4"] = CODES["mxf8f6f4"] = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
RESULTS = {"f16": 0, "f32": 1, "s32": 2}
K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
# Swizzle<B, 4, 3>, and the descriptor's code; Swizzle<2, 5, 2> is the one of 32-byte atoms.
SWIZZLES = {0: (0, 4, 3, 0), 32: (1, 4, 3, 6), 64: (2, 4, 3, 4), 128: (3, 4, 3, 2), "atoms of 32": (2, 5, 2, 1)}
Span: TypeAlias = "int | str"


def idesc(
    kind: str,
    m: int,
    n: int,
    a: str,
    b: str = "",
    d: str = "f32",
    *,
    mn: str = "",
    scale: str = "ue8m0",
    ids: tuple[int, int] = (0, 0),
) -> int:
    """The instruction descriptor as CUTLASS's InstrDescriptor and InstrDescriptorBlockScaled lay its fields out."""
    bits = CODES[kind][a] << 7 | CODES[kind][b or a] << 10 | n >> 3 << 17 | m >> 4 << 24
    bits |= ("a" in mn) << 15 | ("b" in mn) << 16
    if kind.startswith("mx"):
        return bits | ids[1] << 4 | (scale == "ue8m0") << 23 | ids[0] << 29
    return bits | RESULTS[d] << 4


def instruction(text: str) -> Instr:
    header = ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k() {\n"
    registers = ".reg .pred %p<4>; .reg .b32 %r<20>; .reg .b64 %rd<4>;\n"
    code = parse(f"{header}{registers}{text}\n}}").entries["k"].code
    assert code is not None
    return code[0]


def ss(kind: str, group: int, size: str = "") -> Instr:
    scales = ", [%r3], [%r4]" if kind.startswith("mx") else ""
    size = f".block_scale{size}" if scales else ""
    return instruction(
        f"tcgen05.mma.cta_group::{group}.kind::{kind}{size} [%r1], %rd1, %rd2, %r2{scales}, %p1;",
    )


def ts(kind: str, group: int, shift: str = "") -> Instr:
    return instruction(f"tcgen05.mma.cta_group::{group}.kind::{kind}{shift} [%r1], [%r5], %rd2, %r2, %p1;")


def place(rows: int, k: int, slot: int, span: Span, mn: bool) -> tuple[Ints, int, int]:
    """Byte offsets [rows, k] of the canonical layouts in make_umma_desc's comment, with LBO and SBO in bytes.

    The k columns are the whole operand; where a swizzle's row is longer, the rest belongs to other instructions.
    """
    t, deep = 128 // slot, 8
    if isinstance(span, str):
        span, deep = 128, 4
    row_bytes = span
    chunks = max(row_bytes, 16) // 16
    if not mn:
        across = -(-k // (t * chunks))
        assert across == 1 or not row_bytes
        if row_bytes:
            stride = 8 * row_bytes
            found = matrix(((8, rows // 8), (t, k // t)), ((t * chunks, stride * 8 // slot), (1, t)))
            leading = 16
        else:
            leading, stride = 128 * (rows // 8) + 128, 128
            found = matrix(((8, rows // 8), (t, k // t)), ((t, stride * 8 // slot), (1, leading * 8 // slot)))
    else:
        per_row = t * chunks
        if row_bytes:
            stride, leading = deep * row_bytes, max(row_bytes, 16) * k
            shape = ((t, chunks, rows // per_row), (deep, k // deep))
            steps = ((1, t, leading * 8 // slot), (per_row, stride * 8 // slot))
        else:
            stride, leading = 128 * (k // 8), 128
            shape = ((t, 1, rows // t), (8, k // 8))
            steps = ((1, t, stride * 8 // slot), (t, leading * 8 // slot))
        found = matrix(shape, steps)
    return found * slot // 8, leading, stride


def descriptor(start: int, leading: int, stride: int, span: Span) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLES[span][3] << 61


def codes_of(format: str, shape: tuple[int, int], draw: np.random.Generator) -> tuple[Words, Floats]:
    """Random codes and their values."""
    if format == "tf32":
        bits = draw.standard_normal(shape).astype(np.float32).view(np.uint32)
        return bits, (bits >> 13 << 13).view(np.float32).astype(np.float64)
    if format in ("u8", "s8"):
        raw = draw.integers(0, 256, shape, dtype=np.uint8)
        return raw.astype(np.uint32), (raw.view(np.int8) if format == "s8" else raw).astype(np.float64)
    one = FORMATS[format]
    values = draw.standard_normal(shape)
    codes = one.encode(values, saturate=True)
    return codes.astype(np.uint32), one.decode(codes)


def put(memory: NDArray[np.uint8], at: int, offsets: Ints, codes: Words, bits: int, span: Span) -> None:
    """Write codes [rows, k] at byte offsets; those of formats below 8 bits as the tensor copy lays them out."""
    moved = swizzle(*SWIZZLES[span][:3], at + offsets)
    if bits in (8, 16, 32):
        for byte in range(bits // 8):
            memory[moved + byte] = codes >> 8 * byte & 0xFF
        return
    for (row, column), code in np.ndenumerate(codes):
        where = int(moved[row, column])
        if bits == -4:  # packed, two in a byte
            memory[where] = int(memory[where]) & (0xF0, 0x0F)[column % 2] | int(code) << 4 * (column % 2)
            continue
        unit = where & ~15
        number = int.from_bytes(memory[unit : unit + 16].tobytes(), "little")
        shift = (where & 15) * bits
        number = number & ~(((1 << bits) - 1) << shift) | int(code) << shift
        memory[unit : unit + 16] = np.frombuffer(number.to_bytes(16, "little"), dtype=np.uint8)


SLOT = {"f16": 16, "bf16": 16, "tf32": 32}
WIDTH = {"e2m3": 6, "e3m2": 6, "e2m1": 4, **dict.fromkeys(("u8", "s8", "e4m3", "e5m2"), 8), **SLOT}


class Pair:
    """One CTA, or two, with matrices in their memories."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.shared = [np.full(1 << 18, 0xFF, dtype=np.uint8) for _ in range(group)]
        self.tensors = [TensorMemory() for _ in range(group)]
        for tensor in self.tensors:
            tensor.allocate(512)
        self.draw = np.random.default_rng(7)

    def operand(self, kind: str, format: str, rows: int, at: int, span: Span, mn: bool) -> tuple[int, Floats]:
        """Random [rows, K], in halves over the CTAs; returns descriptor and values."""
        packed = kind in ("mxf4", "mxf4nvf4")
        slot = 4 if packed else SLOT.get(format, 8)
        codes, values = codes_of(format, (rows, K[kind]), self.draw)
        part = rows // self.group
        offsets, leading, stride = place(part, K[kind], slot, span, mn)
        for cta, memory in enumerate(self.shared):
            mine = codes[cta * part : (cta + 1) * part]
            put(memory, at, offsets, mine, -4 if packed else WIDTH[format], span)
        return descriptor(at, leading, stride, span), values

    def accumulator_cells(self, m: int, n: int, column: int) -> list[Ints]:
        """By CTA [rows, n] of lane * 512 + column: tmem_frg's atoms, lane stride 1 and column stride 128."""
        if self.group == 1 and m == 64:
            virtual = matrix(((16, 4), n), ((1, 32), 128))
        elif m // self.group == 64:
            virtual = matrix((64, (n // 2, 2)), (1, (128, 64)))
        else:
            virtual = matrix((128, n), (1, 128))
        return [virtual % 128 * 512 + virtual // 128 + column for _ in range(self.group)]

    def run(
        self, mma: Mma, a: int, b: int, *, accumulate: bool, scales: tuple[int, int] | None = None
    ) -> Multiplication:
        work = Multiplication.place(mma, self.tensors, D_AT, a, b, accumulate=accumulate, scales=scales)
        work.run(self.shared, self.tensors)
        return work

    def result(self, m: int, n: int) -> Words:
        cells = self.accumulator_cells(m, n, D_AT)
        return np.concatenate([tensor.data[one] for tensor, one in zip(self.tensors, cells, strict=True)])

    def start(self, m: int, n: int, bits: Words) -> None:
        cells = self.accumulator_cells(m, n, D_AT)
        for tensor, one, part in zip(self.tensors, cells, np.split(bits, self.group), strict=True):
            tensor.data[one] = part


SHAPES = [
    (1, 64, 8),
    (1, 64, 64),
    (1, 128, 16),
    (1, 128, 256),
    (2, 128, 32),
    (2, 128, 256),
    (2, 256, 32),
    (2, 256, 256),
]


@pytest.mark.parametrize(("group", "m", "n"), SHAPES)
@pytest.mark.parametrize("format", ["f16", "bf16"])
@pytest.mark.parametrize("row_bytes", [0, 32, 64, 128])
def test_shapes(group: int, m: int, n: int, format: str, row_bytes: int) -> None:
    pair = Pair(group)
    a, left = pair.operand("f16", format, m, A_AT, row_bytes, False)
    b, right = pair.operand("f16", format, n, B_AT, row_bytes, False)
    before = pair.draw.standard_normal((m, n)).astype(np.float32)
    pair.start(m, n, before.view(np.uint32))
    mma = Mma.of(ss("f16", group), idesc("f16", m, n, format))
    pair.run(mma, a, b, accumulate=True)
    expected = (left @ right.T + before).astype(np.float32)
    np.testing.assert_array_equal(pair.result(m, n).view(np.float32), expected)
    pair.run(mma, a, b, accumulate=False)
    np.testing.assert_array_equal(pair.result(m, n).view(np.float32), (left @ right.T).astype(np.float32))


@pytest.mark.parametrize(("kind", "format"), [("f16", "bf16"), ("tf32", "tf32"), ("f8f6f4", "e4m3"), ("i8", "s8")])
@pytest.mark.parametrize("row_bytes", [0, 32, 64, 128])
@pytest.mark.parametrize("mn", ["", "a", "b", "ab"])
@pytest.mark.parametrize(("group", "m", "n"), [(1, 128, 128), (2, 256, 256)])
def test_majorness(kind: str, format: str, row_bytes: int, mn: str, group: int, m: int, n: int) -> None:
    pair = Pair(group)
    # M- or N-major elements of 32 bits have one swizzle, which no others have.
    spans = ["atoms of 32" if kind == "tf32" and one in mn else row_bytes for one in "ab"]
    a, left = pair.operand(kind, format, m, A_AT, spans[0], "a" in mn)
    b, right = pair.operand(kind, format, n, B_AT, spans[1], "b" in mn)
    d = "s32" if kind == "i8" else "f32"
    pair.run(Mma.of(ss(kind, group), idesc(kind, m, n, format, d=d, mn=mn)), a, b, accumulate=False)
    result = pair.result(m, n)
    values = result.view(np.int32) if kind == "i8" else result.view(np.float32)
    np.testing.assert_array_equal(values, (left @ right.T).astype(values.dtype))


@pytest.mark.parametrize("matrix", "ab")
@pytest.mark.parametrize(
    ("kind", "format", "span", "mn", "error"),
    [
        ("tf32", "tf32", 128, True, DescriptorError),
        ("tf32", "tf32", 0, True, DescriptorError),
        ("f16", "bf16", "atoms of 32", True, DescriptorError),
        ("i8", "s8", "atoms of 32", True, DescriptorError),
        ("tf32", "tf32", "atoms of 32", False, Unsupported),
        ("f16", "f16", "atoms of 32", False, Unsupported),
    ],
)
def test_swizzles_that_a_major_does_not_have(
    kind: str, format: str, span: Span, mn: bool, error: type[Exception], matrix: str
) -> None:
    pair = Pair(1)
    at = dict.fromkeys("ab", descriptor(A_AT, 16, 1024, 128)) | {matrix: descriptor(A_AT, 512, 512, span)}
    d = "s32" if kind == "i8" else "f32"
    mma = Mma.of(ss(kind, 1), idesc(kind, 128, 128, format, d=d, mn=matrix if mn else ""))
    with pytest.raises(error, match="swizzle"):
        pair.run(mma, at["a"], at["b"], accumulate=False)


@pytest.mark.parametrize("a", CODES["f8f6f4"])
@pytest.mark.parametrize("b", CODES["f8f6f4"])
@pytest.mark.parametrize("row_bytes", [0, 128])
def test_mixed_formats_of_f8f6f4(a: str, b: str, row_bytes: int) -> None:
    pair = Pair(1)
    first, left = pair.operand("f8f6f4", a, 128, A_AT, row_bytes, False)
    second, right = pair.operand("f8f6f4", b, 16, B_AT, row_bytes, False)
    pair.run(Mma.of(ss("f8f6f4", 1), idesc("f8f6f4", 128, 16, a, b)), first, second, accumulate=False)
    np.testing.assert_array_equal(pair.result(128, 16).view(np.float32), (left @ right.T).astype(np.float32))


WHOLE = [("f16", "f16"), ("tf32", "tf32"), ("f8f6f4", "e5m2"), ("i8", "u8")]
NARROW = [("f8f6f4", "e2m1"), ("f8f6f4", "e2m3"), ("f8f6f4", "e3m2")]


def tensor_a(pair: Pair, kind: str, format: str, m: int, column: int) -> Floats:
    """Random A in tensor memory: tmem_frg of A's own type, elements of a row in a column's bits from the lowest."""
    codes, values = codes_of(format, (m, K[kind]), pair.draw)
    bits = WIDTH[format]
    if bits < 8:  # in the middle of a byte
        codes, bits = codes << np.uint32({4: 2, 6: 1}[bits]), 8
    words = np.zeros((m, 8), dtype=np.uint32)
    for k in range(K[kind]):
        words[:, k * bits // 32] |= codes[:, k] << np.uint32(k * bits % 32)
    part = m // pair.group
    if pair.group == 1 and m == 64:
        lanes = [matrix(((16, 4), 1), ((1, 32), 0))[:, 0]]
    elif part == 64:
        lanes = [np.arange(64), np.arange(64, 128)]  # TmemAllocMode::Duplicated
    else:
        lanes = [np.arange(128)]
    for cta, tensor in enumerate(pair.tensors):
        for one in lanes:
            tensor.data[one[:, None] * 512 + column + np.arange(8)] = words[cta * part : (cta + 1) * part]
    return values


@pytest.mark.parametrize(("group", "m", "n"), [(1, 64, 64), (1, 128, 64), (2, 128, 64), (2, 256, 64)])
@pytest.mark.parametrize(("kind", "format"), [*WHOLE, *NARROW])
def test_a_in_tensor_memory(group: int, m: int, n: int, kind: str, format: str) -> None:
    pair = Pair(group)
    left = tensor_a(pair, kind, format, m, 400)
    b, right = pair.operand(kind, format, n, B_AT, 128, False)
    d = "s32" if kind == "i8" else "f32"
    pair.run(Mma.of(ts(kind, group), idesc(kind, m, n, format, d=d)), 400, b, accumulate=False)
    result = pair.result(m, n)
    values = result.view(np.int32) if kind == "i8" else result.view(np.float32)
    np.testing.assert_array_equal(values, (left @ right.T).astype(values.dtype))


def test_both_copies_of_a_are_read() -> None:
    """With M = 128 over two CTAs, D's right half is made of the copy in lanes 64 to 127."""
    pair = Pair(2)
    left = tensor_a(pair, "f16", "f16", 128, 400)
    for tensor in pair.tensors:
        tensor.data.reshape(128, 512)[64:, 400:408] = 0
    b, right = pair.operand("f16", "f16", 64, B_AT, 128, False)
    pair.run(Mma.of(ts("f16", 2), idesc("f16", 128, 64, "f16")), 400, b, accumulate=False)
    result = pair.result(128, 64).view(np.float32)
    np.testing.assert_array_equal(result[:, :32], (left @ right[:32].T).astype(np.float32))
    assert not result[:, 32:].any()


@pytest.mark.parametrize("column", [0, 16])
def test_64_rows_take_either_half_of_the_lanes(column: int) -> None:
    pair = Pair(1)
    a, left = pair.operand("f16", "f16", 64, A_AT, 128, False)
    b, right = pair.operand("f16", "f16", 32, B_AT, 128, False)
    mma = Mma.of(ss("f16", 1), idesc("f16", 64, 32, "f16"))
    work = Multiplication.place(mma, pair.tensors, column << 16 | D_AT, a, b, accumulate=False)
    work.run(pair.shared, pair.tensors)
    rows = np.arange(64)
    lanes = rows // 16 * 32 + rows % 16 + column
    found = pair.tensors[0].data.reshape(128, 512)[lanes, D_AT : D_AT + 32].view(np.float32)
    np.testing.assert_array_equal(found, (left @ right.T).astype(np.float32))
    assert pair.tensors[0].written.sum() == 64 * 32
    with pytest.raises(TensorMemoryError, match="multiple of 16"):
        Multiplication.place(mma, pair.tensors, 8 << 16, a, b, accumulate=False)


class TestArithmetic:
    def operands(self, m: int = 128, n: int = 32) -> tuple[Pair, int, int, Floats]:
        pair = Pair(1)
        a, left = pair.operand("f16", "f16", m, A_AT, 128, False)
        b, right = pair.operand("f16", "f16", n, B_AT, 128, False)
        return pair, a, b, left @ right.T

    def test_d_of_16_bits(self) -> None:
        pair, a, b, product = self.operands()
        mma = Mma.of(ss("f16", 1), idesc("f16", 128, 32, "f16", d="f16"))
        pair.run(mma, a, b, accumulate=False)
        first = product.astype(np.float16)
        np.testing.assert_array_equal(pair.result(128, 32), first.view(np.uint16))
        pair.run(mma, a, b, accumulate=True)
        second = (product + first.astype(np.float64)).astype(np.float16)
        np.testing.assert_array_equal(pair.result(128, 32), second.view(np.uint16))

    def test_negation(self) -> None:
        pair, a, b, product = self.operands()
        for bits, sign in ((1 << 13, -1), (1 << 14, -1), (3 << 13, 1)):
            mma = Mma.of(ss("f16", 1), idesc("f16", 128, 32, "f16") | bits)
            pair.run(mma, a, b, accumulate=False)
            np.testing.assert_array_equal(pair.result(128, 32).view(np.float32), (sign * product).astype(np.float32))

    def test_scale_of_d(self) -> None:
        pair, a, b, product = self.operands()
        before = pair.draw.standard_normal((128, 32)).astype(np.float32)
        pair.start(128, 32, before.view(np.uint32))
        text = "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, 3;"
        pair.run(Mma.of(instruction(text), idesc("f16", 128, 32, "f16")), a, b, accumulate=True)
        expected = (product + before.astype(np.float64) / 8).astype(np.float32)
        np.testing.assert_array_equal(pair.result(128, 32).view(np.float32), expected)

    def test_integers_wrap_or_saturate(self) -> None:
        pair = Pair(1)
        a, left = pair.operand("i8", "s8", 128, A_AT, 128, False)
        b, right = pair.operand("i8", "u8", 32, B_AT, 128, False)
        exact = (left @ right.T).astype(np.int64)
        for saturate in (False, True):
            before = np.where(exact > 0, 2**31 - 1, -(2**31))
            pair.start(128, 32, before.astype(np.int32).view(np.uint32))
            bits = idesc("i8", 128, 32, "s8", "u8", "s32") | saturate << 3
            pair.run(Mma.of(ss("i8", 1), bits), a, b, accumulate=True)
            total = exact + before
            expected = np.clip(total, -(2**31), 2**31 - 1) if saturate else total.astype(np.uint32).view(np.int32)
            np.testing.assert_array_equal(pair.result(128, 32).view(np.int32), expected)

    def test_one_rounding(self) -> None:
        """2^24 + 1 + 1: each addition alone would be lost in float32."""
        pair = Pair(1)
        offsets, leading, stride = place(128, 16, 16, 128, False)
        ones = np.zeros((128, 16), dtype=np.uint32)
        ones[:, :2] = 0x3F80
        put(pair.shared[0], A_AT, offsets, ones, 16, 128)
        put(pair.shared[0], B_AT, offsets[:8], ones[:8], 16, 128)
        pair.start(128, 8, np.full((128, 8), 2.0**24, dtype=np.float32).view(np.uint32))
        a, b = descriptor(A_AT, leading, stride, 128), descriptor(B_AT, leading, stride, 128)
        pair.run(Mma.of(ss("f16", 1), idesc("f16", 128, 8, "bf16")), a, b, accumulate=True)
        assert (pair.result(128, 8).view(np.float32) == 2.0**24 + 2).all()

    @pytest.mark.parametrize(("group", "m"), [(1, 64), (1, 128), (2, 128), (2, 256)])
    def test_disabled_lanes_keep_what_they_had(self, group: int, m: int) -> None:
        pair, n = Pair(group), 32
        a, left = pair.operand("f16", "f16", m, A_AT, 128, False)
        b, right = pair.operand("f16", "f16", n, B_AT, 128, False)
        words = pair.draw.integers(0, 1 << 32, 4 * group).tolist()
        names = ", ".join(f"%r{5 + index}" for index in range(4 * group))
        text = f"tcgen05.mma.cta_group::{group}.kind::f16 [%r1], %rd1, %rd2, %r2, {{{names}}}, %p1;"
        mma = Mma.of(instruction(text), idesc("f16", m, n, "f16"), words)
        work = pair.run(mma, a, b, accumulate=False)
        expected = (left @ right.T).astype(np.float32)
        part = m // group
        for cta, cells in enumerate(pair.accumulator_cells(m, n, D_AT)):
            lane = cells // 512
            off = np.array([words[4 * cta + one // 32] >> one % 32 & 1 for one in lane.flat], bool).reshape(lane.shape)
            found = pair.tensors[cta].data[cells]
            assert (found[off] == 0xFFFFFFFF).all()
            mine = expected[cta * part : (cta + 1) * part]
            np.testing.assert_array_equal(found.view(np.float32)[~off], mine[~off])
            assert sorted(dict(work.writes)[cta].tolist()) == sorted(cells[~off].tolist())


class TestWhatIsTouched:
    def test_words_of_shared_memory(self) -> None:
        pair = Pair(2)
        a, _ = pair.operand("f16", "f16", 256, A_AT, 128, False)
        b, _ = pair.operand("f16", "f16", 64, B_AT, 128, False)
        mma = Mma.of(ss("f16", 2), idesc("f16", 256, 64, "f16"))
        parts = mma.operands(a, b)
        assert [(one.cta, one.matrix, one.first, len(one.addresses)) for one in parts] == [
            (0, "a", 0, 128), (0, "b", 0, 32), (1, "a", 128, 128), (1, "b", 32, 32)
        ]  # fmt: skip
        for one in parts:
            assert one.words.tolist() == sorted({int(at) // 4 for at in one.addresses.flat})

    @pytest.mark.parametrize(("format", "words"), [("e2m1", 2), ("e3m2", 3), ("e4m3", 4)])
    def test_padding_is_not_read(self, format: str, words: int) -> None:
        pair = Pair(1)
        a, _ = pair.operand("f8f6f4", format, 128, A_AT, 0, False)
        mma = Mma.of(ss("f8f6f4", 1), idesc("f8f6f4", 128, 16, format))
        read = mma.operands(a, a)[0].words
        assert len(read) == 128 * 2 * words
        assert set((read % 4).tolist()) == set(range(words))

    def test_cells(self) -> None:
        pair = Pair(1)
        tensor_a(pair, "f16", "f16", 128, 400)
        b, _ = pair.operand("f16", "f16", 32, B_AT, 128, False)
        mma = Mma.of(ts("f16", 1), idesc("f16", 128, 32, "f16"))
        for accumulate in (False, True):
            work = Multiplication.place(mma, pair.tensors, D_AT, 400, b, accumulate=accumulate)
            columns = sorted({int(cell) % 512 for _, cells in work.reads for cell in cells.flat})
            assert columns == [*(range(D_AT, D_AT + 32) if accumulate else ()), *range(400, 408)]


SCALED = [
    ("mxf8f6f4", "", 1, "ue8m0", (2, 1)),
    ("mxf8f6f4", ".scale_vec::1X", 1, "ue8m0", (3, 0)),
    ("mxf8f6f4", ".block32", 1, "ue8m0", (0, 3)),
    ("mxf4", "", 2, "ue8m0", (2, 0)),
    ("mxf4", ".block32", 2, "ue8m0", (0, 2)),
    ("mxf4nvf4", ".scale_vec::2X", 2, "ue8m0", (0, 0)),
    ("mxf4nvf4", ".scale_vec::4X", 4, "ue8m0", (0, 0)),
    ("mxf4nvf4", ".block16", 4, "ue4m3", (0, 0)),
]


def factors(
    pair: Pair,
    format: Format,
    rows: int,
    vector: int,
    first: int,
    column: int,
    ctas: Sequence[int],
    *,
    folded: bool = False,
) -> Floats:
    """Random factors [rows, vector] in tensor memory, by tmem_sf_frg's atom in bytes: ((32, rows / 32), 4), vector."""
    lowest, highest = (120, 135) if format.name == "ue8m0" else (0x28, 0x48)
    codes = pair.draw.integers(lowest, highest, (rows, vector))
    padded = -(-rows // 32)
    # Virtual addresses: lane stride 1, byte stride 128, so a column's stride is 512.
    virtual = matrix((((32, padded), 4), vector), (((1, 512), 32), 128))
    if folded:  # ScaleFactorDuplicated2by2
        half = rows // 2 // 32
        virtual = matrix((((32, half), 2, 2), vector), (((1, 512), 64, 32), 128))
        padded = rows // 32
    for cta in ctas:
        raw = pair.tensors[cta].data.view(np.uint8)
        for copy in range(2 if folded else 4):
            part = virtual[copy * 32 * padded : (copy + 1) * 32 * padded][:rows]
            lane, byte = part % 128, part // 128
            raw[lane * 2048 + column * 4 + first + byte] = codes
    return format.decode(codes)


@pytest.mark.parametrize(("kind", "size", "vector", "scale", "ids"), SCALED)
@pytest.mark.parametrize(("group", "m", "n"), [(1, 128, 64), (1, 128, 40), (2, 256, 256), (2, 128, 128), (2, 128, 256)])
def test_block_scaling(
    kind: str, size: str, vector: int, scale: str, ids: tuple[int, int], group: int, m: int, n: int
) -> None:
    pair = Pair(group)
    format = "e4m3" if kind == "mxf8f6f4" else "e2m1"
    a, left = pair.operand(kind, format, m, A_AT, 32 if n == 40 else 128, False)
    b, right = pair.operand(kind, format, n, B_AT, 32 if n == 40 else 128, False)
    one = FORMATS[scale]
    of_a = [factors(pair, one, m // group, vector, ids[0], 400, [cta]) for cta in range(group)]
    of_b = factors(pair, one, n, vector, ids[1], 420, range(group), folded=group == 2 and m == 128)
    block = K[kind] // vector
    left = left * np.repeat(np.concatenate(of_a), block, axis=1)
    right = right * np.repeat(of_b, block, axis=1)
    mma = Mma.of(ss(kind, group, size), idesc(kind, m, n, format, scale=scale, ids=ids))
    pair.run(mma, a, b, accumulate=False, scales=(ids[0] << 30 | 400, ids[1] << 30 | 420))
    np.testing.assert_array_equal(pair.result(m, n).view(np.float32), (left @ right.T).astype(np.float32))


def test_scale_factors_have_to_be_the_same_in_each_quarter() -> None:
    pair = Pair(1)
    a, _ = pair.operand("mxf4", "e2m1", 128, A_AT, 32, False)
    b, _ = pair.operand("mxf4", "e2m1", 32, B_AT, 32, False)
    for column, rows in ((400, 128), (420, 32)):
        factors(pair, FORMATS["ue8m0"], rows, 2, 0, column, [0])
    pair.tensors[0].data[69 * 512 + 401] ^= 1
    mma = Mma.of(ss("mxf4", 1), idesc("mxf4", 128, 32, "e2m1"))
    with pytest.raises(TensorMemoryError, match="row 37 differ"):
        pair.run(mma, a, b, accumulate=False, scales=(400, 420))


class TestRefusals:
    @pytest.mark.parametrize(
        ("kind", "bits", "message"),
        [
            ("f16", idesc("f16", 128, 64, "f16") | 1 << 6, "reserved bits 6 to 6"),
            ("f16", idesc("f16", 128, 64, "f16") | 1 << 23, "reserved bits 23"),
            ("f16", idesc("f16", 128, 64, "f16") | 1 << 29, "reserved bits 29"),
            ("f16", idesc("f16", 128, 64, "f16") | 1 << 30, "maximum shift"),
            ("f16", idesc("f16", 128, 64, "f16") | 1, "sparsity selector"),
            ("f16", idesc("f16", 128, 64, "f16") | 1 << 3, "saturation"),
            ("f16", idesc("f16", 128, 64, "f16") | 2 << 7, "format 2 of A"),
            ("f16", idesc("f16", 128, 64, "f16") | 2 << 4, "format 3 of D"),
            ("tf32", idesc("f16", 128, 64, "f16"), "format 0 of A"),
            ("i8", idesc("i8", 128, 64, "s8", d="s32") | 1 << 13, "not negated"),
            ("f8f6f4", idesc("f8f6f4", 128, 64, "e2m1", mn="a"), "A of e2m1 can only be K-major"),
            ("mxf4", idesc("mxf4", 128, 64, "e2m1", mn="b"), "B of e2m1 can only be K-major"),
            ("mxf8f6f4", idesc("mxf8f6f4", 128, 64, "e4m3", scale="ue4m3"), "ue4m3 are for"),
            ("mxf8f6f4", idesc("mxf8f6f4", 128, 64, "e4m3") | 1 << 24, "reserved bits 24"),
        ],
    )
    def test_descriptors(self, kind: str, bits: int, message: str) -> None:
        with pytest.raises(DescriptorError, match=message):
            InstructionDescriptor.of(kind, bits)

    @pytest.mark.parametrize(
        ("kind", "group", "m", "n"),
        [
            ("f16", 1, 256, 64),
            ("f16", 1, 32, 64),
            ("f16", 2, 64, 64),
            ("f16", 2, 128, 24),
            ("f16", 1, 128, 0),
            ("f16", 1, 128, 264),
            ("i8", 1, 128, 40),
            ("i8", 2, 256, 48),
        ],
    )
    def test_shapes(self, kind: str, group: int, m: int, n: int) -> None:
        format, d = ("s8", "s32") if kind == "i8" else ("f16", "f32")
        with pytest.raises(DescriptorError, match="multiplies to"):
            Mma.of(ss(kind, group), idesc(kind, m, n, format, d=d))

    def test_unsupported(self) -> None:
        bits = idesc("f16", 128, 64, "f16")
        with pytest.raises(Unsupported, match="sparse"):
            InstructionDescriptor.of("f16", bits | 4)
        with pytest.raises(Unsupported, match="K = 96"):
            InstructionDescriptor.of("mxf4", idesc("mxf4", 128, 64, "e2m1") | 1 << 31)
        with pytest.raises(Unsupported, match="block scaling of 128 x 64"):
            Mma.of(ss("mxf4", 2), idesc("mxf4", 128, 64, "e2m1"))
        with pytest.raises(Unsupported, match="32-byte atoms"):
            Mma.of(ss("f16", 1), bits).operands(1 << 46 | 1 << 61, 1 << 46 | 1 << 61)

    def test_ids_and_vectors(self) -> None:
        with pytest.raises(DescriptorError, match="scale factor id 1 of B"):
            Mma.of(ss("mxf4", 1), idesc("mxf4", 128, 64, "e2m1", ids=(0, 1)))
        with pytest.raises(DescriptorError, match="scale_vec::4X"):
            Mma.of(ss("mxf4", 1, ".scale_vec::4X"), idesc("mxf4", 128, 64, "e2m1"))
        with pytest.raises(DescriptorError, match="block_scale alone"):
            Mma.of(ss("mxf4nvf4", 1), idesc("mxf4nvf4", 128, 64, "e2m1"))

    def test_places(self) -> None:
        pair = Pair(1)
        mma = Mma.of(ts("f16", 1), idesc("f16", 64, 64, "f16"))
        with pytest.raises(TensorMemoryError, match="lanes have to be the same"):
            Multiplication.place(mma, pair.tensors, 16 << 16, 400, 1 << 46, accumulate=False)
        with pytest.raises(TensorMemoryError, match="column 527 leaves"):
            Multiplication.place(mma, pair.tensors, 464, 400, 1 << 46, accumulate=False)


class TestCopies:
    # Rows, 32-bit columns, and where a row goes: (logical row of the source) : (lane), by CuTe's copy traits.
    SHAPES = (
        ("128x256b", 128, 8, ((128, 1), (1, 0))),
        ("128x128b", 128, 4, ((128, 1), (1, 0))),
        ("4x256b", 4, 8, ((4, 1), (32, 0))),
        ("32x128b.warpx4", 32, 4, ((32, 4), (1, 32))),
        ("64x128b.warpx2::02_13", 64, 4, ((64, 2), (1, 64))),
        ("64x128b.warpx2::01_23", 64, 4, (((32, 2), 2), ((1, 64), 32))),
    )

    @pytest.mark.parametrize(("shape", "rows", "columns", "lanes"), SHAPES)
    @pytest.mark.parametrize("group", [1, 2])
    @pytest.mark.parametrize("row_bytes", [0, 32])
    def test_shapes(self, shape: str, rows: int, columns: int, lanes: tuple, group: int, row_bytes: int) -> None:  # type: ignore[type-arg]
        if row_bytes and columns == 4:
            pytest.skip("16 bytes are a core matrix's row")
        pair = Pair(group)
        offsets, leading, stride = place(max(rows, 8), columns, 32, row_bytes, False)
        values = [pair.draw.integers(0, 1 << 32, (rows, columns), dtype=np.uint32) for _ in range(group)]
        for memory, one in zip(pair.shared, values, strict=True):
            put(memory, A_AT, offsets[:rows], one, 32, row_bytes)
        instr = instruction(f"tcgen05.cp.cta_group::{group}.{shape} [%r1], %rd1;")
        lane = 31 if rows == 4 else 0
        work = TensorCopy.place(instr, pair.tensors, lane << 16 | 33, descriptor(A_AT, leading, stride, row_bytes))
        work.run(pair.shared, pair.tensors)
        where = lane + matrix(*lanes).T  # [copies, rows]
        for tensor, one, source in zip(pair.tensors, values, work.shared, strict=True):
            found = tensor.data.reshape(128, 512)[where, 33 : 33 + columns]
            np.testing.assert_array_equal(found, np.broadcast_to(one, found.shape))
            assert tensor.written.sum() == found.size
            assert len(source.words) == rows * columns

    @pytest.mark.parametrize(("format", "name"), [("e2m1", "b4x16_p64"), ("e3m2", "b6x16_p32"), ("e2m3", "b6x16_p32")])
    def test_narrow_elements_are_widened_for_a(self, format: str, name: str) -> None:
        """The copy makes of A in shared memory the A that a multiplication reads from tensor memory."""
        pair = Pair(1)
        a, left = pair.operand("mxf8f6f4", format, 128, A_AT, 0, False)
        b, right = pair.operand("mxf8f6f4", "e4m3", 32, B_AT, 0, False)
        instr = instruction(f"tcgen05.cp.cta_group::1.128x256b.b8x16.{name} [%r1], %rd1;")
        work = TensorCopy.place(instr, pair.tensors, 400, a)
        work.run(pair.shared, pair.tensors)
        assert len(work.shared[0].words) == 128 * 2 * WIDTH[format] // 2
        padding = {4: 0xC3, 6: 0x81}[WIDTH[format]] * 0x01010101
        assert not (pair.tensors[0].data.reshape(128, 512)[:, 400:408] & np.uint32(padding)).any()
        pair.run(Mma.of(ts("f8f6f4", 1), idesc("f8f6f4", 128, 32, format, "e4m3")), 400, b, accumulate=False)
        np.testing.assert_array_equal(pair.result(128, 32).view(np.float32), (left @ right.T).astype(np.float32))

    def test_scale_factors_from_shared_memory(self) -> None:
        """CUTLASS's Sm1xxBlockScaledBasicChunk, ((32, 4), (block, 4)) : ((16, 4), (0, 1)), by .32x128b.warpx4."""
        pair = Pair(1)
        codes = pair.draw.integers(120, 135, (128, 4)).astype(np.uint8)
        pair.shared[0][A_AT + matrix(((32, 4), 4), ((16, 4), 1))] = codes
        instr = instruction("tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1], %rd1;")
        TensorCopy.place(instr, pair.tensors, 400, descriptor(A_AT, 16, 128, 0)).run(pair.shared, pair.tensors)
        a, left = pair.operand("mxf8f6f4", "e4m3", 128, 1 << 13, 32, False)
        b, right = pair.operand("mxf8f6f4", "e4m3", 128, B_AT, 32, False)
        for k in range(4):
            bits = idesc("mxf8f6f4", 128, 128, "e4m3", ids=(k, k))
            pair.run(Mma.of(ss("mxf8f6f4", 1), bits), a, b, accumulate=False, scales=(400, 400))
            scale = 2.0 ** (codes[:, k : k + 1].astype(np.float64) - 127)
            expected = (left * scale) @ (right * scale).T
            np.testing.assert_array_equal(pair.result(128, 128).view(np.float32), expected.astype(np.float32))

    def test_places(self) -> None:
        pair = Pair(1)
        instr = instruction("tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;")
        with pytest.raises(TensorMemoryError, match="column 512 leaves"):
            TensorCopy.place(instr, pair.tensors, 505, 1 << 46)
        half = instruction("tcgen05.cp.cta_group::1.128x256b.b8x16 [%r1], %rd1;")
        with pytest.raises(DescriptorError, match="with both formats"):
            TensorCopy.place(half, pair.tensors, 0, 1 << 46)


class TestShifts:
    def test_each_quarter_moves_by_a_lane(self) -> None:
        tensor = Pair(1).tensors[0]
        tensor.data[:] = np.arange(128 * 512)
        before = tensor.data.reshape(128, 512).copy()
        cells = shifted(tensor, 40)
        assert cells.shape == (128, 8)
        shift_down(tensor, 40)
        expected = before.copy()
        for lane in range(128):
            if lane % 32 != 31:
                expected[lane, 40:48] = before[lane + 1, 40:48]
        np.testing.assert_array_equal(tensor.data.reshape(128, 512), expected)
        with pytest.raises(TensorMemoryError, match="multiple of 32"):
            shifted(tensor, 1 << 16)
        with pytest.raises(Unsupported, match="from lane 32 on"):
            shifted(tensor, 32 << 16)

    def test_ashift_shifts_after_the_multiplication(self) -> None:
        pair = Pair(1)
        left = tensor_a(pair, "tf32", "tf32", 128, 400)
        b, right = pair.operand("tf32", "tf32", 32, B_AT, 32, False)
        bits = idesc("tf32", 128, 32, "tf32")
        for _ in range(2):
            work = pair.run(Mma.of(ts("tf32", 1, ".ashift"), bits), 400, b, accumulate=False)
            np.testing.assert_array_equal(pair.result(128, 32).view(np.float32), (left @ right.T).astype(np.float32))
            left = left[[lane if lane % 32 == 31 else lane + 1 for lane in range(128)]]
        assert [cells.size for _, cells in work.writes] == [128 * 32, 128 * 8]
        with pytest.raises(DescriptorError, match="64 rows is not shifted"):
            Mma.of(ts("tf32", 1, ".ashift"), idesc("tf32", 64, 32, "tf32"))
