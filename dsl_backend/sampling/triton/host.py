# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton sampler."""

from typing import Any

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import TritonConfig
from dsl_backend.sampling.spec import Parameters, Sampled, SamplingSpec
from dsl_backend.sampling.triton.args import Outputs, RowParameters
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
        if out.logprobs is None:
            return
        rank_row[(count,)](
            out.logprobs,
            out.tokens,
            out.token_logprobs,
            out.token_ranks,
            out.top_ids,
            out.top_logprobs,
            vocab,
            self.spec.num_logprobs,
            **options,
        )
