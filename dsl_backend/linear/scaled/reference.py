# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands in eager torch: the tests' reference, and the kernel of a CPU."""

from functools import partial

import torch

from dsl_backend.gemm.activation import Activation
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear import reference
from dsl_backend.linear.scaled.kernel import Launch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.reference import Quantized, dequantized, scales_of, stored
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def exact(
    x: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The layer of the dequantised operands with every step in the given arithmetic, before its output is quantised."""
    return reference.exact(
        dequantized(x, dtype),
        dequantized(weight, dtype),
        bias,
        activation=activation,
        interleaved=interleaved,
        dtype=dtype,
    )


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
        dtype=torch.float32,
    )
    if spec.out is None:
        operands.out.copy_(result)
        return
    assert operands.out_scale is not None
    if not spec.out_scale_given:
        operands.out_scale.copy_(scales_of(result, spec.out))
    operands.out.copy_(stored(result, operands.out_scale, spec.out))
