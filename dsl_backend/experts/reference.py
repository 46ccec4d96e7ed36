# SPDX-License-Identifier: Apache-2.0
"""Experts in eager torch: the tests' reference, and the kernel of a CPU."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from dsl_backend.experts.args import ExpertsOperands, ExpertsScales
from dsl_backend.experts.kernel import Launch
from dsl_backend.experts.scales import row_scales
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.reference import activate, halves
from dsl_backend.quant.format import ScaledFormat
from dsl_backend.quant.mxfp4_tiles import unpack_expert
from dsl_backend.quant.reference import (
    Quantized,
    dequantized,
    mma_dequantized,
    mma_quantized,
    quantized,
    scales_of,
    stored,
    unpacked_e2m1,
)
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
    """The layer [M, H] with every step in the given arithmetic, and in that dtype.

    Scales of a quantised x are float32 in any arithmetic.
    """
    out = torch.zeros(operands.x.shape, dtype=dtype, device=operands.x.device)
    for tokens, made in results_of(spec, operands, dtype):
        out.index_add_(0, tokens, made)
    return out + shared(spec, operands, dtype) if spec.shared_experts else out


def results_of(
    spec: ExpertsSpec, operands: ExpertsOperands, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, what is added to their rows of the output) of each routed expert that has tokens, in such arithmetic."""
    for part in parts_of(spec, operands, dtype):
        bias = None if operands.w2_bias is None else operands.w2_bias[part.expert].to(dtype)
        weight = weight_of(spec, operands, "w2", part.expert, dtype)
        made = torch.nn.functional.linear(requantized(spec, part.hidden, operands.scales), weight, bias)
        yield part.tokens, made if part.scale is None else made * part.scale


def shared(spec: ExpertsSpec, operands: ExpertsOperands, dtype: torch.dtype) -> torch.Tensor:
    """What shared experts add to every token [M, H], in the given arithmetic."""
    assert operands.shared_w13 is not None
    assert operands.shared_w2 is not None
    made = torch.nn.functional.linear(operands.x.to(dtype), operands.shared_w13.to(dtype))
    gate, up = halves(made.T, False)
    hidden = activate(gate.T, up.T, spec.activation)
    return torch.nn.functional.linear(hidden, operands.shared_w2.to(dtype)) * spec.shared_weight


class ExpertPart(NamedTuple):
    """What an expert does for its tokens.

    Attributes:
        tokens: int64 [rows]. hidden: [rows, I], the activation's result. scale: [rows, 1], the router's weights of what
            the expert returns, or None.
    """

    expert: int
    tokens: torch.Tensor
    hidden: torch.Tensor
    scale: torch.Tensor | None


def parts_of(spec: ExpertsSpec, operands: ExpertsOperands, dtype: torch.dtype) -> Iterator[ExpertPart]:
    """The first product and the activation of each expert that has tokens, in the given arithmetic."""
    x, ids = rows_of_x(spec, operands, dtype), local_ids(spec, operands)
    weights = None if operands.topk_weights is None else operands.topk_weights.to(dtype)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        rows = x[tokens]
        scale = None if weights is None else weights[tokens, slots, None]
        if scale is not None and spec.router_weights is RouterWeights.INPUT:
            rows, scale = rows * scale, None
        bias = None if operands.w13_bias is None else operands.w13_bias[expert].to(dtype)
        made = torch.nn.functional.linear(rows, weight_of(spec, operands, "w13", expert, dtype), bias)
        gate, up = halves(made.T, spec.interleaved)
        yield ExpertPart(expert, tokens, activate(gate.T, up.T, spec.activation), scale)


def requantized(spec: ExpertsSpec, hidden: torch.Tensor, scales_given: ExpertsScales) -> torch.Tensor:
    """The activation's result [rows, I] as the second product takes it."""
    if spec.activations is None:
        return hidden
    if spec.mma_scaled:
        return in_blocks(hidden, spec.activations, scales_given.hidden_global).to(hidden.dtype)
    scales = scales_of(hidden, spec.activations)
    return dequantized(Quantized(stored(hidden, scales, spec.activations), scales, spec.activations), hidden.dtype)


def rows_of_x(spec: ExpertsSpec, operands: ExpertsOperands, dtype: torch.dtype) -> torch.Tensor:
    """X [M, H], dequantised or as its quantisation has it."""
    if spec.activations is None:
        return operands.x.to(dtype)
    if spec.mma_scaled:
        return in_blocks(operands.x, spec.activations, operands.scales.x_global).to(dtype)
    if spec.x is None:
        return dequantized(quantized(operands.x, spec.activations), dtype)
    assert operands.scales.x is not None
    return dequantized(Quantized(operands.x, operands.scales.x, spec.x), dtype)


def in_blocks(x: torch.Tensor, kind: ScaledFormat, global_scale: torch.Tensor | None) -> torch.Tensor:
    """A matrix as MXFP8 or NVFP4 has it, float64."""
    whole = 1.0 if global_scale is None else float(global_scale)
    return mma_dequantized(mma_quantized(x, kind, whole), whole)


def weight_of(spec: ExpertsSpec, operands: ExpertsOperands, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """An expert's weights, dequantised; name: w13 or w2."""
    weight, scale = getattr(operands, name)[expert], getattr(operands.scales, name)
    if spec.weight is None:
        return weight.to(dtype)
    parts = 2 if name == "w13" else 1
    if spec.weight_only:
        rows, columns = (
            (2 * spec.intermediate_size, spec.hidden_size) if parts == 2 else (spec.hidden_size, spec.intermediate_size)
        )
        return unpack_expert(weight, rows, columns, parts=parts, interleaved=spec.interleaved).to(dtype)
    assert scale is not None
    if spec.mma_scaled:
        global_scale = getattr(operands.scales, f"{name}_global")
        whole = 1.0 if global_scale is None else float(global_scale[expert])
        return (mma_weight(weight, scale[expert], spec.weight, parts, spec.interleaved) * whole).to(dtype)
    return dequantized(Quantized(weight, scale[expert], spec.weight), dtype)


def mma_weight(
    weight: torch.Tensor, scale: torch.Tensor, kind: ScaledFormat, parts: int, interleaved: bool
) -> torch.Tensor:
    """An expert's weights in MXFP8, MXFP4 or NVFP4, float64; arguments as those of `scales.row_scales`."""
    assert kind.block_columns is not None
    values = unpacked_e2m1(weight) if kind.packed > 1 else weight.double()
    rows, columns = values.shape
    by_block = row_scales(scale, rows, columns // kind.block_columns, parts=parts, interleaved=interleaved)
    return values * by_block.float().double().repeat_interleave(kind.block_columns, 1)


def bind(spec: ExpertsSpec, target: Target, workspace: Workspace) -> Launch:
    """The layer for any number of tokens."""
    return partial(experts, spec)


def experts(spec: ExpertsSpec, operands: ExpertsOperands) -> None:
    """Writes operands.out, in float32 arithmetic."""
    operands.out.copy_(exact(spec, operands, torch.float32))
