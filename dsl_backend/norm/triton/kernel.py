# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of rows in Triton. A program has several narrow rows, or one row, which is read once or, if wide, twice."""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.norm.kernel import Launch
from dsl_backend.norm.spec import FP8, NormSpec, NormTensors, Scaling
from dsl_backend.quant.format import GROUP
from dsl_backend.quant.reference import LEAST_OF_GROUP
from dsl_backend.quant.triton.convert import quantize
from dsl_backend.rows import power_of_2
from dsl_backend.runtime.target import Target

# The widest row that is read once: 64 elements for each thread of 8 warps.
MAX_ONE_PASS = 16 * 1024
TWO_PASS_BLOCK = 4 * 1024
MIN_ELEMENTS = 1024
ELEMENTS_PER_WARP = 1024
_GROUP, _LEAST = tl.constexpr(GROUP), tl.constexpr(LEAST_OF_GROUP)


class Rows(NamedTuple):
    """A matrix; stride in elements. None and 0 where there is none."""

    ptr: Any
    stride: Any


class Inputs(NamedTuple):
    x: Rows
    residual: Rows
    weight: Any
    scale: Any


class GroupScales(NamedTuple):
    """Scales [rows, groups of columns]; strides in elements. None and 0 where there are none."""

    ptr: Any
    stride: Any
    group_stride: Any


class Outputs(NamedTuple):
    out: Rows
    residual_out: Rows
    scale_out: Any
    group_scales: GroupScales


class Constants(NamedTuple):
    """Compiled in: the rows of a program, the columns of a block, whether rows are read twice, the weight's offset."""

    rows: Any
    block: Any
    two_pass: Any
    weight_offset: Any


@triton.jit
def at(matrix, row, column):
    return matrix.ptr + (row * matrix.stride)[:, None] + column[None, :]


@triton.jit
def load_rows(inputs, row, column, width):
    """X + residual of a tile [rows, columns], rounded to x's dtype; 0 past the row's end."""
    mask = (column < width)[None, :]
    z = tl.load(at(inputs.x, row, column), mask=mask, other=0.0)
    if inputs.residual.ptr is not None:
        added = tl.load(at(inputs.residual, row, column), mask=mask, other=0.0)
        z = (z.to(tl.float32) + added.to(tl.float32)).to(z.dtype)
    return z


@triton.jit
def weighted(z, inputs, column, width, WEIGHT_OFFSET: tl.constexpr):
    """A tile times its weights, float32."""
    values = z.to(tl.float32)
    if inputs.weight is not None:
        weight = tl.load(inputs.weight + column, mask=column < width, other=0.0).to(tl.float32)
        values = values * (weight + WEIGHT_OFFSET)[None, :]
    return values


@triton.jit
def state_of(z, values):
    """(sum of squares, largest magnitude of the weighted values) of a tile's rows."""
    wide = z.to(tl.float32)
    return tl.sum(wide * wide, 1), tl.max(tl.abs(values), 1)


@triton.jit
def factors(total, maximum, inputs, outputs, row, in_rows, width, eps):
    """What weighted values are multiplied by, in turn: the row's factor, and the reciprocal of its scale."""
    factor = tl.rsqrt(total / width + eps)
    inverse = tl.full(factor.shape, 1.0, tl.float32)
    if inputs.scale is not None:
        inverse = inverse / tl.load(inputs.scale)
    if outputs.scale_out is not None:
        # At least 1 / (448 * 512); NaN where the factor is.
        scale = tl.maximum(maximum * factor / 448.0, 4.359654017857143e-06, propagate_nan=tl.PropagateNan.ALL)
        tl.store(outputs.scale_out + row, scale, mask=in_rows)
        inverse = inverse / scale
    return factor, inverse


