# SPDX-License-Identifier: Apache-2.0
"""The softmax benchmark: this package, quack, torch, torch.compile, and this package's Triton kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dsl_backend.providers import Provider

from ..case import Case, Reference
from ..columns import columns
from . import providers, rows
from .problems import Inputs, Problem, build, reference


@dataclass(frozen=True)
class SoftmaxOperator:
    """The softmax of a matrix's rows."""

    name: str = "softmax"
    unit: str = "TB/s"

    def cases(self) -> Sequence[Case[Problem]]:
        return rows.cases()

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider]:
        return columns(self.name, providers.ours, providers.objections, kernels)

    def build(self, problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
        return build(problem, layers, device, seed)

    def poison(self, inputs: Inputs) -> None:
        for layer in inputs.layers:
            layer.out.fill_(torch.nan)

    def reference(self, problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
        return reference(problem, inputs, layer, seed)

    def compared(self, inputs: Inputs, layer: int, result: torch.Tensor) -> torch.Tensor:
        return result


def operators() -> dict[str, SoftmaxOperator]:
    """Name -> operator."""
    return {"softmax": SoftmaxOperator()}
