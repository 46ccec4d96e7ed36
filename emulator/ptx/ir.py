# SPDX-License-Identifier: Apache-2.0
"""The program as the emulator sees it: modules, functions, instructions, operands. All of it is immutable.

Names are unique within a function: what a nested `{ }` declares carries the scope's number, as in `P1$3`.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from emulator.ptx.grammar import Op

BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "b128": 128}
BITS |= {f"{kind}{bits}": bits for kind in "us" for bits in (8, 16, 32, 64)}
BITS |= {f"f{bits}": bits for bits in (16, 32, 64)} | {
    "f16x2": 32,
    "bf16": 16,
    "bf16x2": 32,
    "f32x2": 64,
    "b1024": 1024,
}


@dataclass(frozen=True, slots=True)
class Reg:
    """A register; `type` as declared: pred, b16, b32, b64, b128, f32, ..."""

    name: str
    type: str

    @property
    def bits(self) -> int:
        return BITS[self.type]


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant (ISA 4.5).

    Attributes:
        value: of an integer, as written with its sign; of a float, its bits.
        kind: int; f32 for `0f` and f64 for `0d` and decimals.
    """

    value: int
    kind: Literal["int", "f32", "f64"] = "int"

    def bits(self, width: int) -> int:
        """The pattern in a register of `width` bits; a float of the other size is converted, as the ISA asks."""
        if self.kind == "int":
            return self.value & ((1 << width) - 1)
        if width == BITS[self.kind]:
            return self.value
        if width == 32:
            return int(struct.unpack("<I", struct.pack("<f", self.float()))[0])
        if width == 64:
            return int(struct.unpack("<Q", struct.pack("<d", self.float()))[0])
        raise ValueError(f"a {self.kind} constant for {width} bits")

    def float(self) -> float:
        """The number that a float constant stands for."""
        code, whole = ("<f", "<I") if self.kind == "f32" else ("<d", "<Q")
        return float(struct.unpack(code, struct.pack(whole, self.value))[0])


@dataclass(frozen=True, slots=True)
class Special:
    """A special register (ISA 10), such as %tid with component x; None where it has none."""

    name: str
    component: str | None = None


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable or a function, plus `offset` bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, in bytes; without a base the offset is the address."""

    base: "Reg | Symbol | None"
    offset: int = 0


@dataclass(frozen=True, slots=True)
class TensorAddress:
    """`[map, {coordinates}]`: a tensor map and the box in it, innermost dimension first."""

    map: Address
    coordinates: "tuple[Reg | Imm, ...]"


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: nobody wants this result."""


@dataclass(frozen=True, slots=True)
class Not:
    """`!p`."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`: two destinations, the second a predicate."""

    first: "Reg | Sink"
    second: "Reg | Sink"


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b, ...}`."""

    items: "tuple[Reg | Imm | Sink | Symbol | Special, ...]"


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the same function, a table of such places, or a prototype."""

    name: str


@dataclass(frozen=True, slots=True)
class Names:
    """`(a, b)` of a call: parameters, by name, or registers."""

    items: "tuple[Reg | Symbol | Imm, ...]"


Operand: TypeAlias = Reg | Imm | Special | Symbol | Address | TensorAddress | Sink | Not | Pair | Vec | Label | Names


@dataclass(frozen=True, slots=True)
class Loc:
    """A place in the source that the kernel was made from (ISA 11.5.2).

    Attributes:
        file: key of Module.files.
        function: that was inlined here, if it was.
        inlined_at: where.
    """

    file: int
    line: int
    column: int
    function: str | None = None
    inlined_at: "Loc | None" = None


@dataclass(frozen=True, slots=True)
class Guard:
    """`@p` or `@!p`."""

    reg: Reg
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Instr:
    """One instruction.

    Attributes:
        args: one for each role of `op.form`, None where it is absent.
        line: in the PTX text; two instructions are equal on different lines.
    """

    op: Op
    args: tuple[Operand | None, ...]
    guard: Guard | None = None
    loc: Loc | None = None
    line: int = field(default=0, compare=False)

    def __getitem__(self, role: str) -> Operand | None:
        """The operand with this role's name; KeyError if the form has no such role."""
        return self.args[self.op.form.place[role]]


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable or a parameter (ISA 5.4).

    Attributes:
        space: global, const, shared, local or param.
        align: bytes.
        size: bytes; 0 for an array without a length, such as dynamic shared memory.
        offset: bytes into the parameter block; of kernel parameters only.
        linkage: extern, visible, weak, common, or nothing.
        initial: bytes, or addresses of symbols: (offset, symbol, generic); the rest is zero.
    """

    name: str
    space: str
    type: str
    align: int
    size: int
    offset: int = 0
    linkage: str = ""
    dims: tuple[int, ...] = ()
    initial: bytes = b""
    relocations: tuple[tuple[int, Symbol, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Registers:
    """A declaration: one register, or `count` of them, named prefix0, prefix1, ..."""

    prefix: str
    type: str
    count: int | None = None


@dataclass(frozen=True)
class Function:
    """A kernel (`.entry`) or a device function (`.func`), with a body or only declared.

    Attributes:
        directives: performance and launch directives by name, without the dot: reqntid -> (384, 1, 1).
        labels: index into `code` of the instruction that a label stands before; len(code) at the end.
        tables: targets of indirect branches, by the table's label.
        code: None if there is only a declaration.
    """

    name: str
    entry: bool
    params: tuple[Variable, ...]
    returns: tuple[Variable, ...] = ()
    linkage: str = ""
    directives: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    registers: tuple[Registers, ...] = ()
    variables: tuple[Variable, ...] = ()
    labels: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    code: tuple[Instr, ...] | None = None
    line: int = field(default=0, compare=False)

    @cached_property
    def param_bytes(self) -> int:
        """Of a kernel's parameter block."""
        return max((param.offset + param.size for param in self.params), default=0)

    @cached_property
    def symbols(self) -> dict[str, Variable]:
        """Parameters and variables by name."""
        return {variable.name: variable for variable in (*self.params, *self.returns, *self.variables)}


@dataclass(frozen=True)
class Module:
    """A PTX text.

    Attributes:
        version: of the ISA, such as (9, 3).
        target: such as sm_100a, then options.
        files: source files by the number that Loc uses.
    """

    version: tuple[int, int]
    target: tuple[str, ...]
    address_size: int
    variables: tuple[Variable, ...]
    functions: tuple[Function, ...]
    files: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def symbols(self) -> dict[str, Variable]:
        return {variable.name: variable for variable in self.variables}

    @cached_property
    def entries(self) -> dict[str, Function]:
        return {function.name: function for function in self.functions if function.entry}

    @cached_property
    def callees(self) -> dict[str, Function]:
        """Device functions by name; the definition wins over a declaration."""
        ordered = sorted((f for f in self.functions if not f.entry), key=lambda f: f.code is not None)
        return {function.name: function for function in ordered}

    def where(self, instr: Instr) -> str:
        """`file.py:12, inlined at other.py:34` for messages; empty where the PTX says nothing."""
        parts, loc = [], instr.loc
        while loc is not None:
            parts.append(f"{self.files.get(loc.file, f'file {loc.file}')}:{loc.line}")
            loc = loc.inlined_at
        return ", inlined at ".join(parts)
