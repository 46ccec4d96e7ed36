# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant attention on the emulator: a request's results have the same bits alone and in any batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import emulator
from dsl_backend.attention import dispatch
from dsl_backend.attention.cute import fixed_splits
from dsl_backend.attention.cute.sm90 import dense_configs as sm90
from dsl_backend.attention.cute.sm90 import dense_host as sm90_launch
from dsl_backend.attention.cute.sm90 import mla_configs as mla_sm90
from dsl_backend.attention.cute.sm90 import mla_host as mla_sm90_launch
from dsl_backend.attention.cute.sm100 import dense_configs as sm100
from dsl_backend.attention.cute.sm100 import dense_host as sm100_launch
from dsl_backend.attention.cute.sm100 import mla_configs as mla_sm100
from dsl_backend.attention.cute.sm100 import mla_host as mla_sm100_launch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.protocol import Kernel, Operands
from dsl_backend.attention.spec import Batch
from dsl_backend.runtime.target import from_arch
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case, mla
from dsl_backend.testing.inputs import SENTINEL, Problem
from tests.attention.emulated import SCHEDULES, scratch

SMS = 8
DECODE = Case(q_lens=(1, 3, 0, 1, 2), kv_lens=(700, 200, 0, 33, 400), heads=(8, 2))
PREFILL = Case(q_lens=(70, 3, 0, 90), kv_lens=(200, 140, 0, 90), heads=(2, 1))
WIDE = Case(q_lens=(1, 2, 0, 1), kv_lens=(300, 100, 0, 33), heads=(4, 1), dim=512)
# Requests of several row tiles, of four tokens each and of one.
MLA = mla(16, (288, 256), q_lens=(1, 6, 0, 1), kv_lens=(420, 200, 0, 33))
MLA_128 = mla(128, (288, 256), q_lens=(2, 1), kv_lens=(200, 140), page=64)


@dataclass(frozen=True)
class Run:
    """A kernel of an SM: split-KV for short queries, or prefill for long ones."""

    id: str
    case: Case
    arch: str = "sm_90a"
    split: bool = True
    mla_config: Any = None
    dense_config: Any = None
    sms: int = SMS

    def kernel(self, spec: Any) -> Kernel:
        target = replace(from_arch(self.arch), sm_count=self.sms)
        if self.mla_config is not None:
            mla_launch: Any = mla_sm90_launch if self.arch == "sm_90a" else mla_sm100_launch
            assert not self.mla_config.objections(spec, target.smem_bytes)
            return mla_launch.MlaSplitKV(spec, target, scratch(), self.mla_config)
        launch: Any = sm90_launch if self.arch == "sm_90a" else sm100_launch
        dequant_stages, wide = 2 if spec.is_fp8_kv else 0, spec.head_dim > 256
        tile_n = 32 if wide else 64
        config: Any = sm90.DenseConfig(groups=1, tile_n=tile_n, stages=2, dequant_stages=dequant_stages)
        if self.dense_config is not None:
            config = self.dense_config
            assert not config.objections(spec, target.smem_bytes)
        elif self.arch != "sm_90a":
            config = sm100.DenseConfig(
                softmax_warpgroups=1 if self.split or spec.head_dim > 128 else 2,
                tile_n=tile_n,
                ex2_emulation=0,
                dequant_stages=dequant_stages,
            )
        made: Kernel = (launch.SplitKV if self.split else launch.Prefill)(spec, target, scratch(), config)
        return made


FEW_ROWS = replace(DECODE, q_lens=(1, 3, 0, 1, 6), kv_lens=(700, 200, 0, 33, 400))
SM90_FEW_ROWS = sm90.DenseConfig(groups=1, tile_n=64, stages=2, fold_few_rows=True)

