# SPDX-License-Identifier: Apache-2.0
"""The kernels against the float64 oracle: on a GPU, or those of Triton in its interpreter."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from dsl_backend.attention import api, dispatch
from dsl_backend.attention.plan import Planner
from dsl_backend.attention.protocol import Misaligned, Operands
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import Workspace
from dsl_backend.testing import check, kv_writes
from dsl_backend.testing.cases import CASES, FULL, Case, by_id, mla
from dsl_backend.testing.inputs import SENTINEL, Problem, Surroundings
from dsl_backend.testing.kv_writes import WRITES, WriteCase

MARKS = {"smoke": (), "full": (pytest.mark.full,), "gpu": (pytest.mark.gpu,)}

needs_triton = pytest.mark.skipif(
    not (torch.cuda.is_available() or targets.triton_interpreted()),
    reason="no CUDA device, and TRITON_INTERPRET is off",
)


@pytest.fixture(params=[pytest.param("triton", marks=needs_triton), pytest.param("cute", marks=pytest.mark.gpu)])
def kernel(request: pytest.FixtureRequest, device: torch.device) -> str:
    """The kernel under test, by its name in the dispatch table; skips cases that it is not meant for."""
    case = request.node.callspec.params.get("case")
    target = targets.detect(device)
    try:
        if isinstance(case, Case):
            Planner(case.spec, target, Workspace(device), request.param)
        elif isinstance(case, WriteCase):
            dispatch.choose(dispatch.Operation.WRITE_KV, case.spec, target, request.param)
    except Unsupported as refusal:
        pytest.skip(str(refusal))
    return str(request.param)


def parameters(cases: Sequence[Case] | Sequence[WriteCase]) -> list[object]:
    return [pytest.param(case, id=case.id, marks=MARKS[case.tier]) for case in cases]


@pytest.mark.parametrize("case", parameters(CASES))
def test_attention(case: Case, kernel: str, device: torch.device) -> None:
    check.check_case(case, kernel, device)


@pytest.mark.parametrize("case", parameters(WRITES))
def test_write_kv(case: WriteCase, kernel: str, device: torch.device) -> None:
    kv_writes.check_write(case, kernel, device)


def test_cases_are_sound() -> None:
    """Ids name one case each, every case has a reason, and the kernels claim to serve each of them."""
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids), "an id is used twice"
    assert len({case.id for case in WRITES}) == len(WRITES), "an id is used twice"
    target = targets.from_arch("sm_90a")
    for case in CASES:
        assert case.why, case.id
        for operation in dispatch.operations_of(case.spec):
            assert dispatch.choose(operation, case.spec, target, "triton").name == "triton", case.id


# Results that depend on nothing but the inputs


def bits(result: check.Result) -> torch.Tensor:
    return torch.cat([result.out.view(torch.int16).flatten(), result.lse.contiguous().view(torch.int16).flatten()])


@pytest.mark.parametrize(
    "case",
    parameters(
        [
            by_id("mixed"),
            by_id("splits-many"),
            by_id("splits-mla"),
            *(by_id(f"real-{name}") for name in ("decode-skewed", "decode-long", "mixed", "mla-16", "speculative")),
        ]
    ),
)
def test_repeats_bitwise(case: Case, kernel: str, device: torch.device) -> None:
    """The same inputs give the same bits: merging does not depend on which program was last."""
    problem = case.problem(device)
    adjust = check.forced(case)
    first = bits(check.run(problem, kernel, split_q=case.split_q, adjust=adjust))
    for attempt in range(1 if device.type == "cpu" else 99):
        again = bits(check.run(problem, kernel, split_q=case.split_q, adjust=adjust))
        assert torch.equal(first, again), f"run {attempt + 2} differs from the first"


@pytest.mark.parametrize("name", ["mixed", "at-the-limit", pytest.param("real-mixed", marks=pytest.mark.gpu)])
def test_kernels_keep_to_their_requests(name: str, kernel: str, device: torch.device) -> None:
    """Where two kernels share a batch, each serves the query lengths it was given and writes no other row."""
    case = by_id(name)
    problem = case.problem(device)
    expected, magnitude = problem.expected(), problem.score_magnitude()
    plan = api.plan(problem.spec, problem.batch, kernel=kernel)
    assert len(plan.parts) == 2
    q_lens = torch.tensor(case.q_lens)
    of_row = torch.zeros(len(expected.owned), dtype=torch.int64)
    of_row[: int(q_lens.sum())] = q_lens.repeat_interleave(q_lens)
    for part in plan.parts:
        result = check.empty_result(problem)
        check.launch(dataclasses.replace(plan, parts=(part,)), problem, result)
        mine = ((of_row >= max(1, part.min_seqlen_q)) & (of_row <= part.max_seqlen_q)).to(device)
        assert mine.any(), f"{part.operation} has nothing to do"
        check.judge(result, dataclasses.replace(expected, owned=mine), magnitude)


def test_scratch_is_shared(kernel: str, device: torch.device) -> None:
    """One workspace serves problem after problem, larger and smaller: nothing of a launch leaks into the next."""
    workspace = Workspace(device)
    for name in ("splits-uneven", "splits-mla", "splits-uneven", "mixed"):
        check.check_case(by_id(name), kernel, device, workspace=workspace)


def test_stale_scratch_does_not_matter(kernel: str, device: torch.device) -> None:
    """Partial results of earlier launches, NaN here, are never read as this one's."""
    case = by_id("splits-uneven")
    workspace = Workspace(device)
    check.check_case(case, kernel, device, workspace=workspace)
    workspace.partials(1).fill_(float("nan"))
    check.check_case(case, kernel, device, workspace=workspace)


