# SPDX-License-Identifier: Apache-2.0
"""PTX text to tokens (ISA 4.1 to 4.5)."""

import re
from bisect import bisect_right

from emulator.ptx.errors import PtxError

TOKEN = re.compile(
    r"""
      "[^"\n]*"
    | 0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b
    | 0[xX][0-9a-fA-F]+U? | 0[bB][01]+U?
    | \d+\.\d*(?:[eE][+-]?\d+)? | \d+[eE][+-]?\d+ | \d+U?
    | [A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*
    | \.[A-Za-z_][\w$]*(?:(?:\.|::)[\w$]+)*
    | \S
    """,
    re.VERBOSE,
)
COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
# LLVM counts the lines of inline assembly as lines of the source, from that of the call on; the call's stands before.
ASSEMBLY = re.compile(r"// begin inline asm\n.*?// end inline asm", re.DOTALL)
PLACE = re.compile(r"^[ \t]*\.loc\b[^\n]*", re.MULTILINE)


def _blank(match: re.Match[str]) -> str:
    text = match[0]
    return text if text[0] == '"' else "\n" * text.count("\n") or " "


def _without_places(match: re.Match[str]) -> str:
    return PLACE.sub("", match[0])


class Tokens:
    """A cursor over the tokens of a text. After the last one comes an empty string.

    Attributes:
        items: the tokens.
        at: the index of the next one.
    """

    def __init__(self, text: str) -> None:
        self.items: list[str] = []
        self._starts: list[int] = []
        self._lines: list[int] = []
        for number, line in enumerate(COMMENT.sub(_blank, ASSEMBLY.sub(_without_places, text)).split("\n"), 1):
            if found := TOKEN.findall(line):
                self._starts.append(len(self.items))
                self._lines.append(number)
                self.items += found
        self.items.append("")
        self.at = 0

    def line(self, at: int | None = None) -> int:
        """The line, from 1, of a token; of the next one if none is named."""
        which = min(self.at if at is None else at, len(self.items) - 2)
        return self._lines[bisect_right(self._starts, which) - 1] if self._lines else 1

    def peek(self) -> str:
        return self.items[self.at]

    def take(self) -> str:
        self.at += 1
        return self.items[self.at - 1]

    def accept(self, token: str) -> bool:
        if self.items[self.at] == token:
            self.at += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if self.items[self.at] != token:
            raise PtxError(f"expected {token!r}, found {self.items[self.at]!r}", self.line())
        self.at += 1

    def integer(self) -> int:
        """A whole number, with a sign or without."""
        negative = self.accept("-")
        token = self.take()
        value = whole(token)
        if value is None:
            raise PtxError(f"expected a whole number, found {token!r}", self.line(self.at - 1))
        return -value if negative else value


def whole(token: str) -> int | None:
    """The value of an integer literal (ISA 4.5.1), None for another token."""
    if not token[:1].isdigit():
        return None
    digits = token.removesuffix("U")
    try:
        if digits[:1] == "0" and digits.isdigit():
            return int(digits, 8)
        return int(digits, 0)
    except ValueError:
        return None
