# SPDX-License-Identifier: Apache-2.0
"""SM100's kernels of quantised operands on the emulator: right, and without a finding."""

import pytest

pytest.importorskip("cutlass")

from scaled_cases_sm100 import CASES, Emulated, emulate, random_emulated

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_REST, FUZZED_IN_FULL = 2, 10, 40

# Each case under one schedule; under the others where there is time.
IN_TURN = [
    pytest.param(one, schedule, id=f"{one.id}-{schedule}", marks=() if (i + j) % 3 == 0 else (pytest.mark.full,))
    for i, one in enumerate(CASES)
    for j, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("one", "schedule"), IN_TURN)
def test_case(one: Emulated, schedule: str) -> None:
    emulate(one, schedule, seed=1)


def marks(seed: int) -> tuple[pytest.MarkDecorator, ...]:
    if seed < FUZZED:
        return ()
    return (pytest.mark.rest,) if seed < FUZZED + FUZZED_IN_REST else (pytest.mark.full,)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=marks(seed)) for seed in range(FUZZED + FUZZED_IN_REST + FUZZED_IN_FULL)]
)
def test_fuzz(seed: int) -> None:
    emulate(random_emulated(seed), SCHEDULES[seed % 3], seed)


def test_ids_are_unique() -> None:
    assert len({one.id for one in CASES}) == len(CASES)
