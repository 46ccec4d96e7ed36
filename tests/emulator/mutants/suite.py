# SPDX-License-Identifier: Apache-2.0
"""A set of kernels whose mutants are judged, with what is known of those that no check finds, and its page."""

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from judge import Kernel, Verdict

# (pattern of the kernel, pattern of `kind: what`, reason); patterns match from the beginning.
Rows = Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Suite:
    """Kernels whose mutants are judged.

    Attributes:
        names: of the kernels.
        kernel: by name.
        equivalent: mutants that are no mistake, each with the reason.
        unseen: mistakes that the emulator is known not to see.
        head: of the page, what it has before its tables.
    """

    names: Sequence[str]
    kernel: Callable[[str], Kernel]
    equivalent: Rows
    unseen: Rows
    head: str

    def survivors(self, verdicts: Iterable[Verdict]) -> list[str]:
        """Mutants that were not found and that nobody has explained."""
        rows = [*self.equivalent, *self.unseen]
        return [str(one) for one in verdicts if one.found is None and not reason(one, rows)]


def load(module: str) -> Suite:
    """The SUITE of a module."""
    suite = importlib.import_module(module).SUITE
    assert isinstance(suite, Suite)
    return suite


def reason(verdict: Verdict, rows: Rows) -> str | None:
    """Why a mutant was not found; None if nothing says so."""
    for kernel, mutant, why in rows:
        if re.match(kernel, verdict.kernel) and re.match(mutant, f"{verdict.kind}: {verdict.what}"):
            return why
    return None
