# SPDX-License-Identifier: Apache-2.0
"""Every mutant is found by a wrong value or by a check, unless equivalent.py says why it is no mistake.

Quick: some of each kernel of ours. Full: all of them, and those of FlashAttention-4.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from emulated_suite import SUITE
from flash import FLASH, installed
from judge import Verdict, judge, mutants_of, original
from judged import KERNELS
from mutate import selection

HERE = Path(__file__).resolve().parent
QUICK = 4  # of each kernel
SHARDS = 4
LIMIT_S = 3600


@pytest.mark.parametrize("name", KERNELS)
def test_some_mutants(name: str) -> None:
    kernel = KERNELS[name]
    of = original(kernel)
    kinds = selection(mutants_of(kernel, of), 1)
    chosen = random.Random(name).sample(kinds, min(QUICK, len(kinds)))
    assert SUITE.survivors([judge(kernel, of, mutant) for mutant in chosen]) == []


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", SUITE.names)
def test_all_mutants(name: str, shard: int) -> None:
    if name in FLASH and not installed():
        pytest.skip("FlashAttention-4 is not installed: `make peers` does it")
    command = [sys.executable, "-W", "ignore", str(HERE / "run_mutants.py"), name, "--shard", str(shard), str(SHARDS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    verdicts = [Verdict(**json.loads(line)) for line in ran.stdout.splitlines()]
    assert verdicts
    assert SUITE.survivors(verdicts) == []


def test_a_survivor_that_nobody_has_explained_fails() -> None:
    found = Verdict("gemm wgmma", "drop", "line 1, `wgmma.fence.sync.aligned;`: left out", None, None)
    assert SUITE.survivors([found]) == [str(found)]
