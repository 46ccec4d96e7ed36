# SPDX-License-Identifier: Apache-2.0
"""Split-KV for batches with few query tiles: when it is chosen, and its results on the emulator."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import emulator
from dsl_backend.attention.cute.extend import Tiling, shortest_of_split
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Kernel
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.target import Target, from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import FP16, FULL, Case
from dsl_backend.testing.inputs import SENTINEL, Layout, Surroundings
from tests.attention.emulated import FP8_CASES, SCHEDULES, SERVED, SERVED_FP8, emulate, numbered, scratch

pytestmark = pytest.mark.skipif(bool(toolkit.missing()), reason="CuTe DSL is not installed")
K = 1024
H200 = from_arch("sm_90a")
LLAMA: AttentionSpec = Case(heads=(32, 8), dim=128).spec
FEW_HEADS: AttentionSpec = Case(heads=(3, 1), dim=128).spec


# ---------------------------------------------------------------------- when


def bounds(q_lens: Sequence[int], max_seq_len: int) -> Batch:
    """A batch of which only the bounds are right."""
    requests = len(q_lens)
    return Batch(
        query_start_loc=torch.zeros(requests + 1, dtype=torch.int32),
        seq_lens=torch.zeros(requests, dtype=torch.int32),
        num_tokens=sum(q_lens),
        max_query_len=max(q_lens),
        max_seq_len=max_seq_len,
        block_table=torch.zeros(requests, 1, dtype=torch.int32),
    )


def parts(spec: AttentionSpec, q_lens: Sequence[int], max_seq_len: int, target: Target = H200) -> list[tuple[Any, ...]]:
    """(whether keys are split, fewest queries, most queries) of each launch of a plan."""
    plan = Planner(spec, target, scratch(), "cute").plan(bounds(q_lens, max_seq_len))
    launches: list[Any] = list(plan.parts)
    return [(one.kernel.split, one.min_seqlen_q, one.max_seqlen_q) for one in launches]


WHOLE = [(False, 17, 500), (True, 0, 16)]


@pytest.mark.parametrize("target", [H200, from_arch("sm_100a")], ids=lambda target: target.arch)
def test_few_tiles_behind_long_keys_are_split(target: Target) -> None:
    """By one launch for queries of all lengths, unless short ones have so many keys that it would slow them down."""
    assert parts(FEW_HEADS, [1] * 20 + [500], 12 * K, target) == [(True, 0, 500)]
    assert parts(LLAMA, [1] * 64 + [300], 16 * K, target) == [(True, 17, 300), (True, 0, 16)]
    assert parts(FEW_HEADS, [1] * 20 + [500], 500, target) == WHOLE, "few keys: combining costs more"
    assert parts(LLAMA, [500] * 8, 16 * K, target) == WHOLE, "the tiles fill the SMs"
    window = replace(FEW_HEADS, window_left=255)
    assert parts(window, [500], 32 * K, target) == WHOLE, "few keys are in a window"
    assert parts(FEW_HEADS, [1] * 20 + [16], 12 * K, target) == [(True, 0, 16)], "short queries alone"


def test_batch_invariant_layers_do_not_split_prompts() -> None:
    """Nor do kernels with a configuration that was asked for."""
    spec = replace(FEW_HEADS, batch_invariant=True)
    assert [one[:2] for one in parts(spec, [500], 64 * K)] == [(False, 17), (True, 0)]
    kernel: Any = Planner(FEW_HEADS, H200, scratch(), "cute").long[2]
    assert type(kernel)(FEW_HEADS, H200, scratch(), kernel.config).split_of(bounds([500], 64 * K), 17) is None


def test_it_is_compiled_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsl_backend.attention.cute.host import LayerKernel

    compiled: list[LayerKernel] = []
    monkeypatch.setattr(LayerKernel, "function", lambda kernel, lse, sinks: compiled.append(kernel))
    planner = Planner(LLAMA, H200, scratch(), "cute")
    planner.prepare()
    long: Any = planner.long[2]
    assert compiled == [planner.short[2], long, long.extend]


def test_the_estimate_follows_the_target() -> None:
    """More SMs are harder to fill; partial results take longer with slower memory, and key tiles with slower SMs."""
    kernel: Any = Planner(LLAMA, H200, scratch(), "cute").long[2]
    whole, split = kernel.tiling, kernel.extend.tiling

    def shortest(q_lens: Sequence[int], keys: int, sms: int = 132, **rates: int) -> int | None:
        target = replace(H200, sm_count=sms, chip=replace(H200.chips[0], **rates))
        tilings = (replace(one, num_ctas=sms) for one in (whole, split))
        return shortest_of_split(LLAMA, bounds(q_lens, keys), target, *tilings, 17)

    assert shortest([200], 2 * K) == 0
    assert shortest([200], 2 * K, sms=64) is None
    assert shortest([200], 2 * K, memory_gb_s=1000) is None
    assert shortest([200], 1152) is None
    assert shortest([200], 1152, clock_mhz=1000) == 0
    # The longer keys are, the more a split gains.
    found = [shortest([300], keys) is not None for keys in range(256, 16 * K, 256)]
    assert found == sorted(found)
    assert {True, False} == set(found)


def test_causal_prompts_in_pairs_count_the_keys_that_they_see() -> None:
    spec: AttentionSpec = Case(heads=(8, 1), dim=128).spec
    kernel: Any = Planner(spec, H200, scratch(), "cute").long[2]
    batch, split = bounds([2 * K], 2 * K), kernel.extend.tiling
    assert split.pairs
    assert shortest_of_split(spec, batch, H200, kernel.tiling, split, 17) == 0
    assert shortest_of_split(spec, batch, H200, kernel.tiling, replace(split, pairs=False), 17) is None
    filling: AttentionSpec = replace(spec, heads_q=6)
    kernel_of_six: Any = Planner(filling, H200, scratch(), "cute").long[2]
    assert kernel_of_six.split_of(bounds([3200], 3200), 17) is None, "150 tiles: the longest first are as even"
    full = replace(spec, causality=FULL)
    assert shortest_of_split(full, batch, H200, kernel.tiling, split, 17) is None


def test_row_tiles_are_an_upper_bound() -> None:
    """Of batches whose prompts fill a tile, and not far above those of one prompt beside decodes."""
    draw = random.Random(0)
    for _ in range(300):
        pack_gqa = draw.choice((1, 4, 7, 8))
        tiling = Tiling(rows=128, keys=128, pack_gqa=pack_gqa, head_blocks=4, columns=128, num_ctas=132)
        q_lens = [draw.choice((1, draw.randint(tiling.tokens, 700))) for _ in range(draw.randint(1, 30))]
        actual = sum(-(-q_len // tiling.tokens) for q_len in q_lens if q_len > 1)
        assert tiling.row_tiles(bounds(q_lens, 1)) >= actual, q_lens
        prompt = draw.randint(17, 700)
        alone = -(-prompt // tiling.tokens)
        assert tiling.row_tiles(bounds([1] * 40 + [prompt], 1)) == alone


# ---------------------------------------------------------------------- results

# Each mask, score modification, storage type and layout with keys of prompts split among CTAs.
OWN_CASES = (
    Case(
        id="prompts-mixed",
        q_lens=(1, 100, 0, 1, 33, 3, 1),
        kv_lens=(300, 700, 0, 17, 90, 64, 500),
        heads=(6, 2),
        dim=128,
        around=Surroundings(padding_tokens=9, max_seq_len=2000, layout=Layout.SEPARATE),
        why="prompts beside decodes, an empty request and rows of padding",
    ),
    Case(
        id="prompts-pairs",
        q_lens=(230, 1, 90),
        kv_lens=(230, 400, 333),
        heads=(2, 1),
        page=32,
        why="row tiles in pairs, with a tile that sees few keys and one that sees all",
    ),
    Case(
        id="prompts-lengths-0-and-1",
        q_lens=(40, 1, 0, 70, 1),
        kv_lens=(40, 1, 0, 0, 300),
        heads=(4, 1),
        why="a prompt without a cache, rows that see no key",
    ),
    Case(
        id="prompts-window",
        q_lens=(120, 1, 40),
        kv_lens=(500, 300, 420),
        heads=(4, 2),
        window=(70, None),
        sinks=True,
        around=Surroundings(layout=Layout.HEADS_FIRST),
        why="shares that begin below a row tile's window",
    ),
    Case(
        id="prompts-per-request",
        q_lens=(100, 60, 1),
        kv_lens=(300, 290, 200),
        heads=(3, 1),
        causal=(True, False, True),
        softcap=5.0,
        alibi=True,
        q_gain=4.0,
        why="row tiles of a causal request see fewer keys than those of another",
    ),
    Case(
        id="prompts-packed",
        q_lens=(50, 130, 7),
        kv_lens=(250, 300, 70),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        causality=FULL,
        dtype=FP16,
        why="packed keys, one head each",
    ),
    Case(
        id="prompts-gqa-7-nan",
        q_lens=(20, 1, 64),
        kv_lens=(300, 90, 210),
        heads=(14, 2),
        nan_request=0,
        why="18 tokens",
    ),
    Case(
        id="prompts-fp8",
        q_lens=(70, 1),
        kv_lens=(400, 300),
        heads=(4, 2),
        dim=128,
        fp8=True,
        scales_by_head=True,
        why="fp8",
    ),
    Case(id="prompts-wide", q_lens=(40, 1), kv_lens=(200, 150), heads=(2, 1), dim=512, why="splits of head_dim_v"),
    Case(
        id="prompts-odd",
        q_lens=(150, 1, 300, 20),
        kv_lens=(700, 300, 300, 100),
        heads=(4, 2),
        why="three row tiles, five, and one: those in the middle have no partner",
    ),
)
ALL = (*OWN_CASES, *SERVED, *SERVED_FP8, *FP8_CASES)
QUICK = {case.id for case in OWN_CASES}


def splitting(planner: Planner, index: int) -> Kernel:
    """Split-KV for queries of all lengths: on SM90 with two warpgroups, small tiles, and parts of one key tile."""
    spec, target = planner.spec, planner.target
    widest = max(spec.head_dim, spec.head_dim_v)
    config: Any
    if target.tcgen05:
        from dsl_backend.attention.cute.sm100 import dense_configs as sm100
        from dsl_backend.attention.cute.sm100.dense_host import SplitKV as Split100

        config = sm100.default_split_config(spec)
        config = replace(config, tile_n=min(config.tile_n, 64), min_split_tiles=1)
        return Split100(spec, target, scratch(), config)
    from dsl_backend.attention.cute.sm90.dense_configs import DenseConfig, default_split_config
    from dsl_backend.attention.cute.sm90.dense_host import SplitKV

    if widest > 256:
        return SplitKV(spec, target, scratch(), replace(default_split_config(spec), min_split_tiles=1))
    groups = 1 if spec.is_fp8_kv and spec.head_dim_v > 192 else 2
    config = DenseConfig(
        groups=groups,
        tile_n=64 if widest <= 128 else 32,
        stages=2,
        query_stages=1 if widest > 128 or spec.is_fp8_kv else 1 + index % 2,
        ping_pong=groups == 2,
        speculative_max=index // 2 % 2 == 0 and not spec.is_fp8_kv,
        dequant_stages=2 + index % 2 if spec.is_fp8_kv else 0,
        min_split_tiles=1,
        pair_row_tiles=True,
    )
    return SplitKV(spec, target, scratch(), config)


class ForAll:
    """A kernel for long queries that gives its place to another one, for queries of all lengths or long ones alone."""

    def __init__(self, kernel: Kernel, with_short: bool) -> None:
        self.kernel, self.with_short = kernel, with_short

    def split_of(self, batch: Batch, min_seqlen_q: int) -> tuple[Kernel, int]:
        return self.kernel, 0 if self.with_short else min_seqlen_q


def run(case: Case, arch: str, index: int, *, with_short: bool = True, **facts: Any) -> None:
    def make(planner: Planner, short: bool) -> Any:
        return planner.short[2] if short else ForAll(splitting(planner, index), with_short)

    emulate(case, arch, make, index, **facts)


@numbered(ALL, QUICK)
def test_sm90(index: int, case: Case) -> None:
    run(case, "sm_90a", index)


@numbered(ALL, ("prompts-mixed", "prompts-window"))
def test_sm100(index: int, case: Case) -> None:
    run(case, "sm_100a", index)


@pytest.mark.parametrize("index", [9, 1, 5], ids=("eager", "lazy", "random"))
def test_exact_pairs(index: int) -> None:
    run(next(case for case in OWN_CASES if case.id == "prompts-odd"), "sm_90a", index)


def test_long_queries_alone() -> None:
    """The kernel for short queries serves the others, and neither writes the other's rows."""
    run(OWN_CASES[0], "sm_90a", 1, with_short=False)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_nan_below_windows(arch: str) -> None:
    """Pages below a window may be another request's: P = 0 does not remove their NaN."""
    window = next(case for case in OWN_CASES if case.id == "prompts-window")
    run(replace(window, sinks=False), arch, 0, nan_below=True)


