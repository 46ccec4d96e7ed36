# SPDX-License-Identifier: Apache-2.0
"""Triton's ratio test over rows of several blocks gives the definition's tokens, from any workspace."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dsl_backend.runtime.target import detect
from dsl_backend.sampling import verification_reference as definition
from dsl_backend.sampling.triton import verification as kernels
from dsl_backend.sampling.triton import verification_host as host
from dsl_backend.sampling.verification import Known
from dsl_backend.sampling.verification_spec import Verified
from dsl_backend.testing.verification import Step, random_step

# Of a GPU with which 1300 logits are three blocks, the last one in part.
SMS, VOCAB = 6, 1300
NAMES = ("max_of_blocks", "sum_of_blocks", "accept_drafts", "rest_of_blocks", "draw_from_rest")


def verifier_of(step: Step, device: torch.device) -> host.TritonVerifier:
    """Whose workspace holds the worst that a step before can leave."""
    target = replace(detect(device), sm_count=SMS) if device.type == "cpu" else detect(device)
    verifier = host.TritonVerifier(step.spec, target, len(step.drawn.tokens), device)
    for tensor in verifier.workspace:
        if tensor is not None:
            tensor.fill_(torch.inf if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 4)
    return verifier


def difference(step: Step, device: torch.device) -> list[str]:
    """What is not the definition's."""
    requests = step.drafts.requests
    out = Verified(
        torch.full((requests, step.spec.max_drafts + 1), -7, dtype=step.spec.token_dtype, device=device),
        torch.full((requests,), -7, dtype=torch.int32, device=device),
    )
    verifier_of(step, device).launch(step.drawn, step.parameters, step.drafts, out)
    tokens, counts = definition.verify(step.drawn, step.parameters, step.drafts, step.spec)
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
    assert difference(random_step(seed, known, VOCAB, device, dtype, draft_vocab=draft_vocab), device) == []


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_a_vocabulary_of_one_token(known: Known, device: torch.device) -> None:
    assert difference(random_step(0, known, 1, device), device) == []


@pytest.mark.full
@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_a_real_vocabulary(known: Known, device: torch.device) -> None:
    assert difference(random_step(0, known, 128_256, device), device) == []


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_values_that_are_not_finite(known: Known, device: torch.device) -> None:
    """Rows with NaN, with infinite logits of both signs, and with nothing above -inf; some block has no other logit."""
    step = random_step(3, known, VOCAB, device)
    assert step.drafts.distributions is not None
    values = step.drafts.distributions.values
    values[0::5, 3::7] = torch.nan
    values[1::5, 600] = torch.inf
    values[2::5, :512] = -torch.inf
    values[3::5] = -torch.inf
    values[3::10] = torch.nan
    assert difference(step, device) == []


@pytest.mark.parametrize("known", [Known.LOGITS, Known.PROBABILITIES])
def test_greedy_requests_have_no_ratio(known: Known, device: torch.device) -> None:
    step = random_step(4, known, 300, device)
    assert step.parameters.temperature is not None
    step.parameters.temperature[:16] = 0.0
    assert difference(step, device) == []


Launches = dict[str, list[tuple[int, ...]]]


class Recorded:
    """A kernel that records its grids, and is launched with that of `change`; not at all if this is None."""

    def __init__(self, name: str, launches: Launches, change: Callable[[tuple[int, ...]], Any] = tuple) -> None:
        self.kernel, self.grids, self.change = getattr(kernels, name), launches.setdefault(name, []), change

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        changed = self.change(grid)
        return (lambda *_, **__: None) if changed is None else self.kernel[changed]


@pytest.mark.parametrize(
    ("known", "draft_vocab", "grids"),
    [
        (Known.TOKENS, None, {"accept_drafts": (10,)}),
        (
            Known.LOGITS,
            600,
            {
                "max_of_blocks": (40, 2),
                "sum_of_blocks": (40, 2),
                "accept_drafts": (10,),
                "rest_of_blocks": (10, 3),
                "draw_from_rest": (10,),
            },
        ),
        (
            Known.PROBABILITIES,
            600,
            {"accept_drafts": (10,), "rest_of_blocks": (10, 3), "draw_from_rest": (10,)},
        ),
    ],
)
def test_launches(
    known: Known, draft_vocab: int | None, grids: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel once: a program for each request, or for each block of each row."""
    found: Launches = {}
    for name in NAMES:
        monkeypatch.setattr(host, name, Recorded(name, found, lambda grid: None))
    step = random_step(0, known, VOCAB, torch.device("cpu"), draft_vocab=draft_vocab)
    difference(step, torch.device("cpu"))
    assert {name: made for name, made in found.items() if made} == {name: [grid] for name, grid in grids.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(
            "max_of_blocks", lambda grid: (grid[0], grid[1] - 1), id="a maximum is missing", marks=pytest.mark.full
        ),
        pytest.param(
            "sum_of_blocks", lambda grid: (grid[0], grid[1] - 1), id="a sum of q is missing", marks=pytest.mark.full
        ),
        pytest.param("rest_of_blocks", lambda grid: (grid[0], grid[1] - 1), id="a sum of the rest is missing"),
        pytest.param("draw_from_rest", lambda grid: None, id="no second draw"),
    ],
)
def test_a_launch_that_does_less_is_found(
    name: str, change: Callable[[tuple[int, ...]], Any], monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(host, name, Recorded(name, {}, change))
    assert difference(random_step(0, Known.LOGITS, VOCAB, device), device) != []
