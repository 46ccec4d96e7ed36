# SPDX-License-Identifier: Apache-2.0
"""Fuses the gate/up projections and activations of models whose attention dsl serves.

A pair is fused after the model's weights are loaded, and before vLLM processes them: its projection gets another method
(`method.GatedLinearMethod`), and its activation returns its input. Weights and their loaders do not change.
"""

from collections import Counter
from typing import Any

import torch
from torch import nn

from dsl_backend.linear import dispatch, tuned
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import explained
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, options
from dsl_backend.vllm_plugin.fused_mlp.find import gated_activations, match, reasons_against_engine
from dsl_backend.vllm_plugin.served_layers import key_of, report_left, serve_each

# For each model that dsl serves in this process, in order: name of a fused activation -> spec of its layer.
_fused: list[dict[str, LinearSpec]] = []


def fuse_model(model: nn.Module, vllm_config: Any) -> None:
    """Fuse every pair of a model that can be fused; log how many, and why others are not."""
    if not options.serves_attention(vllm_config):
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_engine = reasons_against_engine(vllm_config)
    owners = Counter(id(child) for module in model.modules() for child in module.children())
    found, left = serve_each(
        ((name, (parent, activation)) for name, parent, activation in gated_activations(model)),
        lambda pair: against_engine or match(*pair, owners, target),
        lambda pair, how: replace(*pair, *how),
    )
    served = {name: spec for name, (_, spec) in found.items()}
    _fused.append(served)
    ahead.compile_linear(vllm_config, served.values())
    report(Counter(served.values()), left, target)


def replace(parent: nn.Module, activation: str, projection: str, spec: LinearSpec) -> None:
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
    report_left("gated linear layers", left)
    if not served and not left:
        logger.info("vLLM serves all linear layers: the model has no gated activation")


def compilation_key() -> str:
    """The fused layers of each model of this process."""
    return key_of(_fused)


def fused_specs() -> set[LinearSpec]:
    """All kinds of layers that are fused in this process."""
    return {spec for served in _fused for spec in served.values()}
