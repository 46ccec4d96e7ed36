# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels the norms of a model's hidden states need, for compiling them ahead of time."""

import math
from collections.abc import Iterator

import torch

from dsl_backend.norm import dispatch
from dsl_backend.norm.spec import NormSpec
from dsl_backend.norm.tuned import configs_of
from dsl_backend.runtime.model import ModelShape, text_of
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target

# Models whose weights are stored less one.
OFFSET_MODELS = ("gemma", "gemma2", "gemma3", "gemma3_text")


def layer_specs(model: ModelShape) -> Iterator[NormSpec]:
    """The first norm of a model has no residual; the others have one. Rows are packed."""
    dtype = getattr(torch, model.dtype)
    offset = 1.0 if text_of(model.config).get("model_type") in OFFSET_MODELS else 0.0
    for residual in (False, True):
        yield NormSpec(
            width=model.hidden_size,
            dtype=dtype,
            out_dtype=dtype,
            weight_dtype=dtype,
            residual=residual,
            weight_offset=offset,
            vector=math.gcd(8, model.hidden_size),
        )


def precompile_specs(model: ModelShape, target: Target) -> Iterator[PrecompileSpec]:
    for spec in layer_specs(model):
        yield from precompile_specs_of(spec, target)


def precompile_specs_of(spec: NormSpec, target: Target) -> Iterator[PrecompileSpec]:
    """The kernels of a norm; none where no CuTe DSL kernel serves it."""
    if dispatch.cute(spec, target):
        return
    # Imports CuTe DSL.
    from dsl_backend.norm.cute import host

    for config in configs_of(spec, target):
        yield PrecompileSpec("norm", host.build, host.key_of(spec, config), target)


def served_by_others(model: ModelShape, target: Target) -> dict[str, list[str]]:
    """RMSNorm -> why CuTe DSL's kernel does not serve it."""
    return {str(spec): dispatch.cute(spec, target) for spec in layer_specs(model)}
