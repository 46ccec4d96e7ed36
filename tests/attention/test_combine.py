# SPDX-License-Identifier: Apache-2.0
"""Key ranges that are cut, and what is left of them: few and many parts, and ranges that had better stay whole."""

from dataclasses import replace

import pytest

from dsl_backend.attention.cute.combine import CTAS_PER_SM, MAX_SPLITS_PER_WARP, WARP, WARPS
from dsl_backend.attention.cute.scheduler.balanced import COMBINE_TILES, MAX_SPLITS_BELOW_MIN
from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig
from dsl_backend.attention.cute.sm90.dense_host import SplitKV
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.testing.cases import Case
from tests.attention.emulated import emulate, scratch

TILE = 16  # keys


def parts_of(case: Case, sms: int, index: int = 0, least: int = 1) -> list[int]:
    """Parts of the range that begins in each block's share, after the case has run and was right."""
    made: list[SplitKV] = []

    def make(planner: Planner, short: bool) -> Kernel:
        config = DenseConfig(groups=1, tile_n=TILE, stages=2, min_split_tiles=least)
        made.append(SplitKV(planner.spec, planner.target, scratch(), config))
        return made[-1]

    emulate(case, "sm_90a", make, index, sms=sms)
    _, split_ranges = made[0].scratch(case.problem().batch, 1)
    assert split_ranges is not None
    return [int(parts) for parts in split_ranges[:, 0]]


@pytest.mark.parametrize("parts", [2, MAX_SPLITS_PER_WARP, MAX_SPLITS_PER_WARP + 1, 11])
@pytest.mark.parametrize("dim", [48, 128, 256])
def test_parts_of_one_range(parts: int, dim: int) -> None:
    """Rows of neighbouring heads and tokens; a part more than a block's team merges alone."""
    # Four tiles a block: three would be left to one of two.
    case = Case(q_lens=(2,), kv_lens=(4 * parts * TILE - 3,), heads=(3, 1), dim=dim, sinks=True)
    assert parts_of(case, parts, parts) == [parts] + [0] * (parts - 1)


@pytest.mark.parametrize("dim", [64, 80, 256])
def test_few_and_many_parts_at_once(dim: int) -> None:
    """Of three heads' rows: ranges that warps merge alone, one that takes a block, and some that were not cut."""
    lengths = (5 * TILE, 3, 30 * TILE, 40, 10 * TILE + 1)
    case = Case(q_lens=(1, 1, 2, 1, 1), kv_lens=lengths, heads=(3, 1), dim=dim)
    parts = parts_of(case, 22, 2)
    assert max(parts) > MAX_SPLITS_PER_WARP > min(one for one in parts if one) > 1


@pytest.mark.parametrize("parts", [3, MAX_SPLITS_PER_WARP + 3])
def test_more_items_than_turns(parts: int) -> None:
    """64 rows of two slices each: a block's turn, and a warp's, comes around more than once."""
    rows, slices = 64, 2
    assert rows * slices > parts * CTAS_PER_SM * (WARPS if parts <= MAX_SPLITS_PER_WARP else 1)
    # As many tiles a block as leave no range whole.
    tiles = 30 * parts
    case = Case(q_lens=(1,), kv_lens=(tiles * TILE,), heads=(rows, 1), dim=256)
    assert parts_of(case, parts)[0] == parts


@pytest.mark.parametrize("sms", [1, 2])
def test_few_blocks(sms: int) -> None:
    """One block, which has no turn less than there are, and two."""
    case = Case(q_lens=(2, 1), kv_lens=(7 * TILE, 30 * TILE), heads=(3, 1), dim=64)
    assert bool(max(parts_of(case, sms))) == (sms > 1)


def test_more_blocks_than_lanes() -> None:
    parts = MAX_SPLITS_PER_WARP + 2
    count = (WARP + 8) // parts
    case = Case(q_lens=(1,) * count, kv_lens=(parts * 7 * TILE,) * count, heads=(2, 1), dim=64)
    found = parts_of(case, count * parts)
    assert len(found) > WARP
    assert sum(one > 1 for one in found) == count


def test_least_share() -> None:
    """Blocks have fewer tiles than it while parts are few, and no more than the tiles are."""
    case = Case(q_lens=(1,), kv_lens=(6 * TILE,), heads=(2, 1), dim=64)
    assert parts_of(case, 8, least=2) == [6] + [0] * 7
    longer = replace(case, kv_lens=((MAX_SPLITS_BELOW_MIN + 2) * TILE,))
    assert parts_of(longer, MAX_SPLITS_BELOW_MIN + 2, least=2)[0] == MAX_SPLITS_BELOW_MIN // 2 + 1
    # Two partial results of 64 rows are eight tiles of theirs.
    more_rows = replace(case, kv_lens=(24 * TILE,), heads=(64, 1), dim=16)
    assert parts_of(more_rows, 24, least=2)[0] == 12


def test_many_parts_in_turns() -> None:
    """More than a block has weights of at once."""
    parts = 70
    case = Case(q_lens=(1,), kv_lens=(parts * TILE,), heads=(1, 1), dim=64)
    assert parts_of(case, parts)[0] == parts


@pytest.mark.parametrize("q_lens", [(1,) * 7, (2, 1, 70, 33, 1)], ids=["tokens", "prompts"])
def test_ranges_of_several_lengths_stay_whole(q_lens: tuple[int, ...]) -> None:
    """Each has a block for itself, and the longest is little more than an even share."""
    ranges = sum(-(-tokens // (64 // 2)) for tokens in q_lens)
    lengths = tuple(max(tokens, (7 - i % 2) * TILE - i) for i, tokens in enumerate(q_lens))
    case = Case(q_lens=q_lens, kv_lens=lengths, heads=(2, 1), dim=48)
    assert not any(parts_of(case, ranges))
    longer = replace(case, kv_lens=(*lengths[:-1], 70 * TILE))
    assert any(parts_of(longer, ranges))


def test_ranges_of_one_length_stay_whole() -> None:
    """Where blocks that idle cost less than a merge."""
    ranges, blocks = 15, 16
    case = Case(q_lens=(1,) * ranges, kv_lens=(COMBINE_TILES * blocks * TILE,) * ranges, heads=(1, 1), dim=16)
    assert not any(parts_of(case, blocks))
    shorter = replace(case, kv_lens=(*case.kv_lens[2:], TILE, TILE))
    assert any(parts_of(shorter, blocks))
    longer = replace(case, kv_lens=((COMBINE_TILES + 1) * blocks * TILE,) * ranges)
    assert any(parts_of(longer, blocks))


def test_ranges_of_many_rows_stay_whole_for_longer() -> None:
    """Two partial results of 64 rows of 16 columns are as many bytes as eight of these key tiles."""
    ranges, blocks, spared = 3, 4, COMBINE_TILES + 8
    case = Case(q_lens=(1,) * ranges, kv_lens=(spared * blocks * TILE,) * ranges, heads=(64, 1), dim=16)
    assert not any(parts_of(case, blocks))
    longer = replace(case, kv_lens=((spared + 1) * blocks * TILE,) * ranges)
    assert any(parts_of(longer, blocks))
