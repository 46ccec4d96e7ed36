# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the kernel of weights of 4 and 8 bits are found: by the budget of sums, or by the emulator's checks."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from weight_only_cases import CASES, emulate

from dsl_backend.gemm import weight_only_host
from dsl_backend.gemm.sm90 import weight_only_small_m
from dsl_backend.runtime import toolkit
from emulator.errors import EmulatorError, HostError
from tests.attention.mistakes import Mistake, spoilt

BY_ID = {one.id: one for one in CASES}


def mistake(id: str, said: str, wrong: str) -> Mistake:
    return Mistake(id, weight_only_small_m, said, wrong)


RELEASED = '''        return warps(self.groups * WARPGROUP // WARP)

    def release(self, pipeline: Pipeline, position, thread):
        """By a consumer's threads: give a position's stage back, each warp for itself."""
        pipeline.warp_release(position, thread % WARP)
'''
RELEASED_BY_ONE = RELEASED.replace(" * WARPGROUP // WARP", "").replace(
    "warp_release(position, thread % WARP)", "warpgroup_release(position, thread)"
)
MISTAKES = (
    ("w4", mistake("sums of other tiles stay", "        if not accumulate:\n", "        if accumulate:\n")),
    (
        "w4",
        mistake(
            "box 0 is read too soon",
            "            wgmma.wait_group(0)\n            fence_operand(part_0)\n",
            "            fence_operand(part_0)\n",
        ),
    ),
    (
        "w4",
        mistake(
            "box 1 is read too soon",
            "            wgmma.wait_group(0)\n            fence_operand(part_1)\n            self.release",
            "            fence_operand(part_1)\n            self.release",
        ),
    ),
    (
        "w4-row",
        mistake(
            "another stage is given back",
            "            self.release(pipeline, start + i - 1, thread)\n",
            "            self.release(pipeline, start + i, thread)\n",
        ),
    ),
    ("w4-row", mistake("one warp gives a stage back for all", RELEASED, RELEASED_BY_ONE)),
    ("w4", mistake("a position is not awaited", "            pipeline.consumer_wait(start + i)\n", "")),
    ("w4", mistake("scales of the other row", "scales[i // 2 % 2], acc[i]", "scales[1 - i // 2 % 2], acc[i]")),
    (
        "w4",
        mistake(
            "box 0's scales for box 1",
            "        self.add_scaled(acc_1, part_1, scales_1)\n\n",
            "        self.add_scaled(acc_1, part_1, scales_0)\n\n",
        ),
    ),
    ("w4", mistake("the next tile of columns", "k_tile * self.kind.tile_words", "(k_tile + 1) * self.kind.tile_words")),
    ("w4", mistake("past the last row", "tWgW.shape[0] - 1)", "tWgW.shape[0])")),
    ("w4", mistake("products are added to those before", "Field.ACCUMULATE, False)", "Field.ACCUMULATE, True)")),
    (
        "w4",
        mistake(
            "the middle is one less",
            "base(self.dtype) + self.kind.middle, self.dtype)] * 2",
            "base(self.dtype) + self.kind.middle - 1, self.dtype)] * 2",
        ),
    ),
    (
        "w4-zero-points",
        mistake("zero points of the other row", "offsets[i % 2], self.pair)", "offsets[1 - i % 2], self.pair)"),
    ),
    ("w4-zero-points", mistake("scales as zero points", "rows[TILE_ROWS + row + 8 * b]", "rows[row + 8 * b]")),
    (
        "w4-zero-points",
        mistake(
            "the first consumer's rows twice",
            "            self.unpack(sW, stage, self.groups + group,",
            "            self.unpack(sW, stage, self.groups,",
        ),
    ),
    ("w8-split", mistake("high and low bits change places", "for low, high in", "for high, low in")),
    ("w8-split", mistake("eight bits less a base", "17 * base", "16 * base")),
)
QUICK = ("scales of the other row", "high and low bits change places")


@pytest.fixture(autouse=True)
def _compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached kernels have other sources."""

    def compile_kernel(kernel: Any, arguments: Any, *, key: Any, target: Any) -> Any:
        return toolkit.compiled(kernel, arguments, target.arch, "")

    monkeypatch.setattr(weight_only_host, "compile_kernel", compile_kernel)


@pytest.mark.parametrize(
    ("of", "mistake"),
    [pytest.param(of, one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for of, one in MISTAKES],
)
def test_mistake_is_found(of: str, mistake: Mistake, tmp_path: Path) -> None:
    kernel = spoilt(mistake, tmp_path).WeightOnlySmallMGemm
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        emulate(BY_ID[of], "lazy", 1, kernel)
    assert not isinstance(raised.value, HostError), "it ran"
