# SPDX-License-Identifier: Apache-2.0
"""The problem of verifying drafts: its static spec, a step's drafts, and the results."""

import enum
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.sampling.fixed_point import MAX_VOCAB
from dsl_backend.sampling.spec import LOGITS_DTYPES, TOKEN_DTYPES

# vLLM's largest number of drafts of a request.
MAX_DRAFTS = 128
# In the place of tokens after a request's last one; as a draft, one that is never accepted.
NO_TOKEN = -1


class Known(enum.Enum):
    """What is known of drafts, which decides the rule."""

    TOKENS = "tokens"
    LOGITS = "logits"
    PROBABILITIES = "probabilities"

    def __str__(self) -> str:
        return f"Known.{self.name}"


@dataclass(frozen=True, kw_only=True)
class VerificationSpec:
    """What dispatch and the kernels specialize on.

    Attributes:
        max_drafts: of a request, from 1 to 128.
        known: TOKENS: a draft is accepted if it equals the token drawn at its position. LOGITS or PROBABILITIES of
            the distributions that drafts were drawn from: the ratio test.
        vocab: logits of a row of the target model.
        draft_dtype: of the drafts' logits, float32, bfloat16 or float16; probabilities are float32.
        token_dtype: of the results: int64 or int32.

    Raises:
        InvalidInput: a value is out of range.
    """

    max_drafts: int
    vocab: int
    known: Known = Known.TOKENS
    draft_dtype: torch.dtype = torch.float32
    token_dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)  # the class is frozen
        set_field("max_drafts", checks.integer("max_drafts", self.max_drafts, 1, MAX_DRAFTS))
        set_field("vocab", checks.integer("vocab", self.vocab, 1, MAX_VOCAB))
        checks.member("known", self.known, Known)
        accepted = LOGITS_DTYPES if self.known is Known.LOGITS else (torch.float32,)
        checks.dtype("draft_dtype", self.draft_dtype, accepted)
        checks.dtype("token_dtype", self.token_dtype, TOKEN_DTYPES)


@dataclass(frozen=True, kw_only=True)
class Distributions:
    """The distributions that drafts were drawn from.

    Each draft has a row of `values`. The reference refuses an index below 0 or from n on with InvalidInput; on a GPU
    values are not read on the host, and a kernel reads out of bounds.

    Attributes:
        values: [n, draft vocab], logits before the temperature, or float32 probabilities. The draft vocabulary is the
            first part of the target's, or all of it.
        index: int32 or int64 [rows]: the row of `values` of each row's draft, from 0 to n - 1. It is not read for a
            request's last row.
    """

    values: torch.Tensor
    index: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The drafts of a step, by rows of logits. A request with n drafts has n + 1 adjacent rows.

    The reference refuses `cu_rows` that decrease, that are not from 0 to the number of rows, or of a request with more
    than the spec's max_drafts, with InvalidInput. On a GPU they are not read on the host. A kernel reads or writes out
    of bounds for rows that do not exist, takes a request that ends before it begins for one without rows, and leaves
    out the drafts past max_drafts.

    Attributes:
        inputs: int32 or int64 [rows]: the token that precedes each row's. The draft of a row is the input of its
            request's next row. A negative draft, or one beyond the vocabulary, is never accepted.
        cu_rows: int32 [requests + 1]: the first row of each request, and the end; no decreasing numbers, from 0 to
            rows. A request may have no row, and at most max_drafts + 1.
        distributions: None where only tokens are known.
    """

    inputs: torch.Tensor
    cu_rows: torch.Tensor
    distributions: Distributions | None = None

    @property
    def requests(self) -> int:
        return self.cu_rows.shape[0] - 1

    def check(self, spec: VerificationSpec, rows: int, device: torch.device) -> None:
        """Raise InvalidInput where a shape, dtype, stride or device does not match."""
        checks.tensor("cu_rows", self.cu_rows)
        require(self.cu_rows.dim() == 1 and len(self.cu_rows) > 0, "cu_rows is empty: [requests + 1] is needed")
        check_vector("inputs", self.inputs, rows, (torch.int32, torch.int64), device)
        check_vector("cu_rows", self.cu_rows, len(self.cu_rows), (torch.int32,), device)
        known = self.distributions
        require(
            (known is None) == (spec.known is Known.TOKENS),
            f"distributions are {'not ' if known is None else ''}given: the spec has {spec.known}",
        )
        if known is None:
            return
        checks.instance("distributions", known, Distributions)
        checks.tensor("values", known.values)
        check_vector("index", known.index, rows, (torch.int32, torch.int64), device)
        values = known.values
        fits = values.dim() == 2 and values.dtype == spec.draft_dtype and 0 < values.shape[1] <= spec.vocab
        if not fits or values.stride(1) != 1 or values.device != device:
            raise InvalidInput(
                f"values are {short(values.dtype)} {tuple(values.shape)} on {values.device}: "
                f"{short(spec.draft_dtype)} [n, at most {spec.vocab}] with contiguous rows on {device} is needed"
            )


def check_vector(
    name: str, tensor: torch.Tensor, length: int | None, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raise InvalidInput unless the tensor is a vector as wanted; without a length no tensor is."""
    checks.tensor(name, tensor)
    if tensor.shape != (length,) or not tensor.is_contiguous() or tensor.dtype not in dtypes:
        names = " or ".join(map(short, dtypes))
        raise InvalidInput(
            f"{name} is {short(tensor.dtype)} {tuple(tensor.shape)}: contiguous "
            f"[{'rows' if length is None else length}] of {names} is needed"
        )
    require(tensor.device == device, f"{name} is on {tensor.device}: {device} is needed")


class Verified(NamedTuple):
    """Results of a step: buffers of the plan, which its next step overwrites.

    Attributes:
        tokens: [requests, max_drafts + 1]: the accepted drafts and the token after them; -1 from there on.
        counts: int32 [requests]: tokens of each request, one more than its accepted drafts; 0 for one without rows.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
