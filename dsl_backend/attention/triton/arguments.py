# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels of this folder are launched with, in bundles.

A bundle of `tl.constexpr` is compiled into a kernel; the others are run-time values, None where there is nothing.
"""

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl

from dsl_backend.attention.protocol import Operands
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.attention.triton.configs import TileConfig, key_blocks, value_blocks
from dsl_backend.quant.format import E4M3, E5M2
from dsl_backend.runtime.target import Target

# Change from step to step: a kernel compiled for one value of these serves them all.
STEP_ARGUMENTS = ["num_requests", "shortest", "longest"]
# From one key head's fp8 scale to the next one's: what a checkpoint has, which is known when layers are loaded.
SCALE_STRIDES = ["k_scale_stride", "v_scale_stride"]
CAUSALITY_CODES = {Causality.FULL: 0, Causality.CAUSAL: 1, Causality.PER_REQUEST: 2}


class Layer(NamedTuple):
    """Compiled in: what the layer's spec says.

    d1, d2, dv1, dv2 are the blocks of `configs.key_blocks` and `value_blocks`; page is 0 where keys are packed, left
    and right are -1 where the window does not end.
    """

    heads_kv: Any
    group: Any
    d1: Any
    d2: Any
    dv1: Any
    dv2: Any
    head_dim: Any
    head_dim_v: Any
    page: Any
    causality: Any
    left: Any
    right: Any
    softcap: Any
    latent: Any
    e5m2: Any


class Tiles(NamedTuple):
    """Compiled in: rows and keys of a tile, and requests whose lengths are summed at a time."""

    m: Any
    n: Any
    scan: Any


class Rows(NamedTuple):
    """[tokens, heads, ...]; strides in elements."""

    ptr: Any
    token_stride: Any
    head_stride: Any


class Cache(NamedTuple):
    """[pages, page_size, heads, ...], or [tokens, heads, ...] with a page stride of 0; strides in elements."""

    ptr: Any
    page_stride: Any
    token_stride: Any
    head_stride: Any


class Requests(NamedTuple):
    """A batch's tensors, as `spec.Batch` has them."""

    starts: Any
    kv_lens: Any
    table: Any
    table_stride: Any
    packed_starts: Any
    causal: Any


class ScoreModArgs(NamedTuple):
    """What scores and outputs are multiplied by or joined with; scale_log2 is the scale times log2(e)."""

    scale_log2: Any
    sinks: Any
    slopes: Any
    k_scale: Any
    v_scale: Any


def constants(bundle: type[Any], *values: Any) -> Any:
    """A bundle of compile-time values."""
    return bundle(*(tl.constexpr(value) for value in values))


def window(width: int | None) -> int:
    """A window as the kernels take it: -1 is unbounded, and so is what int32 positions could not be added to."""
    return -1 if width is None or width >= 1 << 30 else width


def layer_of(spec: AttentionSpec) -> Layer:
    layer: Layer = constants(
        Layer,
        spec.heads_kv,
        spec.group,
        *key_blocks(spec),
        *value_blocks(spec),
        spec.head_dim,
        spec.head_dim_v,
        spec.page_size or 0,
        CAUSALITY_CODES[spec.causality],
        window(spec.window_left),
        window(spec.window_right),
        float(spec.softcap),
        spec.latent,
        spec.kv == E5M2,
    )
    return layer


def tiles_of(config: TileConfig, scan: int) -> Tiles:
    tiles: Tiles = constants(Tiles, config.block_m, config.block_n, scan)
    return tiles


def key_storage(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """fp8 keys as the target reads them: e4m3 as bytes where it has no conversion of its own, e5m2 always.

    An e5m2 is the upper byte of a float16: a shift converts it on every target, infinities and NaN included.
    """
    if tensor.dtype == E5M2.dtype or (tensor.dtype == E4M3.dtype and not target.native_fp8):
        return tensor.view(torch.uint8)
    return tensor


def rows_of(tensor: torch.Tensor | None) -> Rows:
    return Rows(None, 0, 0) if tensor is None else Rows(tensor, tensor.stride(0), tensor.stride(1))


def cache_of(tensor: torch.Tensor, target: Target) -> Cache:
    strides = tensor.stride()[:-1]
    return Cache(key_storage(tensor, target), *(strides if len(strides) == 3 else (0, *strides)))


def scoring_of(spec: AttentionSpec, operands: Operands) -> ScoreModArgs:
    return ScoreModArgs(
        spec.scale / math.log(2),
        operands.sinks,
        operands.alibi_slopes,
        operands.k_scale if spec.is_fp8_kv else None,
        operands.v_scale if spec.is_fp8_kv else None,
    )


def scale_stride(scale: torch.Tensor | None) -> int:
    """Elements from one key head's scale to the next one's: 0 where there is one for all, or none."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def scale_strides(operands: Operands) -> tuple[int, int]:
    return scale_stride(operands.k_scale), scale_stride(operands.v_scale)


def launch_arguments(spec: AttentionSpec, target: Target, batch: Batch, operands: Operands) -> tuple[Any, ...]:
    """The arguments that the kernels begin with, in their order."""
    q2 = operands.q[..., key_blocks(spec)[0] :] if operands.q_rope is None else operands.q_rope
    table = batch.block_table
    return (
        rows_of(operands.q),
        rows_of(q2),
        cache_of(operands.keys, target),
        cache_of(operands.values, target),
        rows_of(operands.out),
        rows_of(operands.lse),
        Requests(
            batch.query_start_loc,
            batch.seq_lens,
            table,
            0 if table is None else table.stride(0),
            batch.kv_start_loc,
            batch.causal if spec.causality is Causality.PER_REQUEST else None,
        ),
        scoring_of(spec, operands),
        *scale_strides(operands),
        batch.num_requests,
    )
