# SPDX-License-Identifier: Apache-2.0
"""Names of a function's body: registers, variables and labels, in `{ }` scopes (ISA 5.4, 4.3)."""

import re

from emulator.ptx.errors import PtxError
from emulator.ptx.ir import Reg, Symbol, Vec
from emulator.ptx.lexer import Tokens

NUMBERED = re.compile(r"(.*?[^\d])(0|[1-9]\d*)")
# What stands before a `{` that opens a scope; the brace of a vector stands behind an opcode or a comma.
BEFORE_SCOPE = frozenset(";{}:)")


class Scope:
    """One `{ }`: its number within the function, what it declares, and the scope around it."""

    def __init__(self, number: int, outer: "Scope | None", labels: dict[str, str]) -> None:
        self.number, self.outer, self.labels = number, outer, labels
        self.names: dict[str, Reg | Symbol | Vec] = {}
        self.ranges: dict[str, tuple[str, str, int]] = {}

    def find(self, name: str) -> Reg | Symbol | Vec | None:
        """The register, variable or vector of registers of this name."""
        scope: Scope | None = self
        while scope is not None:
            if (found := scope.names.get(name)) is not None:
                return found
            if scope.ranges and (numbered := NUMBERED.fullmatch(name)) is not None:
                declared = scope.ranges.get(numbered[1])
                if declared is not None and int(numbered[2]) < declared[2]:
                    register = scope.names[name] = Reg(f"{declared[0]}{numbered[2]}", declared[1])
                    return register
            scope = scope.outer
        return None

    def label(self, name: str) -> str | None:
        """The unique name of a label that is visible here."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.outer
        return None


class Unique:
    """Gives every declaration of a function a name of its own."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __call__(self, name: str, scope: int) -> str:
        unique = name if not scope else f"{name}${scope}"
        while unique in self._taken:
            unique += "$"
        self._taken.add(unique)
        return unique


def opens_scope(before: str) -> bool:
    """Whether a `{` behind this token opens a scope; behind `.loc` and its numbers stands no vector."""
    return before in BEFORE_SCOPE or before[:1].isdigit() or before[:1] == '"'


def find_labels(tokens: Tokens, unique: Unique) -> list[dict[str, str]]:
    """Labels of each scope, by number, with unique names; `tokens` stands behind the body's `{` and stays there.

    A branch may lead forwards, so they have to be known before the body is read.
    """
    items, at = tokens.items, tokens.at
    found: list[dict[str, str]] = [{}]
    open_scopes: list[int | None] = [0]
    while open_scopes:
        token = items[at]
        if token == "{":
            if opens_scope(items[at - 1]):
                open_scopes.append(len(found))
                found.append({})
            else:
                open_scopes.append(None)
        elif token == "}":
            open_scopes.pop()
        elif token == ":":
            scope = open_scopes[-1]
            if scope is None:
                raise PtxError("a label within a vector", tokens.line(at))
            name = items[at - 1]
            if name in found[scope]:
                raise PtxError(f"label {name} stands twice in one scope", tokens.line(at))
            found[scope][name] = unique(name, scope)
        elif not token:
            raise PtxError("the text ends within a body", tokens.line(at))
        at += 1
    return found
