# SPDX-License-Identifier: Apache-2.0
"""Tile schedulers: each tile once, the longest first; balanced split-KV with its split ranges."""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import emulator

pytest.importorskip("cutlass")

from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from dsl_backend.attention.cute import sizes
from dsl_backend.attention.cute.scheduler import balanced, clc
from dsl_backend.attention.cute.scheduler.balanced import SplitRange, SplitRule
from dsl_backend.attention.cute.scheduler.work_tile import FIELDS, NOT_SPLIT, WorkTile
from dsl_backend.attention.cute.score_mod import ScoreModKey
from dsl_backend.attention.cute.tiles import LayerKey
from dsl_backend.attention.protocol import COUNTERS
from dsl_backend.quant.format import KVFormat
from emulator.errors import EmulatorError
from emulator.machine.launch import Run
from tests.attention import schedule_kernels
from tests.attention.schedule_kernels import BalancedSchedule, ClcSchedule, DynamicSchedule
from tests.mistakes import Mistake, spoilt

TOKENS, TILE, HEADS = 32, 16, 2
FAR = 1 << 30
SCHEDULERS = ("BalancedSplitKVTileScheduler", "ClcTileScheduler", "DynamicPersistentTileScheduler")


def key_of(**facts: object) -> LayerKey:
    usual: dict[str, object] = {
        "dtype": "bfloat16",
        "heads_q": HEADS,
        "heads_kv": 1,
        "head_dim": 64,
        "head_dim_v": 64,
        "pack_gqa": 1,
        "page_size": 0,
        "kv": KVFormat("bfloat16"),
        "causality": "causal",
        "has_window_left": False,
        "has_window_right": False,
        "lse": False,
        "split": False,
        "tiles_per_split": 0,
        "scores": ScoreModKey(softcap=False, alibi=False, sinks=None, signed=False),
    }
    return LayerKey(**(usual | facts))  # type: ignore[arg-type]


# By schedule, its options and the schedulers, which a test may replace: tests of many batches run the same code.
COMPILED: dict[tuple[Any, ...], Any] = {}


def call(schedule: Any, options: tuple[Any, ...], tensors: Sequence[torch.Tensor], numbers: Sequence[int] = ()) -> None:
    """Run one of schedule_kernels on compact tensors, whose sizes are not compiled in."""
    arguments = [from_dlpack(one).mark_layout_dynamic(leading_dim=one.dim() - 1) for one in tensors]
    key = (schedule, options, *(getattr(schedule_kernels, name) for name in SCHEDULERS))
    if key not in COMPILED:
        COMPILED[key] = cute.compile(schedule(*options), *arguments, *numbers)
    COMPILED[key](*arguments, *numbers)


