# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the PTX of the kernels with e4m3 products are found on the emulator: a sample of each kernel."""

import pytest
from suite import some

from tests.attention.fp8_mutants import KERNELS, SUITE

SAMPLE = 12  # of each kernel, of different kinds


@pytest.mark.full
@pytest.mark.parametrize("name", KERNELS)
def test_some_mutants(name: str) -> None:
    assert SUITE.survivors(some(KERNELS[name], SAMPLE)) == []
