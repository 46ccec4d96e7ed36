# SPDX-License-Identifier: Apache-2.0
"""Where a model's attention is served by dsl, its gate and up projections and their activations become one kernel.

A pair is linked when the model's weights have been loaded, and before vLLM processes them: its projection gets another
method (`linked.GatedLinearMethod`) and its activation passes on what it is given. Weights and their loaders stay.
"""

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dsl_backend import __version__, envs
from dsl_backend.errors import InvalidInput, Unsupported
from dsl_backend.linear import dispatch
from dsl_backend.linear import tuned as winners
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import explained
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, forwards, options

# vLLM's modules that load models, and the function that each of them calls when a model's weights are there.
LOADERS = (
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader",
)
LOADED = "process_weights_after_loading"
THEIRS = "vLLM's own serve"

# vLLM's passes that take apart what a projection communicates.
PASSES = ("enable_sp", "fuse_gemm_comms")

# Of each model that dsl serves in this process, in order: the linked activations' names, and what the layers compute.
_linked: list[dict[str, LinearSpec]] = []


def install() -> None:
    """Let this process's model loaders link what they have loaded; again is no different.

    Models that dsl does not serve, loaded later in the same process, stay as they are.
    """
    for name in LOADERS:
        loader = sys.modules.get(name)
        if loader is None:
            continue
        function = getattr(loader, LOADED, None)
        if function is None:
            logger.warning("%s all linear layers: %s has no %s", THEIRS, name, LOADED)
        elif not hasattr(function, "wrapped_by_dsl"):
            setattr(loader, LOADED, linking(function))


