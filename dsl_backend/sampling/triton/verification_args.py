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
    """Pointers to what is found of each row's draft, [rows].

    Attributes:
        state: int32. 2: accepted. 1: not accepted, and the token is drawn from the rest. 0: it is the drawn one.
        row_max: float32, of its logits over the temperature.
        scale: int64, 2**62 / the sum of its probabilities.
    """

    state: Any
    row_max: Any
    scale: Any


class VerifiedOutputs(NamedTuple):
    """Pointers to tokens [requests, max_drafts + 1] and counts [requests]."""

    tokens: Any
    counts: Any
