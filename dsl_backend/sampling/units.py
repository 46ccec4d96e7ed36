# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels the sampler of a model needs, for compiling them before it is served."""

from collections.abc import Iterator

import torch

from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.precompile import Unit, register_family
from dsl_backend.runtime.target import Target
from dsl_backend.sampling import dispatch
from dsl_backend.sampling.configs import cluster_configs, widest_vector
from dsl_backend.sampling.spec import SamplingSpec

# vLLM samples at most so many requests in a step unless it is told otherwise.
MOST_ROWS = 1024


def units(model: ModelShape, target: Target) -> Iterator[Unit]:
    """A kernel for each number of blocks a row.

    Logits are float32 where vLLM has processed them, and its V2 model runner samples others as the model computes them.
    """
    for dtype in dict.fromkeys((torch.float32, getattr(torch, model.dtype))):
        spec = SamplingSpec(vocab=model.vocab_size, dtype=dtype)
        if dispatch.cute(spec, target):
            continue
        # Imports CuTe DSL.
        from dsl_backend.sampling.sm90 import launch

        for config in cluster_configs(spec, target, MOST_ROWS, widest_vector(spec)):
            yield Unit("sampling", launch.build, launch.key_of(spec, config), target)


register_family("sampling", units)
