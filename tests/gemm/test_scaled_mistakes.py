# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the kernels of quantised operands are found: by the budget of sums, or by the emulator's checks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

import scaled_cases
import torch
from cutlass.cute.nvgpu import warpgroup as wgmma
from scaled_cases import CASES, PLAIN, SMALL, SMALL_M, ScaledEmulated, emulate, judge, run

from dsl_backend.gemm import scaled_host
from dsl_backend.gemm.sm90 import scaled_gemm, scaled_small_m
from dsl_backend.gemm.sm90.gemm import Gemm
from dsl_backend.gemm.sm90.small_m import SmallMGemm
from dsl_backend.primitives.accumulators import fence_operand
from dsl_backend.quant.cute import host as quantising
from dsl_backend.quant.cute import kernel as quantise
from dsl_backend.testing.scaled import ScaledCase, Tensors, blocked, tensors
from emulator.errors import EmulatorError, HostError
from tests.mistakes import Mistake, compile_again, spoilt

BY_ID = {one.id: one for one in CASES}
WAIT = "            wgmma.wait_group(0)\n            fence_operand(acc)\n"
MISTAKES = (
    ("rows", Mistake("sums are read before their products are done", scaled_gemm, WAIT, "")),
    (
        "rows",
        Mistake(
            "a part of k replaces the sums",
            scaled_gemm,
            "part.store(part.load() + acc.load())",
            "part.store(acc.load())",
        ),
    ),
    (
        "rows",
        Mistake(
            "a stage is not given back",
            scaled_gemm,
            "                pipeline.warpgroup_release(start + count - 1, thread)\n",
            "                pass\n",
        ),
    ),
    (
        "rows-gated",
        Mistake(
            "only the last block of k replaces sums", scaled_gemm, "start + i, i > 0, turn)", "start + i, False, turn)"
        ),
    ),
    (
        "rows",
        Mistake("the scale of the other row", scaled_gemm, "rRows[2 * mma_tile + b]", "rRows[2 * mma_tile + 1 - b]"),
    ),
    (
        "blocks-across",
        Mistake("scales of the block of k before", scaled_gemm, "cutlass.min(k_tile + AHEAD, k_tiles - 1)", "k_tile"),
    ),
    (
        "blocks-across",
        Mistake(
            "the scale of the row above",
            scaled_gemm,
            "params.mXScale[self.scale_row(params, row, i), None]",
            "params.mXScale[self.scale_row(params, row, 0), None]",
        ),
    ),
    (
        "turns-row-major",
        Mistake(
            "the next stage is not awaited",
            scaled_gemm,
            "pipeline.consumer_wait(start + cutlass.min(k_tile + 1, k_tiles - 1))",
            "pass",
        ),
    ),
    (
        "turns-row-major",
        Mistake(
            "behind the last block the next tile's", scaled_gemm, "cutlass.min(k_tile + 1, k_tiles - 1)", "k_tile + 1"
        ),
    ),
    (
        "blocks",
        Mistake(
            "copied: the scale of the row above",
            scaled_gemm,
            "sScales[place.row + 8 * (i % 2) +",
            "sScales[place.row +",
        ),
    ),
    (
        "blocks",
        Mistake("copied: another block's weights", scaled_gemm, "of_lanes[i], k_tile % WARP)", "of_lanes[i], 0)"),
    ),
    (
        "turns-deep",
        Mistake(
            "copied: weights of the first 32 blocks alone",
            scaled_gemm,
            "k_tile > 0 and k_tile % WARP == 0",
            "k_tile < 0",
        ),
    ),
    (
        "blocks",
        Mistake(
            "copied: a warp's scales are not awaited",
            scaled_gemm,
            "warp_release(place.start + k_tile, place.thread % WARP)",
            "warp_release(place.start + k_tile, place.thread)",
        ),
    ),
    (
        "turns-gated",
        Mistake(
            "a tile has the weights' scales of the one before",
            scaled_gemm,
            "self.scales_of_lanes(params, of_lanes, next_n, 0, thread)\n"
            "                if cutlass.const_expr(self.splits",
            "pass\n                if cutlass.const_expr(self.splits",
        ),
    ),
    (
        "overlap",
        Mistake("overlap: products are not awaited", scaled_gemm, "wait_group(1 if", "wait_group(2 if"),
    ),
    (
        "overlap-deep",
        Mistake("overlap: the other set", scaled_gemm, "take(accs[step % 2]", "take(accs[1 - step % 2]"),
    ),
    (
        "overlap",
        Mistake("overlap: one end too few", scaled_gemm, "if 2 * pairs + 1 < k_tiles:", "if 2 * pairs < k_tiles - 2:"),
    ),
    ("overlap", Mistake("overlap: a pair too many", scaled_gemm, "(k_tiles - 1) // 2", "k_tiles // 2")),
    (
        "halves",
        Mistake(
            "halves: sums are not awaited", scaled_gemm, "            cute.arch.mbarrier_wait(received.mbar, 0)\n", ""
        ),
    ),
    (
        "halves-blocks",
        Mistake(
            "halves: scales of the first half",
            scaled_gemm,
            "cutlass.min(first + first_block",
            "cutlass.min(first_block",
        ),
    ),
    ("blocks-gated", Mistake("both boxes: sums of the first", scaled_gemm, "box % of_turn * (self", "0 * (self")),
    ("turns", Mistake("the first turn's columns twice", scaled_gemm, "at = j + (box + turn) *", "at = j + box *")),
    (
        "rows",
        Mistake(
            "a consumer's scales are read too soon",
            scaled_gemm,
            "            for i in cutlass.range_constexpr(len(shared)):",
            "            for i in cutlass.range_constexpr(0):",
        ),
    ),
    ("blocks-gated", Mistake("gate's scales for up", scaled_gemm, "return box * params.mOut.shape[1] + n", "return n")),
    (
        "blocks-across",
        Mistake("one scale for a box", scaled_gemm, "scale = of_box[0] if inside else of_box[1]", "scale = of_box[0]"),
    ),
    ("to-tensor", Mistake("vectors out of place", scaled_gemm, "(offset >> 3) & mask", "(offset >> 4) & mask")),
    ("to-groups", Mistake("two of four lanes", scaled_gemm, "for lanes in (1, 2)", "for lanes in (1,)")),
    (
        "to-groups-of-two",
        Mistake("tiles of a group out of order", scaled_gemm, "+ tile % self.group_tiles", "+ 1 - tile % 2"),
    ),
    (
        "to-rows",
        Mistake("wide: the row above", scaled_gemm, "cutlass.Int64(first_row + 8 * b)", "cutlass.Int64(first_row)"),
    ),
    (
        "to-rows-few",
        Mistake("a thread's columns decide a row's scale", quantise, "fmax(whole, LEAST", "fmax(largest, LEAST"),
    ),
    (
        "to-groups-few",
        Mistake("the group before", quantise, "scale[own, group] =", "scale[own, group // 2] ="),
    ),
    (
        "to-groups-few",
        Mistake("half of a group decides its scale", quantise, "lane, self.lanes), LEAST", "lane, 16), LEAST"),
    ),
    (
        "few",
        Mistake(
            "few: sums of other tiles stay", scaled_small_m, "        if not accumulate:\n", "        if accumulate:\n"
        ),
    ),
    (
        "few",
        Mistake(
            "few: sums are read too soon",
            scaled_small_m,
            "                    wgmma.wait_group(0)\n                    fence_operand(part_0)\n",
            "",
        ),
    ),
    (
        "few-blocks",
        Mistake("few: scales of the position before", scaled_small_m, "cutlass.min(i + turns, count - 1)", "i"),
    ),
    (
        "few-blocks-gated",
        Mistake(
            "few: the first box's scale twice",
            scaled_small_m,
            "scales[box * self.box_scales",
            "scales[0 * self.box_scales",
        ),
    ),
    (
        "few-blocks",
        Mistake(
            "few: the scale of another token",
            scaled_small_m,
            "8 * (i // 2) + 2 * (thread % 4) + i % 2",
            "8 * (i // 2) + 2 * (thread % 4)",
        ),
    ),
    (
        "few-early",
        Mistake("few: no earlier sums", scaled_small_m, "        if not accumulate:\n", "        if thread >= 0:\n"),
    ),
)
QUICK = ("a part of k replaces the sums",)


