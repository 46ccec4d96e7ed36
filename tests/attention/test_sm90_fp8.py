# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel with e4m3 products on the emulator: it computes what its arithmetic says, without findings."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import emulator
from dsl_backend.attention import dispatch
from dsl_backend.attention.cute.sm90.dense_host import Fp8Prefill
from dsl_backend.attention.cute.sm90.fp8_configs import (
    WIDE_TILES,
    Fp8Config,
    default_fp8_config,
    fp8_variants,
    is_wide,
    long_query_fp8_config,
    wide,
)
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.attention.variants import SM90_FP8_PREFILL
from dsl_backend.errors import Unsupported
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check, fp8_attention, fuzz
from dsl_backend.testing.cases import FP16, FULL, Case
from dsl_backend.testing.fp8_attention import Arithmetic, to_e4m3
from dsl_backend.testing.inputs import Layout, Surroundings
from emulator.machine import narrow_sums
from tests.attention.emulated import SCHEDULES, SMS, scratch

NAME = "cute-fp8"
CASES = (
    Case(
        id="ragged",
        q_lens=(1, 70, 33),
        kv_lens=(300, 200, 33),
        heads=(4, 2),
        dim=64,
        fp8=True,
        scales_by_head=True,
        scales_by_request=True,
        why="a long tile of keys; scales of each request and head; requests of all lengths",
    ),
    Case(id="paged-128", q_lens=(70,), kv_lens=(270,), heads=(2, 1), dim=128, page=64, fp8=True, why="two warpgroups"),
    Case(
        id="window-softcap-sinks",
        q_lens=(40, 3),
        kv_lens=(200, 90),
        heads=(2, 1),
        dim=64,
        page=48,
        window=(50, None),
        softcap=5.0,
        sinks=True,
        dtype=FP16,
        fp8=True,
        around=Surroundings(stale=True),
        why="scores in true units; NaN below the windows; boxes of 16 keys",
    ),
    Case(
        id="packed-192x128",
        q_lens=(18, 1, 40),
        kv_lens=(40, 7, 150),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        fp8=True,
        scales_by_head=True,
        around=Surroundings(layout=Layout.SEPARATE),
        why="tiles begin anywhere; rows of keys in chunks of 64 bytes; scales of each head",
    ),
    Case(
        id="full-alibi-96",
        q_lens=(20,),
        kv_lens=(130,),
        heads=(2, 2),
        dim=96,
        causality=FULL,
        alibi=True,
        fp8=True,
        why="chunks of 32 bytes; scores of true units",
    ),
    Case(id="nan", q_lens=(5, 20), kv_lens=(70, 60), dim=64, fp8=True, nan_request=0, why="a NaN stays its request's"),
    Case(
        id="fp8-queries",
        q_lens=(1, 70, 33),
        kv_lens=(300, 200, 33),
        heads=(4, 2),
        dim=64,
        fp8=True,
        fp8_q=True,
        scales_by_head=True,
        scales_by_request=True,
        around=Surroundings(fused_q=True),
        why="queries of 8 bits are used as they are; their scales of each request and head",
    ),
    Case(
        id="fp8-queries-192",
        q_lens=(18, 40),
        kv_lens=(40, 150),
        heads=(2, 2),
        dim=192,
        dim_v=128,
        page=None,
        softcap=5.0,
        nan_request=0,
        fp8=True,
        fp8_q=True,
        why="rows of queries in chunks of 64 bytes; scores in true units",
    ),
    Case(
        id="large-scores", q_lens=(40,), kv_lens=(300,), heads=(1, 1), dim=64, scale=2.0, fp8=True, why="O is rescaled"
    ),
    Case(
        id="wide-192",
        q_lens=(20, 3),
        kv_lens=(100, 3),
        heads=(1, 1),
        dim=192,
        page=32,
        fp8=True,
        why="P V in three parts; Q in shared memory",
    ),
    Case(
        id="wide-256",
        q_lens=(20, 3),
        kv_lens=(150, 3),
        heads=(2, 2),
        dim=256,
        page=32,
        window=(100, None),
        softcap=5.0,
        sinks=True,
        fp8=True,
        around=Surroundings(stale=True),
        why="P V in parts; Q in shared memory, of several work tiles; NaN below the windows",
    ),
    Case(
        id="wide-fp8-queries-256",
        q_lens=(18, 40),
        kv_lens=(40, 250),
        heads=(2, 1),
        dim=256,
        fp8=True,
        fp8_q=True,
        scales_by_head=True,
        scales_by_request=True,
        nan_request=0,
        why="queries of 8 bits are multiplied where TMA wrote them",
    ),
    Case(
        id="wide-224x160",
        q_lens=(20,),
        kv_lens=(150,),
        heads=(2, 2),
        dim=224,
        dim_v=160,
        page=None,
        dtype=FP16,
        fp8=True,
        why="parts of 40 columns; rows of keys in chunks of 32 bytes",
    ),
)
QUICK = ("ragged", "window-softcap-sinks")
LONG = ("wide-256", "wide-fp8-queries-256", "wide-224x160")


