# SPDX-License-Identifier: Apache-2.0
"""What serving fused layers, projections, routed experts and norms has in common."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from dsl_backend.log import logger

LayerT = TypeVar("LayerT")
HowT = TypeVar("HowT")


def serve_each(
    layers: Iterable[tuple[str, LayerT]],
    judge: Callable[[LayerT], HowT | str],
    replace: Callable[[LayerT, HowT], None],
) -> tuple[dict[str, HowT], Counter[str]]:
    """Serve every layer that can be served.

    Args:
        layers: with their names.
        judge: how a layer is served, or why it stays vLLM's.
        replace: what vLLM calls in a layer, by this package's.

    Returns:
        (name of a served layer -> how, reason -> layers that stay vLLM's)
    """
    served: dict[str, HowT] = {}
    left: Counter[str] = Counter()
    for name, layer in layers:
        found = judge(layer)
        if isinstance(found, str):
            left[found] += 1
        else:
            replace(layer, found)
            served[name] = found
    return served, left


def holder_of(layer: Any, base: type | None) -> Any:
    """What has a linear layer's kernel as `kernel`: its method, or the scheme of a compressed-tensors layer; None.

    Args:
        base: vLLM's class of such kernels; None in versions without one.
    """
    for one in (layer.quant_method, getattr(layer, "scheme", None)):
        if base is not None and isinstance(getattr(one, "kernel", None), base):
            return one
    return None


def layers_of(model: nn.Module, base: type | None, ours: type) -> Iterator[tuple[str, Any]]:
    """The linear layers of a model whose kernel is one of vLLM's class and not one of ours, with their names."""
    from vllm.model_executor.layers.linear import LinearBase

    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            holder = holder_of(module, base)
            if holder is not None and not isinstance(holder.kernel, ours):
                yield name, module


def report_left(what: str, left: Counter[str]) -> None:
    """Log one line for each reason why layers stay vLLM's."""
    for reason, count in left.items():
        logger.info("vLLM serves %d %s: %s", count, what, reason)


def key_of(models: Iterable[Mapping[str, object]]) -> str:
    """The served layers of each model, as a part of the keys of vLLM's compiled graphs."""
    return " | ".join("; ".join(f"{name}: {how}" for name, how in served.items()) for served in models)
