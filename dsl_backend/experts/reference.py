# SPDX-License-Identifier: Apache-2.0
"""Experts in eager torch: the tests' reference, and the kernel of a CPU."""

from functools import partial

import torch

from dsl_backend.experts.args import ExpertsOperands
from dsl_backend.experts.kernel import Launch
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.reference import activate, halves
from dsl_backend.runtime.target import Target
from dsl_backend.runtime.workspace import Workspace


def local_ids(spec: ExpertsSpec, operands: ExpertsOperands) -> torch.Tensor:
    """The experts of this rank that tokens are routed to, int64 [M, k]; -1 where there is none."""
    ids = operands.topk_ids.long()
    known = spec.num_experts if spec.global_experts is None else spec.global_experts
    inside = (ids >= 0) & (ids < known)
    if operands.expert_map is not None:
        ids = operands.expert_map.long()[ids.clamp(0, known - 1)]
        inside &= (ids >= 0) & (ids < spec.num_experts)
    return torch.where(inside, ids, -1)


def exact(spec: ExpertsSpec, operands: ExpertsOperands, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The layer [M, H] with every step in the given arithmetic, and in that dtype."""
    x, ids = operands.x.to(dtype), local_ids(spec, operands)
    weights = None if operands.topk_weights is None else operands.topk_weights.to(dtype)
    out = torch.zeros_like(x)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        rows = x[tokens]
        scale = None if weights is None else weights[tokens, slots, None]
        if scale is not None and spec.router_weights is RouterWeights.INPUT:
            rows = rows * scale
        bias = None if operands.w13_bias is None else operands.w13_bias[expert].to(dtype)
        made = torch.nn.functional.linear(rows, operands.w13[expert].to(dtype), bias)
        gate, up = halves(made.T, spec.interleaved)
        bias = None if operands.w2_bias is None else operands.w2_bias[expert].to(dtype)
        hidden = activate(gate.T, up.T, spec.activation)
        made = torch.nn.functional.linear(hidden, operands.w2[expert].to(dtype), bias)
        if scale is not None and spec.router_weights is RouterWeights.OUTPUT:
            made = made * scale
        out.index_add_(0, tokens, made)
    return out


def bind(spec: ExpertsSpec, target: Target, workspace: Workspace) -> Launch:
    """The layer for any number of tokens."""
    return partial(experts, spec)


def experts(spec: ExpertsSpec, operands: ExpertsOperands) -> None:
    """Writes operands.out, in float32 arithmetic."""
    operands.out.copy_(exact(spec, operands, torch.float32))
