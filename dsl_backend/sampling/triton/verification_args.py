# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels that verify drafts are launched with. A field is None where it is off."""

from typing import Any, NamedTuple


class Drawn(NamedTuple):
    """Pointers to tokens [rows] and the logits [rows, vocab] that they were drawn from."""

    tokens: Any
    logits: Any


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

    Rows are followed by those of their drafts where a tensor has 2 * rows; where probabilities are known, it has rows.
    The fields of `spec.Kept` may be what the sampler has written.

    Attributes:
        maxima: float32 [2 * rows, blocks], the largest logits of blocks of 512.
        masses: int64 [2 * rows, blocks], the sums of their probabilities below that; later, of rows, those of
            max(p - q, 0) of programs' blocks.
        references: float32 [rows].
        normals: int64 [rows], 2**62 / the sum of the row's probabilities.
        draft_references, draft_normals: the same of rows' drafts; None where probabilities are known.
        again: int32 [requests], the number of accepted drafts if the token after them is drawn again, from
            max(p - q, 0); else -1.
        arrivals: int32 [requests], how many programs of a request have ended their part of a launch. Zero between
            launches.
        pivots: int64 [rows], the least logit that top-k and top-p keep, as `to_ordered_uint`; None without filters.
        tie_ids: int32 [rows], the first one of its ties that is kept.
        min_probs: int64 [rows], the least probability that min-p keeps.
    """

    maxima: Any
    masses: Any
    references: Any
    normals: Any
    draft_references: Any
    draft_normals: Any
    again: Any
    arrivals: Any
    pivots: Any
    tie_ids: Any
    min_probs: Any


class VerifiedOutputs(NamedTuple):
    """Pointers to tokens [requests, max_drafts + 1] and counts [requests]."""

    tokens: Any
    counts: Any
