# SPDX-License-Identifier: Apache-2.0
"""Linear layers as operators, each one node for torch.compile: `torch.ops.dsl_backend.linear` and in-place variants."""

from functools import cache

import torch

from dsl_backend.gemm.activation import Activation, Geglu, Swiglu
from dsl_backend.linear import eager
from dsl_backend.runtime.op import register_op


def encoded(activation: Activation | None) -> tuple[str, list[float]]:
    """An activation in types that an operator's schema allows; `decoded` is the inverse."""
    if activation is None:
        return "none", []
    if isinstance(activation, Geglu):
        return "geglu", [float(activation.tanh)]
    limit = [] if activation.limit is None else [activation.limit]
    return "swiglu", [activation.alpha, activation.beta, *limit]


def decoded(name: str, parameters: list[float]) -> Activation | None:
    return _decoded(name, tuple(parameters))


@cache
def _decoded(name: str, parameters: tuple[float, ...]) -> Activation | None:
    if name == "none":
        return None
    if name == "geglu":
        return Geglu(tanh=bool(parameters[0]))
    return Swiglu(alpha=parameters[0], beta=parameters[1], limit=parameters[2] if len(parameters) > 2 else None)


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
    return eager.linear(
        x,
        weight,
        bias,
        residual,
        None,
        decoded(activation, parameters),
        interleaved,
        batch_invariant,
        spare_sms,
        kernel,
    )


def linear_fake(
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
    eager.linear(
        x,
        weight,
        bias,
        residual,
        out,
        decoded(activation, parameters),
        interleaved,
        batch_invariant,
        spare_sms,
        kernel,
    )


def linear_out_fake(
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
    linear_out_fake(x, weight, bias, None, out, activation, parameters, interleaved, batch_invariant, spare_sms, kernel)


LINEAR = register_op("linear", linear, fake=linear_fake)
LINEAR_OUT = register_op("linear_out", linear_out, fake=linear_out_fake, mutates=("out",))
LINEAR_ADD = register_op("linear_add", linear_add, fake=linear_add_fake, mutates=("out",))
