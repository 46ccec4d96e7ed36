# SPDX-License-Identifier: Apache-2.0
"""The sampler's problem: its static spec, the parameters of a step, and the results."""

from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.sampling.fixed_point import MAX_VOCAB

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKEN_DTYPES = (torch.int64, torch.int32)
MAX_LOGPROBS = 128


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """What dispatch and the kernels specialize on.

    Attributes:
        vocab: logits of a row, from 1 to 2**21.
        dtype: of the logits: float32, bfloat16 or float16.
        token_dtype: of the tokens: int64 or int32.
        logprobs: also return the log-probabilities that the tokens were drawn with.
        num_logprobs: how many of the likeliest tokens of each row to return too, from 0 to 128; needs logprobs.

    Raises:
        InvalidInput: a value is out of range.
    """

    vocab: int
    dtype: torch.dtype = torch.float32
    token_dtype: torch.dtype = torch.int64
    logprobs: bool = False
    num_logprobs: int = 0

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)  # the class is frozen
        set_field("vocab", checks.integer("vocab", self.vocab, 1, MAX_VOCAB))
        checks.dtype("dtype", self.dtype, LOGITS_DTYPES)
        checks.dtype("token_dtype", self.token_dtype, TOKEN_DTYPES)
        checks.flag("logprobs", self.logprobs)
        set_field("num_logprobs", checks.integer("num_logprobs", self.num_logprobs, 0, min(MAX_LOGPROBS, self.vocab)))
        require(
            self.logprobs or not self.num_logprobs,
            f"num_logprobs is {self.num_logprobs}: logprobs=True is needed with it",
        )


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Sampling parameters of a step: tensors [rows] on the device of the logits. None turns one off for all rows.

    The host never reads their values, and every value has a defined meaning.

    Attributes:
        seeds: int64, the key of the random number generator.
        positions: int64, its counter. A row with the same logits, seed and position draws the same token.
        temperature: float32. Below 1e-5 or NaN the row is greedy: it gets its likeliest token. None is 1.
        top_k: int32 or int64. Off where it is 0 or less, or at least vocab.
        top_p: float32. Off where it is 1 or more, or NaN. At 0 or less only the likeliest token is kept.
        min_p: float32. Off where it is 0 or less, or NaN. At 1 or more only ties with the likeliest token are kept.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None

    def check(self, rows: int, device: torch.device) -> None:
        """Raise InvalidInput where a shape, dtype, stride or device does not match."""
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
    """Results of a step: buffers of the plan, which its next step overwrites. Only tokens unless spec.logprobs.

    Attributes:
        tokens: [rows], ids from 0 to vocab - 1.
        logprobs: [rows, vocab] float32, log-probabilities after temperature and filters; -inf where masked. A greedy
            row is not filtered.
        token_logprobs: [rows] float32, those of the tokens.
        token_ranks: [rows] int32, how many tokens are at least as likely as the drawn one, itself included.
        top_ids: [rows, num_logprobs] int32, likeliest first; of equally likely ones the lower id first.
        top_logprobs: [rows, num_logprobs] float32.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    token_logprobs: torch.Tensor | None = None
    token_ranks: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def rows(self, count: int) -> "Sampled":
        """Views of the first rows."""
        return Sampled(*(None if tensor is None else tensor[:count] for tensor in self))  # type: ignore[arg-type]


def buffers(spec: SamplingSpec, max_rows: int, device: torch.device) -> Sampled:
    """Buffers for the results of up to max_rows rows."""
    tokens = torch.empty(max_rows, dtype=spec.token_dtype, device=device)
    if not spec.logprobs:
        return Sampled(tokens)
    return Sampled(
        tokens,
        torch.empty(max_rows, spec.vocab, device=device),
        torch.empty(max_rows, device=device),
        torch.empty(max_rows, dtype=torch.int32, device=device),
        torch.empty(max_rows, spec.num_logprobs, dtype=torch.int32, device=device),
        torch.empty(max_rows, spec.num_logprobs, device=device),
    )
