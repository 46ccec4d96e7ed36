# SPDX-License-Identifier: Apache-2.0
"""Triton's ratio test over rows of several blocks gives the definition's tokens, from any workspace."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from dsl_backend.runtime.target import detect
from dsl_backend.sampling.triton import verification as kernels
from dsl_backend.sampling.triton import verification_host as host
from dsl_backend.sampling.verification import Known
from dsl_backend.sampling.verification_spec import Verified
from dsl_backend.testing.verification import Step, random_step

# Of a GPU with which 1300 logits are three blocks, the last one in part.
SMS, VOCAB = 6, 1300
NAMES = ("sum_of_blocks", "filter_rows", "accept_drafts", "rest_of_blocks")


def verifier_of(step: Step, device: torch.device) -> host.TritonVerifier:
    """Whose workspace holds the worst that a step before can leave; only counts of programs are zero."""
    target = replace(detect(device), sm_count=SMS) if device.type == "cpu" else detect(device)
    verifier = host.TritonVerifier(step.spec, target, step.drafts.requests, len(step.drawn.tokens), device)
    workspaces: list[tuple[torch.Tensor | None, ...]] = [verifier.filtered._replace(arrivals=None)]
    if step.spec.known is not Known.TOKENS:
        workspaces.append(verifier.filters.workspace)
    for tensor in (one for workspace in workspaces for one in workspace):
        if tensor is not None:
            tensor.fill_(torch.inf if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 4)
    return verifier


def difference(step: Step, device: torch.device, verifier: host.TritonVerifier | None = None) -> list[str]:
    """What is not the definition's, with a new verifier by default."""
    verifier = verifier or verifier_of(step, device)
    requests = step.drafts.requests
    out = Verified(
        torch.full((requests, step.spec.max_drafts + 1), -7, dtype=step.spec.token_dtype, device=device),
        torch.full((requests,), -7, dtype=torch.int32, device=device),
    )
    verifier.launch(*step.given, step.logits, out)
    tokens, counts = step.expected()
    wrong = [] if torch.equal(out.counts, counts) else [f"counts {out.counts.tolist()} for {counts.tolist()}"]
    return wrong if torch.equal(out.tokens.long(), tokens) else [*wrong, f"{out.tokens.tolist()} for {tokens.tolist()}"]


def test_blocks() -> None:
    """One row has a program for half of the SMs at most, if its blocks are as small as that allows."""
    assert [host.block_of(vocab, 132) for vocab in (1, 32000, 128256, 201088, 2**21)] == [512, 512, 2048, 4096, 4096]
    assert host.block_of(128256, 0) == 4096
    assert host.block_of(VOCAB, SMS) == 512


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 22))])
@pytest.mark.parametrize(
    ("known", "dtype", "draft_vocab"),
    [
        (Known.LOGITS, torch.float32, None),
        # The last blocks have no draft logits.
        (Known.LOGITS, torch.bfloat16, 500),
        (Known.PROBABILITIES, torch.float32, 700),
    ],
)
def test_rows_of_three_blocks(
    known: Known, dtype: torch.dtype, draft_vocab: int | None, seed: int, device: torch.device
) -> None:
    step = random_step(seed, known, VOCAB, device, dtype, draft_vocab=draft_vocab, filters=())
    assert difference(step, device) == []


@pytest.mark.parametrize(
    ("known", "filters"),
    [
        (Known.LOGITS, ("min_p",)),
        (Known.PROBABILITIES, ("min_p",)),
        pytest.param(Known.LOGITS, ("top_p",), marks=pytest.mark.full),
        pytest.param(Known.LOGITS, ("top_k", "top_p"), marks=pytest.mark.full),
        pytest.param(Known.PROBABILITIES, ("top_k", "top_p", "min_p"), marks=pytest.mark.full),
    ],
)
def test_filtered_rows(known: Known, filters: tuple[str, ...], device: torch.device) -> None:
    """Logits are rounded, so that many are ties of the last one that is kept."""
    step = rounded(random_step(2, known, 600, device, filters=filters))
    assert difference(step, device) == []


