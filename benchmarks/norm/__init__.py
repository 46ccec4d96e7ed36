# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm benchmark: this package and its Triton kernel, quack, vLLM, FlashInfer, torch, torch.compile."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from dsl_backend.providers import Provider

from ..case import Case, Reference
from ..columns import columns
from . import providers, rows
from .problems import Inputs, Problem, build, poison, reference


@dataclass(frozen=True)
class NormOperator:
    """The RMSNorm of a matrix's rows."""

    name: str = "norm"
    unit: str = "TB/s"

    def cases(self) -> Sequence[Case[Problem]]:
        return rows.cases()

    def providers(self, kernels: Sequence[str]) -> Sequence[Provider]:
        return columns(self.name, providers.ours, providers.objections, kernels)

    def build(self, problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
        return build(problem, layers, device, seed)

    def poison(self, inputs: Inputs) -> None:
        poison(inputs)

    def reference(self, problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
        return reference(problem, inputs, layer, seed)

    def compared(self, inputs: Inputs, layer: int, result: torch.Tensor) -> torch.Tensor:
        return result.float()


def operators() -> dict[str, NormOperator]:
    """Name -> operator."""
    return {"norm": NormOperator()}
