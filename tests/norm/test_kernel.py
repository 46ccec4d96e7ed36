# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel on the emulator, for SM90 and SM100: right, and without a finding."""

import pytest
from norm_cases import emulate

from dsl_backend.testing.norm import CASES, NormCase, random_case

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_FULL = 10, 220


@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_case(case: NormCase, arch: str) -> None:
    for schedule in SCHEDULES:
        emulate(case, arch, schedule, seed=1)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < FUZZED else (pytest.mark.full,)) for seed in range(FUZZED + FUZZED_IN_FULL)],
)
def test_fuzz(seed: int) -> None:
    emulate(random_case(seed), ("sm_90a", "sm_100a")[seed % 2], SCHEDULES[seed % 3], seed)


def test_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
