# SPDX-License-Identifier: Apache-2.0
"""The sampling benchmark: this package, FlashInfer, vLLM without FlashInfer, and this package's Triton kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dsl_backend.providers import Provider

from ..case import Case, Reference
from ..columns import columns
from . import providers, rows
from .problems import Inputs, Problem, build, reference, verdict


@dataclass(frozen=True)
class SamplingOperator:
    """Samples one token from each row of logits."""

    name: str = "sampling"
    unit: str = "TB/s"

    def cases(self) -> Sequence[Case[Problem]]:
        return rows.cases()

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider]:
        return columns(self.name, providers.ours, providers.objections, kernels)

    def build(self, problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
        return build(problem, layers, device, seed)

    def poison(self, inputs: Inputs) -> None:
        for layer in inputs.layers:
            layer.tokens.fill_(-1)

    def reference(self, problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
        return reference(problem, inputs)

    def compared(self, inputs: Inputs, layer: int, result: torch.Tensor) -> torch.Tensor:
        return verdict(inputs, layer, result)


def operators() -> dict[str, SamplingOperator]:
    """Name -> operator."""
    return {"sampling": SamplingOperator()}
