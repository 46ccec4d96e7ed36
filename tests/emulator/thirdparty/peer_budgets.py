# SPDX-License-Identifier: Apache-2.0
"""How wrong a kernel of others may be: twice what torch is in the same dtype, and two units in the last place.

Budgets are taken row by row, as everywhere in this project: one large row would hide the errors of the others.
"""

import math
from dataclasses import dataclass

import torch

FACTOR, ULPS = 2, 2


@dataclass(frozen=True)
class Expected:
    """An output's yardsticks, all of the output's shape.

    Attributes:
        exact: in float64.
        naive: torch's own result with the output's dtype for what lies between; None: exact, rounded.
        magnitude: of what was summed on the way, where that is larger than the result.
        absolute: what an approximation that the kernel is documented to use may add.
    """

    exact: torch.Tensor
    naive: torch.Tensor | None = None
    magnitude: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """How far an output is off where that is worst, measured by the budget of the place.

    Attributes:
        error, budget: at the worst place.
        largest_error: anywhere.
        wrong: elements over their budgets.
    """

    error: float
    budget: float
    largest_error: float
    wrong: int


def judge(out: torch.Tensor, expected: Expected) -> Verdict:
    """Compare [..., n] row by row; infinities and NaNs have to be where the exact result has them.

    Raises:
        AssertionError: the shape is another one.
    """
    exact = expected.exact.double()
    assert out.shape == exact.shape, f"{tuple(out.shape)} where {tuple(exact.shape)} is right"
    naive = exact.to(out.dtype) if expected.naive is None else expected.naive
    found, right = out.double(), exact
    finite = right.isfinite() & found.isfinite()
    same = finite | (found == right) | (found.isnan() & right.isnan())
    error = torch.where(finite, (found - right).abs(), torch.where(same, 0.0, math.inf))
    naive_error = torch.where(finite & naive.isfinite(), (naive.double() - right).abs(), 0.0)
    size = torch.where(right.isfinite(), right.abs(), 0.0)
    ulps = ULPS * torch.finfo(out.dtype).eps * (row_most(size) + expected.magnitude)
    budget = FACTOR * row_most(naive_error) + ulps + expected.absolute
    over = error - budget
    worst = int(over.argmax())
    return Verdict(
        float(error.flatten()[worst]),
        float(budget.expand_as(error).flatten()[worst]),
        float(error.max()),
        int((over > 0).sum()),
    )


def row_most(values: torch.Tensor) -> torch.Tensor:
    """The largest of each row, of values' rank."""
    return values.amax(-1, keepdim=True) if values.dim() > 1 else values.amax(0, keepdim=True)
