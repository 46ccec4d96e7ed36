# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton kernels that verify drafts."""

from typing import Any, NamedTuple

import torch
import triton

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.fixed_point import BLOCK
from dsl_backend.sampling.spec import Kept, Parameters, Sampled, kept_buffers
from dsl_backend.sampling.triton.args import RowParameters
from dsl_backend.sampling.triton.dependent_launch import block_of, warps_of
from dsl_backend.sampling.triton.logprobs_host import RowSums
from dsl_backend.sampling.triton.verification import (
    accept_drafts,
    filter_rows,
    rest_of_blocks,
    sum_of_blocks,
)
from dsl_backend.sampling.triton.verification_args import Drawn, RowDrafts, VerifiedOutputs, Workspace
from dsl_backend.sampling.verification_spec import Drafts, Known, VerificationSpec, Verified

# Programs of a launch for each SM, from which on a program has several blocks.
PROGRAMS_OF_SM = 64
# Of a thread of `rest_of_blocks` with filters. ptxas takes 128 otherwise. With 96 it spills nothing either (13.4, for
# SM90 and SM100, 32000 to 201088 logits).
MAX_REGISTERS = 96
# Of `Kept`, all that is read of rows without filters: these keep every token.
NORMALIZED_BY = ("references", "normals")


class Given(NamedTuple):
    """The first arguments of all kernels, and `sizes`."""

    drawn: Drawn
    strides: tuple[int, int]
    parameters: RowParameters | None
    drafts: RowDrafts
    workspace: Workspace
    sizes: tuple[int, int, int, int]


class TritonVerifier:
    """Verification on any CUDA device, or in Triton's interpreter."""

    def __init__(
        self, spec: VerificationSpec, target: Target, max_requests: int, max_rows: int, device: torch.device
    ) -> None:
        self.spec, self.max_rows, self.sms = spec, max_rows, target.used_sms
        self.block = block_of(spec.vocab, target.used_sms)
        self.blocks = triton.next_power_of_2(triton.cdiv(spec.vocab, BLOCK))
        self.steps = triton.next_power_of_2(spec.max_drafts + 1)
        self.overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
        self.dependent: dict[str, Any] = {"launch_pdl": True} if self.overlap else {}
        self.workspace = self.filtered = Workspace(*[None] * len(Workspace._fields))
        if spec.known is Known.TOKENS:
            return
        rows = max_rows if spec.known is Known.PROBABILITIES else 2 * max_rows
        longs: dict[str, Any] = {"dtype": torch.int64, "device": device}
        kept = kept_buffers(max_rows, device)
        self.workspace = self.workspace._replace(
            maxima=torch.empty(rows, self.blocks, device=device),
            masses=torch.empty(rows, self.blocks, **longs),
            references=kept.references,
            normals=kept.normals,
            again=torch.empty(max_requests, dtype=torch.int32, device=device),
            arrivals=torch.zeros(max_requests, dtype=torch.int32, device=device),
        )
        if spec.known is Known.LOGITS:
            self.workspace = self.workspace._replace(
                draft_references=torch.empty(max_rows, device=device), draft_normals=torch.empty(max_rows, **longs)
            )
        # Of steps with filters: behind a sampler that does not find what they keep.
        self.filters = RowSums(spec.vocab, target, max_rows, device)
        self.filtered = self.workspace._replace(**kept._asdict())

    def launch(
        self, drawn: Sampled, parameters: Parameters, drafts: Drafts, logits: torch.Tensor | None, out: Verified
    ) -> None:
        outputs = VerifiedOutputs(out.tokens, out.counts)
        known, spec = drafts.distributions, self.spec
        if known is None or logits is None:
            bundle = RowDrafts(drafts.inputs, drafts.cu_rows, None, None)
            sizes = (spec.max_drafts, spec.vocab, 0, self.max_rows)
            given = Given(Drawn(drawn.tokens, None), (0, 0), None, bundle, self.workspace, sizes)
            self.accept(given, outputs, drafts.requests)
            return
        has_filters, workspace = parameters.has_filters, self.workspace
        if drawn.kept is not None:
            names = Kept._fields if has_filters else NORMALIZED_BY
            workspace = workspace._replace(**{name: getattr(drawn.kept, name) for name in names})
        elif has_filters:
            workspace = self.filtered
        sums_rows = drawn.kept is None and not has_filters
        given = Given(
            Drawn(drawn.tokens, logits),
            (logits.stride(0), known.values.stride(0)),
            self.row_parameters(parameters),
            RowDrafts(drafts.inputs, drafts.cu_rows, known.values, known.index),
            workspace,
            (spec.max_drafts, spec.vocab, known.values.shape[1], self.max_rows),
        )
        kinds = sums_rows + (spec.known is Known.LOGITS)
        if has_filters and drawn.kept is None:
            self.filter(logits, parameters)
        if kinds:
            self.sum_rows(given, outputs, drafts.requests, kinds, sums_rows)
        else:
            self.accept(given, outputs, drafts.requests, **self.dependent)
        self.draw_again(given, outputs, drafts.requests)

    def row_parameters(self, parameters: Parameters) -> RowParameters:
        """Without filters, which have launches of their own; with a temperature, so that all steps have one kernel."""
        temperature = self.filters.off["temperature"] if parameters.temperature is None else parameters.temperature
        return RowParameters(parameters.seeds, parameters.positions, temperature, None, None, None)

    def sum_rows(self, given: Given, outputs: VerifiedOutputs, requests: int, kinds: int, sums_rows: bool) -> None:
        """Launch `sum_of_blocks`."""
        rows, programs = requests * self.spec.max_drafts, triton.cdiv(self.spec.vocab, self.block)
        chunks = min(max(rows * programs * kinds // max(PROGRAMS_OF_SM * self.sms, 1), 1), programs)
        sum_of_blocks[rows, triton.cdiv(programs, chunks), kinds](
            given.drawn,
            given.parameters,
            given.drafts,
            given.workspace,
            outputs,
            (given.strides, given.sizes),
            chunks,
            ROWS=sums_rows,
            STEPS=self.steps,
            BLOCKS=self.blocks,
            BLOCK=self.block,
            OVERLAP=self.overlap,
            num_warps=warps_of(self.block),
            **self.dependent,
        )

    def filter(self, logits: torch.Tensor, parameters: Parameters) -> None:
        """What filters keep of all rows."""
        sums = self.filters
        sums.launch_sums(logits, parameters)
        filter_rows[(logits.shape[0],)](*sums.arguments(logits, parameters), self.filtered, sums.sizes, **sums.later)

    def draw_again(self, given: Given, outputs: VerifiedOutputs, requests: int) -> None:
        """The last launch."""
        rest_of_blocks[requests, triton.cdiv(self.spec.vocab, self.block)](
            *given[:-1],
            outputs,
            given.sizes,
            BLOCKS=self.blocks,
            BLOCK=self.block,
            OVERLAP=self.overlap,
            num_warps=warps_of(self.block),
            maxnreg=None if given.workspace.pivots is None else MAX_REGISTERS,
            **self.dependent,
        )

    def accept(self, given: Given, outputs: VerifiedOutputs, requests: int, **options: Any) -> None:
        """Launch `accept_drafts`."""
        accept_drafts[(requests,)](
            *given[:-1], outputs, given.sizes, STEPS=self.steps, OVERLAP=self.overlap, num_warps=1, **options
        )
