# SPDX-License-Identifier: Apache-2.0
"""A warp's matrices against the ISA's formulas and CUTLASS's layouts, element by element."""

from collections.abc import Callable

import numpy as np
import pytest
from matrix_oracle import (
    BITS,
    accumulators,
    codes,
    contained,
    instruction,
    layout,
    pack,
    rounded,
    spellings,
    value,
    values,
    vector,
)
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.fragments import (
    Mma,
    Registers,
    decode,
    load_matrix,
    mma,
    move_matrix,
    row_bytes,
    row_lanes,
    store_matrix,
)
from emulator.ptx.grammar import Op

Place = Callable[[int, int, int], tuple[int, int]]

# ISA 9.7.14.5.6 to 9.7.14.5.11: row and column of a_i and b_i of groupID g, threadID_in_group t, by (bits, k).
A: dict[tuple[int, int], Place] = {
    (16, 8): lambda i, g, t: (g if i < 2 else g + 8, t * 2 + (i & 1)),
    (16, 16): lambda i, g, t: (
        g if 0 <= i < 2 or 4 <= i < 6 else g + 8,
        t * 2 + (i & 1) if i < 4 else t * 2 + (i & 1) + 8,
    ),
    (32, 4): lambda i, g, t: (g if i == 0 else g + 8, t),
    (32, 8): lambda i, g, t: (g if i in (0, 2) else g + 8, t if i in (0, 1) else t + 4),
    (8, 16): lambda i, g, t: (g if i < 4 else g + 8, t * 4 + (i & 3)),
    (8, 32): lambda i, g, t: (
        g if 0 <= i < 4 or 8 <= i < 12 else g + 8,
        t * 4 + (i & 3) if i < 8 else t * 4 + (i & 3) + 16,
    ),
}
B: dict[tuple[int, int], Place] = {
    (16, 8): lambda i, g, t: (t * 2 + i, g),
    (16, 16): lambda i, g, t: (t * 2 + (i & 1) if i < 2 else t * 2 + (i & 1) + 8, g),
    (32, 4): lambda i, g, t: (t, g),
    (32, 8): lambda i, g, t: (t if i == 0 else t + 4, g),
    (8, 16): lambda i, g, t: (t * 4 + i, g),
    (8, 32): lambda i, g, t: (t * 4 + (i & 3) if i < 4 else t * 4 + (i & 3) + 16, g),
}


def place_of_c(i: int, g: int, t: int) -> tuple[int, int]:
    return (g if i < 2 else g + 8, t * 2 + (i & 1))


