# SPDX-License-Identifier: Apache-2.0
"""Runs mutants of a kernel and says how each was found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mutate import Mutant, mutants, selection

import emulator
from emulator.errors import EmulatorError
from emulator.host.launch import Launch
from emulator.machine import Machine
from emulator.machine.findings import Finding, Kind

SCHEDULES = ("lazy", "eager", "random")
ENDLESS = 3  # times the instructions of the kernel without a mistake


class Recording(Machine):
    """Keeps the launches that it runs."""

    def __init__(self, arch: str, sms: int, schedule: str) -> None:
        super().__init__(arch, sms, schedule)
        self.launches: list[Launch] = []

    def launch(self, launch: Launch) -> None:
        self.launches.append(launch)
        super().launch(launch)

    def overlap(self, launches: Sequence[Launch]) -> None:
        self.launches.extend(launches)
        super().overlap(launches)

    @property
    def instructions(self) -> int:
        return sum(int(one.sum()) for kernel in self.profile.kernels.values() for one in kernel.executed.values())

    def executed(self, launch: Launch) -> set[int]:
        """Lines of the PTX whose instructions were executed."""
        kernel = self.profile.kernels[launch.kernel]
        counts = sum(kernel.executed.values())
        return {instr.line for instr, count in zip(kernel.program.instrs, counts, strict=True) if count}  # type: ignore[arg-type]


class Mutating(Machine):
    """Runs a mutant in the place of one kernel."""

    def __init__(self, kernel: "Kernel", schedule: str, original: "Original", mutant: Mutant) -> None:
        super().__init__(kernel.arch, kernel.sms, schedule, limit=ENDLESS * original.instructions)
        self.original, self.mutant = original, mutant

    def launch(self, launch: Launch) -> None:
        super().launch(self.mutated(launch))

    def overlap(self, launches: Sequence[Launch]) -> None:
        super().overlap([self.mutated(launch) for launch in launches])

    def mutated(self, launch: Launch) -> Launch:
        return self.mutant.apply(launch) if launch.kernel == self.original.launch.kernel else launch


@dataclass(frozen=True)
class Kernel:
    """A kernel whose mutants are judged.

    Attributes:
        case: called with the device active; compiles and runs the kernel, and says whether its results are right.
        strict: it has no warnings; of another kernel only those count that it has not without a mistake.
        number: of the launch among those of the case.
        most: mutants of each kind that are judged; None: all.
        by_instruction: so many of each kind and instruction.
    """

    name: str
    arch: str
    case: Callable[[], bool]
    sms: int = 2
    strict: bool = True
    number: int = 0
    most: int | None = None
    by_instruction: bool = False


@dataclass(frozen=True)
class Original:
    """The launch without a mistake.

    Attributes:
        instructions: of warps.
        lines: whose instructions are executed, in any schedule.
        warnings: that it has without one, in any schedule.
    """

    launch: Launch
    instructions: int
    lines: frozenset[int]
    warnings: frozenset[tuple[Kind, str]]


@dataclass(frozen=True)
class Verdict:
    """How a mutant was found: `value`, a check's name, `refused`, or not at all (None)."""

    kernel: str
    kind: str
    what: str
    found: str | None
    schedule: str | None

    def __str__(self) -> str:
        return f"{self.kernel}: {self.kind}: {self.what}"


def original(kernel: Kernel) -> Original:
    """The launch without a mistake.

    Raises:
        AssertionError: it is wrong already, or has findings.
    """
    warnings: set[tuple[Kind, str]] = set()
    lines: set[int] = set()
    for schedule in reversed(SCHEDULES):
        machine = Recording(kernel.arch, kernel.sms, schedule)
        with emulator.device(kernel.arch, sms=kernel.sms, machine=machine):
            assert kernel.case(), f"{kernel.name} is wrong without any mutation"
        lines |= machine.executed(machine.launches[kernel.number])
        warnings |= {(one.kind, one.message) for one in machine.findings}
    assert not (kernel.strict and warnings), warnings
    return Original(machine.launches[kernel.number], machine.instructions, frozenset(lines), frozenset(warnings))


def mutants_of(kernel: Kernel, of: Original) -> list[Mutant]:
    """Those of a kernel that are judged: of instructions that its case executes."""
    every = list(mutants(of.launch, of.lines))
    return every if kernel.most is None else selection(every, kernel.most, by_instruction=kernel.by_instruction)


def new(machine: Machine, of: Original) -> list[Finding]:
    """Errors first, then warnings that the kernel has not without the mistake."""
    warnings = [one for one in machine.findings if one.warning and (one.kind, one.message) not in of.warnings]
    return [*machine.findings.errors, *warnings]


def judge(kernel: Kernel, of: Original, mutant: Mutant, schedules: Sequence[str] = SCHEDULES) -> Verdict:
    """Run one mutant until a schedule shows it."""

    def verdict(found: str | None, schedule: str | None) -> Verdict:
        return Verdict(kernel.name, mutant.kind, mutant.what, found, schedule)

    for schedule in schedules:
        machine = Mutating(kernel, schedule, of, mutant)
        try:
            with emulator.device(kernel.arch, sms=kernel.sms, machine=machine, keep_findings=True):
                right = kernel.case()
        except EmulatorError as error:
            return verdict(f"refused: {type(error).__name__}: {error}"[:120], schedule)
        found = new(machine, of)
        if found:
            return verdict(f"{'warning: ' if found[0].warning else ''}{found[0].kind.value}", schedule)
        if not right:
            return verdict("value", schedule)
    return verdict(None, None)
