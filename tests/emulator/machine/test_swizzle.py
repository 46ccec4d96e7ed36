# SPDX-License-Identifier: Apache-2.0
"""Descriptors against tensor copies: what a copy writes with a swizzle, a descriptor must read back in place."""

import numpy as np
import pytest

from emulator.machine.swizzle import DescriptorError, MatrixDescriptor, Swizzle, box_offsets

SWIZZLES = [Swizzle.B32, Swizzle.B64, Swizzle.B128]


def encode_sm90(start: int, leading: int, stride: int, mode: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def encode_sm100(start: int, leading: int, stride: int, mode: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | mode << 61


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_k_major_reads_what_a_copy_wrote(swizzle: Swizzle, element_bytes: int) -> None:
    """A box of [64 rows, one swizzle row] is a K-major operand; each instruction reads 32 bytes of K of it."""
    rows, per_row = 64, swizzle.row_bytes // element_bytes
    memory = np.zeros(1 << 14, dtype=np.int64)
    values = np.arange(1, rows * per_row + 1).reshape(rows, per_row)
    memory[swizzle.apply(1024 + box_offsets((per_row, rows), element_bytes))] = values
    for first in range(0, swizzle.row_bytes, 32):
        operand = MatrixDescriptor(1024 + first, 16, 8 * swizzle.row_bytes, swizzle)
        k = 32 // element_bytes
        read = memory[operand.addresses(rows, k, 8 * element_bytes, k_major=True)]
        at = first // element_bytes
        np.testing.assert_array_equal(read, values[:, at : at + k])


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_mn_major_reads_what_copies_wrote(swizzle: Swizzle) -> None:
    """Boxes of [k, one swizzle row of M] side by side are an MN-major operand of 16-bit elements."""
    k, element_bytes = 16, 2
    per_row = swizzle.row_bytes // element_bytes
    rows = 2 * per_row
    box_bytes = k * swizzle.row_bytes
    memory = np.zeros(1 << 14, dtype=np.int64)
    values = np.arange(1, rows * k + 1).reshape(rows, k)
    for index in range(2):
        place = swizzle.apply(2048 + index * box_bytes + box_offsets((per_row, k), element_bytes))
        memory[place] = values[index * per_row : (index + 1) * per_row].T
    operand = MatrixDescriptor(2048, leading=box_bytes, stride=8 * swizzle.row_bytes, swizzle=swizzle)
    np.testing.assert_array_equal(memory[operand.addresses(rows, k, 16, k_major=False)], values)


def test_without_a_swizzle_core_matrices_are_8_rows_of_16_bytes() -> None:
    operand = MatrixDescriptor(0, leading=128, stride=256, swizzle=Swizzle.NONE)
    addresses = operand.addresses(16, 16, 16, k_major=True)
    assert addresses[0, :9].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 128]
    assert addresses[[1, 7, 8], 0].tolist() == [16, 112, 256]
    addresses = operand.addresses(16, 16, 16, k_major=False)
    assert addresses[:9, 0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 256]
    assert addresses[0, [1, 7, 8]].tolist() == [16, 112, 128]


@pytest.mark.parametrize(
    ("swizzle", "chunks"),
    [
        (Swizzle.B128, {0: 0, 128: 128 + 16, 7 * 128: 7 * 128 + 7 * 16, 8 * 128: 8 * 128}),
        (Swizzle.B64, {0: 0, 64: 64, 128: 128 + 16, 384: 384 + 48, 512: 512}),
        (Swizzle.B32, {0: 0, 96: 96, 128: 128 + 16, 256: 256}),
        (Swizzle.B128_ATOM_32, {0: 0, 128: 128 + 32, 256: 256 + 64, 384 + 32: 384 + 64, 512: 512, 1024: 1024}),
    ],
)
def test_patterns(swizzle: Swizzle, chunks: dict[int, int]) -> None:
    assert {at: int(swizzle.apply(np.array([at]))[0]) for at in chunks} == chunks


def test_32_byte_atoms_as_the_isa_has_them() -> None:
    """5.5.7: four rows of the numbers of the chunks of 16 bytes, and again."""
    lines = [[0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 0, 1, 6, 7, 4, 5], [4, 5, 6, 7, 0, 1, 2, 3], [6, 7, 4, 5, 2, 3, 0, 1]]
    moved = Swizzle.B128_ATOM_32.apply(16 * np.arange(64)) // 16
    there = np.empty(64, np.int64)
    there[moved] = np.arange(64) % 8
    assert there.reshape(8, 8).tolist() == lines * 2
    assert (moved // 8 == np.arange(64) // 8).all()


@pytest.mark.parametrize("rows", [32, 128, 256])
def test_mn_major_tf32_reads_what_copies_wrote(rows: int) -> None:
    """Boxes of [k, 32 rows of M] side by side, read 8 columns of K at a time: the pattern repeats every 4 of them."""
    k = 16
    box_bytes = 128 * k
    memory = np.zeros(1 << 15, dtype=np.int64)
    values = np.arange(1, rows * k + 1).reshape(rows, k)
    for row, column in np.ndindex(rows, k):
        # Swizzle<2, 5, 2> on bytes, by hand: the atom's number and the column's, modulo 4.
        box, atom, rest = row // 32, row % 32 // 8, row % 8
        memory[1024 + box * box_bytes + column * 128 + (atom ^ column % 4) * 32 + rest * 4] = values[row, column]
    for first in range(0, k, 8):
        operand = MatrixDescriptor(1024 + 128 * first, box_bytes, 512, Swizzle.B128_ATOM_32)
        read = memory[operand.addresses(rows, 8, 32, k_major=False)]
        np.testing.assert_array_equal(read, values[:, first : first + 8])


@pytest.mark.parametrize("swizzle", list(Swizzle))
def test_patterns_are_one_to_one(swizzle: Swizzle) -> None:
    addresses = np.arange(0, 4096, 16)
    moved = swizzle.apply(addresses)
    assert len(set(moved.tolist())) == len(addresses)
    np.testing.assert_array_equal(swizzle.apply(moved), addresses)


def test_fields() -> None:
    for mode, swizzle in enumerate((Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)):
        assert MatrixDescriptor.of_sm90(encode_sm90(4096, 32, 1024, mode)) == MatrixDescriptor(4096, 32, 1024, swizzle)
    for mode, swizzle in {
        0: Swizzle.NONE,
        1: Swizzle.B128_ATOM_32,
        2: Swizzle.B128,
        4: Swizzle.B64,
        6: Swizzle.B32,
    }.items():
        assert MatrixDescriptor.of_sm100(encode_sm100(64, 16, 512, mode)) == MatrixDescriptor(64, 16, 512, swizzle)


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (encode_sm100(0, 0, 0, 3), "swizzle mode 3 does not exist"),
        (encode_sm90(0, 0, 0, 1), "tcgen05 wants 0b001"),
        (encode_sm100(0, 0, 0, 2) | 1 << 49, "base offset 1"),
        (encode_sm100(0, 0, 0, 2) | 1 << 52, "absolute leading address"),
        (encode_sm100(0, 0, 0, 2) | 1 << 14, "reserved bits 14 to 15"),
    ],
)
def test_nonsense_is_refused(bits: int, message: str) -> None:
    with pytest.raises(DescriptorError, match=message):
        MatrixDescriptor.of_sm100(bits)
