# SPDX-License-Identifier: Apache-2.0
"""Changes the models that vLLM loads, after their weights are loaded and before vLLM processes them."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from dsl_backend import __version__, envs
from dsl_backend.log import logger
from dsl_backend.vllm_plugin.fused_mlp import fuse
from dsl_backend.vllm_plugin.norms import serve as serve_norms
from dsl_backend.vllm_plugin.projections import serve as serve_projections
from dsl_backend.vllm_plugin.rope import serve as serve_rope
from dsl_backend.vllm_plugin.routed_experts import serve
from dsl_backend.vllm_plugin.scaled_linears import serve as serve_scaled_linears
from dsl_backend.vllm_plugin.weight_only_linears import serve as serve_weight_only_linears

# vLLM's modules that load models, and the function that each of them calls once the weights are loaded.
LOADERS = (
    "vllm.model_executor.model_loader.base_loader",
    "vllm.model_executor.model_loader.weight_cache.ipc_loader",
)
LOADED = "process_weights_after_loading"


def install() -> None:
    """Make this process's model loaders change the models that they load. A second call changes nothing.

    Models that dsl does not serve, loaded later in the same process, are not changed.
    """
    for name in LOADERS:
        loader = sys.modules.get(name)
        if loader is None:
            continue
        function = getattr(loader, LOADED, None)
        if function is None:
            logger.warning("vLLM serves all linear layers and routed experts: %s has no %s", name, LOADED)
        elif not hasattr(function, "wrapped_by_dsl"):
            setattr(loader, LOADED, changing(function))


def changing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loader's function that changes the model first."""

    @functools.wraps(function)
    def wrapper(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
        # First, because it takes activations away from those that are fused with 16-bit projections.
        serve_scaled_linears.serve_scaled_linears(model, vllm_config)
        serve_weight_only_linears.serve_weight_only_linears(model, vllm_config)
        # Before their projections are fused or served: it takes shared experts away.
        serve.serve_experts(model, vllm_config)
        fuse.fuse_model(model, vllm_config)
        serve_projections.serve_projections(model, vllm_config)
        serve_norms.serve_norms(model, vllm_config)
        serve_rope.serve_rope(model, vllm_config)
        return function(model, *args, **kwargs)

    wrapper.wrapped_by_dsl = True  # type: ignore[attr-defined]
    return wrapper


def extend_compilation_keys() -> None:
    """Add what is changed in models to the keys of vLLM's cached compiled graphs. A second call changes nothing.

    A graph that was compiled without fused layers is then not loaded for a model with them, nor the reverse.
    """
    from vllm import envs as theirs

    theirs.environment_variables[envs.LINEAR.name] = compilation_key


def compilation_key() -> str:
    """The version of this package, and the changed layers of each model of this process."""
    made = (serve_scaled_linears, serve_weight_only_linears, fuse, serve_projections, serve, serve_norms, serve_rope)
    return " | ".join((__version__, *(one.compilation_key() for one in made)))
