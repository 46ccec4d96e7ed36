# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the source of the SM90 kernel with e4m3 products are found: by a wrong value or by a check."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

import emulator
from dsl_backend.attention.cute import fp8_softmax, transpose
from dsl_backend.attention.cute.sm90 import fp8_mma
from dsl_backend.attention.cute.sm90.dense_host import Fp8Prefill
from dsl_backend.attention.cute.sm90.fp8_configs import Fp8Config
from dsl_backend.attention.cute.sm90.fp8_kernel import Fp8Forward
from dsl_backend.attention.plan import Planner
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check, fp8_attention
from dsl_backend.testing.cases import Case
from dsl_backend.testing.inputs import Surroundings
from emulator.errors import EmulatorError
from tests.attention.emulated import SCHEDULES, compiled_anew, scratch
from tests.attention.test_sm90_fp8 import NAME, arithmetic_of
from tests.mistakes import Mistake, spoil_methods, spoilt

# Tiles of 32 keys go around rings of two stages; maxima move, sums of two tiles are promoted, and memory that no query
# sees is NaN.
CASE = Case(
    q_lens=(40, 3),
    kv_lens=(233, 90),
    heads=(1, 1),
    dim=64,
    page=32,
    window=(120, None),
    scale=0.4,
    fp8=True,
    around=Surroundings(stale=True),
)
SOFTCAP = replace(CASE, softcap=5.0, window=(None, None), around=Surroundings())
CONFIG = Fp8Config(groups=1, tile_n=32, stages=2, accumulate_period=2)

