# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma of SM100 on operands of 8 and 4 bits, with or without scale factors for each 32 or 16 elements of k.

Both operands are K-major in shared memory in rows of 128 bytes with the 128-byte swizzle. An instruction takes 32 bytes
of k, whatever an element's size is, so that a row of 128 bytes is four instructions. They are issued from inline PTX by
one elected thread: a descriptor is an address and constants.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
from cutlass import cute

STEPS = 4  # instructions for 128 bytes of k
STEP_VECTORS = 2  # 16-byte vectors of k in one of them
SCALE_ATOM_BYTES = 512  # scale factors of 128 rows and 4 blocks of k
ATOM_COLUMNS = 4  # of tensor memory, that they take
ATOM_ROWS = 128

# PTX ISA 9.2, matrix descriptor: upper 32 bits of the 128-byte swizzle (mode 2) with 1024 bytes between 8 rows, and
# of no swizzle with 128 bytes between 8 rows of 16 bytes. The lower 32 bits are the address in 16-byte units, and a
# leading offset of 1 unit.
SWIZZLED_ROWS = 2 << 29 | 1 << 14 | 1024 >> 4
PLAIN_ROWS = 1 << 14 | 128 >> 4
LEADING_OFFSET = 1 << 16
# Instruction descriptor.
D_FLOAT32, B_SCALE_ID, A_FORMAT, B_FORMAT, N_DIM, UE8M0, M_DIM, A_SCALE_ID = 1 << 4, 4, 7, 10, 17, 1 << 23, 24, 29


@dataclass(frozen=True)
class NarrowKind:
    """A .kind of tcgen05.mma.

    Attributes:
        name: what stands in the instruction.
        element: of A, e4m3 or e2m1, as the instruction descriptor encodes it.
        flags: more bits of the instruction descriptor.
        scale_atoms: for 128 bytes of k, of each 128 rows; 0 without scale factors. With one, each instruction takes
            another byte of its cells; with four, each instruction takes an atom.
        element_b: of B, where it is another one. Of e2m1 beside e4m3, 16 elements are the first 8 of 16 bytes in
            shared memory.
    """

    name: str
    element: int
    flags: int
    scale_atoms: int = 0
    element_b: int | None = None


E4M3 = NarrowKind("kind::f8f6f4", 0, D_FLOAT32)
MXFP8 = NarrowKind("kind::mxf8f6f4.block_scale.scale_vec::1X", 0, UE8M0, 1)
MXFP8_MXFP4 = NarrowKind(MXFP8.name, MXFP8.element, MXFP8.flags, MXFP8.scale_atoms, element_b=5)
NVFP4 = NarrowKind("kind::mxf4nvf4.block_scale.scale_vec::4X", 1, 0, 4)


class ScaleStage(NamedTuple):
    """Scale factors of a stage: where they arrive, and where in tensor memory they are copied to.

    Attributes:
        sA, sB: shared-memory addresses of their atoms: of each 128 rows those of all k, then of the next 128 rows.
        tA, tB: tensor-memory addresses of as many atoms, of each k those of all rows.
        rows_b: 128s of rows of B whose atoms are copied.
        offset_b: columns from tB to the first row's factors.
    """

    sA: cutlass.Int32
    sB: cutlass.Int32
    tA: cutlass.Int32
    tB: cutlass.Int32
    rows_b: int
    offset_b: cutlass.Int32 | int = 0


