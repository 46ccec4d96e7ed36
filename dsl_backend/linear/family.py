# SPDX-License-Identifier: Apache-2.0
"""Linear layers as an operator family: what commands and plugin need to know."""

from collections.abc import Mapping
from typing import Any

import torch

from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear import dispatch, precompile
from dsl_backend.linear.scaled import dispatch as scaled_dispatch
from dsl_backend.linear.scaled import tuned as scaled_tuned
from dsl_backend.linear.scaled.spec import ScaledLinearSpec
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.tuned import TUNED_CONFIGS
from dsl_backend.linear.weight_only import dispatch as weight_only_dispatch
from dsl_backend.quant.format import (
    BLOCK_SCALED,
    BLOCK_SCALED_E8M0,
    GROUP_SCALED,
    GROUP_SCALED_E8M0,
    MXFP8,
    NVFP4,
    ROW_SCALED,
    TENSOR_SCALED,
    ScaledFormat,
)
from dsl_backend.quant.weight_only import WeightOnlyFormat
from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target

AnyLayer = LinearSpec | ScaledLinearSpec | WeightOnlyGemmSpec


def typical_layers(target: Target) -> Mapping[str, AnyLayer]:
    """Gate and up projections of published models; in e4m3 with the quantisation for the down projection."""

    def usual(activation: Activation | None, **facts: Any) -> LinearSpec:
        dtypes = Dtypes.of(target.usual_dtype)
        return LinearSpec(n=14336, k=4096, dtypes=dtypes, activation=activation, **facts)

    return {
        "product": usual(None),
        "SwiGLU": usual(Swiglu()),
        "GeGLU": usual(Geglu(tanh=True)),
        "gpt-oss' SwiGLU": usual(SWIGLU_OAI, interleaved=True, bias=True),
        "SwiGLU, batch invariant": usual(Swiglu(), batch_invariant=True),
        **{f"e4m3 {name}": scaled_layer(target.usual_dtype, *formats) for name, formats in SCALED_LAYERS.items()},
        # SM100's kernel multiplies them, and has to be named.
        **{str(kind).upper(): scaled_layer(target.usual_dtype, kind, kind, kind) for kind in (MXFP8, NVFP4)},
        **{
            name: WeightOnlyGemmSpec(n=28672, k=4096, dtype=target.usual_dtype, kind=kind)
            for name, kind in WEIGHT_ONLY_LAYERS.items()
        },
    }


# Formats of x, the weight and the output of checkpoints' layers.
SCALED_LAYERS: Mapping[str, tuple[ScaledFormat, ScaledFormat, ScaledFormat | None]] = {
    "per tensor": (TENSOR_SCALED, TENSOR_SCALED, TENSOR_SCALED),
    "per channel": (ROW_SCALED, ROW_SCALED, ROW_SCALED),
    "blocks": (GROUP_SCALED, BLOCK_SCALED, GROUP_SCALED),
    # Into 16 bits: SM100's kernel makes no such groups. There vLLM's linked layers of these have MXFP8 between them.
    "blocks of powers of two": (GROUP_SCALED_E8M0, BLOCK_SCALED_E8M0, None),
}

WEIGHT_ONLY_LAYERS: Mapping[str, WeightOnlyFormat] = {
    "W4A16": WeightOnlyFormat(),
    "W4A16 with zero points": WeightOnlyFormat(zero_points=True),
    "W8A16": WeightOnlyFormat(bits=8),
}


def scaled_layer(
    dtype: torch.dtype, x: ScaledFormat, weight: ScaledFormat, out: ScaledFormat | None
) -> ScaledLinearSpec:
    """A gate and up projection in 8 or 4 bits."""
    by_columns = x.blocked and not x.swizzled
    return ScaledLinearSpec(
        n=14336, k=4096, x=x, weight=weight, dtype=dtype, out=out, activation=Swiglu(), column_major=by_columns
    )


def operations_of(spec: AnyLayer) -> tuple[str]:
    if isinstance(spec, WeightOnlyGemmSpec):
        return (weight_only_dispatch.OPERATION,)
    return (scaled_dispatch.OPERATION if isinstance(spec, ScaledLinearSpec) else dispatch.OPERATION,)


FAMILY = Family(
    name="linear",
    tables={one.OPERATION: one.TABLE for one in (dispatch, scaled_dispatch, weight_only_dispatch)},
    # They are vLLM's unless they are asked for.
    optional=(weight_only_dispatch.OPERATION,),
    naming_options={scaled_dispatch.OPERATION: "scaled_linears_kernel"},
    serving_options={
        scaled_dispatch.OPERATION: "scaled_linears",
        weight_only_dispatch.OPERATION: "weight_only_linears",
    },
    typical_layers=typical_layers,
    operations_of=operations_of,
    precompile_specs=precompile.precompile_specs,
    # Fused layers compile theirs: a model's shape does not say which they are.
    warm_up=False,
    served_by_others=precompile.served_by_others,
    tuned_configs=(TUNED_CONFIGS, scaled_tuned.TUNED_CONFIGS),
    checks={
        "linear": Check(
            "linear",
            (Benchmark("linear", r"^llama-8b-((qkv|down)-(8|64)|\d+)$", r"^llama-8b-(1024|qkv-8)$"),),
        ),
        "scaled_linear": Check(
            "scaled_linear",
            (Benchmark("scaled-linear", r"^llama-8b-(channels|blocks)-\d+$", r"^llama-8b-channels-64$"),),
        ),
        "weight_only_linear": Check(
            "weight_only_linear",
            (Benchmark("weight-only-linear", r"^llama-8b-(gate-up|qkv)-(1|64|2048)$", r"^llama-8b-qkv-64$"),),
        ),
    },
)
