# SPDX-License-Identifier: Apache-2.0
"""tcgen05.mma, .cp and .shift: what they read, what they compute and where it goes. No clocks, no scheduler.

Sources: PTX ISA 9.2, sections Instruction Descriptor (9.7.16.4.2), Matrix and Data Movement Shape (9.7.16.2), Data Path
Layout Organization (9.7.16.10.5), Block Scaling (9.7.16.10.7), tcgen05.mma (9.7.16.10.9), tcgen05.cp and .shift
(9.7.16.9); encodings as CUTLASS's public header cute/arch/mma_sm100_desc.hpp, layouts in tensor memory as its
cute/atom/mma_traits_sm100.hpp and copy_traits_sm100.hpp. What a shift does to each 32 lanes, where narrow elements lie
in their bytes and the scale factors of M = 128 over two CTAs are as in CUTLASS's CuTe DSL examples of tcgen05.

D [M, N] = A [M, K] · B [N, K]ᵀ + D. With cta_group::2, CTA 0 of the pair has the even rank; each CTA supplies half of
A's rows and half of B's, and holds those rows of D that its rows of A make.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emulator.errors import Unsupported
from emulator.machine.formats import FORMATS, decode_tf32
from emulator.machine.swizzle import DescriptorError, MatrixDescriptor, Swizzle
from emulator.machine.tensor_memory import (
    COLUMNS,
    LANES,
    QUARTER,
    Cells,
    Pattern,
    Rectangle,
    TensorMemory,
    TensorMemoryError,
    Words,
    name_address,
    split_address,
)
from emulator.ptx.ir import Imm, Instr

Addresses = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """A .kind of tcgen05.mma.

    Attributes:
        k: elements of K that one instruction multiplies.
        operands: format of A and B by the descriptor's code.
        results: format of D by its code.
        container: bits that an element takes in memory where the format has fewer; 0: its own.
        vectors: scale factors along K by the modifier that says so, "" where it is absent.
    """

    k: int
    operands: Mapping[int, str]
    results: Mapping[int, str]
    container: int = 0
    vectors: Mapping[str, int] | None = None


F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
SINGLE = {"": 1, "scale_vec::1X": 1, "block32": 1}
DOUBLE = {"scale_vec::2X": 2, "block32": 2}
KINDS: dict[str, Kind] = {
    "f16": Kind(16, {0: "f16", 1: "bf16"}, {0: "f16", 1: "f32"}),
    "tf32": Kind(8, {2: "tf32"}, {1: "f32"}),
    "f8f6f4": Kind(32, F8F6F4, {0: "f16", 1: "f32"}, container=8),
    "i8": Kind(32, {0: "u8", 1: "s8"}, {2: "s32"}),
    "mxf8f6f4": Kind(32, F8F6F4, {}, container=8, vectors=SINGLE),
    "mxf4": Kind(64, {1: "e2m1"}, {}, vectors={"": 2, **DOUBLE}),
    "mxf4nvf4": Kind(64, {1: "e2m1"}, {}, vectors={**DOUBLE, "scale_vec::4X": 4, "block16": 4}),
}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "u8": 8, "s8": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
# In a byte of tensor memory an element of so many bits begins at this one: 00xxxx00 and 0xxxxxx0.
NARROW = {4: 2, 6: 1}


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32 bits that say which matrices an instruction multiplies.

    Attributes:
        kind: f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4 or mxf4nvf4.
        m, n: of the whole instruction, of both CTAs with cta_group::2.
        a, b: formats; f16, bf16, tf32, u8, s8, e4m3, e5m2, e2m3, e3m2, e2m1.
        d: f16, f32 or s32.
        a_k_major, b_k_major: as opposed to M-major and N-major ("transposed").
        saturate: integer results stop at the ends of their range instead of wrapping around.
        scale: format of scale factors, ue8m0 or ue4m3; "" without.
        scale_a, scale_b: ids: the byte of a 32-bit cell that the first factor lies in.
    """

    kind: str
    m: int
    n: int
    a: str
    b: str
    d: str
    a_k_major: bool = True
    b_k_major: bool = True
    negate_a: bool = False
    negate_b: bool = False
    saturate: bool = False
    scale: str = ""
    scale_a: int = 0
    scale_b: int = 0

    @property
    def k(self) -> int:
        return KINDS[self.kind].k

    @classmethod
    def of(cls, kind: str, bits: int) -> "InstructionDescriptor":
        """Raises DescriptorError where a field means nothing, Unsupported for sparse matrices and K = 96."""
        facts = KINDS[kind]
        if bits >> 2 & 1:
            raise Unsupported(f"tcgen05.mma.kind::{kind} with sparse A")
        if bits & 3:
            raise DescriptorError(_describe(kind, bits, f"sparsity selector {bits & 3} without sparsity"))
        common = {
            "a": _format(kind, bits, "A", bits >> 7 & 7, facts.operands),
            "b": _format(kind, bits, "B", bits >> 10 & 7, facts.operands),
            "negate_a": bool(bits >> 13 & 1),
            "negate_b": bool(bits >> 14 & 1),
            "a_k_major": not bits >> 15 & 1,
            "b_k_major": not bits >> 16 & 1,
            "n": (bits >> 17 & 0x3F) * 8,
            "m": (bits >> 24 & 0x1F) * 16,
        }
        read = cls._scaled if facts.vectors else cls._plain
        found = read(kind, bits, common)
        found._check(bits)
        return found

    @classmethod
    def _plain(cls, kind: str, bits: int, common: dict[str, Any]) -> "InstructionDescriptor":
        _zero(kind, bits, (6, 1), (23, 1), (29, 1))
        if bits >> 30:
            raise DescriptorError(_describe(kind, bits, "a maximum shift is for .ws alone"))
        saturate = bool(bits >> 3 & 1)
        if saturate and kind != "i8":
            raise DescriptorError(_describe(kind, bits, "saturation is for integers"))
        d = _format(kind, bits, "D", bits >> 4 & 3, KINDS[kind].results)
        return cls(kind=kind, d=d, saturate=saturate, **common)

    @classmethod
    def _scaled(cls, kind: str, bits: int, common: dict[str, Any]) -> "InstructionDescriptor":
        _zero(kind, bits, (3, 1), (6, 1), (24, 3))
        if bits >> 31:
            if kind == "mxf8f6f4":
                raise DescriptorError(_describe(kind, bits, "reserved bit 31 is not zero"))
            raise Unsupported(f"tcgen05.mma.kind::{kind} with K = 96")
        scale = "ue8m0" if bits >> 23 & 1 else "ue4m3"
        if scale == "ue4m3" and kind != "mxf4nvf4":
            raise DescriptorError(_describe(kind, bits, "scale factors of ue4m3 are for kind::mxf4nvf4"))
        return cls(kind=kind, d="f32", scale=scale, scale_a=bits >> 29 & 3, scale_b=bits >> 4 & 3, **common)

    def _check(self, bits: int) -> None:
        if self.kind == "i8" and (self.negate_a or self.negate_b):
            raise DescriptorError(_describe(self.kind, bits, "integers are not negated"))
        for name, format, k_major in (("A", self.a, self.a_k_major), ("B", self.b, self.b_k_major)):
            if not k_major and BITS[format] < 8:
                raise DescriptorError(_describe(self.kind, bits, f"{name} of {format} can only be K-major"))


