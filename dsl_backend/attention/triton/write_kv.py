# SPDX-License-Identifier: Apache-2.0
"""Store new keys and values in a paged cache: one program a token and key/value head."""

import torch
import triton
import triton.language as tl

from dsl_backend.attention.protocol import Writes
from dsl_backend.attention.triton.arguments import SCALE_STRIDES, key_storage, scale_stride
from dsl_backend.attention.triton.configs import power_of_2
from dsl_backend.quant.format import E5M2 as E5M2_FORMAT
from dsl_backend.quant.format import is_fp8
from dsl_backend.runtime.target import detect


@triton.jit
def narrow(x, dtype: tl.constexpr, E5M2: tl.constexpr):
    """A float32 in the cache's dtype; fp8 saturates, NaN stays NaN; uint8 receives e5m2 or e4m3 bits."""
    if dtype == tl.uint8 and E5M2:
        # As below, by 2^-112 and to 2 bits.
        bits = (tl.clamp(x, -57344.0, 57344.0) * 1.925929944387236e-34).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21
        return tl.where(x != x, 0x7F, rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
    elif dtype == tl.uint8:
        # 2^-120 moves e4m3's range, subnormals included, under float32's exponents; then round to 3 bits, ties to even.
        bits = (tl.clamp(x, -448.0, 448.0) * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        return tl.where(x != x, 0x7F, rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
    elif dtype == tl.float8e4nv:
        return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def copy_row(rows_ptr, cache_ptr, scale_ptr, scale_place, DIM: tl.constexpr, BLOCK_D: tl.constexpr, E5M2: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    row = tl.load(rows_ptr + d, mask=d < DIM, other=0.0)
    if scale_ptr is not None:
        row = row.to(tl.float32) / tl.load(scale_ptr + scale_place)
    elif cache_ptr.dtype.element_ty != rows_ptr.dtype.element_ty:
        row = row.to(tl.float32)
    tl.store(cache_ptr + d, narrow(row, cache_ptr.dtype.element_ty, E5M2), mask=d < DIM)


# A cache's number of pages is no reason for a kernel of its own.
@triton.jit(do_not_specialize=["pages", *SCALE_STRIDES])
def write_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_scale_stride,
    v_scale_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    pages,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    E5M2: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    page, place = slot // PAGE, slot % PAGE
    if slot < 0 or page >= pages:
        return
    copy_row(
        key_ptr + token * key_token_stride + head * key_head_stride,
        key_cache_ptr + page * k_page_stride + place * k_token_stride + head * k_head_stride,
        k_scale_ptr,
        head * k_scale_stride,
        DIM,
        BLOCK_D,
        E5M2,
    )
    copy_row(
        value_ptr + token * value_token_stride + head * value_head_stride,
        value_cache_ptr + page * v_page_stride + place * v_token_stride + head * v_head_stride,
        v_scale_ptr,
        head * v_scale_stride,
        DIM_V,
        BLOCK_DV,
        E5M2,
    )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """As `reference.write_kv`: rows [tokens, heads_kv, dim] to their slots; skipped where there is none."""
    tokens, heads = slot_mapping.shape[0], key.shape[1]
    if tokens == 0:
        return
    target = detect(key.device)
    fp8 = is_fp8(key_cache.dtype)
    k_scale, v_scale = (k_scale, v_scale) if fp8 else (None, None)
    dim, dim_v = key.shape[-1], value.shape[-1]
    write_kv_kernel[(tokens, heads)](
        key,
        value,
        key_storage(key_cache, target),
        key_storage(value_cache, target),
        slot_mapping,
        k_scale,
        v_scale,
        scale_stride(k_scale),
        scale_stride(v_scale),
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        key_cache.shape[0],
        PAGE=key_cache.shape[1],
        DIM=dim,
        DIM_V=dim_v,
        BLOCK_D=power_of_2(dim),
        BLOCK_DV=power_of_2(dim_v),
        E5M2=key_cache.dtype == E5M2_FORMAT.dtype,
        num_warps=1,
    )


class WriteKV(Writes):
    """`write_kv` behind the kernels' interface."""

    def __call__(self, *arguments: torch.Tensor | None) -> None:
        write_kv(*arguments)  # type: ignore[arg-type]
