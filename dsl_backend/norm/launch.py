# SPDX-License-Identifier: Apache-2.0
"""Checks of the tensors and the launch of the kernel that serves. The API and the operator use them."""

from typing import NamedTuple

import torch

from dsl_backend import checks
from dsl_backend.checks import facts_of, require, short
from dsl_backend.errors import InvalidInput
from dsl_backend.norm import dispatch
from dsl_backend.norm.kernel import Launch
from dsl_backend.norm.spec import FP8, NormSpec, NormTensors, Scaling
from dsl_backend.quant.format import GROUP
from dsl_backend.rows import DTYPES, check_like, check_rows, common_vector, with_expected_strides
from dsl_backend.runtime import target as targets


def check_out_dtype(out: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    """Raise InvalidInput where an output is no tensor, or not of the dtype that is asked for."""
    checks.tensor("out", out)
    require(
        out_dtype in (None, out.dtype),
        f"out is {short(out.dtype)} and out_dtype {out_dtype}: they must agree, or out_dtype be left out",
    )


def check(tensors: NormTensors) -> None:
    """Raise InvalidInput where the tensors do not match; they are described in `api.rms_norm`."""
    x, residual, weight, scale, out, residual_out, scale_out = tensors
    check_rows("x", x)
    check_rows("out", out, (*DTYPES, FP8))
    check_like("out", out, x)
    checks.apart("out", out)
    if weight is not None:
        check_vector("weight", weight, x, DTYPES, x.shape[1], "width")
    require(
        residual is not None or residual_out is None, "residual_out is given without a residual: it needs one to add"
    )
    for name, tensor in (("residual", residual), ("residual_out", residual_out)):
        if tensor is not None:
            check_rows(name, tensor, (x.dtype,))
            check_like(name, tensor, x)
    if residual_out is not None:
        checks.apart("residual_out", residual_out)
    if out.dtype == FP8:
        require(
            (scale is None) != (scale_out is None),
            "out is float8_e4m3fn: either scale, one for all rows, or scale_out, one for each row, is needed",
        )
    for name, tensor, count, what in (("scale", scale, 1, "element"), ("scale_out", scale_out, len(x), "rows")):
        if tensor is not None:
            require(out.dtype == FP8, f"{name} is given and out is {short(out.dtype)}: float8_e4m3fn is needed")
            if name == "scale_out" and is_by_group(tensor):
                check_groups(tensor, x)
            else:
                check_vector(name, tensor, x, (torch.float32,), count, what)


def is_by_group(scale_out: torch.Tensor | None) -> bool:
    """Whether computed scales are those of groups of columns: [rows, 1] is one for each row."""
    return isinstance(scale_out, torch.Tensor) and scale_out.dim() == 2 and scale_out.shape[1] > 1


def check_groups(scale_out: torch.Tensor, x: torch.Tensor) -> None:
    """Raise InvalidInput where scales of groups of columns do not match x."""
    rows, width = x.shape
    require(
        tuple(scale_out.shape) == (rows, width // GROUP) and width % GROUP == 0,
        f"scale_out has shape {tuple(scale_out.shape)}: rows {rows}, or for each {GROUP} of {width} columns "
        f"[{rows}, {width // GROUP}], is needed",
    )
    require(scale_out.dtype == torch.float32, f"scale_out is {short(scale_out.dtype)}: float32 is needed")
    require(scale_out.device == x.device, f"scale_out is on {scale_out.device}, x on {x.device}")
    checks.apart("scale_out", scale_out)
    checks.no_gradient("scale_out", scale_out)


def check_vector(
    name: str, tensor: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], count: int, what: str
) -> None:
    """Raise InvalidInput where a tensor has not `count` contiguous elements of one of the dtypes on x's device."""
    checks.tensor(name, tensor)
    require(
        tensor.dtype in dtypes,
        f"{name} is {short(tensor.dtype)}: one of {', '.join(map(short, dtypes))} is needed",
    )
    shapes = [(count,), (count, 1), ()][: 3 if name == "scale" else 2 if name == "scale_out" else 1]
    require(tuple(tensor.shape) in shapes, f"{name} has shape {tuple(tensor.shape)}: {what} {count} is needed")
    require(tensor.is_contiguous(), f"{name} has strides {tensor.stride()}: contiguous elements are needed")
    require(tensor.device == x.device, f"{name} is on {tensor.device}, x on {x.device}")
    checks.no_gradient(name, tensor)


def spec_of(tensors: NormTensors, weight_offset: float) -> NormSpec:
    """The problem of tensors with the strides that kernels expect."""
    x, weight = tensors.x, tensors.weight
    matrices = [one for one in (x, tensors.residual, tensors.out, tensors.residual_out) if one is not None]
    vector = common_vector(*matrices)
    if weight is not None:
        while weight.data_ptr() // weight.element_size() % vector:
            vector //= 2
    scaling = Scaling.TENSOR if tensors.scale is not None else Scaling.NONE
    if tensors.scale_out is not None:
        scaling = Scaling.GROUP if is_by_group(tensors.scale_out) else Scaling.TOKEN
    return NormSpec(
        width=x.shape[1],
        dtype=x.dtype,
        out_dtype=tensors.out.dtype,
        weight_dtype=None if weight is None else weight.dtype,
        residual=tensors.residual is not None,
        weight_offset=float(weight_offset),
        scaling=scaling,
        vector=vector,
    )


def prepared(tensors: NormTensors) -> NormTensors:
    """The tensors of a launch with the shapes and strides that kernels expect."""

    def rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else with_expected_strides(tensor)

    def flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None or tensor.dim() == 1 else tensor.view(-1)

    return NormTensors(
        x=with_expected_strides(tensors.x),
        residual=rows(tensors.residual),
        weight=tensors.weight,
        scale=flat(tensors.scale),
        out=with_expected_strides(tensors.out),
        residual_out=rows(tensors.residual_out),
        scale_out=tensors.scale_out if is_by_group(tensors.scale_out) else flat(tensors.scale_out),
    )


class Known(NamedTuple):
    """What is cached for calls with the same facts.

    Attributes:
        as_given: kernels take all tensors with the shapes and strides that they have.
        launch: of the kernel that serves; None where there is nothing to compute.
    """

    as_given: bool
    launch: Launch | None


# A model calls with the same few layouts in every step: they are checked once.
LAYOUTS = 1 << 14
# Vectors of 8 elements of four bytes: `NormSpec.vector` says that addresses are multiples of theirs.
ALIGNMENT = 32
_known: dict[object, Known] = {}


def run(tensors: NormTensors, eps: float, weight_offset: float, kernel: str | None) -> None:
    """Check the tensors, and launch; arguments as `api.rms_norm`."""
    facts = (*[facts_of(tensor, ALIGNMENT) for tensor in tensors], weight_offset, kernel)
    known = _known.get(facts)
    if known is None:
        known = look(tensors, weight_offset, kernel)
        if len(_known) >= LAYOUTS:
            _known.clear()
        _known[facts] = known
    if known.launch is None:
        return
    # A tensor that torch.compile traces with has no address: not in `check`.
    if tensors.residual_out is not None and tensors.residual_out.data_ptr() == tensors.out.data_ptr():
        raise InvalidInput("residual_out and out are the same memory")
    known.launch(tensors if known.as_given else prepared(tensors), eps)


def look(tensors: NormTensors, weight_offset: float, kernel: str | None) -> Known:
    """Check the tensors of a new layout, and choose its kernel."""
    check(tensors)
    require(
        tensors.weight is not None or weight_offset == 0,
        f"weight_offset is {weight_offset:g} and there is no weight: 0 is needed",
    )
    if tensors.x.numel() == 0:
        return Known(as_given=True, launch=None)
    as_expected = prepared(tensors)
    as_given = all(one is other for one, other in zip(tensors, as_expected, strict=True))
    spec, target = spec_of(as_expected, weight_offset), targets.detect(tensors.x.device)
    return Known(as_given, dispatch.choose(spec, target, kernel).load()(spec, target))
