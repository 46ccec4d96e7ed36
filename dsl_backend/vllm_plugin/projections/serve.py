# SPDX-License-Identifier: Apache-2.0
"""Serves the projections of models whose attention dsl serves, by replacing the method of each layer.

It runs after gate/up projections were fused with their activations. Weights and their loaders do not change.
"""

from collections import Counter
from typing import Any

import torch
from torch import nn

from dsl_backend.linear import dispatch, tuned
from dsl_backend.linear.spec import LinearSpec
from dsl_backend.linear.tuned import MOST_ROWS
from dsl_backend.log import logger
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import explained
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin import ahead, compat, options
from dsl_backend.vllm_plugin.options import ServedBy
from dsl_backend.vllm_plugin.projections.find import OWN_KERNEL, judge, projections, reasons_against_engine
from dsl_backend.vllm_plugin.served_layers import key_of, report_left, serve_each

# For each model that dsl serves in this process, in order: name of a layer -> its spec.
_served: list[dict[str, LinearSpec]] = []


def serve_projections(model: nn.Module, vllm_config: Any) -> None:
    """Serve every projection of a model that can be served; log how many, and why others are not."""
    if not options.serves_attention(vllm_config):
        return
    target = targets.detect(torch.device(vllm_config.device_config.device))
    against_engine = reasons_against_engine(vllm_config)
    measured = options.of(vllm_config).projections is ServedBy.MEASURED
    served, left = serve_each(
        projections(model),
        lambda layer: against_engine or judge(layer, vllm_config, target),
        lambda layer, spec: replace(layer, measured, spec.batch_invariant),
    )
    _served.append(served)
    ahead.compile_linear(vllm_config, served.values(), most_rows=most_rows(compat.is_batch_invariant()))
    kinds = Counter((type(model.get_submodule(name)).__name__, spec) for name, spec in served.items())
    report(kinds, left, target, measured)


def replace(layer: Any, measured: bool, batch_invariant: bool) -> None:
    """Replace the method of a layer, and have the layer's `forward` call it."""
    from vllm.model_executor.layers.linear import LinearBase

    from dsl_backend.vllm_plugin.projections.method import EmbeddingMethod, LinearMethod

    layer.quant_method = (LinearMethod if isinstance(layer, LinearBase) else EmbeddingMethod)(measured, batch_invariant)
    if getattr(layer, OWN_KERNEL, False):
        setattr(layer, OWN_KERNEL, False)


def report(kinds: Counter[tuple[str, LinearSpec]], left: Counter[str], target: Target, measured: bool) -> None:
    """Log what is served and what is not: one line for each kind of layer, and one for each reason."""
    for (kind, spec), count in kinds.items():
        by = explained([dispatch.judge(spec, target)], [dispatch.choose(spec, target).title])
        found = tuned.faster(spec.n, spec.k, spec.dtypes.x, target) if measured else []
        rows = ", ".join(f"{one.least_rows} to {one.most_rows}" for one in found) or f"1 to {MOST_ROWS}"
        rows = "all" if spec.batch_invariant else rows
        logger.info(
            "dsl serves %d projections (%s), %s, for %s rows on %s: by %s", count, kind, spec, rows, target.arch, by
        )
    report_left("projections", left)


def most_rows(batch_invariant: bool) -> int | None:
    """How many rows this package's kernels multiply; None for any number."""
    return None if batch_invariant else MOST_ROWS


def compilation_key() -> str:
    """The served layers of each model of this process."""
    return key_of(_served)


def served_specs() -> set[LinearSpec]:
    """All kinds of projections that are served in this process."""
    return {spec for served in _served for spec in served.values()}
