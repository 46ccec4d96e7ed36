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
from dsl_backend.quant.format import E5M2, is_fp8
from dsl_backend.quant.triton.convert import quantize
from dsl_backend.runtime.target import Target, triton_interpreted


class Layout(NamedTuple):
    """Compiled in: tokens of a page; elements of a key and of a value, and the blocks that they are copied in."""

    page_size: Any
    dim: Any
    dim_v: Any
    block_d: Any
    block_dv: Any
    e5m2: Any


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
    source, to = row_of(key, token, head), cached_row(key_cache, page, in_page, head)
    copy_row(source, to, k_scale, head * k_scale_stride, LAYOUT.dim, LAYOUT.block_d, LAYOUT.e5m2)
    source, to = row_of(value, token, head), cached_row(value_cache, page, in_page, head)
    copy_row(source, to, v_scale, head * v_scale_stride, LAYOUT.dim_v, LAYOUT.block_dv, LAYOUT.e5m2)


@cache
def layout_of(page_size: int, dim: int, dim_v: int, e5m2: bool) -> Layout:
    """Kept, since every layer of a step asks."""
    layout: Layout = constants(Layout, page_size, dim, dim_v, power_of_2(dim), power_of_2(dim_v), e5m2)
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
    fp8 = is_fp8(key_cache.dtype)
    k_scale, v_scale = (k_scale, v_scale) if fp8 else (None, None)
    e5m2 = key_cache.dtype == E5M2.dtype
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
        layout_of(key_cache.shape[1], key.shape[-1], value.shape[-1], e5m2),
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
        scale = torch.empty(1, device=meta) if spec.is_fp8_kv else None
        self(key, value, *caches(spec, meta), slot, scale, scale)

    def __call__(self, *arguments: torch.Tensor | None) -> None:
        write_kv(self.target, *arguments)  # type: ignore[arg-type]
