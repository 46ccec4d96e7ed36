# SPDX-License-Identifier: Apache-2.0
"""The norm, the rotary embedding and the cache write of absorbed MLA in Triton.

A program has a rope part of a query, the rope part of a key, or the latent part of a key.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors, RopeStyle, RopeWrites
from dsl_backend.attention.triton.args import Rows, cache_of, constants, rows_of
from dsl_backend.attention.triton.configs import power_of_2
from dsl_backend.attention.triton.rope import head_row
from dsl_backend.attention.triton.write_kv import cached_row, row_of
from dsl_backend.quant.format import E5M2
from dsl_backend.quant.triton.convert import quantize
from dsl_backend.runtime.target import Target, triton_interpreted


class Rope(NamedTuple):
    """Compiled in: a rope part, as `rope.head_row` takes it."""

    dim: Any
    block_d: Any
    rotary_dim: Any
    neox: Any
    weight_offset: Any


class Latent(NamedTuple):
    """Compiled in: the latent part, the block that holds it, and the cache."""

    dim: Any
    block_d: Any
    page_size: Any
    e5m2: Any


class Inputs(NamedTuple):
    q: Any
    latent: Any
    rope: Any
    positions: Any
    table: Any
    weight: Any
    slots: Any


class Outputs(NamedTuple):
    q_out: Any
    latent_out: Any
    rope_out: Any
    cache: Any


@triton.jit
def latent_row(source, weight, eps, LATENT):
    """A latent part in float32, normalised."""
    d = tl.arange(0, LATENT.block_d)
    x = tl.load(source + d, mask=d < LATENT.dim, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / LATENT.dim + eps)
    return x * tl.load(weight + d, mask=d < LATENT.dim, other=0.0).to(tl.float32) * factor


@triton.jit
def store_row(row, to, DIM: tl.constexpr, BLOCK_D: tl.constexpr, E5M2: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(to + d, quantize(row, to.dtype.element_ty, E5M2), mask=d < DIM)


@triton.jit(do_not_specialize=["slots", "pages", "table_rows", "eps"])
def rope_write_mla_kernel(inputs, outputs, scale, slots, pages, table_rows, eps, heads, ROPE, LATENT):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(inputs.positions + token)
    position = tl.where((position >= 0) & (position < table_rows), position, 0)
    table = inputs.table.ptr + position * inputs.table.token_stride
    if part < heads:
        row = head_row(row_of(inputs.q, token, part), None, table, eps, ROPE)
        store_row(row, row_of(outputs.q_out, token, part), ROPE.dim, ROPE.block_d, LATENT.e5m2)
        return
    slot = tl.full((), -1, tl.int64)
    if token < slots:
        slot = tl.load(inputs.slots + token)
    page, in_page = slot // LATENT.page_size, slot % LATENT.page_size
    writes = (slot >= 0) & (page < pages)
    to = cached_row(outputs.cache, page, in_page, 0)
    # Triton wants one type of a name in both branches, and the parts have different sizes.
    if part == heads:
        rope = head_row(row_of(inputs.rope, token, 0), None, table, eps, ROPE)
        store_row(rope, row_of(outputs.rope_out, token, 0), ROPE.dim, ROPE.block_d, LATENT.e5m2)
        if writes:
            if scale is not None:
                rope = rope / tl.load(scale)
            store_row(rope, to + LATENT.dim, ROPE.dim, ROPE.block_d, LATENT.e5m2)
    else:
        latent = latent_row(row_of(inputs.latent, token, 0), inputs.weight, eps, LATENT)
        store_row(latent, row_of(outputs.latent_out, token, 0), LATENT.dim, LATENT.block_d, LATENT.e5m2)
        if writes:
            if scale is not None:
                latent = latent / tl.load(scale)
            store_row(latent, to, LATENT.dim, LATENT.block_d, LATENT.e5m2)


@cache
def layouts_of(spec: MLARopeSpec) -> tuple[Rope, Latent]:
    """Kept, since every layer of a step asks."""
    rope, latent = spec.rope_dim, spec.latent_dim
    assert spec.layer.page_size is not None
    return (
        constants(Rope, rope, power_of_2(rope), rope, spec.style is RopeStyle.NEOX, 0.0),
        constants(Latent, latent, power_of_2(latent), spec.layer.page_size, spec.layer.kv == E5M2),
    )


def one_head(rows: torch.Tensor) -> Rows:
    """Rows [tokens, dim] as those of one head."""
    return rows_of(rows.unsqueeze(1))


def rope_write_mla(spec: MLARopeSpec, target: Target, tensors: MLARopeTensors, eps: float) -> None:
    """As `rope.rope_write_mla`. With meta tensors it only compiles."""
    tokens, heads = tensors.positions.shape[0], spec.layer.heads_q
    grid = (tokens, heads + 2)
    kernel = rope_write_mla_kernel
    launch = partial(kernel.warmup, grid=grid) if tensors.q.is_meta else kernel[grid]
    launch(
        Inputs(
            rows_of(tensors.q),
            one_head(tensors.latent),
            one_head(tensors.rope),
            tensors.positions,
            one_head(tensors.cos_sin),
            tensors.weight,
            tensors.slots,
        ),
        Outputs(
            rows_of(tensors.q_out),
            one_head(tensors.latent_out),
            one_head(tensors.rope_out),
            cache_of(tensors.cache.unsqueeze(2), target),
        ),
        tensors.scale if spec.layer.is_fp8_kv else None,
        tensors.slots.shape[0],
        tensors.cache.shape[0],
        tensors.cos_sin.shape[0],
        eps,
        heads,
        *layouts_of(spec),
        num_warps=1,
    )


class RopeWriteMLA(RopeWrites[MLARopeSpec, MLARopeTensors]):
    """`rope_write_mla` behind the kernels' interface."""

    def prepare(self) -> None:
        if triton_interpreted():
            return
        spec, layer, meta = self.spec, self.spec.layer, torch.device("meta")

        def rows(*shape: int) -> torch.Tensor:
            return torch.empty(1, *shape, dtype=spec.dtype, device=meta)

        q, latent, rope = rows(layer.heads_q, spec.rope_dim), rows(spec.latent_dim), rows(spec.rope_dim)
        one = torch.empty(1, dtype=torch.int64, device=meta)
        table = torch.empty(1, spec.rope_dim, dtype=spec.table_dtype, device=meta)
        weight = torch.empty(spec.latent_dim, dtype=spec.norm_dtype, device=meta)
        cache = torch.empty(1, layer.page_size or 1, layer.head_dim, dtype=layer.kv_dtype, device=meta)
        scale = torch.empty(1, device=meta) if layer.is_fp8_kv else None
        self(MLARopeTensors(q, latent, rope, one, table, weight, q, latent, rope, cache, one, scale), 1e-6)

    def __call__(self, tensors: MLARopeTensors, eps: float) -> None:
        rope_write_mla(self.spec, self.target, tensors, eps)
