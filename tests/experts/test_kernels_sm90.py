# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels of experts for SM90 on the emulator: right, and without a finding."""

import pytest
import torch
from experts_cases import EMULATED, Emulated, emulate, random_emulated

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_FULL = 6, 100
QUICK = ("split", "pingpong")


def marks(one: Emulated, other_schedule: bool) -> tuple[pytest.MarkDecorator, ...]:
    if other_schedule:
        return (pytest.mark.full,)
    return () if one.id in QUICK else (pytest.mark.rest,)


# Each case under one schedule; under the others where there is time.
IN_TURN = [
    pytest.param(one, schedule, id=f"{one.id}-{schedule}", marks=marks(one, (i + j) % 3 != 0))
    for i, one in enumerate(EMULATED)
    for j, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("one", "schedule"), IN_TURN)
def test_case(one: Emulated, schedule: str) -> None:
    emulate(one, schedule, seed=1)


@pytest.mark.rest
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < FUZZED else (pytest.mark.full,)) for seed in range(FUZZED + FUZZED_IN_FULL)],
)
def test_fuzz(seed: int) -> None:
    emulate(random_emulated(seed), SCHEDULES[seed % 3], seed)


@pytest.mark.rest
def test_the_bits_are_the_same_in_any_order_of_events() -> None:
    one = next(one for one in EMULATED if one.id == "rows")
    first = emulate(one, "eager")
    assert torch.equal(first, emulate(one, "random", seed=5))


def test_ids_are_unique() -> None:
    assert len({one.id for one in EMULATED}) == len(EMULATED)
