# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the kernels of experts: no register spills, and SM90's products are left in flight."""

import pytest

pytest.importorskip("cutlass")

from tests.machine_code import experts_subjects, found

# Bytes of stack that are known and not yet gone: of tiles of 128 rows with a bias.
KNOWN = {
    "sm_90a-experts-swiglu-oai-biases": 16,
    "sm_90a-experts-geglu-tanh-input": 24,
}
QUICK = "sm_90a-experts-swiglu"
IDS = [subject.id for subject in experts_subjects()]


@pytest.mark.rest
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == QUICK else (pytest.mark.full,)) for n in IDS])
def test_registers_suffice(name: str) -> None:
    for code in found(name):
        assert code.registers > 0
        assert code.stack <= KNOWN.get(name, 0), f"{code.stack} bytes of stack: {code}"
        assert not code.serialised, f"{code.products} products and {code.waits} waits for them: {code}"
