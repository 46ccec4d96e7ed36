# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what the dense SM100 kernel with e4m3 products does by itself are found."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

import emulator
from dsl_backend.attention.cute import fp8_queries
from dsl_backend.attention.cute.sm100 import dense_mma, fp8_kernel, fp8_softmax, query_warps, two_s
from dsl_backend.attention.cute.sm100.dense_host import Fp8Prefill
from dsl_backend.attention.cute.sm100.fp8_configs import Fp8DenseConfig
from dsl_backend.attention.cute.sm100.fp8_kernel import Fp8DenseForward
from dsl_backend.attention.plan import Planner
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check, fp8_attention
from dsl_backend.testing.cases import Case
from dsl_backend.testing.inputs import Surroundings
from emulator.errors import EmulatorError
from tests.attention.emulated import SCHEDULES, compiled_anew, scratch
from tests.attention.test_sm100_fp8 import NAME, arithmetic_of
from tests.mistakes import Mistake, spoil_methods, spoilt

# Rings go around; maxima move; memory that no query sees is NaN; queries of requests differ in size.
CASE = Case(
    q_lens=(300, 3, 260, 1),
    kv_lens=(300, 90, 400, 70),
    heads=(1, 1),
    dim=64,
    page=32,
    window=(120, None),
    scale=0.4,
    sinks=True,
    fp8=True,
    around=Surroundings(stale=True),
)
SOFTCAP = replace(CASE, softcap=5.0, window=(None, None), around=Surroundings())
CONFIG = Fp8DenseConfig(tile_n=64, stages=2, query_stages=1, late_p_keys=32, ex2_emulation=0, rounded_sums=True)

# Of values above 128: one CTA has work tiles of one key tile and of several.
WIDE = replace(CASE, q_lens=(130, 3), kv_lens=(200, 90), dim=160, window=(None, None), around=Surroundings())
WIDE_CONFIG = replace(CONFIG, softmax_warpgroups=1, late_p_keys=0)

