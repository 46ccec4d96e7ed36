# SPDX-License-Identifier: Apache-2.0
"""Routed experts as an operator, one node for torch.compile: `torch.ops.dsl_backend.experts`.

Everything about the layer is read off its tensors: one operator serves all layers of all models, and nothing of a call
is kept but the plan of its layer.
"""

from functools import cache
from typing import NamedTuple

import torch

from dsl_backend.experts import api
from dsl_backend.experts.plan import ExpertsPlan
from dsl_backend.experts.spec import ExpertsSpec, RouterWeights
from dsl_backend.gemm.activation import Activation, decoded, encoded
from dsl_backend.runtime.op import register_op
from dsl_backend.runtime.workspace import current_stream, workspace_of

# Behind an activation's name where gate and up rows of w13 alternate.
INTERLEAVED = " interleaved"


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


@cache
def plan_of(layer: Layer, device: torch.device, stream: int) -> ExpertsPlan:
    """The plan of a layer on a stream, as `current_stream` names it. Layers of one stream share its workspace."""
    facts = layer._asdict()
    activation, interleaved = activation_of(facts.pop("activation"), list(facts.pop("parameters")))
    facts["router_weights"] = RouterWeights(layer.router_weights)
    spec = ExpertsSpec(activation=activation, interleaved=interleaved, **facts)
    return api.plan(spec, device, workspace=workspace_of(device, stream))


def experts(
    out: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    activation: str,
    parameters: list[float],
    router_weights: str,
) -> None:
    """Writes out; operands as `ExpertsOperands` has them.

    Args:
        activation, parameters: as `named` makes them.
        router_weights: a value of RouterWeights.

    Raises:
        InvalidInput: an argument does not fit.
        Unsupported: no kernel serves the layer.
    """
    layer = Layer(
        num_experts=w13.shape[0],
        hidden_size=x.shape[-1],
        intermediate_size=w2.shape[-1],
        topk=topk_ids.shape[-1],
        dtype=x.dtype,
        activation=activation,
        parameters=tuple(parameters),
        w13_bias=w13_bias is not None,
        w2_bias=w2_bias is not None,
        router_weights=router_weights,
        global_experts=None if expert_map is None else expert_map.shape[0],
        ids_dtype=topk_ids.dtype,
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
    )


def experts_fake(*_: object) -> None:
    """Nothing is made."""


EXPERTS = register_op("experts", experts, fake=experts_fake, mutates=("out",))
