# SPDX-License-Identifier: Apache-2.0
"""wgmma as whole products: operands by the canonical layouts of the ISA and of CUTLASS, accumulators by lane."""

import functools
from typing import Any

import numpy as np
import pytest
from matrix_oracle import (
    BITS,
    accumulators,
    codes,
    instruction,
    layout,
    narrow_sum,
    pack,
    rounded,
    spellings,
    swizzled,
    values,
    vector,
)
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.fragments import Registers
from emulator.machine.swizzle import MatrixDescriptor
from emulator.machine.wgmma import Wgmma

# Swizzle bits and the descriptor's mode by bytes of a swizzle's row.
MODES = {16: (0, 0), 32: (1, 3), 64: (2, 2), 128: (3, 1)}


def line(
    n: int,
    k: int,
    types: tuple[str, str, str],
    *,
    in_registers: bool = False,
    satfinite: bool = False,
    negative: tuple[int, int] = (1, 1),
    transposed: tuple[int, int] = (0, 0),
    d_registers: int | None = None,
) -> str:
    d_type, a_type, b_type = types
    count = d_registers if d_registers is not None else n * BITS[d_type] // 64
    a = vector(300, 4) if in_registers else "%rd1"
    constants = list(negative) if d_type != "s32" else []
    if a_type in ("f16", "bf16"):
        constants += transposed[1:] if in_registers else transposed
    tail = "".join(f", {one}" for one in constants)
    sat = ".satfinite" if satfinite else ""
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}{sat}.{d_type}.{a_type}.{b_type}"
    return f"{opcode} {vector(0, count)}, {a}, %rd2, %p1{tail};"


