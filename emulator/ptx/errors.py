# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a PTX text, in words and with its line."""

from collections.abc import Sequence
from dataclasses import dataclass

from emulator.errors import EmulatorError, Unsupported


class PtxError(EmulatorError):
    """The text is not PTX as the ISA defines it, or this parser's understanding of it."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.message, self.line = message, line


@dataclass(frozen=True, slots=True)
class Refusal:
    """One instruction or directive that is not in the tables.

    Attributes:
        text: the opcode with its modifiers, or the directive, as written.
        line: in the PTX text, from 1.
    """

    text: str
    reason: str
    line: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}: {self.reason}"


class Refused(Unsupported):
    """PTX holds forms that the emulator does not know; all of them are listed, each with every line it stands on."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self.refusals = tuple(refusals)
        lines: dict[tuple[str, str], list[int]] = {}
        for refusal in self.refusals:
            lines.setdefault((refusal.text, refusal.reason), []).append(refusal.line)
        listed = [f"  {text}: {reason} (line {_some(at)})" for (text, reason), at in lines.items()]
        super().__init__(f"{len(lines)} unknown forms in this PTX:\n" + "\n".join(listed))


def _some(lines: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, lines[:most]))
    return shown if len(lines) <= most else f"{shown} and {len(lines) - most} more"