def _describe(kind: str, bits: int, what: str) -> str:
    return f"instruction descriptor {bits:#010x} of kind::{kind}: {what}"


def _zero(kind: str, bits: int, *reserved: tuple[int, int]) -> None:
    for at, count in reserved:
        if bits >> at & ((1 << count) - 1):
            raise DescriptorError(_describe(kind, bits, f"reserved bits {at} to {at + count - 1} are not zero"))


def _format(kind: str, bits: int, matrix: str, code: int, known: Mapping[int, str]) -> str:
    if code not in known:
        raise DescriptorError(_describe(kind, bits, f"format {code} of {matrix} does not exist"))
    return known[code]


# Operands in shared memory


@dataclass(frozen=True, eq=False)
class SharedOperand:
    """The part of A or B that one CTA's shared memory holds.

    Attributes:
        cta: in the pair, 0 or 1.
        matrix: "a" or "b".
        first: the part's first row of M or N.
        addresses: byte of each element in the CTA's shared memory, [rows, K]. Of formats below 8 bits in containers of
            8 it is the element's place among the 16 of its 16 bytes; packed elements of 4 bits share their bytes.
        words: index of each 4-byte word that is read, ascending.
    """

    cta: int
    matrix: str
    first: int
    addresses: Addresses
    words: Addresses


