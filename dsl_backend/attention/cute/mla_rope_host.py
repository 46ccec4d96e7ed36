# SPDX-License-Identifier: Apache-2.0
"""Host side of the kernel of MLA's norm, rotary embedding and cache write: key, compilation, launch."""

from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream

from dsl_backend.attention.cute.fake_args import fake_scale
from dsl_backend.attention.cute.host import by_head, stored
from dsl_backend.attention.cute.mla_rope import MLARopeKey
from dsl_backend.attention.cute.mla_rope import RopeWriteMLA as Kernel
from dsl_backend.attention.cute.rope_host import fake_table, fake_vector
from dsl_backend.attention.cute.tiles import NUMERIC, VECTOR
from dsl_backend.attention.cute.write_kv_host import fake_rows_of, unaligned
from dsl_backend.attention.rope_spec import MLARopeSpec, MLARopeTensors, RopeWrites
from dsl_backend.checks import short
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def key_of(spec: MLARopeSpec) -> MLARopeKey:
    layer = spec.layer
    assert layer.page_size is not None
    return MLARopeKey(
        dtype=short(spec.dtype),
        table_dtype=short(spec.table_dtype),
        kv=layer.kv,
        page_size=layer.page_size,
        heads=layer.heads_q,
        latent=spec.latent_dim,
        rope=spec.rope_dim,
        style=spec.style,
    )


def fake_args(key: MLARopeKey) -> tuple[Any, ...]:
    """Fake arguments of the kernel's `__call__`. Strides are dynamic; `objections` checks them before a call."""
    dtype, many = NUMERIC[key.dtype], cute.sym_int

    def rows(kind: Any, *shape: Any) -> Any:
        *lead, heads, dim = shape
        return fake_rows_of(kind, heads, dim, *lead)

    tensors = MLARopeTensors(
        q=rows(dtype, many(), key.heads, key.rope),
        latent=rows(dtype, many(), key.latent),
        rope=rows(dtype, many(), key.rope),
        positions=fake_vector(cutlass.Int64, many(), 8),
        cos_sin=fake_table(key.table_dtype, key.rope),
        weight=fake_vector(dtype, key.latent, 16),
        q_out=rows(dtype, many(), key.heads, key.rope),
        latent_out=rows(dtype, many(), key.latent),
        rope_out=rows(dtype, many(), key.rope),
        cache=rows(cutlass.Uint8 if key.kv.fp8 else dtype, many(), key.page_size, key.latent + key.rope),
        slots=fake_vector(cutlass.Int64, many(), 8),
        scale=fake_scale(1) if key.kv.fp8 else None,
    )
    return tensors, tensors.q, cutlass.Float32(0.0), make_fake_stream(use_tvm_ffi_env_stream=True)


def build(key: MLARopeKey, target: Target) -> Function:
    """The compiled function: (MLARopeTensors, its q once more, eps); fp8 as uint8."""
    return compile_kernel(Kernel(key), fake_args(key), key=key, target=target)


class RopeWriteMLA(RopeWrites[MLARopeSpec, MLARopeTensors]):
    """The kernel for layers of one spec."""

    function: Function

    def prepare(self) -> None:
        self.function = build(key_of(self.spec), self.target)

    def objections(self, tensors: MLARopeTensors) -> list[str]:
        units = {"cache": VECTOR * tensors.cache.itemsize}
        units |= dict.fromkeys(("q", "latent", "rope", "cos_sin", "weight", "q_out", "latent_out", "rope_out"), 16)
        named: dict[str, torch.Tensor] = tensors._asdict()
        return [reason for name, unit in units.items() for reason in unaligned(name, named[name], unit)]

    def __call__(self, tensors: MLARopeTensors, eps: float) -> None:
        scale = None
        if self.spec.layer.is_fp8_kv:
            assert tensors.scale is not None
            scale = by_head(tensors.scale, 1)
        given = tensors._replace(cache=stored(self.spec.layer, tensors.cache), scale=scale)
        self.function(given, given.q, eps)
