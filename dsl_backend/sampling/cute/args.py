# SPDX-License-Identifier: Apache-2.0
"""What a launch of the sampler takes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dsl_backend.sampling.spec import Kept


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
        pending: int64 [rows, 3], scratch of launches with a second one: the id of a drawn token that top-p may remove,
            or -1; the sum below which what is likelier has to stay; the bits of the row's maximum.
        block_max: float32 [rows, blocks], scratch of the same: the maximum of each block of these rows.
        references, normals, pivots, tie_ids, min_probs: [rows]; outputs, as in `spec.Kept`. None where what the filters
            keep is not returned.
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
    pending: Any = None
    block_max: Any = None
    references: Any = None
    normals: Any = None
    pivots: Any = None
    tie_ids: Any = None
    min_probs: Any = None

    @classmethod
    def of(cls, tensors: Sequence[Any], has_likeliest: bool, finishes: bool, has_kept: bool) -> "SampleArgs":
        """What `tensors` was made of."""
        absent = set() if has_likeliest else {"top_ids", "top_logprobs", "token_ranks"}
        absent |= set() if finishes else {"pending", "block_max"}
        absent |= set() if has_kept else set(Kept._fields)
        return cls(**dict(zip((name for name in cls._fields if name not in absent), tensors, strict=True)))

    @property
    def tensors(self) -> list[Any]:
        """Those that there are, in order."""
        return [tensor for tensor in self if tensor is not None]
