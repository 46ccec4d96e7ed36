# SPDX-License-Identifier: Apache-2.0
"""Experts by five kernels: two sort the pairs of a token and a slot by expert, two make the products over tiles of one
expert's pairs, and one adds up a token's experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.kernel import Launch
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.triton.tiles import activated, dot, kind_of
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Rows of a tile: powers of two, the tallest last.
TILE_HEIGHTS = (16, 32, 64, 128)
# Pairs of a program that counts, and of one that gives them their places. This compares each of its pairs with each
# expert, in 64 registers a thread.
COUNTED, MIN_PLACED, COMPARED = 256, 8, 8192


class Tensors(NamedTuple):
    """Pointers of a product; of a missing part any. `pairs` to `tile_starts` are Routing's."""

    x: Any
    weight: Any
    bias: Any
    scale: Any
    out: Any
    pairs: Any
    starts: Any
    tile_starts: Any


class Strides(NamedTuple):
    """Elements between rows of x, experts, columns of out, and from a column's gate row to its up row."""

    x: Any
    expert: Any
    weight: Any
    part: Any
    bias_expert: Any
    bias: Any
    bias_part: Any


class Product(NamedTuple):
    """What a product's kernel is compiled for, beside the activation.

    Attributes:
        share: pairs that have the same row of x.
        scaled: sums are multiplied by the pair's scale. search: steps that find a tile's expert.
    """

    share: Any
    bias: Any
    scaled: Any
    search: Any
    tile_m: Any
    tile_n: Any
    tile_k: Any


@triton.jit
def expert_of(tile, tile_starts_ptr, experts, SEARCH: tl.constexpr):
    """The last expert whose tiles begin at this one or before it."""
    low, high = 0, experts
    for _ in range(SEARCH):
        middle = (low + high) // 2
        before = tl.load(tile_starts_ptr + middle) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low.to(tl.int64)


@triton.jit
def rows_of_tile(tile, tensors, experts, SEARCH: tl.constexpr, M: tl.constexpr):
    """(expert, pair [M], in_rows [M]) of a tile: the pairs of its rows, as far as there are."""
    expert = expert_of(tile, tensors.tile_starts, experts, SEARCH)
    first = tl.load(tensors.starts + expert) + (tile - tl.load(tensors.tile_starts + expert)) * M
    place = first + tl.arange(0, M)
    in_rows = place < tl.load(tensors.starts + expert + 1)
    return expert, tl.load(tensors.pairs + place, mask=in_rows, other=0).to(tl.int64), in_rows


