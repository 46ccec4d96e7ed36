# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights are in 8 bits: the launches of `kernels`, with two that quantise x and the activation's result.

Sums of 128 columns are products of e4m3 where the target has them, and of float16 elsewhere. The activation's result is
rounded to the dtype of the output before it is quantised.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.kernel import Launch
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.experts.triton.kernels import Routing, combine, rounded, rows_of_tile, scratch_of, sort, tile_of
from dsl_backend.gemm.triton.tiles import activated, elements, kind_of, product
from dsl_backend.quant.format import E4M3, GROUP
from dsl_backend.quant.reference import LEAST_OF_GROUP, LEAST_OF_ROW
from dsl_backend.quant.triton.convert import quantize
from dsl_backend.quant.triton.scales import magnitude
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Part, Workspace

LARGEST = tl.constexpr(E4M3.largest)
# Columns of a row that are quantised at once, and of k in a tile: those that share a scale.
ROW_BLOCK, TILE_K = 1024, GROUP


class Tensors(NamedTuple):
    """Pointers of a product; see `Matrices`. scale: the router's weights [M k]; any where they are not multiplied in.

    Attributes:
        pairs, starts, tile_starts: of `Routing`.
    """

    x: Any
    x_scale: Any
    weight: Any
    weight_scale: Any
    out: Any
    scale: Any
    pairs: Any
    starts: Any
    tile_starts: Any


class Strides(NamedTuple):
    """Elements between rows of x, rows of its scales, experts' weights, their rows, experts' scales and their rows.

    Attributes:
        step: rows of the weight from a column of the output to the next one. part: from a gate row to its up row.
    """

    x: Any
    x_scale: Any
    expert: Any
    row: Any
    expert_scale: Any
    row_scale: Any
    step: Any
    part: Any


class Product(NamedTuple):
    """What a product's kernel is compiled for, beside the activation.

    Attributes:
        share: pairs that have the same row of x.
        block: rows and columns of a block of weights with a scale; 0 is one a row.
        scaled: sums are multiplied by the pair's scale. search: steps that find a tile's expert.
        wgmma: products are SM90's.
    """

    share: Any
    block: Any
    scaled: Any
    search: Any
    wgmma: Any
    tile_m: Any
    tile_n: Any
    tile_k: Any


