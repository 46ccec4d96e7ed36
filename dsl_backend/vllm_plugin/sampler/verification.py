# SPDX-License-Identifier: Apache-2.0
"""Verification of drafts for both model runners: which engines it serves, and the plans of their steps.

The rule does not ask where drafts come from: n-grams, EAGLE, MTP and draft models are all served. Drafts whose
distribution vLLM does not keep (the default, `draft_sample_method` greedy) are accepted where they equal the token that
the plain sampler draws. With `probabilistic` they pass the ratio test.
"""

from dataclasses import replace
from typing import Any

import torch

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.log import info_once
from dsl_backend.runtime import target as targets
from dsl_backend.sampling import dispatch, verification, verification_dispatch
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec, kept_buffers
from dsl_backend.sampling.verification import Distributions, Drafts, Known, VerificationSpec, Verified
from dsl_backend.vllm_plugin.sampler.row_sampler import rows_at_once

# Of which vLLM makes the rows of a model's logits a multiple.
PADDED_VOCAB = 64
RULES = {
    Known.TOKENS: "a draft is accepted if it is the token drawn at its position",
    Known.LOGITS: "by the ratio of probabilities",
    Known.PROBABILITIES: "by the ratio of probabilities",
}


def reasons_against(speculation: Any, vocab: int, device: torch.device) -> list[str]:
    """Why an engine's drafts are verified by vLLM: settings that are not served."""
    reasons = []
    method = getattr(speculation, "rejection_sample_method", "standard")
    if method != "standard":
        reasons.append(f"drafts are verified by another rule (rejection_sample_method {method})")
    if getattr(speculation, "enable_adaptive_verification", False):
        reasons.append("the number of drafts of a request changes on the device (enable_adaptive_verification)")
    try:
        spec = VerificationSpec(max_drafts=speculation.num_speculative_tokens, vocab=vocab)
        verification_dispatch.choose(spec, targets.detect(device))
    except (InvalidInput, Unsupported) as error:
        reasons.append(str(error))
    return reasons


def draws_drafts(speculation: Any) -> bool:
    """Whether drafts are drawn, and vLLM keeps the distributions that they are drawn from; False without drafts."""
    return getattr(speculation, "draft_sample_method", "greedy") == "probabilistic"


def max_drafts(runner: Any) -> int:
    """Of a request; 0 without speculation."""
    speculation = runner.vllm_config.speculative_config
    return 0 if speculation is None else speculation.num_speculative_tokens


def max_rows(runner: Any) -> int:
    """Of one launch of the sampler."""
    vocab = runner.vllm_config.model_config.get_vocab_size()
    return rows_at_once(runner.max_num_reqs, max_drafts(runner), vocab)


def returns_kept(vocab: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the sampler of these logits returns what the filters keep."""
    sampler = dispatch.choose(SamplingSpec(vocab=vocab, dtype=dtype, kept=True), targets.detect(device))
    return sampler.load().returns_kept


class Verifier:
    """Verifies the drafts of steps. Holds a plan for each kind of drafts, made at its first step.

    Args:
        token_dtype: of the results.
    """

    def __init__(self, runner: Any, token_dtype: torch.dtype) -> None:
        self.device, self.token_dtype = runner.device, token_dtype
        self.max_requests, self.max_drafts = runner.max_num_reqs, max_drafts(runner)
        self.plans: dict[VerificationSpec, verification.VerificationPlan] = {}
        # By what differs among steps.
        self.specs: dict[tuple[int, Known, torch.dtype], VerificationSpec] = {}

    def verify(
        self, drawn: Sampled, parameters: Parameters, drafts: Drafts, known: Known, logits: torch.Tensor
    ) -> Verified:
        """Tokens and counts of each request, which the next step overwrites.

        Args:
            parameters: that the tokens were drawn with; not read where tokens alone are known.
            logits: that the tokens were drawn from. Of those not read the width alone counts.
        """
        given, vocab = drafts.distributions, logits.shape[1]
        draft_dtype = torch.float32 if given is None else given.values.dtype
        spec = self.specs.get((vocab, known, draft_dtype))
        if spec is None:
            spec = self.specs[vocab, known, draft_dtype] = VerificationSpec(
                max_drafts=self.max_drafts,
                vocab=vocab,
                known=known,
                draft_dtype=draft_dtype,
                token_dtype=self.token_dtype,
            )
        return verification.run(self.plan(spec), drawn, parameters, drafts, None if given is None else logits)

    def plan(self, spec: VerificationSpec) -> verification.VerificationPlan:
        if spec not in self.plans:
            max_rows = self.max_requests * (1 + self.max_drafts)
            plan = self.plans[spec] = verification.plan(spec, self.max_requests, max_rows, self.device)
            info_once(f"dsl verifies drafts, {RULES[spec.known]}: by {plan.kernel_title}")
        return self.plans[spec]

    def prepare(self, vocab: int, dtype: torch.dtype, values: torch.Tensor | None, known: Known) -> None:
        """Verify one draft of one request, so that no later step compiles or allocates.

        Args:
            dtype: of the model's logits. Those that vLLM has processed are float32.
            values: the distributions of later steps; None where only tokens are known.
        """
        rows = 2
        zeros = torch.zeros(rows, dtype=torch.int64, device=self.device)
        distributions = None if values is None else Distributions(values=values, index=zeros)
        drafts = Drafts(
            inputs=zeros.int(),
            cu_rows=torch.tensor([0, rows], dtype=torch.int32, device=self.device),
            distributions=distributions,
        )
        ones = torch.ones(rows, device=self.device)
        parameters = Parameters(seeds=zeros, positions=zeros, temperature=ones)
        filtered = replace(parameters, top_k=zeros.int(), top_p=ones)
        # The model's logits may be a part of rows that vLLM has padded; processed ones are not.
        padded = torch.zeros(rows, -(-vocab // PADDED_VOCAB) * PADDED_VOCAB, dtype=dtype, device=self.device)
        steps = [(padded[:, :vocab], parameters)]
        if values is not None:
            processed = torch.zeros(rows, vocab, device=self.device)
            steps = [(logits, given) for logits in (padded[:, :vocab], processed) for given in (parameters, filtered)]
        kept = kept_buffers(rows, self.device) if returns_kept(vocab, dtype, self.device) else None
        for logits, given in steps:
            self.verify(Sampled(zeros, kept=kept), given, drafts, known, logits)