@dataclass(frozen=True, kw_only=True)
class NarrowMma:
    """D [m, n] of float32 in tensor memory (+)= A [m, 128 bytes of k] B [n, 128 bytes of k]^T.

    Attributes:
        m, n: over all CTAs of the group.
        cta_group: CTAs that multiply together, 1 or 2. Each copies the scale factors of its rows of A and of all of B.
    """

    kind: NarrowKind
    m: int
    n: int
    cta_group: int = 1

    def descriptor(self, step: int) -> int:
        """The instruction descriptor of a step of k."""
        scale_id = step if self.kind.scale_atoms == 1 else 0
        element_b = self.kind.element if self.kind.element_b is None else self.kind.element_b
        return (
            self.kind.flags
            | scale_id << B_SCALE_ID
            | self.kind.element << A_FORMAT
            | element_b << B_FORMAT
            | self.n >> 3 << N_DIM
            | self.m >> 4 << M_DIM
            | scale_id << A_SCALE_ID
        )

    def issue(
        self,
        accumulator: cutlass.Int32,
        a: cutlass.Int32,
        b: cutlass.Int32,
        accumulate: cutlass.Boolean,
        scales: ScaleStage | None = None,
    ) -> None:
        """Copy the scale factors and issue the products of a stage. All lanes of a warp call it, one of them issues.

        Args:
            accumulator: address in tensor memory.
            a, b: shared-memory addresses, multiples of 1024.
            accumulate: add to D; else the first step overwrites it.
        """
        arguments = [accumulator, a, b, cutlass.Int32(accumulate)]
        code = [
            ".reg .pred leader, adds_first, adds; .reg .b64 from, to;",
            ".reg .b32 a, b, x, y, kind, scale_a, scale_b;",
            "elect.sync _|leader, 0xffffffff;",
            "setp.ne.b32 adds_first, {$r3}, 0; setp.eq.b32 adds, {$r3}, {$r3};",
            vectors("a", "{$r1}"),
            vectors("b", "{$r2}"),
        ]
        if scales is not None:
            arguments += [scales.sA, scales.sB, scales.tA, scales.tB, cutlass.Int32(scales.offset_b)]
            code += self.copies("{$r4}", "{$r6}", 1) + self.copies("{$r5}", "{$r7}", scales.rows_b)
        for step in range(STEPS):
            code += [
                f"add.s32 x, a, {step * STEP_VECTORS}; mov.b64 from, {{x, {SWIZZLED_ROWS}}};",
                f"add.s32 y, b, {step * STEP_VECTORS}; mov.b64 to, {{y, {SWIZZLED_ROWS}}};",
                f"mov.b32 kind, {self.descriptor(step)};",
            ]
            factors = ""
            if scales is not None:
                atom = step % self.kind.scale_atoms * ATOM_COLUMNS
                code.append(f"add.s32 scale_a, {{$r6}}, {atom};")
                code.append(f"add.s32 scale_b, {{$r7}}, {{$r8}}; add.s32 scale_b, scale_b, {atom * scales.rows_b};")
                factors = " [scale_a], [scale_b],"
            adds = "adds" if step else "adds_first"
            instruction = f"tcgen05.mma.cta_group::{self.cta_group}.{self.kind.name}"
            code.append(f"@leader {instruction} [{{$r0}}], from, to, kind,{factors} {adds};")
        cute.arch.inline_ptx("{ " + " ".join(code) + " }", read_only_args=arguments)

    def copies(self, source: str, target: str, rows: int) -> list[str]:
        """PTX that copies the atoms of so many 128s of rows; k is what neighbours in shared memory differ in."""
        code = [vectors("x", source)]
        atoms = self.kind.scale_atoms
        for row in range(rows):
            for k in range(atoms):
                code += [
                    f"add.s32 y, x, {(row * atoms + k) * SCALE_ATOM_BYTES // 16}; mov.b64 from, {{y, {PLAIN_ROWS}}};",
                    f"add.s32 scale_a, {target}, {(k * rows + row) * ATOM_COLUMNS};",
                    f"@leader tcgen05.cp.cta_group::{self.cta_group}.32x128b.warpx4 [scale_a], from;",
                ]
        return code


def vectors(register: str, address: str) -> str:
    """PTX for the lower half of a matrix descriptor."""
    return (
        f"shr.u32 {register}, {address}, 4; and.b32 {register}, {register}, 0x3fff; "
        f"or.b32 {register}, {register}, {LEADING_OFFSET};"
    )
