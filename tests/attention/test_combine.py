# SPDX-License-Identifier: Apache-2.0
"""Balanced split-KV and its combine kernel: few and many splits, and output tiles that are better not split."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsl_backend.attention.cute import combine
from dsl_backend.attention.cute.combine import (
    CTA_TASK,
    CTAS_PER_SM,
    MAX_SPLITS_PER_WARP,
    WARP,
    WARP_SPLIT,
    WARP_TASK,
    WARPS,
    SplitKVCombine,
)
from dsl_backend.attention.cute.fake_args import fake_args, fake_dense_tensors
from dsl_backend.attention.cute.scheduler.balanced import COMBINE_TILES, MAX_SPLITS_BELOW_MIN
from dsl_backend.attention.cute.sm90 import dense_kernel
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import SplitKV
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target
from dsl_backend.testing.cases import Case
from emulator.errors import EmulatorError
from tests.attention.emulated import emulate, scratch
from tests.mistakes import Mistake, spoil_methods, spoilt

TILE = 16  # keys


def splits_of(case: Case, sms: int, index: int = 0, min_split_tiles: int = 1) -> list[int]:
    """Splits of the output tile that begins in each CTA's share, after the case has run and its result was right."""
    made: list[SplitKV] = []

    def make(planner: Planner, short: bool) -> Kernel:
        config = DenseConfig(groups=1, tile_n=TILE, stages=2, min_split_tiles=min_split_tiles)
        made.append(SplitKV(planner.spec, planner.target, scratch(), config))
        return made[-1]

    emulate(case, "sm_90a", make, index, sms=sms)
    _, split_ranges = made[0].scratch(case.problem().batch, 1)
    assert split_ranges is not None
    return [int(splits) for splits in split_ranges[:, 0]]


@pytest.mark.parametrize("splits", [2, MAX_SPLITS_PER_WARP, MAX_SPLITS_PER_WARP + 1, 11])
@pytest.mark.parametrize("dim", [48, 128, 256])
def test_splits_of_one_output_tile(splits: int, dim: int) -> None:
    """Rows of neighbouring heads and tokens; as many splits as one warp combines, and one more."""
    # Four key tiles a CTA: with three, the output tile would not be split between two.
    case = Case(q_lens=(2,), kv_lens=(4 * splits * TILE - 3,), heads=(3, 1), dim=dim, sinks=True)
    assert splits_of(case, splits, splits) == [splits] + [0] * (splits - 1)


@pytest.mark.parametrize("dim", [64, 80, 256])
def test_few_and_many_splits_at_once(dim: int) -> None:
    """Rows of three heads: output tiles that warps combine, one that takes a CTA, and some that are not split."""
    lengths = (5 * TILE, 3, 30 * TILE, 40, 10 * TILE + 1)
    case = Case(q_lens=(1, 1, 2, 1, 1), kv_lens=lengths, heads=(3, 1), dim=dim)
    splits = splits_of(case, 22, 2)
    assert max(splits) > MAX_SPLITS_PER_WARP > min(one for one in splits if one) > 1


@pytest.mark.parametrize("splits", [3, MAX_SPLITS_PER_WARP + 3])
def test_more_tasks_than_workers(splits: int) -> None:
    """64 rows of two column num_ctas each: every CTA, and every warp, has more than one task."""
    rows, column_blocks = 64, 2
    assert rows * column_blocks > splits * CTAS_PER_SM * (WARPS if splits <= MAX_SPLITS_PER_WARP else 1)
    # So many key tiles a CTA that the output tile is split.
    tiles = 30 * splits
    case = Case(q_lens=(1,), kv_lens=(tiles * TILE,), heads=(rows, 1), dim=256)
    assert splits_of(case, splits)[0] == splits


