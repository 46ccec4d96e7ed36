# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the CuTe DSL kernels: their keys, functions, launches."""

from functools import lru_cache
from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.checks import short
from dsl_backend.gemm.key import LinearKey
from dsl_backend.gemm.sm90 import gemm as sm90_gemm
from dsl_backend.gemm.sm90 import small_m as sm90_stream
from dsl_backend.gemm.sm100 import configs as sm100
from dsl_backend.gemm.sm100 import gemm as sm100_gemm
from dsl_backend.gemm.sm100 import small_m as sm100_stream
from dsl_backend.gemm.views import NUMERIC
from dsl_backend.linear import configs
from dsl_backend.linear.configs import Config, Streams, blocks_of
from dsl_backend.linear.kernel import Launch, Operands
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.tuned import config_of
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Elements that rows and base addresses are aligned to, as TMA wants them.
VECTOR = 8
# The class of each configuration's kernel.
KERNELS: dict[type[Config], Any] = {
    configs.GemmConfig: sm90_gemm.Gemm,
    configs.StreamConfig: sm90_stream.Stream,
    sm100.GemmConfig: sm100_gemm.Gemm,
    sm100.StreamConfig: sm100_stream.Stream,
}


def key_of(spec: LinearSpec, config: Config) -> LinearKey[Config]:
    """The kernel of a problem."""
    return LinearKey(
        dtype=short(spec.dtype),
        activation=spec.activation,
        interleaved=spec.interleaved,
        bias=spec.bias,
        residual=spec.residual,
        config=config,
    )


def fake_args(key: LinearKey[Config]) -> tuple[Any, ...]:
    """x, weight, bias, residual, out, for few rows partials and flags, blocks, stream."""
    dtype = NUMERIC[key.dtype]

    def matrix(rows: Any, width: Any) -> Any:
        stride = (cute.sym_int64(divisibility=VECTOR), 1)
        return make_fake_tensor(dtype, (rows, width), stride, assumed_align=16)

    m, n, k = cute.sym_int(), cute.sym_int(divisibility=VECTOR), cute.sym_int(divisibility=VECTOR)
    weight_rows = cute.sym_int(divisibility=VECTOR)
    scratch = ()
    if isinstance(key.config, Streams):
        scratch = tuple(make_fake_tensor(kind, (cute.sym_int(),), (1,), assumed_align=16) for kind in (Float32, Int32))
    return (
        matrix(m, k),
        matrix(weight_rows, k),
        make_fake_tensor(dtype, (weight_rows,), (1,), assumed_align=16) if key.bias else None,
        matrix(m, n) if key.residual else None,
        matrix(m, n),
        *scratch,
        Int32(0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def build(key: LinearKey[Config], target: Target) -> Function:
    """The compiled function of `fake_args`, the stream left out."""
    return compile_kernel(KERNELS[type(key.config)](key), fake_args(key), key=key, target=target)


@lru_cache(maxsize=1 << 16)
def chosen(spec: LinearSpec, rows: int, target: Target, libraries: str) -> tuple[Config, Function]:
    """The kernel for so many rows, and its function, kept by what host code is linked with."""
    config = config_of(spec, rows, target)
    return config, build(key_of(spec, config), target)


def run(function: Function, config: Config, operands: Operands, blocks: int, workspace: Workspace) -> None:
    """Launch a kernel of `build` on at most so many thread blocks."""
    tensors = (operands.x, operands.weight, operands.bias, operands.residual, operands.out)
    if isinstance(config, Streams):
        scratch = workspace.partials(blocks * config.partials), workspace.flags(blocks * config.groups)
        function(*tensors, *scratch, blocks)
    else:
        function(*tensors, blocks)


def bind(spec: LinearSpec, rows: int, target: Target, workspace: Workspace) -> Launch:
    """The kernel for so many rows, at least one."""
    config, function = chosen(spec, rows, target, toolkit.libraries())
    blocks = blocks_of(config, rows, target)
    return lambda operands: run(function, config, operands, blocks, workspace)
