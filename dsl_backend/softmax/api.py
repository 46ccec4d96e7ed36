# SPDX-License-Identifier: Apache-2.0
"""Softmax and log-softmax of rows, forward.

    probabilities = api.softmax(logits)
    api.softmax(logits, out, log=True)

Arithmetic is float32, rounded once to the output's dtype. As torch does, a row with a NaN, with +inf, or with nothing
but -inf becomes NaN, and -inf beside a finite element gives 0 (-inf with `log`).
"""

import math

import torch

from dsl_backend import checks
from dsl_backend.checks import require, short
from dsl_backend.runtime import target as targets
from dsl_backend.softmax import dispatch
from dsl_backend.softmax.spec import DTYPES, MOST_ROWS, SoftmaxSpec

__all__ = ["softmax"]


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """A matrix with neighbouring columns side by side."""
    checks.tensor(name, tensor)
    require(tensor.dim() == 2, f"{name} has shape {tuple(tensor.shape)}: [rows, width] is needed")
    require(
        tensor.dtype in DTYPES,
        f"{name} is {short(tensor.dtype)}: one of {', '.join(short(dtype) for dtype in DTYPES)} is needed",
    )
    require(tensor.shape[0] <= MOST_ROWS, f"{name} has {tensor.shape[0]} rows: {MOST_ROWS} are the most")
    require(
        tensor.shape[1] <= 1 or tensor.stride(1) == 1,
        f"{name} has stride {tensor.stride(1)} in its last dimension: 1 is needed",
    )
    checks.no_gradient(name, tensor)


def common_vector(x: torch.Tensor, out: torch.Tensor) -> int:
    """Neighbours that may be accessed at once in every row of both tensors: 1, 2, 4 or 8."""
    common = math.gcd(8, x.shape[1])
    for tensor in (x, out):
        common = math.gcd(common, tensor.stride(0), tensor.data_ptr() // tensor.element_size())
    return common


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """The same rows with the strides that kernels expect: of a single column, or of a single row, any is allowed."""
    rows, width = tensor.shape
    if (width > 1 or tensor.stride(1) == 1) and (rows > 1 or tensor.stride(0) == width):
        return tensor
    return tensor.as_strided((rows, width), (tensor.stride(0) if rows > 1 else width, 1))


def softmax(
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    log: bool = False,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """Softmax of every row.

    Args:
        x: [rows, width] float32, float16 or bfloat16, neighbouring columns side by side, rows at any stride. Rows whose
            stride, start and width are multiples of 16 bytes are read fastest.
        out: [rows, width] of any of the dtypes, written in place and returned; may be x itself, and may not overlap it
            otherwise. A new tensor by default.
        log: the natural logarithm of the softmax instead.
        out_dtype: of a new output; x's by default.
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves.

    Raises:
        InvalidInput: an argument does not fit, or a tensor requires a gradient while gradients are on; the message
            names it. That out overlaps x in part is not looked at.
        Unsupported: no kernel serves the problem on x's device.
    """
    check_rows("x", x)
    checks.flag("log", log)
    checks.kernel(kernel)
    if out_dtype is not None:
        checks.dtype("out_dtype", out_dtype, DTYPES)
    if torch.compiler.is_compiling():
        return compiled(x, out, log, out_dtype, kernel)
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    else:
        check_out(x, out, out_dtype)
    rows, width = x.shape
    if rows and width:
        from_rows, to_rows = side_by_side(x), side_by_side(out)
        vector = common_vector(from_rows, to_rows)
        spec = SoftmaxSpec(width=width, dtype=x.dtype, out_dtype=out.dtype, log=log, vector=vector)
        target = targets.detect(x.device)
        dispatch.chosen(spec, target, kernel)(from_rows, to_rows, spec, target)
    return out


def check_out(x: torch.Tensor, out: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    """Raises InvalidInput where an output does not fit its input."""
    check_rows("out", out)
    require(out.shape == x.shape, f"out has shape {tuple(out.shape)}: x's {tuple(x.shape)} is needed")
    require(out.device == x.device, f"out is on {out.device}, x on {x.device}")
    require(
        out_dtype in (None, out.dtype),
        f"out is {short(out.dtype)} and out_dtype {out_dtype}: they must agree, or out_dtype be left out",
    )
    checks.apart("out", out)


def compiled(
    x: torch.Tensor, out: torch.Tensor | None, log: bool, out_dtype: torch.dtype | None, kernel: str | None
) -> torch.Tensor:
    """The same inside of torch.compile: one node of its graph."""
    from dsl_backend.softmax import ops

    if out is None:
        return ops.SOFTMAX(x, log, out_dtype, kernel)
    ops.SOFTMAX_OUT(x, out, log, out_dtype, kernel)
    return out
