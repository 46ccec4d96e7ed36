# SPDX-License-Identifier: Apache-2.0
"""Mutants of a kernel: its PTX with one mistake of the kind that people make with asynchronous hardware.

A mutant drops a wait, a fence, an arrival or an election; changes a count, a parity, a number of bytes, a group, a
barrier, a lane quarter, a coordinate, a rank, a multicast, a CTA group or a field of a descriptor; weakens an order;
moves an instruction behind the next one that it has to do with; or swizzles a tensor map differently. Fields of
descriptors: PTX ISA 9.2, 9.7.15.5.1.2 (wgmma), 9.7.16.4 (tcgen05).
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from emulator.host.launch import Launch, Parameter
from emulator.ptx import parse
from emulator.ptx.ir import Address, Function, Imm, Instr, Module, Operand, Reg, TensorAddress
from emulator.ptx.printer import show, show_instr

# What may be dropped: only synchronization, the rest changes values and is seen by any test.
DROPPED = re.compile(
    r"(fence\.(proxy|mbarrier|acq|sc)|membar|mbarrier\.(arrive|expect|init)|bar\.sync|barrier\.(sync|arrive|cluster)"
    r"|bar\.(arrive|warp)|cp\.async\.(bulk\.)?(commit|wait)|cp\.async\.wait|wgmma\.(fence|commit|wait)"
    r"|tcgen05\.(wait|commit|fence|dealloc|relinquish)|setmaxnreg|cp\.async\.mbarrier)"
)
WAITS = ("mbarrier.try_wait", "mbarrier.try_wait.parity")
GROUP_WAITS = ("cp.async.wait_group", "cp.async.bulk.wait_group", "wgmma.wait_group")
NAMED = ("bar.sync", "barrier.sync", "bar.arrive", "barrier.arrive")
# Order matters to these, so moving one behind the next of ORDERED is a mistake.
MOVED = re.compile(
    r"(fence\.proxy|mbarrier\.(arrive|try_wait)|wgmma\.(fence|commit|wait)|tcgen05\.(wait|commit|ld|fence)|bar\.sync"
    r"|cp\.async|barrier\.cluster|st\.async)"
)
ORDERED = re.compile(
    r"(ld\.shared|st\.shared|ld\.global|st\.global|ldmatrix|stmatrix|fence|mbarrier|wgmma|tcgen05|bar\.|barrier|cp\."
    r"|st\.async|red|atom)"
)
ENDS = ("bra", "brx.idx", "ret", "exit", "trap")
QUARTER = 32 << 16  # from one warp's lanes of tensor memory to the next one's
COLUMNS = 16
MBARRIER = 8  # bytes
ROW = 128 >> 4  # a row of 128 bytes in a descriptor's start address
# Bits of a matrix descriptor's swizzle mode that make another mode of 128 bytes: none or a wrong one, and 64 bytes.
SWIZZLES = {90: {"none": 1 << 62, "64 bytes": 3 << 62}, 100: {"a reserved one": 1 << 61, "64 bytes": 3 << 62}}
FLIPS = {
    "M": 1 << 27,
    "N": 1 << 20,
    "transposition of A": 1 << 15,
    "transposition of B": 1 << 16,
    "format of A": 1 << 7,
    "format of D": 1 << 4,
    "sign of A": 1 << 13,
}


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        kind: of mistake.
        what: in words, with the instruction and its place in the PTX and the source of the kernel without a mistake.
        instruction: its name; empty for what is not in the code.
        apply: makes it in a launch.
    """

    kind: str
    what: str
    instruction: str
    apply: Callable[[Launch], Launch]

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


# Kind, words, what stands there instead of so many instructions.
Change = tuple[str, str, tuple[Instr, ...], int]


