# SPDX-License-Identifier: Apache-2.0
"""A case on the emulator against what a chip answered."""

import numpy as np
from micro import Golden
from micro_case import Case, Sum
from micro_compare import Comparison, compare_case
from micro_emulate import emulate
from micro_tensor import plain


class Mismatch(Exception):
    """The emulator and the chip differ, in words."""


def own_answer(case: Case) -> tuple[np.ndarray, "np.ndarray | None"]:
    """The emulator's output and, where a rule needs it, that of inputs without signs.

    Raises:
        Mismatch: the emulator found a mistake in a kernel that has none.
    """
    out, machine = emulate(case)
    if machine.findings.errors:
        raise Mismatch(f"the emulator has a finding: {machine.findings.errors[0]}")
    sized = any(isinstance(result.rule, Sum) for result in case.results)
    return out, emulate(case, case.magnitudes())[0] if sized else None


def check(case: Case, golden: Golden) -> list[Comparison]:
    """All comparisons of a case.

    Raises:
        Mismatch: one of them is wrong, the chip did not run the case, or it ran another version of it.
    """
    if case.name in golden.errors:
        raise Mismatch(f"{golden.source} did not run it: {golden.errors[case.name]}")
    if golden.digests.get(case.name) != case.digest():
        raise Mismatch("the case has changed since it ran on the chip: run make.py again")
    chip = golden.outputs[case.name]
    if case.name.startswith("question/"):
        _, machine = emulate(case)
        if bool(machine.findings.errors) and (chip == plain(case)).all():
            raise Mismatch(f"{golden.source} does what the emulator refuses: {machine.findings.errors[0].message}")
        return []
    own, magnitude = own_answer(case)
    found = compare_case(case, chip, own, magnitude)
    if wrong := [one for one in found if one.wrong]:
        raise Mismatch("\n".join(map(str, wrong)))
    return found
