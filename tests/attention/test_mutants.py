# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the main kernels' PTX are found on the emulator: by a wrong value or by a check.

Quick: some of each kernel. Full: all of them.
"""

import pytest
from suite import judged, some

from tests.attention.mutants import KERNELS, SUITE

QUICK = 1  # of each kernel
SHARDS = 2
LIMIT_S = 3600


@pytest.mark.parametrize("name", KERNELS)
def test_some_mutants(name: str) -> None:
    assert SUITE.survivors(some(KERNELS[name], QUICK)) == []


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", SUITE.names)
def test_all_mutants(name: str, shard: int) -> None:
    verdicts = judged("tests.attention.mutants", name, shard, SHARDS, LIMIT_S)
    assert verdicts
    assert SUITE.survivors(verdicts) == []
