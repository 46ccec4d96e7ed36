# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton sampler."""

from typing import Any

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import TritonConfig
from dsl_backend.sampling.spec import LogprobsMode, Parameters, Sampled, SamplingSpec
from dsl_backend.sampling.triton.args import Likeliest, Outputs, RowParameters
from dsl_backend.sampling.triton.kernel import rank_row, sample_row


class TritonSampler:
    """The sampler on any CUDA device, or in Triton's interpreter."""

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec = spec
        self.config = TritonConfig.default(spec, target)

    def launch(self, logits: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
        count, vocab = logits.shape
        options: dict[str, Any] = {"BLOCK": self.config.block, "num_warps": self.config.num_warps}
        sample_row[(count,)](
            logits,
            logits.stride(0),
            RowParameters(**vars(parameters)),
            Outputs(out.tokens, out.logprobs),
            vocab,
            **options,
        )
        mode = self.spec.logprobs_mode
        if mode is None:
            return
        assert out.top_ids is not None, "logprobs_mode asks for them"
        assert out.top_logprobs is not None, "logprobs_mode asks for them"
        values = out.logprobs if mode is LogprobsMode.PROCESSED_LOGPROBS else logits
        assert values is not None, "they come with processed log-probabilities"
        rank_row[(count,)](
            values,
            values.stride(0),
            out.tokens,
            Likeliest(out.top_ids, out.top_logprobs, out.token_ranks),
            out.top_ids.stride(0),
            vocab,
            out.top_ids.shape[1] - 1,
            NORMALIZE=mode is LogprobsMode.RAW_LOGPROBS,
            **options,
        )
