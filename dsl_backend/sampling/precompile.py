# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL kernels that a model's sampler and its verification need, to compile them before it is served."""

from collections.abc import Iterator

import torch

from dsl_backend.checks import short
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target
from dsl_backend.sampling import dispatch, verification_dispatch
from dsl_backend.sampling.configs import widest_vector
from dsl_backend.sampling.spec import SamplingSpec
from dsl_backend.sampling.tuned import configs_of
from dsl_backend.sampling.verification_spec import VerificationSpec

# vLLM's largest default of --max-num-seqs.
MAX_ROWS = 1024


def layer_specs(model: ModelShape, *, kept: bool = False) -> Iterator[SamplingSpec]:
    """The dtypes that vLLM samples from: float32 where it has processed the logits, else the model's (V2).

    Args:
        kept: of steps whose drafts are verified by the ratio of probabilities.
    """
    for dtype in dict.fromkeys((torch.float32, getattr(torch, model.dtype))):
        yield SamplingSpec(vocab=model.vocab_size, dtype=dtype, kept=kept)


def precompile_specs(model: ModelShape, target: Target) -> Iterator[PrecompileSpec]:
    """Two kernels for each cluster size, and one for the drafts of each of vLLM's runners."""
    for spec in (*layer_specs(model), *layer_specs(model, kept=True)):
        if dispatch.cute(spec, target):
            continue
        # Here, because it imports CuTe DSL.
        from dsl_backend.sampling.cute import host

        for config in configs_of(spec, target, MAX_ROWS, widest_vector(spec)):
            yield PrecompileSpec("sampling", host.build, host.key_of(spec, config), target)
    for token_dtype in (torch.int64, torch.int32):
        verified = VerificationSpec(max_drafts=1, vocab=model.vocab_size, token_dtype=token_dtype)
        if verification_dispatch.cute(verified, target):
            continue
        from dsl_backend.sampling.cute import verification_host

        yield PrecompileSpec("sampling", verification_host.build, verification_host.key_of(verified), target)


def served_by_others(model: ModelShape, target: Target) -> dict[str, list[str]]:
    """The objections of the CuTe DSL kernel, by what it would sample from."""
    return {f"{spec.vocab} logits, {short(spec.dtype)}": dispatch.cute(spec, target) for spec in layer_specs(model)}
