# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what the SM90 kernel of absorbed MLA with e4m3 products does by itself: the emulator or its model finds
them.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_backend.attention.cute import fp8_queries, fp8_smem, transpose
from dsl_backend.attention.cute.fake_args import fake_args, fake_mla_tensors
from dsl_backend.attention.cute.sm90 import mla_fp8_mma
from dsl_backend.attention.cute.sm90.mla_fp8_configs import Fp8MlaConfig
from dsl_backend.attention.cute.sm90.mla_fp8_kernel import Fp8MlaForward
from dsl_backend.attention.cute.sm90.mla_host import Fp8Mla
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import fp8_attention
from dsl_backend.testing.cases import Case, mla
from dsl_backend.testing.inputs import Surroundings
from emulator.errors import EmulatorError
from tests.attention.mla_cases import SCHEDULES, launched
from tests.attention.test_mla_sm90_fp8 import FLIPPED_PART, arithmetic_of
from tests.mistakes import Mistake, spoil_methods, spoilt

# NaN beyond the end and below the windows; queries of a request differ in size.
CASE = mla(
    16,
    q_lens=(4, 1),
    kv_lens=(210, 70),
    page=16,
    window=(100, None),
    q_gain=2.0,
    fp8=True,
    around=Surroundings(stale=True),
)
QUANTISED = mla(16, (288, 256), q_lens=(3, 1), kv_lens=(130, 70), page=16, fp8=True, fp8_q=True)
CONFIG = Fp8MlaConfig(stages=2, dequant_stages=2)

MISTAKES = {
    transpose.LatentTransposeWarps: (
        ("keys beyond the end stay", "key >= first and key < end", "key >= first"),
        ("keys before the window stay", "key >= first and key < end", "key < end"),
    ),
    mla_fp8_mma.Fp8MlaMmaConsumer: (
        (
            "Q is read before the other warpgroup has quantized its rows",
            "        cute.arch.barrier(barrier_id=ALL_MMA, number_of_threads=MMA_THREADS)\n",
            "",
        ),
        ("no fence behind Q", '        cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        ("rows share a scale", "sQScale[self.row + 8 * own]", "sQScale[self.row]"),
        (
            "V is read before it is transposed",
            "        cute.arch.mbarrier_wait(self.barriers.v_full + count % stages, phase_of(count, stages))\n",
            "",
        ),
        (
            "K is released with V alone",
            "arrive_warp(self.barriers.k_empty + stage_of(count, self.config.dequant_stages), self.config.cluster)",
            "pass",
        ),
        ("the first tile's P V is left out", "                self.pv(work, 0, tiles)\n", ""),
    ),
    fp8_queries.MlaQueries: (("rope is read from the latent part", "(self.mQRope, latent)", "(self.mQ, latent)"),),
    fp8_queries.Queries: (("the last row is left out", "if row < work.num_rows:", "if row < work.num_rows - 1:"),),
    fp8_queries.QuantizedMlaQueries: (
        (
            "a lane stores the neighbour's columns",
            "lane + self.lanes * i, values[None, i]",
            "(lane ^ 1) + self.lanes * i, values[None, i]",
        ),
        ("copied rows have no scale", "sScale[row] = 1.0", "pass"),
    ),
    fp8_smem.store_p: (
        (
            "P is not swizzled",
            "unit = (within + lane // 16 * P_UNIT) ^ swizzle_of(row * width, width)",
            "unit = within + lane // 16 * P_UNIT",
        ),
        ("halves of P are swapped", "lane // 16 * P_UNIT", "(1 - lane // 16) * P_UNIT"),
    ),
}
# Of O in two levels.
TWO_LEVELS = mla(16, (288, 256), q_lens=(3, 1), kv_lens=(330, 70), page=16, fp8=True)
MISTAKES_OF_TWO_LEVELS = {
    mla_fp8_mma.Fp8MlaMmaConsumer: (
        ("both warpgroups have the first columns", "self.group * parts)", "0 * parts)"),
        (
            "P is read before the other warpgroup has stored it",
            "            self.begin_pv_shared(work, step - 1, tiles + step - 1)\n",
            "",
        ),
        (
            "K is released before S is there",
            "            warpgroup.wait_group(0)\n            fence_operand(self.acc_S)\n",
            "",
        ),
        (
            "a part is left out",
            "for part in cutlass.range_constexpr(self.config.value_parts):",
            "for part in cutlass.range_constexpr(self.config.value_parts - 1):",
        ),
    ),
}
QUICK = ("keys before the window stay", "no fence behind Q")


def run(index: int, case: Case = CASE, value_parts: int = 0) -> None:
    """A case, on a kernel compiled anew, since cached ones were compiled from other source."""

    class Fresh(Fp8Mla):
        @staticmethod
        def build(key: Any, target: Target) -> Any:
            return toolkit.compiled(Fp8MlaForward(key), fake_args(key, fake_mla_tensors(key)), target.arch, "")

    problem, target = case.problem(), replace(from_arch("sm_90a"), sm_count=1)
    config = replace(CONFIG, scores_first=True, value_parts=value_parts)
    kernel = Fresh(problem.spec, target, Workspace(torch.device("cpu")), config)
    result, _ = launched(kernel, problem, "sm_90a", sms=1, schedule=SCHEDULES[index], seed=index)
    fp8_attention.judge(result, problem, arithmetic_of(config), FLIPPED_PART)


def run_twice(case: Case, value_parts: int = 0) -> None:
    """On the schedule that shows missing waits, and on the one that shows missing fences of copies done early."""
    for index in (1, 0):
        run(index, case, value_parts)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("case", "value_parts"),
    [
        pytest.param(CASE, 0, id="bf16"),
        pytest.param(QUANTISED, 0, id="e4m3"),
        pytest.param(TWO_LEVELS, 2, id="two-levels", marks=pytest.mark.full),
    ],
)
def test_right_without_a_mistake(case: Case, value_parts: int) -> None:
    run(1, case, value_parts)


@pytest.mark.parametrize(
    ("right", "mistake"),
    [
        pytest.param(right, mistake, id=mistake[0], marks=() if mistake[0] in QUICK else (pytest.mark.full,))
        for right, mistakes in (*MISTAKES.items(), *MISTAKES_OF_TWO_LEVELS.items())
        for mistake in mistakes
    ],
)
def test_a_mistake_is_found(
    right: Any, mistake: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[right.__module__]
    wrong = spoilt(Mistake(mistake[0], module, *mistake[1:]), tmp_path)
    if isinstance(right, type):
        spoil_methods(right, wrong, monkeypatch)
    else:
        monkeypatch.setattr(mla_fp8_mma, right.__name__, getattr(wrong, right.__name__))
    case, value_parts = QUANTISED if right is fp8_queries.QuantizedMlaQueries else CASE, 0
    if mistake in MISTAKES_OF_TWO_LEVELS.get(right, ()):
        case, value_parts = TWO_LEVELS, 2
    with pytest.raises((AssertionError, EmulatorError)):
        run_twice(case, value_parts)
