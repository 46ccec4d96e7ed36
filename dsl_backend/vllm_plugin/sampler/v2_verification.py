# SPDX-License-Identifier: Apache-2.0
"""The rejection sampler of vLLM's V2 model runner, with drafts verified by what the plain sampler draws."""

import inspect
from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from dsl_backend.sampling.spec import Sampled
from dsl_backend.sampling.verification import Distributions, Drafts, Known, Verified
from dsl_backend.vllm_plugin import compat
from dsl_backend.vllm_plugin.sampler.v2 import DSLSampler, likeliest_tensors
from dsl_backend.vllm_plugin.sampler.verification import Verifier


class DSLRejectionSampler(RejectionSampler):
    """vLLM's V2 rejection sampler. One launch draws the tokens of all rows, another one verifies.

    Attributes:
        sampler: vLLM's sampler with this package's draw, which is in the runner too.
        verifier: verifies the drafts.
        drawn: for the rows that were verified last, if with the likeliest tokens.
    """

    sampler: DSLSampler
    verifier: Verifier
    drawn: Sampled | None = None

    @classmethod
    def replace(cls, runner: Any) -> None:
        """Change the class of a runner's rejection sampler to this one, or to the one for vLLM 0.26."""
        own = runner.rejection_sampler
        own.__class__ = cls if compat.verification_is_a_method() else WholeBatchRejectionSampler
        own.verifier = Verifier(runner, torch.int64)
        model, logits = runner.vllm_config.model_config, runner.speculator.draft_logits
        vocab = model.get_vocab_size()
        own.verifier.prepare(
            vocab,
            model.dtype,
            None if logits is None else by_draft(logits, vocab),
            Known.TOKENS if logits is None else Known.LOGITS,
        )

    def _verify(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(logits for log-probabilities, tokens int64 [requests, max drafts + 1], counts int32 [requests])."""
        step = dict(zip(VERIFY_NAMES, args, strict=True))
        return self.verify(step, step["verify_draft_sampled"])

    def verify(
        self, step: dict[str, Any], verified_inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `_verify`.

        Args:
            step: vLLM's arguments by name.
            verified_inputs: the inputs of rows; -1 for drafts that must not be accepted.
        """
        sampler, slots = self.sampler, step["expanded_idx_mapping"]
        draft_logits = step["draft_logits"]
        asked = sampler.sampling_states.max_num_logprobs(step["idx_mapping_np"]) != NO_LOGPROBS
        returns_processed = asked and sampler.logprobs_mode == "processed_logprobs"
        count = None
        if draft_logits is None and LOGPROBS_NAMES:
            # Each token that is returned is the one that was drawn for its row.
            count = sampler.likeliest_of_step(step["idx_mapping_np"])
        drawn, processed, parameters = sampler.draw(
            step | {"input_ids": step["draft_sampled"]},
            returns_processed,
            count,
            kept=draft_logits is not None and sampler.rows.kept,
        )
        self.drawn = None if count is None else drawn
        vocab = processed.shape[1]
        distributions = None
        if draft_logits is not None:
            index = slots.long() * draft_logits.shape[1] + step["expanded_local_pos"]
            distributions = Distributions(values=by_draft(draft_logits, vocab), index=index)
        drafts = Drafts(inputs=verified_inputs, cu_rows=step["cu_num_logits"], distributions=distributions)
        known = Known.TOKENS if draft_logits is None else Known.LOGITS
        verified = Verified(
            # They are read on another stream while the next step verifies.
            *(one.clone() for one in self.verifier.verify(drawn, parameters, drafts, known, processed))
        )
        if returns_processed:
            assert drawn.logprobs is not None, "drawn with log-probabilities"
            processed = drawn.logprobs
        return processed, verified.tokens, verified.counts

    def _get_logprobs_tensors(self, *args: Any) -> Any:
        """Those that were drawn with the rows verified last, or vLLM's. Of rejected rows they are not read."""
        if self.drawn is None:
            return super()._get_logprobs_tensors(*args)
        step = dict(zip(LOGPROBS_NAMES, args, strict=True))
        return likeliest_tensors(self.drawn, step["cu_num_logits_np"])


class WholeBatchRejectionSampler(DSLRejectionSampler):
    """For vLLM 0.26, which has no `_verify`: the call is a copy of vLLM's, with this package's draw."""

    def __call__(
        self, logits: torch.Tensor, input_batch: Any, draft_logits: torch.Tensor | None = None
    ) -> SamplerOutput:
        sampler = self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        inputs = input_batch.input_ids[input_batch.logits_indices]
        step = {
            "logits": logits,
            "draft_logits": draft_logits,
            "draft_sampled": inputs,
            "pos": input_batch.positions[input_batch.logits_indices],
            "cu_num_logits": input_batch.cu_num_logits,
            "idx_mapping_np": input_batch.idx_mapping_np,
            "expanded_idx_mapping": input_batch.expanded_idx_mapping,
            "expanded_local_pos": input_batch.expanded_local_pos,
        }
        processed, tokens, counts = self.verify(step, inputs)
        values = processed if sampler.logprobs_mode == "processed_logprobs" else logits
        logprobs = self._get_logprobs_tensors(input_batch, tokens, counts, values)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            counts,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


# Empty where vLLM passes the rows of each request in another way.
LOGPROBS_NAMES = tuple(inspect.signature(RejectionSampler._get_logprobs_tensors).parameters)[1:]
if "cu_num_logits_np" not in LOGPROBS_NAMES:
    LOGPROBS_NAMES = ()
VERIFY_NAMES = (
    tuple(inspect.signature(RejectionSampler._verify).parameters)[1:] if compat.verification_is_a_method() else ()
)


def by_draft(draft_logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """[requests * drafts, draft vocabulary], a view of [requests, drafts, draft vocabulary]."""
    return draft_logits.view(-1, draft_logits.shape[-1])[:, :vocab]


def reasons_against(runner: Any) -> list[str]:
    """A rejection sampler that is not vLLM's own."""
    own = type(runner.rejection_sampler)
    return [] if own is RejectionSampler else [f"{own.__name__} is not a known rejection sampler"]
