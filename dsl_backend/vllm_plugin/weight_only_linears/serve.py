# SPDX-License-Identifier: Apache-2.0
"""Serves linear layers with weights of 4 or 8 bits of models whose attention dsl serves, where the user asks for it."""

from collections import Counter
from typing import Any

import torch
from torch import nn

from dsl_backend.gemm.weight_only import WeightOnlyGemmSpec
from dsl_backend.linear.weight_only import dispatch
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import explained
from dsl_backend.vllm_plugin import ahead, options
from dsl_backend.vllm_plugin.served_layers import key_of, report_left, serve_each
from dsl_backend.vllm_plugin.weight_only_linears.find import holder_of, judge, layers, reasons_against_engine

# For each model that dsl serves in this process, in order: name of a layer -> what it is.
_served: list[dict[str, WeightOnlyGemmSpec]] = []


def serve_weight_only_linears(model: nn.Module, vllm_config: Any) -> None:
    """Serve every layer of a model that can be served; log how many, and why others are not."""
    if not options.serves_attention(vllm_config):
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_engine = reasons_against_engine(vllm_config)
    served, left = serve_each(layers(model), lambda layer: against_engine or judge(layer, target), replace)
    _served.append(served)
    ahead.compile_weight_only_linears(vllm_config, served_layers())
    kinds = Counter((type(model.get_submodule(name)).__name__, spec) for name, spec in served.items())
    for (layer, spec), count in kinds.items():
        by = explained([dispatch.judge(spec, target)], [dispatch.choose(spec, target).title])
        what = f"W{spec.kind.bits}A16 linear layers ({layer})"
        logger.info("dsl serves %d %s, %s, on %s: by %s", count, what, spec, target.arch, by)
    report_left("linear layers with weights of few bits", left)


def replace(layer: Any, spec: WeightOnlyGemmSpec) -> None:
    """Replace the kernel of a layer's method."""
    from dsl_backend.vllm_plugin.weight_only_linears.kernel import WeightOnlyKernel

    holder = holder_of(layer)
    holder.kernel = WeightOnlyKernel(holder.kernel, spec)


def served_layers() -> set[WeightOnlyGemmSpec]:
    """All kinds of layers that are served in this process."""
    return {spec for served in _served for spec in served.values()}


def compilation_key() -> str:
    """The served layers of each model of this process."""
    return key_of(_served)
