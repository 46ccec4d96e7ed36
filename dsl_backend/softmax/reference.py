# SPDX-License-Identifier: Apache-2.0
"""Softmax in eager torch: the reference of the tests, and the kernel for CPUs."""

import torch

from dsl_backend.runtime.target import Target
from dsl_backend.softmax.spec import SoftmaxSpec


def exact(x: torch.Tensor, *, log: bool = False, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Softmax or log-softmax along the last dimension in the given arithmetic, and in that dtype.

    A row with a NaN, with +inf, or with nothing but -inf becomes NaN.
    """
    function = torch.log_softmax if log else torch.softmax
    return function(x.to(dtype), -1)


def softmax(x: torch.Tensor, out: torch.Tensor, spec: SoftmaxSpec, target: Target) -> None:
    """Write out [rows, width] from x [rows, width], computed in float32."""
    out.copy_(exact(x, log=spec.log, dtype=torch.float32))
