# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the fold of a batch-invariant MLA layer's splits in shared memory: the emulator or the judge finds them.

A fence that is missing behind the fold is not among them: with two key tiles or more in a split, the fence behind P
comes after the last store.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import emulator
from dsl_backend.attention.cute import mla as tiled_mla
from dsl_backend.attention.cute.fake_args import fake_args, fake_mla_tensors
from dsl_backend.attention.cute.loader import mla as loader
from dsl_backend.attention.cute.scheduler import split_kv
from dsl_backend.attention.cute.sm90 import mla_mma, split_fold
from dsl_backend.attention.cute.sm90.mla_configs import MlaConfig
from dsl_backend.attention.cute.sm90.mla_host import MlaSplitKV
from dsl_backend.attention.cute.sm90.mla_kernel import MlaForward
from dsl_backend.attention.protocol import Operands
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case, mla
from emulator.errors import EmulatorError
from tests.mistakes import Mistake, spoil_methods, spoilt

CONFIG = MlaConfig(tile_n=32, stages=3, speculative_max=True, fold_in_smem=True)
SPLIT_KEYS = 64


@dataclass(frozen=True)
class Run:
    """A case on so many SMs."""

    case: Case
    sms: int

    def __call__(self) -> None:
        """On the schedules that show missing waits and copies done early."""
        for schedule in ("lazy", "eager"):
            self.judge(schedule)

    def judge(self, schedule: str) -> None:
        problem, target = self.case.problem(), replace(from_arch("sm_90a"), sm_count=self.sms)
        spec, result = replace(problem.spec, batch_invariant=True), check.empty_result(problem)
        kernel = fresh()(spec, target, Workspace(torch.device("cpu")), CONFIG)
        batch = problem.batch
        with emulator.device(arch="sm_90a", sms=self.sms, schedule=schedule, strict=True):
            kernel.bind(batch, 1, batch.max_query_len)(
                Operands(problem.q, None, problem.keys, problem.values, result.out, result.lse, None, None, None, None)
            )
        check.judge(result, problem.expected(), problem.score_magnitude())


def fresh() -> type[MlaSplitKV]:
    """The kernel with short splits, compiled anew: cached ones were compiled from other source."""

    class Fresh(MlaSplitKV):
        tiles_per_split = SPLIT_KEYS // CONFIG.tile_n

        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(MlaForward(key), fake_args(key, fake_mla_tensors(key)), target.arch, "")

    return Fresh


# Q of the second request is loaded to where the fold of the first one waits.
ONE_CTA = Run(mla(16, (288, 256), q_lens=(1, 3), kv_lens=(150, 70)), 1)
# A request's splits belong to several CTAs, of which the first folds some.
SEVERAL_CTAS = Run(mla(16, (288, 256), q_lens=(1, 1), kv_lens=(500, 290)), 3)

MISTAKES = (
    (
        ONE_CTA,
        mla_mma.MlaMmaConsumer,
        "Q is released before the fold is read",
        "keeps_q = folds and",
        "keeps_q = False and",
    ),
    (
        ONE_CTA,
        mla_mma.MlaMmaConsumer,
        "chunks of few rows lie apart",
        "few_rows_chunk = chunk if",
        "few_rows_chunk = chunk * wide if",
    ),
    (ONE_CTA, mla_mma.MlaMmaConsumer, "warpgroups share a fold", "self.group * 32 + thread % 32", "thread % 32"),
    (ONE_CTA, loader.MlaLoadWarp, "few rows are loaded apart", "(work, self.sQ_few_rows,", "(work, self.sQ,"),
    (ONE_CTA, tiled_mla.TiledMla, "the fold lies on rows of Q", "+ ROWS * self.chunk", "+ 0 * self.chunk"),
    (
        ONE_CTA,
        split_fold.SplitFold,
        "the wrong workspace is read",
        "if num_rows <= self.few_rows:\n                    self.load_rows",
        "if num_rows < 0:\n                    self.load_rows",
    ),
    (
        SEVERAL_CTAS,
        split_kv.FixedSplitKVTileScheduler,
        "folded splits are combined again",
        "quotient(n_block_min, self.tiles_per_split) + 1 - folded",
        "quotient(n_block_min, self.tiles_per_split) + 1",
    ),
    (
        SEVERAL_CTAS,
        split_kv.FixedSplitKVTileScheduler,
        "partial results begin with a split that was folded",
        "first_partial + folded)",
        "first_partial)",
    ),
    (
        SEVERAL_CTAS,
        mla_mma.MlaMmaConsumer,
        "all splits are stored",
        "folds, partial_idx = cutlass.Boolean(True),",
        "folds, partial_idx = folds,",
    ),
)
QUICK = ("Q is released before the fold is read", "folded splits are combined again")


@pytest.mark.rest
@pytest.mark.parametrize("run", [ONE_CTA, SEVERAL_CTAS], ids=["one CTA", "several CTAs"])
def test_right_without_a_mistake(run: Run) -> None:
    run()


@pytest.mark.parametrize(
    ("run", "right", "mistake"),
    [
        pytest.param(run, right, mistake, id=mistake[0], marks=() if mistake[0] in QUICK else (pytest.mark.full,))
        for run, right, *mistake in MISTAKES
    ],
)
def test_a_mistake_is_found(
    run: Run, right: type, mistake: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[right.__module__]
    spoil_methods(right, spoilt(Mistake(mistake[0], module, *mistake[1:]), tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        run()