class Source:
    """A function whose instructions are changed."""

    def __init__(self, module: Module, function: Function, arch: int) -> None:
        self.module, self.function, self.arch = module, function, arch
        self.code = function.code or ()
        self.starts = set(function.labels.values())
        self.sets: dict[Operand, list[Instr]] = defaultdict(list)
        for instr in self.code:
            for role, arg in zip(instr.op.form.roles, instr.args, strict=True):
                if role.access != "r" and isinstance(arg, Reg):
                    self.sets[arg].append(instr)

    def constant(self, operand: Operand | None) -> int | None:
        """The value of a constant, or of a register that is set once, to one."""
        if isinstance(operand, Imm):
            return operand.value
        sets = self.sets.get(operand, []) if isinstance(operand, Reg) else []
        if len(sets) == 1 and sets[0].op.name == "mov" and isinstance(sets[0]["a"], Imm):
            return sets[0]["a"].value
        return None

    def parsed(self, text: str, like: Instr) -> Instr:
        """An instruction of that text with the guard and the place of another one."""
        mark = show_instr(like)
        alone = replace(self.function, code=(like,), labels={}, tables={})
        shown = show(replace(self.module, functions=(alone,)))
        if mark not in shown:
            raise ValueError(mark)
        (made,) = parse(shown.replace(mark, text)).entries[self.function.name].code or ()
        return replace(made, guard=like.guard, loc=like.loc, line=like.line)

    def edited(self, instr: Instr, old: str, new: str) -> Instr:
        return self.parsed(show_instr(instr).replace(old, new, 1), instr)

    def around(self, instr: Instr, role: str, op: str, undo: str, amount: int) -> tuple[Instr, ...]:
        """The instruction with its operand changed by `op` (`add.s32`, ...) and an amount."""
        operand = instr[role]
        if isinstance(operand, Reg):
            return self.around_register(instr, operand, op, undo, amount)
        assert isinstance(operand, Imm)
        value = operand.value ^ amount if op.startswith("xor") else operand.value + amount
        return (with_operand(instr, role, Imm(value)),)

    def around_register(self, instr: Instr, register: Reg, op: str, undo: str, amount: int) -> tuple[Instr, ...]:
        plain = replace(instr, guard=None)
        before, after = (self.parsed(f"{one} {register.name}, {register.name}, {amount};", plain) for one in (op, undo))
        return before, instr, after

    def changes(self, at: int) -> Iterator[Change]:
        """What may be done to one instruction."""
        instr = self.code[at]
        for make in (dropped, waits, counts, barriers, places, descriptors, orders, groups):
            for kind, words, instead in make(self, instr):
                yield kind, words, instead, 1
        yield from elections(self, at)
        yield from moves(self, at)


Changed = Iterator[tuple[str, str, tuple[Instr, ...]]]


def with_operand(instr: Instr, role: str, value: Operand) -> Instr:
    args = list(instr.args)
    args[instr.op.form.place[role]] = value
    return replace(instr, args=tuple(args))


def dropped(source: Source, instr: Instr) -> Changed:
    if DROPPED.match(instr.op.text):
        yield "drop", "left out", ()
    if instr.op.name in WAITS:
        yield "drop wait", "never waits", (always_true(instr),)


def always_true(instr: Instr) -> Instr:
    """`mov.pred p, 1` in the place of a wait with the result p."""
    body = (
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k()\n{.reg .pred %p<2>;\nmov.pred %p1, 1;\n}"
    )
    (made,) = parse(body).entries["k"].code or ()
    return replace(made, args=(instr["p"], Imm(1)), guard=instr.guard, line=instr.line)


def waits(source: Source, instr: Instr) -> Changed:
    if instr.op.name in WAITS and "phase" in instr.op.form.place:
        for parity in (0, 1):
            if instr["phase"] != Imm(parity):
                yield "parity", f"waits for parity {parity}", (with_operand(instr, "phase", Imm(parity)),)
        if isinstance(instr["phase"], Reg):
            # Not undone: the register may be what the loop carries, so a copy would hide less.
            yield "parity", "waits for the other parity", source.around(instr, "phase", "xor.b32", "xor.b32", 1)
    if instr.op.name in GROUP_WAITS:
        groups = instr["n"]
        assert isinstance(groups, Imm)
        yield "group", "one group more may be left", (with_operand(instr, "n", Imm(groups.value + 1)),)


