# SPDX-License-Identifier: Apache-2.0
"""Routed experts as an operator, one node for torch.compile: `torch.ops.dsl_backend.experts`.

Everything about the layer is read off its tensors: one operator serves all layers of all models, and nothing of a call
is kept but the plan of its layer.
"""

from functools import cache
from typing import NamedTuple

import torch

from dsl_backend.checks import require, short
from dsl_backend.experts import api
from dsl_backend.experts.args import ExpertsScales
from dsl_backend.experts.plan import ExpertsPlan
from dsl_backend.experts.spec import ACTIVATIONS_OF, ExpertsSpec, RouterWeights
from dsl_backend.gemm.activation import Activation, decoded, encoded
from dsl_backend.quant.format import BLOCK_SCALED, MXFP4, MXFP4_TILED, MXFP8, NVFP4, ROW_SCALED, ScaledFormat
from dsl_backend.runtime.op import register_op
from dsl_backend.runtime.workspace import current_stream, workspace_of

# Behind an activation's name where gate and up rows of w13 alternate.
INTERLEAVED = " interleaved"
# Formats of weights with float32 scales, by the dimensions of w13's; and those whose scales are factors of products, by
# the dtypes of weights and scales.
FORMATS = {2: ROW_SCALED, 3: BLOCK_SCALED}
FACTORS = {(kind.values, kind.scales): kind for kind in (MXFP8, MXFP4, NVFP4)}


def named(activation: Activation, interleaved: bool) -> tuple[str, list[float]]:
    """An activation and the order of w13's rows in types that an operator's schema allows; `activation_of` inverts."""
    name, parameters = encoded(activation)
    return name + INTERLEAVED * interleaved, parameters


def activation_of(name: str, parameters: list[float]) -> tuple[Activation, bool]:
    activation = decoded(name.removesuffix(INTERLEAVED), parameters)
    assert activation is not None
    return activation, name.endswith(INTERLEAVED)


class Layer(NamedTuple):
    """What tensors and arguments of a call say of its layer, as `ExpertsSpec` has it: cheap to make and to look up."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    topk: int
    dtype: torch.dtype
    activation: str
    parameters: tuple[float, ...]
    w13_bias: bool
    w2_bias: bool
    router_weights: str
    global_experts: int | None
    ids_dtype: torch.dtype
    weight: ScaledFormat | None
    x: ScaledFormat | None
    shared_experts: int = 0
    shared_weight: float = 1.0
    kernel: str | None = None


@cache
def plan_of(layer: Layer, device: torch.device, stream: int) -> ExpertsPlan:
    """The plan of a layer on a stream, as `current_stream` names it. Layers of one stream share its workspace."""
    facts = layer._asdict()
    activation, interleaved = activation_of(facts.pop("activation"), list(facts.pop("parameters")))
    facts["router_weights"] = RouterWeights(layer.router_weights)
    kernel = facts.pop("kernel")
    spec = ExpertsSpec(activation=activation, interleaved=interleaved, **facts)
    return api.plan(spec, device, workspace=workspace_of(device, stream), kernel=kernel)


def experts(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    routing: list[torch.Tensor | None],
    biases: list[torch.Tensor | None],
    scales: list[torch.Tensor | None],
    activation: str,
    parameters: list[float],
    router_weights: str,
    shared_weight: float = 1.0,
    kernel: str | None = None,
    intermediate_size: int | None = None,
) -> None:
    """Writes out; operands as `ExpertsOperands` has them.

    Args:
        weights: w13 and w2, then w13 and w2 of shared experts where there are any.
        routing: topk_weights, topk_ids and expert_map.
        biases: of w13 and w2.
        scales: of w13, w2 and x, and those of whole matrices, as `ExpertsScales` has them.
        activation, parameters: as `named` makes them.
        router_weights: where they are multiplied in, the value of one of `RouterWeights`.
        shared_weight: what shared experts' results are multiplied with.
        kernel: a name from the dispatch table; by default the best that serves.
        intermediate_size: of weights in tiles, whose shapes do not say it; None of all others.

    Raises:
        InvalidInput: an argument does not fit.
        Unsupported: no kernel serves the layer.
    """
    (w13, w2, *shared), (topk_weights, topk_ids, expert_map), (w13_bias, w2_bias) = weights, routing, biases
    given = ExpertsScales(*scales)
    assert topk_ids is not None
    weight = MXFP4_TILED if intermediate_size is not None else None
    if given.w13 is not None:
        weight = format_of(w13, given.w13)
    layer = Layer(
        num_experts=w13.shape[0],
        hidden_size=x.shape[-1],
        intermediate_size=intermediate_size or w2.shape[-1] * (1 if weight is None else weight.packed),
        topk=topk_ids.shape[-1],
        dtype=out.dtype,
        activation=activation,
        parameters=tuple(parameters),
        w13_bias=w13_bias is not None,
        w2_bias=w2_bias is not None,
        router_weights=router_weights,
        global_experts=None if expert_map is None else expert_map.shape[0],
        ids_dtype=topk_ids.dtype,
        weight=weight,
        x=None if given.x is None or weight is None else ACTIVATIONS_OF[weight],
        shared_experts=shared_of(shared[1], w2) if shared else 0,
        shared_weight=shared_weight,
        kernel=kernel,
    )
    plan = plan_of(layer, x.device, current_stream(x.device))
    api.run(
        plan,
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        expert_map=expert_map,
        out=out,
        scales=given,
        **dict(zip(("shared_w13", "shared_w2"), shared, strict=False)),
    )


def shared_of(shared_w2: torch.Tensor, w2: torch.Tensor) -> int:
    """How many shared experts there are: they are as wide as routed ones."""
    columns, width = shared_w2.shape[-1], w2.shape[-1]
    require(
        columns > 0 and columns % width == 0,
        f"shared_w2 has {columns} columns: a multiple of the {width} of an expert is needed",
    )
    return columns // width


def format_of(w13: torch.Tensor, w13_scale: torch.Tensor) -> ScaledFormat:
    """The format of weights whose scales are float32 [E, 2 I] or [E, 2 I / 128, H / 128], or factors of products."""
    if w13_scale.dtype != torch.float32:
        dtypes = (w13.dtype, w13_scale.dtype)
        known = ", ".join(f"{short(values)} with {short(scales)}" for values, scales in FACTORS)
        require(
            dtypes in FACTORS,
            f"w13 is {short(dtypes[0])} with scales in {short(dtypes[1])}: scales in float32, or {known} are needed",
        )
        return FACTORS[dtypes]
    require(
        w13_scale.dim() in FORMATS,
        f"w13_scale has {w13_scale.dim()} dimensions: 2 (channels) or 3 (blocks) are needed",
    )
    return FORMATS[w13_scale.dim()]


def experts_fake(*_: object) -> None:
    """Nothing is made."""


EXPERTS = register_op("experts", experts, fake=experts_fake, mutates=("out",))
