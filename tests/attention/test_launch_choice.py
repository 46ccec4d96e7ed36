# SPDX-License-Identifier: Apache-2.0
"""Launches that are chosen by each request's lengths: what is chosen, and results where a guess is wrong."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dsl_backend.attention.cute import launch_choice
from dsl_backend.attention.cute.extend import Tiling
from dsl_backend.attention.cute.launch_choice import Estimate, fastest, key_tiles
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.attention.spec import AttentionSpec, Batch, HostLengths
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.chip import Chip
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.testing.cases import FULL, Case
from tests.attention.emulated import emulate, scratch

pytestmark = pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
K = 1024
H100 = replace(
    from_arch("sm_90a"), chip=Chip(sm_count=132, memory_gb_s=3352, clock_mhz=1980, l2_bytes=50 << 20), gpu="H100"
)
H200 = replace(H100, chip=Chip(sm_count=132, memory_gb_s=4800, clock_mhz=1980, l2_bytes=50 << 20), gpu="H200")


def spec_of(heads: tuple[int, int], dim: int, **facts: Any) -> AttentionSpec:
    found: AttentionSpec = Case(heads=heads, dim=dim, **facts).spec
    return found


def lengths_of(q_lens: Sequence[int], kv_lens: Sequence[int]) -> HostLengths:
    return HostLengths(np.array(q_lens, dtype=np.int32), np.array(kv_lens, dtype=np.int32))


def launches(
    spec: AttentionSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    target: Target = H100,
    known: bool = True,
) -> list[Any]:
    """The parts of a plan."""
    requests = len(q_lens)
    batch = Batch(
        query_start_loc=torch.zeros(requests + 1, dtype=torch.int32),
        seq_lens=torch.zeros(requests, dtype=torch.int32),
        num_tokens=sum(q_lens),
        max_query_len=max(q_lens),
        max_seq_len=max(kv_lens),
        block_table=torch.zeros(requests, 1, dtype=torch.int32),
        host_lengths=lengths_of(q_lens, kv_lens) if known else None,
    )
    return list(Planner(spec, target, scratch(), "cute").plan(batch).parts)


def parts(spec: AttentionSpec, *given: Any, **facts: Any) -> list[tuple[bool, int]]:
    """(whether keys are split, fewest queries) of each launch of a plan."""
    return [(one.kernel.split, one.min_seqlen_q) for one in launches(spec, *given, **facts)]


# Batches with more query tiles than CTAs, of which one is much longer than the others.
FEW_HEADS = spec_of((3, 1), 64)
AROUND_ONE_LONG = [2600, 1800, 900, 82], [13000, 3000, 1300, 415]
MIXED = [1] * 68 + [1911, 3962], [4 * K] * 68 + [16 * K, 6 * K]


@pytest.mark.parametrize(("target", "heads"), [(H100, 3), (from_arch("sm_100a"), 7)], ids=("sm_90a", "sm_100a"))
def test_a_long_query_tile_is_split_though_tiles_fill_the_sms(target: Target, heads: int) -> None:
    spec = spec_of((heads, 1), 64)
    kernel: Any = Planner(spec, target, scratch(), "cute").long[2]
    assert len(key_tiles(spec, lengths_of(*AROUND_ONE_LONG), kernel.tiling)) * heads > target.sm_count
    assert parts(spec, *AROUND_ONE_LONG, target) == [(True, 0)]


def test_one_launch_where_no_query_is_short() -> None:
    """Or where the short ones have few keys: whole query tiles serve them."""
    assert parts(spec_of((32, 8), 128), [K] * 8, [K] * 8) == [(False, 0)]
    assert parts(spec_of((32, 8), 128), [K] * 8 + [0], [K] * 8 + [0]) == [(False, 0)], "an empty request"
    assert parts(spec_of((32, 8), 128), [K] * 32 + [1], [K] * 32 + [9]) == [(False, 17), (True, 0)]


def test_decodes_beside_prompts() -> None:
    """Of few heads they are in the launch that splits keys; of many, memory takes as long for them alone."""
    assert parts(spec_of((4, 2), 128), *MIXED) == [(True, 0)]
    assert parts(spec_of((4, 2), 128), *MIXED, H200) == [(True, 0)]
    assert parts(spec_of((32, 8), 128), [1] * 200 + [2 * K], [8 * K] * 200 + [2 * K]) == [(False, 17), (True, 0)]


@pytest.mark.parametrize("known", [True, False], ids=("lengths", "bounds"))
@pytest.mark.parametrize("fp8", [False, True], ids=("16-bit", "fp8"))
def test_a_few_tokens_behind_many_keys_are_packed(known: bool, fp8: bool) -> None:
    """A query tile of one head has 16 rows of 128, however many tiles there are; with 8 heads packed it is full."""
    spec = spec_of((64, 8), 128, fp8=fp8)
    for queries in (9, 16, 64):
        assert parts(spec, [queries] * 32, [8 * K] * 32, H200, known=known)[0] == (True, 0 if known else 9)
    assert parts(spec, [120] * 32, [8 * K] * 32, H200, known=known)[0][0] is False, "they fill tiles of one head"
    alone = spec_of((8, 8), 128, fp8=fp8)
    assert parts(alone, [40] * 200, [8 * K] * 200, known=known)[0][0] is False, "nothing to pack"


def test_a_batch_without_lengths_is_chosen_by_its_bounds() -> None:
    assert parts(FEW_HEADS, *AROUND_ONE_LONG) == [(True, 0)]
    assert parts(FEW_HEADS, *AROUND_ONE_LONG, known=False) == [(False, 17), (True, 0)]


def test_keys_that_l2_lacks_are_read_again() -> None:
    """Where keys are split, all requests are in process at a time: memory then takes longer than the products."""
    spec = spec_of((8, 8), 256)
    given = [1] * 62 + [2351, 1300, 277], [3 * K] * 62 + [14 * K, 12 * K, 9 * K]
    assert parts(spec, *given, H200) == [(False, 17), (True, 0)]
    large = replace(H200, chip=replace(H200.chip, l2_bytes=1 << 40))
    assert parts(spec, *given, large) == [(True, 0)]


def test_query_tiles_of_192_rows_where_they_are_enough() -> None:
    def rows(heads: tuple[int, int], lens: list[int]) -> list[int]:
        return [one.kernel.tiling.rows for one in launches(spec_of(heads, 64), lens, lens)]

    assert rows((16, 2), [4209] * 2) == [192]
    assert rows((16, 16), [3193, 40, 700] * 4) == [192]
    assert rows((16, 16), [1084] * 8) == [192], "no longer than LONG_QUERY, but tiles are full"
    assert rows((64, 8), [1024] * 16) == [128], "a larger part of the last tile lies beyond the prompt"
    assert rows((16, 2), [2100]) == [128], "176 tiles on 132 SMs"
    kernel: Any = Planner(spec_of((16, 2), 64), H100, scratch(), "cute").long[2]
    assert kernel.alone.other is None
    assert kernel.alone.keys(False, None) == [kernel.key(False, None)], "compiled ahead as one of the layer's kernels"


def test_batch_invariant_layers_keep_their_kernels() -> None:
    spec = replace(FEW_HEADS, batch_invariant=True)
    assert parts(spec, *AROUND_ONE_LONG) == [(False, 0)], "without the launch for short queries, which is empty"
    assert parts(spec, *AROUND_ONE_LONG, known=False) == [(False, 17), (True, 0)]
    queries, keys = AROUND_ONE_LONG
    assert parts(spec, [*queries, 1], [*keys, 9]) == [(False, 17), (True, 0)]
    assert parts(spec, [*queries, 16], [*keys, 16]) == [(False, 17), (True, 0)]
    assert parts(spec, [*queries, 17, 0], [*keys, 17, 0]) == [(False, 0)]


def test_key_tiles_are_those_of_the_mask() -> None:
    draw = random.Random(0)
    for _ in range(100):
        window = draw.choice((None, draw.randint(0, 300)))
        causality = draw.choice((FULL, Case().spec.causality))
        spec = replace(spec_of((4, 2), 64), causality=causality, window_left=window)
        q_lens = [draw.randint(1, 300) for _ in range(5)]
        kv_lens = [q + draw.choice((0, draw.randint(0, 500))) for q in q_lens]
        tiling = Tiling(rows=64, keys=48, pack_gqa=2, head_blocks=2, columns=64, num_ctas=132)
        expected = []
        for q, k in zip(q_lens, kv_lens, strict=True):
            for begin in range(0, q, tiling.tokens):
                rows = range(k - q + begin, k - q + min(begin + tiling.tokens, q))
                first = 0 if window is None else max(rows[0] - window, 0)
                last = k - 1 if causality is FULL else rows[-1]
                expected.append(last // 48 - first // 48 + 1)
        assert key_tiles(spec, lengths_of(q_lens, kv_lens), tiling).tolist() == expected


def test_the_estimate_of_whole_tiles() -> None:
    """The longest tile, an even share, the two tiles of one CTA, sections, and memory: whichever is most."""
    tiling = Tiling(rows=128, keys=128, pack_gqa=1, head_blocks=1, columns=128, num_ctas=4, claims_ahead=False)
    spec = spec_of((1, 1), 128)

    def tiles(q_lens: Sequence[int], kv_lens: Sequence[int], **changes: Any) -> float:
        """In key tiles."""
        estimate = Estimate(spec, lengths_of(q_lens, kv_lens), H100, 17)
        changed = replace(tiling, **changes)
        work_us = launch_choice.WORK_TILE_US
        return (estimate.whole_us(changed, 17) - work_us) / estimate.tile_us(changed)

    assert tiles([100], [100 * 128]) == pytest.approx(100)
    assert tiles([100] * 5, [100 * 128] * 5) == pytest.approx(200, rel=0.01), "two tiles of a CTA"
    assert tiles([100] * 5, [100 * 128] * 4 + [10 * 128]) == pytest.approx(110, rel=0.01)
    ahead = tiles([100] * 8, [100 * 128] * 1 + [20 * 128] * 7, claims_ahead=True)
    assert ahead == pytest.approx(120, rel=0.02), "the CTA of the longest has claimed another"
    assert tiles([100] * 8, [100 * 128] * 1 + [20 * 128] * 7) == pytest.approx(100, rel=0.02)
    # 51200 keys of 512 bytes are a section.
    short, long = 20 * 128, 40 * 128
    assert tiles([100] * 41, [short] * 40 + [long]) == pytest.approx(840 / 4 + 40 / 2, rel=0.05), (
        "a long one in the last"
    )
    assert tiles([100] * 41, [long] + [short] * 40) == pytest.approx(840 / 4 + 20 / 2, rel=0.05), "the first one is"


def test_pairs_and_memory_of_split_keys() -> None:
    spec = spec_of((8, 1), 128)
    lengths = lengths_of([2 * K], [2 * K])
    kernel: Any = Planner(spec, H100, scratch(), "cute").long[2]
    estimate = Estimate(spec, lengths, H100, 17)
    paired = kernel.extend.tiling
    assert estimate.split_us(paired, 0) < 0.7 * estimate.split_us(replace(paired, pairs=False), 0)
    slow = replace(H100, chip=Chip(sm_count=132, memory_gb_s=100, clock_mhz=1980, l2_bytes=50 << 20))
    slower = Estimate(spec, lengths_of([1] * 60, [8 * K] * 60), slow, 17)
    assert slower.split_us(paired, 0) > slower.memory_us(slower.lengths) > 2000


def test_a_gain_must_be_worth_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = Planner(FEW_HEADS, H100, scratch(), "cute").long[2]
    given = FEW_HEADS, lengths_of(*AROUND_ONE_LONG), H100, kernel.tiling, kernel.extend.tiling, 17
    assert fastest(*given).split
    monkeypatch.setattr(launch_choice, "LEAST_GAIN", 0.9)
    assert not fastest(*given).split


# ---------------------------------------------------------------------- results


class WholeForAll:
    """The kernel for long queries, chosen for queries of all lengths."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def split_of(self, batch: Batch, min_seqlen_q: int) -> tuple[Kernel, int]:
        return self.kernel, 0


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("index", range(3), ids=("eager", "lazy", "random"))
def test_whole_tiles_serve_short_queries(arch: str, index: int) -> None:
    """Though the host thought that there were none."""
    case = Case(q_lens=(1, 40, 0, 3, 17), kv_lens=(300, 90, 0, 64, 17), heads=(4, 2), dim=64, page=32)

    def make(planner: Planner, short: bool) -> Any:
        return planner.short[2] if short else WholeForAll(planner.long[2])

    emulate(case, arch, make, index)
