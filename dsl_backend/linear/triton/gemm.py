# SPDX-License-Identifier: Apache-2.0
"""A GEMM with bias, gated activation and residual; one program for each tile."""

from functools import partial

import torch
import triton
import triton.language as tl

from dsl_backend.gemm.args import GemmOperands
from dsl_backend.gemm.spec import Rows
from dsl_backend.gemm.triton.tiles import activated, dot, kind_of
from dsl_backend.linear.kernel import Launch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Tiles of a column of tiles that run at the same time, so that their weights are in L2.
GROUP = 8
TILE_HEIGHTS = (16, 32, 64, 128)


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    part_stride,
    bias_stride,
    bias_part,
    residual_stride,
    out_stride,
    rows,
    n,
    k,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GROUPED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Strides are those of rows. A gate row and its up row are part_stride apart."""
    tiles_m, tiles_n = tl.cdiv(rows, M), tl.cdiv(n, N)
    program = tl.program_id(0).to(tl.int64)
    first = program // (GROUPED * tiles_n) * GROUPED
    height = tl.minimum(tiles_m - first, GROUPED)
    within = program % (GROUPED * tiles_n)
    row = (first + within % height) * M + tl.arange(0, M)
    column = within // height * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    in_rows, in_columns = row < rows, column < n
    # Rows and columns past the end read the last one.
    x_ptrs = x_ptr + tl.minimum(row, rows - 1)[:, None] * x_stride + inner[None, :]
    gate_ptrs = weight_ptr + tl.minimum(column, n - 1)[None, :] * weight_stride + inner[:, None]
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        mask = inner < k - start
        x = tl.load(x_ptrs + start, mask=mask[None, :], other=0.0)
        gate = dot(x, tl.load(gate_ptrs + start, mask=mask[:, None], other=0.0), gate)
        if KIND != 0:
            up = dot(x, tl.load(gate_ptrs + part_stride + start, mask=mask[:, None], other=0.0), up)
    if BIAS:
        gate += tl.load(bias_ptr + column * bias_stride, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        if KIND != 0:
            up += tl.load(bias_ptr + column * bias_stride + bias_part, mask=in_columns, other=0.0).to(tl.float32)[
                None, :
            ]
    if KIND != 0:
        gate = activated(gate, up, KIND, ALPHA, BETA, LIMIT)
    inside = in_rows[:, None] & in_columns[None, :]
    if RESIDUAL:
        residual_ptrs = residual_ptr + row[:, None] * residual_stride + column[None, :]
        gate += tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row[:, None] * out_stride + column[None, :], gate.to(out_ptr.dtype.element_ty), mask=inside)


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
    x, weight, bias, residual, out = (
        operands.x,
        operands.weight,
        operands.bias,
        operands.residual,
        operands.out,
    )
    rows, k = x.shape
    # Another tile may be another instruction, which sums in another order.
    tile_m = 64 if spec.batch_invariant else next((m for m in TILE_HEIGHTS if rows <= m), TILE_HEIGHTS[-1])
    # Two accumulators a tile: half as wide.
    tile_n, tile_k = (64 if spec.parts == 2 or tile_m <= 32 else 128), (128 if tile_m <= 32 else 64)
    kind, alpha, beta, limit = kind_of(spec.activation)
    row_stride, part = part_stride(spec, weight.stride(0))
    bias_stride, bias_part = part_stride(spec, 1)
    grid = (triton.cdiv(rows, tile_m) * triton.cdiv(spec.n, tile_n),)
    launch = partial(gemm_kernel.warmup, grid=grid) if x.is_meta else gemm_kernel[grid]
    launch(
        x,
        weight,
        weight if bias is None else bias,
        out if residual is None else residual,
        out,
        x.stride(0),
        row_stride,
        part,
        bias_stride,
        bias_part,
        0 if residual is None else residual.stride(0),
        out.stride(0),
        rows,
        spec.n,
        k,
        KIND=kind,
        ALPHA=alpha,
        BETA=beta,
        LIMIT=limit,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        GROUPED=GROUP,
        M=tile_m,
        N=tile_n,
        K=tile_k,
        num_warps=8 if tile_m * tile_n >= 8192 else 4,
        num_stages=3,
    )
