# SPDX-License-Identifier: Apache-2.0
"""Routed experts as an operator family: what commands and plugin need to know."""

from collections.abc import Mapping

from dsl_backend.experts import dispatch, precompile, tuned
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.activation import SWIGLU_OAI
from dsl_backend.quant.format import BLOCK_SCALED
from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target


def typical_layers(target: Target) -> Mapping[str, ExpertsSpec]:
    """Experts of published models."""
    dtype = target.usual_dtype
    return {
        "Qwen3-30B-A3B's experts": ExpertsSpec(
            num_experts=128, hidden_size=2048, intermediate_size=768, topk=8, dtype=dtype
        ),
        "Qwen3-30B-A3B-FP8's experts": ExpertsSpec(
            num_experts=128, hidden_size=2048, intermediate_size=768, topk=8, dtype=dtype, weight=BLOCK_SCALED
        ),
        "gpt-oss-20b's experts": ExpertsSpec(
            num_experts=32,
            hidden_size=2880,
            intermediate_size=2880,
            topk=4,
            dtype=dtype,
            activation=SWIGLU_OAI,
            interleaved=True,
            w13_bias=True,
            w2_bias=True,
        ),
    }


FAMILY = Family(
    name="experts",
    tables={dispatch.OPERATION: dispatch.TABLE},
    typical_layers=typical_layers,
    operations_of=lambda spec: (dispatch.OPERATION,),
    precompile_specs=precompile.precompile_specs,
    # Only layers that are served here have theirs compiled, by themselves.
    warm_up=False,
    served_by_others=precompile.served_by_others,
    tuned_configs=(tuned.TUNED_CONFIGS,),
    checks={
        "experts": Check("experts", (Benchmark("experts", r"^qwen3-30b-\d+$", r"^qwen3-30b-(8|2048)$"),)),
    },
)
