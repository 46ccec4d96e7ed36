# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the kernels of whole rows, RMSNorm and softmax: no register spills."""

import pytest

pytest.importorskip("cutlass")

from tests.machine_code import found, norm_subjects

SOONER = ("sm_90a-norm", "sm_90a-softmax")
IDS = [subject.id for subject in norm_subjects()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SOONER else (pytest.mark.full,)) for n in IDS])
def test_registers_suffice(name: str) -> None:
    for code in found(name):
        assert code.registers > 0
        assert code.stack == 0, f"{code.stack} bytes of stack: {code}"
