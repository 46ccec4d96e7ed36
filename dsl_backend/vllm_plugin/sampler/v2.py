# SPDX-License-Identifier: Apache-2.0
"""The sampler of vLLM's V2 model runner, with one launch for temperature, filters and draw.

That runner keeps seeds and parameters of all its requests on the device; a step's rows are an index into them.
"""

import inspect
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates

from dsl_backend.sampling.spec import Parameters, Sampled
from dsl_backend.vllm_plugin import compat
from dsl_backend.vllm_plugin.sampler import verification
from dsl_backend.vllm_plugin.sampler.row_sampler import RowSampler, likeliest_of

# vLLM 0.26 passes fewer. `sample` and `apply_sampling_params` take what they share in the same order.
NAMES = tuple(inspect.signature(Sampler.sample).parameters)[1:]


class DSLSamplingStates(SamplingStates):
    """Skips vLLM's passes over the logits for temperature and min-p: the kernel applies both."""

    def add_request(self, *args: Any, **kwargs: Any) -> bool:
        super().add_request(*args, **kwargs)
        # False: vLLM need not process the logits of this request, which begins with a copy in float32.
        return False

    def apply_temperature(self, *args: Any) -> None:
        """Does nothing: the kernel applies it."""

    def apply_min_p(self, *args: Any) -> None:
        """Does nothing: the kernel applies it."""


class DSLSampler(Sampler):
    """vLLM's V2 sampler, whose tokens a RowSampler draws.

    Attributes:
        rows: draws the tokens.
        num_logprobs: how many of the likeliest tokens the kernel returns in this step; None where it returns none.
        drawn: of the last step; the next one overwrites it.
    """

    rows: RowSampler
    num_logprobs: int | None = None
    drawn: Sampled

    @classmethod
    def replace(cls, runner: Any) -> None:
        """Change the class of a runner's sampler to this one. It keeps its state: it may know requests already."""
        sampler = runner.sampler
        sampler.__class__ = cls
        sampler.sampling_states.__class__ = DSLSamplingStates
        sampler.rows = RowSampler(
            verification.max_rows(runner),
            runner.device,
            # Logits are as the model computes them, or in float32 where vLLM has processed them.
            dtypes=(torch.float32,),
            logprobs=sampler.logprobs_mode == "processed_logprobs",
            likeliest=likeliest_of(sampler.logprobs_mode, runner.vllm_config, runner.device),
            kept=verification.draws_drafts(runner.vllm_config.speculative_config),
        )

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any) -> Any:
        """As vLLM's; the likeliest tokens come from the launch that draws, where it draws from the model's logits."""
        self.num_logprobs = self.likeliest_of_step(input_batch.idx_mapping_np)
        if self.num_logprobs is None:
            return super().__call__(logits, input_batch, *args)
        try:
            output = super().__call__(logits, input_batch, *args)
        finally:
            self.num_logprobs = None
        cu_rows = input_batch.cu_num_logits_np
        output.logprobs_tensors = likeliest_tensors(self.drawn, cu_rows)
        return output

    def likeliest_of_step(self, in_batch: np.ndarray) -> int | None:
        """How many of the likeliest tokens the kernel is to return; None where vLLM finds them, or nobody asks."""
        replays = getattr(self, "trace_replay_state", None) is not None
        if self.rows.likeliest is None or replays or not hasattr(Sampler, "get_logprobs_dims"):
            return None
        asked = super().get_logprobs_dims(in_batch)
        if asked is None or np.any(self.needs_logits_processing[in_batch]):
            return None
        count, token_ids = asked
        return count if not token_ids and self.rows.returns(count) else None

    def get_logprobs_dims(self, *args: Any, **kwargs: Any) -> tuple[int, int] | None:
        """None while the kernel returns what is asked for."""
        if self.num_logprobs is not None:
            return None
        found: tuple[int, int] | None = super().get_logprobs_dims(*args, **kwargs)
        return found

    def sample(self, *args: Any, return_logprobs: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [rows] int64; and the logits, or the log-probabilities that they were drawn by where asked for."""
        logprobs = return_logprobs and self.logprobs_mode == "processed_logprobs"
        # The tokens are read on another stream while the next step draws.
        drawn, logits, _ = self.draw(dict(zip(NAMES, args, strict=False)), logprobs, self.num_logprobs, new_tokens=True)
        self.drawn = drawn
        return drawn.tokens, logits if drawn.logprobs is None else drawn.logprobs

    def draw(
        self,
        step: dict[str, Any],
        logprobs: bool,
        num_logprobs: int | None = None,
        new_tokens: bool = False,
        kept: bool = False,
    ) -> tuple[Sampled, torch.Tensor, Parameters]:
        """What was drawn for each row, in buffers that the next step overwrites; from which logits, by what parameters.

        Args:
            step: the arguments of `sample`, by name.
            logprobs, num_logprobs, new_tokens, kept: as in `RowSampler.draw`.
        """
        requests, in_batch = step["expanded_idx_mapping"], step["idx_mapping_np"]
        given = (step[name] for name in NAMES if name != "return_logprobs")
        logits = self.apply_sampling_params(*given, skip_top_k_top_p=True)
        states = self.sampling_states
        if all_greedy(states.temperature.np[in_batch]):
            # Seeds and temperatures would be gathered by a launch each, and are not read.
            parameters, kept = self.rows.greedy_parameters(step["pos"]), False
        else:
            top_k, top_p = compat.filters_of(states, requests, in_batch, logits.shape[-1])
            has_temperature = np.any(states.temperature.np[in_batch] != 1.0)
            parameters = Parameters(
                seeds=states.seeds.gpu[requests],
                positions=step["pos"],
                temperature=states.temperature.gpu[requests] if has_temperature else None,
                top_k=top_k,
                top_p=top_p,
                min_p=states.min_p.gpu[requests] if np.any(states.min_p.np[in_batch] != 0.0) else None,
            )
        drawn = self.rows.draw(
            logits, **vars(parameters), logprobs=logprobs, num_logprobs=num_logprobs, new_tokens=new_tokens, kept=kept
        )
        return drawn, logits, parameters


def all_greedy(temperatures: np.ndarray) -> bool:
    """Whether no request samples: vLLM makes the temperature of a greedy one 0, and switches its filters off."""
    return not temperatures.any()


def likeliest_tensors(drawn: Sampled, cu_rows: np.ndarray) -> LogprobsTensors:
    """The likeliest tokens of rows, in memory of their own, as vLLM has them.

    Args:
        cu_rows: of the rows of each request.
    """
    assert drawn.top_ids is not None, "drawn with the likeliest tokens"
    assert drawn.top_logprobs is not None, "drawn with the likeliest tokens"
    assert drawn.token_ranks is not None, "drawn with the likeliest tokens"
    values = drawn.top_logprobs.clone(memory_format=torch.contiguous_format)
    is_expanded = len(values) != len(cu_rows) - 1
    return LogprobsTensors(
        drawn.top_ids.long(), values, drawn.token_ranks.long(), cu_rows.tolist() if is_expanded else None
    )


def reasons_against(runner: Any) -> list[str]:
    """A sampler that is not vLLM's own, such as one that watermarks. All logits processors run before the kernel."""
    return [] if type(runner.sampler) is Sampler else [f"{type(runner.sampler).__name__} is not a known sampler"]
