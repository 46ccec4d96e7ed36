# SPDX-License-Identifier: Apache-2.0
"""Rows of logits to sample from, their parameters, and the check of the tokens."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from dsl_backend.providers import Limits
from dsl_backend.sampling import reference as definition
from dsl_backend.sampling.spec import LogprobsMode, Parameters, SamplingSpec

from ..case import Reference, compared_rows
from ..check import EXACT

COMPARED = 8  # number of compared rows of a layer
# The filters of a batch; all of its rows have the same.
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "k": {"top_k": 50},
    "p": {"top_p": 0.9},
    "k+p": {"top_k": 50, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
}
# Peers compute in float32: a token this close to the bound of top-p may be kept or removed.
NEAR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sampling one token from each row at temperature 1.

    Attributes:
        dtype: name of the logits' type.
        logprobs: how many of the likeliest tokens are returned too, with their log-probabilities and the token's rank;
            None for tokens alone.
    """

    rows: int
    vocab: int
    filters: str
    dtype: str = "float32"
    logprobs: int | None = None

    @property
    def spec(self) -> SamplingSpec:
        return SamplingSpec(
            vocab=self.vocab,
            dtype=getattr(torch, self.dtype),
            logprobs_mode=None if self.logprobs is None else LogprobsMode.RAW_LOGPROBS,
            num_logprobs=self.logprobs or 0,
        )

    @property
    def traffic_bytes(self) -> int:
        """Every logit is read once."""
        return self.rows * (self.spec.dtype.itemsize * self.vocab + 8)

    @property
    def limits(self) -> Limits:
        return EXACT

    @property
    def parameters(self) -> dict[str, object]:
        found: dict[str, object] = {
            "rows": self.rows,
            "vocab": self.vocab,
            "filters": self.filters,
            "dtype": self.dtype,
        }
        return found if self.logprobs is None else found | {"logprobs": self.logprobs}


@dataclass(frozen=True)
class Layer:
    """Logits [rows, vocab]; tokens [rows] int64 are what our kernels write."""

    logits: torch.Tensor
    parameters: Parameters
    tokens: torch.Tensor


class Compared(Protocol):
    """Inputs that know which rows are compared."""

    @property
    def compared(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Inputs:
    layers: tuple[Layer, ...]
    compared: torch.Tensor


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    """Normal logits with a standard deviation like a model's."""
    generator = torch.Generator(device).manual_seed(seed)
    count = problem.rows
    kinds = {"top_k": torch.int32}
    filters: dict[str, Any] = {
        name: torch.full((count,), value, dtype=kinds.get(name, torch.float32), device=device)
        for name, value in FILTERS[problem.filters].items()
    }
    made = []
    for _ in range(layers):
        logits = torch.empty(count, problem.vocab, device=device).normal_(0, 3, generator=generator)
        ids = torch.randint(1 << 40, (2, count), device=device, generator=generator)
        parameters = Parameters(seeds=ids[0], positions=ids[1], temperature=torch.ones(count, device=device), **filters)
        logits = logits.to(problem.spec.dtype)
        made.append(Layer(logits, parameters, torch.full((count,), -1, device=device)))
    return Inputs(tuple(made), compared_rows(count, COMPARED, seed, device))


def poison(inputs: Inputs) -> None:
    """Fill the tokens with -1."""
    for layer in inputs.layers:
        layer.tokens.fill_(-1)


def reference(problem: object, inputs: Compared, layer: int, seed: int = 0) -> Reference:
    """Ones, one for each compared row, whatever the seed: `verdict` returns 1 for a right token."""
    values = torch.ones(len(inputs.compared), 1, dtype=torch.float64, device=inputs.compared.device)
    return Reference(inputs.compared, values)


def some_of(parameters: Parameters, chosen: torch.Tensor, **changes: torch.Tensor) -> Parameters:
    """The parameters of the chosen rows."""
    given = {name: value for name, value in vars(parameters).items() if value is not None}
    return Parameters(**{**{name: value[chosen] for name, value in given.items()}, **changes})


def only_exact(inputs: Inputs, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens of this package's kernels, with -1 for a compared one that the reference does not sample.

    Peers have other random numbers: they are right with any token that the filters keep.
    """
    (layer,) = (layer for layer in inputs.layers if layer.tokens.data_ptr() == tokens.data_ptr())
    chosen, marked = inputs.compared, tokens.view(-1).clone()
    right = definition.sample(layer.logits[chosen], some_of(layer.parameters, chosen))[0] == marked[chosen]
    marked[chosen] = marked[chosen].where(right, -1)
    return marked


def verdict(inputs: Inputs, index: int, tokens: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: 0 for a compared token that is wrong, else 1; a right token is any that the filters keep."""
    layer, chosen = inputs.layers[index], inputs.compared
    logits, found = layer.logits[chosen], tokens.view(-1)[chosen].long()
    wide = some_of(layer.parameters, chosen)
    if wide.top_p is not None:
        wide = some_of(layer.parameters, chosen, top_p=(wide.top_p + NEAR).clamp(max=1))
    kept = definition.filter_mask(logits, wide) & (logits > -torch.inf)
    inside = (found >= 0) & (found < logits.shape[1])
    right = inside & kept.gather(1, found.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    judged = torch.ones(len(layer.logits), 1, dtype=torch.float64, device=logits.device)
    judged[chosen, 0] = right.double()
    return judged
