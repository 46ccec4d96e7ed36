# SPDX-License-Identifier: Apache-2.0
"""The sampler of vLLM's V1 model runner, with one launch for temperature, filters and draw."""

import weakref
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.sampler import Sampler

from dsl_backend.sampling.spec import Sampled
from dsl_backend.vllm_plugin import compat
from dsl_backend.vllm_plugin.sampler import verification
from dsl_backend.vllm_plugin.sampler.row_sampler import RowSampler, likeliest_of


class RowSeeds:
    """Each row's seed on the device: its request's own, or else a random one that is new at every step.

    Seeds are sent to the device only when requests with seeds come, go or move. The host never waits for the device.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.max_rows, self.device = max_rows, device
        self.random = torch.empty(max_rows, dtype=torch.int64, device=device)
        self.sent: dict[int, int] = {}
        self.own = torch.empty(0, dtype=torch.int64, device=device)
        self.has_own = torch.empty(0, dtype=torch.bool, device=device)

    def of(self, seeds: dict[int, int], rows: int) -> torch.Tensor:
        """Int64 [rows].

        Args:
            seeds: of the rows whose requests have one.
        """
        # From torch's default generator of the device: all ranks must draw the same tokens, and its state is the same.
        random = self.random[:rows].random_()
        if not seeds:
            return random
        if seeds != self.sent:
            self.send(seeds)
        return torch.where(self.has_own[:rows], self.own[:rows], random)

    def send(self, seeds: dict[int, int]) -> None:
        # New host memory each time: the last copy may not be done yet.
        pinned = self.device.type == "cuda"
        own = torch.zeros(self.max_rows, dtype=torch.int64, pin_memory=pinned)
        has_own = torch.zeros(self.max_rows, dtype=torch.bool, pin_memory=pinned)
        for row, seed in seeds.items():
            own[row], has_own[row] = seed, True
        self.own = own.to(self.device, non_blocking=True)
        self.has_own = has_own.to(self.device, non_blocking=True)
        self.sent = seeds


class DSLSampler(Sampler):
    """vLLM's V1 sampler, whose tokens a RowSampler draws.

    Attributes:
        runner: weak; it has the tokens' positions.
        rows: draws the tokens.
        seeds: of each row.
    """

    runner: Any
    rows: RowSampler
    seeds: RowSeeds

    @classmethod
    def replace(cls, runner: Any) -> None:
        """Change the class of a runner's sampler to this one."""
        sampler = runner.sampler
        sampler.__class__ = cls
        sampler.runner = weakref.proxy(runner)
        sampler.rows = RowSampler(
            verification.max_rows(runner),
            runner.device,
            # Logits are as the model computes them, or in float32 where vLLM processes them.
            dtypes=(torch.float32,),
            logprobs=sampler.logprobs_mode == "processed_logprobs",
            likeliest=likeliest_of(sampler.logprobs_mode, runner.vllm_config, runner.device),
            kept=verification.draws_drafts(runner.vllm_config.speculative_config),
        )
        sampler.seeds = RowSeeds(runner.max_num_reqs, runner.device)

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> SamplerOutput:
        """As vLLM's; logits that nothing changes before the temperature are not copied to float32."""
        step = sampling_metadata
        if any(args) or any(kwargs.values()) or not self.draws_from_given(step):
            return super().forward(logits, step, *args, **kwargs)
        drawn = self.draw(logits, step, num_logprobs=step.max_num_logprobs)
        return SamplerOutput(
            sampled_token_ids=drawn.tokens.to(torch.int32).unsqueeze(-1),
            logprobs_tensors=likeliest_tensors(drawn, slice(None)),
        )

    def draws_from_given(self, step: Any) -> bool:
        """Whether a step's tokens, and what it returns beside them, are drawn from the model's logits as they are."""
        count = step.max_num_logprobs
        returns = count is None or self.rows.returns(count)
        changes = changes_logits(step) or has_thinking_budgets(step)
        return returns and not (changes or step.all_greedy or step.logprob_token_ids)

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [rows] int64, and the log-probabilities that they were drawn by where vLLM returns those."""
        step = sampling_metadata
        if step.all_greedy:
            return super().sample(logits, step, *args, **kwargs)
        asked = step.max_num_logprobs is not None or bool(step.logprob_token_ids)
        logprobs = asked and self.logprobs_mode == "processed_logprobs"
        drawn = self.draw(logits, step, logprobs=logprobs)
        # vLLM copies the tokens, but may keep the log-probabilities of a row without a copy.
        return drawn.tokens, drawn.logprobs.clone() if drawn.logprobs is not None else None

    def draw(self, logits: torch.Tensor, step: Any, **returned: Any) -> Sampled:
        """What is drawn for each row, in buffers that the next step overwrites.

        Args:
            returned: logprobs and num_logprobs as in `RowSampler.draw`.
        """
        return self.rows.draw(
            logits,
            self.seeds.of(compat.seeds_of(step.generators), logits.shape[0]),
            compat.last_positions(self.runner, logits.shape[0]),
            temperature=step.temperature,
            top_k=step.top_k,
            top_p=step.top_p,
            min_p=min_p_of(step.logitsprocs),
            **returned,
        )


def likeliest_tensors(drawn: Sampled, rows: slice | torch.Tensor) -> LogprobsTensors | None:
    """The likeliest tokens of some rows, in memory of their own, as vLLM has them; None where none were asked for."""
    if drawn.top_ids is None or drawn.top_logprobs is None or drawn.token_ranks is None:
        return None
    ids, values, ranks = drawn.top_ids[rows], drawn.top_logprobs[rows], drawn.token_ranks[rows]
    contiguous = torch.contiguous_format
    return LogprobsTensors(ids.clone(memory_format=contiguous), values.clone(memory_format=contiguous), ranks.long())


def changes_logits(step: Any) -> bool:
    """Whether vLLM changes a step's logits before the temperature, other than by thinking budgets."""
    processors = step.logitsprocs.non_argmax_invariant
    return (
        not step.no_penalties
        or bool(step.bad_words_token_ids)
        or step.allowed_token_ids_mask is not None
        or any(processor_is_used(processor) for processor in processors)
    )


def processor_is_used(processor: Any) -> bool:
    """Whether a processor changes logits in this step; True for those that are not vLLM's own."""
    for kind, requests in ((MinTokensLogitsProcessor, "min_toks"), (LogitBiasLogitsProcessor, "biases")):
        if type(processor) is kind:
            return bool(getattr(processor, requests, True))
    return True


def has_thinking_budgets(step: Any) -> bool:
    holder = getattr(step, "thinking_budget_state_holder", None)
    return holder is not None and holder.has_tracked_requests()


def min_p_of(processors: Any) -> torch.Tensor | None:
    """Float32 [rows]; None where no request has one."""
    for processor in processors.argmax_invariant:
        if processor.min_p_count:
            return processor.min_p.view(-1)
    return None


def reasons_against(runner: Any) -> list[str]:
    """A sampler or a logits processor that is not vLLM's own. Behind the temperature the kernel knows only min-p."""
    reasons = [] if type(runner.sampler) is Sampler else [f"{type(runner.sampler).__name__} is not a known sampler"]
    processors = runner.input_batch.logitsprocs.argmax_invariant
    others = [type(one).__name__ for one in processors if type(one) is not MinPLogitsProcessor]
    return reasons + [f"logits processor {name} runs after the temperature" for name in others]
