# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the kernels of whole rows, RMSNorm and softmax: no register spills."""

import pytest

pytest.importorskip("cutlass")

from tests.machine_code import found, norm_subjects

SOONER = ("sm_90a-norm", "sm_90a-softmax")
IDS = [subject.id for subject in norm_subjects()]


def check(name: str, every: int) -> None:
    for code in found(name, every):
        assert code.registers > 0
        assert code.stack == 0, f"{code.stack} bytes of stack: {code}"


@pytest.mark.full
@pytest.mark.parametrize("name", IDS)
def test_registers_suffice(name: str) -> None:
    check(name, 1)


@pytest.mark.parametrize("name", SOONER)
def test_registers_of_some_suffice(name: str) -> None:
    """Of every third configuration."""
    check(name, 3)
