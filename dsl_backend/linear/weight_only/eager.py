# SPDX-License-Identifier: Apache-2.0
"""Linear layers of packed weights outside torch.compile: checks, the plan of a layout, the launch."""

from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import facts_of, short
from dsl_backend.errors import InvalidInput
from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.spec import MOST
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear import plan
from dsl_backend.linear.eager import check_tensor, check_x
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.workspace import current_stream

ALIGNMENT = 16


class How(NamedTuple):
    """All of a layer that is no tensor; see `api.weight_only_linear`."""

    n: int
    kind: WeightOnlyFormat
    kernel: str | None = None


class Known(NamedTuple):
    """What is cached for calls with the same facts; plans by stream."""

    spec: WeightOnlyGemmSpec
    plans: dict[int, plan.LinearPlan[GemmOperands]]


# A model calls with the same few layouts in every step: they are checked once.
LAYOUTS = 1 << 14
_known: dict[object, Known] = {}


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, how: How) -> torch.Tensor:
    """The layer's output [rows, n], in x's dtype."""
    asked = (*(facts_of(one) for one in (x, packed, bias)), how)
    try:
        known = _known.get(asked)
    except TypeError:  # an unhashable option, which is refused below
        known = None
    if known is None:
        known = Known(check(x, packed, bias, how), {})
        if len(_known) >= LAYOUTS:
            _known.clear()
        _known[asked] = known
    out = x.new_empty((x.shape[0], how.n))
    if x.shape[0]:
        operands = GemmOperands(aligned(x), packed, None if bias is None else aligned(bias), None, out)
        stream = current_stream(x.device)
        serving = known.plans.get(stream)
        if serving is None:
            serving = plan.plan_of(known.spec, targets.detect(x.device), x.device, stream, how.kernel)
            known.plans[stream] = serving
        serving.run(operands)
    return out


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, whose rows begin at multiples of 16 bytes as kernels need it."""
    pitch = tensor.stride(0) * tensor.element_size() if tensor.dim() == 2 and tensor.shape[0] > 1 else 0
    if tensor.data_ptr() % ALIGNMENT == 0 and pitch % ALIGNMENT == 0 and tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def check(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, how: How) -> WeightOnlyGemmSpec:
    """The spec of a call; raises InvalidInput where a tensor or an option does not fit."""
    checks.kernel(how.kernel)
    check_x(x)
    rows, k = x.shape
    if rows > MOST:
        raise InvalidInput(f"x has {rows} rows: {MOST} are the most")
    spec = WeightOnlyGemmSpec(n=how.n, k=k, dtype=x.dtype, kind=how.kind, bias=bias is not None)
    checks.tensor("packed", packed)
    wanted = how.kind.packed_shape(how.n, k)
    if tuple(packed.shape) != wanted:
        raise InvalidInput(
            f"packed has shape {tuple(packed.shape)}: {list(wanted)} is needed for {how.n} rows of {k} columns, "
            f"{how.kind}"
        )
    checks.dtype("dtype of packed", packed.dtype, (torch.int32,))
    if packed.device != x.device:
        raise InvalidInput(f"packed is on {packed.device}, x on {x.device}")
    if not packed.is_contiguous() or packed.data_ptr() % ALIGNMENT:
        raise InvalidInput(
            f"packed has strides {packed.stride()}: contiguous tiles from a multiple of {ALIGNMENT} bytes are needed"
        )
    if bias is not None:
        check_tensor("bias", bias, (how.n,), x)
        if not bias.is_contiguous():
            raise InvalidInput(f"bias has strides {bias.stride()} of {short(bias.dtype)}: contiguous ones are needed")
    return spec
