# SPDX-License-Identifier: Apache-2.0
"""The emulator and the judge find mistakes in the source of SM100's GEMMs of quantised operands."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from scaled_cases_sm100 import CASES, Emulated, emulate

from dsl_backend.gemm import scaled_host
from dsl_backend.gemm import scaled_small_m as scaled_small
from dsl_backend.gemm.sm100 import (
    block_scaled_gemm,
    gemm,
    promoted_gemm,
    promoted_small_m,
    scaled_configs,
    scaled_gemm,
    scaled_small_m,
)
from dsl_backend.primitives import narrow_mma
from dsl_backend.quant.cute import blocks
from emulator.errors import EmulatorError, HostError
from tests.mistakes import Mistake, compile_again, spoilt

CLASSES = {
    block_scaled_gemm: "BlockScaledGemm",
    promoted_gemm: "PromotedGemm",
    promoted_small_m: "PromotedSmallMGemm",
    scaled_gemm: "ScaledGemm",
    scaled_small_m: "ScaledSmallMGemm",
}
BY_ID = {one.id: one for one in CASES}
MISTAKES = (
    ("mxfp8", Mistake("factors of the first 32 of k for all", narrow_mma, "scale_id = step if", "scale_id = 0 if")),
    ("nvfp4", Mistake("factors of the first 64 of k for all", narrow_mma, "atom = step % self", "atom = 0 * self")),
    (
        "mxfp8",
        Mistake(
            "no wait for scale factors' bytes",
            block_scaled_gemm,
            "params, m_tile, cta_rank) + factors",
            "params, m_tile, cta_rank)",
        ),
    ),
    ("mxfp8-gated", Mistake("gate's factors for up", block_scaled_gemm, "n_tile + i *", "n_tile + 0 *")),
    (
        "mxfp8-gated",
        Mistake("overwritten columns are stored last", block_scaled_gemm, "(1 - tile % 2) * (epi", "(tile % 2) * (epi"),
    ),
    (
        "blocks-gated",
        Mistake("gate's scale for up", promoted_gemm, "scale = scales[i * chunk // self.box_n]", "scale = scales[0]"),
    ),
    (
        "blocks",
        Mistake("accumulators freed before they are read", promoted_gemm, "if i == len(sums) - 1:", "if i == 0:"),
    ),
    (
        "blocks",
        Mistake("the next group's scales", promoted_gemm, "sums, (scale_0, scale_1))", "sums, (next_0, next_1))"),
    ),
    (
        "few-mxfp8",
        Mistake("few: the first box's factors twice", scaled_small_m, "address + (1 + box) * each", "address + each"),
    ),
    (
        "few-mxfp8",
        Mistake(
            "few: factors of the first 32 of 128 rows", scaled_small_m, "first_row % ATOM_ROWS // FACTOR_ROWS", "0"
        ),
    ),
    (
        "few-nvfp4",
        Mistake(
            "few: factors' bytes are not awaited",
            scaled_small_m,
            "self.stage_bytes += 3 * self.atoms * SCALE_ATOM_BYTES",
            "pass",
        ),
    ),
    (
        "few-nvfp4-gated",
        Mistake("few: gate's factors for up", scaled_small_m, "n_tile + i * (params.mOut.shape[1]", "n_tile + 0 * (i"),
    ),
    (
        "few-blocks-gated",
        Mistake("few blocks: gate's scale for up", promoted_small_m, "(column, n + column)", "(column, column)"),
    ),
    (
        "few-blocks-interleaved",
        Mistake("few blocks: one scale for a box", promoted_small_m, "* self.columns + thread)", "* self.columns)"),
    ),
    (
        "few-blocks",
        Mistake(
            "few blocks: the next group's scales", promoted_small_m, "acc_1), scales, group", "acc_1), following, group"
        ),
    ),
    (
        "few-blocks-gated",
        Mistake(
            "few blocks: accumulators freed before they are read",
            promoted_small_m,
            "if first + count == self.thread_tokens:",
            "if first == 0:",
        ),
    ),
    (
        "few-blocks-64",
        Mistake(
            "few blocks: scales of the first warpgroup's tokens",
            promoted_small_m,
            "* self.tokens + group * self.thread_tokens\n        blocks",
            "* self.tokens\n        blocks",
        ),
    ),
    (
        "few-blocks",
        Mistake(
            "few blocks: groups are summed before they are scaled",
            promoted_small_m,
            "                    False,",
            "                    position > 0,",
        ),
    ),
    ("few", Mistake("few: the other box's scale", scaled_small, "of_column[2] * x_scale", "of_column[3] * x_scale")),
    ("nvfp4-to-nvfp4", Mistake("scales of the next 32 rows", scaled_gemm, "row % 32 * 16", "(row + 1) % 32 * 16")),
    (
        "nvfp4-to-nvfp4",
        Mistake(
            "scales of padding are not written", scaled_gemm, "if row < rows and", "if row < params.mOut.shape[0] and"
        ),
    ),
    (
        "nvfp4-special",
        Mistake("NVFP4: a NaN is left out", blocks, "tree_reduce(magnitudes, fmax_nan)", "tree_max(magnitudes)"),
    ),
    (
        "rows-special-to-mxfp8",
        Mistake("MXFP8: an infinity's scale is a number", blocks, "cutlass.Int32(NAN_E8M0)", "cutlass.Int32(253)"),
    ),
    (
        "rows-to-rows",
        Mistake("float32: half of the columns twice", gemm, "self.out_bytes(first + start)", "self.out_bytes(first)"),
    ),
)
QUICK = "the next group's scales"
# Of a kernel that one of them stands for.
FULL = "few blocks: "
REST_OF_FULL = "few blocks: gate's scale for up"


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    if name.startswith(FULL) and name != REST_OF_FULL:
        return (pytest.mark.full,)
    return () if name == QUICK else (pytest.mark.rest,)


@pytest.fixture(autouse=True)
def _compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again(monkeypatch, scaled_host)


def run(one: Emulated) -> None:
    for schedule in ("lazy", "random"):
        emulate(one, schedule, seed=1)


@pytest.mark.parametrize(
    ("case", "mistake"),
    [pytest.param(case, one, id=one.id, marks=marks_of(one.id)) for case, one in MISTAKES],
)
def test_mistake_is_found(case: str, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(mistake, tmp_path)
    if mistake.module is narrow_mma:
        monkeypatch.setattr(block_scaled_gemm, "NarrowMma", module.NarrowMma)
    elif mistake.module is scaled_gemm:
        for name in ("stage_out", "store_scale"):
            monkeypatch.setattr(scaled_gemm.ScaledGemm, name, getattr(module.ScaledGemm, name))
    elif mistake.module is blocks:
        monkeypatch.setattr(scaled_gemm, "block_scale", module.block_scale)
    elif mistake.module is gemm:
        monkeypatch.setattr(gemm.Gemm, "stage_out", module.Gemm.stage_out)
    elif mistake.module is scaled_small:
        monkeypatch.setattr(scaled_small.ScaledSmallMBase, "scaled_sums", module.ScaledSmallMBase.scaled_sums)
    else:
        spoilt_class = getattr(module, CLASSES[mistake.module])
        monkeypatch.setattr(scaled_configs, "kernel", lambda key: spoilt_class)
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        run(BY_ID[case])
    assert not isinstance(raised.value, HostError), "it ran"