def marks_of(case: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if case in QUICK else (pytest.mark.full,) if case in LONG else (pytest.mark.rest,)


def config_of(case: Case, index: int) -> Fp8Config:
    """Small tiles, so that rings go around and sums are promoted; wide heads have those to tune."""
    p_offset = (8.0, 4.0)[index // 2 % 2]
    if is_wide(case.spec):
        return replace(wide(case.spec, WIDE_TILES[index % 3], ping_pong=index % 2 == 1), p_offset=p_offset)
    tile_n = 64 if case.spec.head_dim > 64 else (96, 128, 32)[index % 3]
    groups = index % 2 + 1
    overlap = index % 3 != 1
    return Fp8Config(
        groups=groups,
        tile_n=tile_n,
        stages=2 + index % 2,
        query_stages=groups,
        ping_pong=groups == 2,
        intra_warpgroup_overlap=overlap,
        accumulate_period=(2, 1, 0, 4)[index % 4] if overlap else 1,
        p_offset=p_offset,
    )


def arithmetic_of(config: Fp8Config) -> Arithmetic:
    return Arithmetic(
        tile_n=config.tile_n,
        p_offset=config.p_offset,
        rescale_threshold=config.rescale_threshold,
        accumulate_period=config.accumulate_period,
    )


def emulate(case: Case, config: Fp8Config, index: int, judged_as: Arithmetic | None = None) -> None:
    """Run a case with a configuration for queries of all lengths, and judge it by its arithmetic."""
    problem = case.problem()

    def adjust(planner: Planner) -> None:
        kernel = Fp8Prefill(planner.spec, planner.target, scratch(), config)
        planner.short = planner.long = (*planner.long[:2], kernel)

    target = replace(from_arch("sm_90a"), sm_count=SMS)
    schedule = SCHEDULES[index % len(SCHEDULES)]
    with emulator.device(arch="sm_90a", sms=SMS, schedule=schedule, seed=index, strict=True):
        result = check.run(problem, NAME, adjust=adjust, target=target)
    fp8_attention.judge(result, problem, judged_as or arithmetic_of(config))


@pytest.mark.parametrize(
    ("index", "case"),
    [pytest.param(index, case, id=case.id, marks=marks_of(case.id)) for index, case in enumerate(CASES)],
)
def test_case(index: int, case: Case) -> None:
    emulate(case, config_of(case, index), index)


def spec_of(dim: int = 128, dim_v: int | None = None, **facts: Any) -> AttentionSpec:
    case = Case(q_lens=(1,), kv_lens=(1,), dim=dim, dim_v=dim_v, **{"fp8": True} | facts)
    spec: AttentionSpec = case.spec
    return spec


@pytest.mark.parametrize(
    "dims",
    [(64, 64), (96, 96), (128, 128), (128, 64), (192, 128), (160, 96), (256, 256), (224, 160), (256, 64)],
    ids=str,
)
def test_configs_fit(dims: tuple[int, int]) -> None:
    """The default and those to tune; sums of two levels are among them."""
    spec, smem_bytes = spec_of(*dims), from_arch("sm_90a").smem_bytes
    tuned = list(fp8_variants(spec, smem_bytes))
    defaults = [one for one in (default_fp8_config(spec), long_query_fp8_config(spec)) if one is not None]
    found = defaults + tuned
    assert [config.objections(spec, smem_bytes) for config in found] == [[]] * len(found)
    assert len({replace(config, stages=2) for config in tuned}) == len(tuned) > 3
    assert {config.intra_warpgroup_overlap for config in tuned} == ({False} if dims[1] > 128 else {False, True})
    assert all(0 < config.accumulate_period * config.tile_n <= 512 for config in found)


NOT_SERVED = [
    ({"fp8": False}, "keys of bfloat16: its products are of float8_e4m3fn"),
    ({"fp8_dtype": torch.float8_e5m2}, "keys of float8_e5m2"),
    ({"dim": 288}, "head size 288 is not a multiple of 32 from 64 to"),
    ({"dim": 80}, "head size 80 is not a multiple of 32"),
    ({"dim": 192, "dim_v": 288}, "value head size 288 is not a multiple of 32 from 64 to"),
    ({"batch_invariant": True}, "short queries have other products"),
]


@pytest.mark.parametrize(("facts", "reason"), NOT_SERVED)
def test_what_it_does_not_serve(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        dispatch.choose(dispatch.Operation.PREFILL, spec_of(**facts), from_arch("sm_90a"), NAME)


@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        ({}, []),
        (
            {"dim": 512},
            [
                "head size 512 is not",
                "value head size 512 is not",
                "dense-prefill e4m3 sm100, dense-decode e4m3-from-65-rows sm100: serves GPUs of sm_100a",
            ],
        ),
        ({"heads": (16, 1), "dim": 576, "dim_v": 512, "mla": True}, []),
        (
            {"heads": (16, 1), "dim": 576, "dim_v": 512, "mla": True, "fp8": False},
            ["mla-decode e4m3 sm90: keys of bfloat16", "mla-decode e4m3 sm100: serves GPUs of sm_100a"],
        ),
    ],
    ids=["served", "wide", "mla", "mla-16-bits"],
)
def test_a_server_refuses_it_before_it_starts(facts: dict[str, Any], reasons: list[str]) -> None:
    """Where layers ask for the kernel that attends by its name, and for any that writes the cache."""
    found = dispatch.reasons_against(
        spec_of(**facts), from_arch("sm_90a"), lambda one: None if one is dispatch.Operation.WRITE_KV else NAME
    )
    assert len(found) == len(reasons)
    assert all(part in text for part, text in zip(reasons, found, strict=True))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tile_n": 48}, "tiles of 48 keys: a multiple of 32 up to 256 is possible"),
        ({"tile_n": 224, "stages": 2}, "O, S, P and Q take 232 registers: a thread has 224"),
        (
            {"intra_warpgroup_overlap": True},
            "O, S, P and Q take 268 registers: a thread has 232",
        ),
        ({"accumulate_period": 2}, "S and P V share registers"),
        ({"stages": 1}, "1 K stages, 1 Q stages: at least 2 and 1 are needed"),
        ({"stages": 9}, "bytes of shared memory: there are"),
        ({"p_offset": 9.0}, "P times 2\\^9: an exponent from 0 to 8 is possible"),
        ({"accumulate_period": -1}, "sums of -1 tiles"),
        ({"groups": 4}, "4 warpgroups: one of"),
    ],
)
def test_configs_that_do_not_fit(change: dict[str, Any], reason: str) -> None:
    spec = spec_of()
    (found,) = replace(default_fp8_config(spec), **change).objections(spec, from_arch("sm_90a").smem_bytes)
    assert re.search(reason, found)


