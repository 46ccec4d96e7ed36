# SPDX-License-Identifier: Apache-2.0
"""Softmax as an operator family: what commands and plugin need to know."""

from collections.abc import Mapping

import torch

from dsl_backend.runtime.family import Benchmark, Check, Family
from dsl_backend.runtime.target import Target
from dsl_backend.softmax import dispatch, precompile
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.softmax.tuned import TUNED_CONFIGS

VOCAB = 128256


def typical_layers(target: Target) -> Mapping[str, SoftmaxSpec]:
    """Logits of a usual vocabulary."""
    return {"softmax": SoftmaxSpec(width=VOCAB, dtype=torch.float32, out_dtype=torch.float32, vector=8)}


FAMILY = Family(
    name="softmax",
    tables={dispatch.OPERATION: dispatch.TABLE},
    typical_layers=typical_layers,
    operations_of=lambda spec: (dispatch.OPERATION,),
    precompile_specs=precompile.precompile_specs,
    # vLLM calls none of ours.
    warm_up=False,
    served_by_others=precompile.served_by_others,
    tuned_configs=(TUNED_CONFIGS,),
    checks={"softmax": Check("softmax", (Benchmark("softmax", r"^\d+x\d+$", r"^256x151936$"),))},
)
