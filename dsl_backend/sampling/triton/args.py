# SPDX-License-Identifier: Apache-2.0
"""What the Triton sampler is launched with. A field is None where it is off; the kernel is compiled without it."""

from typing import Any, NamedTuple


class RowParameters(NamedTuple):
    """Pointers to tensors [rows], as `spec.Parameters`."""

    seeds: Any
    positions: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any


class Outputs(NamedTuple):
    """Pointers to tokens [rows] and log-probabilities [rows, vocab]."""

    tokens: Any
    logprobs: Any


class Likeliest(NamedTuple):
    """Pointers to ids int32 and values float32 [rows, 1 + num_logprobs], the token first, and to ranks int32 [rows].

    Triton's own tuples have an attribute `values`.
    """

    ids: Any
    logprobs: Any
    ranks: Any
