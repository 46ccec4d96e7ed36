# SPDX-License-Identifier: Apache-2.0
"""A set of kernels whose mutants are judged, with what is known of those that no check finds, and its page."""

import importlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from judge import Kernel, Verdict, judge, original
from mutate import mutants, selection

RUN = Path(__file__).resolve().parent / "run_mutants.py"

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


def some(kernel: Kernel, count: int) -> list[Verdict]:
    """Judge a few mutants of different kinds, always the same ones."""
    of = original(kernel)
    kinds = selection(mutants(of.launch, of.lines), 1)
    chosen = random.Random(kernel.name).sample(kinds, min(count, len(kinds)))
    return [judge(kernel, of, mutant) for mutant in chosen]


def judged(
    module: str,
    name: str,
    shard: int = 0,
    shards: int = 1,
    limit_s: float | None = None,
    sample: int | None = None,
) -> list[Verdict]:
    """Judge a kernel's mutants, a part of them, or a sample, in a process of its own.

    Raises:
        RuntimeError: it failed, or was killed (a negative status); with the end of what it said.
        subprocess.TimeoutExpired: it took longer than limit_s.
    """
    command = [sys.executable, "-W", "ignore", str(RUN), name, "--suite", module, "--shard", str(shard), str(shards)]
    command += [] if sample is None else ["--sample", str(sample)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if ran.returncode:
        raise RuntimeError(f"{name}, shard {shard}: status {ran.returncode}\n{ran.stderr[-4000:]}")
    return [Verdict(**json.loads(line)) for line in ran.stdout.splitlines()]


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
