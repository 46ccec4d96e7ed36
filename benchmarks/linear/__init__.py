# SPDX-License-Identifier: Apache-2.0
"""The benchmark of linear layers: this package, cuBLAS with a separate activation kernel, torch.compile, and quack."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..case import Case, Provider, Reference
from . import providers, rows
from .problems import Inputs, Problem, build, reference

Column = Provider[Problem, Inputs]


@dataclass(frozen=True)
class LinearOperator:
    """Gate and up projections with SwiGLU, and plain products."""

    name: str = "linear"
    unit: str = "TFLOP/s"

    def cases(self) -> Sequence[Case[Problem]]:
        return rows.cases()

    def providers(self, kernels: Sequence[str]) -> Sequence[Column]:
        names: Sequence[str | None] = kernels or [None]
        ours = [providers.Ours(name) for name in names]
        quack = (providers.Quack(), providers.Quack(tuned=True))
        peers = (providers.Cublas(), *quack, providers.Compiled(), providers.Ours("triton", "Triton"))
        return [*ours, *peers]

    def build(self, problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
        return build(problem, layers, device, seed)

    def poison(self, inputs: Inputs) -> None:
        for layer in inputs.layers:
            layer.out.fill_(torch.nan)

    def reference(self, problem: Problem, inputs: Inputs, layer: int) -> Reference:
        return reference(problem, inputs, layer)


def operators() -> dict[str, LinearOperator]:
    """Name -> operator."""
    return {"linear": LinearOperator()}
