# SPDX-License-Identifier: Apache-2.0
"""Has the routed experts of models whose attention dsl serves use this package's kernels.

vLLM makes a layer's kernels once its weights are loaded, of a class that it chose when the layer was made. Before that,
the class is replaced. Preparation and exchange of tokens, shared experts, rebalancing and reloading stay vLLM's.
"""

from collections import Counter
from typing import Any

import torch
from torch import nn

from dsl_backend.experts import dispatch
from dsl_backend.experts.spec import ExpertsSpec
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import explained
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, options
from dsl_backend.vllm_plugin.options import ServedBy
from dsl_backend.vllm_plugin.routed_experts.find import (
    BACKENDS,
    Service,
    backend_name,
    judge,
    reasons_against_engine,
    routed_experts,
)
from dsl_backend.vllm_plugin.served_layers import key_of, report_left, serve_each

# vLLM's backends that leave weights as they are loaded: of 16 bits, and of 8 bits.
LEAVE_WEIGHTS = dict(zip(BACKENDS, (("TRITON", "BATCHED_TRITON", "CPU"), ("TRITON",)), strict=True))
# For each model that dsl serves in this process, in order: name of a layer -> how it is served.
_served: list[dict[str, Service]] = []


def serve_experts(model: nn.Module, vllm_config: Any) -> None:
    """Replace the kernels of every layer of a model that can be served; log how many, and why others are not."""
    if not options.serves_attention(vllm_config):
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_engine = reasons_against_engine(vllm_config)
    runners, beside = runners_of(model, vllm_config), Counter[str]()

    def how(layer: Any) -> Service | str:
        found = against_engine or judge(layer, vllm_config, target)
        if isinstance(found, str) or id(layer) not in runners:
            return found
        return with_shared(runners[id(layer)], found, target, beside)

    def replace_layer(layer: Any, service: Service) -> None:
        replace(layer, service, kernels_of(runners, layer, service))

    served, left = serve_each(routed_experts(model), how, replace_layer)
    if served or left:
        _served.append(served)
        ahead.compile_experts(vllm_config, {(service.spec, service.kernel) for service in served.values()})
        report(Counter(served.values()), left, target)
        report_left("shared experts", beside)


def runners_of(model: nn.Module, vllm_config: Any) -> dict[int, Any]:
    """What runs shared experts that dsl is asked to serve: id of a layer of routed experts -> vLLM's runner."""
    if options.of(vllm_config).shared_experts is not ServedBy.DSL:
        return {}
    from dsl_backend.vllm_plugin.routed_experts.shared import runners

    return runners(model)


def with_shared(runner: Any, service: Service, target: Target, beside: Counter[str]) -> Service:
    """The service of a layer and of its shared experts; without these, and counted, where they stay vLLM's."""
    from dsl_backend.vllm_plugin.routed_experts import shared

    found = shared.judge(runner, service, target)
    if isinstance(found, str):
        beside[found] += 1
        return service
    return found


def kernels_of(runners: dict[int, Any], layer: Any, service: Service) -> type:
    """The class of a layer's kernels. Shared experts that it serves are taken from their runner."""
    kernels = service.kernels
    if service.spec.shared_experts:
        from dsl_backend.vllm_plugin.routed_experts.shared import take

        kernels = take(runners[id(layer)], service.spec)
    return kernels if service.kernel is None else type(kernels.__name__, (kernels,), {"kernel": service.kernel})


def replace(layer: Any, service: Service, kernels: type) -> None:
    """Have vLLM make a layer's kernels of this class, and leave its weights as they are loaded.

    Weights and scales in MXFP8, MXFP4 and NVFP4 are laid out for this package's kernels instead.
    """
    method = layer.quant_method
    method.experts_cls = kernels
    if service.spec.mma_scaled or service.spec.weight_only:
        from dsl_backend.vllm_plugin.routed_experts.block_scaled import take_over

        take_over(layer, service.spec)
        return
    name = backend_name(method)
    backend = getattr(method, name)
    if backend.name not in LEAVE_WEIGHTS[name]:
        setattr(method, name, type(backend).TRITON)


def report(served: Counter[Service], left: Counter[str], target: Target) -> None:
    """Log what is served and what is not: one line for each kind of layer, and one for each reason."""
    for service, count in served.items():
        spec = service.spec
        title = dispatch.choose(spec, target, service.kernel).title
        by = title if service.kernel else explained([dispatch.judge(spec, target)], [title])
        logger.info("dsl serves %d layers of routed experts, %s, on %s: by %s", count, spec, target.arch, by)
        if service.ranges:
            tokens = ", ".join(f"{one.least_rows} to {one.most_rows}" for one in service.ranges)
            logger.info("dsl's serve routed experts for %s tokens, vLLM's Triton kernels do for others", tokens)
    report_left("layers of routed experts", left)


def served_layers() -> set[tuple[ExpertsSpec, str | None]]:
    """All kinds of layers that are served in this process, each with the kernel that is named."""
    return {(service.spec, service.kernel) for served in _served for service in served.values()}


def compilation_key() -> str:
    """The served layers of each model of this process."""
    return key_of(
        {name: f"{one.spec} {one.kernels.__name__} {one.kernel or ''}".rstrip() for name, one in served.items()}
        for served in _served
    )