def test_one_row_more_ctas_than_tiles() -> None:
    run(Case(q_lens=(33,), kv_lens=(400,), heads=(1, 1)), "sm_90a", 2, sms=9)


def test_planner_runs_the_kernel_that_splits() -> None:
    """By its own estimate, with its own tiles."""
    around = Surroundings(padding_tokens=0)
    case = Case(q_lens=(1, 40), kv_lens=(300, 2900), heads=(2, 1), page=64, around=around)
    made: list[Any] = []

    def make(planner: Planner, short: bool) -> Any:
        made.append(planner.short[2] if short else planner.long[2])
        return made[-1]

    emulate(case, "sm_90a", make, 0, with_lse=False)
    short, long = made
    assert [bool(kernel._functions) for kernel in (short, long, long.extend)] == [False, False, True]


def test_a_plan_serves_every_batch_of_its_graph() -> None:
    """A plan made from bounds alone: a prompt with all tokens, decodes, and fewer requests than were captured."""
    around = Surroundings(max_query_len=90, max_seq_len=4096, spare_pages=100)
    case = Case(q_lens=(18,) * 5, kv_lens=(18,) * 5, heads=(3, 1), around=around)
    problem, target = case.problem(), replace(H200, sm_count=4)
    planner = Planner(problem.spec, target, scratch(), "cute")
    result = check.empty_result(problem)
    lengths: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((90,), (1000,)),
        ((1,) * 5, (700, 1, 17, 400, 64)),
        ((50, 1, 0, 20), (300, 900, 0, 70)),
    ]
    for index, (q_lens, kv_lens) in enumerate(lengths):
        problem.fill(q_lens, kv_lens, index)
        result.out.fill_(SENTINEL)
        result.lse.fill_(SENTINEL)
        with emulator.device(arch="sm_90a", sms=4, schedule=SCHEDULES[index], seed=index, strict=True):
            if index == 0:
                plan = planner.plan(problem.batch)
                assert [(part.min_seqlen_q, part.max_seqlen_q) for part in plan.parts] == [(0, 90)]
            check.launch(plan, problem, result)
        check.judge(result, problem.expected(), problem.score_magnitude())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_partial_results_have_a_bounded_size(arch: str) -> None:
    """Whatever the batch is."""
    target = from_arch(arch)
    for dim in (64, 128, 256, 512):
        spec = Case(heads=(8, 1), dim=dim).spec
        workspace = scratch()
        kernel: Any = Planner(spec, target, workspace, "cute").long[2]
        kernel.extend.bind(bounds([4 * K] * 4, 128 * K), 0, 4 * K)
        assert workspace.partials(0).numel() * 4 <= 64 << 20
