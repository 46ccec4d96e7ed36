# SPDX-License-Identifier: Apache-2.0
"""What the checks found: where, who, and against which earlier event."""

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


class Kind(enum.Enum):
    """What can be wrong with a kernel."""

    BOUNDS = "access out of bounds"
    ALIGNMENT = "misaligned access"
    UNINITIALISED = "read of something never written"
    RACE = "data race"
    DEPENDENCY = "launches that overlap: missing griddepcontrol.wait"
    PROXY = "missing proxy fence"
    TENSOR_ORDER = "missing tcgen05 wait or commit"
    TENSOR_FENCE = "missing tcgen05 fence"
    MATRIX_ORDER = "missing wgmma fence or wait"
    ALIGNED = "threads or warps of an aligned instruction disagree"
    BARRIER = "barrier misused"
    PHASE = "wait that may be for another phase"
    DEADLOCK = "deadlock"
    TENSOR_MEMORY = "tensor memory misused"
    TENSOR_ISSUE = "tcgen05 instruction misused"
    COPY = "asynchronous copy misused"
    DESCRIPTOR = "meaningless descriptor"
    REGISTERS = "register budget"
    DIVISION = "division by zero"
    TRAP = "the kernel traps"
    UNFINISHED = "unfinished at exit"


@dataclass(frozen=True)
class Place:
    """Where something happened.

    Attributes:
        who: the warp or engine, such as `cta (1, 0, 0) warp 4`.
        line: of the PTX, from 1; 0 where no instruction stands for it.
        source: `file:line` of the kernel's own source, where the PTX says.
        text: the instruction.
    """

    who: str
    line: int = 0
    source: str = ""
    text: str = ""

    def __str__(self) -> str:
        at = f" at PTX line {self.line}" if self.line else ""
        source = f" ({self.source})" if self.source else ""
        return f"{self.who}{at}{source}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        place: the event that showed it.
        other: the earlier event that it clashes with.
        warning: a state that is known to do no harm.
    """

    kind: Kind
    message: str
    place: Place
    other: Place | None = None
    warning: bool = False

    def __str__(self) -> str:
        against = f"\n    against {self.other}" if self.other else ""
        return f"{self.kind.value}: {self.message}\n    {self.place}{against}"


Key = tuple[Kind, int | str, int, bool]


def key_of(finding: Finding) -> Key:
    """Equal for findings about the same pair of instructions; without an instruction the words count."""
    line = finding.place.line or finding.message
    return finding.kind, line, finding.other.line if finding.other else -1, finding.warning


class Findings:
    """Everything that a launch's checks found; the same pair of instructions is kept once and counted."""

    def __init__(self) -> None:
        self._first: dict[Key, Finding] = {}
        self._counts: Counter[Key] = Counter()

    def add(self, finding: Finding) -> None:
        key = key_of(finding)
        self._first.setdefault(key, finding)
        self._counts[key] += 1

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._first.values())

    def __len__(self) -> int:
        return len(self._first)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self if not finding.warning]

    def count(self, finding: Finding) -> int:
        """How often the finding's pair of instructions clashed."""
        return self._counts[key_of(finding)]
