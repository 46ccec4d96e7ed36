# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant attention on the emulator: a row's bits do not depend on how its prompt is divided into steps.

A prompt's rows are computed as one long query, in chunks, after cached keys and as decode steps, alone and beside
another request, by the kernels for long and for short queries. Splits are combined by the combine kernel, or by the CTA
that computed them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import emulator
from dsl_backend.attention.cute import fixed_splits
from dsl_backend.attention.cute import host as shared_host
from dsl_backend.attention.cute.sizes import fold_workspace_size
from dsl_backend.attention.cute.sm90 import dense_configs as sm90
from dsl_backend.attention.cute.sm90 import dense_host as sm90_host
from dsl_backend.attention.cute.sm90 import mla_configs as mla_sm90
from dsl_backend.attention.cute.sm90 import mla_host as mla_sm90_host
from dsl_backend.attention.cute.sm100 import dense_configs as sm100
from dsl_backend.attention.cute.sm100 import dense_host as sm100_host
from dsl_backend.attention.cute.sm100 import mla_configs as mla_sm100
from dsl_backend.attention.cute.sm100 import mla_host as mla_sm100_host
from dsl_backend.attention.protocol import Operands
from dsl_backend.attention.spec import Batch
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case, mla
from dsl_backend.testing.inputs import Problem

HOSTS = {
    ("sm_90a", False): sm90_host,
    ("sm_90a", True): mla_sm90_host,
    ("sm_100a", False): sm100_host,
    ("sm_100a", True): mla_sm100_host,
}
SMS = 4
LONG_ENOUGH = 16  # queries: the kernels for short queries serve no more


@dataclass(frozen=True)
class Layer:
    """A layer, whose prompt has the queries and keys of the case's first request.

    Attributes:
        split_keys: so few that the prompt has several splits.
        configs: for long queries, and for short ones if these have a kernel of their own.
        other: the same for long queries, in another configuration with the same bits.
    """

    case: Case
    arch: str
    split_keys: int
    configs: tuple[Any, ...]
    other: Any = None

    @property
    def tokens(self) -> int:
        return self.case.q_lens[0]

    def kernel(self, problem: Problem, way: "Way") -> Any:
        target = replace(from_arch(self.arch), sm_count=way.sms)
        config = self.other if way.other else self.configs[-1] if way.short else self.configs[0]
        assert not config.objections(problem.spec, target.smem_bytes)
        host: Any = HOSTS[self.arch, problem.spec.mla]
        kind = host.MlaSplitKV if problem.spec.mla else host.SplitKV if way.short else host.Prefill
        return kind(problem.spec, target, Workspace(torch.device("cpu")), config)


@dataclass(frozen=True)
class Way:
    """How the prompt is divided into launches.

    Attributes:
        chunks: rows of each launch; keys before a chunk are cached.
        short: by the kernel for short queries; longer chunks are cached keys alone.
        partials_bytes: room for partial results; with 0, CTAs combine their own splits.
        beside: the case's second request is in the batch.
    """

    chunks: tuple[int, ...]
    short: bool = False
    partials_bytes: int = 16 << 20
    beside: bool = False
    other: bool = False
    sms: int = SMS


def ways(tokens: int) -> dict[str, Way]:
    return {
        "whole": Way((tokens,)),
        "chunks": Way((70, 1, 29, tokens - 100), beside=True),
        "other-config": Way((tokens,), other=True),
        "more-sms": Way((tokens,), sms=7),
        "short": Way((tokens - 6, 5, 1), short=True),
        "short-own-splits": Way((tokens - 6, 5, 1), short=True, partials_bytes=0),
        "short-little-room": Way((tokens - 3, 3), short=True, partials_bytes=40000, beside=True),
        "short-more-sms": Way((tokens - 3, 2, 1), short=True, beside=True, sms=9),
    }


