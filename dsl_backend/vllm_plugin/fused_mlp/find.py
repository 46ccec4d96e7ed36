# SPDX-License-Identifier: Apache-2.0
"""Finds the gate/up projections of a model that can be fused with the activation behind them."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from dsl_backend import envs
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.gemm.spec import Dtypes
from dsl_backend.linear import dispatch
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin.fused_mlp import forward_source

# vLLM's compiler passes that put a projection's communication into its product.
PASSES = ("enable_sp", "fuse_gemm_comms")


def sequence_parallelism(vllm_config: Any) -> str:
    """Why vLLM's passes need its own products; empty where they do not."""
    passes = [name for name in PASSES if getattr(vllm_config.compilation_config.pass_config, name, False)]
    if vllm_config.parallel_config.tensor_parallel_size == 1 or not passes:
        return ""
    return f"sequence parallelism ({', '.join(passes)}) communicates within vLLM's own products"


def reasons_against_engine(vllm_config: Any) -> str:
    """Why no layer of an engine is fused, whatever its model; empty where nothing is against it."""
    reasons = []
    if not envs.LINEAR.read():
        reasons.append(f"{envs.LINEAR.name} is off")
    if vllm_config.lora_config is not None:
        reasons.append("LoRA (lora_config) adds to what a projection returns, before the activation")
    return "; ".join(filter(None, (*reasons, sequence_parallelism(vllm_config))))


def gated_activations(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each gated activation of a model: (its full name, the module that has it, its attribute there)."""
    from vllm.model_executor.layers import activation as activations

    # SiluAndMul, MulAndSilu, SwigluOAIAndMul, ...: all that take a gate and an up half have this in their names.
    kinds = tuple(value for name, value in vars(activations).items() if "And" in name and isinstance(value, type))
    for name, parent in list(model.named_modules()):
        for attribute, child in list(parent.named_children()):
            if isinstance(child, kinds):
                yield f"{name}.{attribute}", parent, attribute


def match(parent: nn.Module, activation: str, owners: Counter[int], target: Target) -> tuple[str, LinearSpec] | str:
    """The projection that an activation can be fused with, and the spec of both; or why there is none.

    Args:
        activation: the name of its attribute.
        owners: id of a module -> number of modules that have it as a child.
    """
    from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, UnquantizedLinearMethod

    from dsl_backend.vllm_plugin.fused_mlp.method import activation_of

    children = dict(parent.named_children())
    projections = [name for name, child in children.items() if isinstance(child, MergedColumnParallelLinear)]
    if len(projections) != 1:
        return f"{type(parent).__name__} has {len(projections)} merged projections beside its activation: 1 is needed"
    (projection,) = projections
    layer: Any = children[projection]
    kind: Any = type(parent)
    reasons = []
    methods = {type(one.quant_method) for one in children.values() if isinstance(one, LinearBase)}
    if others := sorted(one.__name__ for one in methods if one is not UnquantizedLinearMethod):
        reasons.append(f"{kind.__name__} has a layer that is quantised or no plain product ({', '.join(others)})")
    if type(layer) is not MergedColumnParallelLinear:
        reasons.append(f"{type(layer).__name__} is not a known projection")
    reasons += against_gate(parent, projection, activation, owners, (parent, layer, children[activation]))
    if reasons:
        return "; ".join(reasons)
    try:
        known = activation_of(children[activation])
        if known is None:
            return f"{type(children[activation]).__name__} is not a known activation"
        spec = spec_of(layer, *known)
        dispatch.choose(spec, target)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return projection, spec


def spec_of(layer: Any, activation: Any, interleaved: bool) -> LinearSpec:
    """The spec of a projection and its activation, on this rank. Raises InvalidInput: no kernel has such a layer."""
    from vllm import envs as theirs

    rows, k = layer.weight.shape
    n = rows // 2
    return LinearSpec(
        n=n,
        k=k,
        dtypes=Dtypes.of(layer.weight.dtype),
        activation=activation,
        interleaved=interleaved,
        bias=layer.bias is not None,
        batch_invariant=bool(theirs.VLLM_BATCH_INVARIANT),
        vector=math.gcd(8, n, k),
    )


def against_gate(
    parent: nn.Module, projection: str, activation: str, owners: Counter[int], modules: Sequence[nn.Module]
) -> list[str]:
    """Why a gate and up projection cannot apply the activation behind it.

    Args:
        modules: those whose `forward` must be their class's.
    """
    layer: Any = getattr(parent, projection)
    kind: Any = type(parent)
    reasons = []
    if len(layer.output_sizes) != 2 or len(set(layer.output_sizes)) != 1:
        reasons.append(f"outputs of {layer.output_sizes} are not a gate and an up half")
    if layer.gather_output and layer.tp_size > 1:
        reasons.append("gather_output collects what the ranks' projections return")
    if layer.skip_bias_add:
        reasons.append("skip_bias_add leaves the bias to the model")
    if owners[id(layer)] != 1:
        reasons.append(f"{owners[id(layer)]} modules hold the projection")
    if replaced := [type(one).__name__ for one in modules if "forward" in vars(one)]:
        reasons.append(f"another forward was put into {', '.join(replaced)}")
    if between := forward_source.objection(kind, projection, activation):
        reasons.append(between)
    return reasons
