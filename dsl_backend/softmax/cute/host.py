# SPDX-License-Identifier: Apache-2.0
"""Keys, compiled functions and launches of the CuTe DSL softmax."""

from functools import cache
from typing import Any

import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.checks import short
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target
from dsl_backend.softmax.configs import SoftmaxConfig
from dsl_backend.softmax.cute.kernel import NUMERIC, Softmax, SoftmaxKey
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.softmax.tuned import config_of


def key_of(spec: SoftmaxSpec, config: SoftmaxConfig) -> SoftmaxKey:
    """The kernel of a problem. Widths with the same configuration share one, except those that fill the registers."""
    exact = spec.width % config.tile_elements == 0 if config.two_pass else spec.width == config.tile_elements
    return SoftmaxKey(
        dtype=short(spec.dtype), out_dtype=short(spec.out_dtype), log=spec.log, config=config, exact=exact
    )


def fake_args(key: SoftmaxKey) -> tuple[Any, ...]:
    rows, width = cute.sym_int(), cute.sym_int(divisibility=key.config.vector)

    def rows_of(name: str) -> Any:
        dtype, vector = NUMERIC[name], key.config.vector
        stride = (cute.sym_int64(divisibility=vector), 1)
        return make_fake_tensor(dtype, (rows, width), stride, assumed_align=vector * dtype.width // 8)

    return rows_of(key.dtype), rows_of(key.out_dtype), make_fake_stream(use_tvm_ffi_env_stream=True)


def build(key: SoftmaxKey, target: Target) -> Function:
    """The compiled function: (x, out)."""
    return compile_kernel(Softmax(key), fake_args(key), key=key, target=target)


@cache
def function_of(spec: SoftmaxSpec, target: Target, libraries: str) -> Function:
    """The function of a problem, cached by the libraries that its host code is linked with."""
    return build(key_of(spec, config_of(spec, target)), target)


def softmax(x: torch.Tensor, out: torch.Tensor, spec: SoftmaxSpec, target: Target) -> None:
    """Write out [rows, width] from x [rows, width]; rows may be 0."""
    if x.shape[0]:
        function_of(spec, target, toolkit.libraries())(x, out)
