# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernels on the emulator: right, and without a finding, whatever lies around their data."""

import pytest

from dsl_backend.attention.kernel import Kernel
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.sm90.configs import ForwardConfig
from dsl_backend.attention.sm90.launch import Prefill, SplitKV
from dsl_backend.testing.cases import Case
from tests.attention.emulated import SERVED, SERVED_FP8, emulate, scratch

# What a change is checked with: each role, ring, mask, score and layout once.
QUICK = ("window-sinks", "dim-80", "gqa-7", "packed-causal", "page-48")


def make(planner: Planner, short: bool, index: int) -> Kernel:
    spec, target = planner.spec, planner.target
    tile_n = 32 if max(spec.head_dim, spec.head_dim_v) > 128 else 64
    staging = 2 + index % 2 if spec.is_fp8_kv else 0
    if short:
        config = ForwardConfig(groups=1, tile_n=tile_n, stages=2, least_share=1, staging=staging)
        return SplitKV(spec, target, scratch(), config)
    groups = index % 2 + 1
    turns = groups == 2
    config = ForwardConfig(
        groups=groups, tile_n=tile_n, stages=2, query_stages=groups, take_turns=turns, staging=staging
    )
    return Prefill(spec, target, scratch(), config)


@pytest.mark.parametrize(
    ("index", "case"),
    [
        pytest.param(index, case, id=case.id, marks=() if case.id in QUICK else (pytest.mark.full,))
        for index, case in enumerate((*SERVED, *SERVED_FP8))
    ],
)
def test_case(index: int, case: Case) -> None:
    emulate(case, "sm_90a", lambda planner, short: make(planner, short, index), index)


def test_quick_cases_exist() -> None:
    assert set(QUICK) <= {case.id for case in (*SERVED, *SERVED_FP8)}
