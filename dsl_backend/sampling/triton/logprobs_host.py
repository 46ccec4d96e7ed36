# SPDX-License-Identifier: Apache-2.0
"""Launches that write the log-probabilities of whole rows, behind a sampler that has drawn their tokens."""

from typing import Any

import torch
import triton

from dsl_backend.runtime.target import Target
from dsl_backend.sampling.configs import TritonConfig
from dsl_backend.sampling.spec import LogprobsMode, Parameters, Sampled, SamplingSpec, parameters_off
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

# Each of them finds a digit by the sums of all blocks of its row: with many rows few programs share a row.
PROGRAMS_OF_SM = 32


class RowSums:
    """What the filters keep of up to max_rows rows, and the sums of it. It owns its workspace.

    Two launches; seven more where rows have top-k, and seven more where they have top-p. The first
    ones read the logits once; those of digits read the blocks that may have the last kept one. Rows without a filter
    that others have leave its launches at once.
    """

    def __init__(self, vocab: int, target: Target, max_rows: int, device: torch.device) -> None:
        self.vocab, self.max_rows, self.sms = vocab, max_rows, target.used_sms
        self.block = block_of(vocab, target.used_sms)
        self.blocks = triton.next_power_of_2(triton.cdiv(vocab, self.block))
        overlap = target.tma  # programmatic dependent launch came with SM90, as tma did
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
        self.off = parameters_off(max_rows, device)
        self.options: dict[str, Any] = {
            "BLOCKS": self.blocks,
            "BLOCK": self.block,
            "OVERLAP": overlap,
            "num_warps": warps_of(self.block),
        }
        # Of launches after the first one.
        self.later = self.options | ({"launch_pdl": True} if overlap else {})

    def arguments(self, logits: torch.Tensor, parameters: Parameters) -> tuple[Any, ...]:
        """The first arguments of all launches: logits, their row stride, parameters, the workspace."""
        given = {name: tensor for name, tensor in vars(parameters).items() if tensor is not None}
        rows = RowParameters(**(self.off | given))
        return logits, logits.stride(0), rows, self.workspace

    @property
    def sizes(self) -> tuple[int, int]:
        """The last argument of all launches."""
        return self.vocab, self.max_rows

    def grid(self, rows: int) -> tuple[int, int]:
        """Of launches whose programs take a row's blocks in turns."""
        programs = max(PROGRAMS_OF_SM * max(self.sms, 1) // rows, 1)
        return rows, min(programs, triton.cdiv(self.vocab, self.block))

    def launch_sums(self, logits: torch.Tensor, parameters: Parameters) -> None:
        """Fill the workspace. logits: [rows, vocab] at any row stride."""
        given, sizes, grid = self.arguments(logits, parameters), self.sizes, self.grid(logits.shape[0])
        max_of_row_blocks[grid](*given, sizes, **self.options)
        for digit in range(1, PASSES if parameters.top_k is not None else 1):
            count_digits[grid](*given, sizes, digit, **self.later)
        sum_of_row_blocks[grid](*given, sizes, **self.later)
        for digit in range(1, PASSES if parameters.top_p is not None else 1):
            sum_digits[grid](*given, sizes, digit, **self.later)


class RowLogprobs(RowSums):
    """Log-probabilities of up to max_rows rows, on any CUDA device or in Triton's interpreter: one launch more."""

    def launch(self, logits: torch.Tensor, parameters: Parameters, logprobs: torch.Tensor) -> None:
        """Write logprobs, [rows, vocab] float32 and contiguous. logits: [rows, vocab] at any row stride."""
        self.launch_sums(logits, parameters)
        given, grid = self.arguments(logits, parameters), (logits.shape[0], triton.cdiv(self.vocab, self.block))
        write_logprobs[grid](*given, logprobs, self.sizes, **self.later)


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
        self.logprobs = RowLogprobs(spec.vocab, target, max_rows, device)
        self.config = TritonConfig.default(spec, target)

    def launch(self, logits: torch.Tensor, parameters: Parameters, out: Sampled) -> None:
        """Fill out.logprobs, and for PROCESSED_LOGPROBS the likeliest tokens; out.tokens are drawn already."""
        assert out.logprobs is not None, "the spec asks for them"
        self.logprobs.launch(logits, parameters, out.logprobs)
        if self.mode is LogprobsMode.PROCESSED_LOGPROBS:
            launch_ranks(out.logprobs, out, self.mode, self.config)
