# SPDX-License-Identifier: Apache-2.0
"""Sampling as an operator family: what commands and plugin need to know."""

from collections.abc import Mapping, Sequence

from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target
from dsl_backend.sampling import dispatch, precompile, verification_dispatch
from dsl_backend.sampling.spec import SamplingSpec
from dsl_backend.sampling.tuned import TUNED_CONFIGS
from dsl_backend.sampling.verification_spec import Known, VerificationSpec

VOCAB = 128256


def typical_layers(target: Target) -> Mapping[str, SamplingSpec | VerificationSpec]:
    """Logits of a usual vocabulary, and drafts of its tokens."""
    return {
        "sampling": SamplingSpec(vocab=VOCAB),
        "sampling, log-probabilities": SamplingSpec(vocab=VOCAB, logprobs=True),
        "drafts": VerificationSpec(max_drafts=5, vocab=VOCAB),
        "drafts, by the ratio of probabilities": VerificationSpec(max_drafts=5, vocab=VOCAB, known=Known.LOGITS),
    }


def operations_of(spec: SamplingSpec | VerificationSpec) -> Sequence[str]:
    return (dispatch.OPERATION if isinstance(spec, SamplingSpec) else verification_dispatch.OPERATION,)


FAMILY = Family(
    name="sampling",
    tables={
        dispatch.OPERATION: dispatch.TABLE,
        verification_dispatch.OPERATION: verification_dispatch.TABLE,
    },
    typical_layers=typical_layers,
    operations_of=operations_of,
    precompile_specs=precompile.precompile_specs,
    # The sampler compiles its kernels when it makes its plans.
    warm_up=False,
    served_by_others=precompile.served_by_others,
    tuned_configs=(TUNED_CONFIGS,),
    checks={
        "sampling": Check(
            dispatch.OPERATION,
            (Benchmark("sampling", r"^(none|k|k\+p|min-p)-(1|64|256)x151936$", r"^k\+p-64x151936$"),),
        ),
        "verification": Check(
            verification_dispatch.OPERATION,
            (Benchmark("verification", r"^(none|k\+p)-t0.8-\d+x5x128256$", r"^k\+p-t0.8-64x5x128256$"),),
        ),
    },
)
