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


def check_question(case: Case, golden: Golden) -> None:
    """What the emulator refuses must be a fault of the launch on the chip, or come to something else there."""
    _, machine = emulate(case)
    refused = machine.findings.errors
    fault = golden.errors.get(case.name, "")
    if fault and not fault.startswith("cuCtxSynchronize: CUDA_ERROR_ILLEGAL"):
        raise Mismatch(f"{golden.source} gave no answer: {fault}")
    if fault and not refused:
        raise Mismatch(f"the emulator does what {golden.source} refuses: {fault}")
    if refused and not fault and (golden.outputs[case.name] == plain(case)).all():
        raise Mismatch(f"{golden.source} does what the emulator refuses: {refused[0].message}")


def check(case: Case, golden: Golden) -> list[Comparison]:
    """All comparisons of a case.

    Raises:
        Mismatch: one of them is wrong, the chip did not run the case, or it ran another version of it.
    """
    if case.name.startswith("question/"):
        check_question(case, golden)
        return []
    if case.name in golden.errors:
        raise Mismatch(f"{golden.source} did not run it: {golden.errors[case.name]}")
    if golden.digests.get(case.name) != case.digest():
        raise Mismatch("the case has changed since it ran on the chip: run make.py again")
    chip = golden.outputs[case.name]
    own, magnitude = own_answer(case)
    found = compare_case(case, chip, own, magnitude)
    if wrong := [one for one in found if one.wrong]:
        raise Mismatch("\n".join(map(str, wrong)))
    return found