# The second request is another one in the batch.
DENSE: dict[str, Any] = {"q_lens": (300, 3), "kv_lens": (300, 190)}
SM90_LONG = sm90.DenseConfig(groups=1, tile_n=64, stages=2, speculative_max=True)
SM90_SHORT = replace(SM90_LONG, fold_few_rows=True)
SM90_FP8 = sm90.DenseConfig(groups=1, tile_n=64, stages=2, dequant_stages=2)
SM90_OTHER = sm90.DenseConfig(groups=2, tile_n=64, stages=2, ping_pong=True, fold_in_smem=True)
# Queries so large that row maxima move, in some rows of a warp.
LATENT: dict[str, Any] = {"q_lens": (110, 2), "kv_lens": (110, 190), "q_gain": 4.0}
SM90_MLA = mla_sm90.MlaConfig(tile_n=32, stages=3, scores_first=True, speculative_max=True)
SM100_LONG = sm100.DenseConfig(tile_n=64, stages=2, ex2_emulation=0)
SM100_SHORT = sm100.DenseConfig(softmax_warpgroups=1, tile_n=64, stages=3, ex2_emulation=0)
SM100_FP8 = replace(SM100_LONG, dequant_stages=2)
SM100_MLA = mla_sm100.MlaConfig(tile_n=32, stages=3)
LAYERS = {
    "sm90": Layer(Case(heads=(4, 2), q_gain=4.0, **DENSE), "sm_90a", 128, (SM90_LONG, SM90_SHORT), SM90_OTHER),
    "sm90-window": Layer(
        Case(heads=(2, 1), window=(150, None), softcap=5.0, **DENSE), "sm_90a", 128, (SM90_LONG, SM90_SHORT), SM90_OTHER
    ),
    "sm90-fp8": Layer(
        Case(heads=(2, 1), fp8=True, page=64, sinks=True, **DENSE),
        "sm_90a",
        128,
        (SM90_FP8,) * 2,
        replace(SM90_FP8, groups=2),
    ),
    "sm90-mla": Layer(
        mla(16, (288, 256), **LATENT), "sm_90a", 64, (SM90_MLA,), replace(SM90_MLA, speculative_max=False)
    ),
    "sm90-mla-smem": Layer(
        mla(16, (288, 256), **LATENT),
        "sm_90a",
        64,
        (replace(SM90_MLA, fold_in_smem=True, combine_by_tasks=True),),
        SM90_MLA,
    ),
    "sm90-mla-128": Layer(
        mla(128, (288, 256), **LATENT, page=64),
        "sm_90a",
        64,
        (replace(SM90_MLA, cluster=2),),
        replace(SM90_MLA, scores_first=False),
    ),
    "sm90-mla-fp8": Layer(
        mla(16, (288, 256), **LATENT, fp8=True),
        "sm_90a",
        64,
        (mla_sm90.MlaConfig(tile_n=32, dequant_stages=2),),
        mla_sm90.MlaConfig(tile_n=32, dequant_stages=2, scores_first=True),
    ),
    "sm100": Layer(
        Case(heads=(4, 2), q_gain=4.0, **DENSE),
        "sm_100a",
        128,
        (SM100_LONG, SM100_SHORT),
        replace(SM100_SHORT, query_stages=2),
    ),
    "sm100-window": Layer(
        Case(heads=(2, 1), window=(150, None), softcap=5.0, **DENSE),
        "sm_100a",
        128,
        (SM100_LONG, SM100_SHORT),
        SM100_SHORT,
    ),
    "sm100-fp8": Layer(
        Case(heads=(2, 1), fp8=True, page=64, sinks=True, **DENSE),
        "sm_100a",
        128,
        (SM100_FP8, replace(SM100_FP8, softmax_warpgroups=1)),
        replace(SM100_FP8, softmax_warpgroups=1),
    ),
    "sm100-mla": Layer(mla(16, (288, 256), **LATENT), "sm_100a", 64, (SM100_MLA,), replace(SM100_MLA, stages=5)),
    "sm100-mla-128": Layer(
        mla(128, (288, 256), **LATENT, page=64),
        "sm_100a",
        64,
        (mla_sm100.TwoCtaMlaConfig(tile_n=32, stages=2),),
        mla_sm100.TwoCtaMlaConfig(tile_n=32, stages=3),
    ),
    "sm100-mla-fp8": Layer(
        mla(16, (288, 256), **LATENT, fp8=True),
        "sm_100a",
        64,
        (mla_sm100.MlaConfig(tile_n=32, dequant_stages=2),),
        mla_sm100.MlaConfig(tile_n=32, dequant_stages=3),
    ),
}
QUICK = {
    ("sm90", "short"),
    ("sm90", "short-own-splits"),
    ("sm90", "other-config"),
    ("sm90-window", "chunks"),
    ("sm90-mla", "chunks"),
    ("sm90-mla-smem", "short"),
    ("sm90-mla-smem", "short-own-splits"),
    ("sm100", "short"),
    ("sm100", "short-own-splits"),
    ("sm100-mla", "chunks"),
    ("sm100-mla-128", "chunks"),
}


