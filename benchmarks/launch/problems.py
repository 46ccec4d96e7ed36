# SPDX-License-Identifier: Apache-2.0
"""A kernel with almost no work, its tensors, its rows, and its exact result."""

from dataclasses import dataclass

import torch
from dsl_backend.providers import Limits

from ..case import TABLE, Case, Reference, case_of

# A float32 sum, rounded once.
LIMITS = Limits(total=1e-6, row=1e-6)
# Threads of a CTA and elements at most: all kernels are one CTA, and each thread has one element.
THREADS = 256
ELEMENTS = {TABLE: 256, "tiny": 40}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """out = x + 1, both [1, elements] float32; at most `THREADS` elements."""

    elements: int

    @property
    def traffic_bytes(self) -> int:
        return 2 * 4 * self.elements

    @property
    def limits(self) -> Limits:
        return LIMITS

    @property
    def parameters(self) -> dict[str, object]:
        return {"elements": self.elements}


@dataclass(frozen=True)
class Layer:
    x: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    layers: tuple[Layer, ...]


def cases() -> list[Case[Problem]]:
    return [case_of(f"add-{count}", Problem(elements=count), group) for group, count in ELEMENTS.items()]


def build(problem: Problem, layers: int, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (1, problem.elements)

    def layer() -> Layer:
        x = torch.empty(shape, device=device).normal_(generator=generator)
        return Layer(x, torch.full(shape, torch.nan, device=device))

    return Inputs(tuple(layer() for _ in range(layers)))


def reference(problem: Problem, inputs: Inputs, layer: int, seed: int = 0) -> Reference:
    x = inputs.layers[layer].x
    return Reference(torch.zeros(1, dtype=torch.int64, device=x.device), x.double() + 1)
