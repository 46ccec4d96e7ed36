# SPDX-License-Identifier: Apache-2.0
"""Linear layers in eager torch: the tests' reference, and the kernel of a CPU."""

import math
from functools import partial

import torch
from torch.nn import functional

from dsl_backend.gemm.activation import Activation, Geglu
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.linear.kernel import Launch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def activate(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Gate and up projections to the activation's output, in their dtype."""
    if isinstance(activation, Geglu):
        if activation.tanh:
            return functional.gelu(gate, approximate="tanh") * up
        # functional.gelu(-inf) is NaN or -inf as the dtype and the processor have it; the formula makes it NaN.
        return 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5))) * up
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.alpha == 1:
        # Rounds once where the other form rounds twice.
        return functional.silu(gate) * (up + activation.beta)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def halves(weight: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up rows of a weight or a bias."""
    if interleaved:
        return weight[::2], weight[1::2]
    gate, up = weight.chunk(2)
    return gate, up


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
