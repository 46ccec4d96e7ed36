# SPDX-License-Identifier: Apache-2.0
"""How a warp's registers hold matrices: ldmatrix, stmatrix, movmatrix and mma.sync.

Sources: PTX ISA 9.2, sections Matrix Fragments for mma (9.7.14.5.6 to 9.7.14.5.11), mma (9.7.14.5.14), ldmatrix,
stmatrix and movmatrix (9.7.14.5.15 to 9.7.14.5.17). What the ISA shows in figures alone is as CUTLASS headers have it:
the bytes of .m16n16 and .m16n8 as cute/atom/copy_traits_sm100.hpp, where ldmatrix leaves 4-bit elements and where mma
expects them as cute/atom/mma_traits_sm120.hpp.

Registers of a warp are uint32 [registers, 32]. In the words of the ISA a lane is 4 * groupID + threadID_in_group.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.floats import CANONICAL_NAN
from emulator.machine.formats import FORMATS, decode_tf32
from emulator.ptx.grammar import Op

Registers = NDArray[np.uint32]
Codes = NDArray[Any]  # of unsigned integers
Floats = NDArray[np.float64]

WIDTHS = {"tf32": 32, "f16": 16, "bf16": 16} | dict.fromkeys(("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "s8", "u8"), 8)
"""Bits that an element takes in registers; the small formats lie in containers of 8."""

ROW_BYTES = 16
SOURCE_BITS = {"b6x16_p32": 6, "b4x16_p64": 4}


# Moves between shared memory and registers


def row_lanes(op: Op) -> NDArray[np.int64]:
    """The lanes whose addresses ldmatrix or stmatrix uses, in the order of the rows."""
    return np.arange(_matrix_rows(op) * _matrices(op))


def row_bytes(op: Op) -> int:
    """Bytes of a row that carry data: the rest of its 16 is padding."""
    source = op["from"]
    return ROW_BYTES if source is None else 2 * SOURCE_BITS[source]


def load_matrix(op: Op, rows: NDArray[np.uint8]) -> Registers:
    """What ldmatrix leaves in its registers [registers, 32].

    Args:
        rows: [rows, 16], the bytes at the address of each of `row_lanes`.
    """
    source = op["from"]
    if source is not None:
        rows = _unpack(rows, SOURCE_BITS[source])
    return rows.reshape(-1)[_places(op)].view(np.uint32)[..., 0]


def store_matrix(op: Op, registers: Registers) -> NDArray[np.uint8]:
    """The bytes [rows, 16] that stmatrix writes at the address of each of `row_lanes`."""
    places = _places(op)
    rows = np.empty(places.size, dtype=np.uint8)
    rows[places] = np.ascontiguousarray(registers).view(np.uint8).reshape(places.shape)
    return rows.reshape(-1, ROW_BYTES)


def move_matrix(registers: Registers) -> Registers:
    """movmatrix: the transposed 8 by 8 matrix of 16-bit elements, [1, 32] or [32] as it came."""
    halves = np.ascontiguousarray(registers).view(np.uint16).reshape(8, 8)
    return np.ascontiguousarray(halves.T).view(np.uint32).reshape(registers.shape)


def _matrix_rows(op: Op) -> int:
    """Addresses that a matrix takes. stmatrix's m16n8 lies in memory by columns, of which there are 8."""
    return 16 if op["shape"] == "m16n16" else 8


def _matrices(op: Op) -> int:
    return int((op["num"] or "x1")[1:])