def test_warps_combine_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `many_rows`, warps combine more splits than they do otherwise, where CTAs have several tasks in turn."""
    splits, rows, column_blocks = MAX_SPLITS_PER_WARP + 3, 64, 2
    in_turn = rows * column_blocks * CTA_TASK
    assert in_turn > splits * CTAS_PER_SM * (WARP_TASK + splits * WARP_SPLIT)
    monkeypatch.setattr(dense_kernel, "SplitKVCombine", partial(SplitKVCombine, many_rows=True))
    # Of a size that no other test has: a compiled kernel would be found by its key.
    case = Case(q_lens=(1,), kv_lens=(30 * splits * TILE,), heads=(rows, 1), dim=192)
    assert splits_of(case, splits)[0] == splits


# Of sizes that no other test has, as above; 208 columns are two blocks, of which the second is not full.
WHOLE_ROWS = Case(q_lens=(1, 2, 1), kv_lens=(6 * TILE, 11 * TILE, 10 * TILE - 1), heads=(6, 2), dim=208, sinks=True)


def compiled_anew(key: Any, target: Target) -> Any:
    """Not from a cache, which has kernels of other source."""
    return toolkit.compiled(dense_kernel.DenseForward(key), fake_args(key, fake_dense_tensors(key)), target.arch, "")


def whole_rows(monkeypatch: pytest.MonkeyPatch, index: int = 0) -> list[int]:
    """Splits of output tiles where a warp combines rows that have two."""
    monkeypatch.setattr(dense_kernel, "SplitKVCombine", partial(SplitKVCombine, whole_rows=True))
    return splits_of(WHOLE_ROWS, 13, index)


def test_rows_of_two_splits_are_combined_by_a_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside output tiles of more splits."""
    splits = whole_rows(monkeypatch)
    assert 2 in splits
    assert max(splits) > 2


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("tasks = 1 if split_range.num_splits == 2", "tasks = 0 if split_range.num_splits == 2"),
        ("acc_O[j] = fma(partial_O[j, block, 0], first_scale,", "acc_O[j] = fma(partial_O[j, block, 0], second_scale,"),
        ("row_sum = fma(first_sum, first_scale,", "row_sum = fma(first_sum, second_scale,"),
        ("load_vector(self.partials.iterator, offset + column, partial_O[None, block, split])", "pass"),
    ],
)
def test_mistakes_in_rows_of_two_splits(said: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = spoilt(Mistake(wrong, combine, said, wrong), tmp_path)
    spoil_methods(combine.CombineThread, module, monkeypatch)
    monkeypatch.setattr(SplitKV, "build", staticmethod(compiled_anew))
    with pytest.raises((AssertionError, EmulatorError)):
        whole_rows(monkeypatch)


@pytest.mark.parametrize("sms", [1, 2])
def test_few_ctas(sms: int) -> None:
    """One CTA, where steps of one less than the number of CTAs would be 0, and two."""
    case = Case(q_lens=(2, 1), kv_lens=(7 * TILE, 30 * TILE), heads=(3, 1), dim=64)
    assert bool(max(splits_of(case, sms))) == (sms > 1)


def test_more_ctas_than_lanes() -> None:
    splits = MAX_SPLITS_PER_WARP + 2
    count = (WARP + 8) // splits
    case = Case(q_lens=(1,) * count, kv_lens=(splits * 7 * TILE,) * count, heads=(2, 1), dim=64)
    found = splits_of(case, count * splits)
    assert len(found) > WARP
    assert sum(one > 1 for one in found) == count


def test_min_split_tiles() -> None:
    """CTAs have fewer key tiles than the minimum while splits are few, and partial results no more than key tiles."""
    case = Case(q_lens=(1,), kv_lens=(6 * TILE,), heads=(2, 1), dim=64)
    assert splits_of(case, 8, min_split_tiles=2) == [6] + [0] * 7
    longer = replace(case, kv_lens=((MAX_SPLITS_BELOW_MIN + 2) * TILE,))
    assert splits_of(longer, MAX_SPLITS_BELOW_MIN + 2, min_split_tiles=2)[0] == MAX_SPLITS_BELOW_MIN // 2 + 1
    # Two partial results of 64 rows are as many bytes as eight key tiles.
    more_rows = replace(case, kv_lens=(24 * TILE,), heads=(64, 1), dim=16)
    assert splits_of(more_rows, 24, min_split_tiles=2)[0] == 12


def test_more_splits_than_scales() -> None:
    """More splits than a CTA has scales for at once."""
    splits = 70
    case = Case(q_lens=(1,), kv_lens=(splits * TILE,), heads=(1, 1), dim=64)
    assert splits_of(case, splits)[0] == splits


@pytest.mark.parametrize("q_lens", [(1,) * 7, (2, 1, 70, 33, 1)], ids=["tokens", "prompts"])
def test_different_lengths_not_split(q_lens: tuple[int, ...]) -> None:
    """Each output tile has its own CTA, and the longest is little more than an even share."""
    output_tiles = sum(-(-tokens // (64 // 2)) for tokens in q_lens)
    lengths = tuple(max(tokens, (7 - i % 2) * TILE - i) for i, tokens in enumerate(q_lens))
    case = Case(q_lens=q_lens, kv_lens=lengths, heads=(2, 1), dim=48)
    assert not any(splits_of(case, output_tiles))
    longer = replace(case, kv_lens=(*lengths[:-1], 70 * TILE))
    assert any(splits_of(longer, output_tiles))


def test_equal_lengths_not_split() -> None:
    """Idle CTAs cost less than the combine kernel."""
    output_tiles, num_ctas = 15, 16
    case = Case(
        q_lens=(1,) * output_tiles, kv_lens=(COMBINE_TILES * num_ctas * TILE,) * output_tiles, heads=(1, 1), dim=16
    )
    assert not any(splits_of(case, num_ctas))
    shorter = replace(case, kv_lens=(*case.kv_lens[2:], TILE, TILE))
    assert any(splits_of(shorter, num_ctas))
    longer = replace(case, kv_lens=((COMBINE_TILES + 1) * num_ctas * TILE,) * output_tiles)
    assert any(splits_of(longer, num_ctas))


def test_many_rows_not_split_for_longer() -> None:
    """Two partial results of 64 rows of 16 columns are as many bytes as eight of these key tiles."""
    output_tiles, num_ctas, tiles_each = 3, 4, COMBINE_TILES + 8
    case = Case(
        q_lens=(1,) * output_tiles, kv_lens=(tiles_each * num_ctas * TILE,) * output_tiles, heads=(64, 1), dim=16
    )
    assert not any(splits_of(case, num_ctas))
    longer = replace(case, kv_lens=((tiles_each + 1) * num_ctas * TILE,) * output_tiles)
    assert any(splits_of(longer, num_ctas))
