# SPDX-License-Identifier: Apache-2.0
"""An operator's benchmark, made from the functions of its modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsl_backend.providers import Provider

from .case import Case, Reference
from .columns import columns


def fill_outputs(inputs: Any) -> None:
    """Fill the output of every layer with NaN."""
    for layer in inputs.layers:
        layer.out.fill_(torch.nan)


def as_it_is(inputs: Any, layer: int, result: torch.Tensor) -> torch.Tensor:
    return result


@dataclass(frozen=True, kw_only=True)
class RowsOperator:
    """An operator with its rows: `case.Operator` from functions.

    Attributes:
        make, objections: of this package's kernels; see `columns`.
        reference: called with (problem, inputs, layer), and the seed of the compared rows, 0 by default.
    """

    name: str
    unit: str
    cases: Callable[[], Sequence[Case]]
    make: Callable[..., Any]
    objections: Callable[..., Sequence[str]]
    build: Callable[[Any, int, torch.device, int], Any]
    reference: Callable[..., Reference]
    poison: Callable[[Any], None] = fill_outputs
    compared: Callable[[Any, int, torch.Tensor], torch.Tensor] = as_it_is

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider]:
        """Every provider. This package's are first, one for each name in `kernels`, or the default one."""
        return columns(self.name, self.make, self.objections, kernels)
