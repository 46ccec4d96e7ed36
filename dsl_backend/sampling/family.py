# SPDX-License-Identifier: Apache-2.0
"""Sampling as an operator family: what the commands and the plugin know of it."""

from collections.abc import Mapping

from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target
from dsl_backend.sampling import dispatch, precompile
from dsl_backend.sampling.spec import SamplingSpec

VOCAB = 128256


def typical_layers(target: Target) -> Mapping[str, SamplingSpec]:
    """Logits of a usual vocabulary."""
    return {
        "sampling": SamplingSpec(vocab=VOCAB),
        "sampling, log-probabilities": SamplingSpec(vocab=VOCAB, logprobs=True),
    }


FAMILY = Family(
    name="sampling",
    tables={dispatch.OPERATION: dispatch.TABLE},
    typical_layers=typical_layers,
    operations_of=lambda spec: (dispatch.OPERATION,),
    precompile_specs=precompile.precompile_specs,
    served_by_others=precompile.served_by_others,
    checks={
        "sampling": Check(
            dispatch.OPERATION,
            (Benchmark("sampling", r"^(none|k|k\+p|min-p)-(1|64|256)x151936$", r"^k\+p-64x151936$"),),
        ),
    },
)
