# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels turn a model's logits into probabilities, for compiling them ahead of time."""

import math
from collections.abc import Iterator

import torch

from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.softmax import dispatch
from dsl_backend.softmax.spec import SoftmaxSpec
from dsl_backend.softmax.tuned import configs_of


def layer_specs(model: ModelShape) -> Iterator[SoftmaxSpec]:
    """Softmax and log-softmax of packed rows of logits, in float32 and as the model computes them."""
    width = model.vocab_size
    for dtype in dict.fromkeys((torch.float32, getattr(torch, model.dtype))):
        for log in (False, True):
            yield SoftmaxSpec(width=width, dtype=dtype, out_dtype=dtype, log=log, vector=math.gcd(8, width))


def precompile_specs(model: ModelShape, target: Target) -> Iterator[PrecompileSpec]:
    for spec in layer_specs(model):
        if dispatch.cute(spec, target):
            continue
        # Imports CuTe DSL.
        from dsl_backend.softmax.cute import host as launch

        for config in configs_of(spec, target):
            yield PrecompileSpec("softmax", launch.build, launch.key_of(spec, config), target)


def served_by_others(model: ModelShape, target: Target) -> dict[str, list[str]]:
    """Softmax -> why CuTe DSL's kernels do not serve it."""
    return {str(spec): dispatch.cute(spec, target) for spec in layer_specs(model)}
