# SPDX-License-Identifier: Apache-2.0
"""Host side of the kernel of norms of heads, rotary embedding and cache write: key, compilation, launch."""

from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.attention.cute.fake_args import fake_scale
from dsl_backend.attention.cute.host import by_head, stored
from dsl_backend.attention.cute.rope import RopeKey
from dsl_backend.attention.cute.rope import RopeWriteKV as Kernel
from dsl_backend.attention.cute.tiles import NUMERIC, VECTOR
from dsl_backend.attention.cute.write_kv_host import fake_rows_of, unaligned
from dsl_backend.attention.rope_spec import RopeSpec, RopeTensors, RopeWrites
from dsl_backend.checks import short
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def key_of(spec: RopeSpec) -> RopeKey:
    layer = spec.layer
    assert layer.page_size is not None
    return RopeKey(
        dtype=short(spec.dtype),
        table_dtype=short(spec.table_dtype),
        kv=layer.kv,
        page_size=layer.page_size,
        heads_q=layer.heads_q,
        heads_kv=layer.heads_kv,
        dim=layer.head_dim,
        dim_v=layer.head_dim_v,
        rotary_dim=spec.rotary_dim,
        style=spec.style,
        norm=spec.norm_dtype is not None,
        weight_offset=spec.weight_offset,
    )


def fake_vector(kind: Any, length: Any, align: int) -> Any:
    """Fake contiguous elements, aligned to so many bytes."""
    return make_fake_tensor(kind, (length,), (1,), assumed_align=align)


def fake_table(dtype: str, rotary_dim: int) -> Any:
    """Fake cosines and sines of any number of positions."""
    numeric = {**NUMERIC, "float32": cutlass.Float32}[dtype]
    return make_fake_tensor(numeric, (cute.sym_int(), rotary_dim), (cute.sym_int64(), 1), assumed_align=16)


def fake_args(key: RopeKey) -> tuple[Any, ...]:
    """Fake arguments of the kernel's `__call__`. Strides are dynamic; `objections` checks them before a call."""
    dtype, many = NUMERIC[key.dtype], cute.sym_int
    cached = cutlass.Uint8 if key.kv.fp8 else dtype
    pages, scale = (many(), key.page_size), fake_scale(key.heads_kv) if key.kv.fp8 else None
    weight = fake_vector(dtype, key.dim, 16) if key.norm else None
    tensors = RopeTensors(
        q=fake_rows_of(dtype, key.heads_q, key.dim, many()),
        key=fake_rows_of(dtype, key.heads_kv, key.dim, many()),
        value=fake_rows_of(dtype, key.heads_kv, key.dim_v, many()),
        positions=fake_vector(cutlass.Int64, many(), 8),
        cos_sin=fake_table(key.table_dtype, key.rotary_dim),
        q_weight=weight,
        k_weight=weight,
        q_out=fake_rows_of(dtype, key.heads_q, key.dim, many()),
        key_cache=fake_rows_of(cached, key.heads_kv, key.dim, *pages),
        value_cache=fake_rows_of(cached, key.heads_kv, key.dim_v, *pages),
        slots=fake_vector(cutlass.Int64, many(), 8),
        k_scale=scale,
        v_scale=scale,
    )
    return tensors, tensors.q, cutlass.Float32(0.0), make_fake_stream(use_tvm_ffi_env_stream=True)


def build(key: RopeKey, target: Target) -> Function:
    """The compiled function: (RopeTensors, its q once more, eps); fp8 as uint8."""
    return compile_kernel(Kernel(key), fake_args(key), key=key, target=target)


class RopeWriteKV(RopeWrites[RopeSpec, RopeTensors]):
    """The kernel for layers of one spec."""

    function: Function

    def prepare(self) -> None:
        self.function = build(key_of(self.spec), self.target)

    def objections(self, tensors: RopeTensors) -> list[str]:
        units = {"key_cache": VECTOR * tensors.key_cache.itemsize, "value_cache": VECTOR * tensors.value_cache.itemsize}
        vectors = ("q", "key", "value", "cos_sin", "q_weight", "k_weight", "q_out")
        units |= dict.fromkeys(vectors, 16)
        named: dict[str, torch.Tensor | None] = tensors._asdict()
        return [
            reason
            for name, unit in units.items()
            if (tensor := named[name]) is not None
            for reason in unaligned(name, tensor, unit)
        ]

    def __call__(self, tensors: RopeTensors, eps: float) -> None:
        layer = self.spec.layer
        if not layer.is_fp8_kv:
            given = tensors
            if tensors.k_scale is not None or tensors.v_scale is not None:
                given = tensors._replace(k_scale=None, v_scale=None)
            self.function(given, tensors.q, eps)
            return
        assert tensors.k_scale is not None
        assert tensors.v_scale is not None
        self.function(
            tensors._replace(
                key_cache=stored(layer, tensors.key_cache),
                value_cache=stored(layer, tensors.value_cache),
                k_scale=by_head(tensors.k_scale, layer.heads_kv),
                v_scale=by_head(tensors.v_scale, layer.heads_kv),
            ),
            tensors.q,
            eps,
        )
