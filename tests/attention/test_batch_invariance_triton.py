# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant attention in Triton: a row is the same bits in any company, chunk and schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dsl_backend.attention import api, dispatch
from dsl_backend.attention.dispatch import Operation
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Operands
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.attention.triton.batch_invariant import BatchInvariant
from dsl_backend.attention.triton.configs import BatchInvariantConfig
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.target import from_arch
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check
from dsl_backend.testing.cases import Case, mla
from dsl_backend.testing.inputs import SENTINEL, Problem

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or targets.triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)

# (request, first query, one past the last): queries of a request that one step processes, all keys before them cached.
Chunk = tuple[int, int, int]
# A request's rows: out, lse.
Rows = tuple[torch.Tensor, torch.Tensor]
ALWAYS_SPLIT = 1 << 10


@pytest.fixture(autouse=True)
def arithmetic_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's interpreter computes otherwise than a GPU.

    tl.fma rounds once: with two roundings a sum's order would not matter. A row of tl.dot has the same bits wherever it
    is in its tile: numpy's float32 products have not, on processors whose BLAS has several kernels for a product.
    """
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    create_dot = InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        zeros = TensorHandle(np.zeros(d.data.shape, np.float64), tl.float64)
        product = create_dot(self, a, b, zeros, *options).data
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@dataclass(frozen=True)
class Run:
    """Requests whose prompts have `case.kv_lens` tokens, and how these are chunked.

    Attributes:
        chunks: tokens of the first steps of a request; the rest follows in one step.
        decoded: tokens at the end of a prompt that are processed one by one.
        company: how often the requests are repeated in a batch.
        gpu, full: the test's marks.
    """

    id: str
    case: Case
    chunks: tuple[tuple[int, ...], ...] = ((5, 1), (32, 16))
    decoded: int = 3
    company: int = 1
    gpu: bool = False
    full: bool = False

    @property
    def chunkable(self) -> bool:
        """Whether a row sees the same keys in every chunk."""
        return self.case.causality is Causality.CAUSAL and self.case.causal is None


def prompts(*lengths: int, **facts: Any) -> Case:
    return Case(q_lens=lengths, kv_lens=lengths, **facts)


def mla_prompts(heads: int, dims: tuple[int, int], *lengths: int, **facts: Any) -> Case:
    return mla(heads, dims, q_lens=lengths, kv_lens=lengths, **facts)


LENGTHS = (66, 10, 37)
LONG = (9100, 700, 3000, 1)
# The partial results of all requests of a batch, and the reference's scores, take up to 3 GiB.
ON_GPU: dict[str, Any] = {"chunks": ((512,) * 17, (8192,), (1000, 1, 3)), "decoded": 8, "company": 4, "gpu": True}
RUNS = (
    Run("gqa", prompts(40, 10, 37, heads=(4, 2)), decoded=2),
    Run("window", prompts(*LENGTHS, window=(33, None), dim=80, heads=(3, 1)), chunks=((5, 1),)),
    Run(
        "softcap-sinks-alibi",
        prompts(*LENGTHS, heads=(2, 1), softcap=5.0, sinks=True, alibi=True, q_gain=3.0),
        full=True,
    ),
    Run("fp8", prompts(40, 37, fp8=True, page=32, heads=(2, 1)), chunks=((5, 1),), full=True),
    Run("packed", prompts(*LENGTHS, page=None, window=(33, None), heads=(2, 1)), chunks=((5, 1),), full=True),
    Run("full", prompts(40, 37, heads=(2, 1), causality=Causality.FULL)),
    Run("per-request", prompts(40, 37, heads=(2, 1), causal=(True, False))),
    Run("mla", mla_prompts(3, (288, 256), 37, 34), chunks=((5, 1),), decoded=1),
    Run("mla-fp8", mla_prompts(2, (288, 256), 37, 34, fp8=True), chunks=((5, 1),), decoded=1, full=True),
    Run("gqa-gpu", prompts(*LONG, heads=(8, 2), dim=128), **ON_GPU),
    Run("window-gpu", prompts(*LONG, heads=(8, 1), dim=128, window=(1023, None), sinks=True), **ON_GPU),
    Run("score-mods-gpu", prompts(*LONG, heads=(4, 2), dim=256, softcap=30.0, alibi=True), **ON_GPU),
    Run("fp8-gpu", prompts(*LONG, heads=(8, 2), dim=128, fp8=True), **ON_GPU),
    Run("mla-gpu", mla_prompts(16, (576, 512), 2100, 700, 1, page=64), **ON_GPU),
)


def marks(run: Run) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.gpu,) if run.gpu else (pytest.mark.full,) if run.full else ()


EACH = [pytest.param(run, id=run.id, marks=marks(run)) for run in RUNS]
CHUNKED = [parameter for parameter, run in zip(EACH, RUNS, strict=True) if run.chunkable]


def made(run: Run, device: torch.device) -> Problem:
    return replace(run.case, batch_invariant=True).problem(device)


def kernel_of(problem: Problem, **changes: Any) -> BatchInvariant:
    """With its default configuration, or parts of it that may change no result."""
    target = targets.detect(problem.device)
    config = replace(BatchInvariantConfig.default(problem.spec, target), **changes)
    return BatchInvariant(problem.spec, target, Workspace(problem.device), config)


def batch_of(problem: Problem, chunks: Sequence[Chunk]) -> Batch:
    index = torch.tensor([request for request, _, _ in chunks], device=problem.device)
    lengths = torch.tensor([0, *(stop - first for _, first, stop in chunks)])
    table, starts, causal = problem.batch.block_table, problem.batch.kv_start_loc, problem.batch.causal
    return Batch(
        query_start_loc=lengths.cumsum(0).to(problem.device, torch.int32),
        seq_lens=torch.tensor([stop for _, _, stop in chunks], dtype=torch.int32, device=problem.device),
        num_tokens=int(lengths.sum()),
        max_query_len=int(lengths.max()),
        max_seq_len=problem.batch.max_seq_len,
        block_table=None if table is None else table[index].contiguous(),
        # Where each request's keys begin: its end is its length's business.
        kv_start_loc=None if starts is None else torch.cat([starts[index], starts[-1:]]),
        causal=None if causal is None else causal[index],
    )


def step(problem: Problem, kernel: BatchInvariant, chunks: Sequence[Chunk]) -> list[Rows]:
    """Each chunk's rows, of a step that processes these chunks."""
    starts = problem.batch.query_start_loc.tolist()
    rows = torch.cat([torch.arange(starts[r] + first, starts[r] + stop) for r, first, stop in chunks])
    q = problem.q[rows.to(problem.device)].contiguous()
    spec = problem.spec
    # float32, which the kernels store too: 16 bits would hide sums that were rounded in another order.
    out = torch.full((len(rows), spec.heads_q, spec.head_dim_v), SENTINEL, device=q.device)
    lse = torch.full((len(rows), spec.heads_q), SENTINEL, device=q.device)
    operands = Operands(
        q,
        None,
        problem.keys,
        problem.values,
        out,
        lse,
        problem.sinks,
        problem.alibi_slopes,
        problem.k_scale,
        problem.v_scale,
    )
    batch = batch_of(problem, chunks)
    kernel.bind(batch, 0, batch.max_query_len)(operands)
    lengths = [stop - first for _, first, stop in chunks]
    return list(zip(out.split(lengths), lse.split(lengths), strict=True))


