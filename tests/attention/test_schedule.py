# SPDX-License-Identifier: Apache-2.0
"""Work as blocks find it: query tiles that they claim, each once, the longest first; shares of all key tiles."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

import emulator

pytest.importorskip("cutlass")

from cutlass.cute.runtime import from_dlpack

from dsl_backend.attention.cute.scheduler import balanced, clc, persistent
from dsl_backend.attention.cute.scheduler.balanced import SplitRange
from dsl_backend.attention.cute.scheduler.work_tile import FIELDS, NOT_SPLIT, WorkTile
from dsl_backend.attention.cute.score_mod import ScoreModKey
from dsl_backend.attention.cute.tiles import LayerKey
from dsl_backend.attention.protocol import COUNTERS
from dsl_backend.quant.format import KVFormat
from emulator.errors import EmulatorError
from emulator.machine.launch import Run
from tests.attention import schedule_kernels
from tests.attention.mistakes import Mistake, spoilt
from tests.attention.schedule_kernels import Claiming, Launching, Sharing

TOKENS, TILE, HEADS = 32, 16, 2
FAR = 1 << 30


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
        "max_splits": 0,
        "scores": ScoreModKey(softcap=False, alibi=False, sinks=None, signed=False),
    }
    return LayerKey(**(usual | facts))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Item:
    """A head's row tile, and its key tiles."""

    request: int
    row: int
    head_block: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of a batch, (queries, keys) each, and what is asked for."""

    pairs: Sequence[tuple[int, int]]
    causality: str = "causal"
    left: int | None = None
    min_seqlen_q: int = 1
    max_seqlen_q: int = FAR

    @property
    def starts(self) -> list[int]:
        return [sum(queries for queries, _ in self.pairs[:i]) for i in range(len(self.pairs) + 1)]

    def items(self) -> list[Item]:
        """All there are, in no order."""
        found = []
        for request, (queries, keys) in enumerate(self.pairs):
            if not self.min_seqlen_q <= queries <= self.max_seqlen_q:
                continue
            for row in range(0, queries, TOKENS):
                position = keys - queries + row
                seen = min(keys, position + min(TOKENS, queries - row)) if self.causality == "causal" else keys
                begin = 0 if self.left is None else max(position - self.left, 0) // TILE
                end = max(-(-seen // TILE), begin + 1)
                found += [Item(request, row, head_block, begin, end) for head_block in range(HEADS)]
        return found

    def given(self) -> tuple[LayerKey, torch.Tensor, torch.Tensor]:
        """The layer, where requests start, and their keys."""
        key = key_of(causality=self.causality, has_window_left=self.left is not None)
        starts, lengths = (torch.tensor(one, dtype=torch.int32) for one in (self.starts, [k for _, k in self.pairs]))
        return key, starts, lengths

    def claimed(self, blocks: int, order: str) -> list[list[Item]]:
        """By each block, in its order; the emulator's schedule is `order`."""
        key, starts, lengths = self.given()
        claims = torch.zeros(COUNTERS, dtype=torch.int32)
        found: list[list[Item]] = []
        # Twice: the second launch begins with what the first one left.
        for _ in range(2):
            posts = torch.full((blocks, len(self.items()) + 1, FIELDS), -7, dtype=torch.int32)
            with emulator.device(arch="sm_90a", sms=blocks, schedule=order, strict=True):
                Claiming(key, TOKENS, TILE)(
                    *(from_dlpack(one) for one in (starts, lengths, claims, posts)),
                    self.left or 0,
                    self.min_seqlen_q,
                    self.max_seqlen_q,
                )
            assert claims.tolist() == [0, 0]
            found = [self.of(block) for block in posts.tolist()]
        return found

    def launched(self, order: str, beyond: int = 0) -> list[list[Item]]:
        """By each block of a grid that has so many more than there are items; three run at a time."""
        key, starts, lengths = self.given()
        count = len(self.items())
        posts = torch.zeros(count + beyond, count + 1, FIELDS, dtype=torch.int32)
        with emulator.device(arch="sm_100a", sms=3, schedule=order, strict=True):
            Launching(key, TOKENS, TILE)(
                *(from_dlpack(one) for one in (starts, lengths, posts)),
                self.left or 0,
                self.min_seqlen_q,
                self.max_seqlen_q,
            )
        return [self.of(block) for block in posts.tolist()]

    def of(self, posts: list[list[int]]) -> list[Item]:
        works = [WorkTile(*fields) for fields in posts]
        stop = next(place for place, work in enumerate(works) if not work.valid)
        requests = [
            max(i for i, start in enumerate(self.starts[:-1]) if start <= work.q_offset) for work in works[:stop]
        ]
        return [
            Item(request, work.q_offset - self.starts[request], work.head_block, work.n_block_min, work.n_block_max)
            for request, work in zip(requests, works, strict=False)
        ]


