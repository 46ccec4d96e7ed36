# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels of experts for SM90 on the emulator: right, and without a finding."""

from dataclasses import replace

import pytest
import torch
from experts_cases import ADDING, EMULATED, SCHEDULES, SEEDS, TARGET, Emulated, emulate, in_turn, random_emulated

from dsl_backend.experts.configs import TILES, ExpertsConfig, fitting, products
from dsl_backend.testing.experts import ExpertsCase


@pytest.mark.parametrize(("one", "schedule"), in_turn(EMULATED, ("split", "pingpong", "shared")))
def test_case(one: Emulated, schedule: str) -> None:
    emulate(one, schedule, seed=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("one", ADDING, ids=lambda one: one.id)
def test_sums_by_atomic_operations(one: Emulated, schedule: str) -> None:
    emulate(one, schedule, seed=1)


@pytest.mark.rest
@pytest.mark.parametrize("seed", SEEDS)
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
