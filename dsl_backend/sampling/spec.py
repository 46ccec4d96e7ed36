# SPDX-License-Identifier: Apache-2.0
"""The sampler's problem: its static spec, the parameters of a step, and the results."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.sampling.fixed_point import MAX_VOCAB

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKEN_DTYPES = (torch.int64, torch.int32)
MAX_LOGPROBS = 128


class LogprobsMode(enum.Enum):
    """Which values of the drawn token and of the likeliest tokens are returned, by vLLM's names.

    RAW_LOGPROBS are the log-softmax of the logits as they are given; RAW_LOGITS are these logits. PROCESSED_LOGPROBS
    are after temperature and filters.
    """

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"

    def __str__(self) -> str:
        return f"LogprobsMode.{self.name}"


@dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """What dispatch and the kernels specialize on.

    Attributes:
        vocab: logits of a row, from 1 to 2**21.
        dtype: of the logits: float32, bfloat16 or float16.
        token_dtype: of the tokens: int64 or int32.
        logprobs: also return the log-probabilities that the tokens were drawn with, of the whole vocabulary.
        logprobs_mode: also return a value of each row's token, its rank, and the likeliest tokens.
            PROCESSED_LOGPROBS needs logprobs.
        num_logprobs: how many of the likeliest tokens of each row at most, from 0 to 128; needs logprobs_mode.
        kept: steps may ask for what the filters keep (`Kept`), also without filters. Not with values of raw logits.

    Raises:
        InvalidInput: a value is out of range.
    """

    vocab: int
    dtype: torch.dtype = torch.float32
    token_dtype: torch.dtype = torch.int64
    logprobs: bool = False
    logprobs_mode: LogprobsMode | None = None
    num_logprobs: int = 0
    kept: bool = False

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)  # the class is frozen
        set_field("vocab", checks.integer("vocab", self.vocab, 1, MAX_VOCAB))
        checks.dtype("dtype", self.dtype, LOGITS_DTYPES)
        checks.dtype("token_dtype", self.token_dtype, TOKEN_DTYPES)
        checks.flag("logprobs", self.logprobs)
        if self.logprobs_mode is not None:
            checks.member("logprobs_mode", self.logprobs_mode, LogprobsMode)
        set_field("num_logprobs", checks.integer("num_logprobs", self.num_logprobs, 0, min(MAX_LOGPROBS, self.vocab)))
        require(
            self.logprobs_mode is not None or not self.num_logprobs,
            f"num_logprobs is {self.num_logprobs}: a logprobs_mode is needed with it",
        )
        require(
            self.logprobs or self.logprobs_mode is not LogprobsMode.PROCESSED_LOGPROBS,
            f"logprobs_mode is {self.logprobs_mode}: logprobs=True is needed with it",
        )
        checks.flag("kept", self.kept)
        require(
            not self.kept or self.logprobs_mode in (None, LogprobsMode.PROCESSED_LOGPROBS),
            f"kept is True and logprobs_mode {self.logprobs_mode}: there are no values of raw logits with it",
        )


# Of each tensor of Parameters. A table, because it is read in every step.
PARAMETER_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "seeds": (torch.int64,),
    "positions": (torch.int64,),
    "temperature": (torch.float32,),
    "top_k": (torch.int32, torch.int64),
    "top_p": (torch.float32,),
    "min_p": (torch.float32,),
}


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
        shape = (rows,)
        for name, dtypes in PARAMETER_DTYPES.items():
            tensor = getattr(self, name)
            if tensor is None and name not in ("seeds", "positions"):
                continue
            checks.tensor(name, tensor)
            if tensor.dtype not in dtypes or tensor.shape != shape or not tensor.is_contiguous():
                names = " or ".join(map(short, dtypes))
                raise InvalidInput(
                    f"{name} is {short(tensor.dtype)} {tuple(tensor.shape)}: contiguous [{rows}] of {names} is needed"
                )
            if tensor.device != device:
                raise InvalidInput(f"{name} is on {tensor.device}: {device} is needed")
            if tensor.requires_grad:
                checks.no_gradient(name, tensor)

    @property
    def has_filters(self) -> bool:
        return any(one is not None for one in (self.top_k, self.top_p, self.min_p))


def parameters_off(max_rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """By name, tensors [max_rows] that turn a parameter off, for kernels that take one in any case."""
    return {
        "temperature": torch.ones(max_rows, device=device),
        "top_k": torch.zeros(max_rows, dtype=torch.int32, device=device),
        "top_p": torch.ones(max_rows, device=device),
        "min_p": torch.zeros(max_rows, device=device),
    }


def first_rows(tensors: Mapping[str, torch.Tensor]) -> Callable[[int], Mapping[str, torch.Tensor]]:
    """A function of a number of rows: views of so many first ones, which are made once for each number."""
    return cache(lambda rows: {name: tensor[:rows] for name, tensor in tensors.items()})


class Kept(NamedTuple):
    """What the filters keep of rows, and what their probabilities are normalized with; tensors [rows].

    A token is kept if its logit is above the pivot, or equals it and the id is at least `tie_ids`, and if its
    probability before normalization is at least `min_probs`, or 0. That is every token of a row without filters. Of
    greedy rows nothing is written.

    Attributes:
        references: float32, the row's largest logit, infinity as the largest number.
        normals: int64, 2**62 / the sum of the kept probabilities in units of 2**-40; 0 for a row without a logit above
            -inf.
        pivots: int64, the least logit that top-k and top-p keep or one below which all probabilities are 0, as
            `to_ordered_uint`.
        tie_ids: int32.
        min_probs: int64, in units of 2**-40.
    """

    references: torch.Tensor
    normals: torch.Tensor
    pivots: torch.Tensor
    tie_ids: torch.Tensor
    min_probs: torch.Tensor


class Sampled(NamedTuple):
    """Results of a step: buffers of the plan, which its next step overwrites. Only tokens unless the spec wants more.

    Attributes:
        tokens: [rows], ids from 0 to vocab - 1.
        logprobs: [rows, vocab] float32, log-probabilities after temperature and filters; -inf where masked. A greedy
            row is not filtered.
        top_ids: [rows, 1 + num_logprobs] int32: the token, and then the likeliest tokens, likeliest first; of equally
            likely ones the lower id first.
        top_logprobs: [rows, 1 + num_logprobs] float32, the values of the spec's logprobs_mode of these ids.
        token_ranks: [rows] int32, how many tokens are at least as likely as the drawn one, itself included.
        kept: by the filters. None where a step does not ask for it, and of kernels that do not find it.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    token_ranks: torch.Tensor | None = None
    kept: Kept | None = None

    def rows(self, count: int) -> "Sampled":
        """Views of the first rows."""
        return self.map(lambda tensor: tensor[:count])

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Sampled":
        """With each tensor that there is changed."""
        *tensors, _ = self
        changed = Sampled(*[None if one is None else change(one) for one in tensors])  # type: ignore[arg-type]
        return changed._replace(kept=None if self.kept is None else Kept(*map(change, self.kept)))

    @classmethod
    def joined(cls, parts: Sequence["Sampled"]) -> "Sampled":
        """The rows of all parts, which have the same tensors."""
        *columns, kept = zip(*parts, strict=True)
        whole = cls(*[None if column[0] is None else torch.cat(column) for column in columns])  # type: ignore[arg-type]
        return whole._replace(kept=None if kept[0] is None else Kept(*map(torch.cat, zip(*kept, strict=True))))

    def likeliest(self, num_logprobs: int) -> "Sampled":
        """With so many of the likeliest tokens, at most those that there are."""
        if self.top_ids is None or self.top_logprobs is None:
            return self
        return self._replace(
            top_ids=self.top_ids[:, : 1 + num_logprobs], top_logprobs=self.top_logprobs[:, : 1 + num_logprobs]
        )


def kept_buffers(max_rows: int, device: torch.device) -> Kept:
    return Kept(
        references=torch.empty(max_rows, device=device),
        normals=torch.empty(max_rows, dtype=torch.int64, device=device),
        pivots=torch.empty(max_rows, dtype=torch.int64, device=device),
        tie_ids=torch.empty(max_rows, dtype=torch.int32, device=device),
        min_probs=torch.empty(max_rows, dtype=torch.int64, device=device),
    )


def buffers(spec: SamplingSpec, max_rows: int, device: torch.device) -> Sampled:
    """Buffers for the results of up to max_rows rows."""
    results = Sampled(torch.empty(max_rows, dtype=spec.token_dtype, device=device))
    if spec.logprobs:
        results = results._replace(logprobs=torch.empty(max_rows, spec.vocab, device=device))
    if spec.kept:
        results = results._replace(kept=kept_buffers(max_rows, device))
    if spec.logprobs_mode is None:
        return results
    columns = 1 + spec.num_logprobs
    return results._replace(
        top_ids=torch.empty(max_rows, columns, dtype=torch.int32, device=device),
        top_logprobs=torch.empty(max_rows, columns, device=device),
        token_ranks=torch.empty(max_rows, dtype=torch.int32, device=device),
    )
