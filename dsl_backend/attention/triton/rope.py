# SPDX-License-Identifier: Apache-2.0
"""Norms of heads, rotary embedding and cache write in Triton: one program for each token and head."""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.attention.rope_spec import RopeSpec, RopeStyle, RopeTensors, RopeWrites
from dsl_backend.attention.triton.args import SCALE_STRIDES, cache_of, constants, rows_of, scale_stride
from dsl_backend.attention.triton.configs import power_of_2
from dsl_backend.attention.triton.warm_up import caches
from dsl_backend.attention.triton.write_kv import cached_row, copy_row, row_of
from dsl_backend.quant.format import E5M2
from dsl_backend.quant.triton.convert import quantize
from dsl_backend.runtime.target import Target, triton_interpreted


class Layout(NamedTuple):
    """Compiled in: the spec, and the blocks that a key and a value are held in."""

    heads_q: Any
    heads_kv: Any
    page_size: Any
    dim: Any
    dim_v: Any
    block_d: Any
    block_dv: Any
    rotary_dim: Any
    neox: Any
    weight_offset: Any
    e5m2: Any


class Inputs(NamedTuple):
    """Rows as `args.Rows`; weights are None without a norm."""

    q: Any
    key: Any
    value: Any
    positions: Any
    table: Any
    q_weight: Any
    k_weight: Any
    slots: Any


class Outputs(NamedTuple):
    q_out: Any
    key_cache: Any
    value_cache: Any


