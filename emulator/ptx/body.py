# SPDX-License-Identifier: Apache-2.0
"""The body of a function: scopes, declarations, labels, instructions."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from emulator.ptx import forms
from emulator.ptx.declarations import Declared, variable
from emulator.ptx.errors import PtxError, Refusal
from emulator.ptx.ir import (
    BITS,
    Address,
    Guard,
    Imm,
    Instr,
    Label,
    Loc,
    Names,
    Not,
    Operand,
    Pair,
    Reg,
    Registers,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vec,
)
from emulator.ptx.lexer import Tokens, whole
from emulator.ptx.operands import bind
from emulator.ptx.scopes import Scope, Unique, find_labels
from emulator.ptx.special import SCALAR, VECTOR, is_special

SINK = Sink()
# Hints for ptxas without an effect on results (ISA 11.4.6 and its table of strings).
PRAGMAS = frozenset({"nounroll", "used_bytes_mask", "enable_smem_spilling", "frequency"})
CONSTANTS = {"WARP_SZ": 32}


@dataclass
class Body:
    """What a body holds; filled while it is read."""

    registers: list[Registers] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    code: list[Instr] = field(default_factory=list)


class BodyParser:
    """Reads one body.

    Attributes:
        globals: names of the module's variables and functions.
        refusals: of the whole module; reading goes on behind a refused instruction.
        strings: names that `.loc` refers to are read later, so they are looked up when all of the text has been read.
    """

    def __init__(self, tokens: Tokens, module_names: set[str], params: list[Variable], refusals: list[Refusal]) -> None:
        self.tokens, self.globals, self.refusals = tokens, module_names, refusals
        self.unique = Unique()
        self.body = Body()
        outer = Scope(0, None, {})
        outer.names = {param.name: Symbol(self.unique(param.name, 0)) for param in params}
        self.scope = outer
        self.loc: Loc | None = None
        self.places: dict[tuple[int, int, int], Loc] = {}
        self.directives: dict[str, Callable[[], None]] = {
            ".reg": self._registers,
            ".loc": self._loc,
            ".pragma": self._pragma,
            **dict.fromkeys((".local", ".shared", ".param", ".const", ".global"), self._variable),
        }

    def parse(self) -> Body:
        """Everything behind the `{` of the body, up to and with its `}`."""
        tokens = self.tokens
        labels = find_labels(tokens, self.unique)
        self.scope.labels = labels[0]
        opened, items = 0, tokens.items
        while True:
            token = items[tokens.at]
            if token == "{":
                tokens.at += 1
                opened += 1
                self.scope = Scope(opened, self.scope, labels[opened])
            elif token == "}":
                tokens.at += 1
                if self.scope.outer is None:
                    return self.body
                self.scope = self.scope.outer
            elif token == ";":
                tokens.at += 1
            elif token[:1] == ".":
                self._directive(token)
            elif items[tokens.at + 1] == ":":
                self._label(token)
            else:
                self._instruction()

    def _directive(self, token: str) -> None:
        line = self.tokens.line()
        known = self.directives.get(token)
        if known is not None:
            known()
            return
        self.refusals.append(Refusal(token, "no such directive within a body in the emulator's tables", line))
        self._skip()

    def _skip(self) -> None:
        while self.tokens.peek() not in (";", ""):
            self.tokens.at += 1

    def _label(self, name: str) -> None:
        tokens = self.tokens
        tokens.at += 2
        unique = self.scope.labels[name]
        if tokens.peek() in (".branchtargets", ".calltargets"):
            tokens.at += 1
            names = [tokens.take()]
            while tokens.accept(","):
                names.append(tokens.take())
            tokens.expect(";")
            self.body.tables[unique] = tuple(self.scope.label(name) or name for name in names)
        elif tokens.peek() == ".callprototype":
            self.refusals.append(Refusal(".callprototype", "indirect calls are not emulated", tokens.line()))
            self._skip()
        else:
            self.body.labels[unique] = len(self.body.code)

    def _registers(self) -> None:
        tokens = self.tokens
        tokens.at += 1
        kind = tokens.take()[1:]
        if kind in ("v2", "v4"):
            self._vector_registers(int(kind[1:]))
            return
        if kind not in BITS:
            raise PtxError(f"registers of type .{kind}", tokens.line(tokens.at - 1))
        while True:
            name, scope = tokens.take(), self.scope
            unique = self.unique(name, scope.number)
            if tokens.accept("<"):
                # A digit behind the scope's number would make it another scope's.
                unique = unique if unique == name else f"{unique}_"
                count = tokens.integer()
                tokens.expect(">")
                scope.ranges[name] = (unique, kind, count)
                self.body.registers.append(Registers(unique, kind, count))
            else:
                scope.names[name] = Reg(unique, kind)
                self.body.registers.append(Registers(unique, kind))
            if not tokens.accept(","):
                break
        tokens.expect(";")

    def _vector_registers(self, length: int) -> None:
        """`.v4 .s32 name;` (ISA 5.4.2): as many registers, and a name for all of them."""
        tokens, scope = self.tokens, self.scope
        kind = tokens.take()[1:]
        while True:
            name = tokens.take()
            registers = tuple(Reg(self.unique(f"{name}_{axis}", scope.number), kind) for axis in "xyzw"[:length])
            for register, axis, colour in zip(registers, "xyzw", "rgba", strict=False):
                scope.names[f"{name}.{axis}"] = scope.names[f"{name}.{colour}"] = register
                self.body.registers.append(Registers(register.name, kind))
            scope.names[name] = Vec(registers)
            if not tokens.accept(","):
                break
        tokens.expect(";")

    def _variable(self) -> None:
        declared: Declared = variable(self.tokens, "", self.refusals)
        for item in declared.rename(lambda name: self.unique(name, self.scope.number)):
            self.body.variables.append(item.variable)
            self.scope.names[item.name] = Symbol(item.variable.name)
        self.tokens.expect(";")

    def _pragma(self) -> None:
        tokens = self.tokens
        line = tokens.line()
        tokens.at += 1
        while True:
            text = tokens.take().strip('"')
            if text.split()[0] not in PRAGMAS:
                self.refusals.append(Refusal(f'.pragma "{text}"', "unknown to the emulator", line))
            if not tokens.accept(","):
                break
        tokens.expect(";")

    def _loc(self) -> None:
        """`.loc file line column [, function_name label[+offset]] [, inlined_at file line column]`."""
        tokens = self.tokens
        tokens.at += 1
        place = (tokens.integer(), tokens.integer(), tokens.integer())
        function, inlined = None, None
        while tokens.accept(","):
            word = tokens.take()
            if word == "function_name":
                function = tokens.take()
                if tokens.accept("+"):
                    function += f"+{tokens.integer()}"
            elif word == "inlined_at":
                at = (tokens.integer(), tokens.integer(), tokens.integer())
                inlined = self.places.get(at) or Loc(*at)
            else:
                raise PtxError(f".loc with {word!r}", tokens.line(tokens.at - 1))
        self.loc = self.places[place] = Loc(*place, function, inlined)

    def _instruction(self) -> None:
        tokens = self.tokens
        line = tokens.line()
        guard = self._guard() if tokens.accept("@") else None
        text = tokens.take()
        # Modifiers may stand apart, as TileLang's `.L2::cache_hint` does.
        while tokens.peek().startswith("."):
            text += tokens.take()
        operands: list[Operand] = []
        if tokens.peek() != ";":
            operands.append(self._operand())
            while tokens.accept(","):
                operands.append(self._operand())
        tokens.expect(";")
        ops = forms.candidates(text)
        if not ops:
            self.refusals.append(Refusal(text, forms.why_refused(text), line))
            return
        found = bind(ops, operands)
        if isinstance(found, str):
            self.refusals.append(Refusal(text, found, line))
            return
        self.body.code.append(Instr(found[0], found[1], guard, self.loc, line))

    def _guard(self) -> Guard:
        negated = self.tokens.accept("!")
        return Guard(self._predicate(), negated)

    def _predicate(self) -> Reg:
        name = self.tokens.take()
        found = self.scope.find(name)
        if not isinstance(found, Reg) or found.type != "pred":
            raise PtxError(f"{name!r} is not a predicate", self.tokens.line(self.tokens.at - 1))
        return found

    def _operand(self) -> Operand:
        tokens = self.tokens
        token = tokens.take()
        if token == "[":
            return self._address()
        if token == "{":
            return self._vector()
        if token == "!":
            return Not(self._predicate())
        if token == "(":
            return self._names()
        if isinstance(whole_vector := self.scope.find(token), Vec):
            return whole_vector
        first = self._scalar(token)
        if tokens.accept("|"):
            second = self._scalar(tokens.take())
            if isinstance(first, Reg | Sink) and isinstance(second, Reg | Sink):
                return Pair(first, second)
            raise PtxError("a pair of something else than registers", tokens.line())
        return first

    def _scalar(self, token: str) -> Reg | Imm | Special | Symbol | Label | Sink:
        """A single operand that begins with this token, which has been taken."""
        if token == "_":
            return SINK
        if token == "-" or token[0].isdigit():
            return self._constant(token)
        found = self.scope.find(token)
        if isinstance(found, Reg):
            return found
        if isinstance(found, Symbol) or token in self.globals:
            name = found.name if isinstance(found, Symbol) else token
            return Symbol(name, self._offset())
        if token[0] == "%" and is_special(token):
            name, _, component = token.partition(".")
            return Special(name, component or None)
        if token[0] == "%" and (token in VECTOR or token in SCALAR):
            return Special(token)
        if (label := self.scope.label(token)) is not None:
            return Label(label)
        if token in CONSTANTS:
            return Imm(CONSTANTS[token])
        raise PtxError(f"unknown name {token!r}", self.tokens.line(self.tokens.at - 1))

    def _constant(self, token: str) -> Imm:
        negative = token == "-"
        if negative:
            token = self.tokens.take()
        value = whole(token)
        if value is not None:
            return Imm(-value if negative else value)
        if token[1:2] in "fF" and token[0] == "0":
            return Imm(int(token[2:], 16) ^ (negative << 31), "f32")
        if token[1:2] in "dD" and token[0] == "0":
            return Imm(int(token[2:], 16) ^ (negative << 63), "f64")
        try:
            number = float(token)
        except ValueError:
            raise PtxError(f"{token!r} is not a number", self.tokens.line(self.tokens.at - 1)) from None
        return Imm(int(struct.unpack("<Q", struct.pack("<d", -number if negative else number))[0]), "f64")

    def _offset(self) -> int:
        """`+4`, `-4`, `+-4`, or nothing: 0."""
        tokens = self.tokens
        if tokens.accept("+"):
            return tokens.integer()
        return tokens.integer() if tokens.peek() == "-" else 0

    def _address(self) -> Address | TensorAddress:
        """Behind a `[`."""
        tokens = self.tokens
        token = tokens.take()
        if token == "-" or token[0].isdigit():
            tokens.at -= 1
            address = Address(None, tokens.integer())
        else:
            base = self._scalar(token)
            if isinstance(base, Symbol):
                address = Address(Symbol(base.name), base.offset)
            elif isinstance(base, Reg):
                address = Address(base, self._offset())
            else:
                raise PtxError(f"an address cannot begin with {token!r}", tokens.line())
        if tokens.accept(","):
            tokens.expect("{")
            coordinates = self._vector().items
            if not all(isinstance(item, Reg | Imm) for item in coordinates):
                raise PtxError("coordinates are registers or constants", tokens.line())
            tokens.expect("]")
            return TensorAddress(address, tuple(item for item in coordinates if isinstance(item, Reg | Imm)))
        tokens.expect("]")
        return address

    def _vector(self) -> Vec:
        """Behind a `{`."""
        tokens = self.tokens
        items: list[Reg | Imm | Sink | Symbol | Special] = []
        while True:
            item = self._scalar(tokens.take())
            if isinstance(item, Label):
                raise PtxError("a label within a vector", tokens.line())
            items.append(item)
            if tokens.accept("}"):
                return Vec(tuple(items))
            tokens.expect(",")

    def _names(self) -> Names:
        """Behind a `(`."""
        tokens = self.tokens
        items: list[Reg | Symbol | Imm] = []
        while not tokens.accept(")"):
            item = self._scalar(tokens.take())
            if not isinstance(item, Reg | Symbol | Imm):
                raise PtxError("an argument is a parameter, a register or a constant", tokens.line())
            items.append(item)
            tokens.accept(",")
        return Names(tuple(items))
