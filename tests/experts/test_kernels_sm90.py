# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels of experts for SM90 on the emulator: right, and without a finding."""

from dataclasses import replace

import pytest
import torch
from experts_cases import EMULATED, TARGET, Emulated, emulate, random_emulated

from dsl_backend.experts.configs import TILES, ExpertsConfig, fitting, products
from dsl_backend.testing.experts import ExpertsCase

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


@pytest.mark.full
@pytest.mark.parametrize("place", range(len(TILES["sm90"])))
def test_every_tile_that_is_chosen(place: int) -> None:
    """At full size, on two and a half rounds of the stages of each product; experts of several tiles and of a row."""
    case = ExpertsCase(tokens=1, num_experts=3, hidden=8, width=8, topk=2, routing="zipf", biases=place % 2 == 0)
    first, second = (fitting(gemm, TARGET)[place] for gemm in products(case.spec))
    hidden, width = (64 * tiles.stages * 5 // 2 - 24 for tiles in (first, second))
    case = replace(case, tokens=first.tile_m * 2 - 3, hidden=hidden, width=width)
    config = ExpertsConfig(first=first, second=second)
    emulate(Emulated(id=str(config), why="real tiles", case=case, config=config), "random", place)


def test_ids_are_unique() -> None:
    assert len({one.id for one in EMULATED}) == len(EMULATED)
