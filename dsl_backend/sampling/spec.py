# SPDX-License-Identifier: Apache-2.0
"""What a sampling problem is: the static facts, one step's parameters, and what comes out."""

from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.sampling.fixed import LARGEST_VOCAB

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKEN_DTYPES = (torch.int64, torch.int32)
MOST_TOP = 128


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """The static facts of a sampler: all that dispatch judges and kernels specialise on.

    Attributes:
        vocab: logits of a row, from 1 to 2**21.
        dtype: of the logits: float32, bfloat16 or float16.
        token_dtype: of the tokens: int64 or int32.
        logprobs: also give the log-probabilities that the tokens were drawn by.
        top: also give so many of the likeliest tokens of each row, from 0 to 128; needs logprobs.

    Raises:
        InvalidInput: a value is none of these.
    """

    vocab: int
    dtype: torch.dtype = torch.float32
    token_dtype: torch.dtype = torch.int64
    logprobs: bool = False
    top: int = 0

    def __post_init__(self) -> None:
        settle = partial(object.__setattr__, self)  # the class is frozen
        settle("vocab", checks.integer("vocab", self.vocab, 1, LARGEST_VOCAB))
        checks.dtype("dtype", self.dtype, LOGITS_DTYPES)
        checks.dtype("token_dtype", self.token_dtype, TOKEN_DTYPES)
        checks.flag("logprobs", self.logprobs)
        settle("top", checks.integer("top", self.top, 0, min(MOST_TOP, self.vocab)))
        require(self.logprobs or not self.top, f"top is {self.top}: logprobs=True is needed with it")


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How each row of a step is sampled: tensors [rows] on the logits' device; None is off for all rows.

    Values are never read on the host; each has a defined meaning whatever it is.

    Attributes:
        seeds: int64, the key of a row's random numbers.
        positions: int64, which number of the key: a row draws the same token wherever (seed, position) is the same.
        temperature: float32. Greedy below 1e-5 and where NaN: the likeliest token, before any filter. None is 1.
        top_k: int32 or int64. Off at 0 and below, and from the vocabulary's size on.
        top_p: float32. Off at 1, above and where NaN; at 0 and below the likeliest token is left.
        min_p: float32. Off at 0, below and where NaN; at 1 and above, what ties with the likeliest token is left.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None

    def check(self, rows: int, device: torch.device) -> None:
        """Raises InvalidInput where a tensor does not fit."""
        integer, real = (torch.int64,), (torch.float32,)
        accepted = {"seeds": integer, "positions": integer, "top_k": (torch.int32, torch.int64)}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is None and field.name not in ("seeds", "positions"):
                continue
            checks.tensor(field.name, tensor)
            dtypes = accepted.get(field.name, real)
            if tensor.shape != (rows,) or not tensor.is_contiguous() or tensor.dtype not in dtypes:
                names = " or ".join(map(short, dtypes))
                raise InvalidInput(
                    f"{field.name} is {short(tensor.dtype)} {tuple(tensor.shape)}: contiguous [{rows}] of {names} is "
                    f"needed"
                )
            if tensor.device != device:
                raise InvalidInput(f"{field.name} is on {tensor.device}: {device} is needed")
            checks.no_gradient(field.name, tensor)


class Sampled(NamedTuple):
    """A step's result; the plan's own buffers, which its next step overwrites.

    Attributes:
        tokens: [rows] ids from 0 to vocab - 1.
        logprobs: [rows, vocab] float32: the log-probabilities after temperature and filters, -inf where filtered; None
            unless the spec asks for them. A greedy row has those of its logits.
        token_logprobs: [rows] float32 of the tokens.
        token_ranks: [rows] int32: how many tokens are at least as likely, itself included.
        top_ids: [rows, top] int32, likeliest first, the lower id where equal.
        top_logprobs: [rows, top] float32.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    token_logprobs: torch.Tensor | None = None
    token_ranks: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def rows(self, count: int) -> "Sampled":
        """The first rows."""
        return Sampled(*(None if tensor is None else tensor[:count] for tensor in self))  # type: ignore[arg-type]


def buffers(spec: SamplingSpec, max_rows: int, device: torch.device) -> Sampled:
    """Room for the results of up to max_rows rows."""
    tokens = torch.empty(max_rows, dtype=spec.token_dtype, device=device)
    if not spec.logprobs:
        return Sampled(tokens)
    return Sampled(
        tokens,
        torch.empty(max_rows, spec.vocab, device=device),
        torch.empty(max_rows, device=device),
        torch.empty(max_rows, dtype=torch.int32, device=device),
        torch.empty(max_rows, spec.top, dtype=torch.int32, device=device),
        torch.empty(max_rows, spec.top, device=device),
    )
