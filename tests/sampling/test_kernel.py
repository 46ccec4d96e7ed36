# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel on the emulator, for SM90 and SM100: the definition's tokens, and no finding."""

import pytest

pytest.importorskip("cutlass")

from sampling_cases import CASES, FOUR, KINDS, SIXTEEN, TWO, Case, emulate, random_case

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_FULL = 20, 200
# A kernel takes seconds to compile: at every change SM100 gets the two that differ most.
RARE = {("sm_100a", id(TWO)), ("sm_100a", id(SIXTEEN))}


def marks(arch: str, kind: object) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.full,) if (arch, id(kind)) in RARE else ()


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        pytest.param(case, arch, id=f"{case.id}-{arch}", marks=marks(arch, case.kind))
        for arch in ("sm_90a", "sm_100a")
        for case in CASES
    ],
)
def test_case(case: Case, arch: str) -> None:
    for schedule in SCHEDULES:
        emulate(case, arch, schedule, seed=1)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < FUZZED else (pytest.mark.full,)) for seed in range(FUZZED + FUZZED_IN_FULL)],
)
def test_fuzz(seed: int) -> None:
    arch = "sm_100a" if seed % len(KINDS) == KINDS.index(FOUR) else "sm_90a"
    emulate(random_case(seed), arch, SCHEDULES[seed % 3], seed)


def test_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