@dataclass(frozen=True)
class Tile:
    """A row tile of a request for a head block, and its key tiles."""

    request: int
    row: int
    head_block: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch: (queries, keys) of each request, the mask, and the query lengths that are served."""

    pairs: Sequence[tuple[int, int]]
    causality: str = "causal"
    left: int | None = None
    min_seqlen_q: int = 1
    max_seqlen_q: int = FAR

    @property
    def starts(self) -> list[int]:
        return [sum(queries for queries, _ in self.pairs[:i]) for i in range(len(self.pairs) + 1)]

    def tiles(self) -> list[Tile]:
        """All tiles of the batch, in no order."""
        found = []
        for request, (queries, keys) in enumerate(self.pairs):
            if not self.min_seqlen_q <= queries <= self.max_seqlen_q:
                continue
            for row in range(0, queries, TOKENS):
                position = keys - queries + row
                seen = min(keys, position + min(TOKENS, queries - row)) if self.causality == "causal" else keys
                begin = 0 if self.left is None else max(position - self.left, 0) // TILE
                end = max(-(-seen // TILE), begin + 1)
                found += [Tile(request, row, head_block, begin, end) for head_block in range(HEADS)]
        return found

    def given(self) -> tuple[LayerKey, torch.Tensor, torch.Tensor]:
        """(key of the layer, cu_seqlens_q, seqused_k)."""
        key = key_of(causality=self.causality, has_window_left=self.left is not None)
        starts, lengths = (torch.tensor(one, dtype=torch.int32) for one in (self.starts, [k for _, k in self.pairs]))
        return key, starts, lengths

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.left or 0, self.min_seqlen_q, self.max_seqlen_q

    def by_dynamic(self, num_ctas: int, order: str) -> list[list[Tile]]:
        """The tiles of each CTA of the dynamic scheduler, in its order; the emulator's schedule is `order`."""
        key, starts, lengths = self.given()
        semaphore = torch.zeros(COUNTERS, dtype=torch.int32)
        found: list[list[Tile]] = []
        # Twice: the second launch starts from the semaphore that the first one reset.
        for _ in range(2):
            recorded = torch.full((num_ctas, len(self.tiles()) + 1, FIELDS), -7, dtype=torch.int32)
            with emulator.device(arch="sm_90a", sms=num_ctas, schedule=order, strict=True):
                call(DynamicSchedule, (key, TOKENS, TILE), (starts, lengths, semaphore, recorded), self.numbers)
            assert semaphore.tolist() == [0, 0]
            found = [self.of(cta) for cta in recorded.tolist()]
        return found

    def by_clc(self, order: str, beyond: int = 0) -> list[list[Tile]]:
        """The tiles of each CTA by CLC: `beyond` more CTAs than tiles, of which three run at a time."""
        key, starts, lengths = self.given()
        count = len(self.tiles())
        recorded = torch.zeros(count + beyond, count + 1, FIELDS, dtype=torch.int32)
        with emulator.device(arch="sm_100a", sms=3, schedule=order, strict=True):
            call(ClcSchedule, (key, TOKENS, TILE), (starts, lengths, recorded), self.numbers)
        return [self.of(cta) for cta in recorded.tolist()]

    def of(self, recorded: list[list[int]]) -> list[Tile]:
        works = [WorkTile(*fields) for fields in recorded]
        stop = next(place for place, work in enumerate(works) if not work.valid)
        requests = [
            max(i for i, start in enumerate(self.starts[:-1]) if start <= work.q_offset) for work in works[:stop]
        ]
        return [
            Tile(request, work.q_offset - self.starts[request], work.head_block, work.n_block_min, work.n_block_max)
            for request, work in zip(requests, works, strict=False)
        ]


RAGGED = Batch(pairs=[(70, 70), (1, 300), (200, 200), (33, 500), (0, 0), (64, 64)])
MANY = Batch(pairs=[(random.Random(i).randrange(1, 90), 90) for i in range(45)])
BATCHES = {
    "ragged": RAGGED,
    "full": Batch(pairs=RAGGED.pairs, causality="full"),
    "window": Batch(pairs=RAGGED.pairs, left=40),
    "long-ones": Batch(pairs=RAGGED.pairs, min_seqlen_q=34, max_seqlen_q=100),
    "many": MANY,
    "one": Batch(pairs=[(1, 1)]),
    "none": Batch(pairs=[(1, 1)], min_seqlen_q=2),
}


def assert_each_once(batch: Batch, found: Sequence[Sequence[Tile]]) -> None:
    assert sorted(map(repr, (tile for cta in found for tile in cta))) == sorted(map(repr, batch.tiles()))