def fragment(matrix: NDArray[np.int64], place: Place, bits: int) -> Registers:
    """A matrix of codes in a warp's registers."""
    per_register = 32 // bits
    count = matrix.size // 32 // per_register
    elements = {
        (i // per_register, lane, i % per_register): int(matrix[place(i, lane // 4, lane % 4)])
        for lane in range(32)
        for i in range(count * per_register)
    }
    return pack(elements, count, bits)


def op_of(line: str) -> Op:
    return instruction(line).op


MMA = list(spellings("mma"))


@pytest.mark.parametrize(("text", "mods"), MMA, ids=[text[17:] for text, _ in MMA])
def test_mma(text: str, mods: dict[str, str]) -> None:
    k = int(mods["shape"].removeprefix("m16n8k"))
    a_type, b_type, c_type, d_type = (mods[name] for name in ("atype", "btype", "ctype", "dtype"))
    a, b = codes(a_type, (16, k), seed=1), codes(b_type, (k, 8), seed=2)
    c = accumulators(c_type, (16, 8), seed=3)
    d = rounded(
        values(a, a_type) @ values(b, b_type) + values(c, c_type), d_type, saturate=mods.get("satfinite") is not None
    )
    operands = [
        fragment(contained(a, a_type), A[BITS[a_type], k], BITS[a_type]),
        fragment(contained(b, b_type), B[BITS[b_type], k], BITS[b_type]),
        fragment(c, place_of_c, BITS[c_type]),
    ]
    expected = fragment(d, place_of_c, BITS[d_type])
    counts = [len(one) for one in (*operands, expected)]
    op = op_of(f"{text} {vector(0, counts[3])}, {', '.join(vector(9, count) for count in counts[:3])};")
    assert list(Mma.of(op).registers) == counts
    np.testing.assert_array_equal(mma(op, *operands), expected)


@pytest.mark.parametrize("saturate", ["", ".satfinite"])
def test_mma_overflow(saturate: str) -> None:
    op = op_of(
        f"mma.sync.aligned.m16n8k32.row.col{saturate}.s32.s8.u8.s32 "
        f"{vector(0, 4)}, {vector(4, 4)}, {vector(8, 2)}, {vector(10, 4)};"
    )
    b = np.full((2, 32), 0xFFFFFFFF, dtype=np.uint32)
    a, c = np.full((4, 32), 0x80808080, dtype=np.uint32), np.full((4, 32), 0x80000000, dtype=np.uint32)
    exact = -(2**31) - 32 * 128 * 255
    assert set(mma(op, a, b, c).ravel().tolist()) == {0x80000000 if saturate else exact % 2**32}
    a, c = np.full((4, 32), 0x7F7F7F7F, dtype=np.uint32), np.full((4, 32), 0x7FFFFFFF, dtype=np.uint32)
    exact = 2**31 - 1 + 32 * 127 * 255
    assert set(mma(op, a, b, c).ravel().tolist()) == {0x7FFFFFFF if saturate else exact}


@pytest.mark.parametrize(("d_type", "nan", "infinity"), [("f32", 0x7FFFFFFF, 0x7F800000), ("f16", 0x7FFF, 0x7C00)])
def test_mma_nan_is_canonical_and_overflow_infinite(d_type: str, nan: int, infinity: int) -> None:
    """Column 0 of B: NaN; column 1: infinity; column 2: infinity against infinity; the rest: nothing."""
    a = np.full((16, 16), np.float16(1)).view(np.uint16).astype(np.int64)
    b = np.zeros((16, 8), dtype=np.float16)
    b[3, :3] = [np.nan, np.inf, np.inf]
    b[4, 2] = -np.inf
    c = np.zeros((16, 8), dtype=np.int64)
    op = op_of(
        f"mma.sync.aligned.m16n8k16.row.col.{d_type}.f16.f16.{d_type} {vector(0, 4 if d_type == 'f32' else 2)}, "
        f"{vector(4, 4)}, {vector(8, 2)}, {vector(10, 4 if d_type == 'f32' else 2)};"
    )
    d = mma(
        op,
        fragment(a, A[16, 16], 16),
        fragment(b.view(np.uint16).astype(np.int64), B[16, 16], 16),
        fragment(c, place_of_c, BITS[d_type]),
    )
    expected = np.zeros((16, 8), dtype=np.int64)
    expected[:, :3] = [nan, infinity, nan]
    np.testing.assert_array_equal(d, fragment(expected, place_of_c, BITS[d_type]))


def test_an_unknown_element_is_refused() -> None:
    with pytest.raises(Unsupported, match="type e8m0"):
        decode(np.zeros(1, dtype=np.uint8), "e8m0")


# Moves: the oracle builds matrices first and then says which elements a lane has.


def random_rows(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, 16), dtype=np.uint8)


