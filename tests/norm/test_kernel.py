# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel on the emulator, for SM90 and SM100: right, and without a finding."""

import pytest
from norm_cases import emulate

from dsl_backend.testing.norm import CASES, NormCase, random_case

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_FULL = 10, 220


# Cases of `make test`; the code of both SMs is the same but for its target, so of the others each runs on one of them.
QUICK = {("sm_90a", "head"), ("sm_90a", "cluster-4"), ("sm_100a", "special-cluster")}


def marks(turn: int, arch: str, case: NormCase) -> tuple[pytest.MarkDecorator, ...]:
    return () if turn % 2 == 0 or (arch, case.id) in QUICK else (pytest.mark.full,)


@pytest.mark.parametrize(
    ("arch", "case"),
    [
        pytest.param(arch, case, id=f"{arch}-{case.id}", marks=marks(i + j, arch, case))
        for i, arch in enumerate(("sm_90a", "sm_100a"))
        for j, case in enumerate(CASES)
    ],
)
def test_case(arch: str, case: NormCase) -> None:
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
