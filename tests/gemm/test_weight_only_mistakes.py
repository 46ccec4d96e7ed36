# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the kernel of weights of 4 and 8 bits are found: by the budget of sums, or by the emulator's checks."""

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("cutlass")

from weight_only_cases import CASES, emulate

from dsl_backend.gemm import weight_only_host
from dsl_backend.gemm.sm90 import unpacking, weight_only_gemm, weight_only_small_m
from emulator.errors import EmulatorError, HostError
from tests.mistakes import Mistake, compile_again, spoil_methods, spoilt

BY_ID = {one.id: one for one in CASES}


def mistake(id: str, said: str, wrong: str, module: ModuleType = weight_only_small_m) -> Mistake:
    return Mistake(id, module, said, wrong)


def of_unpacking(id: str, said: str, wrong: str) -> Mistake:
    return mistake(id, said, wrong, unpacking)


def of_many_rows(id: str, said: str, wrong: str) -> Mistake:
    return mistake(id, said, wrong, weight_only_gemm)


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
    ("w4", of_unpacking("scales of the other row", "scales[i // 2 % 2], acc[i]", "scales[1 - i // 2 % 2], acc[i]")),
    (
        "w4",
        mistake(
            "box 0's scales for box 1",
            "        self.add_scaled(acc_1, part_1, scales_1)\n\n",
            "        self.add_scaled(acc_1, part_1, scales_0)\n\n",
        ),
    ),
    ("w4", mistake("the next tile of columns", "k_tile * size", "(k_tile + 1) * size")),
    ("w4", mistake("past the last row", "packed.shape[0] - 1)", "packed.shape[0])")),
    ("w4-row", mistake("a tile of columns too many", "if k_tile == work.k_tiles:", "if k_tile > work.k_tiles:")),
    ("w4", of_unpacking("products are added to those before", "ACCUMULATE, accumulate)", "ACCUMULATE, True)")),
    (
        "w4",
        of_unpacking(
            "the middle is one less",
            "base(self.dtype) + self.kind.middle, self.dtype)] * 2",
            "base(self.dtype) + self.kind.middle - 1, self.dtype)] * 2",
        ),
    ),
    (
        "w4-zero-points",
        of_unpacking("zero points of the other row", "offsets[i % 2], self.pair)", "offsets[1 - i % 2], self.pair)"),
    ),
    ("w4-zero-points", of_unpacking("scales as zero points", "rows[TILE_ROWS + row + 8 * b]", "rows[row + 8 * b]")),
    (
        "w4-zero-points",
        mistake(
            "the first consumer's rows twice",
            "            self.unpack(sW, stage, self.groups + group,",
            "            self.unpack(sW, stage, self.groups,",
        ),
    ),
    ("w8-split", of_unpacking("bytes change places", "parts = [word, word >> 8]", "parts = [word >> 8, word]")),
    (
        "w8-split",
        of_unpacking(
            "the middle of eight bits is one less",
            "offset = pair_bits(base(self.dtype) + self.kind.middle,",
            "offset = pair_bits(base(self.dtype) + self.kind.middle - 1,",
        ),
    ),
    ("w8-rows", of_unpacking("the highest bit does not count", "pair_bits(2 * base(", "pair_bits(base(")),
    ("w4-rows", of_unpacking("the tile before is kept", "ACCUMULATE, accumulate)", "ACCUMULATE, True)")),
    ("w4-rows", of_unpacking("the first half's weights twice", "i * blocks + k_block", "k_block")),
    (
        "w4-rows",
        of_many_rows(
            "sums are read too soon",
            "            wgmma.wait_group(0)\n            fence_operand(part)\n",
            "            fence_operand(part)\n",
        ),
    ),
    ("w4-rows", of_many_rows("many rows: another stage is given back", "release(position + i,", "release(position,")),
    (
        "w4-rows",
        of_many_rows("many rows: a position is not awaited", "            pipeline.consumer_wait(position + i)\n", ""),
    ),
    (
        "w4-rows",
        of_many_rows("the next tile's scales", "add_scaled(acc, part, scales)", "add_scaled(acc, part, next_scales)"),
    ),
    ("w4-rows", of_many_rows("the first half twice", "k_tile % HALVES * half", "0")),
    ("w4-rows", of_many_rows("many rows: past the last row", "tWgW.shape[0] - 1)", "tWgW.shape[0])")),
    ("w4-rows", of_many_rows("half a packed tile is missing", "HALVES * cute.ceil_div(", "cute.ceil_div(")),
    (
        "w4-rows",
        of_many_rows(
            "many rows: one warp gives a stage back for all", "warps(self.consumers * WARPGROUP // WARP)", "warps(1)"
        ),
    ),
    ("w4-rows", of_many_rows("the other row's vector", "thread // WARP * 2 + b", "thread // WARP * 2 + 1 - b")),
    (
        "w4-rows",
        of_many_rows("the buffer is not swizzled", "(vector ^ (lane % 8))", "vector"),
    ),
    (
        "w4-rows-zero-points",
        of_many_rows(
            "a buffer is written while it is stored",
            "                cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
            "                pass\n",
        ),
    ),
    ("w4-rows-zero-points", of_many_rows("the bias of the other row", "column + 8 * b, 0", "column + 8 - 8 * b, 0")),
)
QUICK = ("scales of the other row", "bytes change places", "the other row's vector")


@pytest.fixture(autouse=True)
def _compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again(monkeypatch, weight_only_host)


@pytest.mark.parametrize(
    ("of", "mistake"),
    [pytest.param(of, one, id=one.id, marks=() if one.id in QUICK else pytest.mark.rest) for of, one in MISTAKES],
)
def test_mistake_is_found(of: str, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, kernel = spoilt(mistake, tmp_path), None
    if mistake.module is unpacking:
        spoil_methods(unpacking.Unpacking, module, monkeypatch)
    else:
        kernel = module.WeightOnlyGemm if mistake.module is weight_only_gemm else module.WeightOnlySmallMGemm
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        emulate(BY_ID[of], "lazy", 1, kernel)
    assert not isinstance(raised.value, HostError), "it ran"
