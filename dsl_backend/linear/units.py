# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels the MLP of a model needs, for compiling them before it is served."""

from collections.abc import Iterator

import torch

from dsl_backend.linear import dispatch
from dsl_backend.linear.spec import DTYPES, LinearSpec, Swiglu
from dsl_backend.linear.winners import configs_of
from dsl_backend.runtime.model import ModelShape
from dsl_backend.runtime.precompile import Unit, register_family
from dsl_backend.runtime.target import Target


def units(model: ModelShape, target: Target) -> Iterator[Unit]:
    """The kernels of gate and up projections with SwiGLU, for any number of rows."""
    dtype = getattr(torch, model.dtype)
    if dtype not in DTYPES or model.hidden_size % 8:
        return
    for size in model.gated_sizes:
        if size % 8 == 0:
            yield from units_of(LinearSpec(n=size, k=model.hidden_size, dtype=dtype, activation=Swiglu()), target)


def units_of(spec: LinearSpec, target: Target) -> Iterator[Unit]:
    """The kernels of a layer, for any number of rows; none where others than CuTe DSL's serve it."""
    if dispatch.cute(spec, target):
        return
    # Imports CuTe DSL.
    from dsl_backend.linear.parts import launch

    for config in configs_of(spec, target):
        yield Unit("linear", launch.build, launch.key_of(spec, config), target)


register_family("linear", units)
