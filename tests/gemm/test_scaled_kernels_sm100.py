# SPDX-License-Identifier: Apache-2.0
"""SM100's kernels of quantised operands on the emulator: right, and without a finding."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")

from scaled_cases_sm100 import (
    CASES,
    PROMOTED,
    SCALED_128,
    SMEM_BYTES,
    Emulated,
    emulate,
    random_emulated,
)

import emulator
from dsl_backend.errors import Unsupported
from dsl_backend.gemm.activation import Swiglu
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.scaled import dispatch
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing.scaled import Outputs, budget_of, check_outputs, tensors

SCHEDULES = ("eager", "lazy", "random")
FUZZED, FUZZED_IN_REST, FUZZED_IN_FULL = 1, 5, 45
# One of each kernel, and what shares its pipelines with a second CTA.
QUICK = ("two-cta", "mxfp8-gated", "nvfp4-two-cta", "blocks-gated", "nvfp4-to-nvfp4")


def marks_of(one: Emulated, place: int) -> tuple[pytest.MarkDecorator, ...]:
    """Each case under one schedule; under the others where there is time."""
    if place % len(SCHEDULES):
        return (pytest.mark.full,)
    return () if one.id in QUICK else (pytest.mark.rest,)


IN_TURN = [
    pytest.param(one, schedule, id=f"{one.id}-{schedule}", marks=marks_of(one, i + j))
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


@pytest.mark.parametrize(
    "one", [one for one in CASES if one.id in ("rows", "mxfp8", "nvfp4", "blocks")], ids=lambda one: one.id
)
def test_had_by_name_alone(one: Emulated) -> None:
    target, spec = from_arch("sm_100a"), one.case.spec
    assert dispatch.choose(spec, target, "cute-sm100").name == "cute-sm100"
    assert all(entry.name != "cute-sm100" for entry, _ in dispatch.judge(spec, target))


@pytest.mark.rest
def test_bound_by_the_table() -> None:
    (one,) = (one for one in CASES if one.id == "rows")
    spec, given = one.case.spec, tensors(one.case, "cpu")
    out = torch.zeros(one.case.rows, one.case.n, dtype=torch.bfloat16)
    with emulator.device(arch="sm_100a", sms=4, schedule="eager", strict=True):
        bind = dispatch.choose(spec, from_arch("sm_100a"), "cute-sm100").load()
        launch = bind(spec, Rows(one.case.rows), from_arch("sm_100a"), Workspace(torch.device("cpu")))
        launch(ScaledOperands(given.x.values, given.x.scale, given.weight.values, given.weight.scale, None, out))
    check_outputs(one.case, Outputs(out, None), budget_of(one.case, given))


def test_objections() -> None:
    target = from_arch("sm_100a")
    spec = replace(CASES[0].case, x="nvfp4", weight="nvfp4", k=656).spec
    with pytest.raises(Unsupported, match="k 656 is not a multiple of 32"):
        dispatch.choose(spec, target, "cute-sm100")
    with pytest.raises(Unsupported, match="no kernel but SM100's multiplies it"):
        dispatch.choose(replace(CASES[0].case, x="mxfp8", weight="mxfp8").spec, from_arch("sm_90a"))
    gated = replace(CASES[0].case, activation=Swiglu(), x="mxfp8", weight="mxfp8").spec
    assert any("n 80 is not a multiple of 128" in reason for reason in SCALED_128.objections(gated, SMEM_BYTES))
    assert any("several scales" in reason for reason in PROMOTED.objections(gated, SMEM_BYTES))