@pytest.mark.parametrize("name", ["mixed", "splits-many", "mla-8-ragged"])
def test_without_lse(name: str, kernel: str, device: torch.device) -> None:
    """Leaving lse out changes no output."""
    case = by_id(name)
    problem = case.problem(device)
    planner = Planner(problem.spec, targets.detect(device), Workspace(device), kernel)
    adjust = check.forced(case)
    if adjust is not None:
        adjust(planner)
    result = check.empty_result(problem)
    plan = planner.plan(problem.batch)
    api.run(plan, problem.q, problem.keys, problem.values, out=result.out, **problem.extras)
    with_lse = check.empty_result(problem)
    check.launch(plan, problem, with_lse)
    assert torch.equal(result.out, with_lse.out)
    assert (result.lse == SENTINEL).all()


def test_strided_output(kernel: str, device: torch.device) -> None:
    """Out may be a slice of wider rows, as it is where two attentions write side by side."""
    problem = by_id("mixed").problem(device)
    expected = problem.expected()
    rows, heads, dim = problem.q.shape
    wide = torch.full((rows, heads * 2, dim), SENTINEL, dtype=problem.spec.dtype, device=device)
    result = check.Result(wide[:, heads:], torch.full((rows, heads), SENTINEL, device=device))
    plan = api.plan(problem.spec, problem.batch, kernel=kernel)
    check.launch(plan, problem, result)
    check.judge(result, expected, problem.score_magnitude())
    assert (wide[:, :heads] == SENTINEL).all(), "the neighbour's half was written"


# An older chip's paths on a newer one


OLDER = targets.from_arch("sm_80")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["fp8-bf16", "fp8-fp16", "mla-fp8", "mixed", "splits-sinks-fp8", "real-decode-fp8", "fp8-out-splits"]
)
def test_as_on_an_older_chip(name: str, device: torch.device) -> None:
    """Without its own conversion from e4m3, and without launches that overlap."""
    case = by_id(name)
    problem = case.problem(device)
    result = check.run(problem, "triton", split_q=case.split_q, adjust=check.forced(case), target=OLDER)
    check.judge(result, problem.expected(), problem.score_magnitude())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in WRITES if case.fp8], ids=lambda case: case.id)
def test_write_as_on_an_older_chip(case: WriteCase, device: torch.device) -> None:
    """Without its own conversion to e4m3."""
    kv_writes.check_write(case, "triton", device, OLDER)


# Lengths that change under a plan


REFILLS = [
    pytest.param(
        Case(q_lens=(3, 3, 3, 3), kv_lens=(90, 90, 90, 90)),
        [((1, 1, 1, 1), (5, 90, 33, 16)), ((2, 3), (70, 3)), ((), ()), ((0, 1, 0, 2), (0, 64, 0, 65))],
        id="short",
    ),
    pytest.param(
        Case(q_lens=(20, 20, 20), kv_lens=(40, 40, 40)),
        [((1, 1, 30), (40, 9, 30)), ((17, 0, 20), (40, 0, 20)), ((1,), (1,))],
        id="mixed",
    ),
    pytest.param(
        mla(16, q_lens=(2, 2, 2), kv_lens=(50, 50, 50)),
        [((1, 1, 1), (50, 9, 30)), ((2, 1), (33, 20))],
        id="mla",
    ),
    pytest.param(
        Case(q_lens=(1,) * 64, kv_lens=(8192,) * 64, heads=(32, 8), dim=128),
        [
            ((1,) * 64, tuple(1 + 117 * i for i in range(64))),
            ((1,) * 3, (8192, 1, 77)),
            ((1,), (8192,)),
            ((), ()),
            ((1,) * 64, (8192,) * 64),
        ],
        id="real-decode",
        marks=pytest.mark.gpu,
    ),
    pytest.param(
        Case(q_lens=(512,) * 4, kv_lens=(4096,) * 4, heads=(32, 8), dim=128),
        [((1, 1, 1, 900), (4096, 50, 777, 900)), ((512, 300, 0, 1), (3000, 300, 0, 4096))],
        id="real-mixed",
        marks=pytest.mark.gpu,
    ),
    pytest.param(
        mla(128, q_lens=(4,) * 16, kv_lens=(4096,) * 16, page=64),
        [((1,) * 16, tuple(1 + 250 * i for i in range(16))), ((4, 1, 2), (4096, 77, 2))],
        id="real-mla",
        marks=pytest.mark.gpu,
    ),
]
# Bounds far above what follows: what a graph is captured with.
BOUNDS = Surroundings(max_query_len=1000, max_seq_len=8192, padding_tokens=5)


