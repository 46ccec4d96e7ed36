# SPDX-License-Identifier: Apache-2.0
"""The SM100 kernels on the emulator: right, and without a finding, whatever lies around their data."""

import pytest

from dsl_backend.attention.kernel import Kernel
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.sm100.configs import ForwardConfig
from dsl_backend.attention.sm100.launch import Prefill, SplitKV
from dsl_backend.testing.cases import Case
from tests.attention.emulated import SERVED, emulate, scratch

# What a change is checked with: each role, ring, mask, score and layout once.
QUICK = ("mixed", "window-sinks", "softcap", "packed-192-128")


def make(planner: Planner, short: bool, index: int) -> Kernel:
    spec, target = planner.spec, planner.target
    halves = 1 if spec.head_dim_v > 128 else index % 2 + 1
    stages = 2 + index % 2
    if short:
        config = ForwardConfig(halves=halves, alternate=halves == 2, tile_n=64, stages=stages, least_share=1)
        return SplitKV(spec, target, scratch(), config)
    return Prefill(
        spec, target, scratch(), ForwardConfig(halves=halves, tile_n=64, stages=stages, query_stages=stages - 1)
    )


@pytest.mark.parametrize(
    ("index", "case"),
    [
        pytest.param(index, case, id=case.id, marks=() if case.id in QUICK else (pytest.mark.full,))
        for index, case in enumerate(SERVED)
    ],
)
def test_case(index: int, case: Case) -> None:
    emulate(case, "sm_100a", lambda planner, short: make(planner, short, index), index)


def test_quick_cases_exist() -> None:
    assert set(QUICK) <= {case.id for case in SERVED}
