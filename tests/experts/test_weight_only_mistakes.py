# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the kernels of experts in MXFP4 under bfloat16, each of which a case on the emulator finds."""

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from weight_only_experts_cases import BY_ID, GROUPED_BY_ID, WeightOnlyEmulated, emulate

from dsl_backend.experts.cute import packed_tiles, weight_only_host
from dsl_backend.experts.cute.sm90 import weight_only_decode, weight_only_grouped
from dsl_backend.experts.cute.sm100 import unpacking as sm100_unpacking
from dsl_backend.experts.cute.sm100 import weight_only_decode as sm100_decode
from dsl_backend.experts.cute.sm100 import weight_only_grouped as sm100_grouped
from dsl_backend.gemm import mxfp4_unpacking
from emulator.errors import EmulatorError, HostError
from tests.mistakes import Mistake, compile_again, spoil_methods, spoilt


def of_few(id: str, said: str, wrong: str) -> Mistake:
    return Mistake(id, weight_only_decode, said, wrong)


def of_many(id: str, said: str, wrong: str) -> Mistake:
    return Mistake(id, weight_only_grouped, said, wrong)


def sm100(id: str, said: str, wrong: str) -> Mistake:
    return Mistake(f"sm100: {id}", sm100_grouped, said, wrong)


def sm100_few(id: str, said: str, wrong: str) -> Mistake:
    return Mistake(f"sm100, few: {id}", sm100_decode, said, wrong)


def loading(id: str, said: str, wrong: str) -> Mistake:
    return Mistake(id, packed_tiles, said, wrong)


def unpacking(id: str, said: str, wrong: str) -> Mistake:
    return Mistake(id, mxfp4_unpacking, said, wrong)


