# SPDX-License-Identifier: Apache-2.0
"""Linear layers outside torch.compile: checks, the plan of a layout, the launch."""

import math
from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import facts_of, short
from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.activation import Activation, Geglu, Swiglu
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.spec import DTYPES, MOST, Dtypes
from dsl_backend.linear import plan
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import current_stream


def check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], like: torch.Tensor) -> None:
    """Raises InvalidInput unless it has the shape (None is any), x's dtype and device, and neighbours side by side.

    This runs for every tensor of every new layout, so messages are formatted only when they are raised.
    """
    checks.tensor(name, tensor)
    held = tensor.shape
    if len(held) != len(shape) or any(w is not None and w != s for w, s in zip(shape, held, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidInput(f"{name} has shape {tuple(held)}: [{wanted}] is needed")
    if tensor.dtype != like.dtype:
        raise InvalidInput(f"{name} is {short(tensor.dtype)} and x {short(like.dtype)}: one dtype is needed")
    if tensor.device != like.device:
        raise InvalidInput(f"{name} is on {tensor.device}, x on {like.device}")
    if held[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise InvalidInput(f"{name} has stride {tensor.stride(-1)} in its last dimension: 1 is needed")
    checks.no_gradient(name, tensor)


def check_x(x: torch.Tensor) -> None:
    checks.tensor("x", x)
    if x.dtype not in DTYPES:
        raise InvalidInput(f"x is {short(x.dtype)}: one of {', '.join(short(dtype) for dtype in DTYPES)} is needed")
    check_tensor("x", x, (None, None), x)
    if x.shape[1] < 1:
        raise InvalidInput(f"x has shape {tuple(x.shape)}: at least one column is needed")


def columns(x: torch.Tensor, weight: torch.Tensor, activation: Activation | None) -> int:
    """Columns of the output; raises InvalidInput where x or the weight does not fit."""
    check_x(x)
    if not (activation is None or isinstance(activation, (Swiglu, Geglu))):
        raise InvalidInput(f"activation is {activation!r}: Swiglu(...), Geglu(...) or None is needed")
    check_tensor("weight", weight, (None, x.shape[1]), x)
    rows = weight.shape[0]
    if activation is not None and rows % 2:
        raise InvalidInput(f"weight has {rows} rows: gate and up need an even number")
    return rows if activation is None else rows // 2


def check_out(out: torch.Tensor, rows: int, n: int, x: torch.Tensor) -> None:
    check_tensor("out", out, (rows, n), x)
    checks.apart("out", out)


def side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """The same matrix with the strides that kernels expect; torch allows any stride of a single row or column."""
    rows, width = tensor.shape
    if (width > 1 or tensor.stride(1) == 1) and (rows > 1 or tensor.stride(0) == width):
        return tensor
    return tensor.as_strided((rows, width), (tensor.stride(0) if rows > 1 else width, 1))


def arranged(operands: GemmOperands) -> GemmOperands:
    """The tensors with the strides that kernels expect; those that have them are the same objects."""
    x, weight, bias, residual, out, _ = operands
    return GemmOperands(
        side_by_side(x),
        side_by_side(weight),
        bias if bias is None or bias.stride(0) == 1 else bias.as_strided(bias.shape, (1,)),
        None if residual is None else side_by_side(residual),
        side_by_side(out),
    )


def common_vector(n: int, k: int, operands: GemmOperands) -> int:
    """Neighbours that may be accessed at once in every row of every tensor: 1, 2, 4 or 8."""
    common = math.gcd(8, n, k)
    for tensor in (operands.x, operands.weight, operands.bias, operands.residual, operands.out):
        if tensor is not None:
            stride = tensor.stride(0) if tensor.dim() == 2 else 0
            common = math.gcd(common, stride, tensor.data_ptr() // tensor.element_size())
    return common


def linear(
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
    """See `api.linear`."""
    asked = (activation, interleaved, batch_invariant, spare_sms, kernel)
    facts = (facts_of(x), facts_of(weight), facts_of(bias), facts_of(residual), facts_of(out), *asked)
    try:
        known = _known.get(facts)
    except TypeError:  # an unhashable option, which is refused below
        known = None
    if known is None:
        check_options(interleaved, batch_invariant, spare_sms, kernel)
        n = check(x, weight, bias, residual, out, activation)
        # A new output has the strides that kernels expect.
        given = GemmOperands(x, weight, bias, residual, x if out is None else out)
        as_given = all(one is other for one, other in zip(given, arranged(given), strict=True))
        known = Known(n, as_given, {})
        if len(_known) >= LAYOUTS:
            _known.clear()
        _known[facts] = known
    rows, n = x.shape[0], known.n
    if out is None:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows and n:
        operands = GemmOperands(x, weight, bias, residual, out)
        if not known.as_given:
            operands = arranged(operands)
        stream = current_stream(x.device)
        serving = known.plans.get(stream)
        if serving is None:
            serving = known.plans[stream] = plan_for(operands, n, stream, *asked)
        serving.run(operands)
    return out


class Known(NamedTuple):
    """What is cached for calls with the same facts.

    Attributes:
        n: columns of the output.
        as_given: kernels take all tensors with the strides that they have.
        plans: by stream.
    """

    n: int
    as_given: bool
    plans: dict[int, plan.LinearPlan[GemmOperands]]


# A model calls with the same few layouts in every step: they are checked once.
LAYOUTS = 1 << 14
_known: dict[object, Known] = {}


def check_options(interleaved: bool, batch_invariant: bool, spare_sms: int, kernel: str | None) -> None:
    checks.flag("interleaved", interleaved)
    checks.flag("batch_invariant", batch_invariant)
    checks.integer("spare_sms", spare_sms, -checks.MOST)  # how many there are is the target's to say
    checks.kernel(kernel)


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    activation: Activation | None,
) -> int:
    """Columns of the output; raises InvalidInput where a tensor does not fit."""
    n = columns(x, weight, activation)
    rows = x.shape[0]
    # Not among the other checks of x: while torch.compile traces, the number of rows may be unknown.
    if rows > MOST:
        raise InvalidInput(f"x has {rows} rows: {MOST} are the most")
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), x)
    if residual is not None:
        check_tensor("residual", residual, (rows, n), x)
    if out is not None:
        check_out(out, rows, n, x)
    return n


def plan_for(
    operands: GemmOperands,
    n: int,
    stream: int,
    activation: Activation | None,
    interleaved: bool,
    batch_invariant: bool,
    spare_sms: int,
    kernel: str | None,
) -> plan.LinearPlan[GemmOperands]:
    x = operands.x
    spec = LinearSpec(
        n=n,
        k=x.shape[1],
        dtypes=Dtypes(x=x.dtype, weight=operands.weight.dtype, out=operands.out.dtype),
        activation=activation,
        interleaved=interleaved,
        bias=operands.bias is not None,
        residual=operands.residual is not None,
        batch_invariant=batch_invariant,
        vector=common_vector(n, x.shape[1], operands),
    )
    return plan.plan_of(spec, targets.detect(x.device).sparing(spare_sms), x.device, stream, kernel)
