# SPDX-License-Identifier: Apache-2.0
"""The language of the tables of forms, and how an opcode with its modifiers is matched against them.

A row is `opcode[#variant] modifiers : operands`, in the order of the ISA's syntax lines. Modifiers:

    .sync               has to stand there: modifier `sync` is "sync"
    .ftz?               may stand there: modifier `ftz` is "ftz" or absent
    .type=u32|s32       one of them has to
    .space=global|local?    one of them may
    .scope=<scope>      <name> is a set from SETS, or one of the table's own

Operands:

    >d:type             destination; its type is the value of the modifier `type`, or a type by that name
    +d:f32              destination that is read first
    a:type              source: a register, a constant, a special register or the address of a symbol
    p:pred              predicate, `!p` for a source
    n:imm               constant
    [a:space]           address in the space that the modifier says, or a space by that name; without one: generic
    [map:tensor]        tensor map with coordinates
    d:type*             vector of any length; a single register stands for a vector of one
    d:type*vec          vector of as many as the modifier says (v4, x4); without the modifier a single operand
    >d|p:type           may be a pair d|p
    x?                  may be absent
    x?hint              is there if, and only if, the modifier `hint` is
    l:label, f:function, a:names    for control flow
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

SETS: dict[str, str] = {
    "int": "u16|u32|u64|s16|s32|s64",
    "bits": "b16|b32|b64",
    "scalar": "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64",
    "memory": "b8|b16|b32|b64|b128|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64",
    "round": "rn|rz|rm|rp",
    "compare": "eq|ne|lt|le|gt|ge|lo|ls|hi|hs|equ|neu|ltu|leu|gtu|geu|num|nan",
    "scope": "cta|cluster|gpu|sys",
    "shared": "shared::cta|shared::cluster|shared",
    "group": "cta_group::1|cta_group::2",
}


@dataclass(frozen=True, slots=True)
class Group:
    """One place among the modifiers.

    Attributes:
        values: that may stand there, in the order of the table.
    """

    name: str
    values: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Role:
    """What one operand of a form is.

    Attributes:
        type: a modifier's name or a type.
        access: "r", "w" or "rw".
        address: it is `[...]`.
        vector: None for a single operand, "" for any length, else the modifier that says the length.
        pair: the name of the second destination, if it may have one.
        when: "" always, "?" may be absent, else the modifier that it comes with.
    """

    name: str
    type: str
    access: str = "r"
    address: bool = False
    vector: str | None = None
    pair: str | None = None
    when: str = ""


@dataclass(frozen=True)
class Form:
    """A row of the tables.

    Attributes:
        id: opcode, with `#variant` where an opcode has several rows.
        opcode: the words that every instruction of the row begins with.
    """

    id: str
    opcode: str
    groups: tuple[Group, ...]
    roles: tuple[Role, ...]
    row: str = field(compare=False, repr=False)

    @cached_property
    def place(self) -> dict[str, int]:
        """Index into an instruction's operands by role."""
        return {role.name: index for index, role in enumerate(self.roles)}

    @cached_property
    def words(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    def match(self, words: tuple[str, ...]) -> dict[str, str] | None:
        """The modifiers of an instruction of this form by group, None if it is not of this form."""
        start = len(self.words)
        if words[:start] != self.words:
            return None
        return _match(self.groups, words[start:])


def _match(groups: tuple[Group, ...], words: tuple[str, ...]) -> dict[str, str] | None:
    if not groups:
        return None if words else {}
    first, rest = groups[0], groups[1:]
    if words and words[0] in first.values:
        found = _match(rest, words[1:])
        if found is not None:
            return {first.name: words[0], **found}
    return _match(rest, words) if first.optional else None


@dataclass(frozen=True)
class Op:
    """An opcode with its modifiers resolved: what semantics are registered for.

    Attributes:
        text: as written: `cp.async.bulk.commit_group`.
        mods: value by modifier, for those that stand there, in the order of the ISA.
    """

    text: str
    form: Form
    mods: Mapping[str, str] = field(compare=False)

    def __getitem__(self, modifier: str) -> str | None:
        return self.mods.get(modifier)

    def __hash__(self) -> int:
        return hash((self.text, self.form.id))

    @property
    def name(self) -> str:
        return self.form.opcode

    def type_of(self, role: Role) -> str:
        """The type of an operand: `u32`, `pred`, `imm`, ..."""
        return self.mods.get(role.type, role.type)

    def __repr__(self) -> str:
        return f"Op({self.text!r}, {self.form.id!r})"


ROLE = re.compile(
    r"(?P<access>[>+]?)(?P<open>\[?)(?P<name>[a-z_]\w*)(?:\|(?P<pair>\w+))?(?::(?P<type>\w+))?"
    r"(?P<vector>\*\w*)?(?P<close>\]?)(?P<when>\?\w*)?"
)


def parse_table(text: str, sets: Mapping[str, str] | None = None) -> tuple[Form, ...]:
    """The rows of a table; empty lines and lines that begin with `;` are for the reader."""
    known = {**SETS, **(sets or {})}
    rows = (line.strip() for line in text.splitlines())
    return tuple(_row(row, known) for row in rows if row and not row.startswith(";"))


def _row(row: str, sets: Mapping[str, str]) -> Form:
    left, _, right = f"{row} ".partition(" : ")
    identity, *groups = left.split()
    return Form(
        id=identity,
        opcode=identity.partition("#")[0],
        groups=tuple(_group(group, sets) for group in groups),
        roles=tuple(_role(role) for role in right.split(",") if role.strip()),
        row=row,
    )


def _group(text: str, sets: Mapping[str, str]) -> Group:
    if text[0] != ".":
        raise ValueError(f"modifier without a dot: {text!r}")
    optional = text.endswith("?")
    name, _, values = text[1:].removesuffix("?").partition("=")
    if not values:
        return Group(name, (name,), optional)
    return Group(name, tuple(_values(values, sets)), optional)


def _values(text: str, sets: Mapping[str, str]) -> Iterable[str]:
    for value in text.split("|"):
        if value[0] == "<":
            yield from _values(sets[value[1:-1]], sets)
        else:
            yield value


def _role(text: str) -> Role:
    found = ROLE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"operand {text!r}")
    when = found["when"]
    return Role(
        name=found["name"],
        type=found["type"] or "",
        access={"": "r", ">": "w", "+": "rw"}[found["access"]],
        address=bool(found["open"]),
        vector=None if found["vector"] is None else found["vector"][1:],
        pair=found["pair"],
        when="" if when is None else when[1:] or "?",
    )
