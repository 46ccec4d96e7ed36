# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands, forward: e4m3 products, bias, gated activation and the next quantisation.

    x = quantized(hidden, ROW_SCALED)
    hidden = api.scaled_linear_quantized(x, gate_up, activation=Swiglu(), to=ROW_SCALED)
    out = api.scaled_linear(hidden, down)

Products are summed in float32, and so are bias and activation; the result is rounded once. NaN and infinities
propagate, through an output in e4m3 as NaN or as saturated values: it has no infinity.
"""

import torch

from dsl_backend import checks
from dsl_backend.checks import shown
from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.linear.scaled import eager, ops
from dsl_backend.linear.scaled.eager import How
from dsl_backend.quant.format import (
    BLOCK_SCALED,
    BLOCK_SCALED_E8M0,
    GROUP_SCALED,
    GROUP_SCALED_E8M0,
    MXFP8,
    NVFP4,
    ROW_SCALED,
    TENSOR_SCALED,
    ScaledFormat,
)
from dsl_backend.quant.reference import Quantized, in_mxfp8, mma_quantized, quantized

__all__ = [
    "BLOCK_SCALED",
    "BLOCK_SCALED_E8M0",
    "GROUP_SCALED",
    "GROUP_SCALED_E8M0",
    "MXFP8",
    "NVFP4",
    "ROW_SCALED",
    "SWIGLU_OAI",
    "TENSOR_SCALED",
    "Activation",
    "Geglu",
    "Quantized",
    "Swiglu",
    "in_mxfp8",
    "mma_quantized",
    "quantized",
    "scaled_linear",
    "scaled_linear_quantized",
]


def scaled_linear(
    x: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation | None = None,
    interleaved: bool = False,
    batch_invariant: bool = False,
    kernel: str | None = None,
    alpha: torch.Tensor | None = None,
) -> torch.Tensor:
    """A layer: activation(x @ weight^T + bias), [rows, n] in `dtype`.

    Args:
        x: [rows, k], neighbouring columns side by side, rows at any stride; scales of a tensor, of rows, or of groups
            of 128 columns, these contiguous or as `quant.reference.column_major` has them; others are copied.
        weight: [n, k]; with an activation [2 n, k], all gate rows first. Scales of the tensor, of rows, or, where x has
            groups, of blocks of 128x128: the block of row r is r // 128.
        bias: one for each row of the weight, in `dtype`.
        dtype: float16 or bfloat16.
        activation: Swiglu(...) or Geglu(...); None is the plain product.
        interleaved: the weight's and the bias' gate and up rows alternate.
        batch_invariant: a row's result has the same bits whatever the other rows are, on the same GPU.
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves.
        alpha: float32 [1], needed for NVFP4: the product of the scales of both whole matrices. None for all others.

    n and k are multiples of 16. Operands in MXFP8 and NVFP4, whose scales are swizzled, are multiplied on SM100 by a
    kernel that has to be named, and on a CPU; the same is so of outputs in these formats.

    Raises:
        InvalidInput: an argument does not fit, or a tensor requires a gradient while gradients are on; the message
            names it.
        Unsupported: no kernel serves the problem on x's device.
    """
    return called(x, weight, bias, None, How(dtype, activation, interleaved, None, batch_invariant, kernel), alpha)[0]


def scaled_linear_quantized(
    x: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None = None,
    *,
    to: ScaledFormat,
    out_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation | None = None,
    interleaved: bool = False,
    batch_invariant: bool = False,
    kernel: str | None = None,
    alpha: torch.Tensor | None = None,
) -> Quantized:
    """A layer whose output is quantised for its consumer; arguments and errors as in `scaled_linear`.

    Args:
        to: the output's format. Scales are computed as `quant.reference.scales_of` has them, unless it is
            TENSOR_SCALED; those of MXFP8 and NVFP4 as `quant.reference.mma_quantized` has them, swizzled. Those of
            groups are column-major.
        out_scale: float32 [1], the scale of the whole output, needed for TENSOR_SCALED, whose values are result /
            out_scale, and for NVFP4, whose values are result / (scale of the block * out_scale). None for all others.
        dtype: of the bias.
    """
    checks.instance("to", to, ScaledFormat)
    how = How(dtype, activation, interleaved, to, batch_invariant, kernel)
    out, scale = called(x, weight, bias, out_scale, how, alpha)
    assert scale is not None, "of an output in a format"
    return Quantized(out, scale, to)


def called(
    x: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    how: How,
    alpha: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The layer, as one node inside torch.compile."""
    for name, matrix in (("x", x), ("weight", weight)):
        if not isinstance(matrix, Quantized):
            raise InvalidInput(f"{name} is {shown(matrix)}: a Quantized is needed")
    if torch.compiler.is_compiling():
        return ops.call(x, weight, bias, out_scale, how, alpha)
    return eager.linear(x, weight, bias, out_scale, how, alpha)