def counts(source: Source, instr: Instr) -> Changed:
    name, place = instr.op.name, instr.op.form.place
    count = source.constant(instr["count"]) if "count" in place else None
    if name == "mbarrier.init" and count is not None:
        for other in (count + 1, count - 1):
            yield "count", f"{other} arrivals, not {count}", (with_operand(instr, "count", Imm(other)),)
    if name == "mbarrier.arrive" and count is not None:
        yield "arrivals", f"{count + 1} at once, not {count}", (with_operand(instr, "count", Imm(count + 1)),)
    if "expect_tx" in instr.op.text:
        size = source.constant(instr["bytes"])
        for other in () if size is None else (size + 128, size // 2):
            yield "bytes", f"{other} bytes, not {size}", (with_operand(instr, "bytes", Imm(other)),)
    if name in NAMED and isinstance(instr["threads"], Imm):
        threads = instr["threads"].value
        for other in (threads + 32, threads - 32):
            if other > 0:
                yield "count", f"{other} threads, not {threads}", (with_operand(instr, "threads", Imm(other)),)


def barriers(source: Source, instr: Instr) -> Changed:
    place = instr.op.form.place
    if "mbar" in place and isinstance(instr["mbar"], Address):
        for further in (1, 2):
            moved = replace(instr["mbar"], offset=instr["mbar"].offset + further * MBARRIER)
            yield "wrong barrier", f"the one {further} further", (with_operand(instr, "mbar", moved),)
    if instr.op.name in NAMED and "id" in place:
        # Where all take part by the same instruction, its number is nobody else's business.
        paired = any(
            one.op.name.endswith("arrive") and one.op.name in NAMED and one["id"] == instr["id"] for one in source.code
        )
        if paired and isinstance(instr["id"], Imm):
            other = Imm((instr["id"].value + 1) % 16)
            yield "barrier id", f"barrier {other.value}", (with_operand(instr, "id", other),)


def places(source: Source, instr: Instr) -> Changed:
    """Where data comes from and goes to."""
    name = instr.op.name
    if name in ("tcgen05.ld", "tcgen05.st"):
        address = instr["a"]
        assert isinstance(address, Address)
        for kind, words, amount in (("quarter", "32 lanes", QUARTER), ("columns", f"{COLUMNS} columns", COLUMNS)):
            moved = replace(address, offset=address.offset + amount)
            yield kind, f"{words} further", (with_operand(instr, "a", moved),)
    if "map" in instr.op.form.place and isinstance(instr["map"], TensorAddress) and instr.op.text.startswith("cp."):
        box = instr["map"]
        for number, one in enumerate(box.coordinates[:2]):
            words = f"coordinate {number} is {8 if number == 0 else 1} more"
            amount = 8 if number == 0 else 1
            if isinstance(one, Imm):
                changed = (*box.coordinates[:number], Imm(one.value + amount), *box.coordinates[number + 1 :])
                yield "coordinate", words, (with_operand(instr, "map", replace(box, coordinates=changed)),)
            else:
                yield "coordinate", words, source.around_register(instr, one, "add.s32", "sub.s32", amount)
    if name == "mapa" or name.startswith("mapa."):
        role = "b" if "b" in instr.op.form.place else "rank"
        if role in instr.op.form.place and isinstance(instr[role], Imm | Reg) and instr[role] != instr.args[0]:
            yield "rank", "the neighbouring CTA", source.around(instr, role, "xor.b32", "xor.b32", 1)


def descriptors(source: Source, instr: Instr) -> Changed:
    name, place = instr.op.name, instr.op.form.place
    if name == "or" and instr.op["type"] == "b64" and isinstance(instr["b"], Imm) and instr["b"].value >> 32:
        # The constant part of a matrix descriptor.
        bits = instr["b"].value
        flips = [(f"swizzle {mode}", mask) for mode, mask in SWIZZLES[source.arch].items()]
        for words, flipped in (*flips, ("stride", 1 << 38), ("leading", 1 << 18)):
            kind = f"descriptor {words.split()[0]}"
            other = Imm(bits ^ flipped)
            yield kind, f"{words}, {bits ^ flipped:#x}, not {bits:#x}", (with_operand(instr, "b", other),)
    if name in ("tcgen05.mma", "wgmma.mma_async"):
        for role in ("a", "b"):
            if isinstance(instr[role], Reg) and instr[role].bits == 64:  # type: ignore[union-attr]
                yield "descriptor start", f"{role} a row further", source.around(instr, role, "add.s64", "sub.s64", ROW)
    if "idesc" in place:
        for words, flipped in FLIPS.items():
            yield (
                f"idesc {words}",
                f"bit {flipped.bit_length() - 1}",
                source.around(instr, "idesc", "xor.b32", "xor.b32", flipped),
            )
    if name == "wgmma.mma_async":
        for role in ("trans_a", "trans_b"):
            if role in place and isinstance(instr[role], Imm):
                yield "transposition", role, (with_operand(instr, role, Imm(1 - instr[role].value)),)  # type: ignore[union-attr]


def orders(source: Source, instr: Instr) -> Changed:
    """A weaker order than is needed."""
    text = instr.op.text
    if text.startswith("barrier.cluster.arrive") and ".relaxed" not in text:
        yield "relaxed", "releases nothing", (source.edited(instr, "arrive", "arrive.relaxed"),)
    if (
        instr.op.name == "mbarrier.arrive"
        and "sem" in {group.name for group in instr.op.form.groups}
        and not instr.op["sem"]
    ):
        yield (
            "relaxed",
            "releases nothing",
            (source.edited(instr, "mbarrier.arrive", "mbarrier.arrive.relaxed.cluster"),),
        )
    if instr.op.name in WAITS and not instr.op["sem"]:
        yield "relaxed", "acquires nothing", (source.edited(instr, instr.op.name, f"{instr.op.name}.relaxed.cluster"),)


def groups(source: Source, instr: Instr) -> Changed:
    """CTAs that take part."""
    text = instr.op.text
    if "cta_group::" in text:
        old = "cta_group::1" if "cta_group::1" in text else "cta_group::2"
        new = "cta_group::2" if old.endswith("1") else "cta_group::1"
        try:
            yield "cta group", new, (source.edited(instr, old, new),)
        except Exception:
            return
    if (
        "multicast" in {group.name for group in instr.op.form.groups}
        and instr.op["multicast"]
        and "mask" in instr.op.form.place
    ):
        mask = source.constant(instr["mask"])
        for bit in () if mask is None else range(mask.bit_length()):
            other = mask & ~(1 << bit)  # type: ignore[operator]
            if other != mask:
                yield "multicast", f"to {other:#x}, not {mask:#x}", (with_operand(instr, "mask", Imm(other)),)


def elections(source: Source, at: int) -> Iterator[Change]:
    """`elect.sync`, and whoever was not elected branches away: now all lanes go on."""
    if source.code[at].op.name != "elect.sync":
        return
    for behind in range(at + 1, min(at + 6, len(source.code))):
        instr = source.code[behind]
        if behind in source.starts or instr.op.name in ("elect.sync", "ret"):
            return
        if instr.op.name == "bra" and instr.guard is not None:
            words = "all lanes go on to "
            after = next((one for one in source.code[behind + 1 :] if ORDERED.match(one.op.text)), None)
            yield (
                "elect",
                words + (show_instr(after)[:80] if after else "the end"),
                source.code[at:behind],
                behind + 1 - at,
            )
            return


def moves(source: Source, at: int) -> Iterator[Change]:
    """An instruction behind the next one whose order with it may matter."""
    instr = source.code[at]
    if not MOVED.match(instr.op.text):
        return
    mine = registers(instr)
    for behind in range(at + 1, min(at + 12, len(source.code))):
        other = source.code[behind]
        if behind in source.starts or other.op.name in ENDS or mine & registers(other, written=True):
            return
        if registers(instr, written=True) & registers(other):
            return
        if ORDERED.match(other.op.text):
            if other.op != instr.op:
                between = source.code[at + 1 : behind + 1]
                yield "swap", f"behind `{show_instr(other)[:80]}`", (*between, instr), behind + 1 - at
            return


def registers(instr: Instr, *, written: bool = False) -> set[str]:
    """Names of the registers of an instruction, or of those that it writes."""
    found: set[str] = set()
    for role, arg in zip(instr.op.form.roles, instr.args, strict=True):
        if not written or (role.access != "r" and not role.address):
            found |= set(re.findall(r"name='([^']+)'", repr(arg)))
    if instr.guard is not None and not written:
        found.add(instr.guard.reg.name)
    return found


def rewritten(module: Module, function: Function, at: int, size: int, instead: tuple[Instr, ...]) -> str:
    """The module's text with some instructions replaced."""
    code = function.code or ()
    shift = len(instead) - size
    labels = {name: place + shift * (place > at) for name, place in function.labels.items()}
    changed = replace(function, code=(*code[:at], *instead, *code[at + size :]), labels=labels)
    functions = tuple(changed if one is function else one for one in module.functions)
    return show(replace(module, functions=functions))


def mutants(launch: Launch, lines: Collection[int]) -> Iterator[Mutant]:
    """All mutants of the kernel of a launch, of instructions on these lines of its PTX."""
    module = parse(launch.ptx)
    function = module.entries[launch.kernel]
    source = Source(module, function, 90 if launch.arch.startswith("sm_9") else 100)
    for at, instr in enumerate(source.code):
        for kind, words, instead, size in source.changes(at) if instr.line in lines else ():

            def apply(given: Launch, at: int = at, size: int = size, instead: tuple[Instr, ...] = instead) -> Launch:
                return replace(given, ptx=rewritten(module, function, at, size, instead))

            what = f"line {instr.line}, `{shortened(instr)}`: {words}{place(module, source.code, at)}"
            yield Mutant(kind, what, instr.op.name, apply)
    for index in launch.tensor_maps:

        def swizzled(given: Launch, index: int = index) -> Launch:
            parts = list(given.parameters)
            data = bytearray(parts[index].data)
            flags = int.from_bytes(data[8:12], "little")
            mode = flags >> 13 & 7
            flags = flags & ~(7 << 13) | (mode - 1 if mode else 1) << 13
            data[8:12] = flags.to_bytes(4, "little")
            parts[index] = Parameter(parts[index].name, parts[index].align, bytes(data))
            return replace(given, parameters=tuple(parts))

        yield Mutant("tensor map swizzle", f"parameter {index}", "", swizzled)


def place(module: Module, code: Sequence[Instr], at: int) -> str:
    """` (file.py:12 in function)` of the kernel's source, where the PTX says; of a helper also what comes before it."""
    names = [
        (module.files[one.loc.file], one.loc.line) if one.loc and one.loc.file in module.files else ("", 0)
        for one in code[max(at - 1, 0) : at + 1]
    ]
    (file, line), (before, its_line) = names[-1], names[0]
    behind = f", behind {spot(before, its_line)}" if before and before != file else ""
    return f" ({spot(file, line)}{behind})" if file else ""


def spot(path: str, line: int) -> str:
    """`file.py:12 in function`; without the function where the source is not there, or the line is in none."""
    inside = [name for first, last, name in functions(path) if first <= line <= last]
    return f"{Path(path).name}:{line}" + (f" in {inside[-1]}" if inside else "")


@cache
def functions(path: str) -> list[tuple[int, int, str]]:
    """First line, last line and name of each function of a Python file, an inner one behind that around it."""
    if not Path(path).is_file():
        return []
    nodes = [one for one in ast.walk(ast.parse(Path(path).read_text())) if isinstance(one, ast.FunctionDef)]
    return sorted((one.lineno, one.end_lineno or one.lineno, one.name) for one in nodes)


def shortened(instr: Instr) -> str:
    """The instruction without long lists of registers."""
    return re.sub(r"\{(%\w+), [^}]{24,}\}", r"{\1, ...}", show_instr(instr))[:120]


def selection(every: Iterable[Mutant], most: int, seed: int = 0, *, by_instruction: bool = False) -> list[Mutant]:
    """At most so many of each kind, in their order; always the same ones.

    Args:
        by_instruction: so many of each kind and instruction.
    """
    kinds: dict[str, list[int]] = defaultdict(list)
    listed = list(every)
    for index, mutant in enumerate(listed):
        kinds[f"{mutant.kind} {mutant.instruction}" if by_instruction else mutant.kind].append(index)
    chosen: set[int] = set()
    for kind, indices in kinds.items():
        chosen |= set(random.Random(f"{seed} {kind}").sample(indices, min(most, len(indices))))
    return [listed[index] for index in sorted(chosen)]