def test_it_is_had_by_name_alone() -> None:
    """Long queries by that name have e4m3 products, short ones have 16 bits up to 64 rows; nobody gets it unasked."""
    target, spec = from_arch("sm_90a"), spec_of()
    titles = [
        dispatch.choose(operation, spec, target, NAME).title
        for operation in (dispatch.Operation.PREFILL, dispatch.Operation.DECODE)
    ]
    assert titles == ["dense-prefill e4m3 sm90", "dense-decode e4m3-from-65-rows sm90"]
    assert dispatch.choose(dispatch.Operation.PREFILL, spec, target).name == "cute"
    with pytest.raises(Unsupported):
        dispatch.choose(dispatch.Operation.PREFILL, spec, from_arch("sm_80"), NAME)


LAYERS, WIDE_LAYERS, PROBLEMS, SEED, SPECS = 12, 4, 5, 20261125, 10_000
SIZES = replace(fuzz.TINY, kv=400, q=150, requests=3, heads_kv=(1, 2))
DIMS = ((64, 64), (128, 128), (96, 96), (192, 128), (128, 64), (160, 96))
WIDE_DIMS = ((256, 256), (256, 256), (256, 128), (160, 192))


def drawn(layer: int, turn: int) -> Case:
    """A random problem of prefill, with sizes and keys that the kernel has."""
    case = fuzz.problem("prefill", SEED, layer + turn * SPECS, SIZES, SPECS)
    assert isinstance(case, Case)
    dim, dim_v = DIMS[layer % len(DIMS)] if layer < LAYERS else WIDE_DIMS[layer - LAYERS]
    more = {"batch_invariant": False, "programs": None, "tile": None}
    return replace(case, dim=dim, dim_v=dim_v, fp8=True, fp8_dtype=torch.float8_e4m3fn, **more)


