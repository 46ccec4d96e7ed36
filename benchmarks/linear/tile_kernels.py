# SPDX-License-Identifier: Apache-2.0
"""A linear layer in other DSLs: short kernels, for the comparison of DSLs."""

import torch
from dsl_backend.providers import Run, provider
from dsl_backend.runtime import target as targets

from ..columns import missing
from .problems import Inputs, Layer, Problem


def operands_of(problem: Problem, layer: Layer) -> tuple[torch.Tensor, ...]:
    """x, then the weights: gate and up apart where the layer is gated."""
    return (layer.x, *layer.weight.chunk(2)) if problem.gated else (layer.x, layer.weight)


def helion_objections(problem: Problem) -> list[str]:
    return missing("helion")


@provider("linear", name="Helion", objections=helion_objections, default=False, package="helion")
def helion(problem: Problem, inputs: Inputs) -> Run:
    """The fastest of a few configurations: the first launch times them."""
    from .kernels.helion_kernel import linear

    kernel = linear(problem.gated, targets.detect().tma)

    def run(index: int) -> torch.Tensor:
        layer = inputs.layers[index]
        made: torch.Tensor = kernel(*operands_of(problem, layer), layer.out)
        return made

    return run
