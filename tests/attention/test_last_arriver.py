# SPDX-License-Identifier: Apache-2.0
"""Split output tiles that the last of their CTAs merges: results, the combine kernel's bits, counters, and mistakes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import emulator
from dsl_backend.attention.cute.combine import MAX_SPLITS_PER_WARP, SPLITS_AT_ONCE
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import SplitKV
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case
from tests.attention.emulated import SCHEDULES, scratch
from tests.attention.unseen import expected_of

TILE = 16  # keys
MERGES = ("kernel", "inside")


def config_of(merge: str) -> DenseConfig:
    return DenseConfig(groups=1, tile_n=TILE, stages=2, min_split_tiles=1, merge=merge)


def outputs_of(case: Case, merge: str, sms: int, schedule: str, workspace: Workspace, runs: int = 1) -> list:
    """The results of a case, each of them judged, and the kernel's counters are 0 behind each run."""
    problem = case.problem()
    expected, magnitude = expected_of(problem, False)

    def make(planner: Planner) -> Kernel:
        return SplitKV(planner.spec, planner.target, workspace, config_of(merge))

    def adjust(planner: Planner) -> None:
        kernel = make(planner)
        planner.short = (*planner.short[:2], kernel)
        planner.long = (*planner.long[:2], kernel)

    target, found = replace(from_arch("sm_90a"), sm_count=sms), []
    for seed in range(runs):
        with emulator.device(arch="sm_90a", sms=sms, schedule=schedule, seed=seed, strict=True):
            found.append(check.run(problem, "cute", adjust=adjust, target=target, with_lse=True))
        check.judge(found[-1], expected, magnitude, with_lse=True)
        assert not workspace.flags(0).any()
    return found


@pytest.mark.parametrize(
    ("schedule", "splits", "dim"),
    [
        ("eager", 2, 48),
        ("lazy", MAX_SPLITS_PER_WARP, 128),
        ("random", MAX_SPLITS_PER_WARP + 1, 128),
        ("lazy", 19, 64),
    ],
)
def test_bits_of_the_combine_kernel(schedule: str, splits: int, dim: int) -> None:
    """As many splits as one warp sums in turn, and more; rows of several tokens and heads, with sinks."""
    case = Case(q_lens=(2,), kv_lens=(4 * splits * TILE - 3,), heads=(3, 1), dim=dim, sinks=True)
    (expected,) = outputs_of(case, "kernel", splits, schedule, scratch())
    (found,) = outputs_of(case, "inside", splits, schedule, scratch())
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
