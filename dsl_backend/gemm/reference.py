# SPDX-License-Identifier: Apache-2.0
"""Gated activations and the halves of gated weights in torch, in the dtype of the tensors."""

import math

import torch
from torch.nn import functional

from dsl_backend.gemm.activation import Activation, Geglu


def activate(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Gate and up projections to the activation's output, in their dtype."""
    if isinstance(activation, Geglu):
        if activation.tanh:
            return functional.gelu(gate, approximate="tanh") * up
        # functional.gelu(-inf) is NaN or -inf as the dtype and the processor have it; the formula makes it NaN.
        return 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5))) * up
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.alpha == 1:
        # Rounds once where the other form rounds twice.
        return functional.silu(gate) * (up + activation.beta)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def halves(weight: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up rows of a weight or a bias."""
    if interleaved:
        return weight[::2], weight[1::2]
    gate, up = weight.chunk(2)
    return gate, up