MISTAKES = {
    transpose.TransposeWarps: (
        (
            "bytes of odd and even columns are swapped",
            "selectors = self.first_bytes, self.second_bytes",
            "selectors = self.second_bytes, self.first_bytes",
        ),
        (
            "keys in the order of memory",
            "(words[0], words[1]), (words[2], words[3])",
            "(words[0], words[2]), (words[1], words[3])",
        ),
        (
            "the source's swizzle is left out",
            "(self.first_column + column) ^ swizzle_of(self.key_offset, self.width)",
            "self.first_column + column",
        ),
        ("no fence for MMAs", '        cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        (
            "a stage of V transposed is overwritten",
            "        cute.arch.mbarrier_wait(self.barriers.v_empty + stage, phase_of(kv_idx, self.stages) ^ 1)\n",
            "",
        ),
        (
            "V is read before it has arrived",
            "cute.arch.mbarrier_wait(self.barriers.v_loaded + source_stage, phase_of(kv_idx, self.source_stages))",
            "pass",
        ),
        ("keys beyond the end stay", "if num_keys < self.tile_n:", "if num_keys < 0:"),
        ("keys before the window stay", "if num_keys > 0:", "if num_keys > self.tile_n:"),
        (
            "the warps do not wait for each other's zeros",
            "        cute.arch.barrier(",
            "        return\n        cute.arch.barrier(",
        ),
    ),
    fp8_mma.Fp8MmaConsumer: (
        ("promoted sums are not set to 0", "            self.acc_O[i] = 0.0\n", ""),
        ("the total is not rescaled", "            rescale_rows(self.acc_O_total, self.acc_scale)\n", ""),
        ("the total is left out", "self.acc_O[i] += self.acc_O_total[i]", "self.acc_O[i] += 0.0 * self.acc_O_total[i]"),
        (
            "halves of Q's k-blocks are swapped",
            "words[i // 2 * 4 + i % 2 * 2 + row] = f32_to_e4m3(",
            "words[i // 2 * 4 + (1 - i % 2) * 2 + row] = f32_to_e4m3(",
        ),
        ("rows of Q share a scale's inverse", "inverse = LARGEST / row_max", "inverse = LARGEST / 3.0"),
    ),
    fp8_softmax.Fp8Softmax: (
        ("the offset stays in the LSE", "self.scale_log2(row) - self.p_offset, self", "self.scale_log2(row), self"),
        ("queries' scales are left out", "scale if self.score_mod.modifies else scale * self.q_scale[row]", "scale"),
        (
            "halves of P's k-blocks are swapped",
            "words[j // 8 * 4 + j // 4 % 2 * 2 + row] = ",
            "words[j // 8 * 4 + (1 - j // 4 % 2) * 2 + row] = ",
        ),
        ("sums are not rescaled", "self.row_sum[row] * acc_scale[row] + sum", "self.row_sum[row] + sum"),
        ("P saturates", "> self.rescale_threshold", "> 6.0 * self.rescale_threshold"),
    ),
}
# Of tiles whose S and P V share registers.
IN_TURN = replace(CONFIG, intra_warpgroup_overlap=False, accumulate_period=1)
MISTAKES_IN_TURN = {
    fp8_mma.TwoLevelSums: (
        (
            "the sum before is not rescaled",
            "fma(acc_O[row, part * columns + j], self.acc_scale[row], acc_PV[row, j])",
            "acc_O[row, part * columns + j] + acc_PV[row, j]",
        ),
        (
            "P V of a tile begins with what was there",
            "tiled_mma if cutlass.const_expr(k > 0) else tiled_mma_first",
            "tiled_mma",
        ),
        (
            "P V is read before it is there",
            "        warpgroup.wait_group(0)\n        fence_operand(self.acc_PV)\n",
            "        fence_operand(self.acc_PV)\n",
        ),
    ),
    fp8_mma.Fp8MmaConsumer: (
        (
            "V is not waited for",
            "self.wait_kv(self.barriers.v_full, kv_idx)",
            "pass",
        ),
    ),
}
# Of wide heads, whose P V has parts and whose Q is in shared memory.
WIDE = replace(IN_TURN, value_parts=2, shared_q=True)
MISTAKES_WIDE = {
    fp8_mma.TwoLevelSums: (
        ("all parts are products of the first columns", "self.tOrV_parts[part][", "self.tOrV_parts[0]["),
        (
            "a part's sums are added to the first columns",
            "acc_O[row, part * columns + j] = total",
            "acc_O[row, j] = total",
        ),
    ),
    fp8_mma.Fp8MmaConsumer: (
        (
            "V is released behind the first part",
            "if cutlass.const_expr(part == self.config.value_parts - 1):",
            "if part == 0:",
        ),
    ),
    fp8_mma.QuantizingMmaConsumer: (
        (
            "Q is read before all warps have stored it",
            '        cute.arch.fence_proxy("async.shared", space="cta")\n        self.sync_warpgroup()\n',
            '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        ),
        ("no fence of Q for MMAs", '        cute.arch.fence_proxy("async.shared", space="cta")\n', ""),
        ("both rows have the scale of the first", "sQScale[self.row + 8 * row]", "sQScale[self.row]"),
    ),
}
# The same of queries that arrive in e4m3.
WIDE_FP8_QUERIES = replace(CASE, fp8_q=True, heads=(2, 1))
MISTAKES_WIDE_FP8_QUERIES = {
    fp8_mma.SharedQueryMmaConsumer: (
        (
            "Q is released behind the first product",
            '"""Nothing: all products of the work tile read Q."""',
            "self.release_q(q_stage)",
        ),
    ),
}
QUICK = ("keys in the order of memory", "no fence for MMAs")


def run(case: Case, index: int, config: Fp8Config = CONFIG) -> None:
    """The case, on a kernel compiled anew, since cached ones were compiled from other source."""

    fresh_class = compiled_anew(Fp8Prefill, Fp8Forward)

    def adjust(planner: Planner) -> None:
        kernel = fresh_class(planner.spec, planner.target, scratch(), config)
        planner.short = planner.long = (*planner.long[:2], kernel)

    problem, target = case.problem(), replace(from_arch("sm_90a"), sm_count=1)
    with emulator.device(arch="sm_90a", sms=1, schedule=SCHEDULES[index], seed=index, strict=True):
        result = check.run(problem, NAME, adjust=adjust, target=target)
    fp8_attention.judge(result, problem, arithmetic_of(config))


def run_twice(case: Case, config: Fp8Config) -> None:
    """On the schedule that shows missing waits, and on the one that shows missing fences of copies done early."""
    for index in (1, 0):
        run(case, index, config)


@pytest.mark.rest
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="overlap"),
        pytest.param(IN_TURN, id="in-turn"),
        pytest.param(WIDE, id="wide", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("case", [CASE, SOFTCAP, WIDE_FP8_QUERIES], ids=["window", "softcap", "fp8-queries"])
def test_right_without_a_mistake(case: Case, config: Fp8Config) -> None:
    run(case, 1, config)


@pytest.mark.parametrize(
    ("case", "config", "right", "mistake"),
    [
        pytest.param(
            case, config, right, mistake, id=mistake[0], marks=() if mistake[0] in QUICK else (pytest.mark.full,)
        )
        for case, config, found in (
            (CASE, CONFIG, MISTAKES),
            (CASE, IN_TURN, MISTAKES_IN_TURN),
            (CASE, WIDE, MISTAKES_WIDE),
            (WIDE_FP8_QUERIES, WIDE, MISTAKES_WIDE_FP8_QUERIES),
        )
        for right, mistakes in found.items()
        for mistake in mistakes
    ],
)
def test_a_mistake_is_found(
    case: Case,
    config: Fp8Config,
    right: type,
    mistake: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules[right.__module__]
    spoil_methods(right, spoilt(Mistake(mistake[0], module, *mistake[1:]), tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        run_twice(case, config)
