# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of rows, forward.

    out = api.rms_norm(x, weight)
    api.rms_norm(x, weight, x, residual=residual)    # vLLM's fused_add_rms_norm: both are written in place
    api.rms_norm(x, weight, out_dtype=torch.float8_e4m3fn, scale_out=scales)

The arithmetic is float32, with these rounding points:

1. z = x + residual in float32, rounded to x's dtype. This is what residual_out receives and what is normalised, so that
   the call gives the bits of an addition followed by an RMSNorm.
2. y = z * (weight + weight_offset) * rsqrt(mean(z^2) + eps), not rounded on the way.
3. out = y, rounded once to its dtype. For float8_e4m3fn, y is multiplied by the reciprocal of the scale first, and
   saturates at 448. A computed scale is max|y| / 448 of the row, and at least 1 / (448 * 512); of 128 columns of a
   row, and at least 1e-10 / 448.

The reciprocals are float32. A row with NaN becomes NaN, and so does its computed scale. Where the sum of squares
overflows float32, a row becomes 0, except for the elements that are infinite themselves or times their weight: these
become NaN.
"""

import torch

from dsl_backend import checks
from dsl_backend.norm import launch
from dsl_backend.norm.spec import FP8, NormTensors
from dsl_backend.rows import DTYPES, check_rows

__all__ = ["rms_norm"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    kernel: str | None = None,
) -> torch.Tensor:
    """RMSNorm of every row.

    Args:
        x: [rows, width] float32, float16 or bfloat16, with contiguous columns and any row stride. Rows whose strides,
            starts and width are multiples of 16 bytes are read fastest.
        weight: [width] contiguous, of any of these dtypes. CuTe DSL's kernel may read it before the kernels in front of
            it on the stream have ended: it must not be the output of a kernel that lets the next one start early.
        out: [rows, width] of any of these dtypes or float8_e4m3fn, written and returned. It may be x itself; it must
            not overlap an input in another way, which is not checked. By default a new tensor.
        residual: [rows, width] of x's dtype, added to x.
        residual_out: receives x + residual, like residual; it may be x itself, if out is not. By default residual is
            overwritten.
        eps: added to the mean of squares; at least 0.
        weight_offset: added to the weight; 1 for Gemma.
        out_dtype: of a new output; x's by default.
        scale: float32, one element on x's device: the scale of an output in float8_e4m3fn.
        scale_out: float32 [rows] or [rows, 1] contiguous: receives a scale for each row instead. [rows, width / 128]
            with any strides, two groups or more: a scale for each 128 columns of a row, as DeepSeek's linear layers
            need their input.
        kernel: a name from the dispatch table; no other kernel is used. By default the best that serves.

    Raises:
        InvalidInput: an argument does not match, or a tensor requires a gradient while gradients are enabled; the
            message names it.
        Unsupported: no kernel serves the problem on x's device.
    """
    checks.kernel(kernel)
    checks.number("eps", eps, 0.0)
    checks.number("weight_offset", weight_offset)
    if out_dtype is not None:
        checks.dtype("out_dtype", out_dtype, (*DTYPES, FP8))
    check_rows("x", x)
    if out is None:
        out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    else:
        launch.check_out_dtype(out, out_dtype)
    if residual_out is None:
        residual_out = residual
    tensors = NormTensors(x, residual, weight, scale, out, residual_out, scale_out)
    if torch.compiler.is_compiling():
        # One node of the graph.
        from dsl_backend.norm import ops

        ops.RMS_NORM(*tensors, eps, weight_offset, kernel)
        return out
    launch.run(tensors, eps, weight_offset, kernel)
    return out
