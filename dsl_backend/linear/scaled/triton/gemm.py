# SPDX-License-Identifier: Apache-2.0
"""A GEMM of quantised operands with bias, gated activation and the next quantisation; one program for each tile.

An output whose rows have one scale each is written in float32 to scratch first, because its scale needs whole rows; a
second kernel quantises it.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.gemm.scaled import ScaledOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.gemm.triton.tiles import activated, elements, kind_of, product, tile_of_program
from dsl_backend.linear.scaled.kernel import Launch
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.quant.format import E4M3, GROUP, ROW_SCALED, ScaledFormat
from dsl_backend.quant.reference import LEAST_OF_GROUP, LEAST_OF_ROW
from dsl_backend.quant.triton.convert import quantize
from dsl_backend.quant.triton.scales import exponent_of, magnitude, scale_of
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

TILE_HEIGHTS = (16, 32, 64, 128)
# Of a batch-invariant layer, whatever its rows: another tile may be another instruction, with another order of sums.
INVARIANT_HEIGHT = 64
# Columns of k in a tile: those of a block of scales. SM90 keeps about 14 bits of a sum of 8-bit products, which is
# added to one in float32 after each tile.
TILE_K = 128
# Columns of a row that are quantised at once.
ROW_BLOCK = 1024
LARGEST = tl.constexpr(E4M3.largest)
LEAST_GROUP, LEAST_ROW = tl.constexpr(LEAST_OF_GROUP), tl.constexpr(LEAST_OF_ROW)
NONE, TENSOR, GROUPS = (tl.constexpr(number) for number in range(3))


class Tensors(NamedTuple):
    """Pointers of a launch; of a missing part any. Strides are those of rows, `xs_column` of x's scales' columns."""

    x: Any
    x_scale: Any
    weight: Any
    weight_scale: Any
    bias: Any
    out: Any
    out_scale: Any


class Strides(NamedTuple):
    """Elements between rows. `part`: from a gate row of the weight to its up row, in rows."""

    x: Any
    x_scale: Any
    x_scale_column: Any
    weight: Any
    weight_scale: Any
    out: Any
    out_scale_column: Any
    part: Any


class Layer(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        step: rows of the weight from a column of the output to the next one.
        blocked: x has scales of groups and the weight of blocks; else `x_rows` and `channels` say which have one a row.
        out: NONE, TENSOR or GROUPS.
        wgmma: products are SM90's.
    """

    step: Any
    bias: Any
    blocked: Any
    x_rows: Any
    channels: Any
    out: Any
    tile_m: Any
    tile_n: Any
    tile_k: Any
    block: Any
    wgmma: Any


@triton.jit
def scaled_sum(x, x_scale, weight, tensors, strides, row, k_block, acc, LAYER):
    """The sum of a tile of k, with the scales of its block of the weight; `row` are the weight's rows."""
    if LAYER.blocked:
        blocks = tensors.weight_scale + row // LAYER.block * strides.weight_scale + k_block
        scale = x_scale[:, None] * scale_of(tl.load(blocks))[None, :]
        return acc + scale * product(x, weight, LAYER.tile_k, LAYER.wgmma)
    else:
        return acc + product(x, weight, LAYER.tile_k, LAYER.wgmma)


@triton.jit
def with_scales(acc, tensors, x_scale, row, LAYER):
    """A sum of the rows of the weight, with scales that all columns of k share, and the bias."""
    if not LAYER.blocked:
        if LAYER.channels:
            acc = acc * tl.load(tensors.weight_scale + row)[None, :]
        else:
            acc = acc * tl.load(tensors.weight_scale)
        acc = acc * x_scale[:, None]
    if LAYER.bias:
        acc += tl.load(tensors.bias + row).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["rows"])
def scaled_gemm_kernel(
    tensors,
    strides,
    rows,
    n,
    k,
    LAYER,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Rows and columns past the end read the last one."""
    M: tl.constexpr = LAYER.tile_m
    N: tl.constexpr = LAYER.tile_n
    K: tl.constexpr = LAYER.tile_k
    first_row, tile_n = tile_of_program(rows, n, M, N)
    row, column, inner = first_row + tl.arange(0, M), tile_n * N + tl.arange(0, N), tl.arange(0, K)
    x_row, gate_row = tl.minimum(row, rows - 1), tl.minimum(column, n - 1) * LAYER.step
    up_row = gate_row + strides.part
    x_ptrs = tensors.x + x_row[:, None] * strides.x + inner[None, :]
    gate_ptrs = tensors.weight + gate_row[None, :] * strides.weight + inner[:, None]
    up_ptrs = gate_ptrs + strides.part * strides.weight
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    x_scale = tl.full((M,), 1.0, tl.float32)
    for start in range(0, k, K):
        mask = inner < k - start
        x = elements(tl.load(x_ptrs + start, mask=mask[None, :], other=0.0))
        if LAYER.blocked:
            groups = tensors.x_scale + x_row * strides.x_scale + start // LAYER.block * strides.x_scale_column
            x_scale = scale_of(tl.load(groups))
        weight = elements(tl.load(gate_ptrs + start, mask=mask[:, None], other=0.0))
        gate = scaled_sum(x, x_scale, weight, tensors, strides, gate_row, start // LAYER.block, gate, LAYER)
        if KIND != 0:
            weight = elements(tl.load(up_ptrs + start, mask=mask[:, None], other=0.0))
            up = scaled_sum(x, x_scale, weight, tensors, strides, up_row, start // LAYER.block, up, LAYER)
    if not LAYER.blocked:
        x_scale = tl.load(tensors.x_scale + (x_row if LAYER.x_rows else x_row * 0))
    gate = with_scales(gate, tensors, x_scale, gate_row, LAYER)
    if KIND != 0:
        up = with_scales(up, tensors, x_scale, up_row, LAYER)
        gate = activated(gate, up, KIND, ALPHA, BETA, LIMIT)
    inside = (row < rows)[:, None] & (column < n)[None, :]
    if LAYER.out == TENSOR:
        gate = gate / tl.load(tensors.out_scale)
    elif LAYER.out == GROUPS:
        largest = tl.maximum(tl.max(magnitude(gate, inside), 1), LEAST_GROUP)
        scale = largest / LARGEST
        scales = tensors.out_scale + row + tile_n * strides.out_scale_column
        if tensors.out_scale.dtype.element_ty == tl.uint8:
            byte = exponent_of(scale)
            tl.store(scales, byte, mask=row < rows)
            scale = scale_of(byte)
        else:
            tl.store(scales, scale, mask=row < rows)
        gate = gate / scale[:, None]
    out = tensors.out + row[:, None] * strides.out + column[None, :]
    tl.store(out, quantize(gate, tensors.out.dtype.element_ty, False), mask=inside)


@triton.jit
def quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, n, BLOCK: tl.constexpr):
    """A row of float32 [n], contiguous, to e4m3 and its scale; one program for each row."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + column, mask=column < n, other=0.0)
        largest = tl.maximum(largest, magnitude(x, column < n))
    scale = tl.maximum(tl.max(largest, 0), LEAST_ROW) / LARGEST
    tl.store(scale_ptr + row, scale)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + column, mask=column < n, other=0.0)
        stored = quantize(x / scale, out_ptr.dtype.element_ty, False)
        tl.store(out_ptr + row * n + column, stored, mask=column < n)