RAGGED = Lengths(pairs=[(70, 70), (1, 300), (200, 200), (33, 500), (0, 0), (64, 64)])
MANY = Lengths(pairs=[(random.Random(i).randrange(1, 90), 90) for i in range(45)])
BATCHES = {
    "ragged": RAGGED,
    "full": Lengths(pairs=RAGGED.pairs, causality="full"),
    "window": Lengths(pairs=RAGGED.pairs, left=40),
    "long-ones": Lengths(pairs=RAGGED.pairs, min_seqlen_q=34, max_seqlen_q=100),
    "many": MANY,
    "one": Lengths(pairs=[(1, 1)]),
    "none": Lengths(pairs=[(1, 1)], min_seqlen_q=2),
}


def assert_each_once(batch: Lengths, found: Sequence[Sequence[Item]]) -> None:
    assert sorted(map(repr, (item for block in found for item in block))) == sorted(map(repr, batch.items()))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_each_once(name: str, blocks: int) -> None:
    """By several blocks, and by so many that some find nothing."""
    batch = BATCHES[name]
    for order in ("eager", "lazy", "random"):
        claimed = batch.claimed(blocks, order)
        assert_each_once(batch, claimed)


@pytest.mark.parametrize("name", ["ragged", "full"])
def test_longest_first(name: str) -> None:
    """Heads of a tile side by side. With a window a request's last row tile may be shorter than the one before it."""
    (claimed,) = BATCHES[name].claimed(1, "eager")
    tiles = [item.end - item.begin for item in claimed]
    assert tiles == sorted(tiles, reverse=True)
    assert [item.head_block for item in claimed] == list(range(HEADS)) * (len(claimed) // HEADS)


@pytest.mark.parametrize("beyond", [1, 20])
@pytest.mark.parametrize("name", BATCHES)
def test_each_once_by_launch_control(name: str, beyond: int) -> None:
    """As few blocks run as there is room for, also where others have no item."""
    batch = BATCHES[name]
    for order in ("eager", "lazy", "random"):
        launched = batch.launched(order, beyond)
        assert_each_once(batch, launched)
        assert sum(bool(block) for block in launched) <= 3


@pytest.mark.parametrize("name", ["ragged", "many"])
def test_launch_control_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item once, whichever block leaves the grid next: the last one, or any."""
    batch, indices = BATCHES[name], Run._cluster_indices
    for seed in range(4):
        any_order = random.Random(seed)

        def mixed(run: Run, any_order: random.Random = any_order, last_first: bool = seed == 0) -> Iterator[Any]:
            found = list(indices(run))[::-1]
            return iter(found if last_first else any_order.sample(found, len(found)))

        monkeypatch.setattr(Run, "_cluster_indices", mixed)
        launched = batch.launched("random", 5)
        assert_each_once(batch, launched)


MISTAKES = (
    Mistake(
        "read before it is there",
        clc,
        "        cute.arch.mbarrier_wait(full, phase_of(count - 1, 1))\n",
        "",
    ),
    Mistake("the phase of another response", clc, "phase_of(count - 1, 1)", "phase_of(count, 1)"),
    Mistake("other bytes expected", clc, "(full, CLC_RESPONSE_BYTES)", "(full, CLC_RESPONSE_BYTES // 2)"),
    Mistake("a place of its own count", clc, "return tile_idx if", "return cutlass.Int32(count) if"),
    Mistake(
        "asks when there is none left",
        clc,
        "        self.work_pipeline.produce(",
        "        self.next_tile_idx(num_produced + num_skipped + 1, None)\n        self.work_pipeline.produce(",
    ),
    Mistake("uncounted behind the last item", clc, "num_skipped += 1", "num_skipped += 0"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_mistakes_in_launch_control(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_kernels, "ClcTileScheduler", spoilt(mistake, tmp_path).ClcTileScheduler)

    def run() -> None:
        for order in ("eager", "lazy", "random"):
            assert_each_once(RAGGED, RAGGED.launched(order, 20))

    with pytest.raises((EmulatorError, AssertionError)):
        run()


def test_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit into a cache together is taken one after another."""
    monkeypatch.setattr(persistent, "L2_SECTION_BYTES", 400 * 2 * 2 * 64)
    (claimed,) = RAGGED.claimed(1, "eager")
    # Keys before a request: 0, 70, 370, 570, 1070.
    sections = [(0, 1, 2), (3,), (5,)]
    assert [item.request for item in claimed if item.head_block == 0 and item.request in sections[0]][:1] == [1]
    places = [next(i for i, section in enumerate(sections) if item.request in section) for item in claimed]
    assert places == sorted(places)


LEAST = 2
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
SHARED_TOKENS = 2
PROMPTS, PROMPTS_KEYS = [5, 1, 2, 9, 1], [90, 1, 40 * TILE, 20 * TILE + 3, 700]
# Of which some are longer than a key tile, and are folded: at their beginning, behind context, with fewer keys than
# queries, with none.
FOLDED = {
    "alone": ([75], [75]),
    "beside-decodes": ([1, 1, 60, 1, 33, 2], [300, 17, 60, 9 * TILE, 200, 33]),
    "behind-context": ([TILE + 1, 31], [5 * TILE + 3, 700]),
    "fewer-keys": ([40, 20, 1], [3, 0, 90]),
    "across-chunks": ([1] * 33 + [50], [40] * 33 + [50]),
}


def shared(
    lengths: Sequence[int],
    blocks: int,
    q_lens: Sequence[int] | None = None,
    cluster: int = 1,
    tokens: int = SHARED_TOKENS,
    folds: bool = False,
) -> tuple[list[list[WorkTile]], list[SplitRange]]:
    """Items of each block and what it leaves to be merged, for requests over so many keys.

    Of clusters all first blocks come before all second ones.
    """
    int32, asked = {"dtype": torch.int32}, q_lens or [1] * len(lengths)
    starts, keys = torch.tensor([0, *accumulate(asked)], **int32), torch.tensor(lengths, **int32)
    items = sum(-(-queries // tokens) for queries in asked) * HEADS + 1
    split_ranges = torch.full((blocks, balanced.SPLIT_RANGE_FIELDS), -7, **int32)
    posts = torch.full((blocks, items, FIELDS), -7, **int32)
    with emulator.device(arch="sm_90a", sms=blocks, strict=True):
        sharing = Sharing(key_of(split=True), tokens, TILE, LEAST, cluster, folds=folds)
        sharing(*(from_dlpack(one) for one in (starts, keys, split_ranges, posts)))
    found = [[WorkTile(*fields) for fields in block] for block in posts.tolist()]
    found = [block[: [work.valid for work in block].index(0)] for block in found]
    return [block for rank in range(cluster) for block in found[rank::cluster]], [
        SplitRange(*one) for one in split_ranges.tolist()
    ]


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("clusters", [1, 3, 8])
@pytest.mark.parametrize("name", [*DECODES, "prompts"])
def test_shares(name: str, clusters: int, cluster: int) -> None:
    """Every key tile once; the parts of a range in neighbouring blocks, in the slots where its first one looks."""
    lengths, blocks = DECODES.get(name, PROMPTS_KEYS), clusters * cluster
    q_lens = [1] * len(lengths) if name in DECODES else PROMPTS
    found, split_ranges = shared(lengths, blocks, q_lens, cluster)
    assert_shared(found, split_ranges, lengths, q_lens)
    if clusters > 1 and name in ("long", "one", "prompts"):
        assert any(cut.num_splits for cut in split_ranges)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("clusters", [1, 3, 8, 40])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FOLDED)
def test_folded_shares(name: str, tokens: int, clusters: int, cluster: int) -> None:
    """As well where prompts may be folded; tokens of a row tile divide a key tile's keys, or do not."""
    q_lens, lengths = FOLDED[name]
    found, split_ranges = shared(lengths, clusters * cluster, q_lens, cluster, tokens, folds=True)
    assert_shared(found, split_ranges, lengths, q_lens, tokens, folds=True)


def assert_shared(
    found: list[list[WorkTile]],
    split_ranges: list[SplitRange],
    lengths: Sequence[int],
    q_lens: Sequence[int],
    tokens: int = SHARED_TOKENS,
    folds: bool = False,
) -> None:
    ranges: dict[tuple[int, int], list[tuple[int, WorkTile]]] = {}
    for block, items in enumerate(found):
        for work in items:
            ranges.setdefault((work.q_offset, work.head_block), []).append((block, work))
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
        assert [block for block, _ in parts] == list(range(first, first + len(parts)))
        assert {work.num_rows for _, work in parts} == {rows}
        assert [work.n_block_min for _, work in parts] == [0, *ends[:-1]]
        if len(parts) > 1:
            assert ends[-1] == (seen if folds else tiles)
            assert [work.partial_idx for _, work in parts] == [2 * first + 1, *(2 * block for block, _ in parts[1:])]
            expected[first] = SplitRange(len(parts), query, head_block, rows)
        else:
            assert ends == [seen]
            assert parts[0][1].partial_idx == NOT_SPLIT
    assert {block: cut for block, cut in enumerate(split_ranges) if cut.num_splits} == expected


def test_folds_stay_whole() -> None:
    """Beside requests of one query, a prompt with more row tiles than blocks are left: nothing is merged."""
    q_lens, lengths, tiles = [1] * 18 + [24], [14 * TILE] * 18 + [24], 14
    blocks = 18 * HEADS + 3 * HEADS
    found, split_ranges = shared(lengths, blocks, q_lens, tokens=4, folds=True)
    assert_shared(found, split_ranges, lengths, q_lens, tokens=4, folds=True)
    assert not any(cut.num_splits for cut in split_ranges)
    assert max(sum(work.n_block_max - work.n_block_min for work in items) for items in found) == tiles


def test_folds_are_even() -> None:
    """A prompt's first row tiles count what they see: a block has no more than its share of that, and of holes."""
    queries, blocks = 20 * TILE, 8
    found, _ = shared([queries], blocks, [queries], tokens=4, folds=True)
    seen = sum(work.n_block_max - work.n_block_min for items in found for work in items)
    held = [sum(work.n_block_max - work.n_block_min for work in items) for items in found]
    assert max(held) <= 1.1 * seen / blocks


@pytest.mark.parametrize("name", DECODES)
def test_shares_are_even(name: str) -> None:
    """A block has no more to do than its share, with each range's beginning for a tile where lengths differ.

    One range may begin in the block before with no more than what it has for its beginning.
    """
    blocks = 8
    lengths = DECODES[name]
    tiles = [max(-(-length // TILE), 1) for length in lengths]
    found, _ = shared(lengths, blocks)
    if len(set(tiles)) == 1:
        assert max(sum(work.n_block_max - work.n_block_min for work in items) for items in found) <= tiles[0] * HEADS
        return
    share = max(-(-HEADS * sum(tile + balanced.OVERHEAD_ITERS for tile in tiles) // blocks), LEAST)
    begun = [
        sum(work.n_block_max - work.n_block_min + balanced.OVERHEAD_ITERS * (work.n_block_min == 0) for work in items)
        for items in found
    ]
    assert max(begun) <= share + balanced.OVERHEAD_ITERS