@triton.jit
def head_row(source, weight, table, eps, LAYOUT):
    """A head in float32, normalised and rotated; table: the row of its position."""
    half = LAYOUT.rotary_dim // 2
    d = tl.arange(0, LAYOUT.block_d)
    rotated = d < LAYOUT.rotary_dim
    if LAYOUT.neox:
        angle, other = d % half, tl.where(d < half, d + half, d - half)
        leads = d < half
    else:
        angle, other = d // 2, d ^ 1
        leads = d % 2 == 0
    # Both loads come before the store of the same warp, which may replace the row.
    x = tl.load(source + d, mask=d < LAYOUT.dim, other=0.0).to(tl.float32)
    pair = tl.load(source + other, mask=rotated, other=0.0).to(tl.float32)
    if weight is not None:
        factor = tl.rsqrt(tl.sum(x * x, 0) / LAYOUT.dim + eps)
        x = x * (tl.load(weight + d, mask=d < LAYOUT.dim, other=0.0).to(tl.float32) + LAYOUT.weight_offset) * factor
        pair = pair * (tl.load(weight + other, mask=rotated, other=0.0).to(tl.float32) + LAYOUT.weight_offset) * factor
    cos = tl.load(table + angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(table + half + angle, mask=rotated, other=0.0).to(tl.float32)
    turned = tl.where(leads, x * cos - pair * sin, x * cos + pair * sin)
    return tl.where(rotated, turned, x)


@triton.jit
def store_head(row, to, LAYOUT):
    d = tl.arange(0, LAYOUT.block_d)
    tl.store(to + d, quantize(row, to.dtype.element_ty, LAYOUT.e5m2), mask=d < LAYOUT.dim)


@triton.jit(do_not_specialize=["slots", "pages", "table_rows", "eps", *SCALE_STRIDES])
def rope_write_kv_kernel(
    inputs, outputs, k_scale, v_scale, k_scale_stride, v_scale_stride, slots, pages, table_rows, eps, LAYOUT
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(inputs.positions + token)
    position = tl.where((position >= 0) & (position < table_rows), position, 0)
    table = inputs.table.ptr + position * inputs.table.token_stride
    if head < LAYOUT.heads_q:
        row = head_row(row_of(inputs.q, token, head), inputs.q_weight, table, eps, LAYOUT)
        store_head(row, row_of(outputs.q_out, token, head), LAYOUT)
        return
    if token >= slots:
        return
    slot = tl.load(inputs.slots + token)
    page, in_page = slot // LAYOUT.page_size, slot % LAYOUT.page_size
    if slot < 0 or page >= pages:
        return
    if head < LAYOUT.heads_q + LAYOUT.heads_kv:
        head = head - LAYOUT.heads_q
        row = head_row(row_of(inputs.key, token, head), inputs.k_weight, table, eps, LAYOUT)
        if k_scale is not None:
            row = row / tl.load(k_scale + head * k_scale_stride)
        store_head(row, cached_row(outputs.key_cache, page, in_page, head), LAYOUT)
    else:
        head = head - LAYOUT.heads_q - LAYOUT.heads_kv
        source, to = row_of(inputs.value, token, head), cached_row(outputs.value_cache, page, in_page, head)
        copy_row(source, to, v_scale, head * v_scale_stride, LAYOUT.dim_v, LAYOUT.block_dv, LAYOUT.e5m2)


@cache
def layout_of(spec: RopeSpec) -> Layout:
    """Kept, since every layer of a step asks."""
    layer = spec.layer
    layout: Layout = constants(
        Layout,
        layer.heads_q,
        layer.heads_kv,
        layer.page_size,
        layer.head_dim,
        layer.head_dim_v,
        power_of_2(layer.head_dim),
        power_of_2(layer.head_dim_v),
        spec.rotary_dim,
        spec.style is RopeStyle.NEOX,
        spec.weight_offset,
        layer.kv == E5M2,
    )
    return layout


def rope_write_kv(spec: RopeSpec, target: Target, tensors: RopeTensors, eps: float) -> None:
    """As `rope.rope_write_kv`. With meta tensors it only compiles."""
    tokens, layer = tensors.positions.shape[0], spec.layer
    scales = (tensors.k_scale, tensors.v_scale) if layer.is_fp8_kv else (None, None)
    table = tensors.cos_sin.unsqueeze(1)
    grid = (tokens, layer.heads_q + 2 * layer.heads_kv)
    launch = partial(rope_write_kv_kernel.warmup, grid=grid) if tensors.q.is_meta else rope_write_kv_kernel[grid]
    q, key, value = (rows_of(one) for one in (tensors.q, tensors.key, tensors.value))
    launch(
        Inputs(q, key, value, tensors.positions, rows_of(table), tensors.q_weight, tensors.k_weight, tensors.slots),
        Outputs(rows_of(tensors.q_out), *(cache_of(one, target) for one in (tensors.key_cache, tensors.value_cache))),
        *scales,
        *map(scale_stride, scales),
        tensors.slots.shape[0],
        tensors.key_cache.shape[0],
        tensors.cos_sin.shape[0],
        eps,
        layout_of(spec),
        num_warps=1,
    )


class RopeWriteKV(RopeWrites[RopeSpec, RopeTensors]):
    """`rope_write_kv` behind the kernels' interface."""

    def prepare(self) -> None:
        if triton_interpreted():
            return
        spec, layer, meta = self.spec, self.spec.layer, torch.device("meta")
        heads = ((layer.heads_q, layer.head_dim), (layer.heads_kv, layer.head_dim), (layer.heads_kv, layer.head_dim_v))
        q, key, value = (torch.empty(1, *shape, dtype=spec.dtype, device=meta) for shape in heads)
        one = torch.empty(1, dtype=torch.int64, device=meta)
        table = torch.empty(1, spec.rotary_dim, dtype=spec.table_dtype, device=meta)
        weight = None if spec.norm_dtype is None else torch.empty(layer.head_dim, dtype=spec.norm_dtype, device=meta)
        scale = torch.empty(1, device=meta) if layer.is_fp8_kv else None
        made = RopeTensors(q, key, value, one, table, weight, weight, q, *caches(layer, meta), one, scale, scale)
        self(made, 1e-6)

    def __call__(self, tensors: RopeTensors, eps: float) -> None:
        rope_write_kv(self.spec, self.target, tensors, eps)
