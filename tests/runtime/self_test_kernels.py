# SPDX-License-Identifier: Apache-2.0
"""The family of kernels that the run-time is tested with: a vector times a number."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from dsl_backend.runtime.compile import compile_kernel

DTYPES = {"float32": cutlass.Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleKey:
    """Elements of `dtype`, `threads` of them a block."""

    dtype: str = "float32"
    threads: int = 128
    broken: bool = False


class Scale:
    """y = x * factor; x and y [n] of one dtype, a thread per element."""

    def __init__(self, key: ScaleKey):
        self.threads, self.broken = key.threads, key.broken

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream):
        if cutlass.const_expr(self.broken):
            raise ValueError("this kernel is broken")
        count = cute.size(x)
        self.kernel(x, y, factor, count).launch(
            grid=(cute.ceil_div(count, self.threads), 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, count: cutlass.Int32):
        index = cute.arch.block_idx()[0] * self.threads + cute.arch.thread_idx()[0]
        if index < count:
            y[index] = (x[index].to(cutlass.Float32) * factor).to(y.element_type)


def fake_args(key: ScaleKey) -> tuple[Any, ...]:
    size = cute.sym_int()
    x, y = (make_fake_compact_tensor(DTYPES[key.dtype], (size,)) for _ in range(2))
    return (x, y, cutlass.Float32(1.0), make_fake_stream(use_tvm_ffi_env_stream=True))


def build(key: ScaleKey, target: Any) -> Any:
    return compile_kernel(Scale(key), fake_args(key), key=key, target=target)


def precompile_specs(model: Any, target: Any) -> Iterator[Any]:
    """One kernel for each dtype that a model of this kind may have."""
    from dsl_backend.runtime.precompile import PrecompileSpec

    for dtype in sorted({"float32", model.dtype}):
        yield PrecompileSpec("self-test", build, ScaleKey(dtype=dtype), target)
