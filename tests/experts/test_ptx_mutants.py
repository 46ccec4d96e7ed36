# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the experts' kernels' PTX are found on the emulator: by a wrong value or by a check.

A few of each kernel; full: all of them.
"""

import pytest
from suite import judged, some

from tests.experts.mutants import KERNELS, SUITE

SHARDS = 2
LIMIT_S = 3600


@pytest.mark.rest
@pytest.mark.parametrize("name", KERNELS)
def test_some_mutants(name: str) -> None:
    assert SUITE.survivors(some(KERNELS[name], 1)) == []


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", SUITE.names)
def test_all_mutants(name: str, shard: int) -> None:
    verdicts = judged("tests.experts.mutants", name, shard, SHARDS, LIMIT_S)
    assert verdicts
    assert SUITE.survivors(verdicts) == []
