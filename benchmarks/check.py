# SPDX-License-Identifier: Apache-2.0
"""Checks results against the reference. Providers with a wrong result are not timed."""

from dataclasses import dataclass

import torch
from dsl_backend.providers import Limits
from dsl_backend.testing.numerics import assert_within_budget

from .case import Reference

# Rounding P and the output to bf16 costs about 2⁻⁹ each; measured kernels have errors of 2e-3 to 4e-3.
BF16_LIMITS = Limits(total=1e-2, row=3e-2)
# For kernels that also round queries and P to e4m3 (2⁻⁴ each).
FP8_LIMITS = Limits(total=0.15, row=0.5)
EXACT = Limits(total=0.0, row=0.0)


@dataclass(frozen=True)
class Error:
    """Distance from the exact result divided by its norm: for all compared rows, and for the worst row."""

    total: float
    row: float


class WrongResultError(Exception):
    """A provider's output is not close enough to the reference."""


def measure(output: torch.Tensor, reference: Reference) -> Error:
    """Compares the sampled rows of an output [rows, ..., width] with the reference.

    Raises:
        WrongResultError: an element of the output, sampled or not, is not finite.
    """
    finite = torch.isfinite(output if output.dtype != torch.float8_e4m3fn else output.float())
    if not bool(finite.all()):
        raise WrongResultError(
            f"{int((~finite).sum())} of {output.numel()} elements are not finite or were never written"
        )
    difference = output[reference.rows].double() - reference.values
    norms = torch.linalg.vector_norm(reference.values, dim=-1)
    # A row of zeros has the norm 0: divide by the mean norm of the rows instead.
    scale = norms.clamp_min(float(norms.mean()) * 1e-3 + 1e-300)
    worst = (torch.linalg.vector_norm(difference, dim=-1) / scale).max()
    total = torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(reference.values).clamp_min(1e-300)
    return Error(total=float(total), row=float(worst))


def require_right(output: torch.Tensor, reference: Reference, limits: Limits) -> Error:
    """The error of an output, if it is within the limits.

    Raises:
        WrongResultError: the error exceeds the limits.
    """
    error = measure(output, reference)
    if not (error.total <= limits.total and error.row <= limits.row):
        raise WrongResultError(
            f"error {error.total:.2e}, worst row {error.row:.2e}; limits {limits.total:.0e} and {limits.row:.0e}"
        )
    return error


def require_as_good(output: torch.Tensor, reference: Reference, naive: torch.Tensor) -> None:
    """Checks that an output's error is within the budget that the error of another result gives.

    Args:
        naive: the compared rows of the other result.

    Raises:
        WrongResultError: the error is larger, or an element was never written.
    """
    measure(output, reference)
    try:
        assert_within_budget(output[reference.rows], reference.values, naive)
    except AssertionError as error:
        raise WrongResultError(str(error)) from None