def launches(layer: Layer, problem: Problem, way: Way) -> Iterator[tuple[slice, Batch]]:
    """(the prompt's rows, the batch) of each launch; another request comes before the prompt."""
    assert problem.batch.block_table is not None
    begin = 0
    for chunk in way.chunks:
        end = begin + chunk
        # The first chunk of short queries is the cached prefix, which another launch wrote.
        if not (way.short and chunk > LONG_ENOUGH):
            lens, seen, order = [chunk], [end], [0]
            if way.beside:
                lens, seen, order = [problem.q_lens[1], chunk], [problem.kv_lens[1], end], [1, 0]
            yield (
                slice(begin, end),
                Batch(
                    query_start_loc=torch.tensor([0, *lens]).cumsum(0).int(),
                    seq_lens=torch.tensor(seen, dtype=torch.int32),
                    num_tokens=sum(lens),
                    max_query_len=max(lens),
                    max_seq_len=max(seen),
                    block_table=problem.batch.block_table[order].contiguous(),
                ),
            )
        begin = end


def rows_of(layer: Layer, problem: Problem, way: Way, seed: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) of each of the prompt's rows that the way computes."""
    kernel, found = layer.kernel(problem, way), {}
    before = problem.q_lens[1] if way.beside else 0
    for rows, batch in launches(layer, problem, way):
        other = problem.q[layer.tokens : layer.tokens + before]
        q = torch.cat([other, problem.q[rows]]).contiguous()
        out, lse = q.new_zeros(*q.shape[:2], problem.spec.head_dim_v), torch.zeros(q.shape[:2])
        extras = (problem.sinks, problem.alibi_slopes, problem.k_scale, problem.v_scale)
        operands = Operands(q, None, problem.keys, problem.values, out, lse, *extras)
        with emulator.device(arch=layer.arch, sms=way.sms, schedule="lazy", seed=seed, strict=True):
            kernel.bind(batch, 1, batch.max_query_len)(operands)
        for i, row in enumerate(range(rows.start, rows.stop)):
            found[row] = out[before + i], lse[before + i]
    return found


def made(case: Case) -> Problem:
    return replace(case, batch_invariant=True).problem()


def limit_scratch(layer: Layer, problem: Problem, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch of the fold workspace and as many bytes of partial results as the way has."""
    kernel = layer.kernel(problem, way)
    folded = kernel.num_ctas * fold_workspace_size(kernel.tile_m, kernel.columns)
    monkeypatch.setattr(shared_host, "FIXED_SPLIT_SCRATCH_BYTES", 4 * folded + way.partials_bytes)


def short_splits(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_splits, "split_keys", lambda spec: layer.split_keys)


def differing_rows(layer: Layer, way: Way, monkeypatch: pytest.MonkeyPatch, *, whole: Way | None = None) -> list[int]:
    """Rows of the prompt whose bits are not those of the whole prompt, computed alone."""
    short_splits(layer, monkeypatch)
    problem = made(layer.case)
    whole = whole or ways(layer.tokens)["whole"]
    limit_scratch(layer, problem, whole, monkeypatch)
    expected = rows_of(layer, problem, whole, 1)
    limit_scratch(layer, problem, way, monkeypatch)
    found = rows_of(layer, problem, way, 2)
    assert found
    return [row for row, parts in found.items() if not all(map(torch.equal, parts, expected[row]))]


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) in QUICK else (pytest.mark.full,))
        for name, layer in LAYERS.items()
        for way in ways(layer.tokens)
        if way != "whole"
    ],
)
def test_division_into_steps_does_not_matter(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    assert differing_rows(layer, ways(layer.tokens)[way], monkeypatch) == []


@pytest.mark.parametrize("name", LAYERS)
def test_the_prompt_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    short_splits(layer, monkeypatch)
    case = replace(layer.case, q_lens=layer.case.q_lens[:1], kv_lens=layer.case.kv_lens[:1])
    problem = made(case)
    way = ways(layer.tokens)["whole"]
    limit_scratch(layer, problem, way, monkeypatch)
    result = check.empty_result(problem)
    for row, (out, lse) in rows_of(layer, problem, way, 1).items():
        result.out[row], result.lse[row] = out, lse
    check.judge(result, problem.expected(), problem.score_magnitude())


def test_scratch_is_bounded() -> None:
    """Whatever the batch: 96 requests of 128k tokens took 33 GiB when it was not."""
    batch = Batch(
        query_start_loc=torch.zeros(97, dtype=torch.int32),
        seq_lens=torch.zeros(96, dtype=torch.int32),
        num_tokens=8192,
        max_query_len=8192,
        max_seq_len=131072,
        block_table=torch.zeros(96, 1, dtype=torch.int32),
    )
    for name, layer in LAYERS.items():
        problem, workspace = made(layer.case), Workspace(torch.device("cpu"))
        for short in (False, True):
            kernel = layer.kernel(problem, Way((1,), short=short, sms=132))
            kernel.workspace = workspace
            kernel.bind(batch, 1, 16)
        held = sum(buffer.nbytes for buffer in (workspace.partials(0), workspace.integers(0), *workspace._outgrown))
        assert held <= 256 << 20, name
