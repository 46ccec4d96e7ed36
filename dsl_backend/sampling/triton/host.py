# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton sampler."""

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import TritonConfig
from dsl_backend.sampling.spec import LogprobsMode, Parameters, Sampled, SamplingSpec
from dsl_backend.sampling.triton.args import RowParameters
from dsl_backend.sampling.triton.kernel import sample_row
from dsl_backend.sampling.triton.logprobs_host import ProcessedRows, launch_ranks


class TritonSampler:
    """The sampler on any CUDA device, or in Triton's interpreter."""

    returns_kept = False

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.spec = spec
        self.config = TritonConfig.default(spec, target)
        self.processed = ProcessedRows(spec, target, max_rows, device) if spec.logprobs else None

    def launch(self, logits: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
        count, vocab = logits.shape
        sample_row[(count,)](
            logits,
            logits.stride(0),
            RowParameters(**vars(parameters)),
            out.tokens,
            vocab,
            BLOCK=self.config.block,
            num_warps=self.config.num_warps,
        )
        if self.processed is not None:
            self.processed.launch(logits, parameters, out)
        mode = self.spec.logprobs_mode
        if mode is not None and mode is not LogprobsMode.PROCESSED_LOGPROBS:
            launch_ranks(logits, out, mode, self.config)
