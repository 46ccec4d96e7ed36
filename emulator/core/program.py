# SPDX-License-Identifier: Apache-2.0
"""A parsed kernel encoded for the interpreter: rows for registers and constants, one record for each instruction.

Addresses (PTX ISA 9.2, 5.1 and 9.7.9.19): generic addresses of shared memory lie at SHARED_BASE, where a CTA's rank in
its cluster takes the bits from 24 on; those of local memory at LOCAL_BASE, of kernel parameters at PARAM_BASE unless
the machine keeps them elsewhere; global and constant memory is at its own addresses.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emulator.core.library import INSTR, LANES, operations
from emulator.core.recipes import CLOCK, GUARD_NOT, NOT_SOURCE, Recipe, recipe
from emulator.errors import Unsupported
from emulator.ptx import special
from emulator.ptx.flow import BRANCHES, graph, spinning
from emulator.ptx.grammar import Op, Role
from emulator.ptx.ir import (
    BITS,
    Address,
    Function,
    Imm,
    Instr,
    Label,
    Module,
    Names,
    Not,
    Operand,
    Pair,
    Reg,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vec,
)
from emulator.ptx.overtaken import Overtaken, overtaken

SHARED_BASE = 1 << 60
LOCAL_BASE = 1 << 61
PARAM_BASE = 1 << 62
RANK_SHIFT = 24

NONE = 0xFFFFFFFF
FULL = 0xFFFFFFFF
# Rows as in rows.h; the sink has room for 128 bits.
ROW_ZERO, ROW_SINK, ROW_CLOCK, ROW_CARRY, FIRST_ROW = 0, 1, 5, 9, 10
CLOCKS = {
    "%clock": ROW_CLOCK,
    "%clock_hi": ROW_CLOCK + 1,
    "%clock64": ROW_CLOCK + 2,
    "%globaltimer": ROW_CLOCK + 2,
    "%globaltimer_lo": ROW_CLOCK,
    "%globaltimer_hi": ROW_CLOCK + 1,
}
SOURCES, MOST_SOURCES = 2, 4
RESULTS = (0, 1, 6, 7)
STORE_ADDRESS = 6


def width_of(op: Op, role: Role) -> int:
    """Bits of an operand; 0 where its type does not say."""
    wider = op["mode"] == "wide" and role.name in ("d", "c")
    return BITS.get(op.type_of(role), 0) * (2 if wider else 1)


def rows_of(bits: int) -> int:
    """How many rows a register of that width has."""
    return max(1, bits // 32)


class Program:
    """A kernel, ready to run; immutable, shared by all warps.

    Args:
        arch: such as sm_100a; the module's own target if not given.

    Attributes:
        instrs: the function's code.
        rows: in a warp's register file.
        traps: opcodes that the interpreter hands to the machine.
        globals: variables in global and constant memory; the machine gives them addresses.
        shared: byte offset of each variable in shared memory; those without a size lie behind the others.
        shared_static: bytes of shared memory before the dynamic part.
        locals: byte offset of each local variable and of each parameter of a call, in a lane's local memory.
        local_bytes: of a lane.
        labels: index of the instruction behind each.

    Raises:
        Unsupported: an operand that the interpreter cannot reach.
    """

    def __init__(self, module: Module, function: Function, *, arch: str | None = None) -> None:
        if function.code is None:
            raise ValueError(f"{function.name} has no body")
        self.module = module
        self.function = function
        self.arch = arch or module.target[0]
        self.instrs: tuple[Instr, ...] = function.code
        self.labels = function.labels
        self.parameters = {variable.name: variable for variable in function.params}
        self.globals = tuple(v for v in module.variables if v.space in ("global", "const"))
        self.shared, self.shared_static, self._dynamic_align = _shared_layout(module, function)
        self.locals, self.local_bytes = _layout(v for v in function.variables if v.space in ("local", "param"))
        self.rows = FIRST_ROW
        self.names: dict[int, str] = {}
        self.constants: dict[tuple[int, int], int] = {}
        self.specials: dict[Special, int] = {}
        self.symbols: dict[tuple[str, int, int], int] = {}
        self._registers: dict[str, int] = {}
        self._widths = {ROW_ZERO: 32, ROW_SINK: 128, ROW_CLOCK: 32, ROW_CLOCK + 1: 32, ROW_CLOCK + 2: 64, ROW_CARRY: 32}
        self._recipes: dict[tuple[str, str], Recipe | None] = {}
        self._tables: list[int] = []
        self._encode()

    def __repr__(self) -> str:
        return f"Program({self.function.name}, {len(self.instrs)} instructions, {self.rows} rows)"

    def row(self, register: str) -> int:
        """A register's first row; KeyError if the code does not name it."""
        return self._registers[register]

    @property
    def registers(self) -> frozenset[str]:
        """Names of those that have a row."""
        return frozenset(self._registers)

    def is_trap(self, index: int) -> bool:
        """Whether the machine executes an instruction always; a generic load or store may need it as well."""
        return bool(self.code["code"][index] == operations()["trap"])

    def shared_layout(self, dynamic_bytes: int) -> tuple[Mapping[str, int], int]:
        """Offsets of the variables in shared memory, and its size with so many dynamic bytes."""
        return self.shared, self.shared_static + dynamic_bytes

    @cached_property
    def constant_rows(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """A register file [rows, 32] with the constants in it, and which lanes of each row hold something."""
        rows = np.zeros((self.rows, LANES), np.uint32)
        init = np.zeros(self.rows, np.uint32)
        init[[ROW_ZERO, ROW_CLOCK, ROW_CLOCK + 1, ROW_CLOCK + 2]] = FULL
        for (bits, width), row in self.constants.items():
            fill(rows, row, bits, width)
            init[row] = FULL
        return rows, init

    @cached_property
    def widths(self) -> NDArray[np.uint8]:
        """uint8[rows]: at a register's or constant's first row, its bits."""
        widths = np.zeros(self.rows, np.uint8)
        widths[list(self._widths)] = list(self._widths.values())
        return widths

    @cached_property
    def overtaken(self) -> Overtaken:
        """Loads from shared memory that may still be under way when the warp arrives somewhere."""
        return overtaken(self.function)

    @cached_property
    def spinning(self) -> frozenset[int]:
        """Waits that their own loops repeat until they succeed; others may be asked once, and not be believed."""

        def is_quiet(instr: Instr) -> bool:
            return instr.op.name in BRANCHES or instr.op.name == "nanosleep" or recipe(instr.op) is not None

        return spinning(graph(self.function), is_quiet)

    # Encoding.

    def _encode(self) -> None:
        self.traps: set[str] = set()
        count = len(self.instrs)
        self.code = np.zeros(count + 1, INSTR)
        records = [self._instr(instr) for instr in self.instrs]
        # Behind the last instruction a thread ends (ISA 9.7.12).
        records.append((operations()["end"], 0, NONE, [ROW_SINK, ROW_SINK, 0, 0, 0, 0, ROW_SINK, ROW_SINK], (0, 0)))
        for field, column in zip(("code", "flags", "guard", "args", "extra"), zip(*records, strict=True), strict=True):
            self.code[field] = column
        self.tables = np.array(self._tables or [0], np.uint32)

    def _instr(self, instr: Instr) -> tuple[int, int, int, list[int], tuple[int, int]]:
        args = [ROW_SINK, ROW_SINK, 0, 0, 0, 0, ROW_SINK, ROW_SINK]
        guard = NONE if instr.guard is None else self._register(instr.guard.reg)
        made = self._made(instr, args)
        if made is None:
            made = Recipe("trap")
            args = [ROW_SINK, ROW_SINK, 0, 0, 0, 0, ROW_SINK, ROW_SINK]
            self.traps.add(instr.op.name)
            for operand in instr.args:
                self._meet(operand)
        flags = made.flags | (GUARD_NOT if instr.guard is not None and instr.guard.negated else 0)
        return operations()[made.name], flags, guard, args, made.extra

    def _made(self, instr: Instr, args: list[int]) -> Recipe | None:
        """What an instruction is encoded as; None for a trap. Fills `args` with rows."""
        op = instr.op
        by_hand = BY_HAND.get(op.form.id)
        if by_hand is not None:
            return by_hand(self, instr, args)
        key = (op.text, op.form.id)
        if key not in self._recipes:
            found = self._recipes[key] = recipe(op)
            if found is not None and found.name not in operations():
                raise Unsupported(f"{op.text}, on line {instr.line}")
        made = self._recipes[key]
        if made is None:
            return None
        return self._place(instr, made, args)

    def _place(self, instr: Instr, made: Recipe, args: list[int]) -> Recipe:
        """Operands by their roles: destinations first, sources in their order."""
        op, flags, extra = instr.op, made.flags, made.extra
        source = SOURCES
        for role, operand in zip(op.form.roles, instr.args, strict=True):
            kind = op.type_of(role)
            if operand is None:
                continue
            if role.access != "r":
                self._destination(operand, args)
            elif kind == "imm":
                assert isinstance(operand, Imm)
                extra = (operand.value & 0xFFFFFFFF, extra[1])
            else:
                if isinstance(operand, Not):
                    flags |= NOT_SOURCE << (source - SOURCES)
                if isinstance(operand, Special) and operand.name in CLOCKS:
                    flags |= CLOCK
                if role.name == made.members:
                    extra = (extra[0], source)
                args[source] = self._source(operand, width_of(op, role) or 32)
                source += 1
        name = made.name
        if op.name in ("min", "max") and "c" in op.form.place and instr["c"] is not None:
            name = name.replace("_", "3_")
        if name.startswith("convert_") and op.name == "cvt":
            extra = (extra[0] | self._conversion(instr), extra[1])
        elif op.form.id in CARRIES:
            args[1] = ROW_CARRY if op["cc"] else ROW_SINK
            first = self._source(Imm(1), 32) if op.name == "sub" else ROW_ZERO
            args[SOURCES + 3] = ROW_CARRY if op.name in ("addc", "subc", "madc") else first
        else:
            self._check_widths(instr)
        return made._replace(name=name, flags=flags, extra=extra)

    def _check_widths(self, instr: Instr) -> None:
        for role, operand in zip(instr.op.form.roles, instr.args, strict=True):
            width = width_of(instr.op, role)
            for one in (operand.first, operand.second) if isinstance(operand, Pair) else (operand,):
                fits = (
                    not isinstance(one, Reg) or one.type == "pred" or not width or rows_of(one.bits) == rows_of(width)
                )
                if isinstance(one, Reg) and not fits:
                    raise Unsupported(f"{instr.op.text} with {one.name}, a .{one.type} register, on line {instr.line}")

    def _conversion(self, instr: Instr) -> int:
        """The part of a conversion's first constant that its registers decide."""
        to, of = instr["d"], instr["a"]
        bits = to.bits if isinstance(to, Reg) else 32
        wide = isinstance(of, Reg) and of.bits == 64 and BITS.get(instr.op["atype"] or "", 32) < 64
        dtype = instr.op["dtype"] or ""
        if dtype[0] not in "us" and (bits == 64) != (dtype == "f64"):
            raise Unsupported(f"{instr.op.text} to a register of {bits} bits, on line {instr.line}")
        return bits << 16 | int(wide) << 24

    def _register(self, reg: Reg) -> int:
        row = self._registers.get(reg.name)
        if row is None:
            row = self._registers[reg.name] = self._new(reg.bits)
            self.names[row] = reg.name
        return row

    def _new(self, bits: int) -> int:
        row, self.rows = self.rows, self.rows + rows_of(bits)
        self._widths[row] = bits
        return row

    def _destination(self, operand: Operand, args: list[int]) -> None:
        if isinstance(operand, Pair):
            for slot, part in zip(RESULTS, (operand.first, operand.second), strict=False):
                args[slot] = self._register(part) if isinstance(part, Reg) else ROW_SINK
        elif isinstance(operand, Reg):
            args[0] = self._register(operand)

    def _source(self, operand: Operand, width: int) -> int:
        """The row of a source of that many bits."""
        if isinstance(operand, Reg):
            return self._register(operand)
        if isinstance(operand, Not):
            return self._register(operand.reg)
        if isinstance(operand, Imm):
            bits = int(operand.value != 0) if width == 1 else operand.bits(width)
            return self._cached(self.constants, (bits, width), width)
        if isinstance(operand, Special):
            clock = CLOCKS.get(operand.name)
            kind = special.SCALAR.get(operand.name) or special.VECTOR[operand.name]
            return clock if clock is not None else self._cached(self.specials, operand, BITS[kind])
        if isinstance(operand, Symbol):
            return self._cached(self.symbols, (operand.name, operand.offset, width), width)
        raise Unsupported(f"{operand} as an operand")

    def _cached(self, table: dict, key: object, width: int) -> int:
        row = table.get(key)
        if row is None:
            row = table[key] = self._new(width)
        return int(row)

    def _meet(self, operand: Operand | None) -> None:
        """Rows for the registers of an instruction that the machine executes."""
        if isinstance(operand, Reg):
            self._register(operand)
        elif isinstance(operand, Not):
            self._register(operand.reg)
        elif isinstance(operand, Pair):
            self._meet(operand.first)
            self._meet(operand.second)
        elif isinstance(operand, Vec | Names):
            for item in operand.items:
                self._meet(item)
        elif isinstance(operand, Address):
            self._meet(operand.base)
        elif isinstance(operand, TensorAddress):
            self._meet(operand.map)
            for item in operand.coordinates:
                self._meet(item)

    # Instructions whose operands do not follow from their roles.

    def _mov(self, instr: Instr, args: list[int]) -> Recipe | None:
        to, of, kind = instr["d"], instr["a"], instr.op["type"] or ""
        if isinstance(to, Vec) and isinstance(of, Vec):
            return self._mov_vector(to, of, BITS[kind], args)
        return self._place(instr, Recipe("mov_pred" if kind == "pred" else f"mov_b{max(16, BITS[kind])}"), args)

    def _mov_vector(self, to: Vec, of: Vec, width: int, args: list[int]) -> Recipe:
        for slot, item in zip(RESULTS, to.items, strict=False):
            args[slot] = self._register(item) if isinstance(item, Reg) else ROW_SINK
        for place, item in enumerate(of.items):
            args[SOURCES + place] = self._source(item, width)
        return Recipe(f"mov_vector_b{max(32, width)}", 0, (len(to.items), 0))

    def _pack(self, instr: Instr, args: list[int]) -> Recipe | None:
        to, parts, whole = instr["d"], instr["a"], BITS[instr.op["type"] or ""]
        assert isinstance(parts, Vec)
        width = whole // len(parts.items)
        name = f"pack_{width}x{len(parts.items)}"
        if name not in operations() or not isinstance(to, Reg):
            return None
        args[0] = self._register(to)
        for place, item in enumerate(parts.items):
            args[SOURCES + place] = self._source(item, width)
        return Recipe(name)

    def _unpack(self, instr: Instr, args: list[int]) -> Recipe | None:
        parts, of, whole = instr["d"], instr["a"], BITS[instr.op["type"] or ""]
        assert isinstance(parts, Vec)
        assert of is not None
        name = f"unpack_{whole // len(parts.items)}x{len(parts.items)}"
        if name not in operations():
            return None
        args[SOURCES] = self._source(of, whole)
        for slot, item in zip(RESULTS, parts.items, strict=False):
            args[slot] = self._register(item) if isinstance(item, Reg) else ROW_SINK
        return Recipe(name)

    def _bra(self, instr: Instr, args: list[int]) -> Recipe:
        target = instr["target"]
        assert isinstance(target, Label)
        return Recipe("branch", 0, (self.labels[target.name], 0))

    def _brx(self, instr: Instr, args: list[int]) -> Recipe:
        table, index = instr["targets"], instr["index"]
        assert isinstance(table, Label)
        assert index is not None
        args[SOURCES] = self._source(index, 32)
        targets = [self.labels[name] for name in self.function.tables[table.name]]
        start = len(self._tables)
        self._tables += targets
        return Recipe("branch_table", 0, (start, len(targets)))

    def _end(self, instr: Instr, args: list[int]) -> Recipe:
        return Recipe("end")

    def _load(self, instr: Instr, args: list[int]) -> Recipe | None:
        return self._access(instr, instr["d"], args, store=False)

    def _store(self, instr: Instr, args: list[int]) -> Recipe | None:
        return self._access(instr, instr["b"], args, store=True)

    def _access(self, instr: Instr, values: Operand | None, args: list[int], *, store: bool) -> Recipe | None:
        """Loads and stores of a warp's own memories; all others are the machine's."""
        op, address = instr.op, instr["a"]
        assert isinstance(address, Address)
        kind = self._kind_of_access(op, address, store)
        items = values.items if isinstance(values, Vec) else (values,)
        element = BITS[op["type"] or ""]
        offset = address.offset
        if kind is None or element > 64 or len(items) > MOST_SOURCES or not -(1 << 31) <= offset < 1 << 31:
            return None
        base = address.base
        row = ROW_ZERO if base is None else self._source(base, 64)
        wide = 0 if isinstance(base, Reg) and base.bits == 32 else 1
        registers = {item.bits for item in items if isinstance(item, Reg)}
        bits = max(registers, default=64 if element == 64 else 32)
        for place, item in enumerate(items):
            assert item is not None
            if store:
                args[SOURCES + place] = self._source(item, element)
            elif isinstance(item, Reg):
                args[RESULTS[place]] = self._register(item)
        if store and registers and len({rows_of(one) for one in registers} | {rows_of(element)}) > 1:
            return None
        args[STORE_ADDRESS if store else SOURCES] = row
        signed = (op["type"] or "")[0] == "s"
        shape = element // 8 | int(signed) << 8 | len(items) << 12 | bits << 16 | wide << 24
        return Recipe(kind, 0, (offset & 0xFFFFFFFF, shape))

    def _kind_of_access(self, op: Op, address: Address, store: bool) -> str | None:
        verb, space = "store" if store else "load", op["space"]
        if op["sem"] or op["mmio"]:
            return None
        of_call = isinstance(address.base, Symbol) and address.base.name in self.locals
        if space == "local" or (space in ("param", "param::func") and of_call):
            return f"{verb}_local"
        if space in ("param", "param::entry"):
            return None if store else "load_param"
        return f"{verb}_generic" if space is None else None


BY_HAND = {
    "mov": Program._mov,
    "mov#pack": Program._pack,
    "mov#unpack": Program._unpack,
    "bra": Program._bra,
    "brx.idx": Program._brx,
    "exit": Program._end,
    "ret": Program._end,
    "ld": Program._load,
    "st": Program._store,
}
CARRIES = frozenset({"add#carry", "addc", "sub#carry", "subc", "mad#carry", "madc"})


def fill(rows: NDArray[np.uint32], row: int, value: "int | NDArray[np.unsignedinteger]", width: int) -> None:
    """Put a value, or one for each lane, into a register's rows."""
    if width <= 32:
        rows[row] = value
    elif width == 64:
        rows[row : row + 2].reshape(-1).view(np.uint64)[:] = value
    else:
        pairs = rows[row : row + 4].reshape(-1).view(np.uint64).reshape(LANES, 2)
        pairs[:, 0], pairs[:, 1] = int(value) & (1 << 64) - 1, int(value) >> 64


def _layout(variables: Iterable[Variable], start: int = 0) -> tuple[dict[str, int], int]:
    """Offsets of variables one after another, each at its alignment, and the end of the last, a multiple of 16."""
    offsets: dict[str, int] = {}
    at = start
    for variable in variables:
        at = -(-at // variable.align) * variable.align
        offsets[variable.name] = at
        at += variable.size
    return offsets, -(-at // 16) * 16


def _shared_layout(module: Module, function: Function) -> tuple[dict[str, int], int, int]:
    """Offsets in shared memory, the bytes before the dynamic part, and the alignment of that."""
    found = [v for v in (*module.variables, *function.variables) if v.space == "shared"]
    offsets, end = _layout(v for v in found if v.size)
    dynamic = [v for v in found if not v.size]
    align = max((v.align for v in dynamic), default=1)
    start = -(-end // align) * align
    return offsets | {v.name: start for v in dynamic}, start, align
