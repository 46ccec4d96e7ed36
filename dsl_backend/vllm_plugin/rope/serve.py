# SPDX-License-Identifier: Apache-2.0
"""Serves norms of heads, rotation and cache write of models whose attention dsl serves, by replacing a `forward`."""

import importlib
import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsl_backend.attention import rope_dispatch
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.op import NAMESPACE
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, options
from dsl_backend.vllm_plugin.rope import find, latent_find
from dsl_backend.vllm_plugin.rope.find import Rotation
from dsl_backend.vllm_plugin.served_layers import key_of, report_left, serve_each

# For each model that dsl serves in this process, in order: name of an attention layer -> how.
_served: list[dict[str, Rotation[Any, Any]]] = []


@dataclass(frozen=True)
class Kind:
    """A kind of attention layers.

    Attributes:
        what: is served, in the log.
        finds: the module that finds such layers and judges them: `find` or `latent_find`.
        serves: the module of this package that has their `forward` and their operator.
        attends: vLLM's operator that attends, at which it cuts graphs into pieces.
    """

    what: str
    finds: Any
    serves: str
    attends: str


DENSE = Kind(
    "rotary embeddings and cache writes",
    find,
    "dsl_backend.vllm_plugin.rope.method",
    "vllm::unified_attention_with_output",
)
LATENT = Kind(
    "norms, rotary embeddings and cache writes of MLA",
    latent_find,
    "dsl_backend.vllm_plugin.rope.latent_method",
    "vllm::unified_mla_attention_with_output",
)


def serve_rope(model: nn.Module, vllm_config: Any) -> None:
    """Serve every attention module of a model that can be served; log how many, and why others are not."""
    if not options.serves_attention(vllm_config) or vllm_config.model_config is None:
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    served = {name: how for kind in (DENSE, LATENT) for name, how in serve_kind(kind, model, vllm_config, target)}
    _served.append(served)
    ahead.compile_rope(vllm_config, {rotation.spec for rotation in served.values()})


def serve_kind(
    kind: Kind, model: nn.Module, vllm_config: Any, target: Target
) -> Iterable[tuple[str, Rotation[Any, Any]]]:
    """Serve the layers of a kind. Returns their names, and how."""
    found = list(kind.finds.modules(model))
    against_engine = kind.finds.reasons_against_engine(vllm_config, target) if found else ""
    served, left = serve_each(
        found,
        lambda pair: against_engine or kind.finds.judge(*pair, vllm_config, target),
        lambda pair, how: replace(pair[0], pair[1], how, kind),
    )
    if served:
        cut_graphs(vllm_config.compilation_config, kind)
    for (spec, kernel), count in Counter((one.spec, one.kernel) for one in served.values()).items():
        by = rope_dispatch.choose(spec, target, kernel).title
        logger.info("dsl serves %d %s, %s, on %s: by %s", count, kind.what, spec, target.arch, by)
    report_left(kind.what, left)
    return served.items()


def replace(parent: Any, attribute: str, rotation: Rotation[Any, Any], kind: Kind) -> None:
    """Have an attention module's `forward` call this package's."""
    forward = importlib.import_module(kind.serves).forward
    parent.dsl_form = rotation.form
    attention = getattr(parent, attribute)
    attention.dsl_rotation = rotation
    if kind is LATENT:
        # vLLM's Attention writes no cache without keys; MLA's is always given its latent rows.
        attention.impl.written_in_front = True
    parent.forward = types.MethodType(forward, parent)


def cut_graphs(compilation_config: Any, kind: Kind) -> None:
    """Have vLLM cut graphs at our operator where it cuts them at attention: what writes the cache is not captured.

    A piece is captured in a run without slots, so that it would write none when it is replayed.
    """
    operators = getattr(compilation_config, "splitting_ops", None)
    name = f"{NAMESPACE}::{importlib.import_module(kind.serves).NAME}"
    if operators and kind.attends in operators and name not in operators:
        operators.append(name)


def compilation_key() -> str:
    """The served layers of each model of this process."""
    return key_of(_served)
