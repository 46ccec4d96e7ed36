# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the kernels of quantised operands are found: by the budget of sums, or by the emulator's checks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutlass.cute.nvgpu import warpgroup as wgmma
from scaled_cases import CASES, PLAIN, SMALL, ScaledEmulated, emulate, judge, run

from dsl_backend.gemm import scaled_host
from dsl_backend.gemm.sm90 import scaled_gemm, scaled_small_m
from dsl_backend.gemm.sm90.gemm import Gemm
from dsl_backend.primitives.accumulators import fence_operand
from dsl_backend.quant.cute import host as quantising
from dsl_backend.quant.cute import kernel as quantise
from dsl_backend.runtime import toolkit
from emulator.errors import EmulatorError, HostError
from tests.attention.mistakes import Mistake, spoilt

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
            "params.mXScale[self.scale_row(params, row, i), k_tile]",
            "params.mXScale[self.scale_row(params, row, 0), k_tile]",
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
        Mistake("the group before", quantise, "scale[row, item % groups] =", "scale[row, item % groups // 2] ="),
    ),
    (
        "to-groups-few",
        Mistake(
            "half of a group decides its scale", quantise, "largest_of(values)), WARP)", "largest_of(values)), 16)"
        ),
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
            "scales[2 + i] * scales[box]",
            "scales[2 + i] * scales[0]",
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
    """Cached kernels have other sources."""

    def compile_kernel(kernel: Any, arguments: Any, *, key: Any, target: Any) -> Any:
        return toolkit.compiled(kernel, arguments, target.arch, "")

    for module in (scaled_host, quantising):
        monkeypatch.setattr(module, "compile_kernel", compile_kernel)


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


@pytest.mark.rest
def test_long_sums_do_not_drift() -> None:
    """16384 columns: promoted they are within the budget, and never promoted they are not."""
    case = replace(PLAIN, rows=3, n=16, k=16384, seed=3)
    for promotion in (1, 4):
        one = ScaledEmulated(id="deep", why="drift", case=case, config=replace(SMALL, box_n=16, promotion=promotion))
        emulate(one, "eager")
        found = run(one, "eager", kernel=Unpromoted)
        with pytest.raises(AssertionError):
            judge(case, found, promotion)
