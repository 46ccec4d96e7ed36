# SPDX-License-Identifier: Apache-2.0
"""SM90's CuTe DSL kernels of quantised operands on the emulator: right, and without a finding."""

import pytest

pytest.importorskip("cutlass")

from scaled_cases import CASES, ScaledEmulated, emulate, random_scaled

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_REST, FUZZED_IN_FULL = 1, 10, 140
QUICK = ("rows-gated", "blocks-across", "to-groups-of-two", "few-blocks-gated", "to-rows", "to-groups-blocks-few")


def marks(one: ScaledEmulated, first: bool) -> tuple[pytest.MarkDecorator, ...]:
    """One schedule of each case in `make test-rest`, of some in `make test`, the others where there is time."""
    if not first:
        return (pytest.mark.full,)
    return () if one.id in QUICK else (pytest.mark.rest,)


IN_TURN = [
    pytest.param(one, schedule, id=f"{one.id}-{schedule}", marks=marks(one, (i + j) % 3 == 0))
    for i, one in enumerate(CASES)
    for j, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("one", "schedule"), IN_TURN)
def test_case(one: ScaledEmulated, schedule: str) -> None:
    emulate(one, schedule, seed=1)


def mark_of(seed: int) -> tuple[pytest.MarkDecorator, ...]:
    if seed < FUZZED:
        return ()
    return (pytest.mark.rest,) if seed < FUZZED + FUZZED_IN_REST else (pytest.mark.full,)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=mark_of(seed)) for seed in range(FUZZED + FUZZED_IN_REST + FUZZED_IN_FULL)]
)
def test_fuzz(seed: int) -> None:
    emulate(random_scaled(seed), SCHEDULES[seed % 3], seed)


def test_ids_are_unique() -> None:
    assert len({one.id for one in CASES}) == len(CASES)
