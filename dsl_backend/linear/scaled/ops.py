# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands as operators, each one node for torch.compile.

`torch.ops.dsl_backend.scaled_linear` returns the output, `scaled_linear_dynamic` the output and the scales that it
computed. Formats travel as their names, with commas between: x's, the weight's, the output's or nothing, the dtype, and
`invariant` where bits must not depend on the batch.
"""

import torch

from dsl_backend.checks import short
from dsl_backend.gemm.activation import decoded, encoded
from dsl_backend.linear.scaled import eager
from dsl_backend.linear.scaled.eager import How
from dsl_backend.quant.format import ScaledFormat, scaled_format
from dsl_backend.quant.reference import Quantized
from dsl_backend.runtime.op import register_op


def encoded_formats(x: ScaledFormat, weight: ScaledFormat, how: How) -> str:
    """Formats and dtype in a type that an operator's schema allows."""
    return ",".join(
        (
            x.name,
            weight.name,
            "" if how.out_kind is None else how.out_kind.name,
            short(how.dtype),
            "invariant" * how.batch_invariant,
        )
    )


def formats_of(formats: str) -> tuple[ScaledFormat, ScaledFormat]:
    """X's and the weight's."""
    of_x, of_weight, *_ = formats.split(",")
    return scaled_format(of_x), scaled_format(of_weight)


def how_of(
    formats: str,
    activation: str,
    parameters: list[float],
    interleaved: bool = False,
    kernel: str | None = None,
) -> How:
    _, _, out, dtype, invariant = formats.split(",")
    out_kind = scaled_format(out) if out else None
    return How(getattr(torch, dtype), decoded(activation, parameters), interleaved, out_kind, bool(invariant), kernel)


def operands(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, formats: str
) -> tuple[Quantized, Quantized]:
    of_x, of_weight = formats_of(formats)
    return Quantized(x, x_scale, of_x), Quantized(weight, weight_scale, of_weight)


def scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    formats: str,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    kernel: str | None,
) -> torch.Tensor:
    how = how_of(formats, activation, parameters, interleaved, kernel)
    return eager.linear(*operands(x, x_scale, weight, weight_scale, formats), bias, out_scale, how, alpha)[0]


def scaled_linear_fake(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    formats: str,
    activation: str,
    parameters: list[float],
    *options: object,
) -> torch.Tensor:
    how = how_of(formats, activation, parameters)
    return eager.outputs(x, eager.columns(weight, how.activation), how, out_scale)[0]


def scaled_linear_dynamic(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    formats: str,
    activation: str,
    parameters: list[float],
    interleaved: bool,
    kernel: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    how = how_of(formats, activation, parameters, interleaved, kernel)
    out, computed = eager.linear(*operands(x, x_scale, weight, weight_scale, formats), bias, out_scale, how, alpha)
    assert computed is not None
    return out, computed


def scaled_linear_dynamic_fake(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    alpha: torch.Tensor | None,
    formats: str,
    activation: str,
    parameters: list[float],
    *options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    how = how_of(formats, activation, parameters)
    out, computed = eager.outputs(x, eager.columns(weight, how.activation), how, out_scale)
    assert computed is not None
    return out, computed


SCALED_LINEAR = register_op("scaled_linear", scaled_linear, fake=scaled_linear_fake)
SCALED_LINEAR_DYNAMIC = register_op("scaled_linear_dynamic", scaled_linear_dynamic, fake=scaled_linear_dynamic_fake)


def call(
    x: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    how: How,
    alpha: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `eager.linear`, one node of the graph."""
    name, parameters = encoded(how.activation)
    formats = encoded_formats(x.kind, weight.kind, how)
    tensors = (x.values, x.scale, weight.values, weight.scale, bias, out_scale, alpha)
    options = (formats, name, parameters, how.interleaved, how.kernel)
    if how.out_kind is None or how.out_kind.one_scale:
        return SCALED_LINEAR(*tensors, *options), out_scale
    out, computed = SCALED_LINEAR_DYNAMIC(*tensors, *options)
    return out, computed
