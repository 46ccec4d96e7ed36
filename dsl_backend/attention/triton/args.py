# SPDX-License-Identifier: Apache-2.0
"""What a launch of a Triton kernel takes: named tuples, each spelled once, which go whole from host to kernel.

The fields of a bundle of `tl.constexpr` are compiled in. The others are run-time values, None where there is nothing.

Triton (3.3 to 3.9) takes do_not_specialize by argument, and compiles again for a number in a tuple that is 1 or a
multiple of 16. So a number that changes from step to step is an argument of its own, or goes through `unspecialized`.
Pointers and strides in tuples are specialised by alignment as arguments are: a layer's are the same in all steps.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.attention.protocol import Operands
from dsl_backend.attention.spec import AttentionSpec, Batch, Causality
from dsl_backend.attention.triton.configs import TileConfig, key_blocks, value_blocks
from dsl_backend.quant.format import E4M3, E5M2, NVFP4_KV
from dsl_backend.runtime.target import Target

# They change from step to step.
STEP_ARGUMENTS = ["num_requests", "min_seqlen_q", "max_seqlen_q"]
# Elements from one key head's scale to the next one's: a checkpoint decides them, after kernels are warmed up.
SCALE_STRIDES = ["k_scale_stride", "v_scale_stride"]
CAUSALITY_CODES = {Causality.FULL: 0, Causality.CAUSAL: 1, Causality.PER_REQUEST: 2}


class Layer(NamedTuple):
    """Compiled in: the layer's spec.

    d1, d2, dv1, dv2 are the blocks of `configs.key_blocks` and `value_blocks`. page_size is 0 where keys are packed;
    a window size of -1 is unbounded.
    """

    heads_kv: Any
    group: Any
    d1: Any
    d2: Any
    dv1: Any
    dv2: Any
    head_dim: Any
    head_dim_v: Any
    page_size: Any
    causality: Any
    window_size_left: Any
    window_size_right: Any
    softcap: Any
    alibi: Any
    mla: Any
    e5m2: Any
    nvfp4: Any
    scales_by_request: Any
    fp8_q: Any
    nvfp4_out: Any
    bf16: Any


class Tiles(NamedTuple):
    """Compiled in: rows and keys of a tile, and requests whose lengths a program sums at a time."""

    m: Any
    n: Any
    scan: Any


class Splits(NamedTuple):
    """Compiled in: how key ranges are split, as the configuration of the kernel says.

    Attributes:
        tiles: key tiles of a split; of balanced split-KV, the least number.
        programs: that process splits.
        factor, scratch_floats: of batch-invariant attention.
        overlap: the combine kernel is launched with programmatic dependent launch.
    """

    tiles: Any
    programs: Any
    factor: Any
    scratch_floats: Any
    overlap: Any


def unspecialized(number: int) -> int:
    """A number from 0 on for a bundle, as an odd one from 3 on: Triton compiles for none of these. See `number_of`."""
    return 2 * number + 3


@triton.jit
def number_of(unspecialized):
    return (unspecialized - 3) >> 1


class Rows(NamedTuple):
    """(tokens, heads, ...); strides in elements."""

    ptr: Any
    token_stride: Any
    head_stride: Any


class Cache(NamedTuple):
    """(pages, page_size, heads, ...), or (tokens, heads, ...) with a page stride of 0; strides in elements.

    NVFP4: of the packed elements, in bytes; scales follow those of a page, an eighth of the strides apart.
    """

    ptr: Any
    page_stride: Any
    token_stride: Any
    head_stride: Any


class Outputs(NamedTuple):
    out: Rows  # (total_q, head_q, head_dim_v); of NVFP4 bytes of two elements
    lse: Rows  # (total_q, head_q); its strides are unspecialized: with heads first one is the number of tokens
    block_scale: Any  # of NVFP4, bytes


class Tensors(NamedTuple):
    """q1 and q2 are the two blocks of query rows; q1's pointer serves both where they lie in one tensor."""

    q1: Rows
    q2: Rows
    k: Cache
    v: Cache
    outputs: Outputs


class Requests(NamedTuple):
    """A batch's tensors, as `spec.Batch` has them; page_table_stride is unspecialized."""

    cu_seqlens_q: Any
    seqused_k: Any
    page_table: Any
    page_table_stride: Any
    cu_seqlens_k: Any
    causal: Any


class ScoreModArgs(NamedTuple):
    """What scores and outputs are multiplied by or joined with; softmax_scale_log2 is the scale times log2(e).

    The strides are from one request's scale to the next one's, and of queries also from one key head's to the next
    one's; unspecialized.
    """

    softmax_scale_log2: Any
    sinks: Any
    alibi_slopes: Any
    k_scale: Any
    v_scale: Any
    q_scale: Any
    k_request_stride: Any
    v_request_stride: Any
    q_request_stride: Any
    q_scale_stride: Any
    out_scale: Any