@lru_cache(maxsize=64)
def _places(op: Op) -> NDArray[np.int64]:
    """Index into the rows' bytes of each byte of each register: [registers, 32, 4]."""
    lane = np.arange(32)[:, None]
    byte = np.arange(4)[None, :]
    group, thread = lane // 4, lane % 4
    shape, transposed = op["shape"], op["trans"] is not None
    parts: list[NDArray[np.int64]]
    if shape == "m16n16" and transposed:
        # A row's 16 bytes become a column; a lane has four columns of row `group`, then of row `group + 8`.
        parts = [(4 * thread + byte) * ROW_BYTES + group + 8 * half for half in (0, 1)]
    elif shape == "m16n8" and transposed:
        parts = [(2 * thread + byte % 2) * ROW_BYTES + group + 8 * (byte // 2)]
    elif shape == "m8n8" and transposed:
        parts = [(2 * thread + byte // 2) * ROW_BYTES + 2 * group + byte % 2]
    elif shape in ("m8n8", "m8n16") and not transposed:
        parts = [group * ROW_BYTES + 4 * thread + byte]
    else:
        raise Unsupported(f"the fragments of {op.text}")
    matrix_bytes = _matrix_rows(op) * ROW_BYTES
    return np.stack([part + matrix_bytes * matrix for matrix in range(_matrices(op)) for part in parts])


def _unpack(rows: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """16 elements of a few bits at the beginning of each row, each in the low bits of a byte."""
    packed = np.unpackbits(rows[:, : 2 * bits], axis=1, bitorder="little").reshape(-1, 16, bits)
    return np.packbits(packed, axis=2, bitorder="little")[..., 0]


# Elements


def decode(codes: Codes, element: str) -> Floats:
    """Values of elements as the tensor core reads them.

    Args:
        codes: unsigned integers as wide as WIDTHS says.
        element: a key of WIDTHS; the small formats in containers of 8 bits, as `mma` wants them.
    """
    if element == "bf16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if element == "f16":
        return codes.view(np.float16).astype(np.float64)
    if element == "tf32":
        return decode_tf32(codes)
    if element == "u8":
        return codes.astype(np.float64)
    if element == "s8":
        return codes.view(np.int8).astype(np.float64)
    return _table(element)[codes]


@lru_cache(maxsize=16)
def _table(element: str) -> Floats:
    """The value of each code that a container can hold."""
    if element not in FORMATS or element not in WIDTHS:
        raise Unsupported(f"elements of type {element} in a matrix")
    codes = np.arange(1 << WIDTHS[element])
    # Four bits lie in the middle of their container.
    return FORMATS[element].decode(codes >> 2 if element == "e2m1" else codes)


def elements_of(registers: Registers, bits: int) -> Codes:
    """[registers, 32, elements of a register], the low bits first."""
    whole = np.ascontiguousarray(registers, dtype=np.uint32)
    return whole.view(f"u{bits // 8}").reshape(*whole.shape, 32 // bits)


def a_matrix(registers: Registers, bits: int) -> Codes:
    """Codes [16, k] of a multiplicand A: pairs of registers hold rows 0 to 7 and 8 to 15 of a stretch of k."""
    codes = elements_of(registers, bits)
    return codes.reshape(-1, 2, 8, 4, 32 // bits).transpose(1, 2, 0, 3, 4).reshape(16, -1)


def b_matrix(registers: Registers, bits: int) -> Codes:
    """Codes [8, k] of a multiplicand B, one row for each column of it."""
    codes = elements_of(registers, bits)
    return codes.reshape(-1, 8, 4, 32 // bits).transpose(1, 0, 2, 3).reshape(8, -1)


# Accumulators: register 4j + 2h + e holds row group + 8h, column 8j + 2 thread + e; halves e share a register


def accumulate(product: Floats, c: Registers | None, c_type: str, d_type: str, *, saturate: bool = False) -> Registers:
    """Accumulator registers [warps, registers, 32] of product + c, rounded once.

    Args:
        product: [16 * warps, n]; whole numbers for s32.
        c: accumulator registers [(warps,) registers, 32]; None for zero.
        c_type, d_type: of c and of the result: f32, f16 or s32.
        saturate: s32 is clamped instead of wrapped.
    """
    warps, blocks = product.shape[0] // 16, product.shape[1] // 8
    total = product.reshape(warps, 2, 8, blocks, 4, 2).transpose(0, 3, 1, 5, 2, 4)
    with np.errstate(all="ignore"):
        if c is not None:
            total = _accumulators(c, c_type, total.shape) + total
        return _encode(total, d_type, saturate).reshape(warps, -1, 32)


def _accumulators(c: Registers, c_type: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Values by warp, j, h, e, group, thread."""
    whole = np.ascontiguousarray(c, dtype=np.uint32)
    if c_type == "f16":
        warps, blocks = shape[:2]
        return whole.view(np.float16).reshape(warps, blocks, 2, 8, 4, 2).transpose(0, 1, 2, 5, 3, 4)
    return whole.view({"f32": np.float32, "s32": np.int32}[c_type]).reshape(shape)


def accumulator_matrix(registers: Registers, kind: str) -> Floats:
    """Values [16 * warps, n] of accumulator registers [(warps,) registers, 32].

    Args:
        kind: f32 or f16.
    """
    count = registers.shape[-2]
    warps, blocks = registers.size // (32 * count), count // (2 if kind == "f16" else 4)
    of_lanes = _accumulators(registers, kind, (warps, blocks, 2, 2, 8, 4))
    return of_lanes.transpose(0, 2, 4, 1, 5, 3).reshape(16 * warps, 8 * blocks).astype(np.float64)


def _encode(total: Floats, d_type: str, saturate: bool) -> Registers:
    """Registers of values by warp, j, h, e, group, thread."""
    if d_type == "s32":
        # Sums of products of 8-bit integers and an accumulator stay far below 2**53: float64 has them exactly.
        if saturate:
            total = np.clip(total, -(2.0**31), 2.0**31 - 1)
        return total.astype(np.int64).astype(np.uint32)
    if d_type == "f32":
        single = total.astype(np.float32, order="C")
        nan = np.isnan(single)
        if nan.any():
            single[nan] = CANONICAL_NAN.view(np.float32)
        return single.view(np.uint32)
    half = total.astype(np.float16).transpose(0, 1, 2, 4, 5, 3)
    bits = np.where(np.isnan(half), np.uint16(0x7FFF), half.view(np.uint16))
    return np.ascontiguousarray(bits).view(np.uint32)


def contract(a: Floats, b: Floats) -> Floats:
    """Matrix a [m, k] times the transposed b [n, k]; NaN and infinity as they come."""
    with np.errstate(all="ignore"):
        return a @ b.T


# mma.sync


@dataclass(frozen=True)
class Mma:
    """A form of mma.sync.

    Attributes:
        k: elements of a row of A; the matrices are 16 by k, k by 8 and 16 by 8.
    """

    k: int
    a_type: str
    b_type: str
    c_type: str
    d_type: str
    saturate: bool

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, op: Op) -> "Mma":
        """Raises Unsupported where the shape is none of m16n8kK."""
        m, _, k = (op["shape"] or "").partition("n8k")
        if m != "m16" or not k:
            raise Unsupported(f"the shape of {op.text}")
        a, b, c, d = (op[name] or "" for name in ("atype", "btype", "ctype", "dtype"))
        return cls(int(k), a, b, c, d, op["satfinite"] is not None)

    @property
    def registers(self) -> tuple[int, int, int, int]:
        """How many a, b, c and d have."""
        a, b = 16 * self.k * WIDTHS[self.a_type] // 1024, 8 * self.k * WIDTHS[self.b_type] // 1024
        c, d = (2 if one == "f16" else 4 for one in (self.c_type, self.d_type))
        return a, b, c, d

    def multiply(self, a: Registers, b: Registers, c: Registers) -> Registers:
        """Registers of d. Products and sums are exact up to float64's rounding; one rounding to d's type follows."""
        left = decode(a_matrix(a, WIDTHS[self.a_type]), self.a_type)
        right = decode(b_matrix(b, WIDTHS[self.b_type]), self.b_type)
        return accumulate(contract(left, right), c, self.c_type, self.d_type, saturate=self.saturate)[0]


def mma(op: Op, a: Registers, b: Registers, c: Registers) -> Registers:
    """mma.sync: d's registers [registers, 32] from those of a, b and c."""
    return Mma.of(op).multiply(a, b, c)
