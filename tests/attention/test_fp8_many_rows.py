# SPDX-License-Identifier: Apache-2.0
"""Short queries of more than 64 rows with e4m3 products, on the emulator: packed heads, and keys that are split."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

import emulator
from dsl_backend.attention import dispatch
from dsl_backend.attention.cute import fp8_queries, fp8_smem, host
from dsl_backend.attention.cute.loader import dense as loader
from dsl_backend.attention.cute.scheduler.balanced import SPLIT_RANGE_FIELDS
from dsl_backend.attention.cute.sm90 import dense_host as sm90_host
from dsl_backend.attention.cute.sm90 import fp8_configs as sm90
from dsl_backend.attention.cute.sm90 import fp8_mma
from dsl_backend.attention.cute.sm90.fp8_kernel import Fp8Forward
from dsl_backend.attention.cute.sm100 import dense_host as sm100_host
from dsl_backend.attention.cute.sm100 import dense_mma, fp8_softmax
from dsl_backend.attention.cute.sm100 import fp8_configs as sm100
from dsl_backend.attention.cute.sm100.fp8_kernel import Fp8DenseForward
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.spec import AttentionSpec, Batch, HostLengths
from dsl_backend.attention.variants import SM90_FP8_DECODE, SM100_FP8_DECODE
from dsl_backend.errors import Unsupported
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check, fp8_attention, fuzz
from dsl_backend.testing.cases import FP16, FULL, Case
from dsl_backend.testing.fp8_attention import Arithmetic
from dsl_backend.testing.inputs import Layout, Problem, Surroundings
from emulator.errors import EmulatorError
from tests.attention import test_sm90_fp8, test_sm100_fp8
from tests.attention.emulated import SCHEDULES, SMS, compiled_anew, scratch
from tests.mistakes import Mistake, spoil_methods, spoilt

NAME = dispatch.FP8_PRODUCTS
ARCHS = ("sm_90a", "sm_100a")
WHOLE = 1 << 14  # key tiles: no range is split where partial results are larger than a CTA's key tiles
RAGGED = Case(
    id="ragged",
    q_lens=(8, 1, 0, 5, 0),
    kv_lens=(300, 90, 0, 200, 40),
    heads=(32, 2),
    dim=64,
    page=32,
    fp8=True,
    scales_by_head=True,
    why="128 rows, 16 and 80; padding; a request without queries; rings go around",
)
CASES = (
    RAGGED,
    replace(RAGGED, id="fp8-queries", fp8_q=True, scales_by_request=True, around=Surroundings(fused_q=True)),
    Case(
        id="window-softcap-sinks",
        q_lens=(8, 3),
        kv_lens=(200, 90),
        heads=(16, 1),
        dim=64,
        page=48,
        window=(50, None),
        softcap=5.0,
        sinks=True,
        dtype=FP16,
        fp8=True,
        around=Surroundings(stale=True),
        why="scores in true units; NaN below the windows, in boxes of 16 keys",
    ),
    Case(id="mqa-128", q_lens=(2, 1), kv_lens=(200, 70), heads=(128, 1), dim=128, page=64, fp8=True, why="a row tile"),
    Case(id="group-24", q_lens=(5, 3), kv_lens=(150, 70), heads=(24, 1), dim=96, fp8=True, why="120 rows of 128"),
    Case(
        id="group-24-fp8-queries",
        q_lens=(5, 3),
        kv_lens=(150, 70),
        heads=(24, 1),
        dim=96,
        causality=FULL,
        alibi=True,
        fp8=True,
        fp8_q=True,
        why="rows that TMA never writes; chunks of 32 bytes",
    ),
    Case(
        id="packed-192x128",
        q_lens=(8, 1, 4),
        kv_lens=(40, 7, 150),
        heads=(32, 2),
        dim=192,
        dim_v=128,
        page=None,
        fp8=True,
        around=Surroundings(layout=Layout.SEPARATE),
        why="tiles of keys begin anywhere",
    ),
    Case(id="nan", q_lens=(5, 8), kv_lens=(70, 60), heads=(16, 1), dim=64, fp8=True, nan_request=0, why="a NaN stays"),
    Case(id="large-scores", q_lens=(8,), kv_lens=(300,), heads=(16, 1), dim=64, scale=2.0, fp8=True, why="O rescaled"),
    replace(RAGGED, id="fp8-outputs", fp8_out=True, why="outputs of 8 bits"),
    Case(
        id="longer-queries",
        q_lens=(40, 3, 0, 20),
        kv_lens=(200, 30, 9, 20),
        heads=(8, 2),
        dim=64,
        page=32,
        fp8=True,
        why="row tiles of 32 tokens, of a prompt two; keys above the diagonal are left out",
    ),
)


@dataclass(frozen=True)
class Sm:
    """The kernel of one SM: its configurations, and what its arithmetic is."""

    arch: str

    @property
    def host(self) -> Any:
        return sm90_host if self.arch == "sm_90a" else sm100_host

    @property
    def forward(self) -> Any:
        return Fp8Forward if self.arch == "sm_90a" else Fp8DenseForward

    def many_rows(self, spec: AttentionSpec) -> Any:
        return (sm90 if self.arch == "sm_90a" else sm100).many_rows_config(spec)

    def config(self, index: int, min_split_tiles: int = WHOLE, dim: int = 64) -> Any:
        """Small tiles, so that rings go around."""
        if self.arch == "sm_90a":
            overlap = index % 3 == 2 and dim <= 64
            return sm90.Fp8Config(
                groups=2,
                tile_n=64 if dim > 64 else (64, 96, 32)[index % 3],
                stages=2 + index % 2,
                query_stages=1 + index % 2,
                ping_pong=True,
                intra_warpgroup_overlap=overlap,
                accumulate_period=2 if overlap else 1,
                min_split_tiles=min_split_tiles,
            )
        return sm100.Fp8DenseConfig(
            alternate=index % 4 != 3,
            tile_n=(64, 96, 32)[index % 3],
            stages=2 + index % 2,
            query_stages=1 + index // 2 % 2,
            ex2_emulation=0,
            min_split_tiles=min_split_tiles,
        )

    def arithmetic(self, config: Any) -> Arithmetic:
        return (test_sm90_fp8 if self.arch == "sm_90a" else test_sm100_fp8).arithmetic_of(config)

    def run(self, problem: Problem, config: Any, index: int, sms: int = SMS, fresh: bool = False) -> Any:
        """Launch the kernel for queries of all lengths; (results, kernel). Any finding or warning raises.

        Args:
            fresh: compile it anew.
        """
        forward = self.forward

        fresh_class = compiled_anew(self.host.Fp8SplitKV, forward)

        made: list[Any] = []

        def adjust(planner: Planner) -> None:
            kind = fresh_class if fresh else self.host.Fp8SplitKV
            made.append(kind(planner.spec, planner.target, scratch(), config))
            planner.short = planner.long = (*planner.long[:2], made[0])

        target = replace(from_arch(self.arch), sm_count=sms)
        assert not config.objections(problem.spec, target.smem_bytes)
        with emulator.device(
            arch=self.arch, sms=sms, schedule=SCHEDULES[index % len(SCHEDULES)], seed=index, strict=True
        ):
            result = check.run(problem, NAME, adjust=adjust, target=target)
        return result, made[0]


def emulate(arch: str, case: Case, index: int) -> None:
    """Whole ranges of keys, whose arithmetic is known."""
    sm, problem = Sm(arch), case.problem()
    config = sm.config(index, dim=case.spec.head_dim)
    result, kernel = sm.run(problem, config, index)
    assert not split_tiles(kernel)
    fp8_attention.judge(result, problem, sm.arithmetic(config))


@pytest.mark.parametrize(
    ("arch", "index", "case"),
    [
        pytest.param(arch, index, case, id=f"{arch}-{case.id}", marks=() if index == 0 else (pytest.mark.rest,))
        for arch in ARCHS
        for index, case in enumerate(CASES)
    ],
)
def test_case(arch: str, index: int, case: Case) -> None:
    emulate(arch, case, index)


@pytest.mark.rest
@pytest.mark.parametrize("index", range(len(SCHEDULES)))
@pytest.mark.parametrize("fp8_q", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_schedule(arch: str, fp8_q: bool, index: int) -> None:
    """One CTA has all work tiles: stages of Q and of its scales go around, and boxes of Q are left out."""
    sm, problem = Sm(arch), replace(RAGGED, fp8_q=fp8_q).problem()
    config = sm.config(0)
    result, _ = sm.run(problem, config, index, sms=1)
    fp8_attention.judge(result, problem, sm.arithmetic(config))


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SCHEDULES)))
@pytest.mark.parametrize("fp8_q", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("arch", ARCHS)
def test_wide_heads(arch: str, fp8_q: bool, index: int) -> None:
    """Heads of 256: one CTA has all work tiles, whose packed heads fill a part of a tile."""
    case = replace(RAGGED, q_lens=(8, 1, 5), kv_lens=(200, 150, 70), dim=256, fp8_q=fp8_q)
    sm, problem = Sm(arch), case.problem()
    config = sm.many_rows(case.spec)
    result, _ = sm.run(problem, config, index, sms=1)
    fp8_attention.judge(result, problem, sm.arithmetic(config))


def split_tiles(kernel: Any) -> int:
    """Output tiles whose keys were split."""
    ranges = kernel.workspace.integers(kernel.num_ctas * SPLIT_RANGE_FIELDS)
    return int((ranges[: kernel.num_ctas * SPLIT_RANGE_FIELDS].view(-1, SPLIT_RANGE_FIELDS)[:, 0] > 1).sum())


SPLIT = replace(RAGGED, q_lens=(8, 1, 0, 5), kv_lens=(700, 150, 0, 70), sinks=True)
# As of MLA: of a row whose keys are split, P is rounded with the row_max of each split.
SPLIT_ERROR, SPLIT_LSE_ERROR = 0.08, 0.02


@pytest.mark.rest
@pytest.mark.parametrize("index", range(len(SCHEDULES)))
@pytest.mark.parametrize("arch", ARCHS)
def test_split_keys(arch: str, index: int) -> None:
    """Partial results are combined: as far from the arithmetic of whole ranges as P's rounding explains."""
    sm, problem = (
        Sm(arch),
        replace(SPLIT, fp8_q=index == 1, window=(650, None) if index == 2 else (None, None)).problem(),
    )
    config = sm.config(index, min_split_tiles=1)
    result, kernel = sm.run(problem, config, index)
    assert split_tiles(kernel) > 1
    mine, expected = problem.owned(), fp8_attention.attention(problem, sm.arithmetic(config))
    out, exact = result.out[mine].double(), expected.out[mine]
    assert ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < SPLIT_ERROR
    assert (result.lse[mine].double() - expected.lse[mine]).abs().max() < SPLIT_LSE_ERROR