@pytest.mark.parametrize(
    "layer",
    [pytest.param(n, marks=pytest.mark.full if n > 1 else pytest.mark.rest) for n in range(LAYERS + WIDE_LAYERS)],
)
def test_random_problems_of_a_layer(layer: int) -> None:
    """With the default of a layer, and small tiles in turn; short queries too."""
    for turn in range(PROBLEMS):
        case = drawn(layer, turn)
        emulate(case, default_fp8_config(case.spec) if layer % 2 else config_of(case, layer // 2), layer + turn)


def test_sums_are_those_of_the_machine() -> None:
    """The model's products are the emulator's, bit for bit, of all magnitudes of e4m3 and of an accumulator."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 64, generator=draw).double() * 2.0 ** torch.arange(-4, 4).repeat(8) for _ in range(2))
    a, b = to_e4m3(a), to_e4m3(b * 16)
    a[3], b[5, :40] = 0, 0
    acc = torch.randn(16, 16, generator=draw).double() * 100
    acc = torch.from_numpy(narrow_sums.cut(acc.numpy()))
    found = fp8_attention.product(a, b.T, fp8_attention.BITS, acc)
    expected = acc.numpy()
    for first in (0, 32):
        parts = (one[:, first : first + 32].numpy() for one in (a, b))
        expected = narrow_sums.cut(narrow_sums.summed(*parts, expected, "e4m3", "e4m3"))
    assert found.equal(torch.from_numpy(expected))
    assert not found.equal(acc + a @ b.T)


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
def test_every_schedule(overlap: bool, index: int) -> None:
    config = replace(config_of(CASES[1], 1), stages=2, intra_warpgroup_overlap=overlap, accumulate_period=1)
    emulate(CASES[1], config, index)


@pytest.mark.rest
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("dim", [64, 128])
def test_long_tiles_in_every_schedule(dim: int, index: int) -> None:
    """Requests that end in the first tile, at its end, and in a later one."""
    case = replace(CASES[1], q_lens=(20, 192, 70), kv_lens=(20, 192, 450), heads=(1, 1), dim=dim)
    config = long_query_fp8_config(case.spec)
    assert config is not None
    emulate(case, config, index)


@pytest.mark.full
@pytest.mark.parametrize("index", range(3))
def test_wide_heads_in_every_schedule(index: int) -> None:
    """With the default: work tiles that end in the first key tile, at its end, and in the third one."""
    case = replace(CASES[1], q_lens=(20, 128, 10), kv_lens=(20, 128, 270), heads=(1, 1), dim=256)
    emulate(case, default_fp8_config(case.spec), index)


def test_long_queries_have_longer_tiles() -> None:
    """By the longest query of a batch; wide heads have one kernel. Each has one of packed heads beside them."""
    target = from_arch("sm_90a")
    found = {dims: SM90_FP8_PREFILL(spec_of(*dims), target) for dims in ((128, 128), (64, 64), (192, 128))}
    assert [[one.few_tiles for one in variants][-1] for variants in found.values()] == [True] * 3
    tiles = {
        dims: [(one.config.tile_m, one.config.tile_n, one.min_query_len, one.max_query_len) for one in variants[:-1]]
        for dims, variants in found.items()
    }
    assert tiles == {
        (128, 128): [(128, 128, 0, 4095), (128, 192, 4096, None)],
        (64, 64): [(128, 128, 0, 4095), (192, 128, 4096, None)],
        (192, 128): [(128, 128, 0, None)],
    }
