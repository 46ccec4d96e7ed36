# SPDX-License-Identifier: Apache-2.0
"""Serves norms of heads, rotation and cache write of models whose attention dsl serves, by replacing a `forward`."""

import types
from collections import Counter
from typing import Any

import torch
from torch import nn

from dsl_backend.attention import rope_dispatch
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.op import NAMESPACE
from dsl_backend.vllm_plugin import ahead, options
from dsl_backend.vllm_plugin.rope.find import Rotation, judge, modules, reasons_against_engine
from dsl_backend.vllm_plugin.served_layers import key_of, report_left, serve_each

# vLLM's operator that attends, at which it cuts graphs into pieces.
ATTENDS = "vllm::unified_attention_with_output"
# For each model that dsl serves in this process, in order: name of an attention layer -> how.
_served: list[dict[str, Rotation]] = []


def serve_rope(model: nn.Module, vllm_config: Any) -> None:
    """Serve every attention module of a model that can be served; log how many, and why others are not."""
    if not options.serves_attention(vllm_config) or vllm_config.model_config is None:
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_engine = reasons_against_engine(vllm_config, target)
    served, left = serve_each(
        modules(model),
        lambda pair: against_engine or judge(*pair, vllm_config, target),
        lambda pair, how: replace(*pair, how),
    )
    _served.append(served)
    if served:
        cut_graphs(vllm_config.compilation_config)
    ahead.compile_rope(vllm_config, {rotation.spec for rotation in served.values()})
    for (spec, kernel), count in Counter((one.spec, one.kernel) for one in served.values()).items():
        by = rope_dispatch.choose(spec, target, kernel).title
        logger.info("dsl serves %d rotary embeddings and cache writes, %s, on %s: by %s", count, spec, target.arch, by)
    report_left("rotary embeddings and cache writes", left)


def replace(parent: Any, attribute: str, rotation: Rotation) -> None:
    """Have an attention module's `forward` call this package's."""
    from dsl_backend.vllm_plugin.rope.method import forward

    parent.dsl_form = rotation.form
    getattr(parent, attribute).dsl_rotation = rotation
    parent.forward = types.MethodType(forward, parent)


def cut_graphs(compilation_config: Any) -> None:
    """Have vLLM cut graphs at our operator where it cuts them at attention: what writes the cache is not captured.

    A piece is captured in a run without slots, so that it would write none when it is replayed.
    """
    from dsl_backend.vllm_plugin.rope.method import NAME

    operators = getattr(compilation_config, "splitting_ops", None)
    name = f"{NAMESPACE}::{NAME}"
    if operators and ATTENDS in operators and name not in operators:
        operators.append(name)


def compilation_key() -> str:
    """The served layers of each model of this process."""
    return key_of(_served)
