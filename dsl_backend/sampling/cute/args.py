# SPDX-License-Identifier: Apache-2.0
"""What a launch of the sampler takes."""

from typing import Any, NamedTuple


class SampleArgs(NamedTuple):
    """The tensors of a launch: torch's on the host, CuTe's in the kernel. A filter that is off is a tensor too.

    The compiled function takes them one by one: CuTe DSL finds the current stream by a tensor among the arguments, and
    does not look for one inside of a tuple (CuTe DSL 4.8). Both sides spread this tuple, so that the order is spelled
    here alone.

    Attributes:
        logits: [rows, vocab], at least one row, at any row stride.
        seeds, positions: int64 [rows].
        temperature, top_p, min_p: float32 [rows].
        top_k: int32 or int64 [rows].
        tokens: int32 or int64 [rows]; an output.
        top_ids, top_logprobs, token_ranks: int32 and float32 [rows, 1 + num_logprobs], and int32 [rows]; outputs, as
            in `spec.Sampled`. None where no log-probabilities are returned.
    """

    logits: Any
    seeds: Any
    positions: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    tokens: Any
    top_ids: Any = None
    top_logprobs: Any = None
    token_ranks: Any = None

    @property
    def tensors(self) -> list[Any]:
        """Those that there are, in order."""
        return [tensor for tensor in self if tensor is not None]
