# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the GEMM of weights of 4 or 8 bits: its key, compiled function, launch.

Operands are `args.GemmOperands`, whose weight is packed: see `quant/weight_only.py`.
"""

from typing import Any

from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.gemm.args import GemmArgs, GemmOperands, launch_args, require_dynamic
from dsl_backend.gemm.host import ALIGNMENT, fake_scratch, matrix, run, vector
from dsl_backend.gemm.sm90.weight_only_configs import Config, WeightOnlyGemmConfig
from dsl_backend.gemm.sm90.weight_only_gemm import WeightOnlyGemm
from dsl_backend.gemm.sm90.weight_only_small_m import WeightOnlySmallMGemm
from dsl_backend.gemm.views import NUMERIC
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec, WeightOnlyKey
from dsl_backend.quant.weight_only import MULTIPLE
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target

__all__ = ["build", "key_of", "run"]


def key_of(spec: WeightOnlyGemmSpec, config: Config) -> WeightOnlyKey[Config]:
    """The kernel of a problem."""
    return WeightOnlyKey(
        dtypes=spec.dtypes,
        activation=None,
        interleaved=False,
        bias=spec.bias,
        residual=False,
        config=config,
        kind=spec.kind,
    )


def fake_args(key: WeightOnlyKey[Config]) -> GemmArgs:
    """What a kernel is compiled for: any sizes that are multiples of 16 bytes."""
    dtype = key.dtypes.x
    m = cute.sym_int()
    n, k = (cute.sym_int(divisibility=MULTIPLE) for _ in range(2))
    words = key.kind.tile_words
    packed = make_fake_tensor(
        Int32, (cute.sym_int(), cute.sym_int(), words), (cute.sym_int64(divisibility=32), words, 1),
        assumed_align=ALIGNMENT,
    )  # fmt: skip
    operands = GemmOperands(
        x=matrix(dtype, m, k),
        weight=packed,
        bias=vector(NUMERIC[dtype], n) if key.bias else None,
        residual=None,
        out=matrix(dtype, m, n),
    )
    args = GemmArgs(operands, fake_scratch(key.config), Int32(0))
    require_dynamic(args)
    return args


def kernel_of(config: Config) -> type[Any]:
    """The kernel of a configuration."""
    return WeightOnlyGemm if isinstance(config, WeightOnlyGemmConfig) else WeightOnlySmallMGemm


def build(key: WeightOnlyKey[Config], target: Target, kernel: type[Any] | None = None) -> Function:
    """The compiled function of `launch_args`; it launches on torch's current stream.

    Args:
        kernel: None is that of the configuration.
    """
    kernel = kernel or kernel_of(key.config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return compile_kernel(kernel(key), (*launch_args(fake_args(key)), stream), key=key, target=target)
