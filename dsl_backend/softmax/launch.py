# SPDX-License-Identifier: Apache-2.0
"""Checks of the tensors and the launch of the kernel that serves. The API and the operators use them."""

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.rows import check_like, check_rows, common_vector, with_expected_strides
from dsl_backend.runtime import target as targets
from dsl_backend.softmax import dispatch
from dsl_backend.softmax.spec import SoftmaxSpec


def check_out(x: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    """Raise InvalidInput where an output does not match its input."""
    check_rows("out", out)
    check_like("out", out, x)
    require(
        out_dtype in (None, out.dtype),
        f"out is {short(out.dtype)} and out_dtype {out_dtype}: they must agree, or out_dtype be left out",
    )
    checks.apart("out", out)


def run(
    x: torch.Tensor, out: torch.Tensor | None, log: bool, out_dtype: torch.dtype | None, kernel: str | None
) -> torch.Tensor:
    """Check x and out, and launch; arguments as `api.softmax`."""
    check_rows("x", x)
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    else:
        check_out(x, out, out_dtype)
    rows, width = x.shape
    if rows and width:
        x_rows, out_rows = with_expected_strides(x), with_expected_strides(out)
        vector = common_vector(x_rows, out_rows)
        spec = SoftmaxSpec(width=width, dtype=x.dtype, out_dtype=out.dtype, log=log, vector=vector)
        target = targets.detect(x.device)
        dispatch.chosen(spec, target, kernel)(x_rows, out_rows, spec, target)
    return out