@triton.jit
def quantise_kernel(
    x_ptr, out_ptr, scale_ptr, x_stride, n, LEAST: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr
):
    """`SHARED` columns of a row (program 1), or with 0 all of them, to contiguous e4m3 and a float32 scale."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * SHARED
    end = tl.minimum(first + SHARED, n) if SHARED else n
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + column, mask=column < end, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(x, column < end))
    scale = tl.maximum(tl.max(largest, 0), LEAST) / LARGEST
    tl.store(scale_ptr + row * tl.num_programs(1) + part, scale)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + column, mask=column < end, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * n + column, quantize(x / scale, out_ptr.dtype.element_ty, False), mask=column < end)


@triton.jit
def scaled_sum(x, x_scale, weight, scales, strides, row, block, acc, PRODUCT):
    """The sum with the product of a tile of k, and the scales of its block of the weight's rows `row`."""
    part = product(x, elements(weight), PRODUCT.tile_k, PRODUCT.wgmma)
    if PRODUCT.block != 0:
        part *= x_scale[:, None] * tl.load(scales + row // PRODUCT.block * strides.row_scale + block)[None, :]
    return acc + part


@triton.jit
def scaled_product_kernel(
    tensors,
    strides,
    experts,
    n,
    k,
    PRODUCT,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """As `kernels.product_kernel`."""
    M: tl.constexpr = PRODUCT.tile_m
    N: tl.constexpr = PRODUCT.tile_n
    K: tl.constexpr = PRODUCT.tile_k
    tile = tl.program_id(0)
    column = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    if tile >= tl.load(tensors.tile_starts + experts):
        return
    expert, pair, in_rows = rows_of_tile(tile, tensors, experts, PRODUCT.search, M)
    gate_row = tl.minimum(column, n - 1) * strides.step
    up_row = gate_row + strides.part
    x_row, inner = pair // PRODUCT.share, tl.arange(0, K)
    x_ptrs = tensors.x + x_row[:, None] * strides.x + inner[None, :]
    x_scales = tensors.x_scale + x_row * strides.x_scale
    gate_ptrs = tensors.weight + expert * strides.expert + gate_row[None, :] * strides.row + inner[:, None]
    up_ptrs = gate_ptrs + strides.part * strides.row
    scales = tensors.weight_scale + expert * strides.expert_scale
    x_scale = tl.load(x_scales)
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        mask, block = inner < k - start, start // K
        x = elements(tl.load(x_ptrs + start, mask=in_rows[:, None] & mask[None, :], other=0.0))
        if PRODUCT.block != 0:
            x_scale = tl.load(x_scales + block)
        weight = tl.load(gate_ptrs + start, mask=mask[:, None], other=0.0)
        gate = scaled_sum(x, x_scale, weight, scales, strides, gate_row, block, gate, PRODUCT)
        if KIND != 0:
            weight = tl.load(up_ptrs + start, mask=mask[:, None], other=0.0)
            up = scaled_sum(x, x_scale, weight, scales, strides, up_row, block, up, PRODUCT)
    if PRODUCT.block == 0:
        gate *= tl.load(scales + gate_row)[None, :] * x_scale[:, None]
        if KIND != 0:
            up *= tl.load(scales + up_row)[None, :] * x_scale[:, None]
    if PRODUCT.scaled:
        scale = tl.load(tensors.scale + pair)
        gate *= scale[:, None]
        up *= scale[:, None]
    if KIND != 0:
        gate = activated(gate, up, KIND, ALPHA, BETA, LIMIT)
    out = tensors.out + pair[:, None] * n + column[None, :]
    tl.store(out, gate.to(tensors.out.dtype.element_ty), mask=in_rows[:, None] & (column < n)[None, :])


class Matrices(NamedTuple):
    """Of a product: x [rows, k] e4m3, weight [E, rows, k] e4m3, and out [M k, n]."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    out: torch.Tensor


def bind(spec: ExpertsSpec, target: Target, workspace: Workspace) -> Launch:
    """The kernels for any number of tokens."""
    workspace.flags(2 * rounded(spec.num_experts))  # before a graph is captured
    return partial(experts, spec, target, workspace)


def quantise(spec: ExpertsSpec, x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """X [rows, n] to contiguous e4m3 and its scales."""
    rows, n = x.shape
    assert spec.activations is not None
    shared = GROUP if spec.activations.blocked else 0
    least = LEAST_OF_GROUP if shared else LEAST_OF_ROW
    grid = rows, triton.cdiv(n, GROUP) if shared else 1
    quantise_kernel[grid](x, out, scale, x.stride(0), n, LEAST=least, SHARED=shared, BLOCK=shared or ROW_BLOCK)


def multiply(
    spec: ExpertsSpec,
    target: Target,
    routing: Routing,
    given: Matrices,
    scale: torch.Tensor | None,
    gated: bool,
    tile_m: int,
) -> None:
    """The first product and its activation (gated), or the second one."""
    assert spec.weight is not None
    n, k, weight, of_weight = given.out.shape[1], given.x.shape[1], given.weight, given.weight_scale
    turns = 2 if gated and spec.interleaved else 1
    tile_n = 64 if gated or tile_m <= 32 else 128
    grid = given.out.shape[0] // tile_m + min(spec.num_experts, given.out.shape[0]), triton.cdiv(n, tile_n)
    kind, alpha, beta, limit = kind_of(spec.activation if gated else None)
    strides = Strides(
        x=given.x.stride(0),
        x_scale=given.x_scale.stride(0),
        expert=weight.stride(0),
        row=weight.stride(1),
        expert_scale=of_weight.stride(0),
        row_scale=of_weight.stride(1),
        step=turns,
        part=1 if turns == 2 else n,
    )
    anything = given.x_scale if scale is None else scale
    constants = Product(
        share=spec.topk if gated else 1,
        block=GROUP if spec.weight.blocked else 0,
        scaled=scale is not None,
        search=spec.num_experts.bit_length(),
        wgmma=target.wgmma,
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=TILE_K,
    )
    scaled_product_kernel[grid](
        Tensors(*given, anything, routing.pairs, routing.starts, routing.tile_starts),
        strides,
        spec.num_experts,
        n,
        k,
        Product(*(tl.constexpr(constant) for constant in constants)),
        KIND=kind,
        ALPHA=alpha,
        BETA=beta,
        LIMIT=limit,
        num_warps=8 if tile_m * tile_n >= 8192 else 4,
        num_stages=3,
    )


def bits(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """E4m3 as bytes where the target's Triton has no such type."""
    return tensor if target.native_fp8 else tensor.view(torch.uint8)


def experts(spec: ExpertsSpec, target: Target, workspace: Workspace, operands: ExpertsOperands) -> None:
    """Writes operands.out."""
    assert spec.activations is not None
    assert operands.scales.w13 is not None
    assert operands.scales.w2 is not None
    acts, (tokens, hidden), width = spec.activations, operands.x.shape, spec.intermediate_size
    pairs, tile_m = tokens * spec.topk, tile_of(spec, tokens)
    routing = scratch_of(spec, workspace, pairs)
    parts = [
        Part(spec.dtype, (pairs, width)),
        Part(spec.dtype, (pairs, hidden)),
        Part(acts.values, (pairs, width)),
        Part(torch.float32, acts.scale_shape(pairs, width)),
    ]
    if spec.x is None:
        parts += [Part(acts.values, (tokens, hidden)), Part(torch.float32, acts.scale_shape(tokens, hidden))]
    wide, made, inner, inner_scale, *of_x = workspace.tensors(parts)
    x, x_scale = of_x if spec.x is None else (operands.x, operands.scales.x)
    x, inner = bits(x, target), bits(inner, target)
    assert x_scale is not None
    if spec.x is None:
        quantise(spec, operands.x, x, x_scale)
    sort(spec, operands, routing, tile_m)
    scale = operands.topk_weights if spec.router_weights is RouterWeights.INPUT else None
    first = Matrices(x, x_scale, bits(operands.w13, target), operands.scales.w13, wide)
    multiply(spec, target, routing, first, scale, True, tile_m)
    quantise(spec, wide, inner, inner_scale)
    second = Matrices(inner, inner_scale, bits(operands.w2, target), operands.scales.w2, made)
    multiply(spec, target, routing, second, None, False, tile_m)
    combine(spec, operands, routing, made)
