# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the CuTe DSL kernels: their keys, functions, launches."""

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.linear.configs import GemmConfig
from dsl_backend.linear.sm90.gemm import Gemm, GemmKey
from dsl_backend.linear.sm90.views import NUMERIC
from dsl_backend.linear.spec import LinearSpec, short
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target

# Elements that rows and base addresses are aligned to, as TMA wants them.
VECTOR = 8


def gemm_key(spec: LinearSpec, config: GemmConfig) -> GemmKey:
    return GemmKey(
        dtype=short(spec.dtype),
        activation=spec.activation,
        interleaved=spec.interleaved,
        bias=spec.bias,
        residual=spec.residual,
        config=config,
    )


def fake_args(key: GemmKey) -> tuple[Any, ...]:
    """x, weight, bias, residual, out, blocks, stream."""
    dtype = NUMERIC[key.dtype]

    def matrix(rows: Any, width: Any) -> Any:
        stride = (cute.sym_int64(divisibility=VECTOR), 1)
        return make_fake_tensor(dtype, (rows, width), stride, assumed_align=16)

    m, n, k = cute.sym_int(), cute.sym_int(divisibility=VECTOR), cute.sym_int(divisibility=VECTOR)
    weight_rows = cute.sym_int(divisibility=VECTOR)
    return (
        matrix(m, k),
        matrix(weight_rows, k),
        make_fake_tensor(dtype, (weight_rows,), (1,), assumed_align=16) if key.bias else None,
        matrix(m, n) if key.residual else None,
        matrix(m, n),
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def build_gemm(key: GemmKey, target: Target) -> Function:
    """The compiled function: (x, weight, bias, residual, out, blocks)."""
    return compile_kernel(Gemm(key), fake_args(key), key=key, target=target)
