# SPDX-License-Identifier: Apache-2.0
"""The kernels that the emulator itself is tested with: small ones, and FlashAttention-4's forward."""

from equivalent import EQUIVALENT, UNSEEN
from flash import FLASH, flash
from judge import Kernel
from judged import KERNELS
from suite import Suite

HEAD = """# Mutants of kernels on the emulator

One mistake at a time is made in the PTX of a kernel that is right, as a person might make it. "value": the result is
wrong and no check said so before. A check stops at its first finding; kernels of ours are run on a strict device, where
a warning is a finding. Schedules: lazy, eager, random, until one shows it. Of FlashAttention-4 at most two mutants of
a kind are taken, by a fixed seed; of the others all.

Made by `python tests/emulator/mutants/report.py > docs/emulator-mutants.md`; the same mutants are tests
(`pytest tests/emulator/mutants`, a selection without `-m full`).
"""


def kernel(name: str) -> Kernel:
    return KERNELS.get(name) or flash(name)


SUITE = Suite([*KERNELS, *FLASH], kernel, EQUIVALENT, UNSEEN, HEAD)
