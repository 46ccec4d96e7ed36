# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels on the emulator: right, and without a finding."""

import pytest
from linear_kernels import CASES, Emulated, emulate, random_emulated

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_FULL = 6, 150


@pytest.mark.parametrize("one", [pytest.param(one, id=one.id) for one in CASES])
def test_case(one: Emulated) -> None:
    for schedule in SCHEDULES:
        emulate(one, schedule, seed=1)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < FUZZED else (pytest.mark.full,)) for seed in range(FUZZED + FUZZED_IN_FULL)],
)
def test_fuzz(seed: int) -> None:
    emulate(random_emulated(seed), SCHEDULES[seed % 3], seed)


def test_ids_are_unique() -> None:
    assert len({one.id for one in CASES}) == len(CASES)