def rounded(step: Step) -> Step:
    return replace(step, logits=step.logits.round())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(dtype: torch.dtype, device: torch.device) -> None:
    """Of the target, as a part of padded rows."""
    step = random_step(5, Known.LOGITS, VOCAB, device, filters=())
    padded = torch.nn.functional.pad(step.logits.to(dtype), (0, 36), value=99.0)
    assert difference(replace(step, logits=padded[:, :VOCAB]), device) == []


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_programs_of_several_blocks(chunks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many rows; which blocks a program has changes no bit."""
    found: Launches = {}
    monkeypatch.setattr(host, "sum_of_blocks", Recorded("sum_of_blocks", found))
    step = random_step(6, Known.LOGITS, VOCAB, device, draft_vocab=1100, filters=())
    # The grid would have 240 programs.
    monkeypatch.setattr(host, "PROGRAMS_OF_SM", 240 // (SMS * chunks) if device.type == "cpu" else host.PROGRAMS_OF_SM)
    assert difference(step, device) == []
    if device.type == "cpu":
        assert found["sum_of_blocks"] == [(40, -(-3 // chunks), 2)]


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_a_vocabulary_of_one_token(known: Known, device: torch.device) -> None:
    assert difference(random_step(0, known, 1, device, filters=()), device) == []


@pytest.mark.full
@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_a_real_vocabulary(known: Known, device: torch.device) -> None:
    assert difference(random_step(0, known, 128_256, device, filters=()), device) == []


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_values_that_are_not_finite(known: Known, device: torch.device) -> None:
    """Rows with NaN, with infinite logits of both signs, and with nothing above -inf; some block has no other logit."""
    step = random_step(3, known, VOCAB, device, filters=())
    assert step.drafts.distributions is not None
    values = step.drafts.distributions.values
    values[0::5, 3::7] = torch.nan
    values[1::5, 600] = torch.inf
    values[2::5, :512] = -torch.inf
    values[3::5] = -torch.inf
    values[3::10] = torch.nan
    logits = step.logits
    logits[4, 3::7] = torch.nan
    logits[9, 600] = torch.inf
    logits[10, :512] = -torch.inf
    logits[18] = torch.nan
    assert difference(step, device) == []


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_greedy_requests_have_no_ratio(known: Known, device: torch.device) -> None:
    step = random_step(4, known, 300, device, filters=())
    assert step.parameters.temperature is not None
    step.parameters.temperature[:16] = 0.0
    assert difference(step, device) == []


Launches = dict[str, list[tuple[int, ...]]]
REST = {"rest_of_blocks": (10, 3)}


class Recorded:
    """A kernel that records its grids, and is launched with that of `change`; not at all if this is None."""

    def __init__(self, name: str, launches: Launches, change: Callable[[tuple[int, ...]], Any] = tuple) -> None:
        self.kernel, self.grids, self.change = getattr(kernels, name), launches.setdefault(name, []), change

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        changed = self.change(grid)
        return (lambda *_, **__: None) if changed is None else self.kernel[changed]


@pytest.mark.parametrize(
    ("known", "filters", "grids"),
    [
        (Known.TOKENS, ("top_k",), {"accept_drafts": (10,)}),
        (Known.LOGITS, (), {"sum_of_blocks": (40, 3, 2), **REST}),
        (Known.PROBABILITIES, (), {"sum_of_blocks": (40, 3, 1), **REST}),
        (Known.LOGITS, ("top_p",), {"sum_of_blocks": (40, 3, 1), "filter_rows": (26,), **REST}),
        (Known.PROBABILITIES, ("min_p",), {"filter_rows": (26,), "accept_drafts": (10,), **REST}),
    ],
)
def test_launches(
    known: Known, filters: tuple[str, ...], grids: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel once: a program for each request, for each row, or for each block of each row."""
    found: Launches = {}
    monkeypatch.setattr(host.RowSums, "launch_sums", lambda *_: None)
    for name in NAMES:
        monkeypatch.setattr(host, name, Recorded(name, found, lambda grid: None))
    step = random_step(0, known, VOCAB, torch.device("cpu"), draft_vocab=600, filters=filters)
    difference(step, torch.device("cpu"))
    assert {name: made for name, made in found.items() if made} == {name: [grid] for name, grid in grids.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("sum_of_blocks", lambda grid: (grid[0], grid[1] - 1, grid[2]), id="a block's sum is missing"),
        pytest.param("sum_of_blocks", lambda grid: (*grid[:2], 1), id="the drafts' sums are missing"),
        pytest.param("rest_of_blocks", lambda grid: (grid[0], grid[1] - 1), id="a sum of the rest is missing"),
        pytest.param("rest_of_blocks", lambda grid: None, id="no second draw"),
    ],
)
def test_a_launch_that_does_less_is_found(
    name: str, change: Callable[[tuple[int, ...]], Any], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(host, name, Recorded(name, {}, change))
    assert difference(random_step(0, Known.LOGITS, VOCAB, device, filters=()), device) != []


@pytest.mark.parametrize(
    ("name", "filters"),
    [
        ("normals", ("min_p",)),
        ("min_probs", ("min_p",)),
        pytest.param("pivots", ("top_p",), marks=pytest.mark.full),
        pytest.param("tie_ids", ("top_p",), marks=pytest.mark.full),
    ],
)
def test_a_mistake_of_filtered_rows_is_found(
    name: str, filters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The sum of what is kept, the least probability, the last logit, and the first of its ties."""
    step = rounded(random_step(2, Known.LOGITS, 300, device, filters=filters))
    sum_rows = host.TritonVerifier.sum_rows

    def with_mistake(self: host.TritonVerifier, given: Any, *rest: Any) -> None:
        wrong = getattr(given.workspace, name)[: len(step.logits)]
        # Tokens just below a least probability are drawn too seldom to be seen.
        wrong.copy_({"tie_ids": wrong * 0, "min_probs": wrong * 16}.get(name, wrong // 2))
        sum_rows(self, given, *rest)

    monkeypatch.setattr(host.TritonVerifier, "sum_rows", with_mistake)
    assert difference(step, device) != []


def steps_differ(known: Known, device: torch.device) -> list[str]:
    """What is not the definition's in steps of one verifier: of all requests, of one without rows too, of all again."""
    step = random_step(0, known, VOCAB, device, filters=())
    verifier, wrong = verifier_of(step, device), []
    for requests in (10, 2, 10, 1):
        wrong += difference(step.first(requests), device, verifier)
        arrivals = verifier.workspace.arrivals
        if arrivals.any():
            wrong.append(f"{arrivals.tolist()} programs stay counted behind {requests} requests")
    return wrong


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_steps_of_other_numbers_of_requests(known: Known, device: torch.device) -> None:
    assert steps_differ(known, device) == []


def test_requests_without_rows(device: torch.device) -> None:
    """As padded steps of CUDA graphs have them: beside others, and no others."""
    step = random_step(0, Known.LOGITS, VOCAB, device, filters=())
    some = step.first(4)
    none = replace(some.first(0), drafts=replace(some.first(0).drafts, cu_rows=torch.zeros_like(some.drafts.cu_rows)))
    verifier = verifier_of(step, device)
    padded = torch.cat([some.drafts.cu_rows, some.drafts.cu_rows[-1:].expand(6)])
    for each in (replace(some, drafts=replace(some.drafts, cu_rows=padded)), none, step):
        assert difference(each, device, verifier) == []


@triton.jit
def stays_counted(arrivals, request, programs):
    return tl.atomic_add(arrivals + request, 1) == programs - 1


@triton.jit
def is_first(arrivals, request, programs):
    before = tl.atomic_add(arrivals + request, 1)
    if before == programs - 1:
        tl.store(arrivals + request, 0)
    return before == 0


@pytest.mark.parametrize("mistake", [stays_counted, is_first])
def test_a_mistake_of_the_last_program_is_found(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, which has programs in order."""
    monkeypatch.setattr(kernels, "is_last", mistake)
    assert steps_differ(Known.LOGITS, torch.device("cpu")) != []
