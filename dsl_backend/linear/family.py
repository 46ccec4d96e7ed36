# SPDX-License-Identifier: Apache-2.0
"""Linear layers as an operator family: what the commands and the plugin know of them."""

from collections.abc import Mapping
from typing import Any

from dsl_backend.gemm.activation import SWIGLU_OAI, Activation, Geglu, Swiglu
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear import dispatch, precompile
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.tuned import TUNED_CONFIGS
from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target


def typical_layers(target: Target) -> Mapping[str, LinearSpec]:
    """Gate and up projections of published models."""

    def usual(activation: Activation | None, **facts: Any) -> LinearSpec:
        dtypes = Dtypes.of(target.usual_dtype)
        return LinearSpec(n=14336, k=4096, dtypes=dtypes, activation=activation, **facts)

    return {
        "product": usual(None),
        "SwiGLU": usual(Swiglu()),
        "GeGLU": usual(Geglu(tanh=True)),
        "gpt-oss' SwiGLU": usual(SWIGLU_OAI, interleaved=True, bias=True),
        "SwiGLU, batch invariant": usual(Swiglu(), batch_invariant=True),
    }


FAMILY = Family(
    name="linear",
    tables={dispatch.OPERATION: dispatch.TABLE},
    typical_layers=typical_layers,
    operations_of=lambda spec: (dispatch.OPERATION,),
    precompile_specs=precompile.precompile_specs,
    # Fused layers compile theirs: a model's shape does not say which they are.
    warm_up=False,
    served_by_others=precompile.served_by_others,
    tuned_configs=TUNED_CONFIGS,
    checks={
        "linear": Check(
            "linear", (Benchmark("linear", r"^llama-8b-((qkv|down)-(8|64)|\d+)$", r"^llama-8b-(1024|qkv-8)$"),)
        ),
    },
)