def whole(problem: Problem, requests: Sequence[int]) -> list[Chunk]:
    return [(request, 0, problem.q_lens[request]) for request in requests]


def alone(problem: Problem) -> list[Rows]:
    """Every request in a step of its own, with all of its prompt."""
    kernel = kernel_of(problem)
    return [step(problem, kernel, [chunk])[0] for chunk in whole(problem, range(len(problem.q_lens)))]


def chunked(length: int, sizes: Sequence[int], decoded: int) -> Iterator[tuple[int, int]]:
    """Steps of a prompt: chunks of these sizes, what is left in one, and the last tokens one by one."""
    first = 0
    for size in (*sizes, length, *(1,) * decoded):
        stop = min(first + size, length if size == 1 else max(first, length - decoded))
        if stop > first:
            yield first, stop
        first = stop


def split_row_tiles(kernel: BatchInvariant) -> int:
    """How many row tiles of the last launch had their splits in several programs."""
    return int(kernel.scratch().combines[0])


def scratch_of(problem: Problem, requests: Sequence[int], more: int = 0) -> int:
    """Bytes of scratch for all splits of these prompts, and for `more` partial results."""
    kernel, partials = kernel_of(problem), more
    for length in (problem.q_lens[request] for request in requests):
        splits = -(-length // (kernel.config.tiles_per_split * kernel.config.block_n))
        row_tiles = -(-length * problem.spec.group // kernel.config.block_m)
        partials += problem.spec.heads_kv * row_tiles * splits if splits > 1 else 0
    return partials * kernel.rows_of_partial(max(problem.q_lens)) * (kernel.dv + 2) * 4


def assert_same(found: Rows, expected: Rows, first: int, stop: int) -> None:
    for name, mine, theirs in zip(("out", "lse"), found, expected, strict=True):
        assert torch.equal(mine, theirs[first:stop]), f"{name} of queries {first} to {stop} has other bits"


@pytest.mark.parametrize("run", EACH)
def test_company_and_schedule_do_not_matter(run: Run, device: torch.device) -> None:
    """Scratch for no split, for some and for all; requests in both orders, and many times."""
    problem = made(run, device)
    expected = alone(problem)
    order = list(range(len(problem.q_lens))) * run.company
    counts = []
    for scratch_bytes in (0, scratch_of(problem, order, -1), scratch_of(problem, order)):
        kernel = kernel_of(problem, split_factor=ALWAYS_SPLIT, scratch_bytes=scratch_bytes)
        for batch in (order, order[::-1]):
            for chunk, rows in zip(whole(problem, batch), step(problem, kernel, whole(problem, batch)), strict=True):
                assert_same(rows, expected[chunk[0]], 0, chunk[2])
        counts.append(split_row_tiles(kernel))
    assert counts[0] == 0
    assert 0 < counts[1] < counts[2], counts


@pytest.mark.parametrize("run", CHUNKED)
def test_chunks_and_cached_prefixes_do_not_matter(run: Run, device: torch.device) -> None:
    """Chunks of one request after the other, beside another request's prompt, and as splits of many programs."""
    problem = made(run, device)
    expected = alone(problem)
    other: Chunk = (1, 0, problem.q_lens[1])
    for sizes in run.chunks:
        for kernel in (kernel_of(problem), kernel_of(problem, split_factor=ALWAYS_SPLIT)):
            for first, stop in chunked(problem.q_lens[0], sizes, run.decoded):
                mine, theirs = step(problem, kernel, [(0, first, stop), other])
                assert_same(mine, expected[0], first, stop)
                assert_same(theirs, expected[1], 0, other[2])
    tails: list[Chunk] = [(r, max(0, n - 1 - r), n) for r, n in enumerate(problem.q_lens)]
    for (request, first, stop), rows in zip(tails, step(problem, kernel_of(problem), tails), strict=True):
        assert_same(rows, expected[request], first, stop)


@pytest.mark.parametrize("run", EACH)
@pytest.mark.parametrize("splits", [False, True])
def test_results_are_right(run: Run, splits: bool, device: torch.device) -> None:
    problem = made(run, device)
    order = range(len(problem.q_lens))
    changes = {"scratch_bytes": scratch_of(problem, order), "split_factor": ALWAYS_SPLIT if splits else 0}
    kernel = kernel_of(problem, **changes)
    found = step(problem, kernel, whole(problem, order))
    assert (split_row_tiles(kernel) > 0) is splits
    expected = problem.expected()
    rows = sum(problem.q_lens)
    judged = replace(expected, **{name: getattr(expected, name)[:rows] for name in vars(expected)})
    result = check.Result(
        torch.cat([out for out, _ in found]).to(problem.spec.dtype), torch.cat([lse for _, lse in found])
    )
    check.judge(result, judged, problem.score_magnitude()[:rows])


@pytest.mark.parametrize(
    "case",
    [
        Case(q_lens=(1, 0, 3, 0, 40), kv_lens=(70, 0, 33, 12, 90), window=(20, None)),
        Case(q_lens=(2, 1, 0), kv_lens=(0, 65, 0), sinks=True),
        mla(3, (288, 256), q_lens=(1, 0, 2), kv_lens=(70, 0, 33), split_q=True),
    ],
    ids=["padding", "no-keys", "mla-two-parts"],
)
def test_a_plan_serves_mixed_batches(case: Case, device: torch.device) -> None:
    """Through the plain API: padding, requests without keys, queries in two parts. One kernel serves all lengths."""
    problem = replace(case, batch_invariant=True).problem(device)
    plan = api.plan(problem.spec, problem.batch, kernel="triton")
    assert [type(part.kernel) for part in plan.parts] == [BatchInvariant]
    result = check.empty_result(problem)
    check.launch(plan, problem, result, split_q=case.split_q)
    check.judge(result, problem.expected(), problem.score_magnitude())


@pytest.mark.gpu
def test_a_graph_replays_other_lengths(device: torch.device) -> None:
    """Captured with bounds alone: one long prompt, decode steps, and padding give the bits of steps without a graph."""
    case = Case(q_lens=(64,) * 8, kv_lens=(64,) * 8, heads=(8, 2), dim=128)
    case = replace(case, around=replace(case.around, max_query_len=512, max_seq_len=8192, spare_pages=5000))
    problem = replace(case, batch_invariant=True).problem(device)
    kernel = kernel_of(problem)
    result = check.empty_result(problem)
    operands = Operands(problem.q, None, problem.keys, problem.values, result.out, result.lse, None, None, None, None)
    launch = kernel.bind(problem.batch, 0, problem.batch.max_query_len)
    launch(operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(operands)
    lengths: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((512,), (4000,)),
        ((1,) * 8, (8000, 1, 17, 4000, 512, 513, 100, 64)),
        ((300, 1, 1, 90), (300, 8000, 70, 5000)),
    ]
    for seed, (q_lens, kv_lens) in enumerate(lengths):
        problem.fill(q_lens, kv_lens, seed)
        result.out.fill_(SENTINEL)
        result.lse.fill_(SENTINEL)
        graph.replay()
        check.judge(result, problem.expected(), problem.score_magnitude())
        graph_out = result.out[: sum(q_lens)].clone()
        starts = problem.batch.query_start_loc.tolist()
        for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            batch = replace(
                batch_of(problem, [(request, kv_len - q_len, kv_len)]), max_seq_len=problem.batch.max_seq_len
            )
            rows = slice(starts[request], starts[request] + q_len)
            alone_out = torch.full_like(graph_out[rows], SENTINEL)
            kernel.bind(batch, 0, q_len)(operands._replace(q=problem.q[rows].contiguous(), out=alone_out, lse=None))
            assert torch.equal(alone_out, graph_out[rows])


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)])
@pytest.mark.parametrize("fp8", [False, True])
def test_scratch_is_bounded_and_tiles_fit(arch: str, dims: tuple[int, int], fp8: bool) -> None:
    """128 MiB of partial results whatever the batch; tiles that the spec decides and a batch does not."""
    target = from_arch(arch)
    case = prompts(1, heads=(32, 8), dim=dims[0], dim_v=dims[1], fp8=fp8, dtype=torch.float16, batch_invariant=True)
    config = BatchInvariantConfig.default(case.spec, target)
    assert config.scratch_bytes <= 128 << 20
    assert config.tiles_per_split * config.block_n == 512
    assert config.fits(case.spec, target) or not target.native_bf16


