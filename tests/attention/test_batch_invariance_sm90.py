# SPDX-License-Identifier: Apache-2.0
"""SM90's dense kernels in batch-invariant mode: a row's bits do not depend on how its prompt is divided into steps.

A prompt's rows are computed as one long query, in chunks, after cached keys and as decode steps, by the prefill and the
split-KV kernel. Splits are combined by the combine kernel, or by the CTA that computed them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import emulator
from dsl_backend.attention.cute import host as shared_launch
from dsl_backend.attention.cute.sm90 import dense_configs as configs
from dsl_backend.attention.cute.sm90 import dense_host as launch
from dsl_backend.attention.protocol import Operands
from dsl_backend.attention.spec import Batch
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case
from dsl_backend.testing.inputs import Problem

SMS, TILE_N = 4, 64
# In the same launch as the prompt, a request of other lengths.
TOKENS, OTHER = 300, (3, 190)
SPLIT = 2 * TILE_N


@dataclass(frozen=True)
class Way:
    """How the prompt is divided into launches.

    Attributes:
        chunks: rows of each launch; keys before a chunk are cached.
        short: by the split-KV kernel.
        partials_bytes: room for partial results; with 0, CTAs combine their own splits.
        beside: another request is in the batch.
    """

    chunks: tuple[int, ...]
    short: bool = False
    partials_bytes: int = 1 << 20
    beside: bool = False
    groups: int = 1


NOT_SPLIT = Way((TOKENS,))
WAYS = {
    "chunks": Way((70, 1, 129, 100), beside=True),
    "two-warpgroups": Way((TOKENS,), groups=2),
    "short-chunks": Way((TOKENS - 6, 5, 1), short=True),
    "short-own-splits": Way((TOKENS - 6, 5, 1), short=True, partials_bytes=0),
    "short-some-partials": Way((TOKENS - 3, 3), short=True, partials_bytes=9000, beside=True),
}
BOTH: dict[str, Any] = {"q_lens": (TOKENS, OTHER[0]), "kv_lens": (TOKENS, OTHER[1])}
CASES = {
    "plain": Case(q_lens=(TOKENS, OTHER[0]), kv_lens=(TOKENS, OTHER[1]), heads=(4, 2)),
    "window": Case(
        q_lens=(TOKENS, OTHER[0]), kv_lens=(TOKENS, OTHER[1]), heads=(2, 1), window=(150, None), softcap=5.0
    ),
    "fp8": Case(q_lens=(TOKENS, OTHER[0]), kv_lens=(TOKENS, OTHER[1]), heads=(2, 1), fp8=True, page=64, sinks=True),
}
QUICK = {("plain", "short-chunks"), ("plain", "short-own-splits"), ("window", "chunks")}


def kernel_of(problem: Problem, way: Way, speculative_max: bool) -> Any:
    target = replace(from_arch("sm_90a"), sm_count=SMS)
    dequant_stages = 2 if problem.spec.is_fp8_kv else 0
    config = configs.DenseConfig(
        groups=way.groups,
        tile_n=TILE_N,
        stages=2,
        dequant_stages=dequant_stages,
        speculative_max=speculative_max and not dequant_stages,
    )
    kind = launch.SplitKV if way.short else launch.Prefill
    return kind(problem.spec, target, Workspace(torch.device("cpu")), config)


def launches(problem: Problem, way: Way) -> Iterator[tuple[slice, Batch]]:
    """(the prompt's rows, the batch) of each launch; another request comes before the prompt."""
    assert problem.batch.block_table is not None
    begin = 0
    for chunk in way.chunks:
        end = begin + chunk
        # The split-KV kernel's first chunk is the cached prefix, which another launch wrote.
        if not (way.short and chunk > 16):
            lens, seen = ([OTHER[0], chunk], [OTHER[1], end]) if way.beside else ([chunk], [end])
            order = [1, 0] if way.beside else [0]
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


def rows_of(
    problem: Problem, way: Way, speculative_max: bool, seed: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(out, lse) of each of the prompt's rows that the way computes."""
    kernel, found = kernel_of(problem, way, speculative_max), {}
    for rows, batch in launches(problem, way):
        before = OTHER[0] if way.beside else 0
        other = problem.q[TOKENS : TOKENS + before]
        q = torch.cat([other, problem.q[rows]]).contiguous()
        out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2])
        extras = (problem.sinks, problem.alibi_slopes, problem.k_scale, problem.v_scale)
        operands = Operands(q, None, problem.keys, problem.values, out, lse, *extras)
        with emulator.device(arch="sm_90a", sms=SMS, schedule="lazy", seed=seed, strict=True):
            kernel.bind(batch, 1, batch.max_query_len)(operands)
        for i, row in enumerate(range(rows.start, rows.stop)):
            found[row] = out[before + i], lse[before + i]
    return found


def made(case: Case) -> Problem:
    return replace(case, batch_invariant=True).problem()


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of two key tiles, so that a short prompt has several."""
    monkeypatch.setattr(configs, "LEAST_SPLIT_KEYS", SPLIT)
    monkeypatch.setattr(configs, "MOST_SPLIT_KEYS", SPLIT)


def compare(case: Case, way: Way, speculative_max: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = made(case)
    whole = rows_of(problem, NOT_SPLIT, speculative_max[0], 1)
    monkeypatch.setattr(shared_launch, "MAX_PARTIALS_BYTES", way.partials_bytes)
    other = rows_of(problem, way, speculative_max[1], 2)
    assert other
    for row, (out, lse) in other.items():
        assert torch.equal(out, whole[row][0]), f"row {row} of out"
        assert torch.equal(lse, whole[row][1]), f"row {row} of lse"


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, marks=() if (case, way) in QUICK else (pytest.mark.full,))
        for case in CASES
        for way in WAYS
    ],
)
def test_division_into_launches_does_not_matter(case: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(CASES[case], WAYS[way], (True, True), monkeypatch)


def test_speculative_max_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speculative max gives the same bits as the exact one."""
    compare(CASES["plain"], replace(NOT_SPLIT, chunks=(128, TOKENS - 128)), (True, False), monkeypatch)


def test_the_prompt_is_right() -> None:
    case = Case(q_lens=(TOKENS,), kv_lens=(TOKENS,), heads=(2, 1))
    problem = made(case)
    result = check.empty_result(problem)
    for row, (out, lse) in rows_of(problem, NOT_SPLIT, True, 1).items():
        result.out[row], result.lse[row] = out, lse
    check.judge(result, problem.expected(), problem.score_magnitude())


def test_scratch_is_bounded() -> None:
    """Whatever the batch: 96 requests of 128k tokens took 33 GiB when it was not."""
    problem = made(CASES["plain"])
    batch = Batch(
        query_start_loc=torch.zeros(97, dtype=torch.int32),
        seq_lens=torch.zeros(96, dtype=torch.int32),
        num_tokens=8192,
        max_query_len=8192,
        max_seq_len=131072,
        block_table=torch.zeros(96, 1, dtype=torch.int32),
    )
    for short in (True, False):
        kernel = kernel_of(problem, Way((1,), short=short), True)
        kernel.bind(batch, 1, 16)
        workspace = kernel.workspace
        held = sum(buffer.nbytes for buffer in (workspace.partials(0), workspace.integers(0), *workspace._outgrown))
        assert held <= 256 << 20
