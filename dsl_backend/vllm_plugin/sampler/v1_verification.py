# SPDX-License-Identifier: Apache-2.0
"""The rejection sampler of vLLM's V1 model runner, with drafts verified by what the plain sampler draws."""

import dataclasses
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler

from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.sampling.verification import Distributions, Drafts, Known
from dsl_backend.vllm_plugin import compat
from dsl_backend.vllm_plugin.sampler.v1 import (
    DSLSampler,
    changes_logits,
    has_thinking_budgets,
    likeliest_tensors,
    min_p_of,
)
from dsl_backend.vllm_plugin.sampler.verification import Verifier, draws_drafts


class DSLRejectionSampler(RejectionSampler):
    """vLLM's V1 rejection sampler. One launch draws the tokens of all rows, another one verifies.

    Attributes:
        sampler: vLLM's sampler with this package's draw, which is in the runner too.
        verifier: verifies the drafts.
        row_ids: int32, from 0 on.
        inputs: int32, the token in front of each row's. A step writes those that are drafts; others are not read.
        cu_rows: int32 [requests + 1], the first row of each request and the end. All but the 0 in front is written by a
            step whose requests have other numbers of drafts than the last one's.
        counts: the drafts of each request of the last step.
        request: int64, of each of its rows; None where no step has asked for it.
        greedy: the parameters of a step without a temperature; its seeds and positions mean nothing.
    """

    sampler: DSLSampler
    verifier: Verifier
    row_ids: torch.Tensor
    inputs: torch.Tensor
    cu_rows: torch.Tensor
    counts: list[int]
    request: torch.Tensor | None
    greedy: Parameters

    @classmethod
    def replace(cls, runner: Any) -> None:
        """Change the class of a runner's rejection sampler to this one."""
        own = runner.rejection_sampler
        own.__class__ = cls
        own.verifier = Verifier(runner, torch.int32)
        max_rows = own.verifier.max_requests * (1 + own.verifier.max_drafts)
        own.row_ids = torch.arange(max_rows, dtype=torch.int32, device=runner.device)
        own.inputs = torch.full_like(own.row_ids, -1)
        own.cu_rows = torch.zeros(own.verifier.max_requests + 1, dtype=torch.int32, device=runner.device)
        own.counts, own.request = [], None
        zeros = torch.zeros(max_rows, dtype=torch.int64, device=runner.device)
        own.greedy = Parameters(seeds=zeros, positions=zeros, temperature=zeros.float())
        vocab = runner.vllm_config.model_config.get_vocab_size()
        dtype = runner.vllm_config.model_config.dtype
        own.verifier.prepare(vocab, dtype, None, Known.TOKENS)
        if draws_drafts(runner.vllm_config.speculative_config):
            own.verifier.prepare(vocab, dtype, torch.zeros(1, vocab, device=runner.device), Known.PROBABILITIES)

    def forward(
        self, metadata: Any, draft_probs: torch.Tensor | None, logits: torch.Tensor, sampling_metadata: Any
    ) -> SamplerOutput:
        """Tokens int32 [requests, longest drafts + 1], -1 after a request's last one; and log-probabilities."""
        step = sampling_metadata
        rows, vocab = logits.shape
        self.take_counts(metadata)
        request, parameters = None, first(self.greedy, rows)
        if step.temperature is not None or draft_probs is not None:
            request = self.request_of_rows(metadata, rows)
            parameters = self.parameters(metadata, step, request)
        asked = step.max_num_logprobs is not None and self.is_processed_logprobs_mode
        processed = self.processed(logits, step, metadata)
        returned: dict[str, Any] = {"logprobs": asked, "kept": draft_probs is not None and self.sampler.rows.kept}
        if draft_probs is None and processed is logits and self.returns_likeliest(step):
            # Each token that is returned is the one that was drawn for its row.
            returned = {"num_logprobs": step.max_num_logprobs}
        drawn = self.draw(processed, parameters, **returned)
        distributions = None
        if draft_probs is not None and request is not None:
            # Their rows are the drafts of all requests one after another.
            distributions = Distributions(values=draft_probs[:, :vocab], index=self.row_ids[:rows] - request)
        drafts = self.drafts(metadata, rows, distributions)
        known = Known.TOKENS if draft_probs is None else Known.PROBABILITIES
        verified = self.verifier.verify(drawn, parameters, drafts, known, processed)
        tokens = verified.tokens[:, : metadata.max_spec_len + 1].clone(memory_format=torch.contiguous_format)
        return SamplerOutput(tokens, self.logprobs_of(tokens, logits, drawn, step, metadata))

    def take_counts(self, metadata: Any) -> None:
        """Keep what depends on the numbers of drafts alone, which most steps share with the one before."""
        if metadata.num_draft_tokens != self.counts:
            self.counts, self.request = list(metadata.num_draft_tokens), None
            self.cu_rows[1 : len(self.counts) + 1].copy_(metadata.cu_num_sampled_tokens)

    def request_of_rows(self, metadata: Any, rows: int) -> torch.Tensor:
        """Int64 [rows], of the step whose counts were taken."""
        if self.request is None:
            self.request = torch.searchsorted(metadata.cu_num_sampled_tokens, self.row_ids[:rows], right=True)
        return self.request

    def drafts(self, metadata: Any, rows: int, distributions: Distributions | None) -> Drafts:
        """A step's drafts, in buffers that the next step overwrites. Each is the input of the row behind its own."""
        inputs, cu_rows = self.inputs[:rows], self.cu_rows[: len(self.counts) + 1]
        inputs[1:].index_copy_(0, metadata.target_logits_indices.long(), metadata.draft_token_ids.to(inputs.dtype))
        return Drafts(inputs=inputs, cu_rows=cu_rows, distributions=distributions)

    def parameters(self, metadata: Any, step: Any, request: torch.Tensor) -> Parameters:
        """Of each row; filters that no request has are None."""
        sampler = self.sampler
        seeds = sampler.seeds.of(compat.seeds_of(step.generators), len(metadata.num_draft_tokens))
        # None where all requests are greedy.
        temperature = first(self.greedy, len(request)).temperature
        if step.temperature is not None:
            temperature = step.temperature.index_select(0, request)
        filters = {"top_k": step.top_k, "top_p": step.top_p, "min_p": min_p_of(step.logitsprocs)}
        return Parameters(
            seeds=seeds.index_select(0, request),
            positions=sampler.runner.positions.index_select(0, metadata.logits_indices),
            temperature=temperature,
            **{name: values.index_select(0, request) for name, values in filters.items() if values is not None},
        )

    def draw(self, logits: torch.Tensor, parameters: Parameters, **returned: Any) -> Sampled:
        """A token for each row, as if there were no drafts.

        Args:
            returned: logprobs, num_logprobs and kept as in `RowSampler.draw`.
        """
        return self.sampler.rows.draw(logits, **vars(parameters), **returned)

    def processed(self, logits: torch.Tensor, step: Any, metadata: Any) -> torch.Tensor:
        """The logits after all that vLLM does before the temperature, in memory of their own; or as they are.

        vLLM processes the last rows of requests apart from the others, as if they had no drafts before them. For a
        minimum length this is too strict. Here the last row is processed as one more draft's.
        """
        has_budgets = has_thinking_budgets(step)
        if not has_budgets and not changes_logits(step):
            return logits
        logits = logits.to(torch.float32, copy=True)
        counts = [drafts + 1 for drafts in metadata.num_draft_tokens]
        changes: dict[str, Any] = {"spec_token_ids": padded(step.spec_token_ids, counts)}
        if has_budgets:
            changes["thinking_budget_state_holder"] = None
        logits = self.apply_logits_processors(
            logits,
            dataclasses.replace(step, **changes),
            dataclasses.replace(metadata, num_draft_tokens=counts),
        )
        if has_budgets:
            apply_thinking_budgets(step.thinking_budget_state_holder, logits, step, metadata)
        return logits

    def returns_likeliest(self, step: Any) -> bool:
        """Whether the sampler's kernel returns the step's log-probabilities, if it draws from the model's logits."""
        return step.max_num_logprobs is not None and self.sampler.rows.returns(step.max_num_logprobs)

    def logprobs_of(
        self, tokens: torch.Tensor, logits: torch.Tensor, drawn: Sampled, step: Any, metadata: Any
    ) -> LogprobsTensors | None:
        """Those of vLLM, from the model's logits or from the log-probabilities that the tokens were drawn with."""
        if step.max_num_logprobs is None:
            return None
        if drawn.top_ids is not None:
            first = metadata.cu_num_sampled_tokens.roll(1).index_fill(0, self.row_ids[:1].long(), 0)
            rows = first.unsqueeze(1) + self.row_ids[: tokens.shape[1]]
            # Those behind a request's last token are not read.
            return likeliest_tensors(drawn, rows.flatten().clamp(max=len(logits) - 1).long())
        values = drawn.logprobs if self.is_processed_logprobs_mode else logits
        assert values is not None, "drawn with log-probabilities"
        return self._get_logprobs_tensors(
            step.max_num_logprobs,
            metadata,
            logits,
            values[metadata.target_logits_indices],
            values[metadata.bonus_logits_indices],
            tokens,
        )


