# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts as functions on tensors, after the sampler has drawn a token for every row.

    verifier = plan(VerificationSpec(max_drafts=5, vocab=128256), max_requests=64, max_rows=384, device="cuda")
    parameters = Parameters(seeds=seeds, positions=positions, top_k=top_k, top_p=top_p)
    drawn = api.run(sampler, logits, parameters)
    tokens, counts = run(verifier, drawn, parameters, Drafts(inputs=inputs, cu_rows=cu_rows))

Where the distributions of drafts are known, `run` also takes the logits. `verification_reference.py` has the
definition. Every kernel gives the same tokens for the same drawn tokens and logits, bit for bit.
"""

from typing import Protocol

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.runtime.target import Target, cuda_index, detect
from dsl_backend.sampling import verification_dispatch
from dsl_backend.sampling.spec import LOGITS_DTYPES, TOKEN_DTYPES, Kept, Parameters, Sampled
from dsl_backend.sampling.verification_spec import (
    NO_TOKEN,
    Distributions,
    Drafts,
    Known,
    VerificationSpec,
    Verified,
    check_vector,
)

__all__ = [
    "NO_TOKEN",
    "Distributions",
    "Drafts",
    "Known",
    "VerificationPlan",
    "VerificationSpec",
    "Verified",
    "plan",
    "run",
]


# Of each tensor of Kept.
KEPT_DTYPES = {
    "references": torch.float32,
    "normals": torch.int64,
    "pivots": torch.int64,
    "tie_ids": torch.int32,
    "min_probs": torch.int64,
}


class Kernel(Protocol):
    """Verifies the drafts of steps of up to max_requests requests and max_rows rows. It owns its workspace."""

    def __init__(
        self, spec: VerificationSpec, target: Target, max_requests: int, max_rows: int, device: torch.device
    ) -> None: ...

    def launch(
        self, drawn: Sampled, parameters: Parameters, drafts: Drafts, logits: torch.Tensor | None, out: Verified
    ) -> None:
        """Verify the drafts of at least one request."""
        ...


class VerificationPlan:
    """The kernel and the buffers that steps share. Steps that use the same plan must be ordered on one stream."""

    def __init__(
        self,
        spec: VerificationSpec,
        target: Target,
        max_requests: int,
        max_rows: int,
        device: torch.device,
        kernel: str | None = None,
    ) -> None:
        entry = verification_dispatch.choose(spec, target, kernel)
        self.spec, self.max_requests, self.max_rows, self.device = spec, max_requests, max_rows, device
        self.kernel_title = entry.title
        self.kernel: Kernel = entry.load()(spec, target, max_requests, max_rows, device)
        self.results = Verified(
            torch.empty(max_requests, spec.max_drafts + 1, dtype=spec.token_dtype, device=device),
            torch.empty(max_requests, dtype=torch.int32, device=device),
        )


def plan(
    spec: VerificationSpec,
    max_requests: int,
    max_rows: int,
    device: torch.device | str,
    kernel: str | None = None,
) -> VerificationPlan:
    """Plan steps of up to max_requests requests and max_rows rows. All memory is allocated here.

    Args:
        kernel: `cute`, `triton` or `reference`; no other kernel is used. By default the best that serves the spec on
            the device.

    Raises:
        InvalidInput: a bound is below 1, or there is no such device or kernel.
        Unsupported: no kernel serves the spec, or not the requested one. The message has every objection.
    """
    checks.instance("spec", spec, VerificationSpec)
    checks.kernel(kernel)
    max_requests = checks.integer("max_requests", max_requests, 1)
    max_rows, device = checks.integer("max_rows", max_rows, 1), checks.device("device", device)
    target = detect(device)
    if device.type == "cuda":
        device = torch.device("cuda", cuda_index(device))
    return VerificationPlan(spec, target, max_requests, max_rows, device, kernel)


def run(
    plan: VerificationPlan,
    drawn: Sampled,
    parameters: Parameters,
    drafts: Drafts,
    logits: torch.Tensor | None = None,
) -> Verified:
    """Verify a step's drafts. It does not synchronize with the GPU or allocate memory.

    Args:
        drawn: what the sampler drew from the rows' logits: tokens [rows], int64 or int32, contiguous. Where
            distributions are known, with what the filters keep (`api.run`'s `kept`), also of rows without filters:
            launches find it otherwise.
        parameters: that the sampler drew with. Without distributions they are not read.
        logits: that the sampler drew from, [rows, vocab] of any of its dtypes, at any row stride. Needed where
            distributions are known, and else not read.

    Returns:
        Views of the plan's buffers, which its next step overwrites.

    Raises:
        InvalidInput: an argument has another type, or a shape, dtype, stride or device does not match; from the
            reference, which reads values, also those that `Drafts` and `Distributions` do not allow.
    """
    checks.instance("plan", plan, VerificationPlan)
    checks.instance("drawn", drawn, Sampled)
    checks.instance("drafts", drafts, Drafts)
    checks.tensor("tokens", drawn.tokens)
    rows = drawn.tokens.shape[0] if drawn.tokens.dim() == 1 else None
    check_vector("tokens", drawn.tokens, rows, TOKEN_DTYPES, plan.device)
    assert rows is not None, "checked above"
    require(rows <= plan.max_rows, f"{rows} rows exceed the plan's max_rows, {plan.max_rows}")
    drafts.check(plan.spec, rows, plan.device)
    require(
        drafts.requests <= plan.max_requests,
        f"{drafts.requests} requests exceed the plan's max_requests, {plan.max_requests}",
    )
    if plan.spec.known is not Known.TOKENS:
        check_logits(logits, rows, plan)
        checks.instance("parameters", parameters, Parameters)
        parameters.check(rows, plan.device)
        check_kept(drawn.kept, rows, plan.device)
    out = Verified(*(tensor[: drafts.requests] for tensor in plan.results))
    if drafts.requests:
        plan.kernel.launch(drawn, parameters, drafts, logits, out)
    return out


def check_kept(kept: Kept | None, rows: int, device: torch.device) -> None:
    """Raise InvalidInput where what the filters keep is not of the rows."""
    if kept is None:
        return
    checks.instance("kept", kept, Kept)
    for name, dtype in KEPT_DTYPES.items():
        check_vector(name, getattr(kept, name), rows, (dtype,), device)


def check_logits(logits: torch.Tensor | None, rows: int, plan: VerificationPlan) -> None:
    """Raise InvalidInput where the logits of a ratio test are not given or do not fit."""
    require(logits is not None, "the ratio test needs the logits that the tokens were drawn from")
    checks.tensor("logits", logits)
    assert logits is not None, "required above"
    vocab = plan.spec.vocab
    fits = logits.shape == (rows, vocab) and (vocab == 1 or logits.stride(1) == 1)
    if not fits or logits.dtype not in LOGITS_DTYPES or logits.device != plan.device:
        raise InvalidInput(
            f"logits are {short(logits.dtype)} {tuple(logits.shape)} on {logits.device}: float32, bfloat16 or float16 "
            f"[{rows}, {vocab}] with contiguous rows on {plan.device} is needed"
        )
