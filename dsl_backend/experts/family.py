# SPDX-License-Identifier: Apache-2.0
"""Routed experts as an operator family: what commands and plugin need to know."""

from collections.abc import Callable, Mapping, Sequence

import torch

from dsl_backend.experts import dispatch, precompile, tuned
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.gemm.activation import SWIGLU_OAI
from dsl_backend.quant.format import BLOCK_SCALED, MXFP4, MXFP4_TILED, MXFP8, NVFP4, ROW_SCALED, ScaledFormat
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


def in_formats(*weights: ScaledFormat | None) -> Callable[[Target], Sequence[ExpertsSpec]]:
    """Layers of Qwen3-30B-A3B's size with weights in each of these formats."""
    return lambda target: [
        ExpertsSpec(
            num_experts=128,
            hidden_size=2048,
            intermediate_size=768,
            topk=8,
            dtype=target.usual_dtype if weight != MXFP4_TILED else torch.bfloat16,
            weight=weight,
        )
        for weight in weights
    ]


FAMILY = Family(
    name="experts",
    tables={dispatch.OPERATION: dispatch.TABLE},
    naming_options={dispatch.OPERATION: "experts_kernel"},
    serving_options={dispatch.OPERATION: "experts"},
    typical_layers=typical_layers,
    operations_of=lambda spec: (dispatch.OPERATION,),
    precompile_specs=precompile.precompile_specs,
    # Only layers that are served here have theirs compiled, by themselves.
    warm_up=False,
    served_by_others=precompile.served_by_others,
    tuned_configs=(tuned.TUNED_CONFIGS,),
    checks={
        "experts": Check(
            dispatch.OPERATION,
            (Benchmark("experts", r"^qwen3-30b-\d+$", r"^qwen3-30b-(8|2048)$"),),
            in_formats(None),
        ),
        "scaled_experts": Check(
            dispatch.OPERATION,
            (Benchmark("experts", r"^fp8-blocks-qwen3-30b-\d+$", r"^fp8-blocks-qwen3-30b-(8|2048)$"),),
            in_formats(BLOCK_SCALED, ROW_SCALED),
            ("cute-scaled-sm100",),
        ),
        "block_scaled_experts": Check(
            dispatch.OPERATION, layers=in_formats(MXFP8, MXFP4, NVFP4), by_name=("cute-block-scaled",)
        ),
        "weight_only_experts": Check(
            dispatch.OPERATION,
            (Benchmark("experts", r"^mxfp4-gpt-oss-20b-size-\d+$", r"^mxfp4-gpt-oss-20b-size-(8|1024)$"),),
            in_formats(MXFP4_TILED),
            ("cute-weight-only",),
        ),
    },
)