MISTAKES = {
    query_warps.DenseQueryWarps: (
        (
            "no fence behind Q",
            """        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
""",
            "        cute.arch.sync_warp()\n",
        ),
        (
            "Q is written before the products of the work tile before are done",
            "cute.arch.mbarrier_wait(self.barriers.q_empty + stage, phase_of(count, self.stages) ^ 1)",
            "pass",
        ),
    ),
    query_warps.CopiedQueries: (
        ("rows are read before they are there", "wait_group(self.batches - 1)", "wait_group(self.batches)"),
        (
            "rows overwrite others that were not read",
            "self.copy_batch(work, batch + self.batches, slot)",
            "self.copy_batch(work, batch + self.batches, stage_of(slot + 1, self.batches))",
        ),
        ("rows of a thread in one place", "(i * self.vectors + vector) * self.threads", "vector * self.threads"),
        ("the last copied row is left out", "exists = row < work.num_rows", "exists = row < work.num_rows - 1"),
    ),
    fp8_queries.Queries: (
        ("the last row is left out", "if row < work.num_rows:", "if row < work.num_rows - 1:"),
        (
            "rows of a thread overwrite one another",
            "self.load_row(work, row, lane, values[None, None, i])",
            "self.load_row(work, row, lane, values[None, None, 0])",
        ),
        ("one half of each pair", "fmax(*halves_of(pair, self.dtype))", "fmax(*halves_of(pair, self.dtype)[:1] * 2)"),
        ("rows share a scale", "sScale[row] = row_max * (1.0 / LARGEST)", "sScale[row] = cutlass.Float32(0.01)"),
    ),
    fp8_softmax.Fp8SoftmaxWarps: (
        ("no fence behind the first Q", '            cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        (
            "scales are read before they are written",
            "        cute.arch.mbarrier_wait(self.barriers.q_scale_full + stage, phase_of(count, stages))\n",
            "",
        ),
        (
            "scales of another work tile",
            "self.sQScale[self.row, stage]",
            "self.sQScale[self.row, (stage + 1) % stages]",
        ),
        ("queries' scales are left out", "scale if self.score_mod.modifies else scale * self.q_scale[0]", "scale"),
        ("the offset stays in the LSE", "self.scale_log2() - self.config.p_offset", "self.scale_log2()"),
        ("P is not in its columns", "tmem_offset + first // E4M3_OF_WORD", "tmem_offset + first // 2"),
        ("half of the sums", "sum_of_e4m3(words[:half]), sum", "sum_of_e4m3(words[half:]), sum"),
    ),
    dense_mma.MmaWarp: (
        (
            "late P is multiplied early",
            "            cute.arch.mbarrier_wait(self.barriers.late_p_full + s_stage, p_idx & 1)\n",
            "",
        ),
    ),
    fp8_kernel.Fp8CorrectionWarps: (
        (
            "V of another stage is cleared",
            "self.kv_stages.v_stage(kv_idx)",
            "self.kv_stages.v_stage(kv_idx + 1)",
        ),
    ),
}
WIDE_MISTAKES = {
    two_s.TwoSMmaWarp: (
        ("every P V overwrites O", "self.pv_of_tile(tile, tile > kv_idx)", "self.pv_of_tile(tile, tile < kv_idx)"),
        (
            "P is multiplied before it is written",
            "        cute.arch.mbarrier_wait(self.barriers.p_full + s_stage, phase_of(kv_idx, TWO_S_STAGES))\n",
            "",
        ),
    ),
    two_s.TwoSSoftmaxWarps: (
        (
            "S of the other stage",
            "phase_of(s_idx, TWO_S_STAGES), tmem_offset_S(self.kernel, s_stage)",
            "phase_of(s_idx, TWO_S_STAGES), tmem_offset_S(self.kernel, 1 - s_stage)",
        ),
    ),
    two_s.TwoSCorrectionWarps: (
        ("O is rescaled before P V of the tile before is done", "            self.wait_pv(kv_idx - 1)\n", ""),
        ("O is stored before it is complete", "        self.wait_o(work_idx)\n", "        pass\n"),
    ),
}
QUICK = ("scales of another work tile",)


def run(case: Case, index: int, config: Fp8DenseConfig = CONFIG) -> None:
    """The case, on a kernel compiled anew, since cached ones were compiled from other source."""

    fresh_class = compiled_anew(Fp8Prefill, Fp8DenseForward)

    def adjust(planner: Planner) -> None:
        kernel = fresh_class(planner.spec, planner.target, scratch(), config)
        planner.short = planner.long = (*planner.long[:2], kernel)

    problem, target = case.problem(), replace(from_arch("sm_100a"), sm_count=1)
    with emulator.device(arch="sm_100a", sms=1, schedule=SCHEDULES[index], seed=index, strict=True):
        result = check.run(problem, NAME, adjust=adjust, target=target)
    fp8_attention.judge(result, problem, arithmetic_of(config))


def run_twice(case: Case = CASE, config: Fp8DenseConfig = CONFIG) -> None:
    """On the schedule that shows missing waits, and on the one that shows missing fences of copies done early."""
    for index in (1, 0):
        run(case, index, config)


@pytest.mark.rest
@pytest.mark.parametrize("case", [CASE, SOFTCAP], ids=["window", "softcap"])
def test_right_without_a_mistake(case: Case) -> None:
    run(case, 1)


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


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SCHEDULES)))
def test_wide_values_are_right_without_a_mistake(index: int) -> None:
    run(WIDE, index, WIDE_CONFIG)


@pytest.mark.full
@pytest.mark.parametrize(
    ("right", "mistake"),
    [pytest.param(right, mistake, id=mistake[0]) for right, mistakes in WIDE_MISTAKES.items() for mistake in mistakes],
)
def test_a_mistake_of_wide_values_is_found(
    right: type, mistake: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[right.__module__]
    spoil_methods(right, spoilt(Mistake(mistake[0], module, *mistake[1:]), tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        run_twice(WIDE, WIDE_CONFIG)
