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


class LogprobsWorkspace(NamedTuple):
    """Pointers to what launches leave for those after them. A row's blocks are padded to a power of two.

    Launches alternate between two copies where there are two: one reads what the launch before has left.

    Attributes:
        maxima: float32 [rows, blocks], the largest logits.
        prob_sums: int64 [rows, blocks], of the probabilities that min-p and top-k keep, in units of 2**-40 of the row.
        digit_sums: int64 [2, rows, blocks, 16], of what has each value of one digit: tokens, or their probabilities.
        pivots: int64 [2, rows], the digits that were found, as bits of `to_ordered_uint`.
        missing: int64 [2, rows], what tokens of the digits after them have to add up to.
        top_k_keys: int64 [rows], the k-th largest logit, as `to_ordered_uint`; 0 without top-k.
    """

    maxima: Any
    prob_sums: Any
    digit_sums: Any
    pivots: Any
    missing: Any
    top_k_keys: Any


class Likeliest(NamedTuple):
    """Pointers to ids int32 and values float32 [rows, 1 + num_logprobs], the token first, and to ranks int32 [rows].

    Triton's own tuples have an attribute `values`.
    """

    ids: Any
    logprobs: Any
    ranks: Any