@triton.jit
def product_kernel(
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
    """Row p of out for each pair p (a token and one of its experts) of a tile, from row p // share of x."""
    M: tl.constexpr = PRODUCT.tile_m
    N: tl.constexpr = PRODUCT.tile_n
    K: tl.constexpr = PRODUCT.tile_k
    tile = tl.program_id(0)
    column = tl.program_id(1).to(tl.int64) * N + tl.arange(0, N)
    if tile >= tl.load(tensors.tile_starts + experts):
        return
    expert, pair, in_rows = rows_of_tile(tile, tensors, experts, PRODUCT.search, M)
    in_columns = column < n
    inner = tl.arange(0, K)
    x_ptrs = tensors.x + (pair // PRODUCT.share)[:, None] * strides.x + inner[None, :]
    gate_ptrs = (
        tensors.weight + expert * strides.expert + tl.minimum(column, n - 1)[None, :] * strides.weight + inner[:, None]
    )
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        mask = inner < k - start
        x = tl.load(x_ptrs + start, mask=in_rows[:, None] & mask[None, :], other=0.0)
        gate = dot(x, tl.load(gate_ptrs + start, mask=mask[:, None], other=0.0), gate)
        if KIND != 0:
            up = dot(x, tl.load(gate_ptrs + strides.part + start, mask=mask[:, None], other=0.0), up)
    if PRODUCT.scaled:
        scale = tl.load(tensors.scale + pair, mask=in_rows, other=0.0)
        gate *= scale[:, None]
        up *= scale[:, None]
    if PRODUCT.bias:
        bias_ptrs = tensors.bias + expert * strides.bias_expert + column * strides.bias
        gate += tl.load(bias_ptrs, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        if KIND != 0:
            up += tl.load(bias_ptrs + strides.bias_part, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if KIND != 0:
        gate = activated(gate, up, KIND, ALPHA, BETA, LIMIT)
    inside = in_rows[:, None] & in_columns[None, :]
    tl.store(tensors.out + pair[:, None] * n + column[None, :], gate.to(tensors.out.dtype.element_ty), mask=inside)


@triton.jit
def combine_kernel(
    made_ptr,
    weights_ptr,
    ids_ptr,
    counts_ptr,
    out_ptr,
    out_stride,
    n,
    counters,
    TOPK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COUNTERS: tl.constexpr,
    N: tl.constexpr,
):
    """A token's experts added up in the order of its slots; ids are negative where there is none. Clears counters."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        counter = tl.arange(0, COUNTERS)
        tl.store(counts_ptr + counter, tl.zeros((COUNTERS,), tl.int32), mask=counter < counters)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for slot in range(TOPK):
        pair = token * TOPK + slot
        if tl.load(ids_ptr + pair) >= 0:
            made = tl.load(made_ptr + pair * n + column, mask=column < n, other=0.0).to(tl.float32)
            if WEIGHTED:
                made *= tl.load(weights_ptr + pair)
            total += made
    tl.store(out_ptr + token * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=column < n)


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    topk_ids_ptr,
    map_ptr,
    ids_ptr,
    counts_ptr,
    pairs,
    experts,
    known,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """This rank's expert of each pair, -1 where there is none; how many pairs each expert has is added to counts."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(topk_ids_ptr + pair, mask=pair < pairs, other=-1)
    expert = tl.where((expert >= 0) & (expert < known), expert, -1).to(tl.int32)
    if MAPPED:
        expert = tl.load(map_ptr + expert, mask=expert >= 0, other=-1)
        expert = tl.where((expert >= 0) & (expert < experts), expert, -1)
    tl.store(ids_ptr + pair, expert, mask=pair < pairs)
    tl.atomic_add(counts_ptr + expert, 1, mask=expert >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["pairs"])
def place_kernel(
    ids_ptr,
    counts_ptr,
    placed_ptr,
    pairs_ptr,
    starts_ptr,
    tile_starts_ptr,
    pairs,
    experts,
    M: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pairs by expert, and the first pair and the first tile of each expert; placed counts those that have a place.

    An expert's pairs are in any order: each has a row of the products of its own, whose value depends on no other row.
    """
    every = tl.arange(0, EXPERTS)
    count = tl.load(counts_ptr + every, mask=every < experts, other=0)
    if tl.program_id(0) == 0:
        tiles = (count + M - 1) // M
        inside = every < experts
        tl.store(starts_ptr, 0)
        tl.store(tile_starts_ptr, 0)
        tl.store(starts_ptr + 1 + every, tl.cumsum(count, 0), mask=inside)
        tl.store(tile_starts_ptr + 1 + every, tl.cumsum(tiles, 0), mask=inside)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    first = tl.sum(tl.where(every[None, :] < expert[:, None], count[None, :], 0), 1)
    place = first + tl.atomic_add(placed_ptr + expert, 1, mask=expert >= 0, sem="relaxed")
    tl.store(pairs_ptr + place, pair, mask=expert >= 0)


class Routing(NamedTuple):
    """Which pairs of a token and a slot each expert has: int32 on the device.

    Attributes:
        ids: [M k], this rank's experts; negative where there is none.
        pairs: [M k], those of expert 0 first; undefined behind those of the last expert.
        starts: [E + 1], of the experts' pairs. tile_starts: [E + 1], of their tiles.
        counts: [2, E], 0 before and after a layer: the experts' pairs, and those that have a place.
    """

    ids: torch.Tensor
    pairs: torch.Tensor
    starts: torch.Tensor
    tile_starts: torch.Tensor
    counts: torch.Tensor


def scratch_of(spec: ExpertsSpec, workspace: Workspace, pairs: int) -> Routing:
    experts, counts = spec.num_experts, rounded(spec.num_experts)
    sizes = [rounded(count) for count in (pairs, pairs, experts + 1, experts + 1)]
    ids, placed, starts, tile_starts = workspace.integers(sum(sizes))[: sum(sizes)].split(sizes)
    flags = workspace.flags(2 * counts)[: 2 * counts].view(2, counts)
    return Routing(ids, placed, starts, tile_starts, flags)


def rounded(count: int) -> int:
    """A count of int32 behind which the next ones begin at 16 bytes, so that Triton compiles one kernel for all."""
    return triton.cdiv(count, 4) * 4


def sort(spec: ExpertsSpec, operands: ExpertsOperands, routing: Routing, tile_m: int) -> None:
    """Writes the routing of operands.topk_ids; the host reads nothing. With meta tensors it only compiles."""
    mapped, experts, pairs = operands.expert_map, spec.num_experts, operands.topk_ids.numel()
    launcher(count_kernel, (triton.cdiv(pairs, COUNTED),), routing.ids)(
        operands.topk_ids,
        routing.ids if mapped is None else mapped,
        routing.ids,
        routing.counts[0],
        pairs,
        experts,
        experts if mapped is None else mapped.shape[0],
        MAPPED=mapped is not None,
        BLOCK=COUNTED,
    )
    every = triton.next_power_of_2(experts)
    block = max(MIN_PLACED, COMPARED // every)
    launcher(place_kernel, (triton.cdiv(pairs, block),), routing.ids)(
        routing.ids,
        routing.counts[0],
        routing.counts[1],
        routing.pairs,
        routing.starts,
        routing.tile_starts,
        pairs,
        experts,
        M=tile_m,
        EXPERTS=every,
        BLOCK=block,
    )


def bind(spec: ExpertsSpec, target: Target, workspace: Workspace) -> Launch:
    """The kernels for any number of tokens."""
    workspace.flags(2 * rounded(spec.num_experts))  # before a graph is captured
    return partial(experts, spec, workspace)


def prepare(spec: ExpertsSpec, target: Target) -> None:
    """Compile what any number of tokens needs, with packed tensors: all kernels for each height of a tile."""

    def tensor(*shape: int, dtype: torch.dtype = spec.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.intermediate_size
    ids, placed = (tensor(spec.topk, dtype=torch.int32) for _ in range(2))
    starts, tile_starts = (tensor(experts + 1, dtype=torch.int32) for _ in range(2))
    routing = Routing(ids, placed, starts, tile_starts, tensor(2, rounded(experts), dtype=torch.int32))
    weights = None if spec.router_weights is RouterWeights.NONE else tensor(1, spec.topk, dtype=torch.float32)
    operands = ExpertsOperands(
        tensor(1, hidden),
        tensor(experts, 2 * width, hidden),
        tensor(experts, hidden, width),
        weights,
        tensor(1, spec.topk, dtype=spec.ids_dtype),
        tensor(experts, 2 * width) if spec.w13_bias else None,
        tensor(experts, hidden) if spec.w2_bias else None,
        None if spec.global_experts is None else tensor(spec.global_experts, dtype=torch.int32),
        tensor(1, hidden),
    )
    for tile_m in TILE_HEIGHTS:
        launches(spec, operands, routing, tensor(spec.topk, width), tensor(spec.topk, hidden), tile_m)


def tile_of(spec: ExpertsSpec, tokens: int) -> int:
    """Rows of a tile: about what an expert has."""
    rows = triton.next_power_of_2(tokens * spec.topk // spec.num_experts)
    return min(TILE_HEIGHTS[-1], max(TILE_HEIGHTS[0], rows))


def launcher(kernel: Any, grid: tuple[int, ...], like: torch.Tensor) -> Callable[..., Any]:
    """Launches a kernel; where tensors are like a meta tensor it is only compiled."""
    return partial(kernel.warmup, grid=grid) if like.is_meta else kernel[grid]


def product(
    spec: ExpertsSpec,
    routing: Routing,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    tile_m: int,
    gated: bool,
) -> None:
    """The first product and its activation (gated), or the second one."""
    experts, pairs = spec.num_experts, out.shape[0]
    n, k = out.shape[1], x.shape[1]
    turns = 2 if gated and spec.interleaved else 1
    tile_n, tile_k = (64 if gated or tile_m <= 32 else 128), (128 if tile_m <= 32 else 64)
    tiles = pairs // tile_m + min(experts, pairs)
    strides = Strides(
        x=x.stride(0),
        expert=weight.stride(0),
        weight=turns * weight.stride(1),
        part=weight.stride(1) if turns == 2 else n * weight.stride(1),
        bias_expert=0 if bias is None else bias.stride(0),
        bias=turns,
        bias_part=1 if turns == 2 else n,
    )
    activation, share = (spec.activation, spec.topk) if gated else (None, 1)
    kind, alpha, beta, limit = kind_of(activation)
    constants = (share, bias is not None, scale is not None, experts.bit_length())
    launcher(product_kernel, (tiles, triton.cdiv(n, tile_n)), x)(
        Tensors(x, weight, weight if bias is None else bias, x if scale is None else scale, out, *routing[1:4]),
        strides,
        experts,
        n,
        k,
        Product(*(tl.constexpr(value) for value in (*constants, tile_m, tile_n, tile_k))),
        KIND=kind,
        ALPHA=alpha,
        BETA=beta,
        LIMIT=limit,
        num_warps=8 if tile_m * tile_n >= 8192 else 4,
        num_stages=3,
    )


def experts(spec: ExpertsSpec, workspace: Workspace, operands: ExpertsOperands) -> None:
    """Writes operands.out."""
    tokens, hidden, width = operands.x.shape[0], spec.hidden_size, spec.intermediate_size
    pairs, tile_m = tokens * spec.topk, tile_of(spec, tokens)
    routing = scratch_of(spec, workspace, pairs)
    # Elements of 2 bytes in a buffer of 4.
    scratch = workspace.partials(pairs * (hidden + width) // 2 + 1).view(spec.dtype)
    inner = scratch[: pairs * width].view(pairs, width)
    made = scratch[pairs * width : pairs * (width + hidden)].view(pairs, hidden)
    launches(spec, operands, routing, inner, made, tile_m)


def launches(
    spec: ExpertsSpec,
    operands: ExpertsOperands,
    routing: Routing,
    inner: torch.Tensor,
    made: torch.Tensor,
    tile_m: int,
) -> None:
    """Writes operands.out; routing, inner [M k, I], made [M k, H] are scratch. With meta tensors it only compiles."""
    scale = operands.topk_weights if spec.router_weights is RouterWeights.INPUT else None
    sort(spec, operands, routing, tile_m)
    product(spec, routing, operands.x, operands.w13, operands.w13_bias, scale, inner, tile_m, True)
    product(spec, routing, inner, operands.w2, operands.w2_bias, None, made, tile_m, False)
    combine(spec, operands, routing, made)


def combine(spec: ExpertsSpec, operands: ExpertsOperands, routing: Routing, made: torch.Tensor) -> None:
    """Writes operands.out from each pair's result [M k, H]."""
    (tokens, hidden), weights = operands.out.shape, operands.topk_weights
    launcher(combine_kernel, (tokens, triton.cdiv(hidden, 1024)), made)(
        made,
        made if weights is None else weights,
        routing.ids,
        routing.counts,
        operands.out,
        operands.out.stride(0),
        hidden,
        routing.counts.numel(),
        TOPK=spec.topk,
        WEIGHTED=spec.router_weights is RouterWeights.OUTPUT,
        COUNTERS=triton.next_power_of_2(routing.counts.numel()),
        N=min(1024, triton.next_power_of_2(hidden)),
    )
