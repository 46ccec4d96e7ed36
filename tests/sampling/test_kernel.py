# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel on the emulator, for SM90 and SM100: the definition's tokens, and no finding."""

import pytest

pytest.importorskip("cutlass")

from sampling_cases import emulate

from dsl_backend.testing.sampling import CASES, FEW, FOUR, SamplingCase, random_case

SCHEDULES = ("eager", "lazy", "random")
FUZZED_IN_FULL = 200
# A kernel takes seconds to compile, and runs slowly: at every change each case has one schedule on SM90, and SM100 has
# one case in each.
ON_SM100, SLOW = "filters-4", "whole-16"


def marks(case: SamplingCase, arch: str, schedule: str) -> tuple[pytest.MarkDecorator, ...]:
    if case.id == SLOW:
        return (pytest.mark.full,)
    often = case.id == ON_SM100 if arch == "sm_100a" else schedule == SCHEDULES[CASES.index(case) % len(SCHEDULES)]
    return () if often else (pytest.mark.full,)


@pytest.mark.parametrize(
    ("case", "arch", "schedule"),
    [
        pytest.param(case, arch, schedule, id=f"{case.id}-{arch}-{schedule}", marks=marks(case, arch, schedule))
        for arch in ("sm_90a", "sm_100a")
        for case in CASES
        for schedule in SCHEDULES
    ],
)
def test_case(case: SamplingCase, arch: str, schedule: str) -> None:
    emulate(case, arch, schedule, seed=1)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < FEW else (pytest.mark.full,)) for seed in range(FEW + FUZZED_IN_FULL)],
)
def test_fuzz(seed: int) -> None:
    case = random_case(seed)
    emulate(case, "sm_100a" if case.kind is FOUR else "sm_90a", SCHEDULES[seed // 3 % 3], seed)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 3 else (pytest.mark.full,)) for seed in range(FUZZED_IN_FULL)]
)
def test_fuzz_of_top_p(seed: int) -> None:
    emulate(random_case(seed, 3000, top_p_alone=True), "sm_90a", SCHEDULES[seed // 3 % 3], seed)


def test_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