class Scratch(NamedTuple):
    """Partial results (float32), and the work list of the combine kernel (int32)."""

    partials: Any
    combines: Any


def constants(bundle: type[Any], *values: Any) -> Any:
    """A bundle of compile-time values."""
    return bundle(*(tl.constexpr(value) for value in values))


def window_size(width: int | None) -> int:
    """A window size as the kernels take it: -1 where it is unbounded, or too large to be added to int32 positions."""
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
        window_size(spec.window_left),
        window_size(spec.window_right),
        float(spec.softcap),
        spec.alibi,
        spec.mla,
        spec.kv == E5M2,
        spec.kv.nvfp4,
        spec.scales_by_request,
        spec.is_fp8_q,
        spec.is_nvfp4_out,
        spec.dtype == torch.bfloat16,
    )
    return layer


def tiles_of(config: TileConfig, scan: int) -> Tiles:
    tiles: Tiles = constants(Tiles, config.block_m, config.block_n, scan)
    return tiles


def kv_storage(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """fp8 keys, queries or outputs as the target has them: e4m3 as bytes where it has no conversion, e5m2 always.

    An e5m2 is the upper byte of a float16: a shift converts it on every target, infinities and NaN included.
    """
    if tensor.dtype == E5M2.dtype or (tensor.dtype == E4M3.dtype and not target.native_fp8):
        return tensor.view(torch.uint8)
    return tensor


def rows_of(tensor: torch.Tensor | None) -> Rows:
    return Rows(None, 0, 0) if tensor is None else Rows(tensor, tensor.stride(0), tensor.stride(1))


def cache_of(tensor: torch.Tensor, target: Target) -> Cache:
    if tensor.dtype == NVFP4_KV.dtype:
        tensor = NVFP4_KV.parts(tensor)[0]
    strides = tensor.stride()[:-1]
    return Cache(kv_storage(tensor, target), *(strides if len(strides) == 3 else (0, *strides)))


def outputs_of(target: Target, operands: Operands) -> Outputs:
    lse = rows_of(operands.lse)
    return Outputs(
        rows_of(kv_storage(operands.out, target)),
        Rows(lse.ptr, unspecialized(lse.token_stride), unspecialized(lse.head_stride)),
        None if operands.out_block_scale is None else operands.out_block_scale.view(torch.uint8),
    )


def tensors_of(spec: AttentionSpec, target: Target, operands: Operands) -> Tensors:
    q2 = operands.q[..., key_blocks(spec)[0] :] if operands.q_rope is None else operands.q_rope
    return Tensors(
        rows_of(kv_storage(operands.q, target)),
        rows_of(kv_storage(q2, target)),
        cache_of(operands.keys, target),
        cache_of(operands.values, target),
        outputs_of(target, operands),
    )


def requests_of(spec: AttentionSpec, batch: Batch) -> Requests:
    page_table = batch.block_table
    return Requests(
        batch.query_start_loc,
        batch.seq_lens,
        page_table,
        unspecialized(0 if page_table is None else page_table.stride(0)),
        batch.kv_start_loc,
        batch.causal if spec.causality is Causality.PER_REQUEST else None,
    )


def score_mod_of(spec: AttentionSpec, operands: Operands) -> ScoreModArgs:
    return ScoreModArgs(
        spec.scale / math.log(2),
        operands.sinks,
        operands.alibi_slopes,
        operands.k_scale if spec.is_quantized_kv else None,
        operands.v_scale if spec.is_quantized_kv else None,
        operands.q_scale,
        unspecialized(request_stride(spec, operands.k_scale)),
        unspecialized(request_stride(spec, operands.v_scale)),
        unspecialized(request_stride(spec, operands.q_scale)),
        unspecialized(scale_stride(operands.q_scale)),
        operands.out_scale,
    )


def request_stride(spec: AttentionSpec, scale: torch.Tensor | None) -> int:
    """Elements from one request's scale to the next one's: 0 where all requests have the same."""
    return scale.stride(0) if spec.scales_by_request and scale is not None else 0


def scale_stride(scale: torch.Tensor | None) -> int:
    """Elements from one key head's scale to the next one's: 0 where all heads have one scale, or there is none."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)


def launch_arguments(spec: AttentionSpec, target: Target, batch: Batch, operands: Operands) -> tuple[Any, ...]:
    """The arguments that the attention kernels begin with, up to num_requests."""
    return (
        tensors_of(spec, target, operands),
        requests_of(spec, batch),
        score_mod_of(spec, operands),
        scale_stride(operands.k_scale),
        scale_stride(operands.v_scale),
        batch.num_requests,
    )
