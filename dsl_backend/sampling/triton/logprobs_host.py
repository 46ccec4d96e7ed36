# SPDX-License-Identifier: Apache-2.0
"""Launches that write the log-probabilities of whole rows, behind a sampler that has drawn their tokens."""

from typing import Any

import torch
import triton

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import TritonConfig
from dsl_backend.sampling.spec import LogprobsMode, Parameters, Sampled, SamplingSpec
from dsl_backend.sampling.triton.args import Likeliest, LogprobsWorkspace, RowParameters
from dsl_backend.sampling.triton.dependent_launch import block_of, warps_of
from dsl_backend.sampling.triton.kernel import rank_row
from dsl_backend.sampling.triton.logprobs import (
    DIGITS,
    PASSES,
    count_digits,
    max_of_row_blocks,
    sum_digits,
    sum_of_row_blocks,
    write_logprobs,
)


class RowLogprobs:
    """Log-probabilities of up to max_rows rows, on any CUDA device or in Triton's interpreter. It owns its workspace.

    Three launches; seven more where rows have top-k, and seven more where they have top-p. Each of them reads the
    logits once, and the last one writes. Rows without a filter that others have leave its launches at once.
    """

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.vocab, self.max_rows = spec.vocab, max_rows
        self.block = block_of(spec.vocab, target.used_sms)
        self.blocks = triton.next_power_of_2(triton.cdiv(spec.vocab, self.block))
        self.overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
        longs: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.workspace = LogprobsWorkspace(
            maxima=torch.empty(max_rows, self.blocks, device=device),
            prob_sums=torch.empty(max_rows, self.blocks, **longs),
            digit_sums=torch.empty(2, max_rows, self.blocks, DIGITS.value, **longs),
            pivots=torch.empty(2, max_rows, **longs),
            missing=torch.empty(2, max_rows, **longs),
            top_k_keys=torch.empty(max_rows, **longs),
        )
        # In the place of parameters that are off for all rows: so all steps have the same kernels.
        self.ones = torch.ones(max_rows, device=device)
        self.zeros = torch.zeros(max_rows, device=device)
        self.no_top_k = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def launch(self, logits: torch.Tensor, parameters: Parameters, logprobs: torch.Tensor) -> None:
        """Write logprobs, [rows, vocab] float32 and contiguous. logits: [rows, vocab] at any row stride."""
        temperature, top_k, top_p = parameters.temperature, parameters.top_k, parameters.top_p
        rows = RowParameters(
            parameters.seeds,
            parameters.positions,
            self.ones if temperature is None else temperature,
            self.no_top_k if top_k is None else top_k,
            self.ones if top_p is None else top_p,
            self.zeros if parameters.min_p is None else parameters.min_p,
        )
        given = logits, logits.stride(0), rows, self.workspace
        sizes = self.vocab, self.max_rows
        grid = logits.shape[0], triton.cdiv(self.vocab, self.block)
        options: dict[str, Any] = {
            "BLOCKS": self.blocks,
            "BLOCK": self.block,
            "OVERLAP": self.overlap,
            "num_warps": warps_of(self.block),
        }
        max_of_row_blocks[grid](*given, sizes, **options)
        if self.overlap:
            options["launch_pdl"] = True
        for digit in range(1, PASSES if top_k is not None else 1):
            count_digits[grid](*given, sizes, digit, **options)
        sum_of_row_blocks[grid](*given, sizes, **options)
        for digit in range(1, PASSES if top_p is not None else 1):
            sum_digits[grid](*given, sizes, digit, **options)
        write_logprobs[grid](*given, logprobs, sizes, **options)


def launch_ranks(values: torch.Tensor, out: Sampled, mode: LogprobsMode, config: TritonConfig) -> None:
    """Find the drawn tokens' ranks and values, and the likeliest tokens.

    Args:
        values: [rows, vocab], logits for raw modes, or processed log-probabilities.
    """
    assert out.top_ids is not None, "logprobs_mode asks for them"
    assert out.top_logprobs is not None, "logprobs_mode asks for them"
    count, vocab = values.shape
    rank_row[(count,)](
        values,
        values.stride(0),
        out.tokens,
        Likeliest(out.top_ids, out.top_logprobs, out.token_ranks),
        out.top_ids.stride(0),
        vocab,
        out.top_ids.shape[1] - 1,
        NORMALIZE=mode is LogprobsMode.RAW_LOGPROBS,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )


class ProcessedRows:
    """All that a spec with logprobs asks for beside tokens, and beside the likeliest tokens of raw logits."""

    def __init__(self, spec: SamplingSpec, target: Target, max_rows: int, device: torch.device) -> None:
        self.mode = spec.logprobs_mode
        self.logprobs = RowLogprobs(spec, target, max_rows, device)
        self.config = TritonConfig.default(spec, target)

    def launch(self, logits: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
        """Fill out.logprobs, and for PROCESSED_LOGPROBS the likeliest tokens; out.tokens are drawn already."""
        assert out.logprobs is not None, "the spec asks for them"
        self.logprobs.launch(logits, parameters, out.logprobs)
        if self.mode is LogprobsMode.PROCESSED_LOGPROBS:
            launch_ranks(out.logprobs, out, self.mode, self.config)
