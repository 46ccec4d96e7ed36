# SPDX-License-Identifier: Apache-2.0
"""Linear layers in eager torch: the tests' reference, and the kernel of a CPU."""

from functools import partial

import torch
from torch.nn import functional

from dsl_backend.gemm.activation import Activation
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.reference import activate, halves
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.kernel import Launch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The layer with every step in the given arithmetic, and in that dtype; shapes as `api.linear`'s."""

    def product(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    if activation is None:
        out = product(weight, bias)
    else:
        gate_weight, up_weight = halves(weight, interleaved)
        gate_bias, up_bias = (None, None) if bias is None else halves(bias, interleaved)
        out = activate(product(gate_weight, gate_bias), product(up_weight, up_bias), activation)
    return out if residual is None else out + residual.to(dtype)


def bind(spec: LinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The layer for any number of rows."""
    rows.on_host()
    return partial(linear, spec)


def linear(spec: LinearSpec, operands: GemmOperands) -> None:
    """Writes operands.out, in float32 arithmetic."""
    result = exact(
        operands.x,
        operands.weight,
        operands.bias,
        operands.residual,
        activation=spec.activation,
        interleaved=spec.interleaved,
        dtype=torch.float32,
    )
    operands.out.copy_(result)