@pytest.mark.parametrize("operation", [Operation.PREFILL, Operation.DECODE])
def test_it_is_chosen_where_nothing_better_is(operation: Operation) -> None:
    spec: AttentionSpec = prompts(1, heads=(32, 8), dim=128, batch_invariant=True).spec
    target = from_arch("sm_80")
    entry = dispatch.choose(operation, spec, target)
    assert entry.name == "triton"
    scratch = Workspace(torch.device("meta"))
    assert type(entry.load()(spec, target, scratch)) is BatchInvariant
    assert scratch.partials(0).numel() * 4 == 128 << 20
    assert scratch.integers(0).numel() * 4 < 8 << 20


def test_two_kinds_of_kernels_never_share_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best kernel serves short queries alone, chunks of a prompt would get sums of two kinds."""
    pytest.importorskip("cutlass", reason="no CuTe DSL kernel to choose")
    problem = Case(q_lens=(1,), kv_lens=(40,), batch_invariant=True).problem()
    target, workspace = from_arch("sm_90a"), Workspace(torch.device("cpu"))
    assert {name for _, name, _ in Planner(problem.spec, target, workspace).kernels} == {"cute"}
    judged = dispatch.TABLE[Operation.PREFILL]
    refusing = tuple(
        replace(entry, objections=lambda spec, target: ["refuses"]) if entry.name == "cute" else entry
        for entry in judged
    )
    monkeypatch.setitem(dispatch.TABLE, Operation.PREFILL, refusing)
    planner = Planner(problem.spec, target, workspace)
    assert {name for _, name, _ in planner.kernels} == {"triton"}
    assert planner.short[2].max_query_len_served() is None
    ordinary = Planner(replace(problem.spec, batch_invariant=False), target, workspace)
    assert {name for _, name, _ in ordinary.kernels} == {"cute", "triton"}
