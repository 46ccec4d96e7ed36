# SPDX-License-Identifier: Apache-2.0
"""Keys, compiled functions and launches of the CuTe DSL RMSNorm."""

from functools import cache
from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from dsl_backend.checks import short
from dsl_backend.norm.configs import NormConfig
from dsl_backend.norm.cute.kernel import NUMERIC, NormKey, RMSNorm
from dsl_backend.norm.kernel import Launch
from dsl_backend.norm.spec import FP8, NormSpec, NormTensors, Scaling
from dsl_backend.norm.tuned import config_of
from dsl_backend.runtime import toolkit
from dsl_backend.runtime.compile import Function, compile_kernel
from dsl_backend.runtime.target import Target


def key_of(spec: NormSpec, config: NormConfig) -> NormKey:
    """The kernel of a problem. Widths with the same configuration share one, except those that fill the registers."""
    return NormKey(
        dtype=short(spec.dtype),
        out_dtype=short(spec.out_dtype),
        weight_dtype=None if spec.weight_dtype is None else short(spec.weight_dtype),
        residual=spec.residual,
        weight_offset=spec.weight_offset,
        scaling=spec.scaling,
        config=config,
        exact=spec.width == config.tile_elements,
    )


def fake_args(key: NormKey) -> tuple[Any, ...]:
    """Fake arguments of `RMSNorm.__call__`."""
    rows, vector = cute.sym_int(), key.config.vector
    width = cute.sym_int(divisibility=vector)

    def rows_of(name: str) -> Any:
        dtype = NUMERIC[name]
        stride = (cute.sym_int64(divisibility=vector), 1)
        return make_fake_tensor(dtype, (rows, width), stride, assumed_align=vector * dtype.width // 8)

    def vector_of(name: str, count: Any, align: int) -> Any:
        return make_fake_tensor(NUMERIC[name], (count,), (1,), assumed_align=align)

    weight = None
    if key.weight_dtype is not None:
        weight = vector_of(key.weight_dtype, width, vector * NUMERIC[key.weight_dtype].width // 8)
    groups = (cute.sym_int(), (cute.sym_int64(), cute.sym_int64()))
    scales = {
        Scaling.TOKEN: vector_of("float32", rows, 4),
        Scaling.GROUP: make_fake_tensor(cutlass.Float32, (rows, groups[0]), groups[1], assumed_align=4),
    }
    tensors = NormTensors(
        x=rows_of(key.dtype),
        residual=rows_of(key.dtype) if key.residual else None,
        weight=weight,
        scale=vector_of("float32", 1, 4) if key.scaling is Scaling.TENSOR else None,
        out=rows_of(key.out_dtype),
        residual_out=rows_of(key.dtype) if key.residual else None,
        scale_out=scales.get(key.scaling),
    )
    return *tensors, cutlass.Float32(0.0), make_fake_stream(use_tvm_ffi_env_stream=True)


def build(key: NormKey, target: Target) -> Function:
    """The compiled function: (*NormTensors, eps); e4m3 as uint8."""
    return compile_kernel(RMSNorm(key), fake_args(key), key=key, target=target)


@cache
def function_of(spec: NormSpec, target: Target, libraries: str) -> Function:
    """The function of a problem, cached by the libraries that its host code is linked with."""
    return build(key_of(spec, config_of(spec, target)), target)


def arguments_of(tensors: NormTensors) -> NormTensors:
    """The tensors as compiled functions take them."""
    return tensors._replace(out=tensors.out.view(torch.uint8)) if tensors.out.dtype == FP8 else tensors


def bind(spec: NormSpec, target: Target) -> Launch:
    """As `kernel.Bind`."""
    function = function_of(spec, target, toolkit.libraries())
    return lambda tensors, eps: function(*arguments_of(tensors), eps)
