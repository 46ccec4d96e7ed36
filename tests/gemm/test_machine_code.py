# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the kernels of linear layers: no register spills, and SM90's products are left in flight."""

import pytest

pytest.importorskip("cutlass")

from tests.machine_code import found, linear_subjects

QUICK = ("sm_90a-swiglu", "sm_100a-swiglu-oai-all")
# Bytes of stack that are known and not yet gone. Swiglu's hold one value from before the roles part, which each loads
# twice in front of its loop.
KNOWN = {
    "sm_90a-swiglu-all": 8,
    "sm_90a-swiglu-oai-all": 40,
    "sm_90a-geglu-all": 8,
    "sm_90a-geglu-tanh-all": 40,
    "sm_90a-scaled-swiglu": 8,
}
IDS = [subject.id for subject in linear_subjects()]


def check(name: str, every: int) -> None:
    for code in found(name, every):
        assert code.registers > 0
        assert code.stack <= KNOWN.get(name, 0), f"{code.stack} bytes of stack: {code}"
        assert not code.serialised, f"{code.products} products and {code.waits} waits for them: {code}"


@pytest.mark.full
@pytest.mark.parametrize("name", IDS)
def test_registers_suffice(name: str) -> None:
    check(name, 1)


@pytest.mark.parametrize("name", QUICK)
def test_registers_of_some_suffice(name: str) -> None:
    """Of every fifth configuration."""
    check(name, 5)
