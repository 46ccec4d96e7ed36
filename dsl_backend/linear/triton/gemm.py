# SPDX-License-Identifier: Apache-2.0
"""A GEMM with bias, gated activation and residual; one program for each tile."""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.gemm.triton.tiles import activated, dot, kind_of, tile_of_program
from dsl_backend.linear.kernel import Launch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

TILE_HEIGHTS = (16, 32, 64, 128)


class Tensors(NamedTuple):
    """Pointers of a launch; of a missing part any."""

    x: Any
    weight: Any
    bias: Any
    residual: Any
    out: Any


class Strides(NamedTuple):
    """Elements between rows. `part`, `bias_part`: from a gate row to its up row, in weight and bias."""

    x: Any
    weight: Any
    part: Any
    bias: Any
    bias_part: Any
    residual: Any
    out: Any


class Layer(NamedTuple):
    """What a kernel is compiled for, beside the activation."""

    bias: Any
    residual: Any
    tile_m: Any
    tile_n: Any
    tile_k: Any


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(
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
    in_rows, in_columns = row < rows, column < n
    x_ptrs = tensors.x + tl.minimum(row, rows - 1)[:, None] * strides.x + inner[None, :]
    gate_ptrs = tensors.weight + tl.minimum(column, n - 1)[None, :] * strides.weight + inner[:, None]
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        mask = inner < k - start
        x = tl.load(x_ptrs + start, mask=mask[None, :], other=0.0)
        gate = dot(x, tl.load(gate_ptrs + start, mask=mask[:, None], other=0.0), gate)
        if KIND != 0:
            up = dot(x, tl.load(gate_ptrs + strides.part + start, mask=mask[:, None], other=0.0), up)
    if LAYER.bias:
        bias_ptrs = tensors.bias + column * strides.bias
        gate += tl.load(bias_ptrs, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        if KIND != 0:
            up += tl.load(bias_ptrs + strides.bias_part, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if KIND != 0:
        gate = activated(gate, up, KIND, ALPHA, BETA, LIMIT)
    inside = in_rows[:, None] & in_columns[None, :]
    if LAYER.residual:
        residual_ptrs = tensors.residual + row[:, None] * strides.residual + column[None, :]
        gate += tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    out = tensors.out + row[:, None] * strides.out + column[None, :]
    tl.store(out, gate.to(tensors.out.dtype.element_ty), mask=inside)


def part_stride(spec: LinearSpec, row_stride: int) -> tuple[int, int]:
    """(from a gate row to the next one, from a gate row to its up row), of rows `row_stride` apart."""
    if spec.interleaved:
        return 2 * row_stride, row_stride
    return row_stride, spec.n * row_stride


def bind(spec: LinearSpec, rows: Rows, target: Target, workspace: Workspace) -> Launch:
    """The kernel for any number of rows, at least one."""
    rows.on_host()
    return partial(linear, spec)


def prepare(spec: LinearSpec, target: Target) -> None:
    """Compile what any number of packed rows needs: a kernel for each height of a tile."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=spec.dtypes.x, device="meta")

    weight, bias = tensor(spec.weight_rows, spec.k), tensor(spec.weight_rows) if spec.bias else None
    residual = tensor(1, spec.n) if spec.residual else None
    for rows in TILE_HEIGHTS:
        linear(spec, GemmOperands(tensor(rows, spec.k), weight, bias, residual, tensor(rows, spec.n)))


def linear(spec: LinearSpec, operands: GemmOperands) -> None:
    """Writes operands.out; with meta tensors it only compiles."""
    x, weight, bias = operands.x, operands.weight, operands.bias
    residual, out = operands.residual, operands.out
    rows, k = x.shape
    # Another tile may be another instruction, which sums in another order.
    tile_m = 64 if spec.batch_invariant else next((m for m in TILE_HEIGHTS if rows <= m), TILE_HEIGHTS[-1])
    # Two accumulators a tile: half as wide.
    tile_n, tile_k = (64 if spec.parts == 2 or tile_m <= 32 else 128), (128 if tile_m <= 32 else 64)
    row_stride, part = part_stride(spec, weight.stride(0))
    bias_stride, bias_part = part_stride(spec, 1)
    strides = Strides(
        x=x.stride(0),
        weight=row_stride,
        part=part,
        bias=bias_stride,
        bias_part=bias_part,
        residual=0 if residual is None else residual.stride(0),
        out=out.stride(0),
    )
    kind, alpha, beta, limit = kind_of(spec.activation)
    constants = (bias is not None, residual is not None, tile_m, tile_n, tile_k)
    grid = (triton.cdiv(rows, tile_m) * triton.cdiv(spec.n, tile_n),)
    launch = partial(gemm_kernel.warmup, grid=grid) if x.is_meta else gemm_kernel[grid]
    launch(
        Tensors(x, weight, weight if bias is None else bias, out if residual is None else residual, out),
        strides,
        rows,
        spec.n,
        k,
        Layer(*(tl.constexpr(value) for value in constants)),
        KIND=kind,
        ALPHA=alpha,
        BETA=beta,
        LIMIT=limit,
        num_warps=8 if tile_m * tile_n >= 8192 else 4,
        num_stages=3,
    )
