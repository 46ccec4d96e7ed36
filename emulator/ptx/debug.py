# SPDX-License-Identifier: Apache-2.0
"""`.section .debug_str`: the names of inlined functions that `.loc` refers to (ISA 11.5.1, 11.5.2)."""

from dataclasses import replace

from emulator.ptx.errors import PtxError
from emulator.ptx.ir import Function, Loc
from emulator.ptx.lexer import Tokens, whole


def read_section(tokens: Tokens) -> dict[str, str]:
    """Text by label, up to the section's `}`. Sections other than .debug_str hold nothing that runs and are passed."""
    name = tokens.take()
    tokens.expect("{")
    found: dict[str, str] = {}
    label, data = "", bytearray()
    while (token := tokens.take()) != "}":
        if not token:
            raise PtxError("the text ends within a section", tokens.line())
        if name != ".debug_str":
            continue
        if tokens.accept(":"):
            label, data = token, bytearray()
        elif (value := whole(token)) is not None:
            data.append(value & 0xFF)
            found[label] = data.split(b"\0", 1)[0].decode(errors="replace")
    return found


def resolve_names(function: Function, strings: dict[str, str]) -> Function:
    """The function with names in its places instead of labels of strings."""
    if function.code is None or not strings:
        return function
    known: dict[Loc, Loc] = {}

    def named(loc: Loc | None) -> Loc | None:
        if loc is None or (loc.function is None and loc.inlined_at is None):
            return loc
        if loc not in known:
            text = None if loc.function is None else strings.get(loc.function, loc.function)
            known[loc] = replace(loc, function=text, inlined_at=named(loc.inlined_at))
        return known[loc]

    return replace(function, code=tuple(replace(instr, loc=named(instr.loc)) for instr in function.code))
