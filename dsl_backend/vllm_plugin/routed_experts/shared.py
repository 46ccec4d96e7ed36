# SPDX-License-Identifier: Apache-2.0
"""Shared experts that the kernels of routed experts compute too, as further entries of their list of experts.

vLLM runs shared experts as an MLP beside the routed ones, on a second stream where there are few tokens, and adds both
results up. An MLP that is taken is not run any more. Its parameters stay where they are, and are read at each call.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.experts import dispatch
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin.fused_mlp.method import activation_of
from dsl_backend.vllm_plugin.routed_experts.find import Service
from dsl_backend.vllm_plugin.routed_experts.kernels import DSLExperts, SharedDSLExperts
from dsl_backend.vllm_plugin.routed_experts.method import AppliedByExperts


def runners(model: nn.Module) -> dict[int, Any]:
    """What runs routed experts and shared ones: id of a layer of routed experts -> vLLM's runner of both."""
    return {
        id(module.routed_experts): module
        for module in model.modules()
        if hasattr(module, "routed_experts") and getattr(module, "_shared_experts", None) is not None
    }


def parts_of(mlp: nn.Module) -> tuple[str, str, str] | str:
    """Names of an MLP's gate and up projection, its activation and its down projection; or why it is no plain MLP."""
    children: dict[str, Any] = dict(mlp.named_children())
    gates = [name for name, child in children.items() if type(child) is MergedColumnParallelLinear]
    downs = [name for name, child in children.items() if type(child) is RowParallelLinear]
    activations = [name for name in children if name not in (*gates, *downs)]
    if not len(gates) == len(activations) == len(downs) == 1:
        return f"{type(mlp).__name__} is not a gate and up projection, an activation and a down projection"
    names = (gates[0], activations[0], downs[0])
    if any("forward" in vars(one) for one in (mlp, *children.values())) or not is_plain(mlp, names):
        return f"{type(mlp).__name__} does more than a product, an activation and a product"
    return names


def is_plain(mlp: Any, names: tuple[str, str, str]) -> bool:
    """Whether `forward` comes to these three modules, one after the other: it is followed with placeholders."""
    x, both, hidden, out = (object() for _ in range(4))
    gate, activation, down = names
    answers = {
        gate: answering(x, (both, None)),
        activation: answering(both, hidden),
        down: answering(hidden, (out, None)),
    }
    try:
        return bool(type(mlp).forward(Followed(mlp, answers), x) is out)
    except Exception:  # whatever it does with a placeholder
        return False


def answering(given: object, answer: object) -> Callable[[object], object]:
    """A module that is called with one placeholder and returns others."""

    def module(value: object) -> object:
        if value is not given:
            raise TypeError("called with another value")
        return answer

    return module


class Followed:
    """In the place of an MLP whose modules answer with placeholders."""

    def __init__(self, mlp: Any, answers: dict[str, Callable[[object], object]]) -> None:
        self._mlp, self._answers = mlp, answers

    def __getattr__(self, name: str) -> Any:
        return self._answers[name] if name in self._answers else getattr(self._mlp, name)


def judge(runner: Any, service: Service, target: Target) -> Service | str:
    """How a layer is served with its shared experts, or why these stay vLLM's."""
    try:
        return judged(runner, service, target)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    except AttributeError as error:  # a version of vLLM whose layers are others than those that are known
        return f"vLLM's layer is not as it was expected: {error}"


def judged(runner: Any, service: Service, target: Target) -> Service | str:
    """As `judge`. Raises InvalidInput, Unsupported: no kernel has such a layer."""
    mlp: Any = runner._shared_experts._layer
    if service.kernels is not DSLExperts:
        return f"{service.kernels.__name__} has none"
    if reason := reason_against_runner(runner, service.spec):
        return reason
    names = parts_of(mlp)
    if isinstance(names, str):
        return names
    gate, activation, down = (getattr(mlp, name) for name in names)
    for layer in (gate, down):
        if type(layer.quant_method) is not UnquantizedLinearMethod or layer.bias is not None:
            return "a shared expert is quantised, has a bias or is served otherwise"
    if not down.input_is_parallel or (down.reduce_results and down.tp_size > 1):
        return "the ranks' shares of shared experts are not added up with those of routed ones"
    if activation_of(activation) != (service.spec.activation, False):
        return f"{type(activation).__name__} is not the activation of the routed experts"
    count = shared_of(service.spec, gate.weight, down.weight)
    scale = float(runner.routed_scaling_factor)
    spec = replace(service.spec, shared_experts=count, shared_weight=1.0 / scale)
    dispatch.choose(spec, target, service.kernel)
    return Service(spec, SharedDSLExperts, kernel=service.kernel)


def reason_against_runner(runner: Any, spec: ExpertsSpec) -> str:
    """Why what a runner does beside both kinds of experts keeps them apart; empty where it does not."""
    if not callable(runner._select_forward) or not callable(runner._forward_entry):
        return "vLLM's runner calls shared experts by another way"
    for name in ("shared_expert_gate", "routed_input_transform", "routed_output_transform"):
        if getattr(runner, name) is not None:
            return f"the model has a {name} between routed and shared experts"
    parallel = runner.moe_config.moe_parallel_config
    others = {"expert parallelism": parallel.use_ep, "data parallelism": parallel.dp_size > 1}
    others["sequence parallelism"] = bool(runner.moe_config.is_sequence_parallel)
    others["prefill context parallelism"] = getattr(parallel, "pcp_size", 1) > 1
    if found := [name for name, has in others.items() if has]:
        return f"{', '.join(found)} gives routed and shared experts other tokens"
    if spec.dtype == torch.float16 and runner.routed_scaling_factor != 1:
        return "in float16 vLLM divides what shared experts return, and leaves the routed ones'"
    return ""


def shared_of(spec: ExpertsSpec, gate: torch.Tensor, down: torch.Tensor) -> int:
    """How many shared experts of the routed ones' width there are. Raises InvalidInput: another width or layout."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    count = down.shape[1] // width
    for name, tensor, shape in (
        ("gate and up projection", gate, (2 * count * width, hidden)),
        ("down projection", down, (hidden, count * width)),
    ):
        if tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.dtype != spec.dtype or not count:
            raise InvalidInput(
                f"the {name} of shared experts is {tensor.dtype} of shape {tuple(tensor.shape)}: a whole number of "
                f"experts of {hidden} to {width} in {spec.dtype} is needed"
            )
    return count


def take(runner: Any, spec: ExpertsSpec) -> type[SharedDSLExperts]:
    """Have a runner leave its shared experts to the class that is returned, of one layer's kernels."""
    mlp = runner._shared_experts._layer
    names = parts_of(mlp)
    assert not isinstance(names, str)
    gate, activation, down = names
    for name in (gate, down):
        getattr(mlp, name).quant_method = AppliedByExperts()
    # So that it is not fused with the projection.
    setattr(mlp, activation, nn.Identity())
    runner._shared_experts = None
    runner._forward_entry = runner._select_forward()
    facts = {
        "gate": staticmethod(lambda: getattr(mlp, gate).weight),
        "down": staticmethod(lambda: getattr(mlp, down).weight),
        "shared_weight": spec.shared_weight,
    }
    return type(SharedDSLExperts.__name__, (SharedDSLExperts,), facts)
