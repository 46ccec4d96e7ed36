# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the GEMM kernels: their keys, compiled functions, launches."""

from typing import Any

import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.gemm.args import GemmArgs, GemmOperands, StreamKScratch, launch_args, require_dynamic
from dsl_backend.gemm.configs import Config, arch_kernels
from dsl_backend.gemm.key import GemmKey
from dsl_backend.gemm.spec import GemmSpec
from dsl_backend.gemm.tiles import GemmTiles, SmallMTiles
from dsl_backend.gemm.views import NUMERIC
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace

# Bytes that rows and base addresses are aligned to, as TMA needs it.
ALIGNMENT = 16


def key_of(spec: GemmSpec, config: Config) -> GemmKey[Config]:
    """The kernel of a problem."""
    return GemmKey(
        dtypes=spec.dtypes,
        activation=spec.activation,
        interleaved=spec.interleaved,
        bias=spec.bias,
        residual=spec.residual,
        config=config,
        apart=spec.apart,
    )


def matrix(dtype: torch.dtype, rows: Any, width: Any) -> Any:
    """A fake tensor whose rows start at aligned addresses."""
    stride = (cute.sym_int64(divisibility=ALIGNMENT // dtype.itemsize), 1)
    return make_fake_tensor(NUMERIC[dtype], (rows, width), stride, assumed_align=ALIGNMENT)


def vector(numeric: Any, size: Any) -> Any:
    return make_fake_tensor(numeric, (size,), (1,), assumed_align=ALIGNMENT)


def fake_scratch(config: GemmTiles | SmallMTiles) -> StreamKScratch | None:
    """Fake tensors of what CTAs hand on to others; None where they share no tile."""
    if not (isinstance(config, SmallMTiles) and config.stream_k):
        return None
    return StreamKScratch(vector(Float32, cute.sym_int()), vector(Int32, cute.sym_int()))


def scratch_of(config: GemmTiles | SmallMTiles, max_ctas: int, workspace: Workspace) -> StreamKScratch | None:
    """What `fake_scratch` stands for, in the workspace."""
    if not (isinstance(config, SmallMTiles) and config.stream_k):
        return None
    partials = workspace.partials(max_ctas * config.partials)
    return StreamKScratch(partials, workspace.flags(max_ctas * config.groups))


def fake_args(key: GemmKey[Config]) -> GemmArgs:
    """What a kernel is compiled for: any sizes that are multiples of 16 bytes."""
    dtypes = key.dtypes
    m = cute.sym_int()
    n, k, weight_rows = (
        cute.sym_int(divisibility=ALIGNMENT // dtype.itemsize) for dtype in (dtypes.out, dtypes.x, dtypes.out)
    )
    operands = GemmOperands(
        x=matrix(dtypes.x, m, k),
        weight=matrix(dtypes.weight, weight_rows, k),
        bias=vector(NUMERIC[dtypes.out], weight_rows) if key.bias else None,
        residual=matrix(dtypes.out, m, n) if key.residual else None,
        out=matrix(dtypes.out, m, n),
    )
    args = GemmArgs(operands, fake_scratch(key.config), Int32(0))
    require_dynamic(args)
    return args


def build(key: GemmKey[Config], target: Target) -> Function:
    """The compiled function of `launch_args`; it launches on torch's current stream."""
    kernel = arch_kernels(target).kernel(key.config)(key)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compile_kernel(kernel, (*launch_args(fake_args(key)), stream), key=key, target=target)


def run(
    function: Function,
    config: GemmTiles | SmallMTiles,
    operands: GemmOperands,
    max_ctas: int,
    workspace: Workspace,
) -> None:
    """Launch a function of `build`."""
    function(*launch_args(GemmArgs(operands, scratch_of(config, max_ctas, workspace), max_ctas)))