def captured(problem: Problem, kernel: str) -> tuple[check.Result, torch.cuda.CUDAGraph | None, api.AttentionPlan]:
    """A plan, and on a GPU a graph of its launch into the result."""
    plan = api.plan(problem.spec, problem.batch, kernel=kernel)
    result = check.empty_result(problem)
    if problem.device.type == "cpu":
        return result, None, plan
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate before the capture
        check.launch(plan, problem, result)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        check.launch(plan, problem, result)
    return result, graph, plan


@pytest.mark.parametrize(("case", "steps"), REFILLS)
def test_lengths_change_under_a_plan(
    case: Case, steps: list[tuple[tuple[int, ...], tuple[int, ...]]], kernel: str, device: torch.device
) -> None:
    """A plan, or a graph captured with it, serves other lengths, pages and numbers in the same tensors."""
    problem = dataclasses.replace(case, around=BOUNDS).problem(device)
    result, graph, plan = captured(problem, kernel)
    for seed, (q_lens, kv_lens) in enumerate(steps, start=1):
        problem.fill(q_lens, kv_lens, seed)
        result.out.fill_(SENTINEL)
        result.lse.fill_(SENTINEL)
        if graph is None:
            check.launch(plan, problem, result)
        else:
            graph.replay()
        check.judge(result, problem.expected(), problem.score_magnitude())


@pytest.mark.gpu
def test_run_does_not_wait_for_the_device(kernel: str, device: torch.device) -> None:
    """Neither plan nor run reads a length back: torch would raise."""
    problem = by_id("real-mixed").problem(device)
    result = check.run(problem, kernel)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = api.plan(problem.spec, problem.batch, kernel=kernel)
        check.launch(plan, problem, result)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Large memories


FAR = Surroundings(spare_pages=70_000, padding_tokens=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(id="decode", q_lens=(1, 2), kv_lens=(700, 33), heads=(32, 8), dim=128, around=FAR),
        Case(id="prefill", q_lens=(200, 40), kv_lens=(700, 40), heads=(32, 8), dim=128, around=FAR),
        mla(16, id="mla", q_lens=(1, 2), kv_lens=(700, 33), page=64, around=FAR),
        Case(
            id="packed",
            q_lens=(1, 40),
            kv_lens=(1_100_000, 40),
            heads=(8, 8),
            dim=128,
            page=None,
            causality=FULL,
        ),
    ],
    ids=lambda case: case.id,
)
def test_offsets_past_31_bits(case: Case, kernel: str, device: torch.device) -> None:
    """Keys that lie more than 2^31 elements into their tensor."""
    problem = case.problem(device)
    last = sum((n - 1) * stride for n, stride in zip(problem.keys.shape, problem.keys.stride(), strict=True))
    assert last > 2**31, "the case is too small for its purpose"
    check.check(problem, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [WriteCase(id="far", tokens=200, pages=70_000, heads=8, dim=128, dim_v=128)])
def test_write_past_31_bits(case: WriteCase, kernel: str, device: torch.device) -> None:
    kv_writes.check_write(case, kernel, device)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element behind a multiple of 16 bytes."""
    room = tensor.new_empty(tensor.numel() + 1)
    moved = room[1:].view(tensor.shape)
    moved.copy_(tensor)
    return moved


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixed", "mla-8-ragged"])
def test_unaligned_tensors_are_served(name: str, device: torch.device) -> None:
    """By default whatever a kernel cannot take as it lies in memory goes to one that can."""
    case = by_id(name)
    problem = case.problem(device)
    problem.q = unaligned(problem.q)
    result = check.empty_result(problem)
    check.launch(api.plan(problem.spec, problem.batch), problem, result)
    check.judge(result, problem.expected(), problem.score_magnitude())


@needs_triton
def test_a_misaligned_launch_is_taken_over(device: torch.device) -> None:
    """The kernel that takes any alignment serves the whole batch, and one asked for by name never does so."""
    target = targets.detect(device)

    def refuse(operands: Operands) -> None:
        raise Misaligned("q begins at 0x2 and has strides of [2] bytes: multiples of 16 are needed")

    problem = by_id("mixed").problem(device)
    for kernel in (None, "triton"):
        planner = Planner(problem.spec, target, Workspace(device), kernel)
        plan = planner.plan(problem.batch)
        parts = tuple(dataclasses.replace(part, launch=refuse) for part in plan.parts)
        plan = dataclasses.replace(plan, parts=parts)
        result = check.empty_result(problem)
        if kernel is not None:
            with pytest.raises(InvalidInput, match="q begins at 0x2"):
                check.launch(plan, problem, result)
            continue
        check.launch(plan, problem, result)
        check.judge(result, problem.expected(), problem.score_magnitude())