@triton.jit
def by_group(y, scales, row, in_rows, start, width, CONSTANTS):
    """A tile of rows divided by the scale of each group, which is stored; NaN where the group has one."""
    groups = tl.reshape(y, (CONSTANTS.rows, CONSTANTS.block // _GROUP, _GROUP))
    largest = tl.max(tl.abs(groups), 2)
    scale = tl.maximum(largest, _LEAST) / 448.0
    scale = tl.where(tl.sum((groups != groups).to(tl.int32), 2) > 0, float("nan"), scale)
    group = start // _GROUP + tl.arange(0, CONSTANTS.block // _GROUP)
    at_scale = scales.ptr + (row * scales.stride)[:, None] + (group * scales.group_stride)[None, :]
    tl.store(at_scale, scale, mask=in_rows[:, None] & (group * _GROUP < width)[None, :])
    return tl.reshape(groups * (1.0 / scale)[:, :, None], (CONSTANTS.rows, CONSTANTS.block))


@triton.jit
def store(values, factor, inverse, outputs, row, in_rows, start, width, CONSTANTS):
    column = start + tl.arange(0, CONSTANTS.block)
    mask = in_rows[:, None] & (column < width)[None, :]
    y = values * factor[:, None]
    if outputs.group_scales.ptr is not None:
        y = by_group(y, outputs.group_scales, row, in_rows, start, width, CONSTANTS)
    elif outputs.out.ptr.dtype.element_ty.primitive_bitwidth == 8:
        y = y * inverse[:, None]
    tl.store(at(outputs.out, row, column), quantize(y, outputs.out.ptr.dtype.element_ty, False), mask=mask)


@triton.jit(do_not_specialize=["rows", "eps"])
def rms_norm_kernel(inputs, outputs, rows, width, eps, CONSTANTS):
    row = tl.program_id(0).to(tl.int64) * CONSTANTS.rows + tl.arange(0, CONSTANTS.rows)
    in_rows = row < rows
    # Rows beyond the end read the last row.
    source = tl.minimum(row, rows - 1)
    column = tl.arange(0, CONSTANTS.block)
    if CONSTANTS.two_pass:
        total = tl.zeros((CONSTANTS.rows,), tl.float32)
        maximum = tl.zeros((CONSTANTS.rows,), tl.float32)
        for start in range(0, width, CONSTANTS.block):
            z = load_rows(inputs, source, start + column, width)
            values = weighted(z, inputs, start + column, width, CONSTANTS.weight_offset)
            squares, largest = state_of(z, values)
            total += squares
            maximum = tl.maximum(maximum, largest)
        factor, inverse = factors(total, maximum, inputs, outputs, row, in_rows, width, eps)
        for start in range(0, width, CONSTANTS.block):
            z = load_rows(inputs, source, start + column, width)
            mask = in_rows[:, None] & (start + column < width)[None, :]
            values = weighted(z, inputs, start + column, width, CONSTANTS.weight_offset)
            # Not earlier: the sum may replace the residual, which is read again here, or x, which out may replace.
            if outputs.residual_out.ptr is not None:
                tl.store(at(outputs.residual_out, row, start + column), z, mask=mask)
            store(values, factor, inverse, outputs, row, in_rows, start, width, CONSTANTS)
    else:
        z = load_rows(inputs, source, column, width)
        mask = in_rows[:, None] & (column < width)[None, :]
        if outputs.residual_out.ptr is not None:
            tl.store(at(outputs.residual_out, row, column), z, mask=mask)
        values = weighted(z, inputs, column, width, CONSTANTS.weight_offset)
        total, maximum = state_of(z, values)
        factor, inverse = factors(total, maximum, inputs, outputs, row, in_rows, width, eps)
        store(values, factor, inverse, outputs, row, in_rows, 0, width, CONSTANTS)


def rows_of(tensor: torch.Tensor | None) -> Rows:
    return Rows(None, 0) if tensor is None else Rows(tensor, tensor.stride(0))


def rms_norm(tensors: NormTensors, eps: float, spec: NormSpec, target: Target) -> None:
    """Write out, residual_out and scale_out; at least one row."""
    rows, width = tensors.x.shape
    padded_width = power_of_2(width)
    two_pass = padded_width > MAX_ONE_PASS
    block = TWO_PASS_BLOCK if two_pass else padded_width
    rows_per_program = max(1, MIN_ELEMENTS // block)
    out = tensors.out
    if spec.out_dtype == FP8 and not target.native_fp8:
        out = out.view(torch.uint8)
    row_scales, group_scales = tensors.scale_out, GroupScales(None, 0, 0)
    if spec.scaling is Scaling.GROUP and tensors.scale_out is not None:
        row_scales, group_scales = None, GroupScales(tensors.scale_out, *tensors.scale_out.stride())
    constants = (rows_per_program, block, two_pass, spec.weight_offset)
    rms_norm_kernel[(-(-rows // rows_per_program),)](
        Inputs(rows_of(tensors.x), rows_of(tensors.residual), tensors.weight, tensors.scale),
        Outputs(rows_of(out), rows_of(tensors.residual_out), row_scales, group_scales),
        rows,
        width,
        eps,
        Constants(*(tl.constexpr(value) for value in constants)),
        num_warps=max(1, min(8, rows_per_program * block // ELEMENTS_PER_WARP)),
    )


def bind(spec: NormSpec, target: Target) -> Launch:
    """As `kernel.Bind`."""
    return partial(rms_norm, spec=spec, target=target)
