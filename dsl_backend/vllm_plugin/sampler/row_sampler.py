# SPDX-License-Identifier: Apache-2.0
"""The sampling plans that both runners' samplers use, for all kinds of batches of an engine."""

import enum
from typing import Any, NamedTuple

import torch

from dsl_backend.log import info_once
from dsl_backend.runtime import target as targets
from dsl_backend.sampling import api, dispatch
from dsl_backend.sampling.spec import (
    MAX_LOGPROBS,
    LogprobsMode,
    Parameters,
    Sampled,
    SamplingSpec,
    first_rows,
    parameters_off,
)
from dsl_backend.vllm_plugin import options
from dsl_backend.vllm_plugin.options import ServedBy

# The parameters that kernels get: without filters, with top-p alone, and with filters that bound a row's candidates.
COMBINATIONS = (("temperature",), ("temperature", "top_p"), ("temperature", "top_p", "top_k", "min_p"))
# What a plan's workspace and log-probabilities may take, 4 bytes for each logit of its rows; vLLM's bound too.
PLAN_BYTES = 1 << 30


class Returned(enum.Enum):
    """What a step returns beside its tokens."""

    NOTHING = enum.auto()
    ALL_LOGPROBS = enum.auto()
    LIKELIEST = enum.auto()


class Likeliest(NamedTuple):
    """The likeliest tokens that an engine's steps may ask for.

    Attributes:
        mode: by which values.
        most: of a row.
    """

    mode: LogprobsMode
    most: int


def likeliest_of(logprobs_mode: str, vllm_config: Any, device: torch.device) -> Likeliest | None:
    """The likeliest tokens that kernels return for an engine; None where vLLM finds them.

    Triton's kernel reads a row once for each of them.
    """
    if options.of(vllm_config).logprobs is not ServedBy.DSL:
        return None
    model = vllm_config.model_config
    vocab, allowed = model.get_vocab_size(), getattr(model, "max_logprobs", 20)
    count = min(MAX_LOGPROBS, vocab) if allowed < 0 else min(allowed, MAX_LOGPROBS, vocab)
    if logprobs_mode not in (LogprobsMode.RAW_LOGPROBS.value, LogprobsMode.RAW_LOGITS.value):
        return None
    found = Likeliest(LogprobsMode(logprobs_mode), count)
    spec = SamplingSpec(vocab=vocab, logprobs_mode=found.mode, num_logprobs=count)
    return None if dispatch.choose(spec, targets.detect(device)).name == "triton" else found


