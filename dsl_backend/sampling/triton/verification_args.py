# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels that verify drafts are launched with. A field is None where it is off."""

from typing import Any, NamedTuple


class Drawn(NamedTuple):
    """Pointers to tokens [rows] and log-probabilities [rows, vocab], as `spec.Sampled`."""

    tokens: Any
    logprobs: Any


class RowDrafts(NamedTuple):
    """Pointers to `verification_spec.Drafts`, and to the values and index of its distributions.

    Triton's tuples have attributes `values` and `index` of their own.
    """

    inputs: Any
    cu_rows: Any
    distributions: Any
    distribution_ids: Any


class Workspace(NamedTuple):
    """Pointers to what launches leave for those after them. A row's blocks are padded to a power of two.

    Attributes:
        maxima: float32 [rows, blocks], the largest logits of the draft's blocks.
        sums: int64 [rows, blocks], of the probabilities of the draft's blocks; later those of max(p - q, 0).
        references: float32 [rows], of the draft's row.
        scales: int64 [rows], 2**62 / the sum of the draft's probabilities.
        again: int32 [rows], at each request's first row: the number of accepted drafts if the token after them is drawn
            again, from max(p - q, 0); else -1.
    """

    maxima: Any
    sums: Any
    references: Any
    scales: Any
    again: Any


class VerifiedOutputs(NamedTuple):
    """Pointers to tokens [requests, max_drafts + 1] and counts [requests]."""

    tokens: Any
    counts: Any
