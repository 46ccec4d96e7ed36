# SPDX-License-Identifier: Apache-2.0
"""Checks of the tensors and the launch of the kernel that serves. The API and the operators use them."""

import math

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.runtime import target as targets
from dsl_backend.softmax import dispatch
from dsl_backend.softmax.spec import DTYPES, MAX_ROWS, SoftmaxSpec


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInput where a tensor is not a matrix with contiguous columns."""
    checks.tensor(name, tensor)
    require(tensor.dim() == 2, f"{name} has shape {tuple(tensor.shape)}: [rows, width] is needed")
    require(
        tensor.dtype in DTYPES,
        f"{name} is {short(tensor.dtype)}: one of {', '.join(short(dtype) for dtype in DTYPES)} is needed",
    )
    require(tensor.shape[0] <= MAX_ROWS, f"{name} has {tensor.shape[0]} rows: {MAX_ROWS} are the most")
    require(
        tensor.shape[1] <= 1 or tensor.stride(1) == 1,
        f"{name} has stride {tensor.stride(1)} in its last dimension: 1 is needed",
    )
    checks.no_gradient(name, tensor)


def common_vector(x: torch.Tensor, out: torch.Tensor) -> int:
    """Adjacent elements that one access may take in every row of both tensors: 1, 2, 4 or 8."""
    common = math.gcd(8, x.shape[1])
    for tensor in (x, out):
        common = math.gcd(common, tensor.stride(0), tensor.data_ptr() // tensor.element_size())
    return common


def with_expected_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same rows with the strides that kernels expect: torch allows any of a single row or column."""
    rows, width = tensor.shape
    if (width > 1 or tensor.stride(1) == 1) and (rows > 1 or tensor.stride(0) == width):
        return tensor
    return tensor.as_strided((rows, width), (tensor.stride(0) if rows > 1 else width, 1))


def check_out(x: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    """Raise InvalidInput where an output does not match its input."""
    check_rows("out", out)
    require(out.shape == x.shape, f"out has shape {tuple(out.shape)}: x's {tuple(x.shape)} is needed")
    require(out.device == x.device, f"out is on {out.device}, x on {x.device}")
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
