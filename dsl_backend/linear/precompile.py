# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels the MLP of a model needs, for compiling them before it is served."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dsl_backend.checks import short
from dsl_backend.gemm.activation import Activation, Geglu, Swiglu
from dsl_backend.gemm.spec import DTYPES, Dtypes
from dsl_backend.linear import dispatch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.tuned import MOST_ROWS, configs_of, faster
from dsl_backend.runtime.model import ModelShape, text_of
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target

VOCAB_MULTIPLE = 64
# By the names of transformers. A model whose configuration names none has SiLU.
ACTIVATIONS: Mapping[Any, Activation] = {
    "gelu": Geglu(),
    "gelu_new": Geglu(tanh=True),
    "gelu_pytorch_tanh": Geglu(tanh=True),
}


def layer_specs(model: ModelShape, *, batch_invariant: bool = False) -> Iterator[LinearSpec]:
    """The gate and up projections of all layers of a decoder, with their activation; equal ones once."""
    dtype, text = getattr(torch, model.dtype), text_of(model.config)
    if dtype not in DTYPES or model.hidden_size % 8:
        return
    activation = ACTIVATIONS.get(text.get("hidden_activation") or text.get("hidden_act"), Swiglu())
    for size in model.gated_sizes:
        if size % 8 == 0:
            yield LinearSpec(
                n=size,
                k=model.hidden_size,
                dtypes=Dtypes.of(dtype),
                activation=activation,
                batch_invariant=batch_invariant,
            )


def projection_sizes(model: ModelShape) -> Iterator[tuple[int, int]]:
    """(n, k) of a decoder's other projections on a rank: q, k and v together, their output's, down, the logits'.

    MLA's are left out: models differ in what they merge.
    """
    head_dim, ranks = model.head_dim, model.tensor_parallel
    if not model.is_mla:
        yield (model.heads_q + 2 * model.heads_kv) * head_dim, model.hidden_size
        yield model.hidden_size, model.heads_q * head_dim
    for size in model.gated_sizes:
        yield model.hidden_size, size
    # vLLM pads the vocabulary to a multiple of 64.
    yield -(-model.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // ranks, model.hidden_size


def precompile_specs(model: ModelShape, target: Target) -> Iterator[PrecompileSpec]:
    """The kernels of gate and up projections with their activation, for any number of rows; those of the projections
    that were measured to be faster than cuBLAS, for few.
    """
    for spec in layer_specs(model):
        yield from precompile_specs_of(spec, target)
    dtype = getattr(torch, model.dtype)
    for n, k in projection_sizes(model):
        if dtype in DTYPES and faster(n, k, dtype, target):
            yield from precompile_specs_of(LinearSpec(n=n, k=k, dtypes=Dtypes.of(dtype)), target, MOST_ROWS)


def precompile_specs_of(spec: LinearSpec, target: Target, most_rows: int | None = None) -> Iterator[PrecompileSpec]:
    """The kernels of a layer, for any number of rows or up to so many; none where no CuTe DSL kernel serves it."""
    if dispatch.cute(spec, target):
        return
    # Imports CuTe DSL.
    from dsl_backend.gemm import host

    for config in configs_of(spec, target, most_rows):
        yield PrecompileSpec("linear", host.build, host.key_of(spec, config), target)


def served_by_others(model: ModelShape, target: Target) -> dict[str, list[str]]:
    """Layer -> why CuTe DSL's kernels do not serve it."""
    mlp = "gate and up projections"
    if not model.gated_sizes:
        return {mlp: ["the model's configuration names none"]}
    if getattr(torch, model.dtype) not in DTYPES:
        return {mlp: [f"dtype {model.dtype} is not one of {', '.join(map(short, DTYPES))}"]}
    if model.hidden_size % 8:
        return {mlp: [f"the hidden size {model.hidden_size} is not a multiple of 8"]}
    odd = {f"{mlp} of {size}": ["not a multiple of 8"] for size in model.gated_sizes if size % 8}
    return {str(spec): dispatch.cute(spec, target) for spec in layer_specs(model)} | odd
