# SPDX-License-Identifier: Apache-2.0
"""Linear layers of quantised operands outside torch.compile: checks, the plan of a layout, the launch."""

from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import facts_of, short
from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.activation import Activation, Geglu, Swiglu
from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.spec import DTYPES, MOST
from dsl_backend.linear import plan
from dsl_backend.linear.eager import check_tensor, side_by_side
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import NVFP4, ScaledFormat
from dsl_backend.quant.reference import Quantized, column_major
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import current_stream

ALIGNMENT = 16


class How(NamedTuple):
    """All of a layer that is no tensor; see `api.scaled_linear`."""

    dtype: torch.dtype = torch.bfloat16
    activation: Activation | None = None
    interleaved: bool = False
    out_kind: ScaledFormat | None = None
    batch_invariant: bool = False
    kernel: str | None = None


class Known(NamedTuple):
    """What is cached for calls with the same facts.

    Attributes:
        copied: x's scales of groups have strides that no kernel takes: each call copies them.
        plans: by stream.
    """

    spec: ScaledLinearSpec
    copied: bool
    plans: dict[int, plan.LinearPlan[ScaledOperands]]


# A model calls with the same few layouts in every step: they are checked once.
LAYOUTS = 1 << 14
_known: dict[object, Known] = {}


def linear(
    x: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    how: How,
    alpha: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and its scales: None where it is not quantised, and where one scale was given that one.

    Args:
        out_scale: the given scale of the whole output, see `check_out_scale`.
    """
    facts = tuple(facts_of(one) for one in (x.values, x.scale, weight.values, weight.scale, bias, out_scale, alpha))
    asked = (*facts, x.kind, weight.kind, how)
    try:
        known = _known.get(asked)
    except TypeError:  # an unhashable option, which is refused below
        known = None
    if known is None:
        spec = check(x, weight, bias, out_scale, how)
        check_alpha(alpha, x.kind, x.values.device)
        known = Known(spec, not (spec.column_major or x.scale.is_contiguous()), {})
        if len(_known) >= LAYOUTS:
            _known.clear()
        _known[asked] = known
    spec, device = known.spec, x.values.device
    if known.copied:
        x = x._replace(scale=x.scale.contiguous())
    whole = out_scale if how.out_kind == NVFP4 else None
    out, out_scale = outputs(x.values, spec.n, how, out_scale)
    if x.values.shape[0]:
        operands = ScaledOperands(
            side_by_side(x.values),
            x.scale,
            side_by_side(weight.values),
            weight.scale,
            bias,
            out,
            out_scale,
            alpha,
            whole,
        )
        stream = current_stream(device)
        serving = known.plans.get(stream)
        if serving is None:
            serving = plan.plan_of(spec, targets.detect(device), device, stream, how.kernel)
            known.plans[stream] = serving
        serving.run(operands)
    return out, out_scale


def outputs(
    x: torch.Tensor, n: int, how: How, out_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """New tensors for the output and computed scales. Scales of groups are column-major, or swizzled."""
    rows, kind = x.shape[0], how.out_kind
    if kind is None:
        return x.new_empty((rows, n), dtype=how.dtype), None
    out = x.new_empty((rows, n // kind.packed), dtype=kind.values)
    if kind.one_scale:
        return out, out_scale
    shape = kind.scale_shape(rows, n)
    if kind.swizzled:
        # Kernels write the padding of rows. A product multiplies by that of columns: 0 times a NaN would be one.
        made = x.new_zeros if kind.pads_columns(n) else x.new_empty
        return out, made(shape, dtype=torch.uint8).view(kind.scales)
    if len(shape) == 2:
        return out, column_major(*shape, kind.scales, x.device)
    return out, x.new_empty(shape, dtype=kind.scales)


def columns(weight: torch.Tensor, activation: Activation | None) -> int:
    """Columns of the output; raises InvalidInput where gate and up cannot be halves."""
    if not (activation is None or isinstance(activation, (Swiglu, Geglu))):
        raise InvalidInput(f"activation is {checks.shown(activation)}: Swiglu(...), Geglu(...) or None is needed")
    rows = weight.shape[0]
    if activation is not None and rows % 2:
        raise InvalidInput(f"weight has {rows} rows: gate and up need an even number")
    return rows if activation is None else rows // 2


def check(
    x: Quantized, weight: Quantized, bias: torch.Tensor | None, out_scale: torch.Tensor | None, how: How
) -> ScaledLinearSpec:
    """The spec of a call; raises InvalidInput where a tensor or an option does not fit."""
    check_options(how)
    check_matrix("x", x, None)
    rows, k = x.values.shape[0], x.values.shape[1] * x.kind.packed
    if rows > MOST:
        raise InvalidInput(f"x has {rows} rows: {MOST} are the most")
    check_matrix("weight", weight, k, like=x.values)
    n = columns(weight.values, how.activation)
    if bias is not None:
        check_vector("bias", bias, weight.values.shape[0], how.dtype, x.values.device)
    check_out_scale(out_scale, how.out_kind, x.values.device)
    transposed = x.kind.blocked and not x.kind.swizzled and is_column_major(x.scale)
    return ScaledLinearSpec(
        n=n,
        k=k,
        x=x.kind,
        weight=weight.kind,
        dtype=how.dtype,
        out=how.out_kind,
        activation=how.activation,
        interleaved=how.interleaved,
        bias=bias is not None,
        batch_invariant=how.batch_invariant,
        column_major=transposed,
        aligned=all(aligned(one) for one in (x.values, rows_of(x), weight.values, rows_of(weight), bias, out_scale)),
    )


def check_options(how: How) -> None:
    checks.flag("interleaved", how.interleaved)
    checks.flag("batch_invariant", how.batch_invariant)
    checks.kernel(how.kernel)
    checks.dtype("dtype", how.dtype, DTYPES)
    if how.out_kind is not None:
        checks.instance("to", how.out_kind, ScaledFormat)


def check_matrix(name: str, matrix: Quantized, width: int | None, like: torch.Tensor | None = None) -> None:
    """Raises InvalidInput unless a matrix and its scales are as its format says."""
    values, scale, kind = matrix
    checks.instance(f"{name}.kind", kind, ScaledFormat)
    checks.tensor(f"{name}.values", values)
    checks.dtype(f"{name}.values", values.dtype, (kind.values,))
    packed = None if width is None else width // kind.packed
    check_tensor(f"{name}.values", values, (None, packed), values if like is None else like)
    checks.tensor(f"{name}.scale", scale)
    checks.dtype(f"{name}.scale", scale.dtype, (kind.scales,))
    wanted = kind.scale_shape(values.shape[0], values.shape[1] * kind.packed)
    if scale.shape != wanted:
        raise InvalidInput(
            f"{name}.scale has shape {tuple(scale.shape)}: {list(wanted)} is needed for {kind} of {tuple(values.shape)}"
        )
    if scale.device != values.device:
        raise InvalidInput(f"{name}.scale is on {scale.device}, {name}.values on {values.device}")
    by_group = kind.block_rows == 1 and kind.blocked and not kind.swizzled
    if not (scale.is_contiguous() or by_group):
        raise InvalidInput(f"{name}.scale has strides {scale.stride()}: contiguous ones are needed")


def check_vector(name: str, value: torch.Tensor, size: int, dtype: torch.dtype, device: torch.device) -> None:
    checks.tensor(name, value)
    if value.shape != (size,):
        raise InvalidInput(f"{name} has shape {tuple(value.shape)}: [{size}] is needed")
    checks.dtype(name, value.dtype, (dtype,))
    if value.device != device:
        raise InvalidInput(f"{name} is on {value.device}, x on {device}")
    if not value.is_contiguous():
        raise InvalidInput(f"{name} has strides {value.stride()}: contiguous ones are needed")
    checks.no_gradient(name, value)


def check_out_scale(scale: torch.Tensor | None, kind: ScaledFormat | None, device: torch.device) -> None:
    """Raises InvalidInput unless the scale of the whole output is given where its format has one, and only there."""
    given = kind is not None and (kind.one_scale or kind == NVFP4)
    if given and scale is None:
        raise InvalidInput(f"out_scale is None: a scale is needed for an output in {kind}")
    if scale is not None and not given:
        what = "an output that is not quantised" if kind is None else f"an output in {kind}, which computes it"
        raise InvalidInput(f"out_scale is {short(scale.dtype)} {tuple(scale.shape)}: None is needed for {what}")
    if scale is not None:
        check_vector("out_scale", scale, 1, torch.float32, device)


def check_alpha(alpha: torch.Tensor | None, kind: ScaledFormat, device: torch.device) -> None:
    """Raises InvalidInput unless NVFP4, and nothing else, has the product of the scales of both matrices."""
    if (kind == NVFP4) == (alpha is None):
        raise InvalidInput(
            f"alpha is {'None' if alpha is None else 'given'} and x is {kind}: the product of the scales of whole "
            "matrices is needed for nvfp4 and for nothing else"
        )
    if alpha is not None:
        check_vector("alpha", alpha, 1, torch.float32, device)


def is_column_major(scale: torch.Tensor) -> bool:
    """Whether columns lie side by side, as `quant.reference.column_major` makes them."""
    rows, width = scale.shape
    multiple = ALIGNMENT // scale.element_size()
    beside = rows <= 1 or scale.stride(0) == 1
    return beside and scale.stride(1) >= rows and (width == 1 or scale.stride(1) % multiple == 0)


def rows_of(matrix: Quantized) -> torch.Tensor:
    """The scales of a matrix, by the rows that TMA copies: swizzled ones have none, only a beginning."""
    return matrix.scale.view(-1) if matrix.kind.swizzled else matrix.scale


def aligned(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor's rows begin at multiples of 16 bytes; columns of column-major scales do."""
    if tensor is None or tensor.numel() <= 1:
        return True
    starts = tensor.data_ptr() % ALIGNMENT == 0
    if tensor.element_size() > 1 or tensor.dim() < 2 or tensor.shape[0] <= 1:
        return starts
    return starts and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
