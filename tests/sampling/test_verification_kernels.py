# SPDX-License-Identifier: Apache-2.0
"""Kernels that verify drafts give the definition's tokens; bad arguments are refused."""

import pytest
import torch

pytest.importorskip("triton")

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.sampling import verification
from dsl_backend.sampling.verification import Drafts, Known, VerificationSpec
from dsl_backend.testing.verification import Step, random_step
from tests.sampling.verification_cases import AT_ONCE, DRAFTS, SETTINGS, count, unfair

KINDS = [
    (Known.TOKENS, torch.float32),
    (Known.LOGITS, torch.float32),
    (Known.LOGITS, torch.bfloat16),
    (Known.PROBABILITIES, torch.float32),
]


def plan_of(step: Step, kernel: str, device: torch.device) -> verification.VerificationPlan:
    rows = step.drawn.tokens.shape[0]
    return verification.plan(step.spec, step.drafts.requests, rows, device, kernel)


@pytest.mark.parametrize("token_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("vocab", [5, 300, pytest.param(151_936, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("known", "dtype"), KINDS)
@pytest.mark.parametrize("kernel", ["triton", pytest.param("cute", marks=pytest.mark.gpu)])
def test_kernel_is_the_definition(
    kernel: str, known: Known, dtype: torch.dtype, vocab: int, token_dtype: torch.dtype, device: torch.device
) -> None:
    """Also where the drafts' vocabulary is smaller."""
    if kernel == "cute" and known is not Known.TOKENS:
        pytest.skip("has no ratio test")
    # Launches for digits take long in the interpreter: test_verification_blocks.py has them.
    some = ("min_p",) if device.type == "cpu" else ("top_k", "top_p", "min_p")
    for seed, draft_vocab, filters in ((0, None, ()), (1, 3, some)):
        step = random_step(seed, known, vocab, device, dtype, token_dtype, draft_vocab, filters)
        tokens, counts = step.expected()
        found = verification.run(plan_of(step, kernel, device), *step.given, step.logits)
        assert found.tokens.dtype == token_dtype
        assert torch.equal(found.tokens.long(), tokens)
        assert torch.equal(found.counts, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("known", list(Known))
def test_tokens_have_the_targets_distribution(known: Known, name: str, device: torch.device) -> None:
    """Five million requests."""
    rows = AT_ONCE * (DRAFTS + 1)
    spec = VerificationSpec(max_drafts=DRAFTS, vocab=12, known=known)
    plan = verification.plan(spec, AT_ONCE, rows, device)
    found = count(
        name,
        known,
        5_000_000,
        device,
        lambda drawn, rows, drafts, _, logits: verification.run(plan, drawn, rows, drafts, logits),
    )
    assert unfair(name, known, found) == []


def test_arguments_that_do_not_fit_are_refused(device: torch.device) -> None:
    step = random_step(0, Known.LOGITS, 300, device)
    plan = plan_of(step, "triton", device)
    run = verification.run
    with pytest.raises(InvalidInput, match=r"the ratio test needs the logits that the tokens were drawn from"):
        run(plan, *step.given)
    for wrong in (step.logits[1:], step.logits.double(), step.logits.t().contiguous().t(), step.logits[:, 1:]):
        with pytest.raises(InvalidInput, match=r"logits are float\d\d \(2[56], .* \[26, 300\] with contiguous rows"):
            run(plan, *step.given, wrong)
    tokens_alone = Drafts(inputs=step.drafts.inputs, cu_rows=step.drafts.cu_rows)
    with pytest.raises(InvalidInput, match=r"distributions are not given: the spec has Known.LOGITS"):
        run(plan, step.drawn, step.parameters, tokens_alone, step.logits)
    fewer = Drafts(inputs=step.drafts.inputs[:25], cu_rows=step.drafts.cu_rows, distributions=step.drafts.distributions)
    with pytest.raises(InvalidInput, match=r"inputs is int32 \(25,\): contiguous \[26\] of int32 or int64 is needed"):
        run(plan, step.drawn, step.parameters, fewer, step.logits)
    small = verification.plan(step.spec, 10, 25, device, "triton")
    with pytest.raises(InvalidInput, match=r"26 rows exceed the plan's max_rows, 25"):
        run(small, *step.given, step.logits)
    with pytest.raises(InvalidInput, match=r"10 requests exceed the plan's max_requests, 9"):
        run(verification.plan(step.spec, 9, 26, device, "triton"), *step.given, step.logits)
    with pytest.raises(InvalidInput, match=r"max_drafts is 0: an integer from 1 to 128 is needed"):
        VerificationSpec(max_drafts=0, vocab=9)
    with pytest.raises(Unsupported):
        verification.plan(step.spec, 10, 26, device, "cute")
