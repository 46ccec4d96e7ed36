# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels the sampler of a model needs, for compiling them before it is served."""

from collections.abc import Iterator

import torch

from dsl_backend.checks import short
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.sampling import dispatch
from dsl_backend.sampling.configs import cluster_configs, widest_vector
from dsl_backend.sampling.spec import SamplingSpec

# vLLM samples at most so many requests in a step unless it is told otherwise.
MOST_ROWS = 1024


def layer_specs(model: ModelShape) -> Iterator[SamplingSpec]:
    """Logits as vLLM samples from them: float32 where it has processed them, else as the model computes them (V2)."""
    for dtype in dict.fromkeys((torch.float32, getattr(torch, model.dtype))):
        yield SamplingSpec(vocab=model.vocab_size, dtype=dtype)


def precompile_specs(model: ModelShape, target: Target) -> Iterator[PrecompileSpec]:
    """A kernel for each number of blocks a row."""
    for spec in layer_specs(model):
        if dispatch.cute(spec, target):
            continue
        # Imports CuTe DSL.
        from dsl_backend.sampling.cute import host as launch

        for config in cluster_configs(spec, target, MOST_ROWS, widest_vector(spec)):
            yield PrecompileSpec("sampling", launch.build, launch.key_of(spec, config), target)


def served_by_others(model: ModelShape, target: Target) -> dict[str, list[str]]:
    """Logits -> why CuTe DSL's kernels do not sample from them."""
    return {f"{spec.vocab} logits, {short(spec.dtype)}": dispatch.cute(spec, target) for spec in layer_specs(model)}