def equal_scores(arch: str, index: int, fresh: bool = False) -> None:
    """Where all keys weigh the same, P is a power of two: splits and tiles in any order give the mean of the values."""
    sm, problem = Sm(arch), replace(SPLIT, sinks=False).problem()
    problem.q.zero_()
    config = sm.config(0, min_split_tiles=1)
    result, kernel = sm.run(problem, config, index, fresh=fresh)
    assert split_tiles(kernel) > 1
    mine = problem.owned()
    expected = fp8_attention.attention(problem, replace(sm.arithmetic(config), accumulator_bits=None))
    exact = expected.out[mine]
    assert ((result.out[mine].double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-10).all()
    assert (result.lse[mine].double() - expected.lse[mine]).abs().max() < 1e-5


@pytest.mark.rest
@pytest.mark.parametrize("arch", ARCHS)
def test_equal_scores_are_exact(arch: str) -> None:
    equal_scores(arch, 0)


# ------------------------------------------------------------------ random problems

LAYERS, TURNS, SEED, SPECS = 10, 6, 20261127, 10_000
SIZES = replace(fuzz.TINY, kv=400, q=16, requests=4, heads_kv=(1, 2))
GROUPS = (8, 16, 24, 5, 96)


def drawn(layer: int, turn: int) -> Case:
    """A random problem whose rows are up to 128, of short queries, with sizes and keys that the kernels have."""
    case = fuzz.problem("prefill", SEED, layer + turn * SPECS, SIZES, SPECS)
    assert isinstance(case, Case)
    group, (dim, dim_v) = GROUPS[layer % len(GROUPS)], test_sm90_fp8.DIMS[layer % len(test_sm90_fp8.DIMS)]
    return replace(
        case,
        heads=(group * case.heads[1], case.heads[1]),
        q_lens=tuple(min(q, 128 // group) for q in case.q_lens),
        around=replace(case.around, max_query_len=0),
        dim=dim,
        dim_v=dim_v,
        fp8=True,
        fp8_dtype=torch.float8_e4m3fn,
        fp8_q=layer % 3 == 1,
        q_gain=1.0 if layer % 3 == 1 else case.q_gain,
        batch_invariant=False,
        programs=None,
        tile=None,
    )


@pytest.mark.parametrize(
    ("arch", "layer"),
    [
        pytest.param(arch, layer, marks=pytest.mark.full if layer > 1 else pytest.mark.rest)
        for arch in ARCHS
        for layer in range(LAYERS)
    ],
)
def test_random_problems_of_a_layer(arch: str, layer: int) -> None:
    """With small tiles, and with the configurations that a chip would get."""
    sm = Sm(arch)
    for turn in range(TURNS):
        case = drawn(layer, turn)
        problem, small = case.problem(), sm.config(layer, dim=case.spec.head_dim)
        default = replace(sm.many_rows(case.spec), min_split_tiles=WHOLE)
        config = small if layer % 2 == 0 and not small.objections(case.spec, 228 << 10) else default
        result, kernel = sm.run(problem, config, layer + turn)
        if split_tiles(kernel):
            # Of few rows: partial results are small, and `min_split_tiles` does not hold.
            result, _ = sm.run(problem, config, layer + turn, sms=1)
        fp8_attention.judge(result, problem, sm.arithmetic(config))


# ------------------------------------------------------------------ who serves

TITLES = {"sm_90a": "dense-decode e4m3-from-65-rows sm90", "sm_100a": "dense-decode e4m3-from-65-rows sm100"}


def spec_of(group: int, dim: int = 128, **facts: Any) -> AttentionSpec:
    return test_sm90_fp8.spec_of(dim, heads=(2 * group, 2), **facts)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (1, [(0, None)]),
        (4, [(0, None)]),
        (5, [(0, 12), (13, None)]),
        (8, [(0, 8), (9, None)]),
        (64, [(0, 1), (2, None)]),
        (96, [(0, None)]),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_decide(arch: str, group: int, expected: list[tuple[int, int | None]]) -> None:
    """16-bit products up to 64 rows; those in 8 bits for more, where short queries may have as many."""
    variants = (SM90_FP8_DECODE if arch == "sm_90a" else SM100_FP8_DECODE)(spec_of(group), from_arch(arch))
    assert [(one.min_query_len, one.max_query_len) for one in variants] == expected
    e4m3 = [one.name.startswith("e4m3 128x") for one in variants]
    assert e4m3 == [group > 64 or (index == 1 and len(expected) == 2) for index in range(len(expected))]


def planner_of(arch: str, group: int) -> Planner:
    return Planner(spec_of(group, page=16), from_arch(arch), Workspace(torch.device("cpu")), NAME)


def batch_of(q_lens: tuple[int, ...], known: bool = False) -> Batch:
    starts, keys = np.cumsum((0, *q_lens)), [64] * len(q_lens)
    return Batch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(keys, dtype=torch.int32),
        num_tokens=sum(q_lens),
        max_query_len=max(q_lens),
        max_seq_len=64,
        block_table=torch.zeros(len(q_lens), 4, dtype=torch.int32),
        host_lengths=HostLengths(np.array(q_lens), np.array(keys)) if known else None,
    )


@pytest.mark.parametrize(
    ("q_lens", "known", "expected"),
    [
        ((8, 1), False, [("few", 0, 8)]),
        ((9, 1), False, [("many", 0, 9)]),
        ((16,), False, [("many", 0, 16)]),
        ((17,), False, [("long", 17, 17), ("few", 0, 16)]),
        ((40, 9), False, [("long", 17, 40), ("few", 0, 16)]),
        ((40, 9), True, [("long", 17, 40), ("many", 0, 16)]),
        ((40, 8), True, [("long", 17, 40), ("few", 0, 16)]),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_plan_of_a_batch(
    arch: str,
    q_lens: tuple[int, ...],
    known: bool,
    expected: list[tuple[str, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the longest of the short queries, if the host knows it: 8 query heads share a key head."""
    planner, bound = planner_of(arch, 8), []
    short, long = planner.short[2], planner.long[2]
    kernels = {id(short): "few", id(short.other): "many", id(long): "long"}

    def bind(self: Any, batch: Batch, shortest: int, longest: int) -> Any:
        bound.append((kernels[id(self)], shortest, longest))

    monkeypatch.setattr(host.LayerKernel, "bind", bind)
    planner.plan(batch_of(q_lens, known))
    assert bound == expected


@pytest.mark.parametrize("known", [True, False], ids=("lengths", "bounds"))
@pytest.mark.parametrize("arch", ARCHS)
def test_a_few_tokens_behind_many_keys_are_packed(arch: str, known: bool) -> None:
    """By the kernel of many rows, though 32 tokens are no short query; short ones beside them keep their kernels."""
    planner, keys = planner_of(arch, 8), 8192

    def parts(*q_lens: int) -> list[tuple[bool, int]]:
        batch, lengths = batch_of(q_lens, known), [keys] * len(q_lens)
        found = HostLengths(np.array(q_lens), np.array(lengths)) if known else None
        plan = planner.plan(replace(batch, max_seq_len=keys, host_lengths=found))
        return [(one.kernel is planner.long[2].extend, one.min_seqlen_q) for one in plan.parts]

    assert parts(*[32] * 64)[0] == (True, 0 if known else 17)
    assert parts(*[32] * 64, 1) == [(True, 17), (False, 0)], "the short one has products in 16 bits"
    assert parts(*[500] * 64)[0][0] is False, "tiles of one head are full"
    assert type(planner.long[2].extend).__name__ == "Fp8SplitKV"


@pytest.mark.parametrize("arch", ARCHS)
def test_one_token_may_have_many_rows(arch: str) -> None:
    kernel: Any = planner_of(arch, 128).short[2]
    assert type(kernel).__name__ == "Fp8SplitKV"
    assert (kernel.pack_gqa, kernel.head_blocks, kernel.tile_m, kernel.max_query_len_served()) == (128, 2, 128, 16)


@pytest.mark.parametrize("arch", ARCHS)
def test_it_is_had_by_name_alone(arch: str) -> None:
    spec, target = spec_of(8), from_arch(arch)
    assert dispatch.choose(dispatch.Operation.DECODE, spec, target, NAME).title == TITLES[arch]
    assert dispatch.choose(dispatch.Operation.DECODE, spec, target).name == "cute"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"fp8": False}, "keys of bfloat16: its products are of float8_e4m3fn"),
        ({"dim": 288}, "head size 288 is not a multiple of 32 from 64 to"),
        ({"batch_invariant": True}, "short queries have other products"),
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_what_it_does_not_serve(arch: str, facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=re.escape(reason)):
        dispatch.choose(dispatch.Operation.DECODE, spec_of(8, **facts), from_arch(arch), NAME)


@pytest.mark.parametrize("dims", test_sm90_fp8.DIMS, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_configs_fit(arch: str, dims: tuple[int, int]) -> None:
    spec = spec_of(16, dims[0], dim_v=dims[1])
    config = Sm(arch).many_rows(spec)
    assert config.tile_m == 128
    assert not config.objections(spec, from_arch(arch).smem_bytes)
    assert Sm(arch).many_rows(spec_of(4)) is None


@pytest.mark.rest
@pytest.mark.parametrize("arch", ARCHS)
def test_by_name(arch: str) -> None:
    """A batch of drafts as a server would launch it: 9 queries of 8 heads have 72 rows."""
    case = replace(RAGGED, q_lens=(9, 1), kv_lens=(300, 90), heads=(16, 2))
    sm, problem = Sm(arch), case.problem()
    target = replace(from_arch(arch), sm_count=2)
    with emulator.device(arch=arch, sms=2, schedule="random", seed=0, strict=True):
        result = check.run(problem, NAME, target=target)
    mine = problem.owned()
    expected = fp8_attention.attention(problem, sm.arithmetic(sm.many_rows(case.spec)))
    out, exact = result.out[mine].double(), expected.out[mine]
    assert ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < SPLIT_ERROR
    # Products in 16 bits of the same problem are further off than that.
    naive = problem.expected().out[mine]
    assert ((naive - exact).norm(dim=-1) / exact.norm(dim=-1)).median() > 4 * (
        (out - exact).norm(dim=-1) / exact.norm(dim=-1)
    ).median()


# ------------------------------------------------------------------ mistakes

# (SM, id, module, class, what its source says once, what it would say, queries of 8 bits)
MISTAKES: tuple[tuple[str, str, ModuleType, type, str, str, bool], ...] = (
    (
        "sm_90a",
        "a box of Q lies where one of the next chunk does",
        loader,
        loader.LoadWarp,
        "strides = (self.rows_loaded * self.chunk, kernel.tile_m * self.chunk, kernel.q_stage_elements)",
        "strides = (self.rows_loaded * self.chunk, self.rows_loaded * self.chunk, kernel.q_stage_elements)",
        False,
    ),
    (
        "sm_90a",
        "stages of Q as if of 16 bits",
        fp8_smem,
        fp8_smem.Fp8Tiles,
        "return self.tile_m * self.dims if self.key.fp8_q else super().q_stage_elements",
        "return self.tile_m * self.dims // 2",
        True,
    ),
    (
        "sm_90a",
        "the offset of P stays in row_max",
        fp8_mma,
        fp8_mma.Fp8MmaConsumer,
        "return self.softmax.row_stats(row)",
        "return self.softmax.row_stats(row)[0] + 8.0, self.softmax.row_stats(row)[1]",
        False,
    ),
    (
        "sm_100a",
        "a row of Q of another head",
        fp8_queries,
        fp8_queries.Queries,
        "        head = q_head_of(self.key, work.head_block, row)\n"
        "        offset = cutlass.Int64(token) * self.mQ.stride[0] + head * self.mQ.stride[1]",
        "        head = q_head_of(self.key, work.head_block, row ^ 1)\n"
        "        offset = cutlass.Int64(token) * self.mQ.stride[0] + head * self.mQ.stride[1]",
        False,
    ),
    (
        "sm_100a",
        "a stage of Q is released early",
        dense_mma,
        dense_mma.AlternatingMmaWarp,
        "            q_stage = self.wait_q(work_idx)\n            num_tiles = work.n_block_max - work.n_block_min\n"
        "            self.qk_if_exists(0, q_stage, kv_idx, 0, num_tiles)",
        "            q_stage = self.wait_q(work_idx)\n            num_tiles = work.n_block_max - work.n_block_min\n"
        "            self.release_q(q_stage, cutlass.Boolean(True))\n"
        "            self.qk_if_exists(0, q_stage, kv_idx, 0, num_tiles)",
        False,
    ),
    (
        "sm_100a",
        "the offset of P is left out",
        fp8_softmax,
        fp8_softmax.Fp8SoftmaxWarps,
        "return self.row_max[0] * self.scale_log2() - self.config.p_offset",
        "return self.row_max[0] * self.scale_log2()",
        False,
    ),
    (
        "sm_100a",
        "boxes of half a chunk of Q",
        fp8_smem,
        fp8_smem.Fp8Tiles,
        "return fp8_chunk(self.dims) if self.key.fp8_q else super().copied_q",
        "return fp8_chunk(self.dims) // 2",
        True,
    ),
)
# Several chunks of a row of Q in 16 bits, and several work tiles of a CTA.
SMALL = Case(q_lens=(8, 3, 8), kv_lens=(133, 90, 60), heads=(16, 1), dim=128, page=32, fp8=True, scales_by_request=True)


def run_small(arch: str, index: int, fp8_q: bool) -> None:
    sm, problem = Sm(arch), replace(SMALL, fp8_q=fp8_q).problem()
    config = replace(sm.config(0, dim=128), query_stages=2)
    result, _ = sm.run(problem, config, index, sms=1, fresh=True)
    fp8_attention.judge(result, problem, sm.arithmetic(config))


def run_twice(arch: str, fp8_q: bool) -> None:
    """On the schedule that shows missing waits, and on the one that shows copies done early."""
    for index in (1, 0):
        run_small(arch, index, fp8_q)


@pytest.mark.rest
@pytest.mark.parametrize("fp8_q", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("arch", ARCHS)
def test_right_without_a_mistake(arch: str, fp8_q: bool) -> None:
    run_small(arch, 1, fp8_q)


@pytest.mark.parametrize("mistake", [pytest.param(one, id=one[1], marks=pytest.mark.rest) for one in MISTAKES])
def test_a_mistake_is_found(mistake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, name, module, right, said, wrong, fp8_q = mistake
    spoil_methods(right, spoilt(Mistake(name, module, said, wrong), tmp_path), monkeypatch)
    with pytest.raises((AssertionError, EmulatorError)):
        run_twice(arch, fp8_q)
