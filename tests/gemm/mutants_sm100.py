# SPDX-License-Identifier: Apache-2.0
"""SM100's GEMMs of quantised operands as kernels whose mutants are judged. In their problems rings go round twice."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from judge import Kernel
from suite import Rows, Suite

sys.path.append(str(Path(__file__).resolve().parent))

import scaled_cases_sm100

BY_ID = {one.id: one for one in scaled_cases_sm100.CASES}


def subject(name: str, case: str, **changes: int) -> Kernel:
    """A kernel, with its call built when it is judged.

    Args:
        case: of the kernel's tests; it has one launch.
        changes: fields of that case with another value.
    """
    one = replace(BY_ID[case], **changes)
    calls: list[Callable[[], None]] = []

    def run() -> bool:
        if not calls:
            calls.append(scaled_cases_sm100.prepared(one))
        try:
            calls[0]()
        except AssertionError:
            return False
        return True

    return Kernel(name, scaled_cases_sm100.ARCH, run, sms=one.sms, most=1, by_instruction=True)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        # All tiles by one cluster or one CTA: each ring goes on from tile to tile, and a store follows another.
        subject("SM100 rows, two CTAs", "two-cta", sms=2),
        subject("SM100 blocks", "blocks-gated", sms=1),
        subject("SM100 MXFP8", "mxfp8-gated", sms=1),
        subject("SM100 NVFP4, two CTAs", "nvfp4-two-cta-64"),
        subject("SM100 NVFP4 to NVFP4", "nvfp4-to-nvfp4", sms=1),
        subject("SM100 rows, few rows, clusters", "few-split"),
        subject("SM100 NVFP4, few rows", "few-nvfp4-gated"),
    )
}
# (pattern of the kernel, pattern of `kind: what`, reason)
EQUIVALENT: Rows = []
UNSEEN: Rows = []
HEAD = """# Mutants of SM100's GEMMs of quantised operands
"""

SUITE = Suite([*KERNELS], KERNELS.__getitem__, EQUIVALENT, UNSEEN, HEAD)