@pytest.mark.parametrize("num_ctas", [1, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_each_once(name: str, num_ctas: int) -> None:
    """By one CTA and by several, of which some find no tile."""
    batch = BATCHES[name]
    for order in ("eager", "lazy", "random"):
        by_dynamic = batch.by_dynamic(num_ctas, order)
        assert_each_once(batch, by_dynamic)


@pytest.mark.parametrize("name", ["ragged", "full"])
def test_longest_first(name: str) -> None:
    """Heads of a tile side by side. With a window a request's last row tile may be shorter than the one before it."""
    (by_dynamic,) = BATCHES[name].by_dynamic(1, "eager")
    tiles = [tile.end - tile.begin for tile in by_dynamic]
    assert tiles == sorted(tiles, reverse=True)
    assert [tile.head_block for tile in by_dynamic] == list(range(HEADS)) * (len(by_dynamic) // HEADS)


@pytest.mark.parametrize("beyond", [1, 20])
@pytest.mark.parametrize("name", BATCHES)
def test_each_once_by_clc(name: str, beyond: int) -> None:
    """Only as many CTAs run as the SMs hold, although some CTAs of the grid have no tile."""
    batch = BATCHES[name]
    for order in ("eager", "lazy", "random"):
        by_clc = batch.by_clc(order, beyond)
        assert_each_once(batch, by_clc)
        assert sum(bool(cta) for cta in by_clc) <= 3


@pytest.mark.parametrize("name", ["ragged", "many"])
def test_clc_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile once, whichever CTA of the grid is cancelled next: the last one, or any."""
    batch, indices = BATCHES[name], Run._cluster_indices
    for seed in range(4):
        any_order = random.Random(seed)

        def mixed(run: Run, any_order: random.Random = any_order, last_first: bool = seed == 0) -> Iterator[Any]:
            found = list(indices(run))[::-1]
            return iter(found if last_first else any_order.sample(found, len(found)))

        monkeypatch.setattr(Run, "_cluster_indices", mixed)
        by_clc = batch.by_clc("random", 5)
        assert_each_once(batch, by_clc)


MISTAKES = (
    Mistake(
        "response read before it has arrived",
        clc,
        "        cute.arch.mbarrier_wait(full, phase_of(count - 1, 1))\n",
        "",
    ),
    Mistake("the phase of another response", clc, "phase_of(count - 1, 1)", "phase_of(count, 1)"),
    Mistake("other bytes expected", clc, "(full, CLC_RESPONSE_BYTES)", "(full, CLC_RESPONSE_BYTES // 2)"),
    Mistake("the count instead of the tile index", clc, "return tile_idx if", "return cutlass.Int32(count) if"),
    Mistake(
        "queries after the last CTA",
        clc,
        "        self.work_pipeline.produce(",
        "        self.next_tile_idx(num_produced + num_skipped + 1, None)\n        self.work_pipeline.produce(",
    ),
    Mistake("tiles beyond the last one not counted", clc, "num_skipped += 1", "num_skipped += 0"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_mistakes_in_clc(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_kernels, "ClcTileScheduler", spoilt(mistake, tmp_path).ClcTileScheduler)

    def run() -> None:
        for order in ("eager", "lazy", "random"):
            assert_each_once(RAGGED, RAGGED.by_clc(order, 20))

    with pytest.raises((EmulatorError, AssertionError)):
        run()


def test_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose keys do not fit into L2 together are processed one section after another."""
    monkeypatch.setattr(sizes, "L2_SECTION_BYTES", 400 * 2 * 2 * 64)
    monkeypatch.setattr(sys.modules[__name__], "COMPILED", {})
    (by_dynamic,) = RAGGED.by_dynamic(1, "eager")
    # Keys before a request: 0, 70, 370, 570, 1070.
    sections = [(0, 1, 2), (3,), (5,)]
    assert [tile.request for tile in by_dynamic if tile.head_block == 0 and tile.request in sections[0]][:1] == [1]
    places = [next(i for i, section in enumerate(sections) if tile.request in section) for tile in by_dynamic]
    assert places == sorted(places)


MIN_SPLIT_TILES = 2
RULE = SplitRule(min_tiles=MIN_SPLIT_TILES)
DECODES = {
    "equal": [90] * 6,
    "long": [40 * TILE, 1, 900, 16, 17, 300, 33],
    "short-ones-last": [60 * TILE, *[3] * 30],
    "short-ones-first": [*[TILE] * 40, 70 * TILE],
    "all-short": [5, 40, 17, 16, 1],
    "one": [33 * TILE],
    "empty-ones": [0, 200, 0, 700, 1],
}


# Requests of several row tiles, and their keys.
TOKENS_PER_TILE = 2
PROMPTS, PROMPTS_KEYS = [5, 1, 2, 9, 1], [90, 1, 40 * TILE, 20 * TILE + 3, 700]
# Some are longer than a key tile, and are paired: at the beginning of their request, after context, with fewer keys
# than queries, with none.
PAIRED = {
    "alone": ([75], [75]),
    "beside-decodes": ([1, 1, 60, 1, 33, 2], [300, 17, 60, 9 * TILE, 200, 33]),
    "behind-context": ([TILE + 1, 31], [5 * TILE + 3, 700]),
    "fewer-keys": ([40, 20, 1], [3, 0, 90]),
    "across-chunks": ([1] * 33 + [50], [40] * 33 + [50]),
}


def balanced_schedule(
    lengths: Sequence[int],
    num_ctas: int,
    q_lens: Sequence[int] | None = None,
    cluster: int = 1,
    tokens: int = TOKENS_PER_TILE,
    pair_row_tiles: bool | Literal["exact"] = False,
    row_group: int = 0,
    row_group_iters: int = 100,
    rule: SplitRule = RULE,
    kept_chunks: int = 1,
) -> tuple[list[list[WorkTile]], list[SplitRange]]:
    """(work tiles of each CTA, split range of each CTA) for requests of `lengths` keys.

    The first CTAs of all clusters come before the second ones. There are row groups if `row_group` is above 1: then the
    first clusters of all row groups come before the second ones, and those that are left over are the last.
    `pair_row_tiles` may be exact: `exact_pairs`.
    """
    int32, asked = {"dtype": torch.int32}, q_lens or [1] * len(lengths)
    starts, keys = torch.tensor([0, *accumulate(asked)], **int32), torch.tensor(lengths, **int32)
    most_works = sum(-(-queries // tokens) for queries in asked) * HEADS + 1
    split_ranges = torch.full((num_ctas, balanced.SPLIT_RANGE_FIELDS), -7, **int32)
    recorded = torch.full((num_ctas, most_works, FIELDS), -7, **int32)
    with emulator.device(arch="sm_90a", sms=num_ctas, strict=True):
        paired, exact_pairs = bool(pair_row_tiles), pair_row_tiles == "exact"
        options = (tokens, TILE, rule, cluster, paired, row_group, row_group_iters, kept_chunks, exact_pairs)
        call(BalancedSchedule, (key_of(split=True), *options), (starts, keys, split_ranges, recorded))
    found = [[WorkTile(*fields) for fields in cta] for cta in recorded.tolist()]
    found = [cta[: [work.valid for work in cta].index(0)] for cta in found]
    ctas, grouped = max(row_group, 1) * cluster, num_ctas // cluster // max(row_group, 1)
    in_groups, left_over = found[: grouped * ctas], found[grouped * ctas :]
    return [cta for rank in range(ctas) for cta in in_groups[rank::ctas]] + left_over, [
        SplitRange(*one) for one in split_ranges.tolist()
    ]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("clusters", [1, 3, 8])
@pytest.mark.parametrize("name", [*DECODES, "prompts"])
def test_balanced(name: str, clusters: int, cluster: int) -> None:
    """Every key tile once; the splits of an output tile in neighbouring CTAs, where the combine kernel reads them."""
    lengths, num_ctas = DECODES.get(name, PROMPTS_KEYS), clusters * cluster
    q_lens = [1] * len(lengths) if name in DECODES else PROMPTS
    found, split_ranges = balanced_schedule(lengths, num_ctas, q_lens, cluster)
    assert_balanced(found, split_ranges, lengths, q_lens)
    if clusters > 1 and name in ("long", "one", "prompts"):
        assert any(split_range.num_splits for split_range in split_ranges)


@pytest.mark.parametrize(
    ("tiles", "short_splits", "least"), [(17, True, 1), (18, True, 2), (50, True, 3), (98, True, 4), (24, False, 4)]
)
def test_short_splits(tiles: int, short_splits: bool, least: int) -> None:
    """A split has sqrt(tiles / 8) key tiles at least, rounded, where its rows' partial results are more than a tile."""
    lengths, rows = [tiles * TILE], 32
    found, split_ranges = balanced_schedule(
        lengths, HEADS * tiles, tokens=rows, rule=SplitRule(min_tiles=4, short_splits=short_splits)
    )
    assert split_ranges[0].num_splits == -(-tiles // least)
    assert_balanced(found, split_ranges, lengths, [1], rows)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("clusters", [1, 3, 8, 40])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("name", PAIRED)
@pytest.mark.parametrize("pairs", [True, "exact"])
def test_paired_row_tiles(pairs: bool | Literal["exact"], name: str, tokens: int, clusters: int, cluster: int) -> None:
    """The same where prompts may be paired; tokens of a row tile divide a key tile's keys, or do not."""
    q_lens, lengths = PAIRED[name]
    found, split_ranges = balanced_schedule(lengths, clusters * cluster, q_lens, cluster, tokens, pair_row_tiles=pairs)
    assert_balanced(found, split_ranges, lengths, q_lens, tokens, pair_row_tiles=True)


@pytest.mark.parametrize("pairs", [True, False, "exact"])
def test_random_prompts_beside_decodes(pairs: bool | Literal["exact"]) -> None:
    """Every key tile of every row tile once, in tiles of as many tokens as a group of heads leaves."""
    draw = random.Random(7)
    for _ in range(12):
        tokens, num_ctas = draw.choice((4, 5, 8, 18)), draw.choice((2, 7, 16))
        q_lens = [draw.choice((1, 1, draw.randint(0, 3), draw.randint(4, 120))) for _ in range(draw.randint(1, 40))]
        lengths = [queries + draw.choice((0, draw.randint(0, 30), draw.randint(0, 1500))) for queries in q_lens]
        found, split_ranges = balanced_schedule(lengths, num_ctas, q_lens, tokens=tokens, pair_row_tiles=pairs)
        assert_balanced(found, split_ranges, lengths, q_lens, tokens, pair_row_tiles=bool(pairs))


# Queries and keys of requests with one row tile or several, and the row groups that they have.
GROUPED = {
    "equal": ([5] * 4, [700] * 4),
    "one": ([6], [33 * TILE]),
    "ragged": ([5, 1, 2, 7, 0, 3], [90, 1, 40 * TILE, 20 * TILE + 3, 0, 700]),
    "two-chunks": ([3] * 40, [17 * (i % 9) + 3 for i in range(40)]),
    "mistaken": ([5, 1, 2, 7, 0, 3], [90, 1, 12 * TILE, 6 * TILE + 3, 0, 200]),
}


@pytest.mark.parametrize(
    ("name", "row_group", "clusters", "cluster"),
    [
        ("equal", 3, 7, 1),
        ("one", 3, 7, 2),
        ("mistaken", 4, 12, 1),
        ("ragged", 4, 12, 1),
        ("ragged", 2, 7, 2),
        ("two-chunks", 4, 7, 1),
        ("equal", 3, 2, 1),
    ],
)
def test_row_groups(name: str, row_group: int, clusters: int, cluster: int) -> None:
    """Every key tile once, also where a row group has more clusters than row tiles are left, or clusters are left."""
    assert_row_groups(name, row_group, clusters, cluster)


def assert_row_groups(name: str, row_group: int, clusters: int, cluster: int = 1) -> None:
    """Every key tile once, in row groups of so many clusters, whatever they cost."""
    q_lens, lengths = GROUPED[name]
    found, split_ranges = balanced_schedule(
        lengths, clusters * cluster, q_lens, cluster, row_group=row_group, row_group_iters=10**6
    )
    if clusters < row_group:
        found, _ = balanced_schedule(lengths, clusters * cluster, q_lens, cluster)
    assert_balanced(found, split_ranges, lengths, q_lens)


def test_row_groups_are_side_by_side() -> None:
    """The row tiles of a request have the same key tiles in neighbouring CTAs, at the same place in their order."""
    q_lens, lengths, row_group = [2 * TOKENS_PER_TILE] * 5, [31 * TILE] * 5, 4
    found, _ = balanced_schedule(lengths, 12, q_lens, row_group=row_group)
    for group in range(3):
        ranges = [[(work.n_block_min, work.n_block_max) for work in found[rank * 3 + group]] for rank in range(4)]
        assert ranges[0]
        assert ranges == ranges[:1] * row_group


@pytest.mark.parametrize(("row_group_iters", "grouped"), [(100, False), (199, False), (200, True)])
def test_row_groups_may_cost_too_much(row_group_iters: int, grouped: bool) -> None:
    """Requests of one row tile for one head block leave half of each row group of four idle."""
    lengths = [64 * TILE] * 4
    found, _ = balanced_schedule(lengths, 8, row_group=4, row_group_iters=row_group_iters)
    assert sum(not works for works in found) == (4 if grouped else 0)


ROW_GROUP_MISTAKES = (
    Mistake(
        "all clusters have the same row tile", balanced, "partition.row_group + share.group_rank", "partition.row_group"
    ),
    Mistake("partial results in another order", balanced, "* num_groups + group_idx", "+ group_idx * self.cluster"),
    Mistake(
        "row tiles that no request has", balanced, "if tile_idx < tiles.num_tiles else tiles.seqlen_q", "if True else 0"
    ),
    Mistake(
        "shares of clusters, not of row groups",
        balanced,
        "                num_ctas = quotient(num_ctas, row_group)\n",
        "",
    ),
    Mistake(
        "row groups rounded down",
        balanced,
        "quotient(num_tiles + row_group - 1, row_group)",
        "quotient(num_tiles, row_group)",
    ),
)


def use_spoilt(mistake: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel of these tests use a scheduler with a mistake."""
    scheduler = spoilt(mistake, folder).BalancedSplitKVTileScheduler
    monkeypatch.setattr(schedule_kernels, "BalancedSplitKVTileScheduler", scheduler)


@pytest.mark.parametrize("mistake", ROW_GROUP_MISTAKES, ids=lambda mistake: mistake.id)
def test_mistakes_in_row_groups(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_spoilt(mistake, tmp_path, monkeypatch)
    with pytest.raises((EmulatorError, AssertionError)):
        assert_row_groups("mistaken", 4, 12)


def assert_kept(name: str, kept_chunks: int, clusters: int) -> None:
    """A scheduler that keeps lengths of requests finds the work tiles of one that does not."""
    q_lens, lengths = {"decodes": ([1] * 163, [1 + 37 * i % 211 for i in range(163)]), **PAIRED}[name]
    pairs = name != "decodes"
    options = {"tokens": 4, "pair_row_tiles": True} if pairs else {}
    found, split_ranges = balanced_schedule(lengths, 2 * clusters, q_lens, 2, kept_chunks=kept_chunks, **options)
    assert_balanced(found, split_ranges, lengths, q_lens, options.get("tokens", TOKENS_PER_TILE), pairs)
    assert (found, split_ranges) == balanced_schedule(lengths, 2 * clusters, q_lens, 2, **options)


# More requests than are kept, as many chunks, and fewer.
@pytest.mark.parametrize("kept_chunks", [2, 4, 8])
@pytest.mark.parametrize("name", ["decodes", "across-chunks"])
def test_kept_lengths(name: str, kept_chunks: int) -> None:
    assert_kept(name, kept_chunks, 5)


KEPT_MISTAKES = (
    Mistake("lengths of another chunk", balanced, "self.kept[other - 1]", "self.kept[other - 2]"),
    Mistake("no loads behind the kept ones", balanced, "if chunk >= self.kept_chunks", "if chunk > self.kept_chunks"),
    Mistake(
        "chunks that are skipped count nothing",
        balanced,
        'chunk_end += cute.arch.warp_redux_sync(iters, "add")',
        'chunk_end = cute.arch.warp_redux_sync(iters, "add")',
    ),
)


@pytest.mark.parametrize("mistake", KEPT_MISTAKES, ids=lambda mistake: mistake.id)
def test_mistakes_in_kept_lengths(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_spoilt(mistake, tmp_path, monkeypatch)
    with pytest.raises((EmulatorError, AssertionError)):
        assert_kept("decodes", 4, 5)


@pytest.mark.parametrize("idle_eighths", [0, 1])
def test_idle_ctas(idle_eighths: int) -> None:
    """An eighth of the CTAs is idle, or none: output tiles are whole, or split."""
    lengths, num_ctas = [40 * TILE] * 8, 9
    found, split_ranges = balanced_schedule(lengths, num_ctas, rule=replace(RULE, idle_eighths=idle_eighths))
    assert_balanced(found, split_ranges, lengths, [1] * len(lengths))
    assert sum(not works for works in found) == idle_eighths
    assert any(split_range.num_splits for split_range in split_ranges) == (idle_eighths == 0)


EVEN = {"alike": ([40] * 3, 13), "one is short": ([40] * 9 + [15], 41)}  # key tiles of each request; CTAs


@pytest.mark.parametrize("even_splits", [False, True])
@pytest.mark.parametrize("name", EVEN)
def test_even_splits(name: str, even_splits: bool) -> None:
    """Each CTA has a part of one output tile: half of the longest one's key tiles at most."""
    tiles, num_ctas = EVEN[name]
    lengths = [TILE * count for count in tiles]
    found, split_ranges = balanced_schedule(lengths, num_ctas, rule=replace(RULE, even_splits=even_splits))
    assert_balanced(found, split_ranges, lengths, [1] * len(lengths))
    assert (max(len(works) for works in found) == 1) == even_splits
    if even_splits:
        assert [len(works) for works in found].count(1) == HEADS * sum(-(-count // 20) for count in tiles)


def test_even_splits_are_not_made_where_they_cost_more() -> None:
    """Ten output tiles on 19 CTAs would have one CTA each, with nearly twice an even share."""
    lengths = [40 * TILE] * 5
    found, split_ranges = balanced_schedule(lengths, 19, rule=replace(RULE, even_splits=True))
    assert_balanced(found, split_ranges, lengths, [1] * len(lengths))
    assert all(found)


def assert_balanced(
    found: list[list[WorkTile]],
    split_ranges: list[SplitRange],
    lengths: Sequence[int],
    q_lens: Sequence[int],
    tokens: int = TOKENS_PER_TILE,
    pair_row_tiles: bool = False,
) -> None:
    ranges: dict[tuple[int, int], list[tuple[int, WorkTile]]] = {}
    for cta, works in enumerate(found):
        for work in works:
            ranges.setdefault((work.q_offset, work.head_block), []).append((cta, work))
    tiles_of = {}  # of each row tile: its request's key tiles, those that it sees, its rows
    for keys, queries, first in zip(lengths, q_lens, accumulate([0, *q_lens]), strict=False):
        for row in range(0, queries, tokens):
            rows = min(queries - row, tokens)
            tiles, seen = (
                max(-(-count // TILE), 1) for count in (keys, min(keys, max(keys - queries + row + rows, 0)))
            )
            tiles_of[first + row] = tiles, seen, rows
    assert set(ranges) == {(query, head_block) for query in tiles_of for head_block in range(HEADS)}
    expected = {}
    for (query, head_block), parts in ranges.items():
        tiles, seen, rows = tiles_of[query]
        ends = [work.n_block_max for _, work in parts]
        first = parts[0][0]
        assert [cta for cta, _ in parts] == list(range(first, first + len(parts)))
        assert {work.num_rows for _, work in parts} == {rows}
        assert [work.n_block_min for _, work in parts] == [0, *ends[:-1]]
        if len(parts) > 1:
            assert ends[-1] == (seen if pair_row_tiles else tiles)
            assert [work.partial_idx for _, work in parts] == [2 * first + 1, *(2 * cta for cta, _ in parts[1:])]
            expected[first] = SplitRange(len(parts), query, head_block, rows)
        else:
            assert ends == [seen]
            assert parts[0][1].partial_idx == NOT_SPLIT
    assert {cta: split_range for cta, split_range in enumerate(split_ranges) if split_range.num_splits} == expected


def test_pairs_are_not_split() -> None:
    """Beside requests of one query, a prompt with more row tiles than CTAs are left: nothing is split."""
    q_lens, lengths, tiles = [1] * 18 + [24], [14 * TILE] * 18 + [24], 14
    num_ctas = 18 * HEADS + 3 * HEADS
    found, split_ranges = balanced_schedule(lengths, num_ctas, q_lens, tokens=4, pair_row_tiles=True)
    assert_balanced(found, split_ranges, lengths, q_lens, tokens=4, pair_row_tiles=True)
    assert not any(split_range.num_splits for split_range in split_ranges)
    assert max(sum(work.n_block_max - work.n_block_min for work in works) for works in found) == tiles


@pytest.mark.parametrize("row_tiles", [2, 3, 5])
def test_exact_pairs_have_even_shares(row_tiles: int) -> None:
    """Of a few row tiles behind many keys: the one without a partner does not count as two."""
    tokens, num_ctas, behind = 4, 8, 60 * TILE
    queries = row_tiles * tokens
    # More than one prompt, so that a CTA has parts of several output tiles; tokens are a quarter of a key tile.
    q_lens, lengths = [queries] * 3, [behind + queries] * 3
    tiles = sum(-(-(behind + end) // TILE) for end in range(tokens, queries + 1, tokens)) * len(q_lens) * HEADS
    shares = {}
    ways: tuple[bool | Literal["exact"], ...] = (True, "exact")
    for pairs in ways:
        found, split_ranges = balanced_schedule(lengths, num_ctas, q_lens, tokens=tokens, pair_row_tiles=pairs)
        assert_balanced(found, split_ranges, lengths, q_lens, tokens, pair_row_tiles=True)
        held = [sum(work.n_block_max - work.n_block_min for work in works) for works in found]
        shares[pairs == "exact"] = max(held) / (tiles / num_ctas)
    assert shares[True] < 1.03
    assert shares[False] < 1.03 if row_tiles == 2 else shares[False] > 1.15, shares


def test_pairs_are_even() -> None:
    """A prompt's first row tiles count the keys that they see: no CTA has much more than an even share of these."""
    queries, num_ctas = 20 * TILE, 8
    found, _ = balanced_schedule([queries], num_ctas, [queries], tokens=4, pair_row_tiles=True)
    seen = sum(work.n_block_max - work.n_block_min for works in found for work in works)
    held = [sum(work.n_block_max - work.n_block_min for work in works) for works in found]
    assert max(held) <= 1.1 * seen / num_ctas


@pytest.mark.parametrize("name", DECODES)
def test_shares_of_ctas_are_even(name: str) -> None:
    """No CTA has more than its share, with OVERHEAD_ITERS for each output tile where lengths differ.

    An output tile's overhead iterations may be in the share of the CTA before.
    """
    num_ctas = 8
    lengths = DECODES[name]
    tiles = [max(-(-length // TILE), 1) for length in lengths]
    found, _ = balanced_schedule(lengths, num_ctas)
    if len(set(tiles)) == 1:
        assert max(sum(work.n_block_max - work.n_block_min for work in works) for works in found) <= tiles[0] * HEADS
        return
    share = max(-(-HEADS * sum(tile + balanced.OVERHEAD_ITERS for tile in tiles) // num_ctas), MIN_SPLIT_TILES)
    begun = [
        sum(work.n_block_max - work.n_block_min + balanced.OVERHEAD_ITERS * (work.n_block_min == 0) for work in works)
        for works in found
    ]
    assert max(begun) <= share + balanced.OVERHEAD_ITERS