def rows_of_8_bytes(matrices: list[NDArray[np.uint8]], rows: int) -> Registers:
    """Registers where lane 4g + t has bytes 4t to 4t + 3 of row g, then of row g + 8, and so on for each matrix."""
    elements = {}
    for index, matrix in enumerate(matrices):
        for part in range(rows // 8):
            for lane in range(32):
                for byte in range(4):
                    code = int(matrix[lane // 4 + 8 * part, 4 * (lane % 4) + byte])
                    elements[index * (rows // 8) + part, lane, byte] = code
    return pack(elements, len(matrices) * rows // 8, 8)


def transposed_halves(matrix: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(matrix.view("<u2").T).view(np.uint8)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_8_by_8_matrices(count: int, trans: str) -> None:
    load = op_of(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {vector(0, count)}, [%r9];")
    store = op_of(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r9], {vector(0, count)};")
    rows = random_rows(8 * count)
    matrices = [rows[8 * index : 8 * index + 8] for index in range(count)]
    expected = rows_of_8_bytes([transposed_halves(one) for one in matrices] if trans else matrices, 8)
    for op in (load, store):
        assert row_lanes(op).tolist() == list(range(8 * count))
        assert row_bytes(op) == 16
    np.testing.assert_array_equal(load_matrix(load, rows), expected)
    np.testing.assert_array_equal(store_matrix(store, expected), rows)


def unpacked(row: NDArray[np.uint8], bits: int) -> list[int]:
    whole = int.from_bytes(row[: 2 * bits].tobytes(), "little")
    return [whole >> (bits * index) & ((1 << bits) - 1) for index in range(16)]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("kind", "bits"), [("b8", 8), ("b8x16.b6x16_p32", 6), ("b8x16.b4x16_p64", 4)])
def test_16_by_16_matrices(count: int, kind: str, bits: int) -> None:
    op = op_of(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.{kind} {vector(0, 2 * count)}, [%r9];")
    assert row_lanes(op).tolist() == list(range(16 * count))
    assert row_bytes(op) == {8: 16, 6: 12, 4: 8}[bits]
    rows = random_rows(16 * count)
    whole = np.array([unpacked(row, bits) for row in rows], dtype=np.uint8)
    matrices = [whole[16 * index : 16 * index + 16].T for index in range(count)]
    np.testing.assert_array_equal(load_matrix(op, rows), rows_of_8_bytes(matrices, 16))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("kind", "bits"), [("b6x16_p32", 6), ("b4x16_p64", 4)])
def test_8_by_16_matrices(count: int, kind: str, bits: int) -> None:
    op = op_of(f"ldmatrix.sync.aligned.m8n16.x{count}.shared.b8x16.{kind} {vector(0, count)}, [%r9];")
    assert row_lanes(op).tolist() == list(range(8 * count))
    rows = random_rows(8 * count)
    whole = np.array([unpacked(row, bits) for row in rows], dtype=np.uint8)
    matrices = [whole[8 * index : 8 * index + 8] for index in range(count)]
    np.testing.assert_array_equal(load_matrix(op, rows), rows_of_8_bytes(matrices, 8))


@pytest.mark.parametrize("count", [1, 2])
def test_16_by_16_matrices_as_in_cutlass(count: int) -> None:
    """SM100_U8x8_LDSM_T and SM100_U8x16_LDSM_T: layouts in bits, and how the copy regroups the registers."""
    op = op_of(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {vector(0, 2 * count)}, [%r9];")
    memory = np.random.default_rng(0).integers(0, 256, 256 * count, dtype=np.uint8)
    rows = np.stack(
        [
            memory[at : at + 16]
            for lane in range(16 * count)
            for at in [layout(lane, (2, 2, 4, 2), (128, 1024, 256, 2048)) // 8]
        ]
    )
    raw = load_matrix(op, rows).view(np.uint8).reshape(2 * count, 32, 4)
    regrouped = np.empty_like(raw)
    for first in range(0, 2 * count, 2):
        (x0, y0, z0, w0), (x1, y1, z1, w1) = raw[first].T, raw[first + 1].T
        regrouped[first], regrouped[first + 1] = np.array([x0, y0, x1, y1]).T, np.array([z0, w0, z1, w1]).T
    for lane in range(32):
        for index in range(8 * count):
            start = layout(lane, (4, 8), (256, 8))
            bit = start + layout(8 * index, (8, 2, 2, 2 * count), (1, 128, 64, 1024))
            assert regrouped[index // 4, lane, index % 4] == memory[bit // 8]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_16_by_8_matrices(count: int) -> None:
    """As the ISA says and as SM100_U8x4_STSM_T to SM100_U8x16_STSM_T have it."""
    op = op_of(f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r9], {vector(0, count)};")
    assert row_lanes(op).tolist() == list(range(8 * count))
    registers = np.random.default_rng(0).integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    memory = store_matrix(op, registers).reshape(-1)
    for index in range(count):
        for lane in range(32):
            for byte in range(4):
                code = int(registers[index, lane]) >> (8 * byte) & 255
                bit = layout(lane, (4, 8), (256, 8)) + layout(8 * (4 * index + byte), (8, 2, 2, 4), (1, 128, 64, 1024))
                assert memory[bit // 8] == code
                row, column = place_of_c(byte, lane // 4, lane % 4)
                assert memory[128 * index + 16 * column + row] == code


def test_movmatrix() -> None:
    rows = random_rows(8)
    plain, turned = rows_of_8_bytes([rows], 8), rows_of_8_bytes([transposed_halves(rows)], 8)
    assert op_of("movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;").form.id == "movmatrix"
    np.testing.assert_array_equal(move_matrix(plain), turned)
    np.testing.assert_array_equal(move_matrix(plain[0]), turned[0])


def test_load_multiply_store() -> None:
    """A 16 by 16 and B 16 by 8 by rows through ldmatrix, mma and stmatrix: the way of a kernel of 16-bit elements."""
    a, b = codes("f16", (16, 16), seed=4), codes("f16", (16, 8), seed=5)
    bytes_of_a = a.astype("<u2").view(np.uint8)
    quarters = [bytes_of_a[row : row + 8, 16 * half : 16 * half + 16] for half in (0, 1) for row in (0, 8)]
    load_a = op_of(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {vector(0, 4)}, [%r9];")
    load_b = op_of(f"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {vector(0, 2)}, [%r9];")
    multiply = op_of(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
        f"{vector(0, 2)}, {vector(2, 4)}, {vector(6, 2)}, {vector(8, 2)};"
    )
    store = op_of(f"stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r9], {vector(0, 2)};")
    d = mma(
        multiply,
        load_matrix(load_a, np.concatenate(quarters)),
        load_matrix(load_b, b.astype("<u2").view(np.uint8)),
        np.zeros((2, 32), dtype=np.uint32),
    )
    stored = store_matrix(store, d).view(np.float16)
    np.testing.assert_array_equal(stored, (values(a, "f16") @ values(b, "f16")).astype(np.float16))


def test_load_multiply_of_4_bits() -> None:
    """B's rows of K with 16 columns of 4 bits; a kernel shifts what ldmatrix gives into the middle of the bytes."""
    a, b = codes("e2m1", (16, 32), seed=6), codes("e2m1", (32, 16), seed=7)
    rows = np.zeros((32, 16), dtype=np.uint8)
    rows[:, :8] = b[:, 0::2] | b[:, 1::2] << 4
    rows[:, 8:] = 0xFF
    load = op_of(f"ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8x16.b4x16_p64 {vector(0, 4)}, [%r9];")
    multiply = op_of(
        "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32 "
        f"{vector(0, 4)}, {vector(4, 4)}, {vector(8, 2)}, {vector(10, 4)};"
    )
    loaded = load_matrix(load, rows) << np.uint32(2)
    left = fragment(contained(a, "e2m1"), A[8, 32], 8)
    exact = values(a, "e2m1") @ values(b, "e2m1")
    for half in (0, 1):
        d = mma(multiply, left, loaded[half::2], np.zeros((4, 32), dtype=np.uint32))
        expected = rounded(exact[:, 8 * half : 8 * half + 8], "f32")
        np.testing.assert_array_equal(d, fragment(expected, place_of_c, 32))


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_every_number_of_a_small_format(element: str) -> None:
    bits = {"e3m2": 6, "e2m3": 6, "e2m1": 4}.get(element, 8)
    # The highest exponents of the 8-bit formats hold NaN and infinity.
    top = {"e4m3": 0x7F, "e5m2": 0x7C}.get(element, 1 << bits)
    plain = np.array([one for one in range(1 << bits) if one & 0x7F < top or bits < 8])
    found = decode(contained(plain, element).astype(np.uint8), element)
    assert found.tolist() == [value(int(one), element) for one in plain]
