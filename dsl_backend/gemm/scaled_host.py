# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the GEMM kernels of quantised operands: their keys, compiled functions, launches.

Kernels see e4m3 and e8m0 as bytes: DLPack has no name for them that all versions of torch and CuTe DSL share.
"""

from collections.abc import Callable
from typing import Any

import torch
from cutlass import Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.gemm.args import ScaledArgs, require_dynamic, scaled_launch_args
from dsl_backend.gemm.configs import Config
from dsl_backend.gemm.host import ALIGNMENT, fake_scratch, matrix, scratch_of, vector
from dsl_backend.gemm.scaled import ScaledGemmSpec, ScaledOperands
from dsl_backend.gemm.scaled_key import ScaledKey
from dsl_backend.gemm.views import NUMERIC
from dsl_backend.quant.format import SWIZZLED_ROWS, ScaledFormat
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def key_of(spec: ScaledGemmSpec, config: Config, column_major: bool) -> ScaledKey[Config]:
    """The kernel of a problem; `column_major`: of x's scales of groups."""
    return ScaledKey(
        dtypes=spec.dtypes,
        activation=spec.activation,
        interleaved=spec.interleaved,
        bias=spec.bias,
        residual=False,
        config=config,
        apart=spec.apart,
        x=spec.x,
        weight=spec.weight,
        out=spec.out,
        dtype=spec.dtype,
        column_major=column_major,
    )


def fake_scale(kind: ScaledFormat, rows: Any, column_major: bool) -> Any:
    """A fake tensor of a matrix's scales."""
    numeric = Float32 if kind.scales == torch.float32 else Uint8
    if not kind.blocked:
        return make_fake_tensor(numeric, (1,) if kind.block_rows is None else (rows,), (1,), assumed_align=4)
    if kind.swizzled:
        shape = (cute.sym_int(divisibility=SWIZZLED_ROWS), cute.sym_int(divisibility=4))
        return make_fake_tensor(numeric, shape, (cute.sym_int64(divisibility=4), 1), assumed_align=ALIGNMENT)
    shape = (rows if kind.block_rows == 1 else cute.sym_int(), cute.sym_int())
    if column_major:
        stride = (1, cute.sym_int64(divisibility=ALIGNMENT // kind.scales.itemsize))
        return make_fake_tensor(numeric, shape, stride, assumed_align=ALIGNMENT)
    return make_fake_tensor(numeric, shape, (cute.sym_int64(), 1), assumed_align=kind.scales.itemsize)


def one_number(kind: ScaledFormat | None) -> Any:
    """A fake tensor of NVFP4's scale of a whole matrix."""
    return make_fake_tensor(Float32, (1,), (1,), assumed_align=4) if kind is not None and kind.packed > 1 else None


def fake_args(key: ScaledKey[Config]) -> ScaledArgs:
    """What a kernel is compiled for: sizes that are multiples of 16."""
    dtypes = key.dtypes
    m = cute.sym_int()
    n, k, weight_rows = (cute.sym_int(divisibility=ALIGNMENT) for _ in range(3))
    operands = ScaledOperands(
        x=matrix(dtypes.x, m, k),
        x_scale=fake_scale(key.x, m, key.column_major),
        weight=matrix(dtypes.weight, weight_rows, k),
        weight_scale=fake_scale(key.weight, weight_rows, False),
        bias=vector(NUMERIC[key.dtype], weight_rows) if key.bias else None,
        out=matrix(dtypes.out, m, n),
        out_scale=None if key.out is None else fake_scale(key.out, m, True),
        alpha=one_number(key.x),
        out_global_scale=one_number(key.out),
    )
    args = ScaledArgs(operands, fake_scratch(key.config), Int32(0))
    require_dynamic(args)
    return args


def build(kernel: Callable[[ScaledKey[Any]], Any], key: ScaledKey[Config], target: Target) -> Function:
    """The compiled function of `scaled_launch_args`; it launches on torch's current stream.

    Args:
        kernel: the configuration's class.
    """
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compile_kernel(kernel(key), (*scaled_launch_args(fake_args(key)), stream), key=key, target=target)


def as_bytes(operands: ScaledOperands) -> ScaledOperands:
    """The operands as kernels see them."""
    tensors = {name: tensor for name, tensor in operands._asdict().items() if tensor is not None}
    return operands._replace(**{name: one.view(torch.uint8) for name, one in tensors.items() if one.itemsize == 1})


def run(function: Function, config: Config, operands: ScaledOperands, max_ctas: int, workspace: Workspace) -> None:
    """Launch a function of `build`."""
    function(*scaled_launch_args(ScaledArgs(as_bytes(operands), scratch_of(config, max_ctas, workspace), max_ctas)))
