# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton kernels that verify drafts."""

from typing import Any

import torch
import triton

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.triton.args import RowParameters
from dsl_backend.sampling.triton.dependent_launch import block_of, warps_of
from dsl_backend.sampling.triton.verification import (
    accept_drafts,
    draw_from_rest,
    max_of_blocks,
    rest_of_blocks,
    sum_of_blocks,
)
from dsl_backend.sampling.triton.verification_args import Drawn, RowDrafts, VerifiedOutputs, Workspace
from dsl_backend.sampling.verification_spec import Drafts, Known, VerificationSpec, Verified


class TritonVerifier:
    """Verification on any CUDA device, or in Triton's interpreter."""

    def __init__(self, spec: VerificationSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec = spec
        self.block = block_of(spec.vocab, target.used_sms)
        self.blocks = triton.next_power_of_2(triton.cdiv(spec.vocab, self.block))
        self.overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
        self.workspace = Workspace(None, None, None, None, None)
        if spec.known is Known.TOKENS:
            return
        sums = torch.empty(max_rows, self.blocks, dtype=torch.int64, device=device)
        again = torch.empty(max_rows, dtype=torch.int32, device=device)
        self.workspace = self.workspace._replace(sums=sums, again=again)
        if spec.known is Known.LOGITS:
            self.workspace = self.workspace._replace(
                maxima=torch.empty(max_rows, self.blocks, device=device),
                references=torch.empty(max_rows, device=device),
                scales=torch.empty(max_rows, dtype=torch.int64, device=device),
            )

    def launch(self, drawn: Sampled, parameters: Parameters, drafts: Drafts, out: Verified) -> None:
        outputs = VerifiedOutputs(out.tokens, out.counts)
        known = drafts.distributions
        if known is None:
            bundle = RowDrafts(drafts.inputs, drafts.cu_rows, None, None)
            sizes = (self.spec.max_drafts, self.spec.vocab, 0)
            self.accept((Drawn(drawn.tokens, None), 0, None, bundle), outputs, sizes, drafts.requests, num_warps=1)
            return
        bundle = RowDrafts(drafts.inputs, drafts.cu_rows, known.values, known.index)
        # The filters have made the log-probabilities: without them all steps have one kernel.
        rows = RowParameters(parameters.seeds, parameters.positions, parameters.temperature, None, None, None)
        self.launch_ratio(
            (Drawn(drawn.tokens, drawn.logprobs), known.values.stride(0), rows, bundle),
            outputs,
            (self.spec.max_drafts, self.spec.vocab, known.values.shape[1]),
            drafts.requests,
        )

    def launch_ratio(
        self,
        given: tuple[Drawn, int, RowParameters, RowDrafts],
        outputs: VerifiedOutputs,
        sizes: tuple[int, int, int],
        requests: int,
    ) -> None:
        """The ratio test; arguments as in `accept`."""
        max_drafts, vocab, draft_vocab = sizes
        probabilities = self.spec.known is Known.PROBABILITIES
        dependent = {"launch_pdl": True} if self.overlap else {}
        options: dict[str, Any] = {
            "BLOCKS": self.blocks,
            "BLOCK": self.block,
            "OVERLAP": self.overlap,
            "num_warps": warps_of(self.block),
        }
        if not probabilities:
            grid = (requests * max_drafts, triton.cdiv(draft_vocab, self.block))
            max_of_blocks[grid](*given[1:], self.workspace, sizes, **options)
            sum_of_blocks[grid](*given[1:], self.workspace, sizes, **options, **dependent)
        self.accept(given, outputs, sizes, requests, num_warps=4, **({} if probabilities else dependent))
        options["PROBABILITIES"] = probabilities
        grid = (requests, triton.cdiv(vocab, self.block))
        rest_of_blocks[grid](*given, self.workspace, sizes, **options, **dependent)
        draw_from_rest[(requests,)](*given, self.workspace, outputs, sizes, **options, **dependent)

    def accept(
        self,
        given: tuple[Drawn, int, RowParameters | None, RowDrafts],
        outputs: VerifiedOutputs,
        sizes: tuple[int, int, int],
        requests: int,
        **options: Any,
    ) -> None:
        """Launch `accept_drafts`.

        Args:
            given, sizes: the kernel's first four arguments, and its last one.
        """
        accept_drafts[(requests,)](
            *given,
            self.workspace,
            outputs,
            sizes,
            PROBABILITIES=self.spec.known is Known.PROBABILITIES,
            STEPS=triton.next_power_of_2(self.spec.max_drafts + 1),
            BLOCKS=self.blocks,
            BLOCK=self.block,
            OVERLAP=self.overlap,
            **options,
        )
