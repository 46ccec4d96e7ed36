# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels for SM100 on the emulator: right, and without a finding."""

from dataclasses import replace

import pytest
from gemm_cases import CASES_SM100, Emulated, emulate, random_sm100, spec_of

from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.configs import fitting
from dsl_backend.gemm.sm100.configs import GATED_SPLIT_K, GEMMS, SMALL_M, SPLIT_K, SmallMConfig
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.linear import LinearCase

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_FULL = 3, 150

# Each case under one schedule; under the others where there is time.
IN_TURN = [
    pytest.param(one, schedule, id=f"{one.id}-{schedule}", marks=() if (i + j) % 3 == 0 else (pytest.mark.full,))
    for i, one in enumerate(CASES_SM100)
    for j, schedule in enumerate(SCHEDULES)
]


@pytest.mark.parametrize(("one", "schedule"), IN_TURN)
def test_case(one: Emulated, schedule: str) -> None:
    emulate(one, schedule, seed=1)


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < FUZZED else (pytest.mark.full,)) for seed in range(FUZZED + FUZZED_IN_FULL)],
)
def test_fuzz(seed: int) -> None:
    emulate(random_sm100(seed), SCHEDULES[seed % 3], seed)


@pytest.mark.full
@pytest.mark.parametrize(
    ("activation", "place"),
    [
        (activation, place)
        for activation, split_k in ((Swiglu(), GATED_SPLIT_K), (None, SPLIT_K))
        for place in range(len(SMALL_M) + len(split_k) + len(GEMMS))
    ],
)
def test_every_kernel_that_is_chosen(activation: Swiglu | None, place: int) -> None:
    """At full size, on two and a half rounds of its stages."""
    target = from_arch("sm_100a")
    case = LinearCase(rows=1, n=200, k=8, activation=activation)
    # A k that any number of splits divides.
    config = fitting(replace(spec_of(case), k=4096), target)[place]
    if isinstance(config, SmallMConfig):
        case = replace(case, rows=config.tile_tokens - 3, k=config.tile_k * config.stages * 5 // 2 - 24)
    else:
        case = replace(case, rows=config.tile_m * config.cluster - 3, k=64 * config.stages * 5 // 2 - 24)
    emulate(Emulated(id=str(config), why="real tiles", case=case, config=config, sms=2), "random", place)


def test_ids_are_unique() -> None:
    assert len({one.id for one in CASES_SM100}) == len(CASES_SM100)
