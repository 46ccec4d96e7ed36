# SPDX-License-Identifier: Apache-2.0
"""Which CuTe DSL kernels a linear layer of packed weights needs, for compiling them before it is served."""

from collections.abc import Iterator

from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear.weight_only import dispatch
from dsl_backend.runtime.precompile import PrecompileSpec
from dsl_backend.runtime.target import Target


def precompile_specs_of(spec: WeightOnlyGemmSpec, target: Target) -> Iterator[PrecompileSpec]:
    """The kernels of a layer for any number of rows; none where the reference serves."""
    if dispatch.choose(spec, target).name == "reference":
        return
    # Imports CuTe DSL.
    from dsl_backend.linear.weight_only.cute import host

    yield from host.precompile_specs(spec, target)
