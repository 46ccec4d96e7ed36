# SPDX-License-Identifier: Apache-2.0
"""The providers of weight-only layers: this package, vLLM's Marlin and Machete, and the product of 16-bit weights."""

import importlib
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from dsl_backend.linear.weight_only import api, dispatch
from dsl_backend.providers import Run, provider
from dsl_backend.quant.weight_only import dequantized
from dsl_backend.runtime import target as targets
from torch import nn

from ..columns import missing, reasons
from .problems import Inputs, Layer, Problem

# vLLM's kernels of weight-only layers: name -> module and class.
KERNELS = "vllm.model_executor.kernels.linear.mixed_precision"
THEIRS = {"Marlin": ("marlin", "MarlinLinearKernel"), "Machete": ("machete", "MacheteLinearKernel")}
WEIGHT, SCALE = "weight_packed", "weight_scale"


def objections(problem: Problem, kernel: str | None = None) -> list[str]:
    return reasons(lambda: dispatch.choose(problem.spec, targets.detect(), kernel))


def ours(problem: Problem, inputs: Inputs, kernel: str | None = None) -> Run:
    """`api.weight_only_linear`, with a kernel from the dispatch table; by default the one that dispatch chooses.

    Weights are packed before the timing.
    """
    packed = [api.pack(layer.values, layer.scale, None, problem.kind) for layer in inputs.layers]

    def run(index: int) -> torch.Tensor:
        return api.weight_only_linear(
            inputs.layers[index].x, packed[index], n=problem.n, kind=problem.kind, kernel=kernel
        )

    return run


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Words of neighbouring columns of k, as GPTQ has them: uint8 [n, k] to int32 [k * bits / 32, n]."""
    each = 32 // bits
    parts = values.t().unflatten(0, (-1, each))
    made = torch.zeros(parts.shape[0], parts.shape[2], dtype=torch.int32, device=values.device)
    for place in range(each):
        made |= parts[:, place].to(torch.int32) << (bits * place)
    return made


def parameter(data: torch.Tensor, **facts: Any) -> Any:
    """A parameter as vLLM's layers have it when a checkpoint is loaded, outside of a group of ranks."""
    from vllm.model_executor.parameter import BasevLLMParameter

    class Loaded(BasevLLMParameter):
        def __init__(self, data: torch.Tensor) -> None:
            self._weight_loader = None

    made = Loaded(data)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


def config_of(problem: Problem) -> Any:
    """VLLM's configuration of the layer."""
    from vllm.scalar_type import scalar_types

    config = importlib.import_module(f"{KERNELS}.MPLinearKernel").MPLinearLayerConfig
    shape = (problem.k, problem.n)
    facts = {
        "full_weight_shape": shape,
        "partition_weight_shape": shape,
        "weight_type": scalar_types.uint4b8 if problem.bits == 4 else scalar_types.uint8b128,
        "act_type": problem.dtype,
        "group_size": problem.kind.group,
        "zero_points": False,
        "has_g_idx": False,
    }
    known = {one.name for one in fields(config)}
    return config(**{name: value for name, value in facts.items() if name in known})


def kernel_of(name: str) -> Any:
    """The class of one of vLLM's kernels."""
    module, kind = THEIRS[name]
    return getattr(importlib.import_module(f"{KERNELS}.{module}"), kind)


def vllm_objections(problem: Problem, name: str) -> list[str]:
    if found := missing("vllm"):
        return found
    try:
        serves, why = kernel_of(name).can_implement(config_of(problem))
    except ImportError as error:
        return [f"this vLLM has no {name}: {error}"]
    return [] if serves else [str(why)]


def layer_of(problem: Problem, given: Layer) -> nn.Module:
    """A module with the parameters of a loaded layer."""
    layer = nn.Module()
    packed = parameter(words(given.values, problem.bits), input_dim=0, output_dim=1, packed_dim=0)
    layer.register_parameter(WEIGHT, packed)
    scale = given.scale.t().contiguous()
    layer.register_parameter(SCALE, parameter(scale, input_dim=0, output_dim=1))
    return layer


def vllm_kernel(problem: Problem, inputs: Inputs, name: str) -> Run:
    """One of vLLM's kernels, with weights that it repacks as when a model is loaded."""
    kernels: list[Callable[[torch.Tensor], torch.Tensor]] = []
    for given in inputs.layers:
        layer, kernel = layer_of(problem, given), kernel_of(name)(config_of(problem), WEIGHT, SCALE)
        kernel.process_weights_after_loading(layer)
        kernels.append(partial(kernel.apply_weights, layer))
    return lambda index: kernels[index](inputs.layers[index].x)


for column in THEIRS:
    provider(
        "weight-only-linear",
        name=column,
        objections=partial(vllm_objections, name=column),
        package="vllm",
    )(partial(vllm_kernel, name=column))


@provider("weight-only-linear", name="bfloat16", package="torch")
def cublas(problem: Problem, inputs: Inputs) -> Run:
    """CuBLAS's product of the same weights in 16 bits, which reads more bytes."""
    weights = [
        dequantized(layer.values, layer.scale, None, problem.kind, torch.float32).to(problem.dtype).t()
        for layer in inputs.layers
    ]
    return lambda index: torch.mm(inputs.layers[index].x, weights[index])
