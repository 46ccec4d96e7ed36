# SPDX-License-Identifier: Apache-2.0
"""Variables and parameters: space, alignment, type, dimensions, initial values (ISA 5.1 to 5.4)."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from emulator.ptx.errors import PtxError, Refusal
from emulator.ptx.ir import BITS, Symbol, Variable
from emulator.ptx.lexer import Tokens, whole


@dataclass(frozen=True)
class Item:
    """A declared variable and the name in the text."""

    name: str
    variable: Variable


@dataclass(frozen=True)
class Declared:
    items: tuple[Variable, ...]

    def rename(self, unique: Callable[[str], str]) -> list[Item]:
        """Variables under names that are unique in their function."""
        return [Item(item.name, replace(item, name=unique(item.name))) for item in self.items]


def variable(tokens: Tokens, linkage: str, refusals: list[Refusal]) -> Declared:
    """`.space .align 4 .b8 name[4] = {...}, ...`: up to the `;` or `)` behind it."""
    line = tokens.line()
    space = tokens.take()[1:]
    align, kind = 0, ""
    vector = 1
    while tokens.peek()[:1] == ".":
        word = tokens.take()[1:]
        if word == "align":
            align = tokens.integer()
        elif word in BITS:
            kind = word
        elif word in ("v2", "v4"):
            vector = int(word[1:])
        elif word == "ptr":
            _pointer(tokens)
        else:
            refusals.append(Refusal(f".{space} .{word}", "unknown attribute or type of a variable", line))
            if tokens.peek() == "(":
                _skip_parentheses(tokens)
    if not kind:
        raise PtxError(f"a .{space} variable without a type", line)
    found = [_one(tokens, space, linkage, kind, vector, align)]
    while space != "param" and tokens.accept(","):
        found.append(_one(tokens, space, linkage, kind, vector, align))
    return Declared(tuple(found))


def _pointer(tokens: Tokens) -> None:
    """What a kernel parameter points at (ISA 5.1.6.2): a hint."""
    while tokens.peek() in (".const", ".global", ".local", ".shared", ".align"):
        if tokens.take() == ".align":
            tokens.integer()


def _skip_parentheses(tokens: Tokens) -> None:
    while tokens.take() not in (")", ""):
        pass


def _one(tokens: Tokens, space: str, linkage: str, kind: str, vector: int, align: int) -> Variable:
    name = tokens.take()
    dims: list[int] = []
    while tokens.accept("["):
        dims.append(0 if tokens.peek() == "]" else tokens.integer())
        tokens.expect("]")
    element = BITS[kind] // 8
    count = vector
    for dim in dims:
        count *= dim
    initial, relocations = _initial(tokens, element, kind) if tokens.accept("=") else (b"", ())
    if dims and not dims[0] and initial:
        count = len(initial) // element
    return Variable(
        name=name,
        space=space,
        type=kind if vector == 1 else f"{kind}.v{vector}",
        align=align or element * vector,
        size=element * count,
        linkage=linkage,
        dims=tuple(dims),
        initial=initial,
        relocations=relocations,
    )


def _initial(tokens: Tokens, element: int, kind: str) -> tuple[bytes, tuple[tuple[int, Symbol, bool], ...]]:
    """Values in nested braces, flat; a shorter list than the array leaves zeros behind it."""
    out = bytearray()
    relocations: list[tuple[int, Symbol, bool]] = []
    depth = 0
    while True:
        token = tokens.take()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
        elif token == ",":
            continue
        elif token == "-" or token[:1].isdigit():
            out += _number(tokens, token, element, kind)
        elif token:
            generic = token == "generic"
            name = token
            if generic:
                tokens.expect("(")
                name = tokens.take()
            offset = tokens.integer() if tokens.accept("+") else 0
            if generic:
                tokens.expect(")")
            relocations.append((len(out), Symbol(name, offset), generic))
            out += bytes(element)
        else:
            raise PtxError("the text ends within initial values", tokens.line())
        if not depth:
            return bytes(out), tuple(relocations)


def _number(tokens: Tokens, token: str, element: int, kind: str) -> bytes:
    negative = token == "-"
    if negative:
        token = tokens.take()
    value = whole(token)
    if value is None and token[1:2] in ("f", "F", "d", "D"):
        return int(token[2:], 16).to_bytes(element, "little")
    if value is None or kind[0] == "f":
        number = float(token) * (-1 if negative else 1)
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[element], number)
    return ((-value if negative else value) & ((1 << 8 * element) - 1)).to_bytes(element, "little")
