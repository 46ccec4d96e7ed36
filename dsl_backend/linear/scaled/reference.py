# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands in eager torch: the tests' reference, and the kernel of a CPU."""

from functools import partial

import torch
from torch.nn import functional

from dsl_backend.gemm.activation import Activation
from dsl_backend.gemm.reference import activate, halves
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.scaled.kernel import Launch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.reference import Quantized, mma_dequantized, mma_quantized, scales_of, stored
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def products(x: Quantized, weight: Quantized, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Products x @ weight^T, [rows, weight rows], in the given arithmetic and in the order of `gemm.scaled`.

    Those of NVFP4 lack the scales of whole matrices.
    """

    def wide(matrix: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
        return matrix.values.to(dtype), matrix.scale.to(dtype)

    if x.kind.swizzled:
        return functional.linear(mma_dequantized(x).to(dtype), mma_dequantized(weight).to(dtype))
    block = x.kind.block_columns
    (values, scale), (weights, weight_scale) = wide(x), wide(weight)
    if block is None:
        return functional.linear(values, weights) * weight_scale.view(1, -1) * scale.view(-1, 1)
    result = values.new_zeros(len(values), len(weights))
    by_row = weight_scale.repeat_interleave(weight.kind.block_rows or 1, 0)[: len(weights)]
    for index, first in enumerate(range(0, values.shape[1], block)):
        part = functional.linear(values[:, first : first + block], weights[:, first : first + block])
        result += scale[:, index, None] * by_row[None, :, index] * part
    return result


def exact(
    x: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    interleaved: bool = False,
    alpha: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The layer with every step in the given arithmetic, before its output is quantised."""
    result = products(x, weight, dtype)
    if alpha is not None:
        result *= alpha.to(dtype)
    if bias is not None:
        result += bias.to(dtype)
    if activation is None:
        return result
    gate, up = halves(result.t(), interleaved)
    return activate(gate.t(), up.t(), activation)


def bind(spec: ScaledLinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The layer for any number of rows."""
    rows.on_host()
    return partial(linear, spec)


def linear(spec: ScaledLinearSpec, operands: ScaledOperands) -> None:
    """Writes operands.out and a computed operands.out_scale, in float32 arithmetic."""
    result = exact(
        Quantized(operands.x, operands.x_scale, spec.x),
        Quantized(operands.weight, operands.weight_scale, spec.weight),
        operands.bias,
        activation=spec.activation,
        interleaved=spec.interleaved,
        alpha=operands.alpha,
        dtype=torch.float32,
    )
    if spec.out is None:
        operands.out.copy_(result)
        return
    assert operands.out_scale is not None
    if spec.out.swizzled:
        whole = 1.0 if operands.out_global_scale is None else operands.out_global_scale
        found = mma_quantized(result, spec.out, whole)
        operands.out.copy_(found.values)
        operands.out_scale.copy_(found.scale)
        return
    if not spec.out_scale_given:
        operands.out_scale.copy_(scales_of(result, spec.out))
    operands.out.copy_(stored(result, operands.out_scale, spec.out))
