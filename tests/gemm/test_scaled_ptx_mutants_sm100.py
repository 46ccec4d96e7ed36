# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the PTX of SM100's GEMMs of quantised operands are found on the emulator: by a value or by a check.

One of one kernel; full: all of them.
"""

import pytest

pytest.importorskip("cutlass")

from suite import judged, some

from tests.gemm.mutants_sm100 import KERNELS, SUITE

LIMIT_S = 3600
QUICK = "SM100 blocks"


@pytest.mark.rest
def test_some_mutants() -> None:
    assert SUITE.survivors(some(KERNELS[QUICK], 1)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", SUITE.names)
def test_all_mutants(name: str) -> None:
    verdicts = judged("tests.gemm.mutants_sm100", name, 0, 1, LIMIT_S)
    assert verdicts
    assert SUITE.survivors(verdicts) == []