def first(parameters: Parameters, rows: int) -> Parameters:
    """The parameters of the first rows, of those that have seeds, positions and a temperature alone."""
    assert parameters.temperature is not None
    return Parameters(
        seeds=parameters.seeds[:rows],
        positions=parameters.positions[:rows],
        temperature=parameters.temperature[:rows],
    )


def padded(drafts: list[list[int]] | None, counts: list[int]) -> list[list[int]]:
    """The drafts of each request, as many as it has rows. The last one is not read.

    Args:
        drafts: vLLM's, which go on past the batch where requests have left it.
    """
    known = [*(drafts or []), *([] for _ in counts)]
    return [(one[: count - 1] + [0] * count)[:count] for one, count in zip(known, counts, strict=False)]


def apply_thinking_budgets(holder: Any, logits: torch.Tensor, step: Any, metadata: Any) -> None:
    """As vLLM does: last rows first, then those of drafts."""
    holder.update_state(step.output_token_ids, step.spec_token_ids, repeat_indices=None)
    for rows, are_last in ((metadata.bonus_logits_indices, True), (metadata.target_logits_indices, False)):
        logits[rows] = holder.apply_to_logits(logits[rows], are_last, step.spec_token_ids)


def reasons_against(runner: Any) -> list[str]:
    """A rejection sampler that is not vLLM's own."""
    own = type(runner.rejection_sampler)
    return [] if own is RejectionSampler else [f"{own.__name__} is not a known rejection sampler"]
