# SPDX-License-Identifier: Apache-2.0
"""Store new keys and values in a paged cache: one program for each token and key/value head."""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.attention.protocol import Writes
from dsl_backend.attention.triton.args import SCALE_STRIDES, cache_of, constants, rows_of, scale_stride
from dsl_backend.attention.triton.configs import power_of_2
from dsl_backend.attention.triton.warm_up import caches
from dsl_backend.quant.format import E5M2, KVFormat, format_of
from dsl_backend.quant.triton.convert import f32_to_e2m1, nvfp4_scale, quantize
from dsl_backend.runtime.target import Target, triton_interpreted


class Layout(NamedTuple):
    """Compiled in: tokens of a page; elements of a key and of a value, and the blocks that they are copied in."""

    page_size: Any
    dim: Any
    dim_v: Any
    block_d: Any
    block_dv: Any
    e5m2: Any
    nvfp4: Any


@triton.jit
def copy_row(source, to, scale_ptr, scale_offset, DIM: tl.constexpr, BLOCK_D: tl.constexpr, E5M2: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    row = tl.load(source + d, mask=d < DIM, other=0.0)
    if scale_ptr is not None:
        row = row.to(tl.float32) / tl.load(scale_ptr + scale_offset)
    elif to.dtype.element_ty != source.dtype.element_ty:
        row = row.to(tl.float32)
    tl.store(to + d, quantize(row, to.dtype.element_ty, E5M2), mask=d < DIM)


@triton.jit
def copy_row_nvfp4(
    source, cache, page, offset, scale_ptr, scale_offset, first_scale, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store a row in NVFP4 at `offset` of a page's elements, and its scales, of which the page's begin at first_scale.

    A thread has pairs of neighbouring elements. All divisions are rounded as IEEE 754 says: the reference's bits.
    """
    blocks, pairs = tl.arange(0, BLOCK_D // 16)[:, None], tl.arange(0, 8)[None, :]
    d = blocks * 16 + pairs * 2
    divisor = tl.load(scale_ptr + scale_offset)
    even = tl.div_rn(tl.load(source + d, mask=d < DIM, other=0.0).to(tl.float32), divisor)
    odd = tl.div_rn(tl.load(source + d + 1, mask=d < DIM, other=0.0).to(tl.float32), divisor)
    largest = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
    nan = tl.max(((even != even) | (odd != odd)).to(tl.int32), 1)
    code, rounded = nvfp4_scale(largest, nan)
    divisors = tl.broadcast_to(rounded[:, None], even.shape)
    low, high = f32_to_e2m1(tl.div_rn(even, divisors)), f32_to_e2m1(tl.div_rn(odd, divisors))
    tl.store(cache.ptr + page * cache.page_stride + offset + d // 2, (low | high << 4).to(tl.uint8), mask=d < DIM)
    block = tl.arange(0, BLOCK_D // 16)
    scales = cache.ptr + page * cache.page_stride + first_scale + offset // 8
    tl.store(scales + block, code, mask=block < DIM // 16)


@triton.jit
def row_of(rows, token, head):
    return rows.ptr + token * rows.token_stride + head * rows.head_stride


@triton.jit
def cached_row(cache, page, token, head):
    return cache.ptr + page * cache.page_stride + token * cache.token_stride + head * cache.head_stride


# A cache's number of pages is no reason for a kernel of its own.
@triton.jit(do_not_specialize=["pages", *SCALE_STRIDES])
def write_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, k_scale_stride, v_scale_stride, pages, LAYOUT
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    page, in_page = slot // LAYOUT.page_size, slot % LAYOUT.page_size
    if slot < 0 or page >= pages:
        return
    k_row, v_row = row_of(key, token, head), row_of(value, token, head)
    if LAYOUT.nvfp4:
        rows = LAYOUT.page_size * tl.num_programs(1)
        k_offset = in_page * key_cache.token_stride + head * key_cache.head_stride
        v_offset = in_page * value_cache.token_stride + head * value_cache.head_stride
        first, k_offset_of_scale, v_offset_of_scale = rows // 2, head * k_scale_stride, head * v_scale_stride
        copy_row_nvfp4(
            k_row, key_cache, page, k_offset, k_scale, k_offset_of_scale, first * LAYOUT.dim, LAYOUT.dim, LAYOUT.block_d
        )
        copy_row_nvfp4(
            v_row,
            value_cache,
            page,
            v_offset,
            v_scale,
            v_offset_of_scale,
            first * LAYOUT.dim_v,
            LAYOUT.dim_v,
            LAYOUT.block_dv,
        )
    else:
        to = cached_row(key_cache, page, in_page, head)
        copy_row(k_row, to, k_scale, head * k_scale_stride, LAYOUT.dim, LAYOUT.block_d, LAYOUT.e5m2)
        to = cached_row(value_cache, page, in_page, head)
        copy_row(v_row, to, v_scale, head * v_scale_stride, LAYOUT.dim_v, LAYOUT.block_dv, LAYOUT.e5m2)


@cache
def layout_of(page_size: int, dim: int, dim_v: int, kv: KVFormat) -> Layout:
    """Kept, since every layer of a step asks."""
    blocks = power_of_2(dim), power_of_2(dim_v)
    layout: Layout = constants(Layout, page_size, dim, dim_v, *blocks, kv == E5M2, kv.nvfp4)
    return layout


def write_kv(
    target: Target,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """As `reference.write_kv`: rows [tokens, heads_kv, dim] to their slots; rows without a slot are skipped.

    With meta tensors it only compiles.
    """
    tokens, heads = slot_mapping.shape[0], key.shape[1]
    if tokens == 0:
        return
    kv = format_of(key_cache.dtype)
    k_scale, v_scale = (k_scale, v_scale) if kv.quantized else (None, None)
    grid = (tokens, heads)
    launch = partial(write_kv_kernel.warmup, grid=grid) if key.is_meta else write_kv_kernel[grid]
    launch(
        rows_of(key),
        rows_of(value),
        cache_of(key_cache, target),
        cache_of(value_cache, target),
        slot_mapping,
        k_scale,
        v_scale,
        scale_stride(k_scale),
        scale_stride(v_scale),
        key_cache.shape[0],
        layout_of(key_cache.shape[1], key.shape[-1], value.shape[-1], kv),
        num_warps=1,
    )


class WriteKV(Writes):
    """`write_kv` behind the kernels' interface."""

    def prepare(self) -> None:
        if triton_interpreted():
            return
        spec, meta = self.spec, torch.device("meta")
        key, value = (torch.empty(1, spec.heads_kv, dim, dtype=spec.dtype, device=meta) for dim in spec.written_dims)
        slot = torch.empty(1, dtype=torch.int64, device=meta)
        scale = torch.empty(1, device=meta) if spec.is_quantized_kv else None
        self(key, value, *caches(spec, meta), slot, scale, scale)

    def __call__(self, *arguments: torch.Tensor | None) -> None:
        write_kv(self.target, *arguments)  # type: ignore[arg-type]
