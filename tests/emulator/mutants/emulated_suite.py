# SPDX-License-Identifier: Apache-2.0
"""The kernels that the emulator itself is tested with: small ones, and FlashAttention-4's forward."""

from equivalent import EQUIVALENT, UNSEEN
from flash import FLASH, flash
from judge import Kernel
from judged import KERNELS
from suite import Suite

HEAD = """# Mutants of kernels on the emulator

This page shows which mistakes in a kernel the emulator finds. A mutant is a correct kernel with one change in its PTX,
of the kind that a person might make by mistake.

- A mutant is found by "check" if one of the emulator's checks reports it, and by "value" if no check does and the
  result is wrong. A check stops at its first finding.
- Small kernels run on a strict device, where a warning is a finding.
- The schedules lazy, eager and random run in this order until one finds the mutant.
- Of FlashAttention-4 at most two mutants of a kind are taken, by a fixed seed; of the other kernels all.

Made by `python tests/emulator/mutants/report.py > docs/emulator-mutants.md`. The same mutants are tests: `pytest
tests/emulator/mutants` runs all of them, `-m 'not full'` a selection.
"""


def kernel(name: str) -> Kernel:
    return KERNELS.get(name) or flash(name)


SUITE = Suite([*KERNELS, *FLASH], kernel, EQUIVALENT, UNSEEN, HEAD)
