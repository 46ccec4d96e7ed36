# SPDX-License-Identifier: Apache-2.0
"""Host side of the cache write kernel: its key, its compilation, and its launch."""

from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.attention.cute.fake_args import fake_scale
from dsl_backend.attention.cute.host import by_head
from dsl_backend.attention.cute.tiles import NUMERIC, VECTOR
from dsl_backend.attention.cute.write_kv import WriteKey, WriteRows
from dsl_backend.attention.protocol import Writes
from dsl_backend.attention.spec import AttentionSpec
from dsl_backend.checks import short
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def fake_rows_of(dtype: Any, heads: int, dim: int, *lead: Any) -> Any:
    """Fake rows (*lead, heads, dim) with dynamic strides, aligned to vectors."""
    strides = tuple(cute.sym_int64() for _ in (*lead, heads))
    return make_fake_tensor(dtype, (*lead, heads, dim), (*strides, 1), assumed_align=VECTOR * dtype.width // 8)


def fake_args(key: WriteKey) -> tuple[Any, ...]:
    """Fake arguments to compile with. Strides are dynamic; `objections` checks their alignment before a call."""
    numeric, many = NUMERIC[key.dtype], cute.sym_int
    stored = cutlass.Uint8 if key.kv.fp8 else numeric
    scale = fake_scale(key.heads) if key.kv.fp8 else None
    pages = many()
    return (
        fake_rows_of(numeric, key.heads, key.dim, many()),
        fake_rows_of(numeric, key.heads, key.dim_v, many()),
        fake_rows_of(stored, key.heads, key.dim, pages, key.page_size),
        fake_rows_of(stored, key.heads, key.dim_v, pages, key.page_size),
        make_fake_tensor(cutlass.Int64, (many(),), (1,), assumed_align=8),
        scale,
        scale,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def key_of(spec: AttentionSpec) -> WriteKey:
    dim, dim_v = spec.written_dims
    assert spec.page_size is not None
    return WriteKey(
        dtype=short(spec.dtype), kv=spec.kv, heads=spec.heads_kv, dim=dim, dim_v=dim_v, page_size=spec.page_size
    )


def build(key: WriteKey, target: Target) -> Function:
    """The compiled function: (key, value, key_cache, value_cache, slots, k_scale, v_scale)."""
    return compile_kernel(WriteRows(key), fake_args(key), key=key, target=target)


class WriteKV(Writes):
    """The kernel for layers of one spec."""

    function: Function

    def prepare(self) -> None:
        self.function = build(key_of(self.spec), self.target)

    def objections(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> list[str]:
        rows, pages = VECTOR * key.itemsize, VECTOR * key_cache.itemsize
        tensors = (("key", key, rows), ("value", value, rows))
        caches = (("key_cache", key_cache, pages), ("value_cache", value_cache, pages))
        return [reason for one in (*tensors, *caches) for reason in unaligned(*one)]

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        if not self.spec.is_fp8_kv:
            self.function(key, value, key_cache, value_cache, slot_mapping, None, None)
            return
        assert k_scale is not None
        assert v_scale is not None
        self.function(
            key,
            value,
            key_cache.view(torch.uint8),
            value_cache.view(torch.uint8),
            slot_mapping,
            by_head(k_scale, self.spec.heads_kv),
            by_head(v_scale, self.spec.heads_kv),
        )


def unaligned(name: str, tensor: torch.Tensor, unit: int) -> list[str]:
    """Why rows of a tensor are not aligned to vectors of `unit` bytes; empty if they are."""
    strides = [stride * tensor.itemsize for stride in tensor.stride()[:-1]]
    misaligned = tensor.data_ptr() % unit
    if not misaligned and not any(stride % unit for stride in strides):
        return []
    where = f"{misaligned} bytes after a multiple of {unit}" if misaligned else f"at a multiple of {unit} bytes"
    return [f"{name} begins {where} and has strides of {strides} bytes: multiples of {unit} are needed"]
