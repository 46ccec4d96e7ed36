# SPDX-License-Identifier: Apache-2.0
"""Linear layers as operators, each one node for torch.compile: `torch.ops.dsl_backend.linear` and in-place variants."""

from typing import Any

import torch

from dsl_backend.gemm.activation import decoded
from dsl_backend.linear import eager
from dsl_backend.runtime.op import register_op


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    batch_invariant: bool,
    spare_sms: int,
    kernel: str | None,
) -> torch.Tensor:
    of_layer = decoded(activation, parameters)
    return eager.linear(x, weight, bias, residual, None, of_layer, interleaved, batch_invariant, spare_sms, kernel)


def linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    parameters: list[float],
    *options: object,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], eager.columns(x, weight, decoded(activation, parameters))))


def linear_out(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    batch_invariant: bool,
    spare_sms: int,
    kernel: str | None,
) -> None:
    of_layer = decoded(activation, parameters)
    eager.linear(x, weight, bias, residual, out, of_layer, interleaved, batch_invariant, spare_sms, kernel)


def linear_out_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    parameters: list[float],
    *options: object,
) -> None:
    eager.check_out(out, x.shape[0], eager.columns(x, weight, decoded(activation, parameters)), x)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    batch_invariant: bool,
    spare_sms: int,
    kernel: str | None,
) -> None:
    """Adds the layer to out."""
    linear_out(x, weight, bias, out, out, activation, parameters, interleaved, batch_invariant, spare_sms, kernel)


def linear_add_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *layer: Any
) -> None:
    linear_out_fake(x, weight, bias, None, out, *layer)


LINEAR = register_op("linear", linear, fake=linear_fake)
LINEAR_OUT = register_op("linear_out", linear_out, fake=linear_out_fake, mutates=("out",))
LINEAR_ADD = register_op("linear_add", linear_add, fake=linear_add_fake, mutates=("out",))
