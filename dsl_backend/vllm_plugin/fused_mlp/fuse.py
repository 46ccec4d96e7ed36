# SPDX-License-Identifier: Apache-2.0
"""Fuses the gate/up projections and activations of models whose attention dsl serves.

A pair is fused after the model's weights are loaded, and before vLLM processes them: its projection gets another method
(`method.GatedLinearMethod`), and its activation returns its input. Weights and their loaders do not change.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dsl_backend import __version__, envs
from dsl_backend.linear import dispatch, tuned
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import explained
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, options
from dsl_backend.vllm_plugin.fused_mlp.find import gated_activations, match, reasons_against_engine

# vLLM's modules that load models, and the function that each of them calls once the weights are loaded.
LOADERS = (
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader",
)
LOADED = "process_weights_after_loading"
# For each model that dsl serves in this process, in order: name of a fused activation -> spec of its layer.
_fused: list[dict[str, LinearSpec]] = []


def install() -> None:
    """Make this process's model loaders fuse the models that they load. A second call changes nothing.

    Models that dsl does not serve, loaded later in the same process, are not changed.
    """
    for name in LOADERS:
        loader = sys.modules.get(name)
        if loader is None:
            continue
        function = getattr(loader, LOADED, None)
        if function is None:
            logger.warning("vLLM serves all linear layers: %s has no %s", name, LOADED)
        elif not hasattr(function, "wrapped_by_dsl"):
            setattr(loader, LOADED, fusing(function))


def fusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loader's function that fuses the model first."""

    @functools.wraps(function)
    def wrapper(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config

        fuse_model(model, get_current_vllm_config())
        return function(model, *args, **kwargs)

    wrapper.wrapped_by_dsl = True  # type: ignore[attr-defined]
    return wrapper


def fuse_model(model: nn.Module, vllm_config: Any) -> None:
    """Fuse every pair of a model that can be fused; log how many, and why others are not."""
    if not options.serves_attention(vllm_config):
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_engine = reasons_against_engine(vllm_config)
    owners = Counter(id(child) for module in model.modules() for child in module.children())
    served: dict[str, LinearSpec] = {}
    left: Counter[str] = Counter()
    for name, parent, activation in gated_activations(model):
        found = against_engine or match(parent, activation, owners, target)
        if isinstance(found, str):
            left[found] += 1
            continue
        projection, spec = found
        replace(parent, projection, activation, spec)
        served[name] = spec
    _fused.append(served)
    ahead.compile_linear(vllm_config, served.values())
    report(Counter(served.values()), left, target)


def replace(parent: nn.Module, projection: str, activation: str, spec: LinearSpec) -> None:
    """Replace the method of a module's projection, and the activation behind it."""
    from dsl_backend.vllm_plugin.fused_mlp.method import FusedActivation, GatedLinearMethod

    layer: Any = getattr(parent, projection)
    theirs = getattr(parent, activation)
    layer.quant_method = GatedLinearMethod(spec, theirs)
    setattr(parent, activation, FusedActivation(theirs, spec.n))


def report(served: Counter[LinearSpec], left: Counter[str], target: Target) -> None:
    """Log what was fused and what was not: one line for each kind of layer, and one for each reason."""
    for spec, count in served.items():
        by = explained([dispatch.judge(spec, target)], [dispatch.choose(spec, target).title])
        logger.info("dsl serves %d gated linear layers, %s, on %s: by %s", count, spec, target.arch, by)
        slower = [] if spec.batch_invariant else tuned.unfused(spec.n, spec.k, spec.dtypes.x, target)
        for rows in slower:
            limits = (rows.least_rows, rows.most_rows)
            logger.info("vLLM serves these linear layers for %d to %d rows: it was measured to be faster", *limits)
    for reason, count in left.items():
        logger.info("vLLM serves %d gated linear layers: %s", count, reason)
    if not served and not left:
        logger.info("vLLM serves all linear layers: the model has no gated activation")


def extend_compilation_keys() -> None:
    """Add the fused layers to the keys of vLLM's cached compiled graphs. A second call changes nothing.

    A graph that was compiled without fused layers is then not loaded for a model with them, nor the reverse.
    """
    from vllm import envs as theirs

    theirs.environment_variables[envs.LINEAR.name] = compilation_key


def compilation_key() -> str:
    """The version of this package, and the fused layers of each model of this process."""
    models = ["; ".join(f"{name}: {spec}" for name, spec in served.items()) for served in _fused]
    return " | ".join([__version__, *models])


def fused_specs() -> set[LinearSpec]:
    """All kinds of layers that are fused in this process."""
    return {spec for served in _fused for spec in served.values()}