@pytest.fixture(autouse=True)
def _compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again(monkeypatch, scaled_host, quantising)


@pytest.mark.parametrize(
    ("of", "mistake"),
    [pytest.param(of, one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for of, one in MISTAKES],
)
def test_mistake_is_found(of: str, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, module = BY_ID[of], spoilt(mistake, tmp_path)
    kernel = None
    if mistake.module is quantise:
        monkeypatch.setattr(quantising, "Quantise", module.Quantise)
    else:
        kernel = module.ScaledGemm if mistake.module is scaled_gemm else module.ScaledSmallMGemm
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        judge(one.case, run(one, "lazy", 1, kernel), one.config.promotion)
    assert not isinstance(raised.value, HostError), "it ran"


class Unpromoted(scaled_gemm.ScaledGemm):
    """All of k in wgmma's own accumulators."""

    def promoted_mainloop(self, acc, total, tCrX, tCrW, pipeline, start, k_tiles, thread):
        tiled_mma = self.tiled_mma(self.mma_n)
        Gemm.mainloop(self, tiled_mma, total, tCrX, tCrW[0], pipeline, start, k_tiles, thread)
        wgmma.wait_group(0)
        fence_operand(total)
        pipeline.warpgroup_release(start + k_tiles - 1, thread)


class UnpromotedBlocks(scaled_gemm.ScaledGemm):
    """The same where all blocks have the same scale, by which the whole sum is multiplied."""

    def mainloop_of_blocks(self, params, acc, total, tCrX, tCrW, pipeline, start, row, n_tile, thread):
        Unpromoted.promoted_mainloop(self, acc, total, tCrX, tCrW, pipeline, start, self.k_tiles(params), thread)
        total.store(total.load() * (params.mXScale[0, 0] * params.mWeightScale[0, 0]))


class UnpromotedFew(scaled_small_m.ScaledSmallMGemm):
    """All of a CTA's k in wgmma's own accumulators."""

    mainloop = SmallMGemm.mainloop


DEEP = replace(PLAIN, rows=3, n=16, k=16384, seed=3)
DEEP_SMALL = replace(SMALL, box_n=16)
DRIFTS: dict[str, tuple[ScaledCase, Any, type]] = {
    "promoted every 128": (DEEP, replace(DEEP_SMALL, promotion=1), Unpromoted),
    "promoted every 512": (DEEP, replace(DEEP_SMALL, promotion=4), Unpromoted),
    "blocks": (blocked(3, 16, 16384, seed=3, row_major=True), DEEP_SMALL, UnpromotedBlocks),
    "few rows": (DEEP, SMALL_M, UnpromotedFew),
}


def with_one_scale(case: ScaledCase, device: str) -> Tensors:
    """The tensors of a case, whose blocks all have the same scale."""
    given = tensors(case, device)
    x, weight = (one._replace(scale=torch.full_like(one.scale, 2.0**-8)) for one in given[:2])
    return given._replace(x=x, weight=weight)


@pytest.mark.rest
@pytest.mark.parametrize("kind", DRIFTS)
def test_long_sums_do_not_drift(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """16384 columns: promoted they are within the budget, and never promoted they are not."""
    case, config, unpromoted = DRIFTS[kind]
    if case.spec.x.blocked:
        monkeypatch.setattr(scaled_cases, "tensors", with_one_scale)
    # One CTA has all of k.
    one = ScaledEmulated(id="deep", why="drift", case=case, config=config, sms=1)
    emulate(one, "eager")
    found = run(one, "eager", kernel=unpromoted)
    with pytest.raises(AssertionError, match="further from the oracle"):
        judge(case, found, config.promotion)
