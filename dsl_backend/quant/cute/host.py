# SPDX-License-Identifier: Apache-2.0
"""From torch tensors to the kernel that quantises float32 matrices."""

import torch
from cutlass import Float32, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.quant.cute.kernel import Quantise, QuantiseKey
from dsl_backend.quant.format import ScaledFormat
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target

# Columns are a multiple of it, as of all matrices in 8 bits.
MULTIPLE = 16


def build(kind: ScaledFormat, target: Target) -> Function:
    """The compiled function of `quantise`; it launches on torch's current stream.

    Args:
        kind: ROW_SCALED or GROUP_SCALED.
    """
    key = QuantiseKey(by_group=kind.blocked)
    rows, n = cute.sym_int(), cute.sym_int(divisibility=MULTIPLE)
    stride = cute.sym_int64(divisibility=MULTIPLE)
    if key.by_group:
        scale = make_fake_tensor(Float32, (rows, cute.sym_int()), (1, cute.sym_int64(divisibility=4)), assumed_align=16)
    else:
        scale = make_fake_tensor(Float32, (rows,), (1,), assumed_align=4)
    args = (
        make_fake_tensor(Float32, (rows, n), (stride, 1), assumed_align=16),
        make_fake_tensor(Uint8, (rows, n), (cute.sym_int64(divisibility=MULTIPLE), 1), assumed_align=16),
        scale,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return compile_kernel(Quantise(key), args, key=key, target=target)


def quantise(function: Function, x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Launch a function of `build`: x [rows, n] float32 to out [rows, n] e4m3 and its scales, at least one row.

    Scales of groups are column-major.
    """
    function(x, out.view(torch.uint8), scale)