@lru_cache(maxsize=512)
def shared_operand(
    cta: int, matrix: str, rows: int, k: int, bits: int, width: int, k_major: bool, slot: int
) -> SharedOperand:
    """The part that a matrix descriptor's 64 bits describe, in each CTA of a pair with the same addresses.

    Args:
        width: bits of an element.
        slot: bits that it takes.

    Raises:
        DescriptorError: the descriptor means nothing.
        Unsupported: a K-major matrix with the 128-byte swizzle of 32-byte atoms, which the ISA has no layout for.
    """
    descriptor = MatrixDescriptor.of_sm100(bits)
    atoms = descriptor.swizzle is Swizzle.B128_ATOM_32
    if atoms and k_major:
        raise Unsupported(f"tcgen05: {matrix.upper()}, K-major with the 128-byte swizzle of 32-byte atoms")
    if not k_major and atoms != (width == 32):
        # Of 9.7.16.10.3: M- or N-major elements of 32 bits have this swizzle, and no others have it.
        swizzle = descriptor.swizzle.name
        raise DescriptorError(f"descriptor {bits:#018x}: {width} bits, not K-major, with the swizzle {swizzle}")
    addresses = descriptor.addresses(rows, k, slot, k_major=k_major)
    addresses.flags.writeable = False
    if width < slot:
        # The first 8 or 12 bytes of 16, the rest is padding.
        words = (np.unique(addresses >> 4)[:, None] * 4 + np.arange(width // 2)).reshape(-1)
    else:
        words = np.unique(addresses >> 2)
    return SharedOperand(cta, matrix, cta * rows, addresses, words)


def read_shared(memory: Bytes, addresses: Addresses, format: str, slot: int) -> Floats:
    """Values of the elements of a SharedOperand, [rows, K]; `slot` as in `shared_operand`."""
    bits = BITS[format]
    if bits == 32:
        return decode_tf32(memory.view(np.uint32)[addresses >> 2])
    if bits == 16:
        return decode(memory.view(np.uint16)[addresses >> 1], format)
    if bits == 8:
        return decode(memory[addresses], format)
    if slot == 4:
        nibble = np.arange(addresses.shape[1]) % 2 * 4
        return decode(memory[addresses] >> nibble.astype(np.uint8) & np.uint8(0xF), format)
    return decode(padded_codes(memory, addresses, bits), format)


def padded_codes(memory: Bytes, addresses: Addresses, bits: int) -> Bytes:
    """Codes of elements of 4 or 6 bits, of which 16 begin each 16 bytes; the rest of these is padding."""
    at = (addresses & 15) * bits
    byte = (addresses & ~np.int64(15)) + (at >> 3)
    pair = memory[byte] | memory[byte + 1].astype(np.uint16) << np.uint16(8)
    return (pair >> (at & 7).astype(np.uint16) & np.uint16((1 << bits) - 1)).astype(np.uint8)


def decode(codes: NDArray[Any], format: str) -> Floats:
    """Values of codes in unsigned integers of the format's size or the next larger one."""
    if format == "f16":
        return codes.view(np.float16).astype(np.float64)
    if format == "bf16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    if format == "tf32":
        return decode_tf32(codes)
    return _table(format)[codes]


@lru_cache(maxsize=16)
def _table(format: str) -> Floats:
    codes = np.arange(1 << BITS[format])
    if format == "u8":
        return codes.astype(np.float64)
    if format == "s8":
        return codes.astype(np.uint8).view(np.int8).astype(np.float64)
    return FORMATS[format].decode(codes)


# Layouts in tensor memory, of one CTA


@lru_cache(maxsize=256)
def accumulator(m: int, n: int, group: int) -> Pattern:
    """Cells of the CTA's part of D: [M / group, N], a 32-bit cell for each element of whatever format."""
    row, column = np.arange(m // group)[:, None], np.arange(n)[None, :]
    if m == 64:
        # Half of each quarter's lanes; an address with lane 16 means the other half.
        return Pattern.of(row // 16 * 32 + row % 16, column, aligned=16)
    if m // group == 64:
        # N's second half lies beside the first one.
        half = n // 2
        return Pattern.of(row + column // half * 64, column % half, aligned=128)
    return Pattern.of(row, column, aligned=128)


@lru_cache(maxsize=256)
def tensor_operand(m: int, group: int) -> Pattern:
    """Cells of the CTA's part of A: [copies, M / group, 8]; a row of K fills 8 cells, the first element lowest.

    There are two copies where D's halves of N lie side by side: each half is made of the A in its own lanes.
    """
    rows = m // group
    copy = np.arange(2 if m == 128 and group == 2 else 1)[:, None, None]
    row, column = np.arange(rows)[None, :, None], np.arange(8)[None, None, :]
    if m == 64:
        return Pattern.of(row // 16 * 32 + row % 16 + 0 * copy, column, aligned=16)
    return Pattern.of(row + 64 * copy, column, aligned=128)


@lru_cache(maxsize=64)
def scale_factors(rows: int, halves: bool = False) -> Pattern:
    """Cells of the factors of rows of A, or of B: [copies, rows], the same in each copy.

    A cell holds four factors of one row; rows 32 apart lie in neighbouring columns. Each quarter of the lanes has a
    copy; with `halves` each quarter has one of the half that it works on.
    """
    copy, row = np.arange(2 if halves else 4)[:, None], np.arange(rows)[None, :]
    if not halves:
        return Pattern.of(copy * 32 + row % 32, row // 32, aligned=128)
    half, row = np.divmod(row, rows // 2)
    return Pattern.of(half * 64 + copy * 32 + row % 32, row // 32, aligned=128)


# The instruction


@dataclass(frozen=True)
class Mma:
    """A tcgen05.mma with its constant operands.

    Attributes:
        group: CTAs that take part, 1 or 2.
        a_in_tensor_memory: as opposed to shared memory.
        disabled: 32-bit words, a bit for each lane of CTA 0 and then of CTA 1; results in these lanes are not written.
        scale_d: D is multiplied by 2**-scale_d before the addition.
        vector: scale factors along K, 0 without block scaling.
        shift: A's rows in tensor memory move by one after the multiplication (.ashift).
    """

    descriptor: InstructionDescriptor
    group: int = 1
    a_in_tensor_memory: bool = False
    disabled: tuple[int, ...] = ()
    scale_d: int = 0
    vector: int = 0
    shift: bool = False

    @classmethod
    def of(cls, instr: Instr, descriptor: int, disabled: Sequence[int] = ()) -> "Mma":
        """From an instruction of the forms tcgen05.mma#*.

        Args:
            descriptor: value of its instruction descriptor.
            disabled: values of the lane masks, where it has any.

        Raises:
            DescriptorError: the descriptor or the shape means nothing.
            Unsupported: sparse matrices.
        """
        op = instr.op
        kind = str(op["kind"]).removeprefix("kind::")
        found = InstructionDescriptor.of(kind, descriptor)
        scale = instr["scale_d"] if "scale_d" in op.form.place else None
        vectors = KINDS[kind].vectors
        if vectors is not None and (op["size"] or "") not in vectors:
            raise DescriptorError(f"kind::{kind} with .{op['size'] or 'block_scale'} alone: no such vector of factors")
        return cls(
            found,
            group=2 if op["group"] == "cta_group::2" else 1,
            a_in_tensor_memory=op.form.id.endswith("ts"),
            disabled=tuple(disabled),
            scale_d=scale.value if isinstance(scale, Imm) else 0,
            vector=vectors[op["size"] or ""] if vectors is not None else 0,
            shift=bool(op["ashift"]) if op.form.id.endswith("ts") else False,
        )

    def __post_init__(self) -> None:
        what = self.descriptor
        shape = f"{what.m} x {what.n} with kind::{what.kind} and cta_group::{self.group}"
        if what.m not in self._rows() or not self._has_columns():
            raise DescriptorError(f"no tcgen05.mma multiplies to {shape}")
        if self.vector and self.folded and what.n % 128:
            # B's factors are laid out in 128s, D's halves of N are not: sources disagree which halves the factors take.
            raise Unsupported(f"block scaling of {shape}")
        if self.disabled and len(self.disabled) != 4 * self.group:
            raise DescriptorError(f"{len(self.disabled)} lane masks with cta_group::{self.group}: {4 * self.group} fit")
        if not 0 <= self.scale_d < 16:
            raise DescriptorError(f"scale-input-d {self.scale_d}: 0 to 15 are possible")
        if self.a_in_tensor_memory and not what.a_k_major:
            raise DescriptorError("A in tensor memory cannot be M-major")
        if self.shift and what.m == 64:
            raise DescriptorError("A of 64 rows is not shifted")
        self._check_ids()

    def _rows(self) -> tuple[int, ...]:
        if self.group == 2:
            return (128, 256)
        return (128,) if self.vector else (64, 128)

    def _has_columns(self) -> bool:
        n = self.descriptor.n
        if not 8 <= n <= 256:
            return False
        if self.descriptor.kind == "i8":
            # The sizes are sparser for integers: 8, 16, 24, 32, 48, 64, ...
            return n % 32 == 0 if self.group == 2 else n % 16 == 0 or n in (8, 24)
        return n % (8 * self.group) == 0

    def _check_ids(self) -> None:
        for name, first in (("A", self.descriptor.scale_a), ("B", self.descriptor.scale_b)):
            if self.vector and first % self.vector:
                raise DescriptorError(f"scale factor id {first} of {name}: no {self.vector} factors begin there")

    def _slot(self, format: str) -> int:
        return KINDS[self.descriptor.kind].container or BITS[format]

    @property
    def folded(self) -> bool:
        """D's halves of N lie side by side in a CTA's lanes."""
        return self.group == 2 and self.descriptor.m == 128

    @property
    def rows(self) -> int:
        """Of A and D that one CTA has."""
        return self.descriptor.m // self.group

    def operands(self, a: int | None, b: int) -> tuple[SharedOperand, ...]:
        """What is read from shared memory.

        Args:
            a, b: matrix descriptors, 64 bits; no `a` where A lies in tensor memory.
        """
        what, found = self.descriptor, []
        columns = what.n // self.group
        a_facts = (BITS[what.a], what.a_k_major, self._slot(what.a))
        b_facts = (BITS[what.b], what.b_k_major, self._slot(what.b))
        for cta in range(self.group):
            if a is not None:
                found.append(shared_operand(cta, "a", self.rows, what.k, a, *a_facts))
            found.append(shared_operand(cta, "b", columns, what.k, b, *b_facts))
        return tuple(found)

    def enabled(self, cta: int) -> NDArray[np.bool_] | None:
        """Elements of the CTA's part of D that are written, [rows, N]; None for all of them."""
        masks = self.disabled[4 * cta : 4 * cta + 4]
        if not any(masks):
            return None
        off = np.unpackbits(np.array(masks, dtype="<u4").view(np.uint8), bitorder="little").astype(np.bool_)
        lanes = accumulator(self.descriptor.m, self.descriptor.n, self.group).offsets >> 9
        enabled: NDArray[np.bool_] = ~off[lanes]
        return enabled


def multiply(
    mma: Mma,
    a: Floats,
    b: Floats,
    d: Words | None,
) -> Words:
    """A·Bᵀ + D, rounded once; of one CTA's rows or of all.

    Args:
        a: [rows, K], or [2, rows, K] with an A for each half of N; scale factors applied.
        b: [N, K].
        d: the cells of D before, [rows, N]; None where it is not added.

    Returns:
        The cells of D, [rows, N]. Results of 16 bits lie in the low half, the rest is 0.
    """
    what = mma.descriptor
    with np.errstate(all="ignore"):
        if a.ndim == 2:
            total = a @ b.T
        else:
            half = len(b) // 2
            total = np.concatenate((a[0] @ b[:half].T, a[1] @ b[half:].T), axis=1)
        if what.negate_a != what.negate_b:
            total = -total
        if what.d == "s32":
            if d is not None:
                total += d.view(np.int32)
            if what.saturate:
                total = np.clip(total, -(2**31), 2**31 - 1)
            return total.astype(np.int64).view(np.uint32)[:, ::2]  # the low halves
        if what.d == "f32":
            if d is not None:
                total += _scaled(d.view(np.float32), mma.scale_d)
            return total.astype(np.float32).view(np.uint32)
        if d is not None:
            total += _scaled(d.astype(np.uint16).view(np.float16), mma.scale_d)
        return total.astype(np.float16).view(np.uint16).astype(np.uint32)


def _scaled(d: NDArray[Any], scale: int) -> NDArray[Any]:
    return d if scale == 0 else d.astype(np.float64) * 2.0**-scale


@dataclass(frozen=True, eq=False)
class Multiplication:
    """A tcgen05.mma with its places: everything that it reads and writes is known before it runs.

    Attributes:
        shared: parts of A and B in shared memory.
        a_cells: by CTA, of A in tensor memory, [copies, rows, 8]; empty where A lies in shared memory.
        d_cells: by CTA, of D, [rows, N].
        scale_cells: by CTA, of A's factors [copies, rows] and of B's [copies, N]; empty without block scaling.
        accumulate: D is read as well (enable-input-d).
    """

    mma: Mma
    shared: tuple[SharedOperand, ...]
    a_cells: tuple[Cells, ...]
    d_cells: tuple[Cells, ...]
    scale_cells: tuple[tuple[Cells, Cells], ...]
    accumulate: bool

    @classmethod
    def place(
        cls,
        mma: Mma,
        tensors: Sequence[TensorMemory],
        d: int,
        a: int,
        b: int,
        *,
        accumulate: bool,
        scales: tuple[int, int] | None = None,
    ) -> "Multiplication":
        """Raises TensorMemoryError where a matrix does not lie in allocated tensor memory, and as `shared_operand`.

        Args:
            tensors: tensor memory of each CTA that takes part.
            d: address in tensor memory.
            a: address in tensor memory, or matrix descriptor.
            b: matrix descriptor.
            scales: addresses in tensor memory of A's and B's scale factors; the bits 31 and 30, where CUTLASS keeps the
                ids, are ignored.
        """
        what, group = mma.descriptor, mma.group
        if len(tensors) != group:
            raise ValueError(f"{len(tensors)} tensor memories for cta_group::{group}")
        result = accumulator(what.m, what.n, group)
        scale_cells: tuple[tuple[Cells, Cells], ...] = ()
        if mma.vector:
            if scales is None:
                raise ValueError("block scaling without scale factors")
            at = [address & 0x3FFFFFFF for address in scales]
            rows, columns = scale_factors(mma.rows), scale_factors(what.n, mma.folded)
            scale_cells = tuple((one.place(rows, at[0]), one.place(columns, at[1])) for one in tensors)
        inside = mma.a_in_tensor_memory
        if inside and a >> 16 != d >> 16:
            raise TensorMemoryError(f"A at {name_address(a)} and D at {name_address(d)}: the lanes have to be the same")
        operand = tensor_operand(what.m, group)
        return cls(
            mma,
            shared=mma.operands(None if inside else a, b),
            a_cells=tuple(one.place(operand, a) for one in tensors) if inside else (),
            d_cells=tuple(one.place(result, d) for one in tensors),
            scale_cells=scale_cells,
            accumulate=accumulate,
        )

    @property
    def reads(self) -> Iterator[tuple[int, Cells]]:
        """(CTA, cells) of tensor memory that are read."""
        yield from enumerate(self.a_cells)
        for cta, both in enumerate(self.scale_cells):
            for cells in both:
                yield cta, cells
        if self.accumulate:
            yield from self.results

    @property
    def writes(self) -> Iterator[tuple[int, Cells]]:
        """(CTA, cells) of tensor memory that are written."""
        yield from self.results
        if self.mma.shift:
            yield from enumerate(self.a_cells)

    @cached_property
    def results(self) -> tuple[tuple[int, Cells], ...]:
        """(CTA, cells) of D that are written, and read before that with `accumulate`."""
        found = []
        for cta, cells in enumerate(self.d_cells):
            enabled = self.mma.enabled(cta)
            found.append((cta, cells if enabled is None else cells[enabled]))
        return tuple(found)

    @cached_property
    def _places(self) -> "tuple[Cells | Rectangle, ...]":
        return tuple(Rectangle.of(cells) for cells in self.d_cells)

    def run(self, shared: Sequence[Bytes], tensors: Sequence[TensorMemory]) -> None:
        """Multiply: `shared` and `tensors` are the memories of each CTA that takes part."""
        what = self.mma.descriptor
        parts: dict[tuple[int, str], Floats] = {}
        for one in self.shared:
            format = what.a if one.matrix == "a" else what.b
            parts[one.cta, one.matrix] = read_shared(shared[one.cta], one.addresses, format, self.mma._slot(format))
        b = np.concatenate([parts[cta, "b"] for cta in range(self.mma.group)])
        for cta, cells in enumerate(self.d_cells):
            tensor = tensors[cta]
            a = self._from_tensor(tensor.data[self.a_cells[cta]]) if self.a_cells else parts[cta, "a"]
            scaled = b
            if self.scale_cells:
                to_a, to_b = self.scale_cells[cta]
                a = a * self._factors(tensor.data[to_a], what.scale_a)
                scaled = b * self._factors(tensor.data[to_b], what.scale_b)
            place = self._places[cta]
            result = multiply(self.mma, a, scaled, tensor.read(place) if self.accumulate else None)
            enabled = self.mma.enabled(cta)
            if enabled is None:
                tensor.write(place, result)
            else:
                tensor.write(cells[enabled], result[enabled])
            if self.mma.shift:
                shift_down(tensor, int(self.a_cells[cta].flat[0]) % COLUMNS)

    def _from_tensor(self, cells: Words) -> Floats:
        format = self.mma.descriptor.a
        if BITS[format] < self.mma._slot(format):
            codes: NDArray[Any] = cells.view(np.uint8) >> np.uint8(NARROW[BITS[format]]) & np.uint8(
                (1 << BITS[format]) - 1
            )
        elif BITS[format] == 4:
            bytes_ = cells.view(np.uint8)
            pairs = np.stack((bytes_ & np.uint8(0xF), bytes_ >> np.uint8(4)), axis=-1)
            codes = pairs.reshape(*bytes_.shape[:-1], -1)
        else:
            codes = cells.view(f"<u{BITS[format] // 8}")
        values = decode(codes, format)
        return values[0] if len(values) == 1 else values

    def _factors(self, cells: Words, first: int) -> Floats:
        """[rows, K] of the factors in cells [copies, rows]."""
        if (cells[1:] != cells[0]).any():
            row = int(np.flatnonzero((cells[1:] != cells[0]).any(axis=0))[0])
            raise TensorMemoryError(f"scale factors of row {row} differ between the quarters of tensor memory")
        vector, k = self.mma.vector, self.mma.descriptor.k
        codes = np.ascontiguousarray(cells[0]).view(np.uint8).reshape(-1, 4)[:, first : first + vector]
        return np.repeat(FORMATS[self.mma.descriptor.scale].decode(codes), k // vector, axis=1)


# tcgen05.cp and tcgen05.shift


@lru_cache(maxsize=16)
def copied(shape: str, multicast: str) -> Pattern:
    """Cells that tcgen05.cp writes: [copies, rows, 32-bit columns]."""
    rows, bits = (int(one) for one in shape.removesuffix("b").split("x"))
    row, column = np.arange(rows)[None, :, None], np.arange(bits // 32)[None, None, :]
    if shape == "4x256b":
        return Pattern.of(row * 32, column)
    copy = np.arange(LANES // rows)[:, None, None]
    if multicast == "warpx2::01_23":
        # Both quarters of a half get the same 32 rows.
        return Pattern.of(row // 32 * 64 + row % 32 + copy * 32, column, aligned=128)
    return Pattern.of(row + copy * rows, column, aligned=128)


@dataclass(frozen=True, eq=False)
class TensorCopy:
    """A tcgen05.cp with its places.

    Attributes:
        shared: what each CTA reads, elements of 32 bits, or of 8 from narrow ones.
        cells: by CTA, what is written: [copies, rows, columns].
        width: bits of the elements in shared memory: 4 or 6 where they are widened to bytes.
    """

    shared: tuple[SharedOperand, ...]
    cells: tuple[Cells, ...]
    width: int

    @classmethod
    def place(cls, instr: Instr, tensors: Sequence[TensorMemory], address: int, descriptor: int) -> "TensorCopy":
        """From an instruction of the form tcgen05.cp.

        Args:
            tensors: tensor memory of each CTA that takes part; each copies from its own shared memory.
            address: in tensor memory.
            descriptor: the matrix descriptor's 64 bits.

        Raises:
            TensorMemoryError, DescriptorError, Unsupported: as `TensorMemory.place` and `shared_operand`.
        """
        op = instr.op
        if bool(op["to"]) != bool(op["from"]):
            raise DescriptorError("tcgen05.cp widens with both formats or with none")
        width = {None: 32, "b4x16_p64": 4, "b6x16_p32": 6}[op["from"]]
        pattern = copied(str(op["shape"]), op["multicast"] or "")
        _, rows, columns = pattern.offsets.shape
        slot, elements = (32, columns) if width == 32 else (8, columns * 4)
        return cls(
            tuple(
                shared_operand(cta, "source", rows, elements, descriptor, width, True, slot)
                for cta in range(len(tensors))
            ),
            tuple(one.place(pattern, address) for one in tensors),
            width,
        )

    def run(self, shared: Sequence[Bytes], tensors: Sequence[TensorMemory]) -> None:
        for source, cells in zip(self.shared, self.cells, strict=True):
            memory = shared[source.cta]
            if self.width == 32:
                words = memory.view(np.uint32)[source.addresses >> 2]
            else:
                codes = padded_codes(memory, source.addresses, self.width)
                words = (codes << np.uint8(NARROW[self.width])).view(np.uint32)
            tensors[source.cta].write(cells, np.broadcast_to(words, cells.shape))


def shifted(tensor: TensorMemory, address: int) -> Cells:
    """Cells that tcgen05.shift.down reads and writes, [128, 8]; raises as TensorMemory.place."""
    lane, _ = split_address(address)
    if lane % QUARTER:
        raise TensorMemoryError(f"{name_address(address)}: tcgen05.shift wants a lane that is a multiple of {QUARTER}")
    if lane:
        raise Unsupported(f"tcgen05.shift from lane {lane} on")
    return tensor.place(Pattern.of(np.arange(LANES)[:, None], np.arange(8)[None, :]), address)


def shift_down(tensor: TensorMemory, column: int) -> None:
    """Eight columns move by a lane: each quarter's lanes take the next one's cells, the last keeps its own."""
    for array in (tensor.data, tensor.written):
        quarters = array.reshape(LANES // QUARTER, QUARTER, COLUMNS)[:, :, column : column + 8]
        quarters[:, :-1] = quarters[:, 1:].copy()