RUNS = (
    Run("decode", DECODE),
    # Work tiles of up to 16 rows are folded in shared memory, larger ones in global memory.
    Run("decode-few-rows", FEW_ROWS, dense_config=SM90_FEW_ROWS),
    # One CTA has all splits.
    Run("decode-few-rows-one-cta", FEW_ROWS, dense_config=SM90_FEW_ROWS, sms=1),
    Run("decode-fp8", replace(DECODE, fp8=True, page=64, sinks=True)),
    Run("decode-window", replace(DECODE, window=(150, None), softcap=5.0)),
    Run("prefill", PREFILL, split=False),
    Run("prefill-fp8", replace(PREFILL, fp8=True, page=48), split=False),
    Run("decode-sm100", DECODE, "sm_100a"),
    Run("prefill-sm100", PREFILL, "sm_100a", split=False),
    Run("prefill-256-sm100", replace(PREFILL, dim=256), "sm_100a", split=False),
    Run("decode-sm100-fp8", replace(DECODE, fp8=True, page=64), "sm_100a"),
    Run("decode-512", WIDE),
    Run("decode-512-sm100", WIDE, "sm_100a"),
    Run("mla", MLA, mla_config=mla_sm90.MlaConfig(tile_n=32, stages=3)),
    # Work tiles of one token, which are folded beside Q, before and after larger ones. The combine kernel's tasks have
    # 128 columns in a batch, and 32 for one request.
    Run(
        "mla-fold-in-smem",
        replace(MLA, q_lens=(1, 6, 0, 1, 1, 1, 2), kv_lens=(420, 200, 0, 33, 500, 300, 290)),
        mla_config=mla_sm90.MlaConfig(
            tile_n=32, stages=3, speculative_max=True, fold_in_smem=True, combine_by_tasks=True
        ),
    ),
    # One CTA: Q of the second request is loaded to where the fold of the first one waits.
    Run(
        "mla-fold-before-larger-q",
        replace(MLA, q_lens=(1, 3), kv_lens=(150, 70)),
        mla_config=mla_sm90.MlaConfig(tile_n=32, stages=3, speculative_max=True, fold_in_smem=True),
        sms=1,
    ),
    Run("mla-128", MLA_128, mla_config=mla_sm90.MlaConfig(tile_n=32, stages=3, cluster=2)),
    # Tasks of 128 columns in the combine kernel, and more splits than it has in flight then.
    Run(
        "mla-128-combine",
        replace(MLA_128, kv_lens=(1170, 140)),
        mla_config=mla_sm90.MlaConfig(tile_n=32, stages=3, cluster=2, combine_many_rows=True, evict_first=True),
    ),
    Run(
        "mla-fp8",
        replace(MLA, fp8=True),
        mla_config=mla_sm90.MlaConfig(tile_n=32, dequant_stages=2),
    ),
    Run("mla-sm100", MLA, "sm_100a", mla_config=mla_sm100.MlaConfig(tile_n=32, stages=3)),
    Run("mla-128-sm100", MLA_128, "sm_100a", mla_config=mla_sm100.TwoCtaMlaConfig()),
)
QUICK = (
    "decode",
    "decode-few-rows",
    "prefill",
    "mla-fold-in-smem",
    "mla-fold-before-larger-q",
    "mla-128-combine",
    "mla-128-sm100",
)
EACH = [
    pytest.param(i, run, id=run.id, marks=() if run.id in QUICK else (pytest.mark.full,)) for i, run in enumerate(RUNS)
]