def bind(spec: ScaledLinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The kernel for any number of rows, at least one."""
    rows.on_host()
    return partial(linear, spec, target, workspace)


def linear(spec: ScaledLinearSpec, target: Target, workspace: Workspace, operands: ScaledOperands) -> None:
    """Writes operands.out and a computed operands.out_scale."""
    rows = operands.x.shape[0]
    if spec.out != ROW_SCALED:
        launch(spec, target, operands)
        return
    wide = workspace.partials(rows * spec.n)[: rows * spec.n].view(rows, spec.n)
    launch(spec, target, operands._replace(out=wide, out_scale=None))
    out = as_bits(operands.out, target)
    quantize_rows_kernel[(rows,)](wide, out, operands.out_scale, spec.n, BLOCK=ROW_BLOCK)


def as_bits(tensor: torch.Tensor | None, target: Target) -> torch.Tensor | None:
    """Tensors of types that Triton does not have on the target as bytes."""
    if tensor is None:
        return None
    if tensor.dtype == torch.float8_e8m0fnu or (tensor.dtype == E4M3.dtype and not target.native_fp8):
        return tensor.view(torch.uint8)
    return tensor


def tile_of(spec: ScaledLinearSpec, rows: int) -> tuple[int, int]:
    """(rows, columns) of a tile. An output with scales of groups has tiles as wide as a group."""
    tile_m = (
        INVARIANT_HEIGHT if spec.batch_invariant else next((m for m in TILE_HEIGHTS if rows <= m), TILE_HEIGHTS[-1])
    )
    by_group = spec.out is not None and spec.out.blocked
    # Two accumulators, or the sum of a block of k beside the whole sum: half as many.
    if by_group:
        return min(tile_m, 64 if spec.parts == 2 else 128), GROUP
    return tile_m, (64 if spec.parts == 2 or tile_m <= 32 else 128)


def layer_of(spec: ScaledLinearSpec, out: ScaledFormat | None, tile: tuple[int, int], wgmma: bool) -> Layer:
    """Constants of the kernel for an output in that format."""
    written = NONE if out is None else (GROUPS if out.blocked else TENSOR)
    constants = (
        2 if spec.interleaved else 1,
        spec.bias,
        spec.x.blocked,
        spec.x.block_rows == 1,
        spec.weight.block_rows == 1,
        written.value,
        *tile,
        TILE_K,
        GROUP,
        wgmma,
    )
    return Layer(*(tl.constexpr(value) for value in constants))


def launch(spec: ScaledLinearSpec, target: Target, operands: ScaledOperands) -> None:
    """The kernel for an output that needs no whole rows; in float32 without a scale."""
    rows, k = operands.x.shape
    tile = tile_of(spec, rows)
    given = ScaledOperands(*(as_bits(one, target) for one in operands))  # type: ignore[arg-type]
    x_scale = given.x_scale
    used = (getattr(given, name) for name in Tensors._fields)
    tensors = Tensors(*(given.out if one is None else one for one in used))
    strides = Strides(
        x=given.x.stride(0),
        x_scale=x_scale.stride(0),
        x_scale_column=x_scale.stride(1) if spec.x.blocked else 0,
        weight=given.weight.stride(0),
        weight_scale=given.weight_scale.stride(0),
        out=given.out.stride(0),
        out_scale_column=given.out_scale.stride(1) if given.out_scale is not None and given.out_scale.dim() == 2 else 0,
        part=1 if spec.interleaved else spec.n,
    )
    out = spec.out if given.out_scale is not None else None
    kind, alpha, beta, limit = kind_of(spec.activation)
    grid = (triton.cdiv(rows, tile[0]) * triton.cdiv(spec.n, tile[1]),)
    scaled_gemm_kernel[grid](
        tensors,
        strides,
        rows,
        spec.n,
        k,
        layer_of(spec, out, tile, target.wgmma),
        KIND=kind,
        ALPHA=alpha,
        BETA=beta,
        LIMIT=limit,
        num_warps=8 if tile[0] * tile[1] >= 8192 else 4,
        num_stages=3,
    )