WAITED = "            wgmma.wait_group(0)\n            self.release(pipeline, start + i - 1, thread)\n"
BARRIER = "cute.arch.barrier(barrier_id=CONSUMER_BARRIER + group, number_of_threads=WARPGROUP)"
# A case of each, and those of many tokens.
MISTAKES = (
    (BY_ID["plain"], unpacking("the other row's scales", "factors[i % 2]", "factors[1 - i % 2]")),
    (GROUPED_BY_ID["ragged"], unpacking("scales of the first block", "byte, zero = block, 4", "byte, zero = 0, 4")),
    (BY_ID["plain"], unpacking("rows 8 apart have one scale", "rows[row + 8]", "rows[row]")),
    (BY_ID["plain"], of_few("sums are not raised", "acc_1[i] = acc_1[i] * 2.0**LOWERED", "acc_1[i] = acc_1[i]")),
    (BY_ID["plain"], unpacking("the fourth element has no sign", " | (word << 4 & SIGN)", "")),
    (
        GROUPED_BY_ID["ragged"],
        unpacking(
            "the second element is the first", "(word << (3 * i) if i else word)", "(word << (3 * (i // 2 * 2)))"
        ),
    ),
    (BY_ID["plain"], loading("weights of the first expert", "cutlass.Int64(expert) * tWgW.stride[0]", "0")),
    (BY_ID["plain"], unpacking("up rows are gate rows", "i // of_box * of_part + ", "0 * of_part + ")),
    (GROUPED_BY_ID["gpt-oss"], unpacking("past the last row", "of_part - 1)", "of_part + 3)")),
    (BY_ID["long"], loading("the first tile of columns", "+ k_tile * TILES.tile_words", "")),
    (BY_ID["long"], unpacking("other words of the four", "read[step]", "read[3 - step]")),
    (BY_ID["long"], of_few("a position is not awaited", "            pipeline.consumer_wait(start + i)\n", "")),
    (
        BY_ID["long"],
        of_few("x is given back too soon", WAITED, "            self.release(pipeline, start + i - 1, thread)\n"),
    ),
    (BY_ID["long"], of_few("another stage is given back", "start + i - 1, thread)", "start + i, thread)")),
    (
        BY_ID["long"],
        of_few("sums of the tile before stay", "tCrW_0, tCrX, stage, accumulate)", "tCrW_0, tCrX, stage, True)"),
    ),
    (
        BY_ID["gpt-oss"],
        of_few(
            "the first consumer's up rows",
            "            self.unpack_box(sW, stage, self.groups + group, thread, tCrW_1)\n            wgmma",
            "            self.unpack_box(sW, stage, self.groups, thread, tCrW_1)\n            wgmma",
        ),
    ),
    (
        BY_ID["plain"],
        unpacking("zeros are not added", "MINUS_ZEROS = SIGN", "MINUS_ZEROS = both(0x3F80)"),
    ),
    # Many tokens.
    (GROUPED_BY_ID["ragged"], of_many("many: the first expert", "cutlass.Int64(work.expert) * (4", "0 * (4")),
    (GROUPED_BY_ID["deep"], of_many("many: the first packed tile", "k_tile // HALVES * (4", "0 * (4")),
    (GROUPED_BY_ID["ragged"], of_many("many: the first half twice", "+ k_tile % HALVES * half", "")),
    (
        GROUPED_BY_ID["gpt-oss"],
        of_many("many: the first consumer's weights", "sW.iterator + group * self.half_words", "sW.iterator"),
    ),
    (
        GROUPED_BY_ID["gpt-oss"],
        of_many("many: the other consumer's columns", "box * self.consumers + group", "box * self.consumers"),
    ),
    (GROUPED_BY_ID["deep"], of_many("many: box 1 has columns of box 0", "(box * self.consumers + ", "(")),
    (GROUPED_BY_ID["deep"], of_many("many: sums of the tile before stay", "        acc.fill(0.0)\n", "")),
    (GROUPED_BY_ID["deep"], of_many("many: a stage is not awaited", "pipeline.consumer_wait(position + half)", "pass")),
    (
        GROUPED_BY_ID["deep"],
        of_many(
            "many: products are not awaited",
            "                wgmma.wait_group(0)\n                if cutlass",
            "                if cutlass",
        ),
    ),
    (
        GROUPED_BY_ID["deep"],
        of_many("many: a stage too far is given back", "position - HALVES, thread", "position, thread"),
    ),
    (
        GROUPED_BY_ID["deep"],
        of_many("many: the last stages stay", "self.release(pipeline, start + k_tiles - HALVES, thread)", "pass"),
    ),
    (
        GROUPED_BY_ID["ragged"],
        of_many(
            "many: scales of the first half's rows",
            "pieces[-1] + TILES.value_words // HALVES",
            "pieces[0] + TILES.value_words // HALVES",
        ),
    ),
    (GROUPED_BY_ID["parts"], of_many("many: rows of the first part", "top = piece * self.epi_tokens", "top = 0")),
    (GROUPED_BY_ID["gpt-oss"], of_many("many: bias of the first expert", "mBias[work.expert, None]", "mBias[0, None]")),
    (GROUPED_BY_ID["gpt-oss"], of_many("many: rows 8 apart have one bias", "column + 8 * b, part", "column, part")),
    (
        GROUPED_BY_ID["input"],
        of_many("many: weights of other rows", "8 * j + 2 * (thread % 4) + a", "8 * j + 2 * (thread % 4)"),
    ),
    (
        GROUPED_BY_ID["ragged"],
        of_many("many: sums are not raised", "cutlass.Float32(2.0**LOWERED)", "cutlass.Float32(1.0)"),
    ),
    (
        GROUPED_BY_ID["tall"],
        of_many(
            "many: staged rows are overwritten",
            f"# All threads have read what was staged last.\n                    {BARRIER}",
            "",
        ),
    ),
    (
        GROUPED_BY_ID["tall"],
        of_many(
            "many: staged rows are not awaited",
            f"{BARRIER}\n                    self.store_rows",
            "self.store_rows",
        ),
    ),
)
RAGGED, DEEP = GROUPED_BY_ID["sm100-ragged"], GROUPED_BY_ID["sm100-deep"]
PLAIN, LONG = BY_ID["sm100-few-plain"], BY_ID["sm100-few-deep"]
MISTAKES += (
    (RAGGED, sm100("the first expert", "cutlass.Int64(work.expert) * (4", "0 * (4")),
    (DEEP, sm100("the first packed tile", "k_tile // HALVES * tile_bytes", "0 * tile_bytes")),
    (RAGGED, sm100("the first half twice", "source + k_tile % HALVES * value_bytes", "source")),
    (RAGGED, sm100("scales of the other half", "source + HALVES * value_bytes", "source + 0 * value_bytes")),
    (RAGGED, sm100("blocks of the first half", "shift = k_tile % HALVES * HALF_BITS", "shift = 0")),
    (DEEP, sm100("the first warpgroup's tiles", "i * UNPACKING_WARPGROUPS + group", "i * UNPACKING_WARPGROUPS")),
    (RAGGED, sm100("rows of the first warp", "thread // WARP * 16 + lane % 16", "lane % 16")),
    (RAGGED, sm100("rows 8 apart are one", "16 + lane % 16", "16 + lane % 8")),
    (RAGGED, sm100("columns 8 apart are the same", " + lane // 16", "")),
    (RAGGED, sm100("vectors in order", "(vector ^ (lane % 8))", "vector")),
    (DEEP, sm100("one stage of unpacked weights", "row = stage * self.weight_rows", "row = 0 * self.weight_rows")),
    (DEEP, sm100("a stage is overwritten", "                beside.unpacked.producer_acquire(position)\n", "")),
    (DEEP, sm100("packed weights are not awaited", "                pipeline.consumer_wait(position)\n", "")),
    (DEEP, sm100("unpacked weights are not awaited", "        beside.unpacked.consumer_wait(position)\n", "")),
    (DEEP, sm100("a stage is not given back", "self.commit(beside.unpacked.empty(position))", "pass")),
    (RAGGED, sm100("no fence", 'cute.arch.fence_proxy("async.shared", space="cta")', "pass")),
    (RAGGED, sm100("sums are not raised", " * 2.0**LOWERED", "")),
    (DEEP, Mistake("sm100: one warpgroup's rows", sm100_unpacking, "place // WARPGROUP)", "0 * place)")),
    # Few tokens.
    (PLAIN, sm100_few("the first box twice", "group * BOX_TILES + i", "i")),
    (PLAIN, sm100_few("one packed tile of a box", "group * BOX_TILES + i", "group * BOX_TILES")),
    (
        PLAIN,
        sm100_few(
            "scales of the first half",
            "block = tile + piece * (WARPGROUP * WORDS), piece *",
            "block = tile + piece * (WARPGROUP * WORDS), 0 *",
        ),
    ),
    (PLAIN, sm100_few("values of the first half", "tile + piece * (WARPGROUP * WORDS)", "tile")),
    (PLAIN, sm100_few("columns of the first half", "first + piece * (PIECE_COLUMNS // PACKED)", "first")),
    (PLAIN, sm100_few("lanes of the first tile", "lanes + i * (HALF_WARP * tmem.LANE_STRIDE)", "lanes")),
    (PLAIN, sm100_few("columns of the first box", "        first += group *", "        first += 0 *")),
    (
        PLAIN,
        sm100_few(
            "one stage",
            "sW.unpacked.stage(position) * UNPACKED_COLUMNS\n            first +=",
            "0 * UNPACKED_COLUMNS\n            first +=",
        ),
    ),
    (LONG, sm100_few("a stage is overwritten", "            sW.unpacked.producer_acquire(position)\n", "")),
    (
        LONG,
        sm100_few(
            "packed weights are not awaited",
            "            pipeline.consumer_wait(position)\n            first",
            "            first",
        ),
    ),
    (LONG, sm100_few("unpacked weights are not awaited", "                sW.unpacked.consumer_wait(position)\n", "")),
    (PLAIN, sm100_few("stores are not awaited", "            cute.arch.fence_view_async_tmem_store()\n", "")),
    (PLAIN, sm100_few("no fence before the barrier", "            tmem.before_sync()\n", "")),
    (LONG, sm100_few("no stage is given back", "if i else ()", "if i < 0 else ()")),
    (LONG, sm100_few("sums of the tile before stay", "iteration > start", "iteration >= start")),
    (PLAIN, sm100_few("sums of one box are not raised", "acc_1[i] * 2.0**LOWERED", "acc_1[i]")),
    (PLAIN, sm100_few("rows in order", "row_of_lane(thread))", "thread)")),
)
QUICK = (
    "the other row's scales",
    "many: the first consumer's weights",
    "sm100: rows of the first warp",
    "sm100, few: rows in order",
)


