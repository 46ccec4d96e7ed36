# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernel that verifies drafts, on the emulator beside the definition."""

import pytest
import torch

pytest.importorskip("cutlass")

import emulator
from dsl_backend.runtime.target import from_arch
from dsl_backend.sampling import verification_reference as definition
from dsl_backend.sampling.cute import verification_host as host
from dsl_backend.sampling.cute.verification import VerifyArgs
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification import Drafts, Known, VerificationSpec
from dsl_backend.testing.verification import cu_rows_of, random_step

CPU = torch.device("cpu")
UNWRITTEN = -7


def emulate(arch: str, spec: VerificationSpec, sampled: torch.Tensor, drafts: Drafts) -> None:
    target = from_arch(arch)
    parameters = Parameters(seeds=sampled.long(), positions=sampled.long())
    expected = definition.verify(Sampled(sampled), parameters, drafts, spec)
    tokens = torch.full((drafts.requests, spec.max_drafts + 1), UNWRITTEN, dtype=spec.token_dtype)
    counts = torch.full((drafts.requests,), UNWRITTEN, dtype=torch.int32)
    with emulator.device(arch=arch, sms=4, schedule="lazy", seed=0, strict=True):
        function = host.build(host.key_of(spec, sampled.dtype, drafts.inputs.dtype), target)
        function(*VerifyArgs(sampled, drafts.inputs, drafts.cu_rows, tokens, counts))
    assert torch.equal(tokens.long(), expected[0])
    assert torch.equal(counts, expected[1])


@pytest.mark.parametrize(("arch", "token_dtype"), [("sm_90a", torch.int64), ("sm_100a", torch.int32)])
def test_random_steps(arch: str, token_dtype: torch.dtype) -> None:
    step = random_step(0, Known.TOKENS, 200, CPU, token_dtype=token_dtype)
    emulate(arch, step.spec, step.drawn.tokens, step.drafts)


def test_more_drafts_than_lanes() -> None:
    """The first draft that differs is in the second and third set of lanes, at their ends, or nowhere."""
    rows, differs = (71,) * 5, (31, 32, 63, 64, None)
    sampled = torch.arange(sum(rows), dtype=torch.int32) % 50
    inputs = sampled.roll(1).long()
    for request, place in enumerate(differs):
        if place is not None:
            inputs[request * 71 + place + 1] += 1
    drafts = Drafts(inputs=inputs, cu_rows=cu_rows_of(rows, CPU))
    emulate("sm_90a", VerificationSpec(max_drafts=70, vocab=50), sampled, drafts)
