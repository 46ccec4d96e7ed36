# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton kernels that verify drafts."""

from typing import Any

import torch
import triton

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.triton.args import RowParameters
from dsl_backend.sampling.triton.verification import accept_drafts, test_ratios
from dsl_backend.sampling.triton.verification_args import Drawn, RowDrafts, VerifiedOutputs, Workspace
from dsl_backend.sampling.verification_spec import Drafts, Known, VerificationSpec, Verified

BLOCK = 4096
WARPS = 16


class TritonVerifier:
    """Verification on any CUDA device, or in Triton's interpreter."""

    def __init__(self, spec: VerificationSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec = spec
        self.ratio = spec.known is not Known.TOKENS
        self.block = min(BLOCK, max(256, triton.next_power_of_2(spec.vocab)))
        self.workspace = Workspace(None, None, None)
        if self.ratio:
            self.workspace = Workspace(
                torch.empty(max_rows, dtype=torch.int32, device=device),
                torch.empty(max_rows, device=device),
                torch.empty(max_rows, dtype=torch.int64, device=device),
            )

    def launch(self, drawn: Sampled, parameters: Parameters, drafts: Drafts, out: Verified) -> None:
        spec, known = self.spec, drafts.distributions
        tokens = Drawn(drawn.tokens, drawn.logprobs if self.ratio else None)
        # The filters have made the log-probabilities: without them all steps have one kernel.
        given = (parameters.seeds, parameters.positions, parameters.temperature)
        rows = RowParameters(*given, None, None, None) if self.ratio else None
        values, index = (None, None) if known is None else (known.values, known.index)
        stride, draft_vocab = (0, 0) if known is None else (known.values.stride(0), known.values.shape[1])
        bundle = RowDrafts(drafts.inputs, drafts.cu_rows, values, index)
        options: dict[str, Any] = {
            "PROBABILITIES": spec.known is Known.PROBABILITIES,
            "BLOCK": self.block,
            "num_warps": WARPS if self.ratio and self.block >= 2048 else 1,
        }
        if self.ratio:
            test_ratios[(drafts.requests, spec.max_drafts)](
                tokens, stride, rows, bundle, self.workspace, spec.vocab, draft_vocab, **options
            )
        accept_drafts[(drafts.requests,)](
            tokens,
            stride,
            rows,
            bundle,
            self.workspace,
            VerifiedOutputs(out.tokens, out.counts),
            (spec.max_drafts, spec.vocab, draft_vocab),
            RATIO=self.ratio,
            STEPS=triton.next_power_of_2(spec.max_drafts + 1),
            BLOCKS=triton.next_power_of_2(triton.cdiv(spec.vocab, self.block)),
            **options,
        )
