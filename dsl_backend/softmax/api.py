# SPDX-License-Identifier: Apache-2.0
"""Softmax and log-softmax of rows, forward.

    probabilities = api.softmax(logits)
    api.softmax(logits, out, log=True)

Arithmetic is float32, rounded once to the output's dtype. As in torch, a row with NaN or +inf, or with nothing but
-inf, becomes NaN. -inf in a row with a finite element gives 0 (-inf with `log`).
"""

import torch

from dsl_backend import checks
from dsl_backend.rows import DTYPES, check_rows
from dsl_backend.softmax import launch

__all__ = ["softmax"]


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
        x: [rows, width] float32, float16 or bfloat16, with contiguous columns and any row stride. Rows whose stride,
            start and width are multiples of 16 bytes are read fastest.
        out: [rows, width] of any of the dtypes, written and returned. It may be x itself; it must not overlap x in
            another way, which is not checked. By default a new tensor.
        log: the natural logarithm of the softmax instead.
        out_dtype: of a new output; x's by default.
        kernel: a name from the dispatch table; no other kernel is used. By default the best that serves.

    Raises:
        InvalidInput: an argument does not match, or a tensor requires a gradient while gradients are enabled; the
            message names it.
        Unsupported: no kernel serves the problem on x's device.
    """
    checks.flag("log", log)
    checks.kernel(kernel)
    if out_dtype is not None:
        checks.dtype("out_dtype", out_dtype, DTYPES)
    if torch.compiler.is_compiling():
        check_rows("x", x)
        return compiled(x, out, log, out_dtype, kernel)
    return launch.run(x, out, log, out_dtype, kernel)


def compiled(
    x: torch.Tensor, out: torch.Tensor | None, log: bool, out_dtype: torch.dtype | None, kernel: str | None
) -> torch.Tensor:
    """The same while torch.compile traces: one node of its graph."""
    from dsl_backend.softmax import ops

    if out is None:
        return ops.SOFTMAX(x, log, out_dtype, kernel)
    ops.SOFTMAX_OUT(x, out, log, out_dtype, kernel)
    return out
