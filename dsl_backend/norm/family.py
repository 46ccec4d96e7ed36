# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as an operator family: what commands and plugin need to know."""

from collections.abc import Mapping

from dsl_backend.norm import dispatch, precompile
from dsl_backend.norm.spec import FP8, NormSpec, Scaling
from dsl_backend.norm.tuned import TUNED_CONFIGS
from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target

WIDTH = 4096


def typical_layers(target: Target) -> Mapping[str, NormSpec]:
    """Norms of a usual hidden size."""
    dtype = target.usual_dtype
    added = NormSpec(width=WIDTH, dtype=dtype, out_dtype=dtype, weight_dtype=dtype, residual=True, vector=8)
    quantized = NormSpec(
        width=WIDTH,
        dtype=dtype,
        out_dtype=FP8,
        weight_dtype=dtype,
        residual=True,
        scaling=Scaling.TOKEN,
        vector=8,
    )
    return {"RMSNorm with residual": added, "RMSNorm to e4m3": quantized}


FAMILY = Family(
    name="norm",
    tables={dispatch.OPERATION: dispatch.TABLE},
    serving_options={dispatch.OPERATION: "norms"},
    typical_layers=typical_layers,
    operations_of=lambda spec: (dispatch.OPERATION,),
    precompile_specs=precompile.precompile_specs,
    # vLLM calls none of ours.
    warm_up=False,
    served_by_others=precompile.served_by_others,
    tuned_configs=(TUNED_CONFIGS,),
    checks={"norm": Check("norm", (Benchmark("norm", r"^(fp8-)?\d+x\d+$", r"^4096x4096$"),))},
)
