# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the PTX of SM90's 8-bit GEMM are found on the emulator: by a wrong value or by a check.

A few of each kernel; full: all of them.
"""

import pytest

pytest.importorskip("cutlass")

from suite import judged, some

from tests.gemm.mutants import KERNELS, SUITE

LIMIT_S = 3600


@pytest.mark.rest
@pytest.mark.parametrize("name", KERNELS)
def test_some_mutants(name: str) -> None:
    assert SUITE.survivors(some(KERNELS[name], 1)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", SUITE.names)
def test_all_mutants(name: str) -> None:
    verdicts = judged("tests.gemm.mutants", name, 0, 1, LIMIT_S)
    assert verdicts
    assert SUITE.survivors(verdicts) == []