def linking(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loader's function that links the model first."""

    @functools.wraps(function)
    def wrapper(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config

        link(model, get_current_vllm_config())
        return function(model, *args, **kwargs)

    wrapper.wrapped_by_dsl = True  # type: ignore[attr-defined]
    return wrapper


def link(model: nn.Module, vllm_config: Any) -> None:
    """Link every pair of a model that can be, and log how many, and why others were not."""
    if not options.serves_attention(vllm_config):
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_all = reasons_against_all(vllm_config)
    owners = Counter(id(child) for module in model.modules() for child in module.children())
    served: dict[str, LinearSpec] = {}
    left: Counter[str] = Counter()
    for name, parent, activation in gated(model):
        found = against_all or judge(parent, activation, owners, target)
        if isinstance(found, str):
            left[found] += 1
            continue
        projection, spec = found
        replace(parent, projection, activation, spec)
        served[name] = spec
    _linked.append(served)
    ahead.compile_linear(vllm_config, served.values())
    salt_compilations()
    report(Counter(served.values()), left, target)


def reasons_against_all(vllm_config: Any) -> str:
    """Why no layer of an engine is linked, whatever its model; empty where nothing is against it."""
    passes = [name for name in PASSES if getattr(vllm_config.compilation_config.pass_config, name, False)]
    reasons = []
    if not envs.LINEAR.read():
        reasons.append(f"{envs.LINEAR.name} is off")
    if vllm_config.lora_config is not None:
        reasons.append("LoRA (lora_config) adds to what a projection returns, before the activation")
    if vllm_config.parallel_config.tensor_parallel_size > 1 and passes:
        reasons.append(f"sequence parallelism ({', '.join(passes)}) communicates within vLLM's own products")
    return "; ".join(reasons)


def gated(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every gated activation of vLLM's in a model: its module's name, the module, the attribute."""
    from vllm.model_executor.layers import activation as activations

    # SiluAndMul, MulAndSilu, SwigluOAIAndMul, ... are all that work on a gate and an up half.
    kinds = tuple(value for name, value in vars(activations).items() if "And" in name and isinstance(value, type))
    for name, parent in list(model.named_modules()):
        for attribute, child in list(parent.named_children()):
            if isinstance(child, kinds):
                yield f"{name}.{attribute}", parent, attribute


def judge(parent: nn.Module, activation: str, owners: Counter[int], target: Target) -> tuple[str, LinearSpec] | str:
    """The projection that an activation can be linked with, and the layer that the two are; or why there is none.

    Args:
        activation: its attribute's name.
        owners: how many modules hold a module, by its id.
    """
    from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, UnquantizedLinearMethod

    from dsl_backend.vllm_plugin.linked import activation_of

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
        reasons.append(f"{kind.__name__} is quantised, or has no plain products ({', '.join(others)})")
    if type(layer) is not MergedColumnParallelLinear:
        reasons.append(f"{type(layer).__name__} is not a known projection")
    if len(layer.output_sizes) != 2 or len(set(layer.output_sizes)) != 1:
        reasons.append(f"outputs of {layer.output_sizes} are not a gate and an up half")
    if layer.gather_output and layer.tp_size > 1:
        reasons.append("gather_output collects what the ranks' projections return")
    if layer.skip_bias_add:
        reasons.append("skip_bias_add leaves the bias to the model")
    if owners[id(layer)] != 1:
        reasons.append(f"{owners[id(layer)]} modules hold the projection")
    if replaced := [type(one).__name__ for one in (parent, layer, children[activation]) if "forward" in vars(one)]:
        reasons.append(f"another forward was put into {', '.join(replaced)}")
    if between := forwards.objection(kind, projection, activation):
        reasons.append(between)
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
    """A projection with its activation, as far as this rank has it.

    Raises:
        InvalidInput: no kernel has its dtype or its size.
    """
    from vllm import envs as theirs

    rows, k = layer.weight.shape
    n = rows // 2
    return LinearSpec(
        n=n,
        k=k,
        dtype=layer.weight.dtype,
        activation=activation,
        interleaved=interleaved,
        bias=layer.bias is not None,
        batch_invariant=bool(theirs.VLLM_BATCH_INVARIANT),
        vector=math.gcd(8, n, k),
    )


def replace(parent: nn.Module, projection: str, activation: str, spec: LinearSpec) -> None:
    """Make a module's projection and its activation one layer."""
    from dsl_backend.vllm_plugin.linked import GatedLinearMethod, PassedOn

    layer: Any = getattr(parent, projection)
    theirs = getattr(parent, activation)
    layer.quant_method = GatedLinearMethod(spec, theirs)
    setattr(parent, activation, PassedOn(theirs, spec.n))


def report(served: Counter[LinearSpec], left: Counter[str], target: Target) -> None:
    """Log what was linked and what was not: a line for each kind of layer, and one for each reason."""
    for spec, count in served.items():
        by = explained([dispatch.judge(spec, target)], [dispatch.choose(spec, target).title])
        logger.info("dsl serves %d gated linear layers, %s, on %s: by %s", count, spec, target.arch, by)
        slower = [] if spec.batch_invariant else winners.unfused(spec.n, spec.k, spec.dtype, target)
        for rows in slower:
            limits = (rows.least_rows, rows.most_rows)
            logger.info("vLLM's own product serves these linear layers for %d to %d rows: measured", *limits)
    for reason, count in left.items():
        logger.info("%s %d gated linear layers: %s", THEIRS, count, reason)
    if not served and not left:
        logger.info("%s all linear layers: the model has no gated activation", THEIRS)


def salt_compilations() -> None:
    """Keep what is linked out of reach of graphs that vLLM compiled and cached without it, and the reverse.

    Their keys are made of vLLM's configuration and of what is registered here.
    """
    from vllm import envs as theirs

    theirs.environment_variables[envs.LINEAR.name] = salt


def salt() -> str:
    """What is linked in this process, by model, and by which version of this package."""
    models = ["; ".join(f"{name}: {spec}" for name, spec in served.items()) for served in _linked]
    return " | ".join([__version__, *models])


def linked_specs() -> set[LinearSpec]:
    """All kinds of layers that are linked in this process."""
    return {spec for served in _linked for spec in served.values()}
