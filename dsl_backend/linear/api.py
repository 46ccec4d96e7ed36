# SPDX-License-Identifier: Apache-2.0
"""Linear layers, forward: a GEMM with bias, gated activation and residual in one kernel.

    hidden = api.linear(x, gate_up_weight, activation=Swiglu())
    api.linear(hidden, down_weight, residual=x, out=x)

Products are summed in float32; bias, activation and residual are float32 too. The result is rounded once, to the
output's dtype. NaN and infinities propagate as in torch.
"""

import torch

from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu, encoded
from dsl_backend.linear import eager, ops

__all__ = ["SWIGLU_OAI", "Activation", "Geglu", "Swiglu", "linear"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    activation: Activation | None = None,
    interleaved: bool = False,
    batch_invariant: bool = False,
    spare_sms: int = 0,
    kernel: str | None = None,
) -> torch.Tensor:
    """A layer: activation(x @ weight^T + bias) + residual.

    Args:
        x: [rows, k] float16 or bfloat16, neighbouring columns side by side, rows at any stride.
        weight: [n, k]; with an activation [2 n, k], all gate rows first.
        bias: one for each row of the weight.
        residual: [rows, n], added behind the activation; may be out itself.
        out: [rows, n], written in place and returned; may be the residual and overlap nothing else. New by default.
        activation: Swiglu(...) or Geglu(...); None is the plain product.
        interleaved: the weight's and the bias' gate and up rows alternate: gate 0, up 0, gate 1, ...
        batch_invariant: a row's result has the same bits whatever the other rows are, on the same GPU. Few rows are
            slower with it.
        spare_sms: streaming multiprocessors that the CuTe DSL kernels leave to kernels on another stream: from 0 to one
            less than the GPU has. A CTA of these kernels fills an SM.
        kernel: a name from the dispatch table; that kernel or none. By default the best that serves.

    Rows of all tensors that start at multiples of 16 bytes, and n and k that are multiples of 8, are served fastest.

    Raises:
        InvalidInput: an argument does not fit, or a tensor requires a gradient while gradients are on; the message
            names it. That out overlaps another tensor is not looked at.
        Unsupported: no kernel serves the problem on x's device.
    """
    if torch.compiler.is_compiling():
        eager.columns(x, weight, activation)
        return compiled(x, weight, bias, residual, out, activation, interleaved, batch_invariant, spare_sms, kernel)
    return eager.linear(x, weight, bias, residual, out, activation, interleaved, batch_invariant, spare_sms, kernel)


def compiled(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    activation: Activation | None,
    interleaved: bool,
    batch_invariant: bool,
    spare_sms: int,
    kernel: str | None,
) -> torch.Tensor:
    """The layer inside torch.compile: one node of its graph."""
    name, parameters = encoded(activation)
    if out is None:
        return ops.LINEAR(x, weight, bias, residual, name, parameters, interleaved, batch_invariant, spare_sms, kernel)
    if residual is out:
        ops.LINEAR_ADD(x, weight, bias, out, name, parameters, interleaved, batch_invariant, spare_sms, kernel)
    else:
        ops.LINEAR_OUT(
            x, weight, bias, residual, out, name, parameters, interleaved, batch_invariant, spare_sms, kernel
        )
    return out
