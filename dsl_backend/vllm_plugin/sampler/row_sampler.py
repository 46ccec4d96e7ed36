# SPDX-License-Identifier: Apache-2.0
"""The sampling plans that both runners' samplers use, for all kinds of batches of an engine."""

import torch

from dsl_backend.log import info_once
from dsl_backend.sampling import api
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec

# The parameters that kernels get: without filters, with top-p alone, and with filters that bound a row's candidates.
COMBINATIONS = (("temperature",), ("temperature", "top_p"), ("temperature", "top_p", "top_k", "min_p"))
# What a plan's workspace and log-probabilities may take, 4 bytes for each logit of its rows; vLLM's bound too.
PLAN_BYTES = 1 << 30


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
        logprobs: whether log-probabilities may be asked for.
    """

    def __init__(
        self, max_rows: int, device: torch.device, dtypes: tuple[torch.dtype, ...] = (), logprobs: bool = False
    ) -> None:
        self.max_rows, self.device, self.dtypes = max_rows, device, dtypes
        self.kinds = (False, True) if logprobs else (False,)
        self.plans: dict[tuple[int, torch.dtype, bool], api.SamplingPlan] = {}
        self.off = {
            "temperature": torch.ones(max_rows, device=device),
            "top_k": torch.zeros(max_rows, dtype=torch.int32, device=device),
            "top_p": torch.ones(max_rows, device=device),
            "min_p": torch.zeros(max_rows, device=device),
        }

    def draw(
        self,
        logits: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        *,
        logprobs: bool = False,
        **filters: torch.Tensor | None,
    ) -> Sampled:
        """One token of each row of logits [rows, vocab].

        Args:
            filters: temperature, top_k, top_p and min_p as in Parameters; None is off for all rows.

        Returns:
            Views that the next step overwrites.
        """
        rows = logits.shape[0]
        if rows > self.max_rows:
            return self.draw_in_parts(logits, {"seeds": seeds, "positions": positions, **filters}, logprobs)
        used = {name: tensor for name, tensor in filters.items() if tensor is not None}
        names = next(names for names in COMBINATIONS if used.keys() <= set(names))
        given = {name: self.off[name][:rows] for name in names} | used
        return api.run(self.plan(logits, logprobs), logits, Parameters(seeds=seeds, positions=positions, **given))

    def draw_in_parts(
        self, logits: torch.Tensor, parameters: dict[str, torch.Tensor | None], logprobs: bool
    ) -> Sampled:
        parts = []
        for begin in range(0, logits.shape[0], self.max_rows):
            part = slice(begin, begin + self.max_rows)
            given = {name: tensor if tensor is None else tensor[part] for name, tensor in parameters.items()}
            drawn = self.draw(logits[part], logprobs=logprobs, **given)  # type: ignore[arg-type]
            # The next part overwrites them.
            parts.append((drawn.tokens.clone(), None if drawn.logprobs is None else drawn.logprobs.clone()))
        tokens, values = zip(*parts, strict=True)
        return Sampled(torch.cat(tokens), torch.cat(values) if logprobs else None)

    def plan(self, logits: torch.Tensor, logprobs: bool) -> api.SamplingPlan:
        key = (logits.shape[1], logits.dtype, logprobs)
        if key not in self.plans:
            for dtype in dict.fromkeys((logits.dtype, *self.dtypes)):
                for kind in self.kinds:
                    self.prepare(key[0], dtype, kind, logits.stride(0))
        return self.plans[key]

    def prepare(self, vocab: int, dtype: torch.dtype, logprobs: bool, stride: int) -> None:
        """Make a plan and launch it with each combination, so that no later step compiles or allocates.

        Args:
            stride: elements between rows of logits, which may be padded: Triton compiles for multiples of 16.
        """
        spec = SamplingSpec(vocab=vocab, dtype=dtype, logprobs=logprobs)
        plan = self.plans[vocab, dtype, logprobs] = api.plan(spec, self.max_rows, self.device)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        row = torch.zeros(1, max(vocab, stride), dtype=dtype, device=self.device)[:, :vocab]
        for names in COMBINATIONS:
            off = {name: self.off[name][:1] for name in names}
            api.run(plan, row, Parameters(seeds=zero, positions=zero, **off))
        info_once(f"dsl samples from {vocab} logits, {str(dtype).removeprefix('torch.')}: by {plan.kernel_title}")
