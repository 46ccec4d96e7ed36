# SPDX-License-Identifier: Apache-2.0
"""A PTX text to a module (ISA 4, 5, 11)."""

from collections.abc import Callable
from dataclasses import replace

from emulator.ptx.body import Body, BodyParser
from emulator.ptx.debug import read_section, resolve_names
from emulator.ptx.declarations import variable
from emulator.ptx.errors import PtxError, Refusal, Refused
from emulator.ptx.ir import Function, Module, Variable
from emulator.ptx.lexer import Tokens

LINKAGE = frozenset({".extern", ".visible", ".weak", ".common"})
# Launch and performance directives (ISA 11.2, 11.4, 11.8) and how many numbers follow, at most.
DIRECTIVES = {
    "maxntid": 3,
    "reqntid": 3,
    "minnctapersm": 1,
    "maxnctapersm": 1,
    "maxnreg": 1,
    "reqnctapercluster": 3,
    "maxclusterrank": 1,
    "explicitcluster": 0,
    "blocksareclusters": 0,
    "noreturn": 0,
    "abi_preserve": 1,
    "abi_preserve_control": 1,
}


def parse(text: str) -> Module:
    """The module of a PTX text.

    Raises:
        Refused: some instructions or directives are not in the tables; all of them are named.
        PtxError: the text is not PTX.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens = Tokens(text)
        self.version, self.target, self.address_size = (0, 0), (), 64
        self.refusals: list[Refusal] = []
        self.variables: dict[str, Variable] = {}
        self.functions: list[Function] = []
        self.files: dict[int, str] = {}
        self.strings: dict[str, str] = {}

    version: tuple[int, int]
    target: tuple[str, ...]

    def module(self) -> Module:
        tokens = self.tokens
        handlers: dict[str, Callable[[], None]] = {
            ".version": self._version,
            ".target": self._target,
            ".address_size": self._address_size,
            ".file": self._file,
            ".section": self._section,
        }
        while token := tokens.peek():
            if token in handlers:
                tokens.at += 1
                handlers[token]()
            else:
                self._declaration()
        if not self.target:
            raise PtxError("no .target", 1)
        if self.refusals:
            raise Refused(sorted(self.refusals, key=lambda refusal: refusal.line))
        functions = tuple(resolve_names(function, self.strings) for function in self.functions)
        return Module(
            self.version, self.target, self.address_size, tuple(self.variables.values()), functions, self.files
        )

    def _version(self) -> None:
        major, _, minor = self.tokens.take().partition(".")
        self.version = (int(major), int(minor or 0))

    def _target(self) -> None:
        names = [self.tokens.take()]
        while self.tokens.accept(","):
            names.append(self.tokens.take())
        self.target = tuple(names)

    def _address_size(self) -> None:
        self.address_size = self.tokens.integer()
        if self.address_size != 64:
            raise PtxError(f"addresses of {self.address_size} bits", self.tokens.line(self.tokens.at - 1))

    def _file(self) -> None:
        """`.file index "name" [, time, size]`."""
        index = self.tokens.integer()
        self.files[index] = self.tokens.take().strip('"')
        while self.tokens.accept(","):
            self.tokens.integer()

    def _section(self) -> None:
        self.strings.update(read_section(self.tokens))

    def _declaration(self) -> None:
        tokens = self.tokens
        linkage = tokens.take()[1:] if tokens.peek() in LINKAGE else ""
        word, line = tokens.peek(), tokens.line()
        if word in (".entry", ".func"):
            tokens.at += 1
            self._function(word == ".entry", linkage, line)
        elif word in (".global", ".const", ".shared", ".local"):
            for item in variable(tokens, linkage, self.refusals).items:
                self.variables[item.name] = item
            tokens.expect(";")
        else:
            raise PtxError(f"{word!r} does not begin a declaration that the emulator knows", line)

    def _function(self, entry: bool, linkage: str, line: int) -> None:
        tokens = self.tokens
        directives: dict[str, tuple[int, ...]] = {}
        self._directives(directives)
        returns = self._params() if tokens.peek() == "(" else []
        name = tokens.take()
        params = self._params() if tokens.peek() == "(" else []
        self._directives(directives)
        if entry:
            params = _laid_out(params)
        body: Body | None = None
        known = {*self.variables, *(function.name for function in self.functions), name}
        if tokens.accept("{"):
            body = BodyParser(tokens, known, [*params, *returns], self.refusals).parse()
        else:
            tokens.expect(";")
        function = Function(name, entry, tuple(params), tuple(returns), linkage, directives, line=line)
        if body is not None:
            function = replace(
                function,
                registers=tuple(body.registers),
                variables=tuple(body.variables),
                labels=body.labels,
                tables=body.tables,
                code=tuple(body.code),
            )
        self.functions.append(function)

    def _params(self) -> list[Variable]:
        tokens = self.tokens
        tokens.expect("(")
        found: list[Variable] = []
        while not tokens.accept(")"):
            if tokens.peek() != ".param":
                raise PtxError(f"a parameter begins with .param, not {tokens.peek()!r}", tokens.line())
            found += variable(tokens, "", self.refusals).items
            tokens.accept(",")
        return found

    def _directives(self, found: dict[str, tuple[int, ...]]) -> None:
        tokens = self.tokens
        while (word := tokens.peek())[:1] == ".":
            line = tokens.line()
            tokens.at += 1
            if word[1:] not in DIRECTIVES:
                self.refusals.append(Refusal(word, "no such directive of a function in the emulator's tables", line))
                while tokens.peek() not in ("{", ";", "(", "") and tokens.peek()[0] != ".":
                    tokens.at += 1
                continue
            numbers: list[int] = []
            while tokens.peek()[:1].isdigit() and len(numbers) < DIRECTIVES[word[1:]]:
                numbers.append(tokens.integer())
                tokens.accept(",")
            found[word[1:]] = tuple(numbers)


def _laid_out(params: list[Variable]) -> list[Variable]:
    """Offsets of kernel parameters: each behind the one before, at its alignment (ISA 5.1.6.1)."""
    at = 0
    placed = []
    for param in params:
        at = -(-at // param.align) * param.align
        placed.append(replace(param, offset=at))
        at += param.size
    return placed
