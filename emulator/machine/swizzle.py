# SPDX-License-Identifier: Apache-2.0
"""Where bytes lie in shared memory: swizzles, tensor-copy boxes and matrix descriptors.

Sources: PTX ISA 9.2, sections Tensor Swizzling Modes (5.5.6), wgmma Matrix Descriptor Format (9.7.15.5.1), tcgen05
Shared Memory Descriptor (9.7.16.4.1); canonical layouts as CUTLASS's public header cute/arch/mma_sm90_desc.hpp.
"""

import enum
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from emulator.machine.findings import Kind

Addresses = NDArray[np.int64]


class Swizzle(enum.Enum):
    """A pattern that moves 16-byte chunks (32-byte ones for ATOM_32) within rows of `row_bytes` bytes."""

    NONE = 0
    B32 = 32
    B64 = 64
    B128 = 128
    B128_ATOM_32 = 129

    @property
    def row_bytes(self) -> int:
        """Bytes after which the pattern's next row begins; 16 without a swizzle: a core matrix's row."""
        return {Swizzle.NONE: 16, Swizzle.B32: 32, Swizzle.B64: 64}.get(self, 128)

    @property
    def rows(self) -> int:
        """Of the pattern of a descriptor."""
        return 4 if self is Swizzle.B128_ATOM_32 else 8

    def apply(self, addresses: Addresses) -> Addresses:
        """Bits of the row's number, above the chunk's, are XORed into the chunk's number."""
        if self is Swizzle.NONE:
            return addresses
        if self is Swizzle.B128_ATOM_32:
            return addresses ^ ((addresses >> 2) & 0x60)
        mask = (self.row_bytes - 1) & ~0xF
        return addresses ^ ((addresses >> 3) & mask)


class DescriptorError(ValueError):
    """A descriptor that means nothing; the message names the field."""

    kind = Kind.DESCRIPTOR


@dataclass(frozen=True)
class MatrixDescriptor:
    """An operand of wgmma or tcgen05.mma in shared memory.

    Attributes:
        start: byte address in the CTA's shared memory.
        leading, stride: byte offsets between core matrices; which direction each is for depends on the layout.
    """

    start: int
    leading: int
    stride: int
    swizzle: Swizzle

    @classmethod
    def of_sm90(cls, bits: int) -> "MatrixDescriptor":
        """Raises DescriptorError where a field is not one that wgmma defines."""
        cls._refuse(bits, (14, 2), (30, 2), (46, 3), (52, 10))
        modes = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)
        return cls._of(bits, modes[bits >> 62])

    @classmethod
    def of_sm100(cls, bits: int) -> "MatrixDescriptor":
        """Raises DescriptorError where a field is not one that tcgen05 defines."""
        cls._refuse(bits, (14, 2), (30, 2), (53, 8))
        if bits >> 46 & 7 != 1:
            raise DescriptorError(
                f"descriptor {bits:#018x}: bits 46 to 48 are {bits >> 46 & 7:#b}, tcgen05 wants 0b001"
            )
        if bits >> 52 & 1:
            raise DescriptorError(f"descriptor {bits:#018x}: an absolute leading address (bit 52) is not emulated")
        modes = {
            0: Swizzle.NONE,
            1: Swizzle.B128_ATOM_32,
            2: Swizzle.B128,
            4: Swizzle.B64,
            6: Swizzle.B32,
        }
        if bits >> 61 not in modes:
            raise DescriptorError(f"descriptor {bits:#018x}: swizzle mode {bits >> 61} does not exist")
        return cls._of(bits, modes[bits >> 61])

    @classmethod
    def _of(cls, bits: int, swizzle: Swizzle) -> "MatrixDescriptor":
        if bits >> 49 & 7:
            raise DescriptorError(f"descriptor {bits:#018x}: base offset {bits >> 49 & 7} is not emulated, only 0")
        start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(start, leading, stride, swizzle)

    @staticmethod
    def _refuse(bits: int, *reserved: tuple[int, int]) -> None:
        for at, count in reserved:
            if bits >> at & ((1 << count) - 1):
                raise DescriptorError(f"descriptor {bits:#018x}: reserved bits {at} to {at + count - 1} are not zero")

    def addresses(self, rows: int, columns: int, element_bits: int, *, k_major: bool) -> Addresses:
        """Byte address of each element: [rows, columns], rows along M or N, columns along K.

        Elements of 4 bits lie two in a byte; their addresses repeat.
        """
        pattern = (self.swizzle.rows, self.swizzle.row_bytes)
        offsets = element_offsets(rows, columns, element_bits, k_major, self.leading, self.stride, pattern)
        return self.swizzle.apply(self.start + offsets)


@lru_cache(maxsize=256)
def element_offsets(
    rows: int, columns: int, element_bits: int, k_major: bool, leading: int, stride: int, pattern: tuple[int, int]
) -> Addresses:
    """Byte offsets [rows, columns] from a matrix's start, before the swizzle.

    A pattern is 8 rows of so many bytes, or 4. K-major: a row of it is one row's stretch of K, the next 8 rows lie
    `stride` further. MN-major: a row of it is one column's stretch of M or N, the next stretch lies `leading` further
    and the next 8 columns `stride`; without a swizzle these two change places.
    """
    repeat, row_bytes = pattern
    row = np.arange(rows, dtype=np.int64)[:, None]
    column = np.arange(columns, dtype=np.int64)[None, :]
    plain = row_bytes == 16
    if k_major:
        byte = column * element_bits // 8
        inside = row % repeat * row_bytes + row // repeat * stride
        # A pattern's rows hold all of K; core matrices, 16 bytes of it.
        return inside + (byte % 16 + byte // 16 * leading if plain else byte)
    per_row = row_bytes * 8 // element_bits
    along, across = (stride, leading) if plain else (leading, stride)
    inside = row % per_row * element_bits // 8 + column % repeat * row_bytes
    return inside + row // per_row * along + column // repeat * across


def box_offsets(box: tuple[int, ...], element_bytes: int) -> Addresses:
    """Byte offset of each element of a tensor copy's box in shared memory, before the swizzle.

    Args:
        box: elements of each dimension, the contiguous one first.

    Returns:
        An array of the box's shape, the contiguous dimension last.
    """
    count = int(np.prod(box))
    return (np.arange(count, dtype=np.int64) * element_bytes).reshape(box[::-1])
