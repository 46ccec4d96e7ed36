# SPDX-License-Identifier: Apache-2.0
"""Every mutant is found by a wrong value or by a check, unless equivalent.py says why it is no mistake.

Quick: some of each kernel of ours. Full: all of them, and those of FlashAttention-4.
"""

import pytest
from emulated_suite import SUITE
from flash import FLASH, installed
from judge import Verdict
from judged import KERNELS
from suite import judged, some

QUICK = 2  # of each kernel
SHARDS = 4
LIMIT_S = 3600


@pytest.mark.parametrize("name", KERNELS)
def test_some_mutants(name: str) -> None:
    assert SUITE.survivors(some(KERNELS[name], QUICK)) == []


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", SUITE.names)
def test_all_mutants(name: str, shard: int) -> None:
    if name in FLASH and not installed():
        pytest.skip("FlashAttention-4 is not installed: `make peers` does it")
    verdicts = judged("emulated_suite", name, shard, SHARDS, LIMIT_S)
    assert verdicts
    assert SUITE.survivors(verdicts) == []


def test_a_survivor_that_nobody_has_explained_fails() -> None:
    found = Verdict("gemm wgmma", "drop", "line 1, `wgmma.fence.sync.aligned;`: left out", None, None)
    assert SUITE.survivors([found]) == [str(found)]