def made(case: Case, batch_invariant: bool) -> Problem:
    problem = case.problem()
    problem.spec = replace(problem.spec, batch_invariant=batch_invariant)
    return problem


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that requests have several."""
    monkeypatch.setattr(fixed_splits, "split_keys", lambda spec: 128)


def results(run: Run, problem: Problem, kernel: Kernel, requests: Sequence[int], index: int) -> check.Result:
    """Results of a batch of these requests of the problem, their rows one after the other."""
    starts = problem.batch.query_start_loc
    rows = torch.cat([torch.arange(int(starts[r]), int(starts[r + 1])) for r in requests])
    lens = torch.tensor([0, *(problem.q_lens[r] for r in requests)], dtype=torch.int32)
    assert problem.batch.block_table is not None
    batch = Batch(
        query_start_loc=lens.cumsum(0, dtype=torch.int32),
        seq_lens=problem.batch.seq_lens[list(requests)].contiguous(),
        num_tokens=len(rows),
        max_query_len=int(lens.max()),
        max_seq_len=problem.batch.max_seq_len,
        block_table=problem.batch.block_table[list(requests)].contiguous(),
    )
    result = check.empty_result(problem)
    result = check.Result(result.out[: len(rows)], result.lse[: len(rows)])
    operands = Operands(
        problem.q[rows].contiguous(),
        None,
        problem.keys,
        problem.values,
        result.out,
        result.lse,
        problem.sinks,
        problem.alibi_slopes,
        problem.k_scale,
        problem.v_scale,
    )
    schedule = SCHEDULES[index % len(SCHEDULES)]
    with emulator.device(arch=run.arch, sms=run.sms, schedule=schedule, seed=index, strict=True):
        kernel.bind(batch, 1, batch.max_query_len)(operands)
    return result


def of_request(result: check.Result, problem: Problem, requests: Sequence[int], request: int) -> list[torch.Tensor]:
    """[out, lse] of one request of a batch."""
    first = sum(problem.q_lens[r] for r in requests[: requests.index(request)])
    rows = slice(first, first + problem.q_lens[request])
    return [result.out[rows], result.lse[rows]]


def differing(run: Run, batch_invariant: bool, index: int) -> list[int]:
    """Requests whose results depend on the other requests of the batch."""
    problem = made(run.case, batch_invariant)
    kernel = run.kernel(problem.spec)
    there = [r for r, queries in enumerate(problem.q_lens) if queries]
    batches = [list(range(len(problem.q_lens))), there[::-1], there[1:], *([r] for r in there)]
    found = [(batch, results(run, problem, kernel, batch, index + i)) for i, batch in enumerate(batches)]
    differ = []
    for request in there:
        alone, *others = [of_request(result, problem, batch, request) for batch, result in found if request in batch][
            ::-1
        ]
        assert not any((part == SENTINEL).any() for part in alone)
        if not all(torch.equal(a, b) for other in others for a, b in zip(alone, other, strict=True)):
            differ.append(request)
    return differ


@pytest.mark.parametrize(("index", "run"), EACH)
def test_other_requests_do_not_matter(index: int, run: Run) -> None:
    assert differing(run, True, index) == []


def test_by_default_they_may() -> None:
    """Balanced split-KV splits a request's keys elsewhere when the batch has other requests."""
    assert differing(RUNS[0], False, 0) != []


@pytest.mark.parametrize(("index", "run"), EACH)
def test_results_are_right(index: int, run: Run) -> None:
    problem = made(run.case, True)
    everyone = list(range(len(problem.q_lens)))
    result = results(run, problem, run.kernel(problem.spec), everyone, index)
    expected = problem.expected()
    rows = len(result.out)
    judged = replace(expected, **{name: getattr(expected, name)[:rows] for name in vars(expected)})
    check.judge(result, judged, problem.score_magnitude()[:rows])


def test_a_fold_moves_the_rows_that_exist_in_vectors() -> None:
    """One CTA with five splits of one token: words would be four times the accesses, all rows eight times the bytes."""
    heads, dim, splits, sms = 4, 64, 5, 1
    case = Case(q_lens=(1,), kv_lens=(splits * 128,), heads=(heads, 1), dim=dim)
    problem = made(case, True)
    launch: Any = sm90_launch
    target = replace(from_arch("sm_90a"), sm_count=sms)
    config = sm90.DenseConfig(groups=1, tile_n=64, stages=2)
    kernel = launch.SplitKV(problem.spec, target, scratch(), config)
    result = check.empty_result(problem)
    operands = Operands(problem.q, None, problem.keys, problem.values, result.out, None, None, None, None, None)
    with emulator.device(arch="sm_90a", sms=sms, strict=True) as device:
        kernel.bind(problem.batch, 1, 1)(operands)
    attention = next(one for one in device.profile.kernels.values() if "DenseForward" in one.kernel)
    # A vector has two columns of a row that exists, and of the one 8 rows further. One more has row_max and row_sum.
    vectors = dim // 8 + 1
    folded_bytes = heads * 2 * dim * 4 + heads * 16
    others_bytes = heads * dim * 2 + 2 * 4 * (1 + heads)
    stored = attention.events["global bytes stored"]
    assert (splits - 1) * folded_bytes <= stored <= (splits - 1) * folded_bytes + others_bytes
    accesses = sum(
        int(executed[i])
        for i, instr in enumerate(attention.program.instrs)
        if instr.op.name == "st" and instr.op["space"] == "global"
        for executed in attention.executed.values()
    )
    # In words there would be four times as many.
    assert (splits - 1) * vectors <= accesses < 2 * (splits - 1) * vectors


@pytest.mark.parametrize("operation", [Operation.PREFILL, Operation.DECODE])
def test_triton_serves_other_gpus(operation: Operation) -> None:
    spec = made(DECODE, True).spec
    for arch in ("sm_90a", "sm_100a"):
        assert dispatch.choose(operation, spec, from_arch(arch)).name == "cute"
    assert dispatch.choose(operation, spec, from_arch("sm_80")).name == "triton"
