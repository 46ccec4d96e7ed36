# SPDX-License-Identifier: Apache-2.0
"""wgmma.mma_async: where its operands lie and what it computes. When it does so is the machine's business.

Sources: PTX ISA 9.2, sections Register Fragments and Shared Memory Matrix Layout (9.7.15.5.1), wgmma.mma_async
(9.7.15.5.2). The fragment of A and the accumulator of a warp's 16 rows are those of mma.sync.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.fragments import (
    WIDTHS,
    Codes,
    Floats,
    Registers,
    a_matrix,
    accumulate,
    accumulator_matrix,
    contract,
    decode,
)
from emulator.machine.narrow_sums import SMALLEST, cut, summed
from emulator.machine.swizzle import MatrixDescriptor
from emulator.ptx.grammar import Op
from emulator.ptx.ir import Imm, Instr, Operand, Vec

Addresses = NDArray[np.int64]

ROWS, WARP_ROWS = 64, 16
# Swizzles look at no address bit above these, so that a pattern repeats from one such boundary to the next.
PATTERN_BYTES = 1024


@dataclass(frozen=True)
class Wgmma:
    """A form of wgmma.mma_async: D [64, n] = A [64, k] times B [k, n] (+ D).

    Attributes:
        a_type, b_type: f16, bf16, tf32, e4m3, e5m2, s8 or u8.
        d_type: f32, f16 or s32.
        a_in_registers: else behind a descriptor, as B always is.
        a_negative, b_negative: the operand is multiplied by -1.
        a_transposed, b_transposed: in shared memory it is M-major or N-major instead of K-major.
        saturate: s32 is clamped instead of wrapped.
    """

    n: int
    k: int
    a_type: str
    b_type: str
    d_type: str
    a_in_registers: bool
    a_negative: bool = False
    b_negative: bool = False
    a_transposed: bool = False
    b_transposed: bool = False
    saturate: bool = False

    @classmethod
    def of(cls, instr: Instr) -> "Wgmma":
        """The form of an instruction; the same object for equal ones.

        Raises:
            Unsupported: a constant, a shape or a number of registers that the ISA does not give a meaning.
        """
        place = instr.op.form.place
        names = ("neg_a", "neg_b", "trans_a", "trans_b")
        constants = tuple(_constant(instr.args[place[name]]) if name in place else None for name in names)
        form = _form(instr.op, constants)
        _check_registers(instr, "d", form.d_registers)
        if form.a_in_registers:
            _check_registers(instr, "a", 4)
        return form

    @property
    def d_registers(self) -> int:
        """Accumulator registers of a lane."""
        return self.n // (4 if self.d_type == "f16" else 2)

    @property
    def a_bytes(self) -> int:
        """Bytes of an element of A in shared memory."""
        return WIDTHS[self.a_type] // 8

    @property
    def b_bytes(self) -> int:
        """Bytes of an element of B in shared memory."""
        return WIDTHS[self.b_type] // 8

    def a_addresses(self, descriptor: MatrixDescriptor) -> Addresses:
        """Byte address in the CTA's shared memory of each element of A, [64, k]."""
        return _addresses(descriptor, ROWS, self.k, 8 * self.a_bytes, not self.a_transposed)

    def b_addresses(self, descriptor: MatrixDescriptor) -> Addresses:
        """Byte address in the CTA's shared memory of each element of B, [n, k]."""
        return _addresses(descriptor, self.n, self.k, 8 * self.b_bytes, not self.b_transposed)

    def a_values(self, codes: Codes) -> Floats:
        """Values of A's elements, negated if the instruction says so; codes are unsigned integers of `a_bytes`."""
        values = decode(codes, self.a_type)
        return -values if self.a_negative else values

    def b_values(self, codes: Codes) -> Floats:
        """Values of B's elements, negated if the instruction says so; codes are unsigned integers of `b_bytes`."""
        values = decode(codes, self.b_type)
        return -values if self.b_negative else values

    def a_from_registers(self, registers: Registers) -> Floats:
        """Values [16, k] of a warp's rows of A from its registers [4, 32]."""
        return self.a_values(a_matrix(registers, WIDTHS[self.a_type]))

    def multiply(self, a: Floats, b: Floats, d: Registers, scale_d: bool) -> Registers:
        """The accumulator registers afterwards.

        Products and sums are float64's, exact for integers; one rounding to d's type follows. Of 8-bit floats few bits
        are kept; see `narrow_sums`.

        Args:
            a: [16, k], the rows of one warp, or [64, k].
            b: [n, k].
            d: [d_registers, 32] of that warp, or [4, d_registers, 32].
            scale_d: whether d is added; else it is not read.
        """
        c = d if scale_d else None
        if self.a_type in SMALLEST:
            before = None if c is None else accumulator_matrix(c, self.d_type)
            total = summed(a, b, before, self.a_type, self.b_type)
            total = cut(total) if self.d_type == "f32" else total
            return accumulate(total, None, self.d_type, self.d_type).reshape(d.shape)
        return accumulate(contract(a, b), c, self.d_type, self.d_type, saturate=self.saturate).reshape(d.shape)


def _constant(operand: Operand | None) -> int | None:
    return operand.value if isinstance(operand, Imm) else None


def _check_registers(instr: Instr, role: str, expected: int) -> None:
    operand = instr[role]
    found = len(operand.items) if isinstance(operand, Vec) else 1
    if found != expected:
        raise Unsupported(f"{instr.op.text} with {found} registers for {role}: it has {expected}")


@lru_cache(maxsize=1024)
def _form(op: Op, constants: tuple[int | None, ...]) -> Wgmma:
    shape = op["shape"] or ""
    n, k = (int(part) for part in shape.removeprefix("m64n").split("k"))
    a_type, b_type, d_type = (op[name] or "" for name in ("atype", "btype", "dtype"))
    if d_type == "s32" and n > 32 and n % 16:
        raise Unsupported(f"{op.text}: with integers n is a multiple of 16 above 32")
    scale_a, scale_b, trans_a, trans_b = constants
    if scale_a not in (None, 1, -1) or scale_b not in (None, 1, -1):
        raise Unsupported(f"{op.text} with scales {scale_a} and {scale_b}: they are 1 or -1")
    if trans_a not in (None, 0, 1) or trans_b not in (None, 0, 1):
        raise Unsupported(f"{op.text} with transpositions {trans_a} and {trans_b}: they are 0 or 1")
    return Wgmma(
        n,
        k,
        a_type,
        b_type,
        d_type,
        a_in_registers=op.form.id.endswith("#rs"),
        a_negative=scale_a == -1,
        b_negative=scale_b == -1,
        a_transposed=trans_a == 1,
        b_transposed=trans_b == 1,
        saturate=op["satfinite"] is not None,
    )


def _addresses(descriptor: MatrixDescriptor, rows: int, columns: int, bits: int, k_major: bool) -> Addresses:
    first = descriptor.start % PATTERN_BYTES
    near = descriptor if first == descriptor.start else replace(descriptor, start=first)
    return _near_addresses(near, rows, columns, bits, k_major) + (descriptor.start - first)


@lru_cache(maxsize=256)
def _near_addresses(descriptor: MatrixDescriptor, rows: int, columns: int, bits: int, k_major: bool) -> Addresses:
    return descriptor.addresses(rows, columns, bits, k_major=k_major)