def accumulator_registers(matrix: NDArray[np.int64], element: str) -> Registers:
    """[4, registers, 32]: d[4j + 2h + e] of warp w is row 16w + lane / 4 + 8h, column 8j + 2 (lane % 4) + e."""
    _, n = matrix.shape
    warps = []
    for warp in range(4):
        elements = {}
        for lane in range(32):
            for i in range(n // 2):
                j, h, e = i // 4, i // 2 % 2, i % 2
                code = int(matrix[16 * warp + lane // 4 + 8 * h, 8 * j + 2 * (lane % 4) + e])
                elements[(i // 2, lane, e) if element == "f16" else (i, lane, 0)] = code
        warps.append(pack(elements, n // (4 if element == "f16" else 2), BITS[element]))
    return np.stack(warps)


def a_registers(matrix: NDArray[np.int64], bits: int) -> Registers:
    """[4, 4, 32] by CUTLASS's ALayout_64x8, 64x16 and 64x32: (thread, value) to a column-major index of 64 rows."""
    shapes: dict[int, tuple[Any, Any, Any]] = {
        32: ((64, 1, 16), (2, 2), (8, 256)),
        16: ((128, 1, 16), (2, 2, 2), (64, 8, 512)),
        8: ((256, 1, 16), (4, 2, 2), (64, 8, 1024)),
    }
    threads, value_shape, value_stride = shapes[bits]
    per_register = 32 // bits
    warps = []
    for warp in range(4):
        elements = {}
        for lane in range(32):
            for i in range(4 * per_register):
                index = layout(32 * warp + lane, (4, 8, 4), threads) + layout(i, value_shape, value_stride)
                elements[i // per_register, lane, i % per_register] = int(matrix[index % 64, index // 64])
        warps.append(pack(elements, 4, bits))
    return np.stack(warps)


class Operand:
    """A matrix of codes [rows, k] in shared memory, by a canonical layout.

    Attributes:
        bits: what the descriptor holds.
    """

    def __init__(self, matrix: NDArray[np.int64], element_bits: int, row_bytes: int, *, k_major: bool, start: int):
        size = element_bits // 8
        rows, columns = matrix.shape
        t, w = 16 // size, row_bytes // 16
        swizzle, mode = MODES[row_bytes]
        shape: Any
        stride: Any
        # Offsets that leave gaps, each of them another; in elements.
        if k_major:
            outer, second = rows // 8, columns // t
            if w == 1:
                leading, stride_bytes = 128, 128 * second + 256
                shape = ((8, outer), (t, second))
                stride = ((t, stride_bytes // size), (1, leading // size))
            else:
                leading, stride_bytes = 16, 8 * row_bytes + 1024
                shape = ((8, outer), (t, second))
                stride = ((w * t, stride_bytes // size), (1, t))
        else:
            outer, second = -(-rows // (w * t)), columns // 8
            leading, stride_bytes = 8 * row_bytes * second + 1024, 8 * row_bytes
            if w == 1:
                leading, stride_bytes = 128 * outer + 512, 128
            along, across = (stride_bytes, leading) if w == 1 else (leading, stride_bytes)
            shape = ((t, w, outer), (8, second))
            stride = ((1, t, along // size), (w * t, across // size))
        self.memory = np.full(1 << 17, 0xFF, dtype=np.uint8)
        wide = matrix.astype(f"<u{size}")
        row_size = 8 * outer if k_major else t * w * outer
        for row in range(rows):
            for column in range(columns):
                offset = layout(row + row_size * column, shape, stride) * size
                address = swizzled(start + offset, swizzle)
                self.memory[address : address + size] = np.frombuffer(wide[row, column].tobytes(), dtype=np.uint8)
        self.bits = start >> 4 | leading >> 4 << 16 | stride_bytes >> 4 << 32 | mode << 62

    def read(self, addresses: NDArray[np.int64], size: int) -> NDArray[Any]:
        assert not (addresses % size).any()
        return self.memory.view(f"<u{size}")[addresses // size]


def product(
    form: Wgmma, a: NDArray[np.float64], b: NDArray[np.float64], d: Registers, *, scale_d: bool = True
) -> Registers:
    """By warps and at once: both have to agree."""
    whole = form.multiply(a, b, d, scale_d)
    warps = [form.multiply(a[16 * warp : 16 * warp + 16], b, d[warp], scale_d) for warp in range(4)]
    np.testing.assert_array_equal(whole, np.stack(warps))
    return whole


@functools.cache
def matrix(element: str, rows: int, k: int, seed: int) -> NDArray[np.int64]:
    return codes(element, (rows, k), seed)


def check(
    n: int,
    k: int,
    types: tuple[str, str, str],
    row_bytes: int = 128,
    *,
    in_registers: bool = False,
    satfinite: bool = False,
    negative: tuple[int, int] = (1, 1),
    transposed: tuple[int, int] = (0, 0),
) -> None:
    """One instruction on operands in shared memory, or A in registers."""
    d_type, a_type, b_type = types
    text = line(n, k, types, in_registers=in_registers, satfinite=satfinite, negative=negative, transposed=transposed)
    form = Wgmma.of(instruction(text))
    a, b = matrix(a_type, 64, k, 1), matrix(b_type, n, k, 2)
    c = accumulators(d_type, (64, n), 3)
    factors = negative[0] * values(a, a_type), negative[1] * values(b, b_type)
    alone = factors[0] @ factors[1].T
    total = alone + values(c, d_type)
    if a_type in ("e4m3", "e5m2"):
        alone, total = (narrow_sum(*factors, one, d_type) for one in (None, values(c, d_type)))
    if in_registers:
        left = np.concatenate([form.a_from_registers(one) for one in a_registers(a, BITS[a_type])])
    else:
        where = Operand(a, BITS[a_type], row_bytes, k_major=not transposed[0], start=0x2000)
        left = form.a_values(where.read(form.a_addresses(MatrixDescriptor.of_sm90(where.bits)), form.a_bytes))
    np.testing.assert_array_equal(left, negative[0] * values(a, a_type))
    where = Operand(b, BITS[b_type], row_bytes, k_major=not transposed[1], start=0x3000)
    right = form.b_values(where.read(form.b_addresses(MatrixDescriptor.of_sm90(where.bits)), form.b_bytes))
    before = accumulator_registers(c, d_type)
    assert form.d_registers == before.shape[1]
    after = accumulator_registers(rounded(total, d_type, saturate=satfinite), d_type)
    np.testing.assert_array_equal(product(form, left, right, before), after)
    fresh = accumulator_registers(rounded(alone, d_type), d_type)
    np.testing.assert_array_equal(product(form, left, right, np.full_like(before, 0xFFFFFFFF), scale_d=False), fresh)


def combinations() -> set[tuple[int, tuple[str, str, str], bool]]:
    """K, the types and where A lies, of every row of the table."""
    found = set()
    for variant in ("ss", "rs"):
        for _, mods in spellings(f"wgmma.mma_async#{variant}"):
            k = int(mods["shape"].partition("k")[2])
            found.add((k, (mods["dtype"], mods["atype"], mods["btype"]), variant == "rs"))
    return found


@pytest.mark.parametrize(("k", "types", "in_registers"), sorted(combinations()))
def test_every_type(k: int, types: tuple[str, str, str], in_registers: bool) -> None:
    check(32, k, types, in_registers=in_registers)


def test_the_table_is_what_these_tests_think() -> None:
    assert len(combinations()) == 2 * (2 + 1 + 1 + 8 + 4)


@pytest.mark.parametrize("n", [8, 16, 24, 72, 128, 192, 248, 256])
@pytest.mark.parametrize("types", [("f32", "bf16", "bf16"), ("f16", "f16", "f16")])
def test_widths(n: int, types: tuple[str, str, str]) -> None:
    check(n, 16, types)


@pytest.mark.parametrize("row_bytes", MODES)
@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("element", ["f16", "bf16"])
def test_layouts_of_16_bits(row_bytes: int, transposed: tuple[int, int], element: str) -> None:
    types = ("f32", element, element)
    check(64, 16, types, row_bytes, transposed=transposed)
    # A width that fills no whole number of the swizzle's rows.
    check(40, 16, types, row_bytes, transposed=transposed)


@pytest.mark.parametrize("row_bytes", MODES)
@pytest.mark.parametrize(("k", "types"), [(8, ("f32", "tf32", "tf32")), (32, ("s32", "u8", "s8"))])
def test_layouts_of_other_sizes(row_bytes: int, k: int, types: tuple[str, str, str]) -> None:
    check(48, k, types, row_bytes)


def test_b_by_columns_with_a_in_registers() -> None:
    types = ("f32", "bf16", "bf16")
    check(64, 16, types, in_registers=True, transposed=(0, 1))


@pytest.mark.parametrize("row_bytes", [32, 64, 128])
def test_later_stretches_of_k_begin_inside_the_swizzle(row_bytes: int) -> None:
    """A kernel adds bytes to the start address; what counts for the swizzle is the final address."""
    whole = matrix("bf16", 64, row_bytes // 2, 5)
    stored = Operand(whole, 16, row_bytes, k_major=True, start=0x1000)
    form = Wgmma.of(instruction(line(64, 16, ("f32", "bf16", "bf16"))))
    for first in range(0, row_bytes, 32):
        descriptor = MatrixDescriptor.of_sm90(stored.bits + (first >> 4))
        expected = whole[:, first // 2 : first // 2 + 16]
        np.testing.assert_array_equal(stored.read(form.b_addresses(descriptor), 2), expected)
        np.testing.assert_array_equal(stored.read(form.a_addresses(descriptor), 2), expected)


@pytest.mark.parametrize("negative", [(1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("in_registers", [False, True])
def test_negation(negative: tuple[int, int], in_registers: bool) -> None:
    types = ("f32", "f16", "f16")
    check(16, 16, types, negative=negative, in_registers=in_registers)


@pytest.mark.parametrize("satfinite", [False, True])
def test_overflow_of_integers(satfinite: bool) -> None:
    """Accumulators at both ends of s32, and random ones between."""
    form = Wgmma.of(instruction(line(16, 32, ("s32", "s8", "u8"), satfinite=satfinite)))
    a, b = matrix("s8", 64, 32, 6), matrix("u8", 16, 32, 7)
    c = accumulators("s32", (64, 16), 8)
    c[::4], c[1::4] = 0x7FFFFFFF, 0x80000000
    exact = values(a, "s8") @ values(b, "u8").T + values(c, "s32")
    assert (exact > 2**31 - 1).any()
    assert (exact < -(2**31)).any()
    after = product(form, values(a, "s8"), values(b, "u8"), accumulator_registers(c, "s32"))
    expected = accumulator_registers(rounded(exact, "s32", saturate=satfinite), "s32")
    np.testing.assert_array_equal(after, expected)


def test_satfinite_in_shared_memory() -> None:
    check(16, 32, ("s32", "u8", "u8"), satfinite=True)


def test_one_rounding() -> None:
    """2**24 + 1 + 1: rounding after each sum would lose both ones."""
    form = Wgmma.of(instruction(line(8, 16, ("f32", "f16", "f16"))))
    a, b = np.zeros((64, 16)), np.zeros((8, 16))
    a[:, :2], b[:, :2] = 1, 1
    d = np.full((4, 4, 32), np.float32(2**24).view(np.uint32))
    assert set(form.multiply(a, b, d, True).view(np.float32).ravel().tolist()) == {2**24 + 2}


def of_ones(a_type: str, before: float, small: float) -> float:
    """An accumulator behind 32 products of a small number and 1."""
    form = Wgmma.of(instruction(line(8, 32, ("f32", a_type, a_type))))
    a, b = np.full((64, 32), small), np.ones((8, 32))
    d = np.full((4, 4, 32), np.float32(before).view(np.uint32))
    (found,) = set(form.multiply(a, b, d, True).view(np.float32).ravel().tolist())
    return float(found)


def test_what_an_accumulator_of_8_bit_floats_loses() -> None:
    """Terms below 2^-13 of it, each for itself, and bits behind the 13th."""
    assert of_ones("e4m3", 2.0**13, 0.5) == 2**13
    assert of_ones("e4m3", -(2.0**13), 0.5) == -(2**13)
    assert of_ones("e4m3", 2.0**13, 1.5) == 2**13 + 32
    assert of_ones("e5m2", 2.0**14, 1.75) == 2**14
    assert of_ones("e4m3", 2.0**14 - 1, 1.0) == 2**14 + 30
    assert of_ones("e4m3", np.inf, 1.0) == np.inf
    assert of_ones("e5m2", 1.0, np.inf) == np.inf
    assert of_ones("e4m3", 2.0**-140, 0.0) == 2.0**-140
    assert of_ones("e4m3", 2.0**-140, 2.0**-9) == 2.0**-4


@pytest.mark.parametrize(("d_type", "nan"), [("f32", 0x7FFFFFFF), ("f16", 0x7FFF7FFF)])
def test_poison_becomes_a_canonical_nan(d_type: str, nan: int) -> None:
    form = Wgmma.of(instruction(line(8, 16, (d_type, "f16", "f16"))))
    poison = form.a_values(np.full((64, 16), 0xFFFF, dtype=np.uint16))
    d = np.zeros((4, form.d_registers, 32), dtype=np.uint32)
    assert (form.multiply(poison, np.ones((8, 16)), d, True) == nan).all()


# Examples of the ISA, 9.7.15.5.1.2.1.3: (rows, k, bytes of an element, swizzle bits, mode, K-major, layout's shape and
# strides in elements, leading and stride offset in elements). The second has the K of one instruction: with the ISA's
# 16 its rows would overlap.
EXAMPLES = {
    "K-major, no swizzle, tf32": (16, 16, 4, 0, 0, True, ((8, 2), (4, 4)), ((4, 32), (1, 64)), 64, 32),
    "K-major, 32 bytes, tf32": (16, 8, 4, 1, 3, True, ((8, 2), (4, 2)), ((8, 64), (1, 4)), 4, 64),
    "MN-major, no swizzle, bf16": (16, 16, 2, 0, 0, False, ((8, 1, 2), (8, 2)), ((1, 8, 64), (8, 128)), 128, 64),
    "MN-major, 32 bytes, bf16": (32, 16, 2, 1, 3, False, ((8, 2, 2), (8, 2)), ((1, 8, 128), (16, 256)), 128, 256),
    "MN-major, 64 bytes, bf16": (64, 16, 2, 2, 2, False, ((8, 4, 2), (8, 2)), ((1, 8, 256), (32, 512)), 256, 512),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_the_isa(name: str) -> None:
    rows, k, size, swizzle, mode, k_major, shape, stride, leading, stride_offset = EXAMPLES[name]
    bits = leading * size >> 4 << 16 | stride_offset * size >> 4 << 32 | mode << 62
    form = Wgmma(rows, k, "tf32" if size == 4 else "bf16", "tf32" if size == 4 else "bf16", "f32", False)
    if not k_major:
        form = Wgmma(rows, k, form.a_type, form.b_type, "f32", False, b_transposed=True)
    expected = [
        [swizzled(layout(row + rows * column, shape, stride) * size, swizzle) for column in range(k)]
        for row in range(rows)
    ]
    assert form.b_addresses(MatrixDescriptor.of_sm90(bits)).tolist() == expected


def test_forms_are_made_once() -> None:
    text = line(64, 16, ("f32", "bf16", "bf16"))
    assert Wgmma.of(instruction(text)) is Wgmma.of(instruction(text))
    assert Wgmma.of(instruction(text)) is not Wgmma.of(instruction(text.replace("1, 1, 0, 0;", "1, 1, 0, 1;")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (line(64, 16, ("f32", "bf16", "bf16"), negative=(2, 1)), "scales 2 and 1"),
        (line(64, 16, ("f32", "bf16", "bf16"), transposed=(0, 3)), "transpositions 0 and 3"),
        (line(64, 16, ("f32", "bf16", "bf16"), d_registers=16), "16 registers for d: it has 32"),
        (line(40, 32, ("s32", "s8", "s8")), "multiple of 16"),
        (line(64, 16, ("f32", "bf16", "bf16"), in_registers=True).replace("%r303}", "%r303, %r304}"), "5 registers"),
    ],
)
def test_nonsense_is_refused(text: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        Wgmma.of(instruction(text))