def rows_at_once(max_requests: int, max_drafts: int, vocab: int) -> int:
    """Rows of one launch. Requests with drafts have a row for each draft and one more."""
    bound = max(PLAN_BYTES // (4 * vocab), max_requests, 1 + max_drafts)
    return min(max_requests * (1 + max_drafts), bound)


class RowSampler:
    """Draws the tokens of a step. Holds the plans, and a tensor of neutral values for each parameter.

    Kernels get the neutral tensor for a parameter that no request of a batch uses, and not None: otherwise each
    combination would have to be compiled. Three combinations remain, because kernels read a row once without filters,
    twice with top-p alone, and use other algorithms where the number of candidates is bounded.

    Args:
        max_rows: of a launch. Steps of more rows are drawn in parts.
        dtypes: that logits may have beside the first step's.
        logprobs: whether all log-probabilities may be asked for.
        likeliest: tokens that may be asked for.
        kept: what the filters keep may be asked for, but not with the likeliest tokens.
    """

    def __init__(
        self,
        max_rows: int,
        device: torch.device,
        dtypes: tuple[torch.dtype, ...] = (),
        logprobs: bool = False,
        likeliest: Likeliest | None = None,
        kept: bool = False,
    ) -> None:
        self.max_rows, self.device, self.dtypes, self.likeliest = max_rows, device, dtypes, likeliest
        self.kept = kept
        asked = {Returned.NOTHING: True, Returned.ALL_LOGPROBS: logprobs, Returned.LIKELIEST: likeliest is not None}
        self.kinds = tuple(kind for kind, may_be in asked.items() if may_be)
        self.plans: dict[tuple[int, torch.dtype, Returned], api.SamplingPlan] = {}
        # Of rows that are all greedy: no seed is read.
        greedy = {
            "seeds": torch.zeros(max_rows, dtype=torch.int64, device=device),
            "temperature": torch.zeros(max_rows, device=device),
        }
        self.off, self.greedy = first_rows(parameters_off(max_rows, device)), first_rows(greedy)

    def returns(self, num_logprobs: int) -> bool:
        """Whether so many of the likeliest tokens may be asked for; -1 are all."""
        return self.likeliest is not None and 0 <= num_logprobs <= self.likeliest.most

    def draw(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        *,
        logprobs: bool = False,
        num_logprobs: int | None = None,
        new_tokens: bool = False,
        kept: bool = False,
        **filters: torch.Tensor | None,
    ) -> Sampled:
        """One token of each row of logits [rows, vocab].

        Args:
            logprobs: return all log-probabilities.
            num_logprobs: return so many of the likeliest tokens; None for none, and with logprobs.
            new_tokens: return the tokens in memory of their own.
            kept: return what the filters keep, as `api.run` does.
            filters: temperature, top_k, top_p and min_p as in Parameters; None is off for all rows.

        Returns:
            Views that the next step overwrites.
        """
        rows = logits.shape[0]
        if rows > self.max_rows:
            all_given = {"seeds": seeds, "positions": positions, **filters}
            return self.draw_in_parts(logits, all_given, logprobs=logprobs, num_logprobs=num_logprobs, kept=kept)
        used = {name: tensor for name, tensor in filters.items() if tensor is not None}
        names, off = next(names for names in COMBINATIONS if used.keys() <= set(names)), self.off(rows)
        given = {name: off[name] for name in names} | used
        kind = Returned.NOTHING if num_logprobs is None else Returned.LIKELIEST
        plan = self.plan(logits, Returned.ALL_LOGPROBS if logprobs else kind)
        parameters = Parameters(seeds=seeds, positions=positions, **given)
        return api.run(plan, logits, parameters, num_logprobs, new_tokens=new_tokens, kept=kept)

    def greedy_parameters(self, positions: torch.Tensor) -> Parameters:
        """Of rows that are all greedy: nothing of a request is looked up."""
        rows = positions.shape[0]
        if rows > self.max_rows:
            return Parameters(
                seeds=torch.zeros_like(positions),
                positions=positions,
                temperature=torch.zeros(rows, device=self.device),
            )
        return Parameters(positions=positions, **self.greedy(rows))

    def draw_in_parts(
        self, logits: torch.Tensor, parameters: dict[str, torch.Tensor | None], **returned: Any
    ) -> Sampled:
        parts = []
        for begin in range(0, logits.shape[0], self.max_rows):
            part = slice(begin, begin + self.max_rows)
            given = {name: tensor if tensor is None else tensor[part] for name, tensor in parameters.items()}
            drawn = self.draw(logits[part], **given, **returned)  # type: ignore[arg-type]
            # The next part overwrites them.
            parts.append(drawn.map(torch.clone))
        return Sampled.joined(parts)

    def plan(self, logits: torch.Tensor, kind: Returned) -> api.SamplingPlan:
        key = (logits.shape[1], logits.dtype, kind)
        if key not in self.plans:
            for dtype in dict.fromkeys((logits.dtype, *self.dtypes)):
                for each in self.kinds:
                    self.prepare(key[0], dtype, each, logits.stride(0))
        return self.plans[key]

    def prepare(self, vocab: int, dtype: torch.dtype, kind: Returned, stride: int) -> None:
        """Make a plan and launch it with each combination, so that no later step compiles or allocates.

        Args:
            stride: elements between rows of logits, which may be padded: Triton compiles for multiples of 16.
        """
        asked = self.likeliest if kind is Returned.LIKELIEST else None
        spec = SamplingSpec(
            vocab=vocab,
            dtype=dtype,
            logprobs=kind is Returned.ALL_LOGPROBS,
            logprobs_mode=None if asked is None else asked.mode,
            num_logprobs=0 if asked is None else min(asked.most, vocab),
            kept=self.kept and asked is None,
        )
        plan = self.plans[vocab, dtype, kind] = api.plan(spec, self.max_rows, self.device)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        row = torch.zeros(1, max(vocab, stride), dtype=dtype, device=self.device)[:, :vocab]
        for names in COMBINATIONS:
            off = {name: self.off(1)[name] for name in names}
            for kept in (False, True) if spec.kept else (False,):
                api.run(plan, row, Parameters(seeds=zero, positions=zero, **off), kept=kept)
        info_once(f"dsl samples from {vocab} logits, {str(dtype).removeprefix('torch.')}: by {plan.kernel_title}")
