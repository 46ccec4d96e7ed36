# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels for SM100 on the emulator: right, and without a finding."""

from dataclasses import replace

import pytest
from gemm_cases import CASES_SM100, SMALL_M_SM100, TWO_CTA, Emulated, emulate, random_sm100, spec_of

from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.configs import Config, fitting
from dsl_backend.gemm.sm100.configs import GEMMS, SMALL_M, SmallMConfig
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing.linear import LinearCase
from emulator.host.launch import Launch
from emulator.machine import Machine

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


class Reader(Machine):
    """Keeps the PTX of its last launch."""

    ptx = ""

    def launch(self, launch: Launch) -> None:
        self.ptx = launch.ptx
        super().launch(launch)


# The load warp waits for the kernel before. Where it loads weights before that, the epilogue waits too.
@pytest.mark.parametrize(("config", "waits"), [(TWO_CTA, 1), (SMALL_M_SM100, 2)], ids=["gemm", "small-m"])
def test_order_of_launches(config: Config, waits: int) -> None:
    """A kernel allocates its tensor memory before the next kernel may start, which would take it and wait for this one.

    Launches overlap on a GPU only, so the order of the instructions is tested.
    """
    one = Emulated(id="order", why="launches that overlap", case=LinearCase(rows=1, n=8, k=8), config=config)
    machine = Reader(one.arch, one.sms, "eager")
    emulate(one, "eager", machine=machine)
    words = ("tcgen05.alloc", "griddepcontrol.launch_dependents", "griddepcontrol.wait")
    assert [machine.ptx.count(word) for word in words] == [1, 1, waits]
    assert machine.ptx.index(words[0]) < machine.ptx.index(words[1])


@pytest.mark.full
@pytest.mark.parametrize("activation", [Swiglu(), None], ids=["gated", "plain"])
@pytest.mark.parametrize("place", range(len(SMALL_M) + len(GEMMS)))
def test_every_kernel_that_is_chosen(place: int, activation: Swiglu | None) -> None:
    """At full size, on two and a half rounds of its stages."""
    target = from_arch("sm_100a")
    case = LinearCase(rows=1, n=200, k=8, activation=activation)
    config = fitting(spec_of(case), target)[place]
    if isinstance(config, SmallMConfig):
        case = replace(case, rows=config.tile_tokens - 3, k=config.tile_k * config.stages * 5 // 2 - 24)
    else:
        case = replace(case, rows=config.tile_m * config.cluster - 3, k=64 * config.stages * 5 // 2 - 24)
    emulate(Emulated(id=str(config), why="real tiles", case=case, config=config, sms=2), "random", place)


def test_ids_are_unique() -> None:
    assert len({one.id for one in CASES_SM100}) == len(CASES_SM100)