# They end once the emulator has waited for long enough, or take as long.
SLOW = (
    "sm100: a stage is not given back",
    "sm100: unpacked weights are not awaited",
    "sm100, few: no stage is given back",
    "sm100, few: unpacked weights are not awaited",
)


def marks_of(id: str) -> tuple[pytest.MarkDecorator, ...]:
    if id in QUICK:
        return ()
    return (pytest.mark.full if id in SLOW else pytest.mark.rest,)


# Classes that kernels have methods of, and kernels with the host's names of them.
SHARED = {
    mxfp4_unpacking: mxfp4_unpacking.Mxfp4Unpacking,
    packed_tiles: packed_tiles.PackedTiles,
    sm100_unpacking: sm100_unpacking.UnpackingWarps,
}
KERNELS = {
    weight_only_decode: ("WeightOnlyDecodeGemm", None),
    weight_only_grouped: ("WeightOnlyGroupedGemm", None),
    sm100_decode: ("WeightOnlyDecodeGemm", "DecodeGemmSm100"),
    sm100_grouped: ("WeightOnlyGroupedGemm", "GroupedGemmSm100"),
}


@pytest.fixture(autouse=True)
def _compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_again(monkeypatch, weight_only_host)


@pytest.mark.parametrize(
    ("of", "mistake"),
    [pytest.param(of, one, id=one.id, marks=marks_of(one.id)) for of, one in MISTAKES],
)
def test_mistake_is_found(
    of: WeightOnlyEmulated, mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = spoilt(mistake, tmp_path)
    if mistake.module in SHARED:
        spoil_methods(SHARED[mistake.module], module, monkeypatch)
    else:
        name, imported = KERNELS[mistake.module]
        monkeypatch.setattr(weight_only_host, imported or name, getattr(module, name))
    with pytest.raises((EmulatorError, AssertionError)) as raised:
        emulate(of, "lazy", 1)
    assert not isinstance(raised.value, HostError), "it ran"
