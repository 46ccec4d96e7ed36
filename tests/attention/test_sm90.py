# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernels on the emulator: right, and without a finding, whatever lies around their data."""

from dataclasses import replace

import pytest
import torch

import emulator
from dsl_backend.attention.kernel import Workspace
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.sm90.configs import ForwardConfig
from dsl_backend.attention.sm90.launch import Prefill, SplitKV
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import CASES, Case

SCHEDULES = ("eager", "lazy", "random")
SMS = 4
# What a change is checked with: each role, ring, mask, score and layout once.
QUICK = ("mixed", "window-sinks", "softcap", "alibi", "dim-80", "gqa-7", "packed-causal", "page-48", "no-keys", "fp16")


def small(spec: AttentionSpec, split: bool, seed: int) -> ForwardConfig:
    """Tiles that small problems fill, and rings that they go around; the number of warpgroups varies."""
    widest = max(spec.head_dim, spec.head_dim_v)
    tile_n = 32 if widest > 128 else 64
    if split:
        return ForwardConfig(groups=1, tile_n=tile_n, stages=2, least_share=1)
    groups = seed % 2 + 1
    return ForwardConfig(groups=groups, tile_n=tile_n, stages=2, query_stages=groups, take_turns=groups == 2)


def target() -> Target:
    return replace(from_arch("sm_90a"), sm_count=SMS)


def emulate(case: Case, schedule: str, seed: int) -> None:
    problem = case.problem()

    def adjust(planner: Planner) -> None:
        spec, scratch = planner.spec, Workspace(torch.device("cpu"))
        for name, kernel in (("short", SplitKV), ("long", Prefill)):
            operation, label, _ = getattr(planner, name)
            config = small(spec, kernel is SplitKV, seed)
            setattr(planner, name, (operation, label, kernel(spec, planner.target, scratch, config)))

    with emulator.device(arch="sm_90a", sms=SMS, schedule=schedule, seed=seed, strict=True):
        result = check.run(problem, "cute", adjust=adjust, target=target())
    check.judge(result, problem.expected(), problem.score_magnitude())


def served(case: Case) -> bool:
    spec = case.spec
    return not (spec.latent or spec.is_fp8_kv or spec.head_dim > 256 or case.tier == "gpu")


@pytest.mark.parametrize(
    ("index", "case"),
    [
        pytest.param(index, case, id=case.id, marks=() if case.id in QUICK else (pytest.mark.full,))
        for index, case in enumerate(case for case in CASES if served(case))
    ],
)
def test_case(index: int, case: Case) -> None:
    emulate(case, SCHEDULES[index % len(SCHEDULES)], index)


def test_quick_cases_exist() -> None:
    assert set(QUICK) <= {case.id for case in CASES if served(case)}
