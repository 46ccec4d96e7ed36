# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what the SM100 kernel of absorbed MLA with e4m3 products does by itself are found."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_backend.attention.cute import fp8_queries
from dsl_backend.attention.cute.fake_args import fake_args, fake_mla_tensors
from dsl_backend.attention.cute.sm100 import mla_fp8_softmax, query_warps
from dsl_backend.attention.cute.sm100.mla_fp8_configs import Fp8MlaConfig
from dsl_backend.attention.cute.sm100.mla_fp8_kernel import Fp8MlaForward
from dsl_backend.attention.cute.sm100.mla_host import Fp8Mla
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import fp8_attention
from dsl_backend.testing.cases import mla
from dsl_backend.testing.inputs import Surroundings
from emulator.errors import EmulatorError
from tests.attention.mla_cases import SCHEDULES, launched
from tests.attention.test_mla_sm90_fp8 import FLIPPED_PART
from tests.attention.test_mla_sm100_fp8 import TARGET, arithmetic_of
from tests.mistakes import Mistake, spoil_methods, spoilt

# NaN beyond the end and below the windows; queries of a request differ in size; four work tiles on one SM.
CASE = mla(
    16,
    (288, 256),
    q_lens=(4, 1, 6),
    kv_lens=(110, 70, 33),
    page=16,
    window=(80, None),
    q_gain=2.0,
    fp8=True,
    around=Surroundings(stale=True),
)
CONFIG = Fp8MlaConfig(tile_n=32, stages=2)

MISTAKES = {
    query_warps.QueryWarps: (
        ("no fence behind Q", '            cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        (
            "Q is written before the products of the work tile before are done",
            "cute.arch.mbarrier_wait(self.barriers.q_empty + stage, phase_of(work_tiles, self.stages) ^ 1)",
            "pass",
        ),
    ),
    mla_fp8_softmax.Fp8MlaSoftmaxWarps: (
        (
            "scales are read before they are written",
            "        cute.arch.mbarrier_wait(self.barriers.q_scale_full + stage, phase_of(count, Q_SCALE_STAGES))\n",
            "",
        ),
        (
            "scales of the other work tile",
            "self.sQScale[self.row + 8 * own, stage]",
            "self.sQScale[self.row + 8 * own, 1 - stage]",
        ),
        ("P in the order of registers", "            words[i] = permute_bytes(low, high, selector)\n", ""),
        ("pairs of the other eight keys", "if lane % QUAD < 2", "if lane % QUAD >= 2"),
        ("pairs of other lanes", "lane % 2 * 2", "lane % 4 // 2 * 2"),
    ),
    fp8_queries.MlaQueries: (("rope is read from the latent part", "(self.mQRope, latent)", "(self.mQ, latent)"),),
    fp8_queries.Queries: (
        ("the last row is left out", "if row < work.num_rows:", "if row < work.num_rows - 1:"),
        (
            "half of the rows",
            "range(0, self.rows, self.rows_at_once",
            "range(0, self.rows // 2, self.rows_at_once",
        ),
    ),
}
QUICK = ("pairs of the other eight keys",)


def run(index: int) -> None:
    """The case, on a kernel compiled anew, since cached ones were compiled from other source."""

    class Fresh(Fp8Mla):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(Fp8MlaForward(key), fake_args(key, fake_mla_tensors(key)), target.arch, "")

    problem, target = CASE.problem(), replace(TARGET, sm_count=1)
    kernel = Fresh(problem.spec, target, Workspace(torch.device("cpu")), CONFIG)
    result, _ = launched(kernel, problem, "sm_100a", sms=1, schedule=SCHEDULES[index], seed=index)
    fp8_attention.judge(result, problem, arithmetic_of(CONFIG), FLIPPED_PART)


def run_twice() -> None:
    """On the schedule that shows missing waits, and on the one that shows missing fences of copies done early."""
    for index in (1, 0):
        run(index)


@pytest.mark.rest
def test_right_without_a_mistake() -> None:
    run_twice()


@pytest.mark.parametrize(
    ("right", "mistake"),
    [
        pytest.param(right, mistake, id=mistake[0], marks=() if mistake[0] in QUICK else (pytest.mark.full,))
        for right, mistakes in MISTAKES.items()
        for mistake in mistakes
    ],
)
def test_a_mistake_is_found(
    right: type, mistake: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[right.__module__]
    spoil_methods(right, spoilt(Mistake(mistake[0], module, *mistake[1:]), tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        run_twice()
